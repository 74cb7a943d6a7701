#!/usr/bin/env python3
"""What an endpoint picker costs behind Envoy: CPU per request of both, added latency, and CPU when idle.

    cargo build --release --locked -p kvlane -p kvlane-mock --bin kvlane --example fixed_upstream
    e2e/envoy/setup.sh && python3 e2e/envoy/measure.py
    e2e/envoy/reference.sh && e2e/k8s/setup.sh etcd kube-apiserver kubectl && python3 e2e/envoy/measure.py --reference

Rows take turns, `--rounds` times, so that what else the machine does meets all of them; figures are medians of rounds.

* CPU: wrk sends 6 kB chats of 64 sessions as fast as 8 connections take them, for `--seconds`; user and system time of the
  picker's and of Envoy's process, from /proc, by the requests answered.
* Latency: 200 requests a second, each when it is due. `added` is the row's quantile less that of Envoy alone.
* Long prompts: chats of 100,000 tokens of which 95 % repeat (e2e/tokens/measure.py makes them), counted with the tokenizer of the
  tests, one request at a time.
* Idle: 100 endpoints, whose /metrics have 28 kB, and no request, for `--seconds`.

Engines are `fixed_upstream`, which answers at once, and `kvlane mock-engine` with KV events for the row `exact`. The reference
picker finds its engines as pods at a Kubernetes API server (e2e/k8s/cluster.py); it is the one of the Gateway API Inference
Extension. Figures are printed, and none is asserted. Linux, wrk.
"""

import argparse
import asyncio
import dataclasses
import importlib.machinery
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import load
from arena import HERE, INFRA, KVLANE, WORK, Envoy, Mock, Picker, Process, Upstreams, chat, cpu_s, free_port, request, rss_mib, until

sys.path.insert(0, str(HERE.parent / "k8s"))
from cluster import Cluster  # noqa: E402

FIXED_UPSTREAM = os.environ.get("FIXED_UPSTREAM", str(Path(KVLANE).parent / "examples" / "fixed_upstream"))
SYSTEM_BYTES = 5_500
PER_S = 200
ENGINES = 4
IDLE_ENDPOINTS = 100
CONNECTIONS = 8
LONG_TOKENS = 100_000
LONG_SESSIONS = 8
LONG_REQUESTS = 200
# What the reference's own chart ships: an approximate prefix index, queue and KV usage.
REFERENCE_CONFIG = """
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
"""


class Fixed(Process):
    """`fixed_upstream`: engines that answer at once."""

    def __init__(self, count):
        super().__init__("fixed-upstream", ["sh", "-c", f"sleep infinity | exec '{FIXED_UPSTREAM}' {count}"])
        ports = until("fixed_upstream names its ports", lambda: self._ports(count))
        self.addresses = [("127.0.0.1", port) for port in ports]
        self.urls = [f"http://127.0.0.1:{port}" for port in ports]

    def _ports(self, count):
        self.check_alive()
        ports = re.findall(r"127\.0\.0\.1:(\d+)", self.log.read_text())
        return [int(port) for port in ports] if len(ports) == count else None


class Reference(Process):
    """The reference picker, with engines that are ports of one pod, or one port of several pods."""

    def __init__(self, cluster, app, ports):
        self.port, self.health_port, self.admin_port = free_port(), free_port(), free_port()
        cluster.inference_pool(app, {"app": app}, ports)
        super().__init__(f"reference-{app}", [
            str(INFRA / "bin" / "reference-epp"), "--pool-name", app, "--pool-namespace", "default",
            "--grpc-port", str(self.port), "--grpc-health-port", str(self.health_port),
            "--metrics-port", str(self.admin_port), "--metrics-endpoint-auth=false", "--tracing=false", "--v", "1",
            "--health-checking", "--config-text", REFERENCE_CONFIG,
        ], {"KUBECONFIG": str(cluster.kubeconfig)})


