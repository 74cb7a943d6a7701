#!/usr/bin/env python3
"""Means of what `REPLICAS_FIGURES` has collected, by case: CPU time and bytes for each request. See cost.yaml."""

import json
import statistics
import sys
from collections import defaultdict

cases = defaultdict(list)
for line in open(sys.argv[1]):
    run = json.loads(line)
    replicas = run["replicas"]
    requests = sum(replica["requests"] for replica in replicas)
    cpu_us = 1e6 * sum(replica["cpu_s"] for replica in replicas) / requests
    # For each request that the fleet gets, what one replica sends to all others.
    sent = sum(replica["sent"] or 0 for replica in replicas) / len(replicas) / requests
    shed = sum(replica["shed"] or 0 for replica in replicas)
    cases[run["case"]].append((cpu_us, sent, shed, max(replica["resident_bytes"] for replica in replicas) / (1 << 20)))
print(f"{'case':16} {'runs':>4} {'CPU us/request':>15} {'spread':>13} {'sent bytes/request':>19} {'shed':>5} {'MiB':>5}")
for case, runs in sorted(cases.items()):
    cpu, sent, shed, mib = zip(*runs)
    print(f"{case:16} {len(runs):4} {statistics.mean(cpu):15.0f} {min(cpu):6.0f}-{max(cpu):<6.0f} {statistics.mean(sent):19.0f} "
          f"{sum(shed):5.0f} {max(mib):5.0f}")
