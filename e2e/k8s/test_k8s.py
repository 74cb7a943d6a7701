#!/usr/bin/env python3
"""kvlane with its chart's ServiceAccount at a real API server, in front of engines at the addresses of pods.

    e2e/k8s/setup.sh && python3 e2e/k8s/test_k8s.py -v
    python3 e2e/k8s/test_k8s.py -v Discovering               # one group

Pods are written as a kubelet would report them (cluster.py); their addresses are local to this machine (root, once), and
e2e/envoy/upstream.py answers there. RESTARTS (20), AWAY_S (20) and PODS (500) make it shorter or longer.
"""

import asyncio
import collections
import json
import os
import re
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "envoy")]

import load  # noqa: E402
from arena import Upstreams, chat, cpu_s, rss_mib  # noqa: E402
from cluster import WORK, Cluster, binary, make_pod_network_local, until  # noqa: E402
from engines import KVLANE, Process, free_port, request  # noqa: E402

RESTARTS = int(os.environ.get("RESTARTS", "20"))
AWAY_S = float(os.environ.get("AWAY_S", "20"))
PODS = int(os.environ.get("PODS", "500"))
PER_S = 50
NAMESPACE = "serving"
CHART = REPOSITORY / "deploy" / "helm" / "kvlane"
ENGINE_PORT = 8000


def address(index):
    """The index-th address of the pod network."""
    return f"10.99.{index // 250}.{2 + index % 250}"


class Gateway(Process):
    """`kvlane serve` with this configuration, and ports of its own."""

    def __init__(self, config, name="kvlane-k8s"):
        self.port, self.admin_port = free_port(), free_port()
        config |= {"server": {"port": self.port}, "metrics": {"port": self.admin_port}}
        file = WORK / f"{name}.json"
        file.write_text(json.dumps(config))
        super().__init__(name, [KVLANE, "serve", "--config", str(file)])
        until("it listens", self.readiness, 30)

    def readiness(self):
        self.check_alive()
        try:
            return request(self.admin_port, "/readiness", timeout_s=5).json()
        except OSError:
            return {}

    def source(self):
        """What it says of the only source of its workers."""
        return (self.readiness().get("discovery") or [{}])[0]

    def problems(self):
        source = self.source()
        return "; ".join(filter(None, [source.get("problem"), *(source.get("left_out") or [])]))

    def workers(self):
        workers = request(self.admin_port, "/workers").json()["workers"]
        return {worker["url"].removeprefix("http://"): worker for worker in workers}

    def healthy(self):
        return {name for name, worker in self.workers().items() if worker["healthy"]}


def discovering(cluster, account="kvlane", **keys):
    """A configuration that finds pods of `app=vllm` by the account's token."""
    kubernetes = {"enabled": True, "namespaces": [NAMESPACE], "ports": [ENGINE_PORT]}
    kubernetes |= {"kubeconfig": str(cluster.account(account, NAMESPACE) / "kubeconfig")}
    kubernetes |= keys or {"selector": "app=vllm"}
    return {"discovery": {"kubernetes": kubernetes}}


def rendered(*options, release="kvlane"):
    """The chart's objects, as `helm install` would send them."""
    command = [binary("helm"), "template", release, str(CHART), "--namespace", NAMESPACE, "--kube-version", "1.36.0", *options]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Load:
    """Requests at a fixed rate while a block runs; `bad` are those without a whole 200."""

    def __init__(self, port):
        self.port, self.replies, self.over = port, [], threading.Event()

    def __enter__(self):
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    async def _run(self):
        client, start, tasks = load.Client(self.port), time.monotonic(), []
        while not self.over.is_set():
            due = start + len(tasks) / PER_S
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(client.post(chat(f"{len(tasks) % 40} " + "word " * 200), due=due)))
        self.replies = await asyncio.gather(*tasks)
        client.close()

    @property
    def bad(self):
        return [reply for reply in self.replies if not reply.good]

    def say(self, what):
        statuses = dict(collections.Counter(reply.status for reply in self.bad))
        print(f"{what}: {len(self.bad)} of {len(self.replies)} requests bad {statuses or ''}", flush=True)


