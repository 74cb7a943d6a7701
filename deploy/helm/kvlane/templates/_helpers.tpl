{{- define "kvlane.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Leaves 13 characters for suffixes such as -dashboard and -operators. */}}
{{- define "kvlane.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "kvlane.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "kvlane.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* kvlane in the path, or as a picker. */}}
{{- define "kvlane.component" -}}
{{- if eq .Values.mode "gateway" }}gateway{{ else }}picker{{ end }}
{{- end }}

{{- define "kvlane.selectorLabels" -}}
app.kubernetes.io/name: {{ include "kvlane.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvlane.labels" -}}
{{ include "kvlane.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kvlane.image" -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag }}{{ end }}
{{- end }}

{{- define "kvlane.ownImage" -}}
{{- include "kvlane.image" (dict "repository" .Values.image.repository "digest" .Values.image.digest "tag" (default .Chart.AppVersion .Values.image.tag)) }}
{{- end }}

{{- define "kvlane.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "kvlane.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "kvlane.keysSecret" -}}
{{- default (printf "%s-operators" (include "kvlane.fullname" .)) .Values.auth.existingSecret }}
{{- end }}

{{/* Namespaces of the engines, as a JSON list. */}}
{{- define "kvlane.namespaces" -}}
{{- default (list .Release.Namespace) .Values.engines.namespaces | uniq | toJson }}
{{- end }}

{{/* A LabelSelector as kubectl's -l takes it. */}}
{{- define "kvlane.selectorText" -}}
{{- $terms := list }}
{{- range $key, $value := .matchLabels }}
{{- $terms = append $terms (printf "%s=%s" $key $value) }}
{{- end }}
{{- range .matchExpressions }}
{{- if eq .operator "In" }}{{ $terms = append $terms (printf "%s in (%s)" .key (join "," .values)) }}
{{- else if eq .operator "NotIn" }}{{ $terms = append $terms (printf "%s notin (%s)" .key (join "," .values)) }}
{{- else if eq .operator "Exists" }}{{ $terms = append $terms .key }}
{{- else }}{{ $terms = append $terms (printf "!%s" .key) }}
{{- end }}
{{- end }}
{{- join "," $terms }}
{{- end }}

{{- define "kvlane.poolName" -}}
{{- default (include "kvlane.fullname" .) .Values.gatewayApi.inferencePool.name }}
{{- end }}

{{/* The InferencePool whose pods are the engines. */}}
{{- define "kvlane.poolOf" -}}
{{- if and (eq .Values.mode "gateway-api") .Values.gatewayApi.inferencePool.create }}{{ include "kvlane.poolName" . }}{{ else }}{{ .Values.engines.inferencePool }}{{ end }}
{{- end }}

{{/* Where kvlane looks for engines. In mode gateway-api the chart's own InferencePool says it, unless other discovery is asked for. */}}
{{- define "kvlane.discovery" -}}
{{- if and (eq .Values.mode "gateway-api") (eq .Values.engines.discovery "pods") .Values.gatewayApi.inferencePool.create }}inferencePool
{{- else }}{{ .Values.engines.discovery }}
{{- end }}
{{- end }}

{{/* Not empty if pods of kvlane exchange news. */}}
{{- define "kvlane.exchanges" -}}
{{- $enabled := .Values.exchange.enabled }}
{{- if kindIs "invalid" $enabled }}{{ $enabled = gt (int .Values.replicas) 1 }}{{ end }}
{{- if $enabled }}yes{{ end }}
{{- end }}

{{/* The name of all pods of kvlane, and that of their certificates. */}}
{{- define "kvlane.podsHost" -}}
{{- include "kvlane.fullname" . }}-pods.{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end }}

{{/* The Secret with the certificate that pods of kvlane show each other. */}}
{{- define "kvlane.exchangeSecret" -}}
{{- $tls := .Values.exchange.tls }}
{{- if include "kvlane.exchanges" . }}
{{- if $tls.secretName }}{{ $tls.secretName }}{{ else if $tls.certManager.enabled }}{{ include "kvlane.fullname" . }}-replicas{{ end }}
{{- end }}
{{- end }}

{{/* Not empty if a pod of kvlane talks to the API server. */}}
{{- define "kvlane.needsToken" -}}
{{- if has (include "kvlane.discovery" .) (list "pods" "service" "inferencePool") }}yes{{ end }}
{{- end }}

{{/* What no schema can say. */}}
{{- define "kvlane.validate" -}}
{{- $kind := include "kvlane.discovery" . }}
{{- $engines := .Values.engines }}
{{- $selects := include "kvlane.selectorText" $engines.selector }}
{{- if and (eq $kind "pods") (not $selects) }}{{ fail "engines.selector is empty: set the labels of the engines' pods, as in --set engines.selector.matchLabels.app=vllm" }}{{ end }}
{{- if and (not $selects) (or .Values.networkPolicy.engines.enabled .Values.monitoring.podMonitor.enabled) }}{{ fail "networkPolicy.engines and monitoring.podMonitor select the engines' pods: set engines.selector.matchLabels" }}{{ end }}
{{- if and (not $selects) .Values.networkPolicy.egress.enabled (eq $kind "inferencePool") }}{{ fail "networkPolicy.egress selects the engines' pods: set engines.selector.matchLabels" }}{{ end }}
{{- $prefill := include "kvlane.selectorText" $engines.prefillSelector }}
{{- $decode := include "kvlane.selectorText" $engines.decodeSelector }}
{{- if and (or $prefill $decode) (ne $kind "pods") }}{{ fail (printf "engines.prefillSelector and engines.decodeSelector find pods by themselves, not with %s; label the pods with llm-d.ai/role instead" $kind) }}{{ end }}
{{- if and (or $prefill $decode) (not (and $prefill $decode)) }}{{ fail "set both engines.prefillSelector and engines.decodeSelector, or neither" }}{{ end }}
{{- if and (eq $kind "service") (not $engines.service) }}{{ fail "engines.discovery is service: set engines.service to its name" }}{{ end }}
{{- if and (eq $kind "inferencePool") (not (include "kvlane.poolOf" .)) }}{{ fail "engines.discovery is inferencePool: set engines.inferencePool to its name" }}{{ end }}
{{- if and (eq $kind "dns") (not $engines.dns) }}{{ fail "engines.discovery is dns: set engines.dns, as in [http://vllm-headless:8000]" }}{{ end }}
{{- if and (eq $kind "static") (not $engines.urls) }}{{ fail "engines.discovery is static: set engines.urls" }}{{ end }}
{{- if eq .Values.mode "envoy" }}
{{- if ne $kind "pods" }}{{ fail (printf "mode envoy: Envoy finds engines by a headless Service over engines.selector; set engines.discovery to pods, not %s" $kind) }}{{ end }}
{{- if $engines.selector.matchExpressions }}{{ fail "mode envoy: a Service has no matchExpressions; use engines.selector.matchLabels" }}{{ end }}
{{- end }}
{{- if eq .Values.mode "gateway-api" }}
{{- if .Values.gatewayApi.inferencePool.create }}
{{- if not $engines.selector.matchLabels }}{{ fail "mode gateway-api: an InferencePool selects by labels; set engines.selector.matchLabels" }}{{ end }}
{{- if $engines.selector.matchExpressions }}{{ fail "mode gateway-api: an InferencePool has no matchExpressions; use engines.selector.matchLabels" }}{{ end }}
{{- if gt (len $engines.ports) 8 }}{{ fail "mode gateway-api: an InferencePool has at most 8 ports" }}{{ end }}
{{- if ne (include "kvlane.namespaces" .) (list .Release.Namespace | toJson) }}{{ fail "mode gateway-api: an InferencePool selects pods of its own namespace; install the release there and leave engines.namespaces empty" }}{{ end }}
{{- end }}
{{- if and .Values.gatewayApi.httpRoute.create (not .Values.gatewayApi.httpRoute.gateway.name) }}{{ fail "gatewayApi.httpRoute.create: set gatewayApi.httpRoute.gateway.name to the name of your Gateway" }}{{ end }}
{{- end }}
{{- if ne .Values.mode "gateway" }}
{{- if and (not .Values.auth.openClients) (eq .Values.picker.failureMode "FailOpen") }}{{ fail "auth.openClients is false and picker.failureMode is FailOpen: while no picker answers, requests would pass without a key; set picker.failureMode to FailClose" }}{{ end }}
{{- if and (eq .Values.picker.tls.mode "secret") (not .Values.picker.tls.secretName) }}{{ fail "picker.tls.mode is secret: set picker.tls.secretName" }}{{ end }}
{{- if .Values.tls.secretName }}{{ fail "tls.secretName is for the mode gateway: clients do not talk to kvlane in the other modes; see picker.tls" }}{{ end }}
{{- end }}
{{- if and .Values.networkPolicy.egress.enabled (not .Values.networkPolicy.egress.extra) (not (has $kind (list "pods" "inferencePool"))) }}{{ fail (printf "networkPolicy.egress.enabled: with engines.discovery %s the chart does not know the engines' pods; allow them in networkPolicy.egress.extra" $kind) }}{{ end }}
{{- $auth := default dict (get .Values.config "auth") }}
{{- if and (get $auth "isolate_tenants") (or (gt (int .Values.replicas) 1) (include "kvlane.exchanges" .)) (not .Values.auth.tenantSaltSecret) (not (get $auth "tenant_salt_key")) }}{{ fail "config.auth.isolate_tenants with several pods: each would make a key of its own, and the same prompt would have another salt at each; create one with kubectl create secret generic NAME --from-literal=key=$(openssl rand -hex 32), and set auth.tenantSaltSecret to NAME" }}{{ end }}
{{- if and .Values.exchange.tls.certManager.enabled (not (get .Values.exchange.tls.certManager.issuerRef "name")) }}{{ fail "exchange.tls.certManager.enabled: set exchange.tls.certManager.issuerRef to the Issuer that signs the pods' certificate, as in {name: kvlane-replicas, kind: Issuer}" }}{{ end }}
{{- if ne .Values.autoscaling.kind "none" }}
{{- if not .Values.autoscaling.model }}{{ fail "autoscaling.kind: set autoscaling.model to the name that engines serve, the label `model` of kvlane's metrics" }}{{ end }}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) }}{{ fail "autoscaling.minReplicas is above autoscaling.maxReplicas" }}{{ end }}
{{- if and (eq .Values.autoscaling.kind "hpa") (eq (int .Values.autoscaling.minReplicas) 0) }}{{ fail "autoscaling.minReplicas 0: a HorizontalPodAutoscaler does not scale to zero without an alpha feature; use kind keda" }}{{ end }}
{{- end }}
{{- end }}
