{{/* Environment variables of an engine: the address of its node, by the name of the node. */}}
{{- define "lmkv.engineVariables" -}}
- name: LMKV_CONFIG_FILE
  value: /etc/lmkv/lmkv.yaml
- name: NODE_INSTANCE_ID
  valueFrom:
    fieldRef:
      fieldPath: {{ ternary "metadata.name" "spec.nodeName" (eq .Values.node.mode "sidecar") }}
- name: LMKV_NODE_ADDRESS
  value: /run/lmkv/$(NODE_INSTANCE_ID)/engine.sock
{{ with include "lmkv.secretVariable" (list "LMKV_CLUSTER_SECRET" .Values.clusterSecret) -}}
{{ . }}
{{ end -}}
- name: HOME
  value: /home/lmkv
- name: HF_HOME
  value: /models
{{- end -}}
