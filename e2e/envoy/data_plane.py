"""Envoy's configuration in the ways in which data planes use an endpoint picker, as JSON, which Envoy reads like YAML.

`python3 e2e/envoy/data_plane.py shipped --picker 127.0.0.1:9002 --engine 127.0.0.1:8000` prints one.

| Way            | Destination                                   | The picker sees                | Without a picker |
|----------------|-----------------------------------------------|--------------------------------|------------------|
| `plain`        | least busy engine                             | nothing                        |                  |
| `shipped`      | `override_host`: a list, walked by retries    | requests, streamed             | least busy engine |
| `closed`       | as `shipped`                                  | requests, streamed             | 503              |
| `observed`     | as `shipped`                                  | requests and answers, streamed | least busy engine |
| `subsets`      | as `shipped`, of those that the client names  | requests, streamed             | 503              |
| `buffered`     | as `shipped`                                  | requests, whole                | least busy engine |
| `original_dst` | ORIGINAL_DST by header: one, as llm-d's chart | requests and answers, streamed | 503              |

`shipped`, `closed` and `observed` are what the chart renders in mode envoy (deploy/helm/kvlane, templates/_envoy.tpl) with its values
`picker.failureMode` and `picker.responses`, at other addresses. The other ways are changes of it. Wants helm: e2e/k8s/setup.sh helm.
"""

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "kvlane"
INFRA = Path(os.environ.get("KVLANE_INFRA", Path.home() / ".cache" / "kvlane-infra"))
DESTINATION = "x-gateway-destination-endpoint"
TYPES = "type.googleapis.com/envoy.extensions."
# Beyond it a request that is read whole gets 413.
BUFFER_BYTES_MAX = 32 << 20
VALUES = {
    "plain": (),
    "shipped": (),
    "closed": ("picker.failureMode=FailClose",),
    "observed": ("picker.responses=observe",),
    "subsets": ("picker.failureMode=FailClose",),
    "buffered": (),
    "original_dst": ("picker.failureMode=FailClose", "picker.responses=observe"),
}
WAYS = tuple(VALUES)


def data_plane(way, listener, admin, engines, pickers=(), tls=True):
    """The configuration of one Envoy. `engines` and `pickers` are (address, port); `listener` and `admin` ports of loopback."""
    plane = rendered(*VALUES[way], *([] if tls else ["picker.tls.mode=off"]))
    resources = plane["static_resources"]
    # The other listener is for probes, by way of the cluster `admin`.
    resources["listeners"] = [named(resources["listeners"], "clients")]
    resources["clusters"] = [named(resources["clusters"], "engines"), named(resources["clusters"], "pickers")]
    plane["admin"]["address"] = address("127.0.0.1", admin)
    resources["listeners"][0]["address"] = address("127.0.0.1", listener)
    for cluster, hosts in zip(resources["clusters"], (engines, pickers)):
        cluster["load_assignment"]["endpoints"] = [{"lb_endpoints": [{"endpoint": {"address": address(*host)}} for host in hosts]}]
    if change := CHANGES.get(way):
        change(resources)
    return plane


@functools.cache
def template(*values):
    """The chart's configuration of Envoy with these values, as JSON."""
    helm = INFRA / "bin" / "helm"
    if not helm.exists():
        sys.exit(f"{helm} is missing: run e2e/k8s/setup.sh helm")
    with tempfile.TemporaryDirectory() as directory:
        chart = Path(directory) / "kvlane"
        shutil.copytree(CHART, chart)
        # Helm reads YAML, and Python's own library does not.
        (chart / "templates" / "envoy.json.yaml").write_text('{{ include "kvlane.envoyConfig" . | fromYaml | toJson }}')
        # Helm built from its module does not know which Kubernetes it was made for.
        command = [helm, "template", "kvlane", chart, "--show-only", "templates/envoy.json.yaml", "--kube-version", "1.36.0"]
        for value in ("mode=envoy", "engines.selector.matchLabels.app=vllm", *values):
            command += ["--set", value]
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return text[text.index("{"):]


def rendered(*values):
    return json.loads(template(*values))


def named(items, name):
    (item,) = [item for item in items if item["name"] == name]
    return item


def address(host, port):
    return {"socket_address": {"address": host, "port_value": port}}


# === Changes of what is shipped ===


def http_filters(resources):
    (chain,) = resources["listeners"][0]["filter_chains"]
    return chain["filters"][0]["typed_config"]["http_filters"]


def external_processing(resources):
    return named(http_filters(resources), "envoy.filters.http.ext_proc")["typed_config"]


def without_a_picker(resources):
    """The chart's Envoy as it is when no picker answers, and without asking."""
    filters = http_filters(resources)
    filters.remove(named(filters, "envoy.filters.http.ext_proc"))
    (chain,) = resources["listeners"][0]["filter_chains"]
    for route in chain["filters"][0]["typed_config"]["route_config"]["virtual_hosts"][0]["routes"]:
        route.pop("typed_per_filter_config", None)
    engines, pickers = resources["clusters"]
    policy = engines["load_balancing_policy"]["policies"][0]["typed_extension_config"]["typed_config"]
    engines["load_balancing_policy"] = policy["fallback_policy"]
    resources["clusters"].remove(pickers)


def subsets(resources):
    """Takes a subset of endpoints from a header, or as a list (a protobuf Value in base64), in place of a gateway that computes one."""
    def rule(header, **kind):
        return {"header": header, "remove": True, "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint", "key": DESTINATION + "-subset", **kind,
        }}

    rules = [rule("x-e2e-subset", type="STRING"), rule("x-e2e-subset-list", type="PROTOBUF_VALUE", encode="BASE64")]
    http_filters(resources).insert(0, {
        "name": "envoy.filters.http.header_to_metadata",
        "typed_config": {"@type": TYPES + "filters.http.header_to_metadata.v3.Config", "request_rules": rules},
    })
    external_processing(resources)["metadata_options"]["forwarding_namespaces"]["untyped"].append("envoy.lb.subset_hint")


def buffered(resources):
    """Requests reach the picker whole."""
    mode = {"request_body_mode": "BUFFERED", "request_trailer_mode": "SKIP"}
    external_processing(resources)["processing_mode"] |= mode
    resources["listeners"][0]["per_connection_buffer_limit_bytes"] = BUFFER_BYTES_MAX


def original_destination(resources):
    """One destination, which a header names."""
    external_processing(resources)["response_attributes"] = ["upstream.address"]
    engines = resources["clusters"][0]
    for key in ("cluster_type", "health_checks", "common_lb_config", "load_balancing_policy", "load_assignment",
                "ignore_health_on_host_removal"):
        del engines[key]
    engines |= {
        "type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
    }


CHANGES = {"plain": without_a_picker, "subsets": subsets, "buffered": buffered, "original_dst": original_destination}


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
