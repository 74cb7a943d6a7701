#!/usr/bin/env python3
"""kvlane with its chart's ServiceAccount at a real API server, in front of engines at the addresses of pods.

    e2e/k8s/setup.sh && python3 e2e/k8s/test_k8s.py -v
    python3 e2e/k8s/test_k8s.py -v Discovering               # one group

Pods are written as a kubelet would report them (cluster.py); their addresses are local to this machine (root, once), and
e2e/envoy/upstream.py answers there. RESTARTS (20), AWAY_S (20), PODS (500) and UPDATES (1) make it shorter or longer.
"""

import asyncio
import base64
import collections
import http.client
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
from cluster import WORK, Cluster, binary, is_free, make_pod_network_local, until  # noqa: E402
from engines import KVLANE, Process, free_port, request  # noqa: E402
from node import Node, Service  # noqa: E402

RESTARTS = int(os.environ.get("RESTARTS", "20"))
AWAY_S = float(os.environ.get("AWAY_S", "20"))
PODS = int(os.environ.get("PODS", "500"))
UPDATES = int(os.environ.get("UPDATES", "1"))
PER_S = 50
LEAVING_PER_S = 300
GONE_S_MAX = 0.1
MIXED_PER_S = 20
# The first address of pods that run.
RUNNING = 2000
# Pods of kvlane among them.
REPLICAS = 3
HEARD_S_MAX = 10
NAMESPACE = "serving"
CHART = REPOSITORY / "deploy" / "helm" / "kvlane"
ENGINE_PORT = 8000
DONE = b"data: [DONE]\n\n"


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


def short(index):
    return chat(f"{index % 40} " + "word " * 200)


class Load:
    """Requests at a fixed rate while a block runs; `bad` are those without a whole 200."""

    def __init__(self, port, body=short, per_s=PER_S):
        """`body(index)` is that of the index-th request."""
        self.port, self.body, self.per_s, self.replies, self.over = port, body, per_s, [], threading.Event()
        self.sent = 0

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
            due = start + self.sent / self.per_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            tasks.append(asyncio.create_task(client.post(self.body(self.sent), due=due)))
            self.sent += 1
        self.replies = await asyncio.gather(*tasks)
        client.close()

    @property
    def bad(self):
        return [reply for reply in self.replies if not reply.good or (streamed(reply) and not reply.body.endswith(DONE))]

    def say(self, what):
        statuses = dict(collections.Counter(reply.status for reply in self.bad))
        print(f"{what}: {len(self.bad)} of {len(self.replies)} requests bad {statuses or ''}", flush=True)


def mixed(index):
    """Whole answers, short streams, and each second one of some fifteen seconds: longer than `shutdown.delaySeconds`."""
    tokens = 1500 if index % MIXED_PER_S == 0 else 16
    return chat(f"{index % 40} " + "word " * 200, model="mock", stream=index % 4 == 0, max_tokens=tokens, ignore_eos=True)


def streamed(reply):
    return reply.headers.get("content-type", "").startswith("text/event-stream")


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


