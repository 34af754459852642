{{/* Groups of engines, their names and arguments, and what a proxy can do with them. */}}

{{- define "lmkv.refuseEngines" -}}
{{- include "lmkv.refuseNames" . -}}
{{- $node := .Values.node -}}
{{- include "lmkv.refuseArguments" (list . "engines.args" .Values.engines.args false) -}}
{{- range .Values.engines.groups -}}
{{- include "lmkv.refuseArguments" (list $ (printf "args of group %s" .name) .args (gt (int (default 1 .hosts)) 1)) -}}
{{- if .autoscaling -}}
{{- if gt (int (default 1 .autoscaling.minReplicas)) (int .autoscaling.maxReplicas) -}}
{{- include "lmkv.fail" (printf "autoscaling of group %s has minReplicas %v above maxReplicas %v: swap them" .name .autoscaling.minReplicas .autoscaling.maxReplicas) -}}
{{- end -}}
{{- if not $.Values.proxy.enabled -}}
{{- include "lmkv.fail" (printf "the autoscaling of group %s counts requests at the proxy: set proxy.enabled to true" .name) -}}
{{- end -}}
{{- if not $.Values.keda.serverAddress -}}
{{- include "lmkv.fail" (printf "the autoscaling of group %s is measured by Prometheus: set keda.serverAddress" .name) -}}
{{- end -}}
{{- end -}}
{{- if gt (int (default 1 .hosts)) 1 -}}
{{- if ne (default "both" .role) "both" -}}
{{- include "lmkv.fail" (printf "the engines of group %s have several hosts and the role %s: only role both may have several hosts" .name .role) -}}
{{- end -}}
{{- if include "lmkv.nodeClaims" $ -}}
{{- include "lmkv.fail" (printf "the engines of group %s have several hosts, whose sidecars cannot have claims: set node.poolVolume and node.diskVolume" .name) -}}
{{- end -}}
{{- include "lmkv.refuseArguments" (list $ "engines.args" $.Values.engines.args true) -}}
{{- end -}}
{{- if and .ranksPerHost (le (int (default 1 .hosts)) 1) -}}
{{- include "lmkv.fail" (printf "ranksPerHost of group %s is for engines with several hosts: set hosts, or pass --data-parallel-size in args" .name) -}}
{{- end -}}
{{- if and (ne (default "both" .role) "both") (ne $node.mode "sidecar") -}}
{{- include "lmkv.fail" (printf "the engines of group %s have the role %s, so each needs a node of its own: set node.mode to sidecar" .name .role) -}}
{{- end -}}
{{- end -}}
{{- if .Values.proxy.enabled -}}{{- include "lmkv.refusePairs" . -}}{{- end -}}
{{- end -}}

