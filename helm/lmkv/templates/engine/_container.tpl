{{/* Environment variables of an engine: the address of its node, by the name of the node. Takes the same dict as its pod. */}}
{{- define "lmkv.engineVariables" -}}
{{- if eq (default "" .place) "leader" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{ end -}}
{{- $root := .root -}}
- name: LMKV_CONFIG_FILE
  value: /etc/lmkv/lmkv.yaml
- name: NODE_INSTANCE_ID
  valueFrom:
    fieldRef:
      fieldPath: {{ ternary "metadata.name" "spec.nodeName" (eq $root.Values.node.mode "sidecar") }}
- name: LMKV_NODE_ADDRESS
  value: /run/lmkv/$(NODE_INSTANCE_ID)/engine.sock
{{ with include "lmkv.secretVariable" (list "LMKV_CLUSTER_SECRET" $root.Values.clusterSecret) -}}
{{ . }}
{{ end -}}
- name: HOME
  value: /home/lmkv
- name: HF_HOME
  value: /models
{{- end -}}

{{/* Arguments of an engine whose ranks are on several hosts: data-parallel ranks, each with all tensor-parallel ranks on its
own host, because these share one node. The leader binds its address, which must be no name. Takes a list of group and
place. */}}
{{- define "lmkv.hostsArguments" -}}
{{- $group := index . 0 -}}
{{- $local := default 1 $group.ranksPerHost | int -}}
- --data-parallel-size
- {{ mul $group.hosts $local | quote }}
- --data-parallel-size-local
- {{ $local | quote }}
- --data-parallel-address
- $({{ ternary "POD_IP" "LWS_LEADER_ADDRESS" (eq (index . 1) "leader") }})
{{- end -}}

{{/* Template of an engine's pods. Takes a dict of root, group and place: leader or worker in a LeaderWorkerSet; none: a pod
is a whole engine. Workers serve no API. */}}
{{- define "lmkv.enginePod" -}}
{{- $root := .root -}}
{{- $group := .group -}}
{{- $values := $root.Values.engines -}}
{{- $component := printf "engine-%s" $group.name -}}
{{- $role := default "both" $group.role -}}
{{- $place := default "" .place -}}
{{- $sidecar := eq $root.Values.node.mode "sidecar" -}}
{{- $settings := print (include "lmkv.engineSettings" $root) (ternary (include "lmkv.nodeSettings" $root) "" $sidecar) -}}
metadata:
  {{- include "lmkv.podMetadata" (dict "root" $root "component" $component "settings" $settings "values" $values "labels" (ternary (dict "lmkv/engine" "true" "lmkv/place" $place) (dict "lmkv/engine" "true") (ne $place ""))) | nindent 2 }}
spec:
  {{- include "lmkv.pod" (list $root $values) | nindent 2 }}
  {{- include "lmkv.spread" (list $root $component) | nindent 2 }}
  terminationGracePeriodSeconds: {{ $sidecar | ternary (include "lmkv.nodeGracePeriod" (list $root $values.stopTimeout)) (add $values.stopTimeout 15) }}
  {{- if $sidecar }}
  initContainers:
    {{- with include "lmkv.ownFolders" $root }}
    - {{ . | nindent 6 | trim }}
    {{- end }}
    - {{ include "lmkv.nodeContainer" (dict "root" $root "instance" "metadata.name" "role" (get (dict "both" "" "prefill" "sender" "decode" "receiver") $role)) | nindent 6 | trim }}
      restartPolicy: Always
  {{- end }}
  containers:
    - name: engine
      {{- include "lmkv.image" (list $root $values.image) | nindent 6 }}
      command:
        {{- if eq $place "worker" }}
        - sh
        - -c
        - {{ printf "exec vllm serve \"$@\" --headless --data-parallel-start-rank $((LWS_WORKER_INDEX * %v))" (default 1 $group.ranksPerHost | int) | quote }}
        - sh
        {{- else }}
        - vllm
        - serve
        {{- end }}
        - {{ $group.model | quote }}
        - --host
        - {{ $root.Values.bindAddress | quote }}
        - --port
        - {{ $values.port | quote }}
        - --shutdown-timeout
        - {{ $values.stopTimeout | quote }}
        - --kv-transfer-config
        - '{"kv_connector": "LMKVConnector", "kv_role": {{ get (dict "both" "kv_both" "prefill" "kv_producer" "decode" "kv_consumer") $role | quote }}}'
        {{- if $place }}
        {{- include "lmkv.hostsArguments" (list $group $place) | nindent 8 }}
        {{- end }}
        {{- range dig "args" $values.args $group }}
        - {{ . | quote }}
        {{- end }}
      {{- $map := printf "%s-engine" (include "lmkv.fullname" $root) }}
      {{- include "lmkv.env" (dict "root" $root "values" "engines" "own" (include "lmkv.engineVariables" .) "otlpFrom" $map) | nindent 6 }}
      {{- if ne $place "worker" }}
      ports:
        - name: http
          containerPort: {{ $values.port }}
      {{- range $probe, $often := dict "startupProbe" (dict "periodSeconds" 5 "failureThreshold" (div $values.startTimeout 5)) "livenessProbe" (dict "periodSeconds" 10 "failureThreshold" 6) "readinessProbe" (dict "periodSeconds" 5) }}
      {{ $probe }}:
        httpGet:
          port: http
          path: /health
        timeoutSeconds: 5
        {{- toYaml $often | nindent 8 }}
      {{- end }}
      {{- end }}
      resources:
        {{- toYaml (default $values.resources $group.resources) | nindent 8 }}
      securityContext:
        {{- toYaml $root.Values.securityContext | nindent 8 }}
      volumeMounts:
        - name: config
          mountPath: /etc/lmkv
          readOnly: true
        - name: runtime
          mountPath: /run/lmkv
          readOnly: true
        {{- if $root.Values.auth.tokensSecret }}
        - name: token
          mountPath: /etc/lmkv-token
          readOnly: true
        {{- end }}
        - name: home
          mountPath: /home/lmkv
        - name: tmp
          mountPath: /tmp
        - name: models
          mountPath: /models
        - name: shared-memory
          mountPath: /dev/shm
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    {{- include "lmkv.configVolume" (list $root "engine") | nindent 4 }}
    {{- if $sidecar }}
    {{- include "lmkv.nodeVolumes" $root | nindent 4 }}
    - name: runtime
      emptyDir: {}
    {{- else }}
    - name: runtime
      hostPath:
        path: {{ include "lmkv.hostRuntimeDir" $root }}
        type: DirectoryOrCreate
    {{- if $root.Values.auth.tokensSecret }}
    {{- include "lmkv.tokenVolume" $root.Values.auth.engineSecret | nindent 4 }}
    {{- end }}
    {{- end }}
    - name: home
      emptyDir: {}
    - name: tmp
      emptyDir: {}
    - name: models
      {{- toYaml (default (dict "emptyDir" dict) $values.modelVolume) | nindent 6 }}
    - name: shared-memory
      emptyDir:
        medium: Memory
        sizeLimit: {{ mulf $values.sharedMemory 1024 | ceil | int }}Mi
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