class Group(unittest.TestCase):
    """A cluster with the chart's ServiceAccount and permissions, for all tests of a class."""

    values = "gateway.yaml"

    @classmethod
    def setUpClass(cls):
        make_pod_network_local()
        cls.cluster = Cluster(WORK / "k8s-test").up()
        cls.addClassCleanup(cls.cluster.down)
        cls.cluster.namespace(NAMESPACE)
        cls.cluster.install_crds()
        cls.cluster.kubectl("apply", "-f", "-", text=rendered("--values", str(CHART / "ci" / cls.values)))

    def engines(self, count):
        upstreams = Upstreams(addresses=[(address(index), ENGINE_PORT) for index in range(count)])
        self.addCleanup(upstreams.kill)
        return upstreams

    def pods(self, count, **options):
        def make(index):
            self.cluster.pod(f"vllm-{index}", address(index), {"app": "vllm"}, namespace=NAMESPACE, **options)

        self.addCleanup(self.cluster.api, "DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods?gracePeriodSeconds=0")
        self.cluster.many(make, range(count))

    def gateway(self, config):
        gateway = Gateway(config)
        self.addCleanup(gateway.kill)
        return gateway


class Chart(Group):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # Those of the chart's optional objects, out of their projects' Go modules.
        crds = WORK / "chart-crds"
        subprocess.run([str(REPOSITORY / "deploy" / "helm" / "crds.sh"), str(crds)], check=True, capture_output=True)
        cls.cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(crds))
        cls.cluster.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(crds))

    def test_the_api_server_takes_what_is_rendered(self):
        for file in sorted((CHART / "ci").glob("*.yaml")):
            with self.subTest(file.stem):
                # Another release than the one that is installed: the labels of an object's pods cannot change.
                text = rendered("--values", str(file), release="another")
                # Namespaces that a file names need not be there for a Role to be right; for an API server they do.
                for namespace in set(re.findall(r"^  namespace: (\S+)$", text, re.M)):
                    self.cluster.namespace(namespace)
                self.cluster.kubectl("apply", "--dry-run=server", "-f", "-", text=text)

    def test_kvlane_runs_with_the_configuration_and_the_account_of_the_chart(self):
        engines = self.engines(2)
        self.pods(2)
        objects = self.cluster.api("GET", f"/api/v1/namespaces/{NAMESPACE}/configmaps")["items"]
        text = next(item["data"]["config.yaml"] for item in objects if "config.yaml" in item.get("data", {}))
        # What is of the pod's own file system and ports is replaced.
        text = re.sub(r"/(etc|var/lib)/kvlane", str(self.cluster.dir / "accounts" / r"\1"), text)
        text = text.replace("host: 0.0.0.0", "host: 127.0.0.1")
        port, admin_port = free_port(), free_port()
        text = text.replace("port: 30000", f"port: {port}").replace("port: 29000", f"port: {admin_port}")
        account = self.cluster.account("kvlane", NAMESPACE)
        text = text.replace("kubernetes:\n", f"kubernetes:\n    kubeconfig: {account}/kubeconfig\n")
        for directory in ("etc/keys", "lib"):
            (self.cluster.dir / "accounts" / directory).mkdir(parents=True, exist_ok=True)
        (self.cluster.dir / "accounts" / "etc" / "keys" / "keys").write_text("operator admin " + "0" * 63 + "1\n")
        text = text.replace("accounts/var/lib", "accounts/lib")
        file = WORK / "chart.yaml"
        file.write_text(text)
        process = Process("kvlane-chart", [KVLANE, "serve", "--config", str(file)])
        self.addCleanup(process.kill)

        def answered():
            process.check_alive()
            try:
                return load.once(port, chat("hello")).good
            except OSError:
                return False

        until("a request is answered", answered, 60)
        self.assertIn(load.once(port, chat("hello")).seen["engine"], engines.names)


