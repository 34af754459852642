{{/* The configuration file of each process. What the chart decides wins: values.schema.json refuses it in `config`. */}}

{{/* What all processes are told. */}}
{{- define "lmkv.commonConfig" -}}
log_level: {{ .Values.logLevel }}
log_format: {{ .Values.logFormat }}
{{- end -}}

{{/* Whom a server lets in. */}}
{{- define "lmkv.serverAuthConfig" -}}
{{- if .Values.auth.tokensSecret -}}
auth_tokens: /etc/lmkv-tokens/tokens.yaml
{{- end -}}
{{- end -}}

{{/* What nodes and proxies show, and whom they let in. */}}
{{- define "lmkv.clientAuthConfig" -}}
{{- if .Values.auth.tokensSecret -}}
{{ include "lmkv.serverAuthConfig" . }}
auth_token_file: /etc/lmkv-token/token
{{- end -}}
{{- end -}}

{{/* Whom the coordinator's clients trust, and what they show. */}}
{{- define "lmkv.clientTlsConfig" -}}
{{- if .Values.tls.enabled -}}
tls_ca: /etc/lmkv-tls/ca.crt
{{- if .Values.tls.mutual }}
tls_cert: /etc/lmkv-tls/tls.crt
tls_key: /etc/lmkv-tls/tls.key
{{- end }}
{{- end -}}
{{- end -}}

{{- define "lmkv.coordinatorConfig" -}}
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
{{ include "lmkv.commonConfig" . }}
{{- end -}}

{{- define "lmkv.nodeConfig" -}}
{{- with .Values.node.config }}{{ toYaml . }}
{{ end -}}
coordinator_address: {{ include "lmkv.coordinatorAddresses" . }}
runtime_dir: /run/lmkv
max_local_cpu_size: {{ .Values.node.maxLocalCpuSize }}
{{- if .Values.node.poolVolume }}
pool_path: /pool/lmkv
{{- end }}
{{- if .Values.node.maxLocalDiskSize }}
local_disk: /disk
max_local_disk_size: {{ .Values.node.maxLocalDiskSize }}
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
{{ include "lmkv.commonConfig" . }}
{{- end -}}

{{- define "lmkv.engineConfig" -}}
{{- with .Values.engines.config }}{{ toYaml . }}
{{ end -}}
{{ include "lmkv.commonConfig" . }}
{{- end -}}

{{- define "lmkv.proxyConfig" -}}
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
coordinator_address: {{ include "lmkv.coordinatorAddresses" . }}
{{- with include "lmkv.clientTlsConfig" . }}
{{ . }}
{{- end }}
{{- with include "lmkv.clientAuthConfig" . }}
{{ . }}
{{- end }}
{{ include "lmkv.commonConfig" . }}
{{- end -}}

{{/* A ConfigMap of one process. Takes a list of root, component and the file's text. */}}
{{- define "lmkv.configMap" -}}
apiVersion: v1
kind: ConfigMap
metadata:
  {{- include "lmkv.metadata" (list (index . 0) (index . 1)) | nindent 2 }}
data:
  lmkv.yaml: |
    {{- index . 2 | nindent 4 }}
{{- end -}}
