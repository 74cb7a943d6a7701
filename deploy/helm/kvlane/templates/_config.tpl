{{/* kvlane's configuration: what the chart decides, and over it .Values.config. */}}
{{- define "kvlane.config" -}}
{{- $v := .Values }}
{{- $kind := include "kvlane.discovery" . }}
{{- $config := dict
      "metrics" (dict "host" $v.listenAddress "port" 29000)
      "auth" (dict "keys_file" "/etc/kvlane/keys/keys" "open_clients" $v.auth.openClients)
      "log" (dict "format" $v.logFormat)
      "workers" list }}
{{- if $v.auth.openMetrics }}{{ $_ := set $config.auth "open_metrics" true }}{{ end }}

{{- if $v.auth.tenantSaltSecret }}{{ $_ := set $config.auth "tenant_salt_key" (dict "file" "/etc/kvlane/salt/key") }}{{ end }}
{{- if include "kvlane.exchanges" . }}
{{- $host := ternary (printf "[%s]" $v.listenAddress) $v.listenAddress (contains ":" $v.listenAddress) }}
{{- $replicas := dict
      "listen" (printf "%s:%d" $host (int $v.exchange.port))
      "peers" (list (printf "%s:%d" (include "kvlane.podsHost" .) (int $v.exchange.port))) }}
{{- if include "kvlane.exchangeSecret" . }}
{{- $_ := set $replicas "certificate" "/etc/kvlane/replicas/tls.crt" }}
{{- $_ := set $replicas "private_key" "/etc/kvlane/replicas/tls.key" }}
{{- $_ := set $replicas "ca" "/etc/kvlane/replicas/ca.crt" }}
{{- end }}
{{- $_ := set $config "replicas" $replicas }}
{{- end }}

{{- $server := dict
      "relay_threads" (int $v.threads)
      "shutdown_delay" (printf "%ds" (int $v.shutdown.delaySeconds))
      "shutdown_grace" (printf "%ds" (int $v.shutdown.graceSeconds)) }}
{{- if eq $v.mode "gateway" }}
{{- $_ := set $server "host" $v.listenAddress }}
{{- $_ := set $server "port" 30000 }}
{{- if $v.tls.secretName }}
{{- $_ := set $config "tls" (dict "certificate" "/etc/kvlane/tls/tls.crt" "private_key" "/etc/kvlane/tls/tls.key") }}
{{- end }}
{{- else }}
{{- $epp := dict "host" $v.listenAddress "port" 9002 "health_port" 9003
      "secure_serving" (ne $v.picker.tls.mode "off") "observe_responses" (eq $v.picker.responses "observe") "fallbacks" (int $v.picker.fallbacks) }}
{{- if eq $v.picker.tls.mode "secret" }}
{{- /* For Envoy and gateways only: probes and Prometheus reach the operators' port by the pod's address. */}}
{{- $_ := set $config "tls" (dict "certificate" "/etc/kvlane/tls/tls.crt" "private_key" "/etc/kvlane/tls/tls.key" "metrics" false) }}
{{- end }}
{{- $_ := set $config "epp" $epp }}
{{- end }}
{{- $_ := set $config "server" $server }}

{{- $tokens := dict "threads" (int $v.threads) }}
{{- if $v.tokenizer.path }}{{ $_ := set $tokens "path" (printf "%s/%s" $v.tokenizer.mountPath (trimPrefix "/" $v.tokenizer.path)) }}{{ end }}
{{- $_ := set $config "tokens" $tokens }}

{{- $routing := dict }}
{{- if eq (include "kvlane.scalesToZero" .) "yes" }}
{{- $_ := set $routing "empty_pool_timeout" (printf "%ds" (int $v.autoscaling.wakeSeconds)) }}
{{- /* Known before it has been served for the first time. */}}
{{- $_ := set $routing "pools" (dict $v.autoscaling.model dict) }}
{{- end }}
{{- if ne $v.snapshots.medium "none" }}
{{- $_ := set $routing "index_snapshot" "/var/lib/kvlane/index.snapshot" }}
{{- $_ := set $config "kv_events" (dict "snapshot" "/var/lib/kvlane/kv.snapshot") }}
{{- end }}

{{- with $routing }}{{ $_ := set $config "routing" . }}{{ end }}

{{- if has $kind (list "pods" "service" "inferencePool") }}
{{- $kubernetes := dict "enabled" true "namespaces" (include "kvlane.namespaces" . | fromJsonArray) }}
{{- if eq $kind "pods" }}
{{- $prefill := include "kvlane.selectorText" $v.engines.prefillSelector }}
{{- $decode := include "kvlane.selectorText" $v.engines.decodeSelector }}
{{- if or $prefill $decode }}
{{- $_ := set $kubernetes "prefill_selector" $prefill }}
{{- $_ := set $kubernetes "decode_selector" $decode }}
{{- else }}
{{- $_ := set $kubernetes "selector" (include "kvlane.selectorText" $v.engines.selector) }}
{{- end }}
{{- $_ := set $kubernetes "ports" $v.engines.ports }}
{{- else if eq $kind "service" }}
{{- $_ := set $kubernetes "service" $v.engines.service }}
{{- else }}
{{- $_ := set $kubernetes "inference_pool" (include "kvlane.poolOf" .) }}
{{- end }}
{{- $_ := set $config "discovery" (dict "kubernetes" $kubernetes) }}
{{- else if eq $kind "dns" }}
{{- $_ := set $config "discovery" (dict "dns" $v.engines.dns) }}
{{- else }}
{{- $workers := list }}
{{- range $v.engines.urls }}{{ $workers = append $workers (dict "url" .) }}{{ end }}
{{- $_ := set $config "workers" $workers }}
{{- end }}
{{- mustMergeOverwrite $config (deepCopy $v.config) | toYaml }}
{{- end }}

{{- define "kvlane.scalesToZero" -}}
{{- if and (eq .Values.autoscaling.kind "keda") (eq (int .Values.autoscaling.minReplicas) 0) }}yes{{ end }}
{{- end }}

{{/* The part of the configuration that a reload cannot change: docs/operations.md, "Reload". Its checksum rolls the pods; any
     other change is read while kvlane runs. */}}
{{- define "kvlane.restartConfig" -}}
{{- $all := include "kvlane.config" . | fromYaml }}
{{- $part := pick $all "metrics" "kv_events" "tokens" "log" "epp" }}
{{- $_ := set $part "server" (pick (get $all "server") "host" "port" "reuse_port" "relay_threads") }}
{{- $routing := default dict (get $all "routing") }}
{{- $kept := pick $routing "block_bytes" "seed" "index_snapshot" }}
{{- range $model, $pool := default dict (get $routing "pools") }}
{{- with pick (default dict $pool) "tokenizer" "chat_template" }}{{ $_ := set $kept $model . }}{{ end }}
{{- end }}
{{- $_ := set $part "routing" $kept }}
{{- with pick (default dict (get $all "replicas")) "listen" "cluster" "interval" "bandwidth" }}{{ $_ := set $part "replicas" . }}{{ end }}
{{- with pick (default dict (get $all "disaggregation")) "connector" }}{{ $_ := set $part "disaggregation" . }}{{ end }}
{{- $_ := set $part "tracing" (pick (default dict (get $all "tracing")) "queue_size") }}
{{- $part | toYaml }}
{{- end }}
