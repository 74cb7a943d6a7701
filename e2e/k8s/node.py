"""A node of a cluster.py control plane whose pods run, and a Service whose connections reach them: what kubelet, a container runtime and
kube-proxy do, as far as kvlane's chart asks for it.

A pod's one container is `kvlane` with the pod's arguments, user, environment and volumes, in a root directory and mounts of its own;
its startup and readiness probes are asked, its status is reported, and when it is deleted it gets SIGTERM and its grace period.
Its resolver is `Names`, which answers for Services as the cluster's DNS server does.
All pods have the network of this machine: in their arguments and ConfigMaps `0.0.0.0` and `tcp://*` become the pod's address.

Root, Linux, util-linux; Python's own library only.
"""

import asyncio
import base64
import http.client
import os
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from pathlib import Path

from cluster import ApiError, free_ports

POLL_S = 0.05
# A node that is silent for 40 s loses its pods.
HEARTBEAT_S = 10
# $0 is the pod's root, $1 the program, $2 its user, and the rest are its arguments. Each replaces itself by the next: one process.
CONTAINER = (
    'for shared in usr proc dev etc/ssl; do mount --rbind "/$shared" "$0/$shared"; done; root=$0 program=$1 user=$2; shift 2; '
    'mount --bind "$program" "$root/kvlane" && exec chroot --userspec="$user" "$root" /kvlane "$@"'
)


class Names:
    """A DNS server for the names of Services, with what CoreDNS answers for headless ones: an A record for each address that the
    endpoint slices call ready, which are all if the Service publishes addresses that are not. UDP, port 53 of `address`."""

    TTL_S = 5
    A, AAAA = 1, 28

    def __init__(self, cluster, address):
        self.cluster, self.address, self.closed = cluster, address, threading.Event()
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind((address, 53))
        self.socket.settimeout(POLL_S)
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def close(self):
        self.closed.set()
        self.thread.join()
        self.socket.close()

    def resolv_conf(self, namespace):
        return f"nameserver {self.address}\nsearch {namespace}.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5\n"

    def _serve(self):
        while not self.closed.is_set():
            try:
                query, client = self.socket.recvfrom(4096)
            except TimeoutError:
                continue
            self.socket.sendto(self._answer(query), client)

    def _answer(self, query):
        labels, at = [], 12
        while length := query[at]:
            labels.append(query[at + 1:at + 1 + length].decode().lower())
            at += 1 + length
        (kind,) = struct.unpack_from("!H", query, at + 1)
        question, addresses = query[12:at + 5], self._addresses(labels)
        found = addresses if addresses and kind == self.A else []
        # Authoritative, recursion available; NXDOMAIN where there is no such Service or it has no address.
        flags = 0x8580 | (0 if addresses else 3)
        answer = struct.pack("!2sHHHHH", query[:2], flags, 1, len(found), 0, 0) + question
        for address in found:
            answer += struct.pack("!HHHIH4s", 0xC00C, self.A, 1, self.TTL_S, 4, socket.inet_aton(address))
        return answer

    def _addresses(self, labels):
        if labels[2:] != ["svc", "cluster", "local"]:
            return []
        name, namespace = labels[:2]
        path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector=kubernetes.io/service-name={name}"
        return sorted({
            address for item in self.cluster.api("GET", path)["items"] for endpoint in item["endpoints"] or []
            if endpoint["conditions"]["ready"] for address in endpoint["addresses"]
        })


