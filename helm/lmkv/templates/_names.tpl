{{/* Names and addresses. */}}

{{- define "lmkv.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
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

{{/* Name, namespace and labels of a component's resource. Takes a list of root and component. */}}
{{- define "lmkv.metadata" -}}
{{- $root := index . 0 -}}
name: {{ include "lmkv.fullname" $root }}-{{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "lmkv.labels" . | nindent 2 }}
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

{{/* Hosts of all engines of a role, as JSON. Takes a list of root and role. */}}
{{- define "lmkv.engineHosts" -}}
{{- $root := index . 0 -}}
{{- $role := index . 1 -}}
{{- $hosts := list -}}
{{- range $group := $root.Values.engines.groups -}}
{{- if eq (default "both" $group.role) $role -}}
{{- $name := printf "%s-engine-%s" (include "lmkv.fullname" $root) $group.name -}}
{{- range $index := until (int (dig "replicas" 1 $group)) -}}
{{- $hosts = append $hosts (printf "%s-%d.%s-headless.%s.svc" $name $index $name $root.Release.Namespace) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $hosts -}}
{{- end -}}
