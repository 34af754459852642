{{/* Names and addresses. */}}

{{/* The first part of all names. Names of Services have no dots, which those of releases may have, and begin with a letter. */}}
{{- define "lmkv.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- $full = default $full .Values.fullnameOverride | replace "." "-" -}}
{{- if regexMatch "^[0-9]" $full -}}{{- $full = printf "lmkv-%s" $full -}}{{- end -}}
{{- regexReplaceAll "-+$" (trunc 40 $full) "" -}}
{{- end -}}

{{/* Labels that a selector may name: they never change. Takes a list of root and component. */}}
{{- define "lmkv.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of a resource. Takes a list of root and component. */}}
{{- define "lmkv.labels" -}}
{{- $root := index . 0 -}}
{{ include "lmkv.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
app.kubernetes.io/part-of: lmkv
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Name, namespace, labels and annotations of a component's resource. Takes a list of root and component, and optionally
a dict of the name, labels and annotations of this resource alone. */}}
{{- define "lmkv.metadata" -}}
{{- $root := index . 0 -}}
{{- $own := dict -}}
{{- if gt (len .) 2 -}}{{- $own = index . 2 -}}{{- end -}}
name: {{ default (printf "%s-%s" (include "lmkv.fullname" $root) (index . 1)) $own.name }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- merge (include "lmkv.labels" . | fromYaml) (deepCopy (default dict $own.labels)) (default dict $root.Values.commonLabels) | toYaml | nindent 2 }}
{{- with merge (deepCopy (default dict $own.annotations)) (default dict $root.Values.commonAnnotations) }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "lmkv.serviceAccountName" -}}
{{- default (ternary (include "lmkv.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end -}}

{{/* An image with its pull policy. Takes a list of root and image values. */}}
{{- define "lmkv.image" -}}
{{- $root := index . 0 -}}
{{- $image := index . 1 -}}
{{- $tag := coalesce $image.tag $root.Values.image.tag $root.Chart.AppVersion -}}
{{- $path := printf "%s:%s" $image.repository $tag -}}
{{- with $root.Values.image.registry }}{{ $path = printf "%s/%s" (trimSuffix "/" .) $path }}{{ end -}}
image: {{ $path }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
{{- end -}}

{{/* host:port of the coordinators. It is one name for all, which clients resolve repeatedly, so that no client restarts
when the number of coordinators changes. */}}
{{- define "lmkv.coordinatorAddress" -}}
{{- printf "%s-coordinator-headless.%s.svc:%v" (include "lmkv.fullname" .) .Release.Namespace .Values.coordinator.port -}}
{{- end -}}

{{/* The DNS name of the certificate of all nodes: pods have no fixed names. */}}
{{- define "lmkv.peerName" -}}
{{- default (printf "%s-node" (include "lmkv.fullname" .)) .Values.tls.peerName -}}
{{- end -}}

{{/* Secret of the coordinator's certificate. */}}
{{- define "lmkv.serverSecret" -}}
{{- default (printf "%s-server-tls" (include "lmkv.fullname" .)) .Values.tls.serverSecret -}}
{{- end -}}

{{/* Secret of the certificate of nodes and proxies. */}}
{{- define "lmkv.clientSecret" -}}
{{- default (printf "%s-client-tls" (include "lmkv.fullname" .)) .Values.tls.clientSecret -}}
{{- end -}}

{{/* Whether any engine has this role: its own name, or nothing. Takes a list of root and role. */}}
{{- define "lmkv.hasRole" -}}
{{- $role := index . 1 -}}
{{- range (index . 0).Values.engines.groups }}{{ if eq (default "both" .role) $role }}{{ $role }}{{ end }}{{ end -}}
{{- end -}}

{{/* Name of the workload of a group of engines. Takes a list of root and group. A LeaderWorkerSet has a headless Service
of its own name, so that it cannot have the name of the group's Service. */}}
{{- define "lmkv.engineWorkload" -}}
{{- $group := index . 1 -}}
{{ include "lmkv.fullname" (index . 0) }}-engine-{{ $group.name }}{{ if gt (int (default 1 $group.hosts)) 1 }}-hosts{{ end }}
{{- end -}}

{{/* Hosts of all engines of a role, as JSON: as many as the largest number of replicas. Takes a list of root and role. */}}
{{- define "lmkv.engineHosts" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- $hosts := list -}}
{{- range $group := $root.Values.engines.groups -}}
{{- if eq (default "both" $group.role) $role -}}
{{- $name := include "lmkv.engineWorkload" (list $root $group) -}}
{{- $service := gt (int (default 1 $group.hosts)) 1 | ternary $name (printf "%s-headless" $name) -}}
{{- range $index := until (int (dig "autoscaling" "maxReplicas" (dig "replicas" 1 $group) $group)) -}}
{{- $hosts = append $hosts (printf "%s-%d.%s.%s.svc" $name $index $service $root.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $hosts -}}
{{- end -}}
