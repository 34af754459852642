{{/* The operator's fields of a resource, merged over those of the chart. Every workload and Service is rendered by these, so
that a field needs no value of its own. */}}

{{/* A workload with its `workloadSpec` and `podSpec`. A volume that a claim of the same name replaces is left out.
Takes a dict of text (the manifest), values: a list of the component's values, of which later ones win, root, and
volumes: the value that adds volumes. */}}
{{- define "lmkv.workload" -}}
{{- $manifest := fromYaml .text -}}
{{- range .values -}}
{{- $_ := set $manifest "spec" (include "lmkv.merge" (list $manifest.spec (default dict .workloadSpec)) | fromJson).merged -}}
{{- end -}}
{{- $claimed := list -}}
{{- range $manifest.spec.volumeClaimTemplates -}}{{- $claimed = append $claimed .metadata.name -}}{{- end -}}
{{- $hosts := default dict $manifest.spec.leaderWorkerTemplate -}}
{{- range $pod := compact (list $manifest.spec.template $hosts.leaderTemplate $hosts.workerTemplate) -}}
{{- range $.values -}}
{{- $_ := set $pod "spec" (include "lmkv.merge" (list $pod.spec (default dict .podSpec)) | fromJson).merged -}}
{{- end -}}
{{- $volumes := list -}}
{{- range $pod.spec.volumes -}}
{{- if not (has .name $claimed) -}}{{- $volumes = append $volumes . -}}{{- end -}}
{{- end -}}
{{- $_ := set $pod.spec "volumes" $volumes -}}
{{- include "lmkv.refuseVolumes" (list $.root $.volumes $pod.spec $claimed) -}}
{{- end -}}
{{- toYaml $manifest -}}
{{- end -}}

{{/* A Service with the operator's fields. Takes a list of the manifest's text and the values `service`. */}}
{{- define "lmkv.service" -}}
{{- $manifest := index . 0 | fromYaml -}}
{{- $values := index . 1 -}}
{{- $_ := set $manifest.spec "type" $values.type -}}
{{- with $values.loadBalancerClass -}}{{- $_ := set $manifest.spec "loadBalancerClass" . -}}{{- end -}}
{{- $_ := set $manifest "spec" (include "lmkv.merge" (list $manifest.spec (default dict $values.spec)) | fromJson).merged -}}
{{- toYaml $manifest -}}
{{- end -}}

{{/* JSON of `merged`: one value over another. Objects are merged by key, and a key that is null is removed. Lists of items
with a name (containers, variables, volumes, ports, claims) or mount path are merged by it. Others are replaced.
Takes a list of both. */}}
{{- define "lmkv.merge" -}}
{{- $base := index . 0 -}}
{{- $over := index . 1 -}}
{{- $merged := $over -}}
{{- if and (kindIs "map" $base) (kindIs "map" $over) -}}
{{- $merged = deepCopy $base -}}
{{- range $key, $value := $over -}}
{{- if kindIs "invalid" $value -}}
{{- $merged = omit $merged $key -}}
{{- else -}}
{{- $_ := set $merged $key (include "lmkv.merge" (list (get $base $key) $value) | fromJson).merged -}}
{{- end -}}
{{- end -}}
{{- else if and (kindIs "slice" $base) (kindIs "slice" $over) -}}
{{- $named := gt (len $over) 0 -}}
{{- $items := dict -}}
{{- range $over -}}
{{- $name := include "lmkv.itemName" . -}}
{{- if $name -}}{{- $_ := set $items $name . -}}{{- else -}}{{- $named = false -}}{{- end -}}
{{- end -}}
{{- if $named -}}
{{- $merged = list -}}
{{- range $base -}}
{{- $name := include "lmkv.itemName" . -}}
{{- if hasKey $items $name -}}
{{- $merged = append $merged (include "lmkv.merge" (list . (get $items $name)) | fromJson).merged -}}
{{- $items = omit $items $name -}}
{{- else -}}
{{- $merged = append $merged . -}}
{{- end -}}
{{- end -}}
{{- range $over -}}
{{- if hasKey $items (include "lmkv.itemName" .) -}}{{- $merged = append $merged . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson (dict "merged" $merged) -}}
{{- end -}}

{{/* What distinguishes an item of a list; nothing: its place alone. */}}
{{- define "lmkv.itemName" -}}
{{- if kindIs "map" . -}}{{- coalesce .mountPath .name (dig "metadata" "name" "" .) -}}{{- end -}}
{{- end -}}
