{{/* Ports, host names, and traffic that policies would block. */}}

{{/* Ports of one pod that two servers would bind. */}}
{{- define "lmkv.refusePorts" -}}
{{- $node := .Values.node -}}
{{- $nodePorts := dict "node.p2pPort" $node.p2pPort "node.transferPort" $node.transferPort "node.metricsPort" $node.metricsPort -}}
{{- $pods := list (dict "coordinator.port" .Values.coordinator.port "coordinator.httpPort" .Values.coordinator.httpPort) -}}
{{- $pods = append $pods (eq $node.mode "sidecar" | ternary (merge (dict "engines.port" .Values.engines.port) $nodePorts) $nodePorts) -}}
{{- range $ports := $pods -}}
{{- $taken := dict -}}
{{- range $value, $port := $ports -}}
{{- $number := int $port | toString -}}
{{- if hasKey $taken $number -}}
{{- include "lmkv.fail" (printf "%s and %s are both %s, and are ports of one pod: set one of them to another port" (get $taken $number) $value $number) -}}
{{- end -}}
{{- $_ := set $taken $number $value -}}
{{- if and (hasKey $ports "node.p2pPort") (has $node.transferChannel (list "auto" "nixl")) (ge (int $port) (int (index $node.nixlPorts 0))) (le (int $port) (int (index $node.nixlPorts 1))) -}}
{{- include "lmkv.fail" (printf "%s is %s, one of the ports %v to %v of node.nixlPorts: set it to another port" $value $number (index $node.nixlPorts 0) (index $node.nixlPorts 1)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Host names that are none, or that the process behind them would not answer by. */}}
{{- define "lmkv.refuseHosts" -}}
{{- range $component := list "coordinator" "proxy" -}}
{{- range list (list "ingress" "hosts") (list "httpRoute" "hostnames") (list "grpcRoute" "hostnames") -}}
{{- $kind := index . 0 -}}
{{- $route := default dict (get (get $.Values $component) $kind) -}}
{{- $value := printf "%s.%s.%s" $component $kind (index . 1) -}}
{{- $seen := dict -}}
{{- range $host := default list (get $route (index . 1)) -}}
{{- $name := regexReplaceAll "^[a-z]+://" (lower $host) "" | regexFind "^(\\*\\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*" -}}
{{- if ne $name $host -}}
{{- include "lmkv.fail" (printf "%s has %s, and takes names of hosts alone, without scheme, port or path%s" $value (quote $host) (ternary (printf ": write %s" $name) "" (ne $name ""))) -}}
{{- end -}}
{{- if regexMatch "^[0-9.]+$" $host -}}
{{- include "lmkv.fail" (printf "%s has %s, which is an address, and takes names of hosts alone: leave it empty to admit all" $value $host) -}}
{{- end -}}
{{- if hasKey $seen $host -}}
{{- include "lmkv.fail" (printf "%s has %s twice: keep one" $value $host) -}}
{{- end -}}
{{- $_ := set $seen $host true -}}
{{- $allowed := default list (default dict (get $.Values $component).config).allowed_hosts -}}
{{- $allowed = kindIs "string" $allowed | ternary (list $allowed) $allowed -}}
{{- if and $allowed $route.enabled (ne $kind "grpcRoute") -}}
{{- $answered := has "*" $allowed -}}
{{- range $allowed -}}
{{- if or (eq . $host) (and (hasPrefix "*." .) (hasSuffix (trimPrefix "*" .) $host)) -}}{{- $answered = true -}}{{- end -}}
{{- end -}}
{{- if not $answered -}}
{{- include "lmkv.fail" (printf "%s has %s, which %s.config.allowed_hosts does not admit: add it there" $value $host $component) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Traffic that network policies block although another value needs it. */}}
{{- define "lmkv.refuseEgress" -}}
{{- $policy := .Values.networkPolicy -}}
{{- $egress := $policy.egress -}}
{{- if and $egress.enabled (not $policy.enabled) -}}
{{- include "lmkv.fail" "networkPolicy.egress.enabled restricts nothing without policies: set networkPolicy.enabled to true" -}}
{{- end -}}
{{- if and $policy.enabled .Values.monitoring.serviceMonitor.enabled (not $policy.monitoringFrom) -}}
{{- include "lmkv.fail" "networkPolicy.enabled keeps Prometheus from the metrics of monitoring.serviceMonitor: name its pods in networkPolicy.monitoringFrom" -}}
{{- end -}}
{{- if and $policy.enabled $egress.enabled -}}
{{- if and .Values.otlpEndpoint (not $egress.all) -}}
{{- include "lmkv.fail" "networkPolicy.egress.enabled blocks otlpEndpoint: admit the collector in networkPolicy.egress.all" -}}
{{- end -}}
{{- if and .Values.coordinator.layoutMap.existingSecret (not $egress.all) (not $egress.coordinator) -}}
{{- include "lmkv.fail" "networkPolicy.egress.enabled blocks coordinator.layoutMap: admit Valkey in networkPolicy.egress.coordinator" -}}
{{- end -}}
{{- $isFolder := or .Values.node.remote.volume (hasPrefix "file:" (default "" .Values.node.remote.url)) -}}
{{- if and (include "lmkv.hasStore" .) (not $isFolder) (not $egress.all) (not $egress.node) -}}
{{- include "lmkv.fail" "networkPolicy.egress.enabled blocks node.remote: admit the store in networkPolicy.egress.node" -}}
{{- end -}}
{{- if not (or $egress.all $egress.engine .Values.engines.modelVolume) -}}
{{- range .Values.engines.groups -}}
{{- $own := merge dict (default dict .workloadSpec) (default dict .podSpec) (default dict $.Values.engines.workloadSpec) (default dict $.Values.engines.podSpec) -}}
{{- if not (or $own.volumeClaimTemplates $own.volumes (hasPrefix "/" .model)) -}}
{{- include "lmkv.fail" (printf "networkPolicy.egress.enabled blocks the download of %s, the model of group %s: admit its registry in networkPolicy.egress.engine, or set engines.modelVolume to a volume with it" .model .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
