#!/usr/bin/env python3
"""The chart's release in mode envoy, as processes: what it renders is applied to a real API server, and what its pods would run is
run here, under load.

    e2e/k8s/setup.sh && e2e/envoy/setup.sh              # once: Kubernetes' programs, helm and Envoy
    KVLANE=target/release/kvlane deploy/helm/release.py

Two `kvlane epp` with the rendered configuration and the token of the rendered ServiceAccount, Envoy with its rendered configuration
(but for ports, and a name server of ours), three mock engines as pods. Pickers and engines are killed, stopped and ended meanwhile;
every request is counted by how it ended. It exits with an error if more fail than the table allows.

Python 3.11 and its own library; addresses 127.0.8.0/24.
"""
import base64
import collections
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "e2e" / "k8s"))
from cluster import Cluster, binary, free_ports, until  # noqa: E402

INFRA = Path(os.environ.get("KVLANE_INFRA", Path.home() / ".cache" / "kvlane-infra"))
KVLANE = Path(os.environ.get("KVLANE", ROOT / "target" / "release" / "kvlane")).resolve()
ENVOY = Path(os.environ.get("ENVOY", INFRA / "envoy" / "envoy"))
NAMESPACE = "serving"
ENGINES = [f"127.0.8.{n}" for n in (11, 12, 13)]
PICKERS = [f"127.0.8.{n}" for n in (21, 22)]
CLIENTS = 8


class Names(threading.Thread):
    """A name server for Envoy: addresses of the headless Services."""

    def __init__(self):
        super().__init__(daemon=True)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self.of = {}

    def run(self):
        while True:
            question, client = self.socket.recvfrom(4096)
            labels, at = [], 12
            while question[at]:
                labels.append(question[at + 1:at + 1 + question[at]].decode())
                at += question[at] + 1
            end = at + 5
            kind, known = struct.unpack(">H", question[at + 1:at + 3])[0], self.of.get(".".join(labels))
            found = known if known and kind == 1 else []
            answers = b"".join(b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 1, 4) + socket.inet_aton(ip) for ip in found)
            code = 0x8180 if known is not None else 0x8183
            self.socket.sendto(question[:2] + struct.pack(">HHHHH", code, 1, len(found), 0, 0) + question[12:end] + answers, client)


