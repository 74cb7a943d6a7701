{{/* DNS name of a Service: NAME, NAMESPACE. */}}
{{- define "kvlane.host" -}}
{{- $root := index . 0 }}{{ printf "%s.%s.svc.%s" (index . 1) (index . 2) $root.Values.clusterDomain }}
{{- end }}

{{/* Many short connections' worth of streams: Envoy's default of 1,024 would reject requests long before engines are full. */}}
{{- define "kvlane.envoyThresholds" -}}
thresholds: [{max_connections: 100000, max_pending_requests: 100000, max_requests: 100000, max_retries: 1000}]
{{- end }}

{{/* Each address that a name has is a host. A pod that becomes ready is one a second later. */}}
{{- define "kvlane.envoyDns" -}}
name: envoy.clusters.dns
typed_config:
  "@type": type.googleapis.com/envoy.extensions.clusters.dns.v3.DnsCluster
  dns_lookup_family: V4_PREFERRED
  dns_refresh_rate: 1s
  dns_failure_refresh_rate: {base_interval: 1s, max_interval: 5s}
{{- end }}

{{- define "kvlane.envoyConfig" -}}
{{- $v := .Values }}
{{- $name := include "kvlane.fullname" . }}
{{- /* A request may wait in kvlane for an engine that starts. */}}
{{- $pick := int $v.envoy.pickTimeoutSeconds }}
{{- if include "kvlane.scalesToZero" . }}{{ $pick = add (max $v.envoy.pickTimeoutSeconds $v.autoscaling.wakeSeconds) 15 }}{{ end }}
{{- $observe := eq $v.picker.responses "observe" }}
admin:
  address: {socket_address: {address: 127.0.0.1, port_value: 19000}}
overload_manager:
  resource_monitors:
    - name: envoy.resource_monitors.global_downstream_max_connections
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig
        max_active_downstream_connections: {{ int $v.envoy.connectionsMax }}
