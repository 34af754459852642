{{/* The configuration file of each process. What the chart decides wins: `lmkv.refuseKeys` refuses it in `config`.
Each file is the process's settings, a change of which restarts it, and `lmkv.loggingConfig`. */}}

{{/* Logging keys. Running processes apply a change of them, so no checksum covers them. */}}
{{- define "lmkv.loggingConfig" -}}
log_level: {{ .Values.logLevel }}
log_format: {{ .Values.logFormat }}
{{- end -}}

{{/* A whole file. Takes a list of root and the settings. */}}
{{- define "lmkv.configFile" -}}
{{ index . 1 }}
{{ include "lmkv.loggingConfig" (index . 0) }}
{{- end -}}

{{/* Authentication of clients at a server. */}}
{{- define "lmkv.serverAuthConfig" -}}
{{- if .Values.auth.tokensSecret -}}
auth_tokens: /etc/lmkv-tokens/tokens.yaml
{{- end -}}
{{- end -}}

{{/* Credentials of nodes and proxies, and authentication of their clients. */}}
{{- define "lmkv.clientAuthConfig" -}}
{{- if .Values.auth.tokensSecret -}}
{{ include "lmkv.serverAuthConfig" . }}
auth_token_file: /etc/lmkv-token/token
{{- end -}}
{{- end -}}

{{/* CA and certificate of the coordinator's clients. */}}
{{- define "lmkv.clientTlsConfig" -}}
{{- if .Values.tls.enabled -}}
tls_ca: /etc/lmkv-tls/ca.crt
{{- if .Values.tls.mutual }}
tls_cert: /etc/lmkv-tls/tls.crt
tls_key: /etc/lmkv-tls/tls.key
{{- end }}
{{- end -}}
{{- end -}}

{{- define "lmkv.coordinatorSettings" -}}
{{- with .Values.coordinator.config }}{{ toYaml . }}
{{ end -}}
host: {{ .Values.bindAddress | quote }}
port: {{ .Values.coordinator.port }}
http_port: {{ .Values.coordinator.httpPort }}
{{- if .Values.tls.enabled }}
tls_cert: /etc/lmkv-tls/tls.crt
tls_key: /etc/lmkv-tls/tls.key
{{- if .Values.tls.mutual }}
tls_client_ca: /etc/lmkv-tls/ca.crt
{{- end }}
{{- end }}
{{- with include "lmkv.serverAuthConfig" . }}
{{ . }}
{{- end }}
{{- end -}}

{{- define "lmkv.nodeSettings" -}}
{{- with .Values.node.config }}{{ toYaml . }}
{{ end -}}
coordinator_address: {{ include "lmkv.coordinatorAddress" . }}
runtime_dir: /run/lmkv
max_local_cpu_size: {{ .Values.node.maxLocalCpuSize }}
{{- if include "lmkv.poolPersists" . }}
persist_pool: true
{{- end }}
{{- if .Values.node.maxLocalDiskSize }}
local_disk: /disk
max_local_disk_size: {{ .Values.node.maxLocalDiskSize }}
{{- end }}
{{- with .Values.node.remote.url }}
remote_url: {{ . | quote }}
{{- end }}
{{- if .Values.node.remote.volume }}
remote_url: file:///remote
{{- end }}
{{- if .Values.node.maxRemoteSize }}
max_remote_size: {{ .Values.node.maxRemoteSize }}
{{- end }}
{{- if .Values.node.encryptionKeysSecret }}
encryption_key_file: /etc/lmkv-encryption/keys
{{- end }}
transfer_channel: {{ .Values.node.transferChannel }}
{{- if and .Values.tls.enabled .Values.tls.mutual }}
tls_peer_name: {{ include "lmkv.peerName" . }}
{{- end }}
p2p_port: {{ .Values.node.p2pPort }}
transfer_port: {{ .Values.node.transferPort }}
metrics_port: {{ .Values.node.metricsPort }}
{{- with include "lmkv.clientTlsConfig" . }}
{{ . }}
{{- end }}
{{- with include "lmkv.clientAuthConfig" . }}
{{ . }}
{{- end }}
{{- end -}}

{{/* Engines log through vLLM: they have no logging keys. */}}
{{- define "lmkv.engineSettings" -}}
{{- with .Values.engines.config }}{{ toYaml . }}{{ end -}}
{{- if .Values.auth.tokensSecret }}
auth_token_file: /etc/lmkv-token/token
{{- end -}}
{{- end -}}

{{- define "lmkv.proxySettings" -}}
{{- with .Values.proxy.config }}{{ toYaml . }}
{{ end -}}
host: {{ .Values.bindAddress | quote }}
port: {{ .Values.proxy.port }}
{{- if include "lmkv.hasRole" (list . "prefill") }}
mode: pd
prefiller_host: {{ include "lmkv.engineHosts" (list . "prefill") }}
prefiller_port: {{ .Values.engines.port }}
decoder_host: {{ include "lmkv.engineHosts" (list . "decode") }}
decoder_port: {{ .Values.engines.port }}
{{- else }}
mode: route
engines:
{{- range include "lmkv.engineHosts" (list . "both") | fromJsonArray }}
- http://{{ . }}:{{ $.Values.engines.port }}
{{- end }}
{{- end }}
policy: {{ .Values.proxy.policy }}
coordinator_address: {{ include "lmkv.coordinatorAddress" . }}
{{- with include "lmkv.clientTlsConfig" . }}
{{ . }}
{{- end }}
{{- with include "lmkv.clientAuthConfig" . }}
{{ . }}
{{- end }}
{{- end -}}

{{- define "lmkv.webhookSettings" -}}
host: {{ .Values.bindAddress | quote }}
port: {{ .Values.webhook.port }}
pod_additions: /etc/lmkv/pods.yaml
tls_cert: /etc/lmkv-tls/tls.crt
tls_key: /etc/lmkv-tls/tls.key
{{- end -}}

{{/* A ConfigMap of one process. Takes a dict of root, component, file (its text) and otlpEndpoint (empty: none). */}}
{{- define "lmkv.configMap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "lmkv.metadata" (list .root .component) | nindent 2 }}
data:
  {{- with .otlpEndpoint }}
  otlp-endpoint: {{ . | quote }}
  {{- end }}
  lmkv.yaml: |
    {{- .file | nindent 4 }}
{{- end -}}