class Discovering(Group):
    def test_pods_join_drain_and_leave(self):
        engines = self.engines(4)
        self.pods(3)
        gateway = self.gateway(discovering(self.cluster))
        until("three engines are in rotation", lambda: len(gateway.healthy()) == 3, 30)
        # A pod that is not Ready is no worker, and is one as soon as it is.
        self.cluster.pod("vllm-3", address(3), {"app": "vllm"}, namespace=NAMESPACE, ready=False)
        # One that belongs to somebody else never is.
        self.cluster.pod("other", address(9), {"app": "other"}, namespace=NAMESPACE)
        self.cluster.report("vllm-3", address(3), True, NAMESPACE)
        until("the fourth has joined", lambda: gateway.healthy() == engines.names, 30)
        with Load(gateway.port) as traffic:
            until("all are used", lambda: len(gateway.healthy()) == 4, 5)
            began = time.monotonic()
            self.cluster.terminate("vllm-0", NAMESPACE)
            name = f"{address(0)}:{ENGINE_PORT}"

            def drains():
                worker = gateway.workers().get(name)
                return not worker or worker.get("draining") or not worker["healthy"]

            until("the first drains", drains, 10)
            print(f"drains {1e3 * (time.monotonic() - began):.0f} ms after its deletionTimestamp", flush=True)
            replies = [load.once(gateway.port, chat(f"after {index}")) for index in range(40)]
            self.cluster.remove("vllm-0", NAMESPACE)
            until("the first has left", lambda: name not in gateway.workers(), 10)
        traffic.say("join, drain, leave")
        self.assertEqual([], traffic.bad)
        self.assertNotIn(name, {reply.seen["engine"] for reply in replies})

    def test_restarts_of_the_api_server_cost_no_request(self):
        self.engines(4)
        self.pods(3)
        gateway = self.gateway(discovering(self.cluster))
        until("three engines are in rotation", lambda: len(gateway.healthy()) == 3, 30)
        with Load(gateway.port) as traffic:
            for _ in range(RESTARTS):
                self.cluster.restart()
            self.cluster.pod("vllm-3", address(3), {"app": "vllm"}, namespace=NAMESPACE)
            until("a pod of after the restarts has joined", lambda: len(gateway.healthy()) == 4, 30)
        traffic.say(f"{RESTARTS} restarts of the API server")
        self.assertEqual([], traffic.bad)

    def test_an_api_server_that_is_away_takes_nothing_back(self):
        self.engines(3)
        self.pods(3)
        gateway = self.gateway(discovering(self.cluster))
        until("three engines are in rotation", lambda: len(gateway.healthy()) == 3, 30)
        self.cluster.kill()
        self.addCleanup(self.cluster.start)
        with Load(gateway.port) as traffic:
            until("it is said", lambda: gateway.problems(), 30)
            over = time.monotonic() + AWAY_S
            until("the API server was away for long", lambda: time.monotonic() > over, AWAY_S + 10)
            self.assertEqual(3, len(gateway.healthy()))
            self.assertGreater(gateway.source()["age_s"], AWAY_S / 2)
            print(f"away: {gateway.problems()}", flush=True)
        traffic.say(f"API server away for {AWAY_S:.0f} s")
        self.assertEqual([], traffic.bad)
        self.cluster.start()
        until("it is up to date again", lambda: not gateway.problems() and gateway.source()["age_s"] < AWAY_S / 2, 60)

    def test_many_pods_join_and_leave_at_once(self):
        engines = self.engines(PODS)
        gateway = self.gateway(discovering(self.cluster, selector="app=many", ports=[ENGINE_PORT]))
        count = PODS

        def make(index):
            self.cluster.pod(f"many-{index}", address(index), {"app": "many"}, namespace=NAMESPACE)

        self.cluster.many(make, range(count))
        began, before = time.monotonic(), cpu_s(gateway)
        until("all are in rotation", lambda: len(gateway.healthy()) == count, 60)
        joined = time.monotonic() - began
        print(f"{count} pods: in rotation {joined:.2f} s after the last was written, {cpu_s(gateway) - before:.2f} s of CPU, "
              f"{rss_mib(gateway):.0f} MiB", flush=True)
        gone = f"{address(0)}:{ENGINE_PORT}"
        with Load(gateway.port) as traffic:
            began = time.monotonic()
            self.cluster.many(lambda index: self.cluster.remove(f"many-{index}", NAMESPACE), range(count - 1))
            until("one is left", lambda: len(gateway.workers()) == 1, 30)
            print(f"{count - 1} pods left {time.monotonic() - began:.2f} s after the first was deleted", flush=True)
            replies = [load.once(gateway.port, chat(f"after {index}")) for index in range(20)]
        traffic.say("pods leave")
        self.assertEqual([], traffic.bad)
        self.assertEqual({f"{address(count - 1)}:{ENGINE_PORT}"}, {reply.seen["engine"] for reply in replies})
        self.assertIn(gone, engines.names)
        self.cluster.remove(f"many-{count - 1}", NAMESPACE)