{{/* Names that Kubernetes does not take, and resources of two groups with one name. */}}
{{- define "lmkv.refuseNames" -}}
{{- $full := include "lmkv.fullname" . -}}
{{- $names := list -}}
{{- $taken := dict -}}
{{- range $group := .Values.engines.groups -}}
{{- if has .name $names -}}
{{- include "lmkv.fail" (printf "engines.groups has two groups called %s: give each a name of its own" .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- /* StatefulSets: their pods have a label of the name, a dash and ten characters. The workers of an engine with several
hosts are a StatefulSet of the engine's own, with its number. */ -}}
{{- $workload := include "lmkv.engineWorkload" (list $ .) -}}
{{- $several := gt (int (default 1 .hosts)) 1 -}}
{{- $most := ternary 47 52 $several -}}
{{- if gt (len $workload) $most -}}
{{- include "lmkv.fail" (printf "the %s of group %s would be called %s, which has %d characters, and Kubernetes takes %d: shorten the name of the group in engines.groups, or set fullnameOverride" (ternary "LeaderWorkerSet" "StatefulSet" $several) .name $workload (len $workload) $most) -}}
{{- end -}}
{{- range uniq (list $workload (printf "%s-engine-%s" $full .name) (ternary $workload (printf "%s-headless" $workload) $several)) -}}
{{- if hasKey $taken . -}}
{{- include "lmkv.fail" (printf "groups %s and %s of engines.groups would both have a resource called %s: rename one" (get $taken .) $group.name .) -}}
{{- end -}}
{{- $_ := set $taken . $group.name -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Arguments that the chart sets itself, or that vLLM would not understand. Takes a list of root, the name of the
arguments' value, the arguments, and whether the engines have several hosts. */}}
{{- define "lmkv.refuseArguments" -}}
{{- $root := index . 0 -}}
{{- $value := index . 1 -}}
{{- $several := index . 3 -}}
{{- $own := dict
  "kv-transfer-config" "the chart sets itself, to lmkv's connector: remove it, and set keys of the connector in engines.config"
  "kv-offloading-size" "replaces lmkv's connector by one of vLLM's own: remove it, and set node.maxLocalCpuSize"
  "host" "follows from bindAddress: set that"
  "port" "follows from engines.port: set that"
  "uds" "would close engines.port, which probes call: remove it"
  "shutdown-timeout" "follows from engines.stopTimeout: set that"
  "model" "follows from model of the group: set that"
  "headless" "would close engines.port, which probes call: remove it"
-}}
{{- if $several -}}
{{- $hosts := "follows from hosts and ranksPerHost of the group: set those" -}}
{{- $own = merge $own (dict "data-parallel-size" $hosts "dp" $hosts "data-parallel-size-local" $hosts "dpl" $hosts "data-parallel-address" $hosts "dpa" $hosts "data-parallel-start-rank" $hosts "dpr" $hosts) -}}
{{- end -}}
{{- if $root.Values.proxy.enabled -}}
{{- range list "ssl-keyfile" "ssl-certfile" -}}{{- $own = set $own . "would have engines serve HTTPS, and the proxy calls them by HTTP: remove it" -}}{{- end -}}
{{- end -}}
{{- range default list (index . 2) -}}
{{- $flag := regexFind "^--?[^=. ]+" . | trimPrefix "-" | trimPrefix "-" | replace "_" "-" -}}
{{- if and $flag (hasKey $own $flag) -}}
{{- include "lmkv.fail" (printf "%s has %s, which %s" $value . (get $own $flag)) -}}
{{- end -}}
{{- if regexMatch "^-[^= ]* " . -}}
{{- include "lmkv.fail" (printf "%s has %s as one argument, which vLLM does not understand: write %s as one item and its value as the next" $value (quote .) (regexFind "^[^ ]+" .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Engines that a proxy cannot serve with. */}}
{{- define "lmkv.refusePairs" -}}
{{- $prefill := include "lmkv.hasRole" (list . "prefill") -}}
{{- $decode := include "lmkv.hasRole" (list . "decode") -}}
{{- if and $prefill (not $decode) -}}
{{- include "lmkv.fail" "the proxy has prefill engines and no decode engines: add a group with role decode to engines.groups" -}}
{{- end -}}
{{- if and $decode (not $prefill) -}}
{{- include "lmkv.fail" "the proxy has decode engines and no prefill engines: add a group with role prefill to engines.groups" -}}
{{- end -}}
{{- if not .Values.engines.groups -}}
{{- include "lmkv.fail" "the proxy has no engines: add a group to engines.groups, or set proxy.enabled to false" -}}
{{- end -}}
{{- if and $prefill (include "lmkv.hasRole" (list . "both")) -}}
{{- include "lmkv.fail" "the proxy cannot mix engines of role both with prefill and decode engines: install them as two releases" -}}
{{- end -}}
{{- range ternary (list "prefill" "decode") (list "both") (ne $prefill "") -}}
{{- if not (include "lmkv.engineHosts" (list $ .) | fromJsonArray) -}}
{{- include "lmkv.fail" (printf "the proxy has no %s: set replicas of a group%s in engines.groups to 1 or more" (ternary "engines" (printf "%s engines" .) (eq . "both")) (ternary "" (printf " with role %s" .) (eq . "both"))) -}}
{{- end -}}
{{- end -}}
{{- if $prefill -}}
{{- $first := first .Values.engines.groups -}}
{{- range .Values.engines.groups -}}
{{- if ne .model $first.model -}}
{{- include "lmkv.fail" (printf "groups %s and %s of engines.groups hand prompts off, and have the models %s and %s: set the same model in both, or install them as two releases" $first.name .name $first.model .model) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
