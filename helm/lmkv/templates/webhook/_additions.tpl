{{/* What the webhook adds to pods of engines that others create. It is made from the templates of the chart's own engines and
nodes, so that both are always the same, with two differences: settings are variables, because pods in other namespaces
cannot mount this release's ConfigMaps, and names of volumes and containers have the prefix `lmkv-`. */}}

{{/* Additions for a role, as JSON. Takes a list of root and role. */}}
{{- define "lmkv.podAdditions" -}}
{{- $root := index . 0 -}}
{{- $values := $root.Values -}}
{{- $role := index . 1 -}}
{{- $sidecar := eq $values.node.mode "sidecar" -}}
{{- $env := list -}}
{{- range include "lmkv.engineVariables" (dict "root" $root) | fromYamlArray -}}
{{- if not (has .name (list "HOME" "HF_HOME" "LMKV_CONFIG_FILE")) -}}{{- $env = append $env . -}}{{- end -}}
{{- end -}}
{{- $env = concat $env (include "lmkv.settingsVariables" (include "lmkv.engineSettings" $root) | fromJsonArray) -}}
{{- $mounts := list (dict "name" "lmkv-runtime" "mountPath" "/run/lmkv" "readOnly" true) -}}
{{- $volumes := list -}}
{{- $nodes := list -}}
{{- if $values.auth.tokensSecret -}}
{{- $mounts = append $mounts (dict "name" "lmkv-token" "mountPath" "/etc/lmkv-token" "readOnly" true) -}}
{{- end -}}
{{- if $sidecar -}}
{{- $volumes = append (include "lmkv.nodeVolumes" $root | fromYamlArray) (dict "name" "runtime" "emptyDir" dict) -}}
{{- $nodes = list (include "lmkv.addedNode" . | fromJson) -}}
{{- else -}}
{{- $volumes = list (dict "name" "runtime" "hostPath" (dict "path" (include "lmkv.hostRuntimeDir" $root) "type" "DirectoryOrCreate")) -}}
{{- if $values.auth.tokensSecret -}}
{{- $volumes = concat $volumes (include "lmkv.tokenVolume" $values.auth.engineSecret | fromYamlArray) -}}
{{- end -}}
{{- end -}}
{{- $added := list -}}
{{- range $volumes -}}
{{- if ne .name "node-config" -}}
{{- if .secret -}}{{- $_ := set .secret "defaultMode" 292 -}}{{- end -}}  {{- /* 0444: the pod's fsGroup is not the chart's */ -}}
{{- $added = append $added (set . "name" (printf "lmkv-%s" .name)) -}}
{{- end -}}
{{- end -}}
{{- $config := printf "{\"kv_connector\": \"LMKVConnector\", \"kv_role\": \"%s\"}" (get (dict "both" "kv_both" "prefill" "kv_producer" "decode" "kv_consumer") $role) -}}
{{- toJson (dict "user" (int $values.podSecurityContext.runAsUser) "args" (list "--kv-transfer-config" $config) "env" $env "volume_mounts" $mounts "volumes" $added "init_containers" $nodes) -}}
{{- end -}}

{{/* The node as a sidecar of such a pod, as JSON. Takes a list of root and role. */}}
{{- define "lmkv.addedNode" -}}
{{- $root := index . 0 -}}
{{- $role := get (dict "both" "" "prefill" "sender" "decode" "receiver") (index . 1) -}}
{{- $node := include "lmkv.nodeContainer" (dict "root" $root "instance" "metadata.name" "role" $role) | fromYaml -}}
{{- $env := list -}}
{{- range $node.env -}}
{{- if ne .name "OTEL_EXPORTER_OTLP_ENDPOINT" -}}{{- $env = append $env . -}}
{{- else if not (dig "valueFrom" "configMapKeyRef" "" .) -}}{{- $env = append $env . -}}
{{- else if $root.Values.otlpEndpoint -}}{{- $env = append $env (dict "name" .name "value" $root.Values.otlpEndpoint) -}}
{{- end -}}
{{- end -}}
{{- $settings := printf "%s\n%s" (include "lmkv.nodeSettings" $root) (include "lmkv.loggingConfig" $root) -}}
{{- $mounts := list -}}
{{- range $node.volumeMounts -}}
{{- if ne .name "node-config" -}}{{- $mounts = append $mounts (set . "name" (printf "lmkv-%s" .name)) -}}{{- end -}}
{{- end -}}
{{- $context := merge $node.securityContext (pick $root.Values.podSecurityContext "runAsUser" "runAsGroup" "runAsNonRoot" "seccompProfile") -}}
{{- $own := dict "name" "lmkv-node" "command" (list "lmkv" "node") "restartPolicy" "Always" "volumeMounts" $mounts "securityContext" $context -}}
{{- $_ := set $own "env" (concat $env (include "lmkv.settingsVariables" $settings | fromJsonArray)) -}}
{{- toJson (merge $own $node) | replace "--config /etc/lmkv/lmkv.yaml " "" -}}  {{- /* in the command that drains it */ -}}
{{- end -}}

{{/* Variables, as JSON, of settings that are otherwise in a file. Takes their YAML. */}}
{{- define "lmkv.settingsVariables" -}}
{{- $variables := list -}}
{{- range $key, $value := fromYaml . -}}
{{- $text := kindIs "string" $value | ternary $value (toJson $value) -}}
{{- $variables = append $variables (dict "name" (printf "LMKV_%s" (upper $key)) "value" $text) -}}
{{- end -}}
{{- toJson $variables -}}
{{- end -}}

{{/* The file of all additions. Takes root. */}}
{{- define "lmkv.webhookAdditions" -}}
{{- $roles := eq .Values.node.mode "sidecar" | ternary (list "both" "prefill" "decode") (list "both") -}}
{{- $additions := dict -}}
{{- range $roles -}}{{- $_ := set $additions . (include "lmkv.podAdditions" (list $ .) | fromJson) -}}{{- end -}}
{{- toYaml $additions -}}
{{- end -}}

{{/* The secret with the certificate of the webhook. */}}
{{- define "lmkv.webhookSecret" -}}
{{- .Values.webhook.tlsSecret | default (printf "%s-webhook-tls" (include "lmkv.fullname" .)) -}}
{{- end -}}
