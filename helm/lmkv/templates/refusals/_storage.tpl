{{/* Secrets that no process would use, sizes that do not fit, and volumes that clash. */}}

{{/* Secrets that are named where nothing reads them: what they protect would be open. */}}
{{- define "lmkv.refuseSecrets" -}}
{{- $tls := .Values.tls -}}
{{- if not $tls.enabled -}}
{{- range list "serverSecret" "clientSecret" -}}
{{- if get $tls . -}}
{{- include "lmkv.fail" (printf "tls.%s is a certificate that nothing uses without TLS: set tls.enabled to true" .) -}}
{{- end -}}
{{- end -}}
{{- if and $tls.certManager.enabled (not .Values.webhook.enabled) -}}
{{- include "lmkv.fail" "tls.certManager.enabled issues certificates that nothing uses without TLS: set tls.enabled to true" -}}
{{- end -}}
{{- end -}}
{{- if and $tls.clientSecret (not $tls.mutual) -}}
{{- include "lmkv.fail" "tls.clientSecret is a certificate that nothing uses unless TLS is mutual: set tls.mutual to true" -}}
{{- end -}}
{{- if $tls.certManager.enabled -}}
{{- if not $tls.certManager.issuerRef.name -}}
{{- include "lmkv.fail" "tls.certManager needs an issuer: set tls.certManager.issuerRef.name" -}}
{{- end -}}
{{- if ge (include "lmkv.seconds" $tls.certManager.renewBefore | float64) (include "lmkv.seconds" $tls.certManager.duration | float64) -}}
{{- include "lmkv.fail" (printf "tls.certManager.renewBefore is %s, and certificates are valid for tls.certManager.duration %s: set it to less" $tls.certManager.renewBefore $tls.certManager.duration) -}}
{{- end -}}
{{- end -}}
{{- range list "engineSecret" "readerSecret" "operatorSecret" -}}
{{- if and (get $.Values.auth .) (not $.Values.auth.tokensSecret) -}}
{{- include "lmkv.fail" (printf "auth.%s is a token that nothing checks: set auth.tokensSecret, the tokens that are accepted" .) -}}
{{- end -}}
{{- end -}}
{{- $remote := .Values.node.remote -}}
{{- if and $remote.url $remote.existingSecret -}}
{{- include "lmkv.fail" "node.remote.url and node.remote.existingSecret both name the store: keep one" -}}
{{- end -}}
{{- if $remote.volume -}}
{{- if or $remote.url $remote.existingSecret -}}
{{- include "lmkv.fail" "node.remote.volume is a store, and node.remote.url or node.remote.existingSecret names another: keep one" -}}
{{- end -}}
{{- if hasKey $remote.volume "emptyDir" -}}
{{- include "lmkv.fail" "node.remote.volume is an emptyDir, which each pod has for itself: name a volume that pods share, such as a ReadWriteMany claim" -}}
{{- end -}}
{{- end -}}
{{- $isFolder := or $remote.volume (hasPrefix "file:" (default "" $remote.url)) -}}
{{- if and $isFolder (not .Values.node.maxRemoteSize) (not (default dict .Values.node.config).remote_ttl) -}}
{{- include "lmkv.fail" "the folder of node.remote evicts nothing: set node.maxRemoteSize to the GiB that the chunks of all nodes may take, or node.config.remote_ttl" -}}
{{- end -}}
{{- if and .Values.node.maxRemoteSize (not (or $isFolder (include "lmkv.hasStore" .))) -}}
{{- include "lmkv.fail" "node.maxRemoteSize needs a folder that nodes share: set node.remote.volume" -}}
{{- end -}}
{{- if and .Values.node.maxRemoteSize $remote.url (not $isFolder) -}}
{{- include "lmkv.fail" "node.maxRemoteSize is for the folder of node.remote.volume, and node.remote.url names another store, which evicts by its own settings: remove it" -}}
{{- end -}}
{{- if contains "@" (default "" $remote.url) -}}
{{- include "lmkv.fail" "node.remote.url holds a password, which every reader of the node's ConfigMap could see: put the URL into a secret and set node.remote.existingSecret" -}}
{{- end -}}
{{- end -}}

{{/* Volumes that are smaller than what nodes put into them, and limits of memory that do. */}}
{{- define "lmkv.refuseSizes" -}}
{{- $node := .Values.node -}}
{{- range list "requests" "limits" -}}
{{- if hasKey (default dict (get (default dict $node.resources) .)) "memory" -}}
{{- include "lmkv.fail" (printf "node.resources.%s has memory, which follows from node.maxLocalCpuSize and node.memoryOverhead: remove it" .) -}}
{{- end -}}
{{- end -}}
{{- $sizes := list
  (list "node.poolVolume.emptyDir.sizeLimit" (dig "emptyDir" "sizeLimit" "" (default dict $node.poolVolume)) "node.maxLocalCpuSize" $node.maxLocalCpuSize)
  (list "node.poolClaim.resources.requests.storage" (dig "resources" "requests" "storage" "" (default dict $node.poolClaim)) "node.maxLocalCpuSize" $node.maxLocalCpuSize)
  (list "node.diskVolume.emptyDir.sizeLimit" (dig "emptyDir" "sizeLimit" "" (default dict $node.diskVolume)) "node.maxLocalDiskSize" $node.maxLocalDiskSize)
  (list "node.diskClaim.resources.requests.storage" (dig "resources" "requests" "storage" "" (default dict $node.diskClaim)) "node.maxLocalDiskSize" $node.maxLocalDiskSize)
-}}
{{- range $sizes -}}
{{- $given := include "lmkv.kibibytes" (index . 1 | toString) -}}
{{- if and $given (le (float64 $given) (mulf (index . 3) 1048576.0)) -}}
{{- include "lmkv.fail" (printf "%s is %s, which does not hold the %v GiB of %s and the list of its chunks: raise it" (index . 0) (index . 1) (index . 3) (index . 2)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Volumes of a pod with one name, and mounts without a volume or at one path. Takes a list of root, the value
that adds volumes, the pod's spec, and the names of claims that are volumes. What else is wrong is the cause, if it is. */}}
{{- define "lmkv.refuseVolumes" -}}
{{- $root := index . 0 -}}
{{- $value := index . 1 -}}
{{- $names := index . 3 -}}
{{- range (index . 2).volumes -}}
{{- if has .name $names -}}
{{- include "lmkv.refuse" $root -}}
{{- include "lmkv.fail" (printf "%s has a volume called %s, and the pods have one of that name: rename it" $value .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- range concat (default list (index . 2).initContainers) (index . 2).containers -}}
{{- $container := .name -}}
{{- $paths := list -}}
{{- range .volumeMounts -}}
{{- if not (has .name $names) -}}
{{- include "lmkv.refuse" $root -}}
{{- include "lmkv.fail" (printf "the container %s mounts %s, which is no volume of its pods: add it to %s" $container .name $value) -}}
{{- end -}}
{{- if has .mountPath $paths -}}
{{- include "lmkv.refuse" $root -}}
{{- include "lmkv.fail" (printf "the container %s mounts two volumes at %s: mount that of %s elsewhere" $container .mountPath $value) -}}
{{- end -}}
{{- $paths = append $paths .mountPath -}}
{{- end -}}
{{- end -}}
{{- end -}}
