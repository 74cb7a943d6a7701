"""Envoy's configuration in the ways in which data planes use an endpoint picker, as JSON, which Envoy reads like YAML.

`python3 e2e/envoy/data_plane.py shipped --picker 127.0.0.1:9002 --engine 127.0.0.1:8000` prints one.

| Way            | Destination                                 | The picker sees                | Without a picker |
|----------------|---------------------------------------------|--------------------------------|------------------|
| `plain`        | round robin                                 | nothing                        |                  |
| `shipped`      | `override_host`: a list, walked by retries  | requests, streamed             | round robin      |
| `closed`       | as `shipped`                                | requests, streamed             | 503              |
| `original_dst` | ORIGINAL_DST by header: one, as llm-d's chart | requests and answers, streamed | 503            |
| `observed`     | as `shipped`                                | requests and answers, streamed | round robin      |
| `buffered`     | as `shipped`                                | requests, whole                | round robin      |
"""

import argparse
import json

DESTINATION = "x-gateway-destination-endpoint"
TYPES = "type.googleapis.com/envoy.extensions."
# Beyond it a request that is read whole gets 413. A body in transit occupies at most this much.
BUFFER_BYTES_MAX = 32 << 20
STREAMED_BUFFER_BYTES_MAX = 1 << 20
# Envoy's own limit of 1,024 requests to a cluster counts every ext_proc stream that is open.
REQUESTS_MAX = 100_000
WAYS = ("plain", "shipped", "closed", "original_dst", "observed", "buffered")