class Node:
    """Registers a node, and runs the pods that the scheduler gives it, until `close`."""

    def __init__(self, cluster, program, address, name="node"):
        """`address(index)` is that of the index-th pod, after that of the DNS server; `program` the binary of their image."""
        self.cluster, self.program, self.name = cluster, program, name
        self.address = lambda index: address(index + 1)
        self.names = Names(cluster, address(0))
        self.pods, self.closed = {}, threading.Event()
        cluster.api("POST", "/api/v1/nodes", {
            "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        })
        self._beat()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def close(self):
        """Kills what runs."""
        self.closed.set()
        self.thread.join()
        for pod in self.pods.values():
            pod.kill()
        self.names.close()

    def lose(self, name):
        """Kills a pod's process and removes the pod, as when its machine is gone: what replaces it has another address."""
        self.pods[name].kill()
        self.cluster.remove(name, self.pods[name].namespace)

    def ended(self, app):
        """Exit codes of pods of an application (`app.kubernetes.io/name`) that are gone, by name."""
        return {
            name: pod.code for name, pod in self.pods.items()
            if pod.gone and pod.object["metadata"]["labels"].get("app.kubernetes.io/name") == app
        }

    def logs(self):
        """The end of what each pod has said."""
        return "\n".join(f"{name}: {pod.log()[-2000:]}" for name, pod in self.pods.items())

    def _beat(self):
        most = {"cpu": "64", "memory": "256Gi", "pods": "110"}
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now}
        self.cluster.api.merge(f"/api/v1/nodes/{self.name}/status", {
            "status": {"capacity": most, "allocatable": most, "conditions": [ready]},
        })
        self.beaten = time.monotonic()

    def _run(self):
        while not self.closed.wait(POLL_S):
            if time.monotonic() - self.beaten > HEARTBEAT_S:
                self._beat()
            for item in self.cluster.api("GET", f"/api/v1/pods?fieldSelector=spec.nodeName={self.name}")["items"]:
                name = item["metadata"]["name"]
                if name not in self.pods:
                    self.pods[name] = Pod(self.cluster, self.program, item, self.address(len(self.pods)), self.names)
                if "deletionTimestamp" in item["metadata"]:
                    self.pods[name].ending.set()


class Pod:
    """One pod, from its volumes to its end."""

    def __init__(self, cluster, program, item, ip, names):
        self.cluster, self.object, self.ip, self.names = cluster, item, ip, names
        self.namespace, self.name = item["metadata"]["namespace"], item["metadata"]["name"]
        self.spec = item["spec"]
        (self.container,) = self.spec["containers"]
        self.root = cluster.dir / "pods" / self.name
        self.ending, self.gone, self.code = threading.Event(), False, None
        self._mount()
        self.child = self._start(program)
        threading.Thread(target=self._run, daemon=True).start()

    def kill(self):
        if self.child.poll() is None:
            self.child.kill()
            self.child.wait()

    def log(self):
        return (self.cluster.dir / "logs" / f"{self.name}.log").read_text(errors="replace")

    # === Volumes ===

    def _mount(self):
        for directory in ("usr", "proc", "dev", "etc/ssl", "tmp"):
            (self.root / directory).mkdir(parents=True)
        for link in ("lib", "lib64"):
            (self.root / link).symlink_to(f"usr/{link}")
        (self.root / "kvlane").touch()
        (self.root / "etc" / "resolv.conf").write_text(self.names.resolv_conf(self.namespace))
        volumes = {volume["name"]: volume for volume in self.spec.get("volumes", [])}
        for mount in self.container.get("volumeMounts", []):
            directory = self.root / mount["mountPath"].lstrip("/")
            directory.mkdir(parents=True, exist_ok=True)
            self._fill(directory, volumes[mount["name"]])
        owner = self._user()
        for path in [self.root, *self.root.rglob("*")]:
            os.chown(path, owner, owner, follow_symlinks=False)

    def _fill(self, directory, volume):
        for source in volume.get("projected", {}).get("sources", [volume]):
            for name, data in self._files(source).items():
                (directory / name).write_bytes(data)

    def _files(self, source):
        """What a volume, or a source of a projected one, has in it."""
        if kind := source.get("configMap"):
            data = self._object("configmaps", kind["name"])["data"]
            return self._items(kind, {name: self._own(text).encode() for name, text in data.items()})
        if kind := source.get("secret"):
            data = self._object("secrets", kind.get("secretName") or kind["name"])["data"]
            return self._items(kind, {name: base64.b64decode(text) for name, text in data.items()})
        if kind := source.get("serviceAccountToken"):
            return {kind["path"]: self.cluster.token(self.spec["serviceAccountName"], self.namespace).encode()}
        if kind := source.get("downwardAPI"):
            return {item["path"]: self.namespace.encode() for item in kind["items"]}
        assert "emptyDir" in source, f"pod {self.name}: no idea how to mount {source}"
        return {}

    def _object(self, resource, name):
        return self.cluster.api("GET", f"/api/v1/namespaces/{self.namespace}/{resource}/{name}")

    @staticmethod
    def _items(kind, files):
        return {item["path"]: files[item["key"]] for item in kind["items"]} if "items" in kind else files

    def _own(self, text):
        return text.replace("0.0.0.0", self.ip).replace("tcp://*", f"tcp://{self.ip}")

    # === The process ===

    def _user(self):
        return self.spec["securityContext"]["runAsUser"]

    def _start(self, program):
        user = f"{self._user()}:{self._user()}"
        environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(self.cluster.port)}
        environment |= {variable["name"]: variable["value"] for variable in self.container.get("env", [])}
        arguments = [self._own(argument) for argument in self.container["args"]]
        with (self.cluster.dir / "logs" / f"{self.name}.log").open("wb") as log:
            return subprocess.Popen(
                ["unshare", "--mount", "sh", "-ec", CONTAINER, str(self.root), str(Path(program).resolve()), user, *arguments],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env={"PATH": os.environ["PATH"]} | environment,
            )

    def _run(self):
        self._report(False)
        if probe := self.container.get("startupProbe"):
            self._startup(probe)
        probe = self.container["readinessProbe"]
        ready, failures = False, 0
        while self.child.poll() is None and not self.ending.is_set():
            failures = 0 if self._asked(probe) else failures + 1
            if ready != (failures == 0) and failures in (0, probe["failureThreshold"]):
                ready = not ready
                self._report(ready)
            self.ending.wait(probe["periodSeconds"])
        if self.ending.is_set():
            self._end()

    def _startup(self, probe):
        for _ in range(probe["failureThreshold"]):
            if self._asked(probe) or self.ending.wait(probe["periodSeconds"]):
                return
        # The kubelet would start it again; a test has nothing to wait for.
        self.child.kill()

    def _end(self):
        """SIGTERM, the grace period, and then the pod is no more."""
        self.child.send_signal(signal.SIGTERM)
        try:
            self.code = self.child.wait(self.spec["terminationGracePeriodSeconds"])
        except subprocess.TimeoutExpired:
            self.kill()
            self.code = self.child.returncode
        shutil.rmtree(self.root)
        self.cluster.remove(self.name, self.namespace)
        self.gone = True

    def _asked(self, probe):
        """Whether the container answers an HTTP probe."""
        get = probe["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        connection = http.client.HTTPConnection(self.ip, ports.get(get["port"], get["port"]), timeout=probe["timeoutSeconds"])
        try:
            connection.request("GET", get["path"])
            return 200 <= connection.getresponse().status < 400
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def _report(self, ready):
        try:
            self.cluster.report(self.name, self.ip, ready, self.namespace, self.container["name"])
        except ApiError as error:
            # Deleted before it was running.
            if error.status != 404:
                raise


class Service:
    """A port of loopback whose connections each go to one of the Service's ready endpoints, in turn, and stay with it."""

    def __init__(self, cluster, name, namespace):
        self.cluster, self.ready, self.turn, self.closed = cluster, [], 0, threading.Event()
        self.path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector=kubernetes.io/service-name={name}"
        (self.port,) = free_ports(1)
        self.threads = [threading.Thread(target=target, daemon=True) for target in (self._follow, lambda: asyncio.run(self._serve()))]
        for thread in self.threads:
            thread.start()

    def close(self):
        self.closed.set()
        for thread in self.threads:
            thread.join()

    def _follow(self):
        while not self.closed.wait(POLL_S):
            self.ready = sorted(
                (address, item["ports"][0]["port"])
                for item in self.cluster.api("GET", self.path)["items"] for endpoint in item["endpoints"] or []
                if endpoint["conditions"]["ready"] for address in endpoint["addresses"]
            )

    async def _serve(self):
        async with await asyncio.start_server(self._pass, "127.0.0.1", self.port):
            while not self.closed.is_set():
                await asyncio.sleep(POLL_S)

    async def _pass(self, reader, writer):
        ready = self.ready
        if not ready:
            writer.close()
            return
        self.turn += 1
        try:
            upstream = await asyncio.open_connection(*ready[self.turn % len(ready)])
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pipe(reader, upstream[1]), self._pipe(upstream[0], writer))

    @staticmethod
    async def _pipe(reader, writer):
        try:
            while piece := await reader.read(65536):
                writer.write(piece)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
