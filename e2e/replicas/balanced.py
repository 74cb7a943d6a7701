#!/usr/bin/env python3
"""HAProxy in turns over gateways that exchange news or do not: a router of `kvlane bench`.

    e2e/replicas/balanced.py 8-apart-blind --port 8000 --worker-urls http://127.0.0.1:8001 …

The first word is the number of gateways, whether they are `apart` and exchange nothing, and whether they are `blind` and read no
KV events. HAProxy stands before one gateway, too, so that its cost is the same for all. With `REPLICAS_FIGURES=FILE` a line of
JSON is added when it ends: bytes of the exchange, requests and CPU time of each gateway.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gateways import Process, Replica, together  # noqa: E402

CONFIGURATION = """
global
  nbthread 1
  maxconn 4096
  tune.bufsize 65536
defaults
  mode http
  http-reuse always
  timeout connect 5s
  timeout client 1800s
  timeout server 1800s
  retries 3
  option redispatch 1
  retry-on conn-failure empty-response
frontend clients
  bind 127.0.0.1:{port}
  default_backend gateways
backend gateways
  balance roundrobin
{servers}
"""


def figures(replica):
    samples = replica.samples()
    requests = sum(value for name, value in samples.items() if name.startswith("kvlane_requests_total"))
    return {"requests": requests, "cpu_s": replica.cpu_s(), "resident_bytes": replica.resident_bytes(),
            "hears": samples.get("kvlane_replicas"), "sent": samples.get('kvlane_replica_bytes_total{direction="sent"}'),
            "received": samples.get('kvlane_replica_bytes_total{direction="received"}'),
            "shed": samples.get("kvlane_replica_marks_shed_total")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--worker-urls", nargs="+", required=True)
    arguments = parser.parse_args()
    count, *traits = arguments.case.split("-")
    count, apart = int(count), "apart" in traits
    options = ["--log-level", "warn", *(["--no-kv-events"] if "blind" in traits else [])]
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    if apart or count == 1:
        replicas = [Replica(f"balanced-{n}", arguments.worker_urls, options=options) for n in range(count)]
        for replica in replicas:
            replica.wait_ready()
    else:
        replicas = together(count, arguments.worker_urls, options, "balanced")
    servers = "".join(f"  server gateway{n} 127.0.0.1:{replica.port}\n" for n, replica in enumerate(replicas))
    with tempfile.NamedTemporaryFile("w", suffix=".cfg") as file:
        file.write(CONFIGURATION.format(port=arguments.port, servers=servers))
        file.flush()
        balancer = Process("balanced-haproxy", ["/usr/sbin/haproxy", "-db", "-f", file.name])
        stopping.wait()
    if path := os.environ.get("REPLICAS_FIGURES"):
        with open(path, "a") as file:
            file.write(json.dumps({"case": arguments.case, "replicas": [figures(replica) for replica in replicas]}) + "\n")
    balancer.kill()
    for replica in replicas:
        replica.kill()


main()
