{{/* Configuration keys of processes. The schema checks their values; these are keys that are unknown or follow from other
values, and keys that contradict each other or other values. */}}

{{- define "lmkv.refuseKeys" -}}
{{- $set := list -}}
{{- range list .Values.coordinator .Values.node .Values.engines .Values.proxy .Values.webhook -}}
{{- $set = concat $set (keys (default dict .config)) (default list .extraEnv) -}}
{{- end -}}
{{- if $set -}}
{{- $keys := .Files.Get "files/keys.json" | fromJson -}}
{{- range $component, $known := $keys.components -}}
{{- range $key, $_ := default dict (get $.Values $component).config -}}
{{- if hasKey $known.refused $key -}}
{{- include "lmkv.fail" (printf "%s.config has %s, which %s" $component $key (get $known.refused $key)) -}}
{{- else if not (has $key $known.keys) -}}
{{- include "lmkv.fail" (printf "%s.config has %s, which is no key of lmkv%s" $component $key (include "lmkv.suggestion" (list $key $known.keys) | default "; docs/reference/configuration.md lists them")) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $component := list "coordinator" "node" "engines" "proxy" "webhook" -}}
{{- $known := default (dict "keys" list "refused" dict) (get $keys.components $component) -}}
{{- range default list (get $.Values $component).extraEnv -}}
{{- if hasPrefix "LMKV_" .name -}}
{{- $key := trimPrefix "LMKV_" .name | lower -}}
{{- if not (or (has $key $keys.known) (eq $key "config_file")) -}}
{{- include "lmkv.fail" (printf "%s.extraEnv has %s, which is no key of lmkv%s" $component .name (include "lmkv.suggestion" (list $key $keys.known))) -}}
{{- else if and (has $key $known.keys) (not .valueFrom) -}}
{{- include "lmkv.fail" (printf "%s.extraEnv has %s, whose value nothing would check: set %s.config.%s instead" $component .name $component $key) -}}
{{- else if and (hasPrefix "follows" (get $known.refused $key)) (not (and (eq $key "remote_url") .valueFrom (not $.Values.node.remote.url))) -}}
{{- include "lmkv.fail" (printf "%s.extraEnv has %s, which %s" $component .name (get $known.refused $key)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "lmkv.refuseContradictingKeys" -}}
{{- $node := .Values.node -}}
{{- $config := default dict $node.config -}}
{{- $disk := or $node.diskVolume $node.diskClaim -}}
{{- $store := include "lmkv.hasStore" . -}}
{{- $keepsAll := or $disk $store $config.tiers -}}
{{- if and (eq (toString $config.local_cpu) "false") (eq (toString $config.enable_pd) "false") (not $keepsAll) -}}
{{- include "lmkv.fail" "node.config.local_cpu is false, so that nothing is cached: set node.diskVolume or node.remote, or node.config.local_cpu to true" -}}
{{- end -}}
{{- if and $node.encryptionKeysSecret $disk (ne (default "plain" $config.local_disk_io) "plain") -}}
{{- include "lmkv.fail" (printf "node.config.local_disk_io is %s, which copies chunks as they are, and node.encryptionKeysSecret encrypts them: set node.config.local_disk_io to plain" $config.local_disk_io) -}}
{{- end -}}
{{- if and $disk (ne (default "none" $config.local_disk_codec) "none") (ne (default "plain" $config.local_disk_io) "plain") -}}
{{- include "lmkv.fail" (printf "node.config.local_disk_io is %s, which copies chunks as they are, and node.config.local_disk_codec encodes them: set node.config.local_disk_io to plain" $config.local_disk_io) -}}
{{- end -}}
{{- if and $config.remote_ttl (ne (include "lmkv.seconds" $config.remote_ttl | float64) 0.0) (hasPrefix "s3:" (default "" $node.remote.url)) -}}
{{- include "lmkv.fail" "node.config.remote_ttl is for Valkey and Redis, and node.remote.url names a bucket: give it a lifecycle rule that expires objects" -}}
{{- end -}}
{{- range list (list "max_salt_size" "node.maxLocalCpuSize" $node.maxLocalCpuSize) (list "max_salt_disk_size" "node.maxLocalDiskSize" $node.maxLocalDiskSize) -}}
{{- $quota := get $config (index . 0) -}}
{{- if gt (include "lmkv.gibibytes" $quota | float64) (index . 2 | float64) -}}
{{- include "lmkv.fail" (printf "node.config.%s is %v, more than the %v GiB of %s: lower it, or remove it" (index . 0) $quota (index . 2) (index . 1)) -}}
{{- end -}}
{{- end -}}
{{- if and (not $store) (gt (include "lmkv.gibibytes" $config.max_salt_remote_size | float64) 0.0) -}}
{{- include "lmkv.fail" "node.config.max_salt_remote_size is for a store that nodes share, and there is none: set node.remote, or remove it" -}}
{{- end -}}
{{- range .Values.engines.groups -}}
{{- if and (ne (default "both" .role) "both") (eq (toString $config.enable_pd) "false") -}}
{{- include "lmkv.fail" (printf "group %s of engines.groups has the role %s, and node.config.enable_pd is false, so that no prompt is handed off: remove it" .name .role) -}}
{{- end -}}
{{- end -}}
{{- if $config.require_encryption -}}
{{- if not .Values.tls.mutual -}}
{{- include "lmkv.fail" "node.config.require_encryption needs certificates of nodes: set tls.enabled and tls.mutual" -}}
{{- end -}}
{{- if eq $node.transferChannel "nixl" -}}
{{- include "lmkv.fail" "node.config.require_encryption refuses node.transferChannel nixl, which does not encrypt: set node.transferChannel to auto or tcp" -}}
{{- end -}}
{{- if eq (toString $config.transfer_encryption) "false" -}}
{{- include "lmkv.fail" "node.config.require_encryption and node.config.transfer_encryption: false contradict each other: remove the latter" -}}
{{- end -}}
{{- if and (or $disk $store) (not $node.encryptionKeysSecret) -}}
{{- include "lmkv.fail" "node.config.require_encryption refuses chunks on a disk or in a store that are not encrypted: set node.encryptionKeysSecret" -}}
{{- end -}}
{{- if $config.tiers -}}
{{- include "lmkv.fail" "node.config.require_encryption refuses node.config.tiers, because lmkv cannot know whether they encrypt: remove one of both" -}}
{{- end -}}
{{- end -}}
{{- if and (default dict .Values.coordinator.config).require_encryption (not .Values.tls.enabled) -}}
{{- include "lmkv.fail" "coordinator.config.require_encryption needs certificates: set tls.enabled" -}}
{{- end -}}
{{- with default dict .Values.engines.config -}}
{{- if and .require_encryption (eq (default "cpu" .pd_buffer_device) "cuda") -}}
{{- include "lmkv.fail" "engines.config.require_encryption refuses pd_buffer_device cuda, into which nixl writes without encryption: set engines.config.pd_buffer_device to cpu" -}}
{{- end -}}
{{- end -}}
{{- $policy := default "none" (default dict .Values.proxy.config).cache_salt_policy -}}
{{- if and .Values.proxy.enabled (ne $policy "none") -}}
{{- if not .Values.auth.tokensSecret -}}
{{- include "lmkv.fail" (printf "proxy.config.cache_salt_policy is %s, which needs tokens: set auth.tokensSecret" $policy) -}}
{{- end -}}
{{- if not .Values.clusterSecret.existingSecret -}}
{{- include "lmkv.fail" (printf "proxy.config.cache_salt_policy is %s, which needs a secret: set clusterSecret.existingSecret" $policy) -}}
{{- end -}}
{{- end -}}
{{- $log := default "" (default dict .Values.coordinator.config).audit_log -}}
{{- if and $log (default dict .Values.securityContext).readOnlyRootFilesystem -}}
{{- $writable := list -}}
{{- range concat (default list .Values.coordinator.extraVolumeMounts) (dig "containers" list (default dict .Values.coordinator.podSpec) | include "lmkv.allMounts" | fromJsonArray) -}}
{{- if and .mountPath (hasPrefix (printf "%s/" (trimSuffix "/" .mountPath)) $log) -}}{{- $writable = append $writable .mountPath -}}{{- end -}}
{{- end -}}
{{- if not $writable -}}
{{- include "lmkv.fail" (printf "coordinator.config.audit_log is %s, and no volume holds it: mount one there by coordinator.extraVolumes and coordinator.extraVolumeMounts" $log) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Mounts of all containers, as JSON. Takes the containers. */}}
{{- define "lmkv.allMounts" -}}
{{- $mounts := list -}}
{{- range . -}}{{- $mounts = concat $mounts (default list .volumeMounts) -}}{{- end -}}
{{- toJson $mounts -}}
{{- end -}}

{{/* Whether nodes share a store. */}}
{{- define "lmkv.hasStore" -}}
{{- if or .Values.node.remote.url .Values.node.remote.existingSecret .Values.node.remote.volume -}}true{{- end -}}
{{- range default list .Values.node.extraEnv -}}{{- if eq .name "LMKV_REMOTE_URL" -}}true{{- end -}}{{- end -}}
{{- end -}}