class Saying(Group):
    """Bad input has a message that says what to do."""

    def problem(self, config, pattern):
        gateway = self.gateway(config)
        until(f"it says {pattern!r}: {gateway.problems()}", lambda: re.search(pattern, gateway.problems()), 30)
        print(f"{self._testMethodName}: {gateway.problems()}", flush=True)

    def test_a_verb_that_lacks(self):
        self.cluster.token("bare", NAMESPACE)
        self.problem(discovering(self.cluster, "bare"), r"`list` on\s+`pods` in namespace serving")
        self.cluster.grant("half", [([""], ["pods"], ["list"])], NAMESPACE)
        self.problem(discovering(self.cluster, "half"), r"`watch` on\s+`pods` in namespace serving")

    def test_a_resource_definition_that_is_not_installed(self):
        self.cluster.grant("pools", [
            ([""], ["pods"], ["list", "watch"]), (["inference.networking.k8s.io"], ["inferencepools"], ["list", "watch"]),
        ], NAMESPACE)
        self.cluster.kubectl("delete", "crd", "inferencepools.inference.networking.k8s.io")
        self.addCleanup(self.cluster.install_crds)
        self.problem(discovering(self.cluster, "pools", inference_pool="vllm"), "is not installed")

    def test_a_selector_that_no_pod_has(self):
        self.problem(discovering(self.cluster, selector="app=nothing"), "kubectl get pods")

    def test_a_pod_without_an_address(self):
        self.pods(1)
        self.cluster.pod("pending", None, {"app": "pending"}, namespace=NAMESPACE)
        gateway = self.gateway(discovering(self.cluster, selector="app in (vllm,pending)"))
        self.engines(1)
        until("the other pod is in rotation", lambda: len(gateway.healthy()) == 1, 30)


class Pool(Group):
    """Engines by an InferencePool, one endpoint for each of its ports."""

    values = "gateway-pool.yaml"

    def test_each_port_of_a_pod_is_an_endpoint(self):
        engines = Upstreams(addresses=[(address(index), port) for index in range(2) for port in (8000, 8001)])
        self.addCleanup(engines.kill)
        self.pods(2)
        self.cluster.inference_pool("vllm", {"app": "vllm"}, [8000, 8001], namespace=NAMESPACE)
        gateway = self.gateway(discovering(self.cluster, inference_pool="vllm", ports=[]))
        until(f"four endpoints are in rotation: {gateway.problems()}", lambda: gateway.healthy() == engines.names, 30)


if __name__ == "__main__":
    unittest.main()
