{{/* The node's container, with the name of its instance: of the host for one node a host, of the pod for a sidecar.
Takes a dict of root, instance (the field that names it) and role (of handoffs; empty: as configured). */}}
{{- define "lmkv.nodeContainer" -}}
{{- $root := .root -}}
{{- $values := $root.Values.node -}}
name: node
{{ include "lmkv.image" (list $root $values.image) }}
command: [lmkv, node, --config, /etc/lmkv/lmkv.yaml]
{{- $map := printf "%s-node" (include "lmkv.fullname" $root) }}
{{ include "lmkv.env" (dict "root" $root "values" "node" "own" (include "lmkv.nodeVariables" .) "otlpFrom" $map) }}
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
{{- if $values.drain.enabled }}
lifecycle:
  preStop:
    exec:
      command: [sh, -c, {{ include "lmkv.drainCommand" $root | quote }}]
{{- end }}
resources:
  {{- include "lmkv.nodeResources" $root | nindent 2 }}
securityContext:
  {{- $context := deepCopy (default dict $root.Values.securityContext) }}
  {{- $capabilities := default dict $context.capabilities }}
  {{- $added := concat (default list $capabilities.add) (default list $values.capabilities) (ternary (list "IPC_LOCK") list (ne $values.rdma.resource "")) }}
  {{- with $added }}
  {{- $_ := set $context "capabilities" (set $capabilities "add" (uniq .)) }}
  {{- end }}
  {{- toYaml $context | nindent 2 }}
volumeMounts:
  {{- include "lmkv.clientMounts" $root | replace "name: config" "name: node-config" | nindent 2 }}
  {{- if include "lmkv.operatorToken" $root }}
  - name: operator-token
    mountPath: /etc/lmkv-operator-token
    readOnly: true
  {{- end }}
  {{- if $values.encryptionKeysSecret }}
  - name: encryption-keys
    mountPath: /etc/lmkv-encryption
    readOnly: true
  {{- end }}
  - name: runtime
    mountPath: /run/lmkv
  - name: node-tmp
    mountPath: /tmp
  {{- if include "lmkv.hasPoolVolume" $root }}
  - name: pool
    mountPath: /pool
  {{- end }}
  {{- if or $values.diskVolume $values.diskClaim }}
  - name: disk
    mountPath: /disk
  {{- end }}
  {{- if $values.remote.volume }}
  - name: remote
    mountPath: /remote
  {{- end }}
  {{- with $values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* The shell command that drains the node: Kubernetes does not expand variables in the commands of hooks. `timeout`
bounds it if the coordinator does not respond. Kubernetes stops the container regardless of its exit code. */}}
{{- define "lmkv.drainCommand" -}}
{{- $drain := .Values.node.drain -}}
{{- if include "lmkv.operatorToken" . }}LMKV_AUTH_TOKEN_FILE=/etc/lmkv-operator-token/token {{ end -}}
timeout {{ $drain.timeoutSeconds }} lmkv drain "$LMKV_INSTANCE_ID" --config /etc/lmkv/lmkv.yaml --timeout {{ $drain.timeoutSeconds }}
{{- if $drain.evict }} --evict{{ end -}}
{{- end -}}

{{/* Secret with the token by which nodes are drained; nothing: none is needed. */}}
{{- define "lmkv.operatorToken" -}}
{{- if and .Values.node.drain.enabled .Values.auth.tokensSecret -}}{{ .Values.auth.operatorSecret }}{{- end -}}
{{- end -}}

{{/* Grace period of a pod with a node. The node drains while the other containers of its pod stop; then it stops itself.
Takes a list of root and the stop time of the other containers. */}}
{{- define "lmkv.nodeGracePeriod" -}}
{{- $drain := (index . 0).Values.node.drain -}}
{{- add (max (index . 1) (ternary $drain.timeoutSeconds 0 $drain.enabled)) 15 -}}
{{- end -}}

{{/* Environment variables of the node. Takes the same dict as its container. */}}
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
{{- if include "lmkv.hasPoolVolume" .root }}
- name: LMKV_POOL_PATH
  value: /pool/$(LMKV_INSTANCE_ID).pool
{{- end }}
{{- with include "lmkv.secretVariable" (list "LMKV_REMOTE_URL" $values.remote) }}
{{ . }}
{{- end }}
{{- with .role }}
- name: LMKV_PD_ROLE
  value: {{ . }}
{{- end }}
{{- if has $values.transferChannel (list "auto" "nixl") }}
- name: UCX_TCP_PORT_RANGE
  value: {{ printf "%v-%v" (index $values.nixlPorts 0) (index $values.nixlPorts 1) }}
{{- end }}
{{- end -}}

