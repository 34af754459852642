{{/* Checks that the schema cannot express: values that contradict each other, or with which nothing can work. Each error
names the value and the fix. */}}
{{- define "lmkv.refuse" -}}
{{- include "lmkv.refuseKeys" . -}}
{{- include "lmkv.refuseEngines" . -}}
{{- include "lmkv.refuseContradictingKeys" . -}}
{{- include "lmkv.refusePorts" . -}}
{{- include "lmkv.refuseHosts" . -}}
{{- include "lmkv.refuseEgress" . -}}
{{- include "lmkv.refuseSecrets" . -}}
{{- include "lmkv.refuseSizes" . -}}
{{- $chosen := merge (include "lmkv.labels" (list . "any") | fromYaml) (dict "lmkv/engine" "" "lmkv/place" "") -}}
{{- $labels := dict "commonLabels" .Values.commonLabels -}}
{{- range list "coordinator" "node" "engines" "proxy" "webhook" -}}
{{- $_ := set $labels (printf "%s.podLabels" .) (get $.Values .).podLabels -}}
{{- if hasKey (default dict (get $.Values .).podAnnotations) "checksum/config" -}}
{{- include "lmkv.fail" (printf "%s.podAnnotations sets checksum/config, which the chart sets itself: remove it" .) -}}
{{- end -}}
{{- end -}}
{{- range $value, $set := $labels -}}
{{- range $label, $_ := default dict $set -}}
{{- if hasKey $chosen $label -}}
{{- include "lmkv.fail" (printf "%s sets %s, which the chart sets itself: remove it" $value $label) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $context := .Values.podSecurityContext -}}
{{- if and (eq (int $context.runAsUser) 0) $context.runAsNonRoot -}}
{{- include "lmkv.fail" "podSecurityContext.runAsUser is 0, which is root, and podSecurityContext.runAsNonRoot refuses root: set one of them" -}}
{{- end -}}
{{- range $component := list "coordinator" "proxy" -}}
{{- $scaling := (get $.Values .).autoscaling -}}
{{- if and $scaling.enabled (or (eq . "coordinator") $.Values.proxy.enabled) -}}
{{- if gt (int $scaling.minReplicas) (int $scaling.maxReplicas) -}}
{{- include "lmkv.fail" (printf "%s.autoscaling.minReplicas is %v, above %s.autoscaling.maxReplicas %v: swap them" . $scaling.minReplicas . $scaling.maxReplicas) -}}
{{- end -}}
{{- $resources := default dict (get $.Values .).resources -}}
{{- if not (or $scaling.requestsPerReplica (default dict $resources.requests).cpu (default dict $resources.limits).cpu) -}}
{{- include "lmkv.fail" (printf "%s.autoscaling measures the share of the requested CPU, and none is requested: set %s.resources.requests.cpu" . .) -}}
{{- end -}}
{{- else if and (eq . "proxy") $scaling.enabled -}}
{{- include "lmkv.fail" "proxy.autoscaling.enabled needs a proxy: set proxy.enabled to true" -}}
{{- end -}}
{{- end -}}
{{- range list "coordinator" "proxy" -}}
{{- $service := (get $.Values .).service -}}
{{- if and $service.loadBalancerClass (ne $service.type "LoadBalancer") -}}
{{- include "lmkv.fail" (printf "%s.service.loadBalancerClass is for load balancers: set %s.service.type to LoadBalancer" . .) -}}
{{- end -}}
{{- end -}}
{{- range list (list "coordinator" "ingress") (list "coordinator" "httpRoute") (list "coordinator" "grpcRoute") (list "proxy" "ingress") (list "proxy" "httpRoute") -}}
{{- $name := printf "%s.%s" (index . 0) (index . 1) -}}
{{- $route := get (get $.Values (index . 0)) (index . 1) -}}
{{- if $route.enabled -}}
{{- if and (eq (index . 0) "proxy") (not $.Values.proxy.enabled) -}}
{{- include "lmkv.fail" (printf "%s.enabled needs a proxy: set proxy.enabled to true" $name) -}}
{{- end -}}
{{- if and (ne (index . 1) "ingress") (not $route.parentRefs) -}}
{{- include "lmkv.fail" (printf "%s.enabled needs a gateway: set %s.parentRefs" $name $name) -}}
{{- end -}}
{{- if and $.Values.networkPolicy.enabled (eq (index . 0) "coordinator") (not $.Values.networkPolicy.coordinatorFrom) -}}
{{- include "lmkv.fail" (printf "%s is not admitted to the coordinators: name the pods of the gateway in networkPolicy.coordinatorFrom" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.proxy.autoscaling.enabled .Values.proxy.autoscaling.requestsPerReplica (not .Values.keda.serverAddress) -}}
{{- include "lmkv.fail" "proxy.autoscaling.requestsPerReplica is measured by Prometheus: set keda.serverAddress" -}}
{{- end -}}
{{- $tls := .Values.tls -}}
{{- if and $tls.mutual (not $tls.enabled) -}}
{{- include "lmkv.fail" "tls.mutual needs tls.enabled: without TLS, clients present no certificate" -}}
{{- end -}}
{{- if and $tls.enabled (not $tls.certManager.enabled) -}}
{{- if not $tls.serverSecret -}}
{{- include "lmkv.fail" "tls.enabled needs a certificate: set tls.serverSecret to a secret, or tls.certManager.enabled to true" -}}
{{- end -}}
{{- if and $tls.mutual (not $tls.clientSecret) -}}
{{- include "lmkv.fail" "tls.mutual needs a certificate for clients: set tls.clientSecret to a secret, or tls.certManager.enabled to true" -}}
{{- end -}}
{{- end -}}
{{- if and $tls.enabled $tls.certManager.enabled (not $tls.certManager.issuerRef.name) -}}
{{- include "lmkv.fail" "tls.certManager needs an issuer: set tls.certManager.issuerRef.name" -}}
{{- end -}}
{{- if and .Values.auth.tokensSecret (not .Values.auth.engineSecret) -}}
{{- include "lmkv.fail" "auth.tokensSecret rejects clients without a token: set auth.engineSecret, the token of nodes and proxies" -}}
{{- end -}}
{{- if and .Values.auth.tokensSecret .Values.monitoring.serviceMonitor.enabled (not .Values.auth.readerSecret) -}}
{{- include "lmkv.fail" "auth.tokensSecret rejects clients without a token: set auth.readerSecret, the token of Prometheus" -}}
{{- end -}}
{{- if and .Values.node.drain.enabled .Values.auth.tokensSecret (not .Values.auth.operatorSecret) -}}
{{- include "lmkv.fail" "node.drain.enabled needs the token of an operator, because with auth.tokensSecret the token of nodes has role engine, which may not drain: set auth.operatorSecret" -}}
{{- end -}}
{{- if and .Values.coordinator.autoscaling.enabled (not .Values.coordinator.layoutMap.existingSecret) -}}
{{- include "lmkv.fail" "coordinator.autoscaling needs a shared layout map, because otherwise every node reports to every coordinator and more replicas add no capacity: set coordinator.layoutMap.existingSecret" -}}
{{- end -}}
{{- $node := .Values.node -}}
{{- if and $node.hostNetwork (eq $node.mode "sidecar") -}}
{{- include "lmkv.fail" "node.hostNetwork is for node.mode daemonSet: a sidecar is in its engine's network" -}}
{{- end -}}
{{- if eq $node.mode "sidecar" -}}
{{- range list "podAnnotations" "podLabels" "nodeSelector" "tolerations" "affinity" "priorityClassName" "podSpec" "workloadSpec" -}}
{{- if get $node . -}}
{{- include "lmkv.fail" (printf "node.%s is for node.mode daemonSet, and sidecars are in the pods of engines: set engines.%s" . .) -}}
{{- end -}}
{{- end -}}
{{- if $node.gpuAffinity.enabled -}}
{{- include "lmkv.fail" "node.gpuAffinity is for node.mode daemonSet: sidecars are where their engines' resources are" -}}
{{- end -}}
{{- end -}}
{{- if and $node.rdma.resource (has $node.transferChannel (list "shm" "tcp")) -}}
{{- include "lmkv.fail" (printf "node.rdma.resource takes a device that node.transferChannel %s does not use: set node.transferChannel to auto or nixl, or remove node.rdma.resource" $node.transferChannel) -}}
{{- end -}}
{{- if and $node.hostNetwork .Values.networkPolicy.enabled (not .Values.networkPolicy.coordinatorFrom) -}}
{{- include "lmkv.fail" "node.hostNetwork hides nodes from network policies: admit their hosts by networkPolicy.coordinatorFrom" -}}
{{- end -}}
{{- $disk := or $node.diskVolume $node.diskClaim -}}
{{- if and $node.maxLocalDiskSize (not $disk) -}}
{{- include "lmkv.fail" "node.maxLocalDiskSize needs a disk: set node.diskVolume to a volume" -}}
{{- end -}}
{{- range list "pool" "disk" -}}
{{- $claim := get $node (printf "%sClaim" .) -}}
{{- if and $claim (ne $node.mode "sidecar") -}}
{{- include "lmkv.fail" (printf "node.%sClaim is for node.mode sidecar: a DaemonSet has no claims of its pods; set node.%sVolume" . .) -}}
{{- end -}}
{{- if and $claim (get $node (printf "%sVolume" .)) -}}
{{- include "lmkv.fail" (printf "node.%sClaim and node.%sVolume are both set: keep one" . .) -}}
{{- end -}}
{{- end -}}
{{- if and $node.poolClaim (not $node.persistPool) -}}
{{- include "lmkv.fail" "node.poolClaim keeps a pool that node.persistPool is to remove: set node.persistPool to true, or remove node.poolClaim" -}}
{{- end -}}
{{- $medium := include "lmkv.poolMedium" . -}}
{{- if hasPrefix "HugePages" $medium -}}
{{- $page := include "lmkv.kibibytes" (include "lmkv.hugePageSize" .) -}}
{{- if not $page -}}
{{- include "lmkv.fail" (printf "node.poolVolume.emptyDir.medium is %s, which names no page size: use HugePages-2Mi, HugePages-1Gi or another size of the hosts" $medium) -}}
{{- end -}}
{{- if lt (mulf $node.maxLocalCpuSize 1048576 | floor | int) (int $page) -}}
{{- include "lmkv.fail" (printf "node.maxLocalCpuSize is %v, less than one huge page of %s: raise it, or name smaller pages in node.poolVolume" $node.maxLocalCpuSize (include "lmkv.hugePageSize" .)) -}}
{{- end -}}
{{- range $kind, $amounts := $node.resources -}}
{{- range $resource, $_ := default dict $amounts -}}
{{- if hasPrefix "hugepages-" $resource -}}
{{- include "lmkv.fail" (printf "node.resources.%s has %s, which follows from node.maxLocalCpuSize and node.poolVolume: remove it" $kind $resource) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $disk (not $node.maxLocalDiskSize) -}}
{{- include "lmkv.fail" "node.diskVolume and node.diskClaim need a size: set node.maxLocalDiskSize to the GiB that chunks may take" -}}
{{- end -}}
{{- if gt (index $node.nixlPorts 0 | int) (index $node.nixlPorts 1 | int) -}}
{{- include "lmkv.fail" "node.nixlPorts names the last port before the first: swap them" -}}
{{- end -}}
{{- if .Values.webhook.enabled -}}
{{- if ne (empty .Values.webhook.tlsSecret) (empty .Values.webhook.caBundle) -}}
{{- include "lmkv.fail" "webhook.tlsSecret and webhook.caBundle name a certificate and its CA: set both, or neither" -}}
{{- end -}}
{{- if include "lmkv.nodeClaims" . -}}
{{- include "lmkv.fail" "webhook.enabled adds sidecars to pods of others, which have no claims: set node.poolVolume and node.diskVolume instead of claims" -}}
{{- end -}}
{{- if and (eq $node.mode "sidecar") (include "lmkv.ownFolders" .) -}}
{{- include "lmkv.fail" "webhook.enabled adds sidecars that cannot write to folders of the host, which belong to root: set node.poolVolume and node.diskVolume to another type than hostPath" -}}
{{- end -}}
{{- if and (eq $node.mode "sidecar") $node.encryptionKeysSecret -}}
{{- include "lmkv.fail" "webhook.enabled adds sidecars to pods of others, where all users could read the keys of node.encryptionKeysSecret: set node.mode to daemonSet" -}}
{{- end -}}
{{- if and (eq $node.mode "sidecar") .Values.networkPolicy.enabled (not .Values.networkPolicy.coordinatorFrom) -}}
{{- include "lmkv.fail" "webhook.enabled adds sidecars to pods that network policies do not know: admit them by networkPolicy.coordinatorFrom" -}}
{{- end -}}
{{- end -}}
{{- end -}}
