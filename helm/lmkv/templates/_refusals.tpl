{{/* Checks that the schema cannot express: values that contradict each other. Each error names the value and the fix. */}}
{{- define "lmkv.refuse" -}}
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
{{- if and $node.maxLocalDiskSize (not $node.diskVolume) -}}
{{- fail "node.maxLocalDiskSize needs a disk: set node.diskVolume to a volume" -}}
{{- end -}}
{{- if and $node.poolClaim (ne $node.mode "sidecar") -}}
{{- fail "node.poolClaim is for node.mode sidecar: a DaemonSet has no claims of its pods; set node.poolVolume" -}}
{{- end -}}
{{- if and $node.poolClaim $node.poolVolume -}}
{{- fail "node.poolClaim and node.poolVolume are both set: keep one" -}}
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
{{- if and $node.diskVolume (not $node.maxLocalDiskSize) -}}
{{- fail "node.diskVolume needs a size: set node.maxLocalDiskSize to the GiB that chunks may take" -}}
{{- end -}}
{{- if gt (index $node.nixlPorts 0 | int) (index $node.nixlPorts 1 | int) -}}
{{- fail "node.nixlPorts names the last port before the first: swap them" -}}
{{- end -}}
{{- $names := list -}}
{{- range .Values.engines.groups -}}
{{- if has .name $names -}}
{{- fail (printf "engines.groups has two groups called %s: give each a name of its own" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
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