def data_plane(way, listener, admin, engines, pickers=(), tls=True, health_service="envoy.service.ext_proc.v3.ExternalProcessor",
               health_ports=()):
    """The configuration of one Envoy. `engines` and `pickers` are (address, port); `listener` and `admin` ports of loopback.

    `health_ports`, one for each picker, for pickers that answer health checks on another port than that of ext_proc."""
    assert way in WAYS, way
    filters = [] if way == "plain" else [subset_hints(), external_processing(way)]
    router = {"@type": TYPES + "filters.http.router.v3.Router", "suppress_envoy_headers": True}
    manager = {
        "@type": TYPES + "filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "inference",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route(way)]}]},
        "http_filters": [*filters, {"name": "envoy.filters.http.router", "typed_config": router}],
    }
    clusters = [engine_cluster(way, engines)]
    if way != "plain":
        clusters.append(picker_cluster(way, pickers, tls, health_service, health_ports))
    return {
        "admin": {"address": address("127.0.0.1", admin)},
        "static_resources": {
            "listeners": [{
                "name": "inference",
                "address": address("127.0.0.1", listener),
                "per_connection_buffer_limit_bytes": BUFFER_BYTES_MAX if way == "buffered" else STREAMED_BUFFER_BYTES_MAX,
                "filter_chains": [{"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}],
            }],
            "clusters": clusters,
        },
    }


def address(host, port):
    return {"socket_address": {"address": host, "port_value": port}}


def route(way):
    to = {"cluster": "engines", "timeout": "86400s", "idle_timeout": "86400s"}
    if way != "original_dst":
        # `override_host` takes the next endpoint of the picker's list at each attempt. 5xx of an engine are its answer.
        to["retry_policy"] = {"retry_on": "connect-failure,refused-stream,reset-before-request", "num_retries": 2}
    return {"match": {"prefix": "/"}, "route": to}


def subset_hints():
    """Takes a subset of endpoints from a header, or as a list (a protobuf Value in base64), in place of a gateway that computes one."""
    def rule(header, **kind):
        return {"header": header, "remove": True, "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint", "key": DESTINATION + "-subset", **kind,
        }}

    return {
        "name": "envoy.filters.http.header_to_metadata",
        "typed_config": {
            "@type": TYPES + "filters.http.header_to_metadata.v3.Config",
            "request_rules": [
                rule("x-e2e-subset", type="STRING"), rule("x-e2e-subset-list", type="PROTOBUF_VALUE", encode="BASE64"),
            ],
        },
    }


def external_processing(way):
    """The filter that asks the picker."""
    requests = {
        "request_header_mode": "SEND", "request_body_mode": "FULL_DUPLEX_STREAMED", "request_trailer_mode": "SEND",
        # Answers do not pass through the picker: a picker that dies breaks none of them.
        "response_header_mode": "SKIP", "response_body_mode": "NONE", "response_trailer_mode": "SKIP",
    }
    answers = {"response_header_mode": "SEND", "response_body_mode": "FULL_DUPLEX_STREAMED", "response_trailer_mode": "SEND"}
    modes = {
        "shipped": requests, "closed": requests, "observed": requests | answers, "original_dst": requests | answers,
        "buffered": requests | {"request_body_mode": "BUFFERED", "request_trailer_mode": "SKIP"},
    }
    return {
        "name": "envoy.filters.http.ext_proc",
        "typed_config": {
            "@type": TYPES + "filters.http.ext_proc.v3.ExternalProcessor",
            "failure_mode_allow": way not in ("closed", "original_dst"),
            # Otherwise clients get 500 when there is no picker.
            "status_on_error": {"code": "ServiceUnavailable"},
            # A request may wait in the picker's queue.
            "message_timeout": "1000s",
            "processing_mode": modes[way],
            "metadata_options": {
                "forwarding_namespaces": {"untyped": ["envoy.lb.subset_hint", "envoy.lb"]},
                "receiving_namespaces": {"untyped": ["envoy.lb"]},
            },
            "response_attributes": ["upstream.address"] if way in ("observed", "original_dst") else [],
            "grpc_service": {
                "envoy_grpc": {"cluster_name": "picker", "authority": "picker"},
                "retry_policy": {
                    "retry_on": "connect-failure,refused-stream,unavailable,reset", "num_retries": 3,
                    # One second otherwise, of which a random part is waited.
                    "retry_back_off": {"base_interval": "0.010s", "max_interval": "0.100s"},
                    "host_selection_retry_max_attempts": 3,
                    "retry_host_predicate": [{
                        "name": "envoy.retry_host_predicates.previous_hosts",
                        "typed_config": {"@type": TYPES + "retry.host.previous_hosts.v3.PreviousHostsPredicate"},
                    }],
                },
            },
        },
    }


def load_assignment(name, hosts, health_ports=()):
    endpoints = []
    for index, (host, port) in enumerate(hosts):
        endpoint = {"address": address(host, port)}
        if health_ports:
            endpoint["health_check_config"] = {"port_value": health_ports[index]}
        endpoints.append({"endpoint": endpoint})
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def breakers():
    most = {"max_requests": REQUESTS_MAX, "max_pending_requests": REQUESTS_MAX, "max_connections": REQUESTS_MAX}
    return {"thresholds": [most | {"max_retries": REQUESTS_MAX}]}


def engine_cluster(way, engines):
    cluster = {"name": "engines", "connect_timeout": "2s", "circuit_breakers": breakers()}
    if way == "original_dst":
        return cluster | {
            "type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
        }
    cluster |= {"type": "STATIC", "load_assignment": load_assignment("engines", engines)}
    round_robin = {
        "name": "envoy.load_balancing_policies.round_robin",
        "typed_config": {"@type": TYPES + "load_balancing_policies.round_robin.v3.RoundRobin"},
    }
    if way == "plain":
        return cluster | {"load_balancing_policy": {"policies": [{"typed_extension_config": round_robin}]}}

    def key(name):
        return {"key": "envoy.lb", "path": [{"key": name}]}

    override = {
        "@type": TYPES + "load_balancing_policies.override_host.v3.OverrideHost",
        "override_host_sources": [{"metadata": key(DESTINATION)}, {"header": DESTINATION}],
        # Where the request was sent in the end, for the picker to read at the answer.
        "selected_host_key": key(DESTINATION + "-served"),
        "fallback_policy": {"policies": [{"typed_extension_config": round_robin}]},
    }
    policy = {"name": "envoy.load_balancing_policies.override_host", "typed_config": override}
    return cluster | {"load_balancing_policy": {"policies": [{"typed_extension_config": policy}]}}


def picker_cluster(way, pickers, tls, health_service, health_ports):
    cluster = {
        "name": "picker", "type": "STATIC", "connect_timeout": "1s", "lb_policy": "ROUND_ROBIN",
        "circuit_breakers": breakers(),
        "load_assignment": load_assignment("picker", pickers, health_ports),
        # With panic, requests would go to dead pickers when all are dead, and fail after their first chunk of body: not open.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "health_checks": [{
            # `no_traffic_interval` is 60 s otherwise: a picker that dies before the first request would be found too late.
            "timeout": "1s", "interval": "1s", "no_traffic_interval": "1s", "unhealthy_threshold": 1, "healthy_threshold": 1,
            "grpc_health_check": {"service_name": health_service},
        }],
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": TYPES + "upstreams.http.v3.HttpProtocolOptions",
                # A picker that has stopped answering, but not ended, keeps its connections: what waits there is asked of another
                # one only when they are closed, and health checks do not close them.
                "explicit_http_config": {
                    "http2_protocol_options": {"connection_keepalive": {"interval": "1s", "timeout": "2s"}},
                },
            },
        },
    }
    if tls:
        # A picker's certificate is one that it has signed itself.
        cluster["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": TYPES + "transport_sockets.tls.v3.UpstreamTlsContext",
                "common_tls_context": {"alpn_protocols": ["h2"]},
            },
        }
    return cluster


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--listener", type=int, default=8080)
    parser.add_argument("--admin", type=int, default=19000)
    parser.add_argument("--engine", action="append", default=[], help="address:port, repeatable")
    parser.add_argument("--picker", action="append", default=[], help="address:port, repeatable")
    parser.add_argument("--plaintext", action="store_true", help="no TLS to the picker")
    options = parser.parse_args()

    def hosts(words):
        return [(word.rsplit(":", 1)[0], int(word.rsplit(":", 1)[1])) for word in words]

    plane = data_plane(options.way, options.listener, options.admin, hosts(options.engine), hosts(options.picker),
                       tls=not options.plaintext)
    print(json.dumps(plane, indent=2))


if __name__ == "__main__":
    main()