static_resources:
  listeners:
    - name: clients
      address: {socket_address: {address: {{ $v.listenAddress | quote }}, port_value: 8080, ipv4_compat: {{ eq $v.listenAddress "::" }}}}
      # The size of a piece that goes to the picker and back.
      per_connection_buffer_limit_bytes: 262144
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: clients
                use_remote_address: true
                normalize_path: true
                merge_slashes: true
                path_with_escaped_slashes_action: REJECT_REQUEST
                common_http_protocol_options: {headers_with_underscores_action: ALLOW, max_headers_count: 100}
                request_headers_timeout: 60s
                # The address of an engine is the picker's to choose: that of the request, and those that llm-d's sidecars connect to.
                # Here, because nothing else removes them while no picker answers.
                early_header_mutation_extensions:
                  - name: envoy.http.early_header_mutation.header_mutation
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation
                      mutations:
                        - remove: x-gateway-destination-endpoint
                        - remove: x-gateway-destination-endpoint-subset
                        - remove: x-gateway-destination-endpoint-served
                        - remove: x-prefiller-host-port
                        - remove: x-encoder-hosts-ports
                        - remove: x-data-parallel-host-port
                        - remove: x-kv-cache-source-host-port
                route_config:
                  name: clients
                  virtual_hosts:
                    - name: engines
                      domains: ["*"]
                      request_body_buffer_limit: {{ int64 $v.envoy.retryBodyBytes }}
                      retry_policy:
                        # An engine that is busy or gone; its own 500 is an answer.
                        retry_on: connect-failure,refused-stream,reset-before-request,retriable-status-codes{{ if $v.envoy.retryLostRequests }},reset{{ end }}
                        retriable_status_codes: [429, 503]
                        num_retries: {{ int $v.envoy.retries }}
                        retry_back_off: {base_interval: 0.025s, max_interval: 0.25s}
                        retry_host_predicate:
                          - name: envoy.retry_host_predicates.previous_hosts
                            typed_config: {"@type": type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate}
                        host_selection_retry_max_attempts: 3
                      routes:
                        {{- range $v.envoy.paths }}
                        - match: { {{ ternary "prefix" "path" (hasSuffix "/" .) }}: {{ . | quote }} }
                          route:
                            cluster: engines
                            timeout: {{ int $v.envoy.requestTimeoutSeconds }}s
                            # An answer that is not streamed is silent until it is whole.
                            idle_timeout: {{ int $v.envoy.requestTimeoutSeconds }}s
                        {{- end }}
                        - match: {prefix: "/"}
                          direct_response:
                            status: 404
                            body: {inline_string: '{"error":{"message":"this path is not served; envoy.paths of the chart lists those that are","type":"invalid_request_error","code":"not_found"}}'}
                          response_headers_to_add: [{header: {key: content-type, value: application/json}}]
                          typed_per_filter_config:
                            envoy.filters.http.ext_proc:
                              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute
                              disabled: true
                http_filters:
                  - name: envoy.filters.http.ext_proc
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
                      # Open only if no picker is healthy: then the cluster has no host, and the call fails before the first piece
                      # of the body has left. Without health checks Envoy would answer 500 to every POST.
                      failure_mode_allow: {{ eq $v.picker.failureMode "FailOpen" }}
                      status_on_error: {code: ServiceUnavailable}
                      message_timeout: {{ $pick }}s
                      grpc_service:
                        timeout: {{ if $observe }}{{ int $v.envoy.requestTimeoutSeconds }}s{{ else }}{{ $pick }}s{{ end }}
                        envoy_grpc: {cluster_name: pickers, authority: kvlane}
                        retry_policy:
                          retry_on: connect-failure,refused-stream,unavailable,reset
                          num_retries: 2
                          retry_back_off: {base_interval: 0.01s, max_interval: 0.1s}
                          retry_host_predicate:
                            - name: envoy.retry_host_predicates.previous_hosts
                              typed_config: {"@type": type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate}
                          host_selection_retry_max_attempts: 3
                      processing_mode:
                        request_header_mode: SEND
                        request_body_mode: FULL_DUPLEX_STREAMED
                        request_trailer_mode: SEND
                        response_header_mode: {{ ternary "SEND" "SKIP" $observe }}
                        response_body_mode: {{ ternary "FULL_DUPLEX_STREAMED" "NONE" $observe }}
                        response_trailer_mode: {{ ternary "SEND" "SKIP" $observe }}
                      # The pick comes as metadata, which clients cannot send.
                      metadata_options:
                        forwarding_namespaces: {untyped: [envoy.lb]}
                        receiving_namespaces: {untyped: [envoy.lb]}
                  - name: envoy.filters.http.router
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
                      suppress_envoy_headers: true
    - name: health
      address: {socket_address: {address: {{ $v.listenAddress | quote }}, port_value: 19001, ipv4_compat: {{ eq $v.listenAddress "::" }}}}
      filter_chains:
        - filters:
            - name: envoy.filters.network.http_connection_manager
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
                stat_prefix: health
                route_config:
                  name: health
                  virtual_hosts:
                    - name: admin
                      domains: ["*"]
                      routes:
                        - {match: {path: /ready, headers: [{name: ":method", string_match: {exact: GET}}]}, route: {cluster: admin}}
                        - {match: {path: /stats/prometheus, headers: [{name: ":method", string_match: {exact: GET}}]}, route: {cluster: admin}}
                http_filters:
                  - name: envoy.filters.http.router
                    typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}
  clusters:
    - name: engines
      cluster_type: {{- include "kvlane.envoyDns" . | nindent 8 }}
      connect_timeout: 2s
      ignore_health_on_host_removal: true
      circuit_breakers: {{- include "kvlane.envoyThresholds" . | nindent 8 }}
      # Panic would send requests to engines that are known to be down.
      common_lb_config: {healthy_panic_threshold: {value: 0}}
      health_checks:
        - timeout: 2s
          interval: {{ int $v.envoy.engineHealthCheck.intervalSeconds }}s
          no_traffic_interval: {{ int $v.envoy.engineHealthCheck.intervalSeconds }}s
          unhealthy_threshold: 2
          healthy_threshold: 1
          http_health_check: {path: {{ $v.envoy.engineHealthCheck.path | quote }}}
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          # Below the 5 s after which uvicorn, and so vLLM and SGLang, close an idle connection.
          common_http_protocol_options: {idle_timeout: 4s}
          explicit_http_config: {http_protocol_options: {}}
      load_balancing_policy:
        policies:
          - typed_extension_config:
              name: envoy.load_balancing_policies.override_host
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost
                override_host_sources: [{metadata: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint}]}}]
                selected_host_key: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint-served}]}
                # Without a pick, or with one that DNS does not name yet.
                fallback_policy:
                  policies:
                    - typed_extension_config:
                        name: envoy.load_balancing_policies.least_request
                        typed_config: {"@type": type.googleapis.com/envoy.extensions.load_balancing_policies.least_request.v3.LeastRequest}
      load_assignment:
        cluster_name: engines
        endpoints:
          - lb_endpoints:
              {{- $root := . }}
              {{- range $namespace := include "kvlane.namespaces" . | fromJsonArray }}
              {{- range $v.engines.ports }}
              - endpoint: {address: {socket_address: {address: {{ include "kvlane.host" (list $root (printf "%s-engines" $name) $namespace) }}, port_value: {{ int . }}}}}
              {{- end }}
              {{- end }}
    - name: pickers
      cluster_type: {{- include "kvlane.envoyDns" . | nindent 8 }}
      connect_timeout: 1s
      lb_policy: ROUND_ROBIN
      ignore_health_on_host_removal: true
      circuit_breakers: {{- include "kvlane.envoyThresholds" . | nindent 8 }}
      common_lb_config: {healthy_panic_threshold: {value: 0}}
      {{- if not $observe }}
      # What waits for a picker that has stopped answering is asked of another one. Not where answers pass through pickers: one
      # that drains would break them.
      close_connections_on_host_health_failure: true
      {{- end }}
      health_checks:
        # no_traffic_interval counts before the first request; its default is a minute.
        - timeout: 1s
          interval: 1s
          no_traffic_interval: 1s
          unhealthy_threshold: 1
          healthy_threshold: 1
          grpc_health_check: {service_name: envoy.service.ext_proc.v3.ExternalProcessor}
      typed_extension_protocol_options:
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          explicit_http_config:
            # A node that vanishes, and a picker that has stopped answering, close nothing: pings find out.
            http2_protocol_options: {connection_keepalive: {interval: 1s, timeout: 2s}}
      {{- if ne $v.picker.tls.mode "off" }}
      transport_socket:
        name: envoy.transport_sockets.tls
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
          sni: {{ include "kvlane.host" (list . (printf "%s-epp" $name) .Release.Namespace) }}
          common_tls_context:
            alpn_protocols: [h2]
            {{- if eq $v.picker.tls.mode "secret" }}
            validation_context:
              trusted_ca: {filename: /etc/picker-tls/ca.crt}
              match_typed_subject_alt_names:
                - {san_type: DNS, matcher: {exact: {{ include "kvlane.host" (list . (printf "%s-epp" $name) .Release.Namespace) }}}}
            {{- end }}
      {{- end }}
      load_assignment:
        cluster_name: pickers
        endpoints:
          - lb_endpoints:
              - endpoint: {address: {socket_address: {address: {{ include "kvlane.host" (list . (printf "%s-epp" $name) .Release.Namespace) }}, port_value: 9002}}}
    - name: admin
      type: STATIC
      load_assignment:
        cluster_name: admin
        endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 19000}}}}]}]
{{- end }}

{{- define "kvlane.envoyDrain" -}}
# preStop: Envoy ends at SIGTERM without regard to open answers, so it is drained before.
admin() {
  exec 3<> /dev/tcp/127.0.0.1/19000 || exit 0
  printf '%s %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\nconnection: close\r\n\r\n' "$1" "$2" >&3
  cat <&3
  exec 3>&-
}
# /ready fails, and each answer closes its connection.
admin POST /healthcheck/fail > /dev/null
quiet=0
for ((second = 0; second < {{ int .Values.envoy.drainSeconds }}; second++)); do
  sleep 1
  stats=$(admin GET '/stats?filter=^http.clients.downstream_rq_active$')
  if [[ $stats =~ downstream_rq_active:\ 0[^0-9] ]]; then quiet=$((quiet + 1)); else quiet=0; fi
  # Endpoints and load balancers take seconds to learn that this pod ends.
  if [ "$second" -ge {{ int .Values.shutdown.delaySeconds }} ] && [ "$quiet" -ge 3 ]; then exit 0; fi
done
{{- end }}