class Rolling(unittest.TestCase):
    """The chart's release in mode gateway: Deployments, Services and their controllers, and pods that run (node.py)."""

    @classmethod
    def setUpClass(cls):
        make_pod_network_local()
        cls.cluster = Cluster(WORK / "k8s-rolling").up(controllers=True)
        cls.addClassCleanup(cls.cluster.down)
        cls.cluster.namespace(NAMESPACE)
        objects = [f"/api/v1/namespaces/{NAMESPACE}/{path}" for path in ("serviceaccounts/default", "configmaps/kube-root-ca.crt")]
        until("the namespace has what every pod wants", lambda: all(cls.cluster.api.raw("GET", path)[0] == 200 for path in objects))
        cls.node = Node(cls.cluster, KVLANE, lambda index: address(RUNNING + index))
        cls.addClassCleanup(cls.node.close)
        cls.service = Service(cls.cluster, "kvlane", NAMESPACE)
        cls.addClassCleanup(cls.service.close)
        cls.cluster.kubectl("apply", "--namespace", NAMESPACE, "-f", str(REPOSITORY / "deploy" / "samples" / "mock.yaml"))
        cls.helm("install")
        try:
            until("all pods of kvlane serve", lambda: len(cls.service.ready) == REPLICAS, 120)
        except AssertionError:
            print(cls.node.logs(), flush=True)
            raise

    @classmethod
    def helm(cls, what, *options):
        values = f"engines.selector.matchLabels.app=mock,replicas={REPLICAS}"
        command = [binary("helm"), what, "kvlane", str(CHART), "--namespace", NAMESPACE, "--set", values]
        environment = os.environ | {"KUBECONFIG": str(cls.cluster.kubeconfig)}
        subprocess.run([*command, *options], check=True, capture_output=True, text=True, env=environment)

    def test_an_update_of_kvlane_costs_no_request(self):
        before = set(self.service.ready)
        with Load(self.service.port, mixed, per_s=MIXED_PER_S) as traffic:
            until("long streams are under way", lambda: traffic.sent > 5 * MIXED_PER_S, 30)
            for update in range(UPDATES):
                began, ended = time.monotonic(), len(self.node.ended("kvlane"))
                # One of the keys that a reload cannot change, so that the pods are replaced.
                self.helm("upgrade", "--set", f"config.tokens.threads={2 + update}")
                until("all of before have ended", lambda: len(self.node.ended("kvlane")) == ended + REPLICAS, 300)
                print(f"{REPLICAS} pods of kvlane replaced in {time.monotonic() - began:.0f} s", flush=True)
            enough = traffic.sent + 2 * MIXED_PER_S
            until("their successors serve", lambda: traffic.sent > enough, 30)
            after = set(self.service.ready)
        traffic.say(f"rolling update, {sum(map(streamed, traffic.replies))} streams among the requests")
        self.assertEqual([], [(reply.error, reply.status, reply.body[-200:], reply.end_s) for reply in traffic.bad])
        self.assertEqual({0}, set(self.node.ended("kvlane").values()), "exit codes")
        self.assertEqual(REPLICAS, len(after))
        self.assertFalse(before & after, "a pod was kept")
        self.all_hear_each_other()
        for ip, told in self.replicas().items():
            self.assertEqual("arrived", told["snapshot"]["state"], ip)

    def test_a_conversation_goes_on_at_another_pod_when_one_is_lost(self):
        self.all_hear_each_other()
        before = self.serving()
        lost, other = before[:2]
        prompt = "the beginning of a conversation " * 200
        backend, _ = self.ask(lost, prompt)
        # Ten times `replicas.interval`: the others know it.
        time.sleep(0.2)
        (name,) = [name for name, pod in self.node.pods.items() if pod.ip == lost]
        self.node.lose(name)
        again, cached = self.ask(other, prompt + " goes on")
        self.assertEqual(backend, again)
        self.assertGreater(cached, 500)
        until("another pod has taken its place", lambda: len(self.serving()) == REPLICAS and lost not in self.serving(), 120)
        (successor,) = set(self.serving()) - set(before)
        self.all_hear_each_other()
        told = self.replicas()[successor]
        self.assertEqual("arrived", told["snapshot"]["state"])
        self.assertGreater(told["snapshot"]["marks"], 0)
        again, cached = self.ask(successor, prompt + " goes on at the successor")
        self.assertEqual(backend, again)
        self.assertGreater(cached, 500)

    def serving(self):
        """Addresses of the pods of kvlane that are ready."""
        return [ip for ip, _ in self.service.ready]

    def replicas(self):
        """What each of them says of its replicas."""
        data = self.cluster.api("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets/kvlane-operators")["data"]
        key = base64.b64decode(data["admin"]).decode()
        return {
            ip: self.fetch(ip, 29000, "GET", "/readiness", headers={"authorization": f"Bearer {key}"})[1]["replicas"]
            for ip in self.serving()
        }

    def all_hear_each_other(self):
        began = time.monotonic()

        def heard():
            told = self.replicas()
            counting = [sum(peer["counts"] for peer in of["peers"]) for of in told.values()]
            return counting == [REPLICAS - 1] * REPLICAS and not any(of["problems"] for of in told.values())

        until("all pods of kvlane hear each other", heard, HEARD_S_MAX)
        print(f"all hear each other after {time.monotonic() - began:.2f} s", flush=True)

    def ask(self, ip, prompt):
        """The engine that answers a prompt which the gateway at `ip` gets, and how many of its tokens were cached there."""
        body = json.dumps({"model": "mock", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4})
        headers, answer = self.fetch(ip, 30000, "POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        return headers["x-router-backend"], (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)

    def fetch(self, ip, port, method, path, body=None, headers=None):
        connection = http.client.HTTPConnection(ip, port, timeout=10)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            text = response.read()
            self.assertEqual(200, response.status, text)
            return response.headers, json.loads(text)
        finally:
            connection.close()


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
                self.cluster.kill()
                self.assertTrue(is_free(self.cluster.port), "killed, and its port is still taken")
                self.cluster.start()
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

    def test_engines_that_die_while_the_api_server_is_away_get_no_request(self):
        engines = self.engines(3)
        idle, busy = (Upstreams(addresses=[(address(index), ENGINE_PORT)], name=f"upstream-{index}") for index in (3, 4))
        for dying in (idle, busy):
            self.addCleanup(dying.kill)
        self.pods(5)
        gateway = self.gateway(discovering(self.cluster))
        until("five engines are in rotation", lambda: len(gateway.healthy()) == 5, 30)
        self.cluster.kill()
        self.addCleanup(self.cluster.start)
        until("it is said", lambda: gateway.problems(), 30)
        # One dies while there is no request: only probes can find it. The other under load.
        self.die(idle, gateway)
        with Load(gateway.port) as traffic:
            until("all that live are used", lambda: traffic.sent > PER_S, 10)
            self.die(busy, gateway)
            # What is sent to either from here on is counted.
            sick = Upstreams(addresses=idle.addresses + busy.addresses, name="upstream-sick", options=["--sick"])
            self.addCleanup(sick.kill)
            over = time.monotonic() + AWAY_S / 2
            until("the API server was away for long", lambda: time.monotonic() > over, AWAY_S)
            self.assertEqual(engines.names, gateway.healthy())
            self.assertEqual(5, len(gateway.workers()), "the API server has not said that one is gone")
            self.cluster.start()
            for index in (3, 4):
                self.cluster.remove(f"vllm-{index}", NAMESPACE)
            until("they have left", lambda: set(gateway.workers()) == engines.names, 60)
        traffic.say("engines die while the API server is away")
        self.assertEqual([], traffic.bad)
        self.assertEqual("", sick.log.read_text(), "requests that reached an engine that is down")

    def die(self, engine, gateway):
        died = time.monotonic()
        engine.kill()
        until("it is found", lambda: not engine.names & gateway.healthy(), 60)
        print(f"{engine.name}: found {time.monotonic() - died:.2f} s after its death", flush=True)

    def test_many_pods_join_and_leave_at_once(self):
        engines = self.engines(PODS)
        gateway = self.gateway(discovering(self.cluster, selector="app=many", ports=[ENGINE_PORT]))
        count = PODS

        def make(index):
            self.cluster.pod(f"many-{index}", address(index), {"app": "many"}, namespace=NAMESPACE)

        self.cluster.many(make, range(count))
        began, before = time.monotonic(), cpu_s(gateway)
        until("all are in rotation", lambda: len(gateway.healthy()) == count, 180)
        joined = time.monotonic() - began
        print(f"{count} pods: in rotation {joined:.2f} s after the last was written, {cpu_s(gateway) - before:.2f} s of CPU, "
              f"{rss_mib(gateway):.0f} MiB", flush=True)
        def remove(index):
            self.cluster.remove(f"many-{index}", NAMESPACE)
            return f"{address(index)}:{ENGINE_PORT}", time.monotonic()

        with Load(gateway.port, per_s=LEAVING_PER_S) as traffic:
            until("all kinds of requests are under way", lambda: traffic.sent > LEAVING_PER_S, 10)
            began, before = time.monotonic(), cpu_s(gateway)
            gone = dict(self.cluster.many(remove, range(count - 1)))
            until("one is left", lambda: len(gateway.workers()) == 1, 30)
            print(f"{count - 1} pods left {time.monotonic() - began:.2f} s after the first was deleted, "
                  f"{cpu_s(gateway) - before:.2f} s of CPU with {LEAVING_PER_S} requests/s, {rss_mib(gateway):.0f} MiB", flush=True)
            replies = [load.once(gateway.port, chat(f"after {index}")) for index in range(20)]
        traffic.say("pods leave")
        self.assertEqual([], traffic.bad)
        # An engine's clock is this one's. Not exact: a request counts when the engine's own process has read it.
        late_s = [seen["at"] - gone[seen["engine"]] for seen in (reply.seen for reply in traffic.replies) if seen["engine"] in gone]
        span = sum(began <= reply.seen["at"] <= max(gone.values()) for reply in traffic.replies)
        print(f"{span} requests while pods left; the last one that reached a pod did so {1e3 * max(late_s):.0f} ms after its deletion",
              flush=True)
        self.assertLess(max(late_s), GONE_S_MAX)
        self.assertEqual({f"{address(count - 1)}:{ENGINE_PORT}"}, {reply.seen["engine"] for reply in replies})
        self.assertLessEqual(set(gone), engines.names)
        self.cluster.remove(f"many-{count - 1}", NAMESPACE)


class Saying(Group):
    """Bad input has a message that says what to do."""

    def problem(self, config, pattern):
        gateway = self.gateway(config)
        until(f"it says {pattern!r}", lambda: re.search(pattern, gateway.problems()), 30)
        print(f"{self._testMethodName}: {gateway.problems()}", flush=True)

    def test_a_verb_that_lacks(self):
        self.cluster.token("bare", NAMESPACE)
        self.problem(discovering(self.cluster, "bare"), r"`list` on\s+`pods` in namespace serving")
        self.cluster.grant("half", [([""], ["pods"], ["list"])], NAMESPACE)
        self.problem(discovering(self.cluster, "half"), r"`watch` on\s+`pods` in namespace serving")

    def test_the_rule_of_the_message_is_enough(self):
        self.engines(1)
        self.pods(1)
        self.cluster.token("ruled", NAMESPACE)
        gateway = self.gateway(discovering(self.cluster, "ruled"))
        rule = until("it says the rule", lambda: re.search(r"the rule \{(.*?)\} ", gateway.problems()), 30)[1]
        groups, resources, verbs = (json.loads(part) for part in re.findall(r"\[.*?\]", rule))
        self.assertEqual(["list", "watch"], verbs)
        self.cluster.grant("ruled", [(groups, resources, verbs)], NAMESPACE)
        until("the engine is in rotation", lambda: len(gateway.healthy()) == 1, 60)

    def test_the_chart_grants_list_and_watch_only(self):
        for file in sorted((CHART / "ci").glob("*.yaml")):
            verbs = set(re.findall(r"^ +verbs: (.*)$", rendered("--values", str(file)), re.M))
            self.assertLessEqual(verbs, {"[list, watch]"}, file.stem)

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

    def test_bad_pods_are_named_and_cost_no_other(self):
        self.engines(1)
        self.pods(1)
        self.cluster.pod("homeless", None, {"app": "vllm"}, namespace=NAMESPACE)
        ready = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        self.cluster.api.merge(f"/api/v1/namespaces/{NAMESPACE}/pods/homeless/status", {"status": ready})
        self.cluster.pod("twin", address(0), {"app": "vllm"}, namespace=NAMESPACE)
        self.cluster.pod("six", "fd00:99::7", {"app": "vllm"}, namespace=NAMESPACE)
        gateway = self.gateway(discovering(self.cluster, selector="app=vllm", ports=[ENGINE_PORT, ENGINE_PORT + 1]))
        for pattern in (
            r"pod serving/homeless: it is ready and has no IP address: see `kubectl describe pod`",
            rf"has the same address http://{re.escape(address(0))}:{ENGINE_PORT} and is newer",
            rf"no pod in namespace serving declares the port {ENGINE_PORT + 1}, .* check discovery.kubernetes.ports",
        ):
            until(f"it says {pattern!r}", lambda: re.search(pattern, gateway.problems()), 30)
        print(f"{self._testMethodName}: {gateway.problems()}", flush=True)
        until("the sound pod is in rotation", lambda: gateway.healthy() == {f"{address(0)}:{ENGINE_PORT}"}, 30)
        self.assertIn(f"[fd00:99::7]:{ENGINE_PORT}", gateway.workers())


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

    def test_a_pool_that_names_no_pod_is_named(self):
        self.cluster.inference_pool("vllm", {"app": "nothing"}, [8000], namespace=NAMESPACE)
        gateway = self.gateway(discovering(self.cluster, inference_pool="vllm", ports=[]))
        pattern = r"the InferencePool vllm in namespace serving selects no pod: .* check its spec.selector"
        until(f"it says {pattern!r}", lambda: re.search(pattern, gateway.problems()), 30)
        print(f"{self._testMethodName}: {gateway.problems()}", flush=True)


if __name__ == "__main__":
    unittest.main()
