{{/* Access from outside the cluster, by an Ingress or by routes of the Gateway API. */}}

{{/* An Ingress to a port of a component's Service. Takes a list of root, component and the port's name. */}}
{{- define "lmkv.ingress" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := (get $root.Values $component).ingress -}}
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  {{- include "lmkv.metadata" (list $root $component (dict "annotations" $values.annotations)) | nindent 2 }}
spec:
  {{- with $values.className }}
  ingressClassName: {{ . }}
  {{- end }}
  {{- with $values.tlsSecret }}
  tls:
    - secretName: {{ . }}
      {{- with $values.hosts }}
      hosts:
        {{- toYaml . | nindent 8 }}
      {{- end }}
  {{- end }}
  rules:
    {{- range default (list "") $values.hosts }}
    - {{ with . }}host: {{ . | quote }}
      {{ end }}http:
        paths:
          - path: /
            pathType: Prefix
            backend:
              service:
                name: {{ include "lmkv.fullname" $root }}-{{ $component }}
                port:
                  name: {{ index $ 2 }}
    {{- end }}
{{- end -}}

{{/* A route to a port of a component's Service. Takes a list of root, component, the route's kind, its values and port. */}}
{{- define "lmkv.route" -}}
{{- $root := index . 0 -}}
{{- $component := index . 1 -}}
{{- $values := index . 3 -}}
apiVersion: gateway.networking.k8s.io/v1
kind: {{ index . 2 }}
metadata:
  {{- include "lmkv.metadata" (list $root $component (dict "annotations" $values.annotations)) | nindent 2 }}
spec:
  parentRefs:
    {{- toYaml $values.parentRefs | nindent 4 }}
  {{- with $values.hostnames }}
  hostnames:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  rules:
    - backendRefs:
        - name: {{ include "lmkv.fullname" $root }}-{{ $component }}
          port: {{ index . 4 }}
      {{- with $values.timeouts }}
      timeouts:
        {{- toYaml . | nindent 8 }}
      {{- end }}
{{- end -}}
