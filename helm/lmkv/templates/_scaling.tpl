{{/* Scaling with load. */}}

{{/* A HorizontalPodAutoscaler. Takes a list of root, component, the kind of its target and the component's values. */}}
{{- define "lmkv.horizontalPodAutoscaler" -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  {{- include "lmkv.metadata" (list (index . 0) (index . 1)) | nindent 2 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: {{ index . 2 }}
    name: {{ include "lmkv.fullname" (index . 0) }}-{{ index . 1 }}
  {{- with (index . 3).autoscaling }}
  minReplicas: {{ .minReplicas }}
  maxReplicas: {{ .maxReplicas }}
  metrics:
    - type: Resource
      resource:
        name: cpu
        target:
          type: Utilization
          averageUtilization: {{ .targetCPUUtilizationPercentage }}
  {{- end }}
{{- end -}}

{{/* A ScaledObject of KEDA, by the requests in flight at engines, which the proxies count. Takes a dict of root, component,
apiVersion, kind and name of its target, scaling (minReplicas, maxReplicas, requestsPerReplica) and engines (a regular
expression of hosts). */}}
{{- define "lmkv.scaledObject" -}}
{{- $keda := .root.Values.keda -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "lmkv.metadata" (list .root .component) | nindent 2 }}
spec:
  scaleTargetRef:
    apiVersion: {{ .apiVersion }}
    kind: {{ .kind }}
    name: {{ .name }}
  minReplicaCount: {{ default 1 .scaling.minReplicas }}
  maxReplicaCount: {{ .scaling.maxReplicas }}
  pollingInterval: {{ $keda.pollingInterval }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleDown:
          stabilizationWindowSeconds: {{ $keda.scaleDownSeconds }}
          policies:  # one at a time: others then hold what it held
            - {type: Pods, value: 1, periodSeconds: 60}
  triggers:
    - type: prometheus
      metricType: AverageValue
      metadata:
        serverAddress: {{ $keda.serverAddress }}
        query: {{ printf "sum(lmkv_proxy_engine_requests_in_flight{engine=~\"https?://%s:[0-9]+\"}) or vector(0)" .engines | quote }}
        threshold: {{ .scaling.requestsPerReplica | quote }}
      {{- with $keda.authenticationRef }}
      authenticationRef:
        name: {{ . }}
      {{- end }}
{{- end -}}
