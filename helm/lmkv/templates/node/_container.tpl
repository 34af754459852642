{{/* The node's container, with the name of its instance: of the host for one node a host, of the pod for a sidecar.
Takes a dict of root, instance (the field that names it) and role (of handoffs; empty: as configured). */}}
{{- define "lmkv.nodeContainer" -}}
{{- $root := .root -}}
{{- $values := $root.Values.node -}}
name: node
{{ include "lmkv.image" (list $root $values.image) }}
command: [lmkv, node, --config, /etc/lmkv/lmkv.yaml]
{{ include "lmkv.env" (list $root $values (include "lmkv.nodeVariables" .)) }}
ports:
  - name: p2p
    containerPort: {{ $values.p2pPort }}
  - name: transfer
    containerPort: {{ $values.transferPort }}
  - name: node-metrics
    containerPort: {{ $values.metricsPort }}
{{- range $probe, $often := dict "startupProbe" (dict "periodSeconds" 1 "failureThreshold" 60) "livenessProbe" (dict "periodSeconds" 10) "readinessProbe" (dict "periodSeconds" 5) }}
{{ $probe }}:
  {{- if and $root.Values.tls.enabled $root.Values.tls.mutual }}
  tcpSocket:  # probes have no certificate to show
    port: p2p
  {{- else }}
  grpc:
    port: {{ $values.p2pPort }}
  {{- end }}
  timeoutSeconds: 5
  {{- toYaml $often | nindent 2 }}
{{- end }}
resources:
  {{- include "lmkv.nodeResources" $values | nindent 2 }}
securityContext:
  {{- $context := deepCopy $root.Values.securityContext }}
  {{- $capabilities := default dict $context.capabilities }}
  {{- $added := concat (default list $capabilities.add) $values.capabilities (ternary (list "IPC_LOCK") list (ne $values.rdma.resource "")) }}
  {{- with $added }}
  {{- $_ := set $context "capabilities" (set $capabilities "add" (uniq .)) }}
  {{- end }}
  {{- toYaml $context | nindent 2 }}
volumeMounts:
  {{- include "lmkv.clientMounts" $root | replace "name: config" "name: node-config" | nindent 2 }}
  - name: runtime
    mountPath: /run/lmkv
  - name: node-tmp
    mountPath: /tmp
  {{- if $values.poolVolume }}
  - name: pool
    mountPath: /pool
  {{- end }}
  {{- if $values.diskVolume }}
  - name: disk
    mountPath: /disk
  {{- end }}
{{- end -}}

{{/* What the node is told of its pod. Takes what its container takes. */}}
{{- define "lmkv.nodeVariables" -}}
{{- $values := .root.Values.node -}}
- name: LMKV_INSTANCE_ID
  valueFrom:
    fieldRef:
      fieldPath: {{ .instance }}
- name: LMKV_P2P_HOST
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
{{- with .role }}
- name: LMKV_PD_ROLE
  value: {{ . }}
{{- end }}
{{- if has $values.transferChannel (list "auto" "nixl") }}
- name: UCX_TCP_PORT_RANGE
  value: {{ printf "%v-%v" (index $values.nixlPorts 0) (index $values.nixlPorts 1) }}
{{- end }}
{{- end -}}

{{/* Memory follows from the pool's size: it is all taken, and charged to this container. Takes the node's values. */}}
{{- define "lmkv.nodeResources" -}}
{{- $pool := mulf .maxLocalCpuSize 1024 | ceil | int -}}
{{- $overhead := mulf .memoryOverhead 1024 | ceil | int -}}
{{- $sizes := dict -}}
{{- $medium := dig "emptyDir" "medium" "" .poolVolume -}}
{{- if hasPrefix "HugePages-" $medium -}}
{{- $_ := set $sizes "memory" (printf "%dMi" $overhead) -}}
{{- $_ := set $sizes (printf "hugepages-%s" (trimPrefix "HugePages-" $medium)) (printf "%dMi" $pool) -}}
{{- else -}}
{{- $_ := set $sizes "memory" (printf "%dMi" (add $pool $overhead)) -}}
{{- end -}}
{{- if .rdma.resource -}}
{{- $_ := set $sizes .rdma.resource (.rdma.count | int) -}}
{{- end -}}
{{- $resources := deepCopy .resources -}}
{{- range list "requests" "limits" -}}
{{- $_ := set $resources . (merge (deepCopy (default dict (get $resources .))) $sizes) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Volumes of the node's container but for its runtime folder. */}}
{{- define "lmkv.nodeVolumes" -}}
{{- $values := .Values.node -}}
{{- include "lmkv.configVolume" (list . "node") | replace "name: config" "name: node-config" }}
{{- with include "lmkv.clientVolumes" . | trim }}
{{ . }}
{{- end }}
- name: node-tmp
  emptyDir:
    sizeLimit: 64Mi
{{- with $values.poolVolume }}
- name: pool
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.diskVolume }}
- name: disk
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The folder of hosts that holds this release's sockets. */}}
{{- define "lmkv.hostRuntimeDir" -}}
{{ printf "%s/%s-%s" (trimSuffix "/" .Values.node.hostRuntimeDir) .Release.Namespace (include "lmkv.fullname" .) }}
{{- end -}}
