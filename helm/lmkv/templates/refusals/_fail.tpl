{{/* Refuses the values, with a sentence that names the value that is meant. `helm lint` ignores `fail`; it reports the
sentence as the name of a template that does not exist. */}}
{{- define "lmkv.fail" -}}
{{- fail . -}}
{{- include . dict -}}
{{- end -}}

{{/* Seconds of a time such as 90, 1.5h, 500ms or 1h30m. */}}
{{- define "lmkv.seconds" -}}
{{- $total := 0.0 -}}
{{- $units := dict "us" 0.000001 "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0 "d" 86400.0 -}}
{{- range regexFindAll "[0-9.]+ ?[a-z]*" (kindIs "string" . | ternary . (printf "%f" (float64 .))) -1 -}}
{{- $total = addf $total (mulf (regexFind "^[0-9.]+" . | float64) (get $units (regexFind "[a-z]*$" . | default "s"))) -}}
{{- end -}}
{{- $total -}}
{{- end -}}

{{/* GiB of a size such as 5, 1.5 GiB, 512MB or 64Ki; 0: there is none. */}}
{{- define "lmkv.gibibytes" -}}
{{- $text := kindIs "string" . | ternary . (printf "%f" (float64 .)) -}}
{{- $unit := regexFind "[KMGT]" $text | default "G" -}}
{{- divf (regexFind "^[0-9.]+" $text | float64) (get (dict "K" 1048576.0 "M" 1024.0 "G" 1.0 "T" 0.0009765625) $unit) -}}
{{- end -}}

{{/* `; did you mean X?` with the known word that shares most pairs of letters; nothing: none is alike. Takes a list of the
word and the known ones. */}}
{{- define "lmkv.suggestion" -}}
{{- $word := index . 0 -}}
{{- $pairs := dict -}}
{{- range $at := until (sub (len $word) 1 | max 0 | int) -}}{{- $_ := set $pairs (substr $at (int (add $at 2)) $word) true -}}{{- end -}}
{{- $best := "" -}}
{{- $most := 0.5 -}}
{{- range $known := index . 1 -}}
{{- $shared := 0 -}}
{{- range $at := until (sub (len $known) 1 | int) -}}{{- if hasKey $pairs (substr $at (int (add $at 2)) $known) -}}{{- $shared = add $shared 1 -}}{{- end -}}{{- end -}}
{{- $likeness := divf (mulf 2.0 (float64 $shared)) (float64 (add (len $pairs) (len $known) -1)) -}}
{{- if gt $likeness $most -}}{{- $most = $likeness -}}{{- $best = $known -}}{{- end -}}
{{- end -}}
{{- with $best -}}; did you mean {{ . }}?{{- end -}}
{{- end -}}