@dataclasses.dataclass
class Row:
    name: str
    envoy: Envoy
    picker: Process | None
    samples: list = dataclasses.field(default_factory=list)

    def measure(self, seconds):
        sample = self.cpu(seconds)
        bodies = [chat(f"session {index % 64} " + "how is it mounted, and by whom? " * 170) for index in range(PER_S * seconds)]
        replies = asyncio.run(load.open_loop(self.envoy.port, bodies, PER_S))
        times = [reply.end_s * 1e3 for reply in replies if reply.good]
        sample |= {"failed": len(replies) - len(times)}
        sample |= {"p50": load.quantile(times, 0.5), "p99": load.quantile(times, 0.99)} if times else {}
        self.samples.append(sample)

    def cpu(self, seconds):
        processes = [self.envoy, *([self.picker] if self.picker else [])]
        before = [cpu_s(process) for process in processes]
        url = f"http://127.0.0.1:{self.envoy.port}/v1/chat/completions"
        script = str(HERE.parent / "race" / "chat.lua")
        done = subprocess.run(
            ["wrk", "-t1", f"-c{CONNECTIONS}", f"-d{seconds}s", "-s", script, url, "--", str(SYSTEM_BYTES), "whole", "1", "0"],
            check=True, capture_output=True, text=True,
        )
        after = [cpu_s(process) for process in processes]
        said = json.loads(done.stdout.strip().splitlines()[-1])
        costs = [(end - begin) / said["requests"] * 1e6 for begin, end in zip(before, after)]
        return {
            "per_s": said["requests"] / seconds, "errors": said["errors"], "envoy_us": costs[0],
            "picker_us": costs[1] if self.picker else 0.0, "rss_mib": rss_mib(self.picker) if self.picker else 0.0,
        }

    def median(self, key):
        return statistics.median(sample.get(key, float("nan")) for sample in self.samples)


def rows_of_kvlane(engines):
    """Envoy alone, and ours in its ways."""
    yield Row("Envoy alone", Envoy("plain", engines.addresses), None)
    for name, way, options in [
        ("kvlane epp, requests only", "shipped", ()),
        ("kvlane epp, answers too", "observed", ("--set", "epp.observe_responses=true")),
        ("kvlane epp, BUFFERED", "buffered", ()),
    ]:
        picker = Picker(engines.urls, *options, name=f"picker-{way}").wait_ready(len(engines.urls))
        yield Row(name, Envoy(way, engines.addresses, [picker]), picker)


def row_of_exact_knowledge():
    mocks = []
    for _ in range(ENGINES):
        feed = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{free_port()}"}
        mocks.append(Mock("--model", "tiny", "--speed", "100", "--kv-events-config", json.dumps(feed)))
    for mock in mocks:
        mock.wait_ready()
    picker = Picker([mock.url for mock in mocks], name="picker-exact").wait_ready(ENGINES)
    until("all knowledge is exact", lambda: [
        pool["knowledge"]["exact"] for pool in request(picker.admin_port, "/readiness").json()["pools"]
    ] == [ENGINES])
    return Row("kvlane epp, requests only, exact", Envoy("shipped", [("127.0.0.1", mock.port) for mock in mocks], [picker]), picker)


def rows_of_the_reference(cluster, engines):
    cluster.pod("engines", "127.0.0.1", {"app": "few"}, port=engines.addresses[0][1])
    for name, way in [("reference, requests only", "shipped"), ("reference, as its chart has it", "original_dst")]:
        picker = Reference(cluster, "few", [port for _, port in engines.addresses])
        envoy = Envoy(way, engines.addresses, [picker])
        # It has its endpoints a moment after it is healthy.
        until("the reference picks", lambda: load.once(envoy.port, chat("hello")).good)
        yield Row(name, envoy, picker)


def idle(name, picker, seconds):
    # What follows the start of both: probes, the first scrapes, the Go runtime's first collections.
    time.sleep(5)
    before = cpu_s(picker)
    time.sleep(seconds)
    cores = (cpu_s(picker) - before) / seconds
    print(f"| {name} | {cores:.3f} | {rss_mib(picker):.0f} |", flush=True)