class Release:
    """The processes of a release."""

    def __init__(self, cluster, directory):
        self.cluster, self.dir, self.processes, self.names = cluster, directory, {}, Names()
        self.clients, self.admin, self.health = free_ports(3)
        self.rendered = subprocess.run(
            [binary("helm"), "template", "kvlane", HERE / "kvlane", "--namespace", NAMESPACE, "--kube-version", "1.33.0",
             "--set", "mode=envoy,engines.selector.matchLabels.app=vllm,shutdown.delaySeconds=3,shutdown.graceSeconds=20"],
            check=True, capture_output=True, text=True).stdout

    def data(self, key):
        """A block of a rendered ConfigMap."""
        block = re.search(rf"^  {re.escape(key)}: \|\n((?:    .*\n|\n)+)", self.rendered, re.MULTILINE)[1]
        return "".join(line[4:] for line in block.splitlines(keepends=True))

    def start(self):
        self.cluster.namespace(NAMESPACE)
        self.cluster.kubectl("apply", "--filename", "-", text=self.rendered)
        secret = self.cluster.api("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets/kvlane-operators")["data"]
        (self.dir / "keys").write_bytes(base64.b64decode(secret["keys"]))
        self.key = base64.b64decode(secret["admin"]).decode()
        self.account = self.cluster.account("kvlane", NAMESPACE)
        for ip in ENGINES:
            self.start_engine(ip)
            self.cluster.pod(f"engine-{ip[-2:]}", ip, {"app": "vllm"}, namespace=NAMESPACE)
        config = self.data("config.yaml").replace("/etc/kvlane/keys/keys", str(self.dir / "keys"))
        (self.dir / "config.yaml").write_text(config.replace("/var/lib/kvlane", str(self.dir)))
        for ip in PICKERS:
            self.start_picker(ip)
        self.names.of = {f"kvlane-engines.{NAMESPACE}.svc.cluster.local": ENGINES, f"kvlane-epp.{NAMESPACE}.svc.cluster.local": PICKERS}
        self.names.start()
        envoy = self.data("envoy.yaml")
        for port, ours in ((8080, self.clients), (19000, self.admin), (19001, self.health)):
            envoy = envoy.replace(f"port_value: {port}", f"port_value: {ours}")
        resolver = {"@type": "type.googleapis.com/envoy.extensions.network.dns_resolver.cares.v3.CaresDnsResolverConfig",
                    "resolvers": [{"socket_address": {"address": "127.0.0.1", "port_value": self.names.port}}]}
        typed = json.dumps({"name": "envoy.network.dns_resolver.cares", "typed_config": resolver})
        (self.dir / "envoy.yaml").write_text(f"{envoy}\ntyped_dns_resolver_config: {typed}\n")
        self.spawn("envoy", ENVOY, "-c", self.dir / "envoy.yaml", "--concurrency", "2", "--disable-hot-restart", "-l", "warn",
                   "--component-log-level", "ext_proc:error")
        until("Envoy asks a picker", lambda: self.ask("/v1/models", None)[0] == 200)

    def heard(self, ip):
        """How many other pickers count at one."""
        connection = http.client.HTTPConnection(ip, 29000, timeout=2)
        try:
            connection.request("GET", "/readiness", headers={"authorization": f"Bearer {self.key}"})
            return sum(peer["counts"] for peer in json.loads(connection.getresponse().read())["replicas"]["peers"])
        finally:
            connection.close()

    def spawn(self, name, *command):
        with open(self.dir / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def start_engine(self, ip):
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://{ip}:5557", "replay_endpoint": f"tcp://{ip}:5657"}
        self.spawn(ip, KVLANE, "mock-engine", "--host", ip, "--port", "8000", "--kv-events-config", json.dumps(events))

    def start_picker(self, ip):
        keys = {"discovery.kubernetes.kubeconfig": self.account / "kubeconfig", "epp.host": ip, "metrics.host": ip,
                # The name of the rendered configuration is the cluster's, and this machine's resolver does not know it.
                "replicas.listen": f"{ip}:3006", "replicas.peers": json.dumps([f"{picker}:3006" for picker in PICKERS]),
                "routing.index_snapshot": self.dir / f"{ip}.index", "kv_events.snapshot": self.dir / f"{ip}.kv"}
        sets = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
        self.spawn(ip, KVLANE, "epp", "--config", self.dir / "config.yaml", *sets)
        until(f"the picker at {ip} is ready", lambda: status(ip, 29000, "/readiness") == 200)

    def kill(self, name, number):
        self.processes[name].send_signal(number)

    def restart(self, ip):
        self.kill(ip, signal.SIGKILL)
        self.processes[ip].wait()
        self.start_picker(ip)

    def ask(self, path, body):
        """Status and body of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.clients, timeout=30)
        try:
            connection.request("POST" if body else "GET", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__, b""
        finally:
            connection.close()

    def load(self, seconds, happens, tokens=4):
        """How requests ended while `happens` did, after a quarter of the time."""
        stream = tokens > 50
        body = json.dumps({"model": "mock", "max_tokens": tokens, "stream": stream, "ignore_eos": True,
                           "messages": [{"role": "user", "content": "hello " * 200}]})
        ended, until_s = collections.Counter(), time.monotonic() + seconds

        def client():
            while time.monotonic() < until_s:
                code, answer = self.ask("/v1/chat/completions", body)
                ended["broken" if code == 200 and stream and not answer.rstrip().endswith(b"[DONE]") else code] += 1
                time.sleep(0.02)

        threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        time.sleep(seconds / 4)
        happens()
        for thread in threads:
            thread.join()
        return ended

    def replace_engine(self):
        """What a controller and kubelet do: the pod is deleted, its engine gets SIGTERM after its preStop."""
        self.cluster.terminate(f"engine-{ENGINES[2][-2:]}", NAMESPACE)
        self.names.of[f"kvlane-engines.{NAMESPACE}.svc.cluster.local"] = ENGINES[:2]
        time.sleep(2)
        self.kill(ENGINES[2], signal.SIGTERM)

    def end(self):
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()


def status(host, port, path):
    connection = http.client.HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


def main():
    failures = []
    with tempfile.TemporaryDirectory() as directory, Cluster(Path(directory) / "cluster") as cluster:
        cluster.up()
        release = Release(cluster, Path(directory))
        first, second = PICKERS

        def row(what, allowed, seconds, happens=lambda: None, tokens=4):
            ended = release.load(seconds, happens, tokens)
            failed = sum(count for code, count in ended.items() if code != 200)
            print(f"{what}: {failed} of {ended.total()} failed {dict(ended) if failed else ''}", flush=True)
            if ended.total() == 0 or (allowed is not None and failed > allowed):
                failures.append(what)

        try:
            release.start()
            until("pickers hear each other", lambda: [release.heard(ip) for ip in PICKERS] == [1, 1])
            row("nothing happens", 0, 4)
            row("one of two pickers killed with -9", 2, 8, lambda: release.kill(first, signal.SIGKILL))
            release.restart(first)
            row("one of two pickers stopped", 2, 8, lambda: release.kill(first, signal.SIGSTOP))
            release.restart(first)
            row("one of two pickers ended with SIGTERM", 0, 8, lambda: release.kill(second, signal.SIGTERM))
            release.restart(second)
            row("streams, one of two pickers killed with -9", 0, 6, lambda: release.kill(first, signal.SIGKILL), tokens=200)
            release.restart(first)
            row("an engine's pod deleted, its engine ended", 0, 10, release.replace_engine)
            row("the API server killed and started", 0, 8, cluster.restart)
            row("both pickers killed with -9", None, 6, lambda: [release.kill(ip, signal.SIGKILL) for ip in PICKERS])
            row("no picker: open", 0, 4)
        finally:
            release.end()
    if failures:
        sys.exit(f"more failed than may: {', '.join(failures)}")


main()
