{{/* Where the pool's memory comes from, and whether it outlives the node. */}}

{{/* Medium of `poolVolume`, if it is an emptyDir. */}}
{{- define "lmkv.poolMedium" -}}
{{- default "" (default dict (default dict .Values.node.poolVolume).emptyDir).medium -}}
{{- end -}}

{{/* Size of the pool's huge pages, such as 2Mi; nothing: it has none. Kubernetes takes the size from the pod's resources
where the medium names none. */}}
{{- define "lmkv.hugePageSize" -}}
{{- $medium := include "lmkv.poolMedium" . -}}
{{- if eq $medium "HugePages" -}}2Mi{{- else if hasPrefix "HugePages-" $medium -}}{{ trimPrefix "HugePages-" $medium }}{{- end -}}
{{- end -}}

{{/* KiB of a size such as 64Ki, 2Mi or 1Gi; empty: not a size, which `lmkv.refuse` rejects. */}}
{{- define "lmkv.kibibytes" -}}
{{- if regexMatch "^[1-9][0-9]*(Ki|Mi|Gi|Ti)$" . -}}
{{- $unit := regexFind "[KMGT]i$" . -}}
{{- mul (trimSuffix $unit . | int) (get (dict "Ki" 1 "Mi" 1024 "Gi" 1048576 "Ti" 1073741824) $unit) -}}
{{- end -}}
{{- end -}}

{{/* Whether the pool outlives the node's process. Huge pages of a pod are released with it. */}}
{{- define "lmkv.poolPersists" -}}
{{- if and .Values.node.persistPool (not (include "lmkv.hugePageSize" .)) -}}true{{- end -}}
{{- end -}}

{{/* The source of the pool's volume; nothing: there is none, or it is a claim of each pod's own. */}}
{{- define "lmkv.poolVolume" -}}
{{- if .Values.node.poolVolume -}}
{{- toYaml .Values.node.poolVolume -}}
{{- else if and .Values.node.persistPool (not .Values.node.poolClaim) -}}
{{- if eq .Values.node.mode "daemonSet" -}}
hostPath:
  path: {{ include "lmkv.hostPoolDir" . }}
  type: DirectoryOrCreate
{{- else -}}
emptyDir:
  medium: Memory
  sizeLimit: {{ add (mulf .Values.node.maxLocalCpuSize 1034 | ceil | int) 16 }}Mi  # 1 % for the list of its chunks
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Templates of the claims of each sidecar; nothing: it has none. */}}
{{- define "lmkv.nodeClaims" -}}
{{- $claims := list -}}
{{- range list "pool" "disk" -}}
{{- $spec := get $.Values.node (printf "%sClaim" .) -}}
{{- if $spec -}}{{- $claims = append $claims (dict "metadata" (dict "name" .) "spec" $spec) -}}{{- end -}}
{{- end -}}
{{- if $claims -}}{{- toYaml $claims -}}{{- end -}}
{{- end -}}

{{- define "lmkv.hasPoolVolume" -}}
{{- if or .Values.node.poolClaim (include "lmkv.poolVolume" .) -}}true{{- end -}}
{{- end -}}

{{/* The folder of hosts that holds this release's pools. It lies in the folder of all hosts' shared memory itself: a
subfolder of a folder that any user may create could be a link to elsewhere. */}}
{{- define "lmkv.hostPoolDir" -}}
{{ printf "%s/lmkv-%s-%s" (trimSuffix "/" .Values.node.hostPoolDir) .Release.Namespace (include "lmkv.fullname" .) }}
{{- end -}}

{{/* Whether pools that an earlier setting kept on hosts are removed. */}}
{{- define "lmkv.dropsPool" -}}
{{- if not (or .Values.node.persistPool .Values.node.poolVolume (eq .Values.node.mode "sidecar")) -}}true{{- end -}}
{{- end -}}
