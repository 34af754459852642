{{/* Checks that the schema cannot express: values that contradict each other. Each error names the value and the fix. */}}
{{- define "lmkv.refuse" -}}
{{- $chosen := include "lmkv.labels" (list . "any") | fromYaml -}}
{{- range $label, $_ := default dict .Values.commonLabels -}}
{{- if hasKey $chosen $label -}}
{{- fail (printf "commonLabels sets %s, which the chart sets itself: remove it" $label) -}}
{{- end -}}
{{- end -}}
{{- range list "coordinator" "proxy" -}}
{{- $service := (get $.Values .).service -}}
{{- if and $service.loadBalancerClass (ne $service.type "LoadBalancer") -}}
{{- fail (printf "%s.service.loadBalancerClass is for load balancers: set %s.service.type to LoadBalancer" . .) -}}
{{- end -}}
{{- end -}}
{{- range list (list "coordinator" "ingress") (list "coordinator" "httpRoute") (list "coordinator" "grpcRoute") (list "proxy" "ingress") (list "proxy" "httpRoute") -}}
{{- $name := printf "%s.%s" (index . 0) (index . 1) -}}
{{- $route := get (get $.Values (index . 0)) (index . 1) -}}
{{- if $route.enabled -}}
{{- if and (eq (index . 0) "proxy") (not $.Values.proxy.enabled) -}}
{{- fail (printf "%s.enabled needs a proxy: set proxy.enabled to true" $name) -}}
{{- end -}}
{{- if and (ne (index . 1) "ingress") (not $route.parentRefs) -}}
{{- fail (printf "%s.enabled needs a gateway: set %s.parentRefs" $name $name) -}}
{{- end -}}
{{- if and $.Values.networkPolicy.enabled (eq (index . 0) "coordinator") (not $.Values.networkPolicy.coordinatorFrom) -}}
{{- fail (printf "%s is not admitted to the coordinators: name the pods of the gateway in networkPolicy.coordinatorFrom" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.proxy.autoscaling.enabled .Values.proxy.autoscaling.requestsPerReplica (not .Values.keda.serverAddress) -}}
{{- fail "proxy.autoscaling.requestsPerReplica is measured by Prometheus: set keda.serverAddress" -}}
{{- end -}}
{{- with .Values.networkPolicy.egress -}}
{{- if and $.Values.networkPolicy.enabled .enabled -}}
{{- if and $.Values.otlpEndpoint (not .all) -}}
{{- fail "networkPolicy.egress.enabled blocks otlpEndpoint: admit the collector in networkPolicy.egress.all" -}}
{{- end -}}
{{- if and $.Values.coordinator.layoutMap.existingSecret (not .all) (not .coordinator) -}}
{{- fail "networkPolicy.egress.enabled blocks coordinator.layoutMap: admit Valkey in networkPolicy.egress.coordinator" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $tls := .Values.tls -}}
{{- if and $tls.mutual (not $tls.enabled) -}}
{{- fail "tls.mutual needs tls.enabled: without TLS, clients present no certificate" -}}
{{- end -}}
{{- if and $tls.enabled (not $tls.certManager.enabled) -}}
{{- if not $tls.serverSecret -}}
{{- fail "tls.enabled needs a certificate: set tls.serverSecret to a secret, or tls.certManager.enabled to true" -}}
{{- end -}}
{{- if and $tls.mutual (not $tls.clientSecret) -}}
{{- fail "tls.mutual needs a certificate for clients: set tls.clientSecret to a secret, or tls.certManager.enabled to true" -}}
{{- end -}}
{{- end -}}
{{- if and $tls.enabled $tls.certManager.enabled (not $tls.certManager.issuerRef.name) -}}
{{- fail "tls.certManager needs an issuer: set tls.certManager.issuerRef.name" -}}
{{- end -}}
{{- if and .Values.auth.tokensSecret (not .Values.auth.engineSecret) -}}
{{- fail "auth.tokensSecret rejects clients without a token: set auth.engineSecret, the token of nodes and proxies" -}}
{{- end -}}
{{- if and .Values.auth.tokensSecret .Values.monitoring.serviceMonitor.enabled (not .Values.auth.readerSecret) -}}
{{- fail "auth.tokensSecret rejects clients without a token: set auth.readerSecret, the token of Prometheus" -}}
{{- end -}}
{{- if and .Values.node.drain.enabled .Values.auth.tokensSecret (not .Values.auth.operatorSecret) -}}
{{- fail "node.drain.enabled needs the token of an operator, because with auth.tokensSecret the token of nodes has role engine, which may not drain: set auth.operatorSecret" -}}
{{- end -}}
{{- if and .Values.coordinator.autoscaling.enabled (not .Values.coordinator.layoutMap.existingSecret) -}}
{{- fail "coordinator.autoscaling needs a shared layout map, because otherwise every node reports to every coordinator and more replicas add no capacity: set coordinator.layoutMap.existingSecret" -}}
{{- end -}}
{{- $node := .Values.node -}}
{{- if and $node.hostNetwork (eq $node.mode "sidecar") -}}
{{- fail "node.hostNetwork is for node.mode daemonSet: a sidecar is in its engine's network" -}}
{{- end -}}
{{- if and $node.hostNetwork .Values.networkPolicy.enabled (not .Values.networkPolicy.coordinatorFrom) -}}
{{- fail "node.hostNetwork hides nodes from network policies: admit their hosts by networkPolicy.coordinatorFrom" -}}
{{- end -}}
{{- $disk := or $node.diskVolume $node.diskClaim -}}
{{- if and $node.maxLocalDiskSize (not $disk) -}}
{{- fail "node.maxLocalDiskSize needs a disk: set node.diskVolume to a volume" -}}
{{- end -}}
{{- range list "pool" "disk" -}}
{{- $claim := get $node (printf "%sClaim" .) -}}
{{- if and $claim (ne $node.mode "sidecar") -}}
{{- fail (printf "node.%sClaim is for node.mode sidecar: a DaemonSet has no claims of its pods; set node.%sVolume" . .) -}}
{{- end -}}
{{- if and $claim (get $node (printf "%sVolume" .)) -}}
{{- fail (printf "node.%sClaim and node.%sVolume are both set: keep one" . .) -}}
{{- end -}}
{{- end -}}
{{- if and $node.poolClaim (not $node.persistPool) -}}
{{- fail "node.poolClaim keeps a pool that node.persistPool is to remove: set node.persistPool to true, or remove node.poolClaim" -}}
{{- end -}}
{{- $medium := include "lmkv.poolMedium" . -}}
{{- if hasPrefix "HugePages" $medium -}}
{{- $page := include "lmkv.kibibytes" (include "lmkv.hugePageSize" .) -}}
{{- if not $page -}}
{{- fail (printf "node.poolVolume.emptyDir.medium is %s, which names no page size: use HugePages-2Mi, HugePages-1Gi or another size of the hosts" $medium) -}}
{{- end -}}
{{- if lt (mulf $node.maxLocalCpuSize 1048576 | floor | int) (int $page) -}}
{{- fail (printf "node.maxLocalCpuSize is %v, less than one huge page of %s: raise it, or name smaller pages in node.poolVolume" $node.maxLocalCpuSize (include "lmkv.hugePageSize" .)) -}}
{{- end -}}
{{- range $kind, $amounts := $node.resources -}}
{{- range $resource, $_ := default dict $amounts -}}
{{- if hasPrefix "hugepages-" $resource -}}
{{- fail (printf "node.resources.%s has %s, which follows from node.maxLocalCpuSize and node.poolVolume: remove it" $kind $resource) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $disk (not $node.maxLocalDiskSize) -}}
{{- fail "node.diskVolume and node.diskClaim need a size: set node.maxLocalDiskSize to the GiB that chunks may take" -}}
{{- end -}}
{{- if gt (index $node.nixlPorts 0 | int) (index $node.nixlPorts 1 | int) -}}
{{- fail "node.nixlPorts names the last port before the first: swap them" -}}
{{- end -}}
{{- if .Values.webhook.enabled -}}
{{- if ne (empty .Values.webhook.tlsSecret) (empty .Values.webhook.caBundle) -}}
{{- fail "webhook.tlsSecret and webhook.caBundle name a certificate and its CA: set both, or neither" -}}
{{- end -}}
{{- if include "lmkv.nodeClaims" . -}}
{{- fail "webhook.enabled adds sidecars to pods of others, which have no claims: set node.poolVolume and node.diskVolume instead of claims" -}}
{{- end -}}
{{- if and (eq $node.mode "sidecar") (include "lmkv.ownFolders" .) -}}
{{- fail "webhook.enabled adds sidecars that cannot write to folders of the host, which belong to root: set node.poolVolume and node.diskVolume to another type than hostPath" -}}
{{- end -}}
{{- if and (eq $node.mode "sidecar") $node.encryptionKeysSecret -}}
{{- fail "webhook.enabled adds sidecars to pods of others, where all users could read the keys of node.encryptionKeysSecret: set node.mode to daemonSet" -}}
{{- end -}}
{{- if and (eq $node.mode "sidecar") .Values.networkPolicy.enabled (not .Values.networkPolicy.coordinatorFrom) -}}
{{- fail "webhook.enabled adds sidecars to pods that network policies do not know: admit them by networkPolicy.coordinatorFrom" -}}
{{- end -}}
{{- end -}}
{{- $names := list -}}
{{- range .Values.engines.groups -}}
{{- if has .name $names -}}
{{- fail (printf "engines.groups has two groups called %s: give each a name of its own" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- if .autoscaling -}}
{{- if not $.Values.proxy.enabled -}}
{{- fail (printf "the autoscaling of group %s counts requests at the proxy: set proxy.enabled to true" .name) -}}
{{- end -}}
{{- if not $.Values.keda.serverAddress -}}
{{- fail (printf "the autoscaling of group %s is measured by Prometheus: set keda.serverAddress" .name) -}}
{{- end -}}
{{- end -}}
{{- if gt (int (default 1 .hosts)) 1 -}}
{{- if ne (default "both" .role) "both" -}}
{{- fail (printf "the engines of group %s have several hosts and the role %s: only role both may have several hosts" .name .role) -}}
{{- end -}}
{{- if include "lmkv.nodeClaims" $ -}}
{{- fail (printf "the engines of group %s have several hosts, whose sidecars cannot have claims: set node.poolVolume and node.diskVolume" .name) -}}
{{- end -}}
{{- end -}}
{{- if and .ranksPerHost (le (int (default 1 .hosts)) 1) -}}
{{- fail (printf "ranksPerHost of group %s is for engines with several hosts: set hosts, or pass --data-parallel-size in args" .name) -}}
{{- end -}}
{{- if and (ne (default "both" .role) "both") (ne $node.mode "sidecar") -}}
{{- fail (printf "the engines of group %s have the role %s, so each needs a node of its own: set node.mode to sidecar" .name .role) -}}
{{- end -}}
{{- end -}}
{{- if .Values.proxy.enabled -}}
{{- $prefill := include "lmkv.hasRole" (list . "prefill") -}}
{{- $decode := include "lmkv.hasRole" (list . "decode") -}}
{{- if and $prefill (not $decode) -}}
{{- fail "the proxy has prefill engines and no decode engines: add a group with role decode to engines.groups" -}}
{{- end -}}
{{- if and $decode (not $prefill) -}}
{{- fail "the proxy has decode engines and no prefill engines: add a group with role prefill to engines.groups" -}}
{{- end -}}
{{- if not .Values.engines.groups -}}
{{- fail "the proxy has no engines: add a group to engines.groups, or set proxy.enabled to false" -}}
{{- end -}}
{{- if and $prefill (include "lmkv.hasRole" (list . "both")) -}}
{{- fail "the proxy cannot mix engines of role both with prefill and decode engines: install them as two releases" -}}
{{- end -}}
{{- end -}}
{{- end -}}