def measure_idle(options, cluster):
    port = free_port()
    hosts = [f"127.0.1.{index}" for index in range(1, IDLE_ENDPOINTS + 1)]
    engines = Upstreams(addresses=[(host, port) for host in hosts])
    print(f"\n| idle, {IDLE_ENDPOINTS} endpoints | cores | RSS MiB |\n|---|---|---|")
    picker = Picker(engines.urls, name="picker-idle").wait_ready(IDLE_ENDPOINTS)
    idle("kvlane epp", picker, options.seconds)
    picker.kill()
    if cluster:
        cluster.many(lambda host: cluster.pod(f"idle-{host}", host, {"app": "idle"}, port=port), hosts)
        idle("reference", Reference(cluster, "idle", [port]), options.seconds)
    engines.kill()


def measure_long(engines):
    """CPU of a picker that counts the tokens of long prompts."""
    tokens = importlib.machinery.SourceFileLoader("tokens_measure", str(HERE.parent / "tokens" / "measure.py")).load_module()
    vocabulary = HERE.parent.parent / "crates" / "kvlane-tokens" / "tests" / "data" / "tiny"
    size = tokens.calibrate(engines.urls, str(vocabulary))
    picker = Picker(engines.urls, "--tokenizer-path", str(vocabulary), name="picker-long").wait_ready(ENGINES)
    envoy = Envoy("shipped", engines.addresses, [picker])
    text = tokens.Text(1)
    fresh = int(0.05 * LONG_TOKENS * size)
    histories = [tokens.history(text, int(0.95 * LONG_TOKENS), size) for _ in range(LONG_SESSIONS)]

    def send(count):
        bodies = [tokens.chat([*histories[n % LONG_SESSIONS], text.take(fresh)]) for n in range(count)]
        return sum(load.once(envoy.port, body).good for body in bodies)

    send(2 * LONG_SESSIONS)
    before = cpu_s(picker)
    good = send(LONG_REQUESTS)
    spent_ms = (cpu_s(picker) - before) / LONG_REQUESTS * 1e3
    decided = request(picker.admin_port, "/decisions?limit=20").json()["pools"][0]["decisions"]
    prompt = statistics.mean(one["prompt_tokens"] for one in decided)
    print("\n| long prompts | tokens | CPU ms a request | cores at 100 requests/s | failed |\n|---|---|---|---|---|")
    print(f"| kvlane epp | {prompt:.0f} | {spent_ms:.2f} | {spent_ms / 10:.2f} | {LONG_REQUESTS - good} |", flush=True)
    envoy.kill()
    picker.kill()


def print_rows(rows):
    print(f"\n{rows[0].envoy.admin('/server_info') and 'Envoy 1.40, one worker thread'}; {os.cpu_count()} cores; {KVLANE}\n")
    print("| | requests/s | Envoy µs | picker µs | picker RSS MiB | p50 ms | p99 ms | added p50 | added p99 | failed |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    alone = rows[0]
    for row in rows:
        failed = sum(sample["errors"] + sample["failed"] for sample in row.samples)
        added = [row.median(key) - alone.median(key) for key in ("p50", "p99")]
        print(f"| {row.name} | {row.median('per_s'):.0f} | {row.median('envoy_us'):.0f} | {row.median('picker_us'):.0f} "
              f"| {row.median('rss_mib'):.0f} | {row.median('p50'):.2f} | {row.median('p99'):.2f} "
              f"| {added[0]:.2f} | {added[1]:.2f} | {failed} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reference", action="store_true", help="beside the reference picker")
    parser.add_argument("--no-idle", action="store_true")
    options = parser.parse_args()
    if not Path(FIXED_UPSTREAM).exists():
        sys.exit(f"{FIXED_UPSTREAM} is missing: cargo build --release -p kvlane-mock --example fixed_upstream")
    cluster = Cluster(WORK / "k8s-measure").up() if options.reference else None
    try:
        if cluster:
            cluster.install_crds()
        engines = Fixed(ENGINES)
        rows = [*rows_of_kvlane(engines), row_of_exact_knowledge()]
        rows += rows_of_the_reference(cluster, engines) if cluster else []
        for number in range(options.rounds):
            for row in rows:
                row.measure(options.seconds)
                print(f"round {number + 1}: {row.name}: {row.samples[-1]}", file=sys.stderr, flush=True)
        print_rows(rows)
        measure_long(engines)
        for process in Process.started:
            process.kill()
        if not options.no_idle:
            measure_idle(options, cluster)
    finally:
        if cluster:
            cluster.down()


if __name__ == "__main__":
    main()