{{/* Memory follows from the pool's size: it is all taken, and charged to this container. Huge pages are those that the
node takes: whole ones, rounded down. */}}
{{- define "lmkv.nodeResources" -}}
{{- $node := .Values.node -}}
{{- $pool := mulf $node.maxLocalCpuSize 1024 | ceil | int -}}
{{- $overhead := mulf $node.memoryOverhead 1024 | ceil | int -}}
{{- $sizes := dict -}}
{{- with include "lmkv.hugePageSize" . -}}
{{- $page := include "lmkv.kibibytes" . | default "1" | int -}}
{{- $taken := mul (div (mulf $node.maxLocalCpuSize 1048576 | floor | int) $page) $page -}}
{{- $_ := set $sizes "memory" (printf "%dMi" $overhead) -}}
{{- $_ := set $sizes (printf "hugepages-%s" .) (ternary (printf "%dMi" (div $taken 1024)) (printf "%dKi" $taken) (ge $page 1024)) -}}
{{- else -}}
{{- $_ := set $sizes "memory" (printf "%dMi" (add $pool $overhead)) -}}
{{- end -}}
{{- if $node.rdma.resource -}}
{{- $_ := set $sizes $node.rdma.resource ($node.rdma.count | int) -}}
{{- end -}}
{{- $resources := deepCopy (default dict $node.resources) -}}
{{- range list "requests" "limits" -}}
{{- $_ := set $resources . (merge (deepCopy (default dict (get $resources .))) $sizes) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* Volumes of the node's container but for its runtime folder. */}}
{{- define "lmkv.nodeVolumes" -}}
{{- $values := .Values.node -}}
{{- include "lmkv.configVolume" (list . "node") | replace "name: config" "name: node-config" }}
{{- with include "lmkv.clientVolumes" (list . .Values.auth.engineSecret) | trim }}
{{ . }}
{{- end }}
{{- with include "lmkv.operatorToken" . }}
{{ include "lmkv.tokenVolume" . | replace "name: token" "name: operator-token" }}
{{- end }}
{{- with $values.encryptionKeysSecret }}
- name: encryption-keys
  secret:
    defaultMode: 0440
    secretName: {{ . }}
{{- end }}
- name: node-tmp
  emptyDir:
    sizeLimit: 64Mi
{{- with include "lmkv.poolVolume" . }}
- name: pool
  {{- . | nindent 2 }}
{{- end }}
{{- with $values.diskVolume }}
- name: disk
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.remote.volume }}
- name: remote
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Hosts with GPUs, besides what `affinity` requires: in each of its terms, of which one must match. Takes the node's
values. */}}
{{- define "lmkv.gpuAffinity" -}}
{{- $gpu := dict "key" .gpuAffinity.label "operator" "Exists" -}}
{{- $affinity := deepCopy (default dict .affinity) -}}
{{- $node := default dict $affinity.nodeAffinity -}}
{{- $required := default dict $node.requiredDuringSchedulingIgnoredDuringExecution -}}
{{- $terms := list -}}
{{- range default (list dict) $required.nodeSelectorTerms -}}
{{- $terms = append $terms (set . "matchExpressions" (append (default list .matchExpressions) $gpu)) -}}
{{- end -}}
{{- $required = set $required "nodeSelectorTerms" $terms -}}
{{- $node = set $node "requiredDuringSchedulingIgnoredDuringExecution" $required -}}
{{- toYaml (set $affinity "nodeAffinity" $node) -}}
{{- end -}}

{{/* An init container that gives folders of the host to the node's user: Kubernetes creates them as root's regardless
of fsGroup. Empty if there are none. */}}
{{- define "lmkv.ownFolders" -}}
{{- $node := .Values.node -}}
{{- $folders := dict -}}
{{- if eq $node.mode "daemonSet" -}}{{- $_ := set $folders "runtime" "/run/lmkv" -}}{{- end -}}
{{- if hasKey (include "lmkv.poolVolume" . | fromYaml) "hostPath" -}}{{- $_ := set $folders "pool" "/pool" -}}{{- end -}}
{{- if include "lmkv.dropsPool" . -}}{{- $_ := set $folders "kept-pool" "/pool" -}}{{- end -}}
{{- if (default dict $node.diskVolume).hostPath -}}{{- $_ := set $folders "disk" "/disk" -}}{{- end -}}
{{- if $folders -}}
name: own-folders
{{ include "lmkv.image" (list . $node.image) }}
command:
  - chown
  - {{ printf "%v:%v" (int .Values.podSecurityContext.runAsUser) (int .Values.podSecurityContext.runAsGroup) | quote }}
  {{- range $folder := $folders }}
  - {{ $folder }}
  {{- end }}
securityContext:
  runAsUser: 0
  runAsNonRoot: false
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    add: [CHOWN]
volumeMounts:
  {{- range $volume, $folder := $folders }}
  - name: {{ $volume }}
    mountPath: {{ $folder }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* The folder of hosts that holds this release's sockets. */}}
{{- define "lmkv.hostRuntimeDir" -}}
{{ printf "%s/%s-%s" (trimSuffix "/" .Values.node.hostRuntimeDir) .Release.Namespace (include "lmkv.fullname" .) }}
{{- end -}}
