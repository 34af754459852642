{{/* Parts that pods and containers share. */}}

{{/* Labels and annotations of pods, which restart when their settings change.
Takes a dict of root, component, settings (what its processes read only at their start), values, and optionally labels of
this workload's pods. */}}
{{- define "lmkv.podMetadata" -}}
annotations:
  checksum/config: {{ sha256sum .settings }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
labels:
  {{- $labels := merge (include "lmkv.selector" (list .root .component) | fromYaml) (default dict .labels) }}
  {{- merge $labels (deepCopy (default dict .values.podLabels)) (default dict .root.Values.commonLabels) | toYaml | nindent 2 }}
{{- end -}}

{{/* Security context and scheduling of a pod. Takes a list of root and the component's values. */}}
{{- define "lmkv.pod" -}}
{{- $root := index . 0 -}}
{{- $values := index . 1 -}}
serviceAccountName: {{ include "lmkv.serviceAccountName" $root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $root.Values.podSecurityContext | nindent 2 }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Spreads the pods of a component over hosts and zones. Takes a list of root and component. */}}
{{- define "lmkv.spread" -}}
topologySpreadConstraints:
{{- $selector := include "lmkv.selector" . }}
{{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- $selector | nindent 8 }}
{{- end }}
{{- end -}}

{{/* Environment: a component's own variables, the OTLP endpoint and `extraEnv`, which may set that endpoint, but repeats
no other variable. Takes a dict of root, values (the key of the component's values), own (the text of its own variables)
and otlpFrom: the ConfigMap that holds the endpoint; a change of it restarts no pod. Empty: the endpoint is in the pod. */}}
{{- define "lmkv.env" -}}
{{- $own := trim .own -}}
{{- $extra := default list (get .root.Values .values).extraEnv -}}
{{- $names := list -}}
{{- range default "[]" $own | fromYamlArray -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- $common := list -}}
{{- range $extra -}}
{{- if has .name $common -}}
{{- include "lmkv.fail" (printf "%s.extraEnv has the variable %s twice: keep one" $.values .name) -}}
{{- else if has .name $names -}}
{{- include "lmkv.fail" (printf "%s.extraEnv has the variable %s, which the chart sets itself: remove it" $.values .name) -}}
{{- end -}}
{{- $common = append $common .name -}}
{{- end -}}
{{- if not (has "OTEL_EXPORTER_OTLP_ENDPOINT" $common) -}}
{{- if .otlpFrom -}}
{{- $key := dict "name" .otlpFrom "key" "otlp-endpoint" "optional" true -}}
{{- $extra = prepend $extra (dict "name" "OTEL_EXPORTER_OTLP_ENDPOINT" "valueFrom" (dict "configMapKeyRef" $key)) -}}
{{- else if .root.Values.otlpEndpoint -}}
{{- $extra = prepend $extra (dict "name" "OTEL_EXPORTER_OTLP_ENDPOINT" "value" .root.Values.otlpEndpoint) -}}
{{- end -}}
{{- end -}}
{{- if or $own $extra -}}
env:
  {{- with $own }}
  {{- . | nindent 2 }}
  {{- end }}
  {{- with $extra }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* A variable that a secret holds; nothing if there is none. Takes a list of its name and the values of the secret. */}}
{{- define "lmkv.secretVariable" -}}
{{- with index . 1 -}}
{{- if .existingSecret -}}
- name: {{ index $ 0 }}
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .key }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The volume of a process's configuration. Takes a list of root and component. */}}
{{- define "lmkv.configVolume" -}}
- name: config
  configMap:
    name: {{ include "lmkv.fullname" (index . 0) }}-{{ index . 1 }}
{{- end -}}

{{/* Volumes of the certificate of a coordinator, and of the tokens that it accepts. */}}
{{- define "lmkv.serverVolumes" -}}
{{- if .Values.tls.enabled }}
- name: tls
  secret:
    defaultMode: 0440
    secretName: {{ include "lmkv.serverSecret" . }}
{{- end }}
{{- with .Values.auth.tokensSecret }}
- name: tokens
  secret:
    defaultMode: 0440
    secretName: {{ . }}
{{- end }}
{{- end -}}

{{/* Volumes of the certificates of the coordinator's clients and of the tokens that they accept; of the coordinator's
certificate they get only the issuer. Takes a list of root and the secret with their token. */}}
{{- define "lmkv.clientVolumes" -}}
{{- $root := index . 0 -}}
{{- $token := index . 1 -}}
{{- if $root.Values.tls.enabled }}
- name: tls
  secret:
    defaultMode: 0440
    {{- if $root.Values.tls.mutual }}
    secretName: {{ include "lmkv.clientSecret" $root }}
    {{- else }}
    secretName: {{ include "lmkv.serverSecret" $root }}
    items:
      - key: ca.crt
        path: ca.crt
    {{- end }}
{{- end }}
{{- with $root.Values.auth.tokensSecret }}
- name: tokens
  secret:
    defaultMode: 0440
    secretName: {{ . }}
{{ include "lmkv.tokenVolume" $token }}
{{- end }}
{{- end -}}

{{/* The volume of the token of a client, with which proxies also sign handoffs. Takes its secret. */}}
{{- define "lmkv.tokenVolume" -}}
- name: token
  secret:
    defaultMode: 0440
    secretName: {{ . }}
{{- end -}}

{{/* Mounts of a coordinator: its configuration and `lmkv.serverVolumes`. */}}
{{- define "lmkv.serverMounts" -}}
- name: config
  mountPath: /etc/lmkv
  readOnly: true
{{- if .Values.tls.enabled }}
- name: tls
  mountPath: /etc/lmkv-tls
  readOnly: true
{{- end }}
{{- if .Values.auth.tokensSecret }}
- name: tokens
  mountPath: /etc/lmkv-tokens
  readOnly: true
{{- end }}
{{- end -}}

{{/* Mounts of nodes and proxies: their configuration and `lmkv.clientVolumes`. */}}
{{- define "lmkv.clientMounts" -}}
{{ include "lmkv.serverMounts" . }}
{{- if .Values.auth.tokensSecret }}
- name: token
  mountPath: /etc/lmkv-token
  readOnly: true
{{- end }}
{{- end -}}

{{/* A budget for disruptions. Takes a list of root, component and the component's values. */}}
{{- define "lmkv.podDisruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "lmkv.metadata" (list (index . 0) (index . 1)) | nindent 2 }}
spec:
  maxUnavailable: {{ (index . 2).podDisruptionBudget.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow  # one that is broken keeps no host from being drained
  selector:
    matchLabels:
      {{- include "lmkv.selector" (list (index . 0) (index . 1)) | nindent 6 }}
{{- end -}}
