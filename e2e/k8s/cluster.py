#!/usr/bin/env python3
"""A throw-away Kubernetes control plane on loopback: etcd, kube-apiserver with RBAC, and, if wanted, its controllers, scheduler and kwok.

    python3 e2e/k8s/cluster.py up                       # prints the path of a kubeconfig; export KUBECONFIG=that
    python3 e2e/k8s/cluster.py up --controllers --nodes 2
    python3 e2e/k8s/cluster.py restart                  # kill -9 of the API server, and a new one over the same data
    python3 e2e/k8s/cluster.py kill | start | pause | resume
    python3 e2e/k8s/cluster.py account kvlane           # a ServiceAccount's token, CA and kubeconfig, as files
    python3 e2e/k8s/cluster.py down

Without controllers, objects are what is written and nothing else happens: no default ServiceAccount, no endpoints, no garbage
collection, and pods are made by `pod`, with the address and the readiness that a test wants. With controllers, Deployments have
pods and Services have EndpointSlices; kwok gives pods on its `--nodes` addresses and turns them Ready.

Programs are those that e2e/k8s/setup.sh builds. Python 3.11, openssl, nothing else. `--dir` names another place than
e2e/.work/k8s, so that several can stand beside one another: ports are free ones.
"""

import argparse
import base64
import concurrent.futures
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
INFRA = Path(os.environ.get("KVLANE_INFRA", Path.home() / ".cache" / "kvlane-infra"))
WORK = Path(os.environ.get("E2E_WORK", HERE.parent / ".work")).resolve()
READY_S_MAX = 120
POLL_S = 0.05
# Pods on nodes of kwok have addresses of this network, which is local once its first address is on the loopback interface.
POD_NETWORK = "10.99.0.1/16"
ADMIN_TOKEN = "e2e-admin"


class ApiError(Exception):
    """An answer of the API server that is no success."""

    def __init__(self, method, path, status, body):
        self.status, self.body = status, body
        super().__init__(f"{method} {path} answered {status}: {body.get('message', body)}")


class Api:
    """JSON requests to an API server, on a connection for each thread. A connection that has ended is opened again, once."""

    def __init__(self, port, ca, token):
        self.port, self.token = port, token
        self.tls = ssl.create_default_context(cafile=str(ca))
        self.local = threading.local()

    def _connection(self):
        if not getattr(self.local, "connection", None):
            self.local.connection = http.client.HTTPSConnection("127.0.0.1", self.port, context=self.tls, timeout=30)
        return self.local.connection

    def raw(self, method, path, body=None, kind="application/json"):
        """Status and decoded body."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {self.token}", "content-type": kind}
        for attempt in (1, 2):
            try:
                connection = self._connection()
                connection.request(method, path, data, headers)
                response = connection.getresponse()
                text = response.read()
                break
            except (OSError, http.client.HTTPException):
                self.local.connection = None
                if attempt == 2:
                    raise
        try:
            return response.status, json.loads(text)
        except ValueError:
            return response.status, {"message": text.decode(errors="replace")}

    def __call__(self, method, path, body=None, kind="application/json"):
        status, answer = self.raw(method, path, body, kind)
        if status >= 300:
            raise ApiError(method, path, status, answer)
        return answer

    def merge(self, path, body):
        return self("PATCH", path, body, "application/merge-patch+json")

    def apply(self, path, body, manager="e2e"):
        """Server-side apply: creates the object or brings it to what `body` says."""
        return self("PATCH", f"{path}?fieldManager={manager}&force=true", body, "application/apply-patch+yaml")


class Cluster:
    """One control plane in one directory. What it knows is in a file there, so that another process can stop it."""

    def __init__(self, directory=WORK / "k8s"):
        self.dir = Path(directory).resolve()
        self.state = {}
        # Only in order that Python does not take those for forgotten that outlive it.
        self.children = []
        if (self.dir / "state.json").exists():
            self.state = json.loads((self.dir / "state.json").read_text())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.down()

    # Paths and clients.

    @property
    def kubeconfig(self):
        return self.dir / "kubeconfig"

    @property
    def ca(self):
        return self.dir / "pki" / "ca.crt"

    @property
    def port(self):
        return self.state["port"]

    @property
    def url(self):
        return f"https://127.0.0.1:{self.port}"

    @property
    def api(self):
        """Requests as an administrator."""
        if not hasattr(self, "_api"):
            self._api = Api(self.port, self.ca, ADMIN_TOKEN)
        return self._api

    def kubectl(self, *arguments, text=None, check=True):
        """What kubectl printed. With `check=False` the finished process instead."""
        done = subprocess.run(
            [binary("kubectl"), *arguments], input=text, capture_output=True, text=True,
            env=os.environ | {"KUBECONFIG": str(self.kubeconfig)}, check=False,
        )
        if not check:
            return done
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    # Life.

    def up(self, controllers=False, nodes=0):
        """Starts everything anew and returns when the API server is ready, with the namespace `default`."""
        self.down()
        (self.dir / "logs").mkdir(parents=True)
        (self.dir / "accounts").mkdir()
        make_pki(self.dir / "pki")
        port, etcd, peer = free_ports(3)
        self.state = {"port": port, "etcd": etcd, "peer": peer, "controllers": controllers or nodes > 0, "pids": {}}
        self.kubeconfig.write_text(json.dumps(kubeconfig(self.url, self.ca, ADMIN_TOKEN)))
        self._save()
        self._spawn(
            "etcd", f"--data-dir={self.dir}/etcd", "--name=e2e", "--unsafe-no-fsync", "--log-level=warn",
            f"--listen-client-urls=http://127.0.0.1:{etcd}", f"--advertise-client-urls=http://127.0.0.1:{etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}", f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=e2e=http://127.0.0.1:{peer}",
        )
        self.start()
        if self.state["controllers"]:
            self._start_controllers(nodes)
        return self

    def start(self):
        """Starts the API server, where it does not run, over the data that is there; waits until it is ready."""
        if not self._alive("kube-apiserver"):
            pki = self.dir / "pki"
            self._spawn(
                "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{self.state['etcd']}", f"--secure-port={self.port}",
                "--bind-address=127.0.0.1", f"--cert-dir={pki}", f"--tls-cert-file={pki}/server.crt",
                f"--tls-private-key-file={pki}/server.key", f"--client-ca-file={pki}/ca.crt",
                f"--service-account-key-file={pki}/accounts.key", f"--service-account-signing-key-file={pki}/accounts.key",
                "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
                f"--token-auth-file={pki}/tokens.csv", "--authorization-mode=RBAC",
                "--service-cluster-ip-range=10.96.0.0/16", "--endpoint-reconciler-type=none",
                # Pods would wait for a ServiceAccount `default` that only the controllers make.
                *([] if self.state["controllers"] else ["--disable-admission-plugins=ServiceAccount"]),
            )
        until("the API server is ready", self._ready)
        return self

    def kill(self):
        """kill -9 of the API server. Its data stay."""
        self._end("kube-apiserver")

    def restart(self):
        self.kill()
        return self.start()

    def pause(self):
        """Stops the API server where it stands (SIGSTOP): connections stay open, and nothing answers."""
        os.kill(self.state["pids"]["kube-apiserver"][0], signal.SIGSTOP)

    def resume(self):
        os.kill(self.state["pids"]["kube-apiserver"][0], signal.SIGCONT)

    def down(self):
        """Ends all processes and removes all files."""
        for name in list(self.state.get("pids", {})):
            self._end(name)
        if self.dir.exists():
            # Only what this class has made is removed, not a directory that was named by mistake.
            for item in ("etcd", "pki", "logs", "accounts", "pods"):
                shutil.rmtree(self.dir / item, ignore_errors=True)
            for item in ("state.json", "kubeconfig"):
                (self.dir / item).unlink(missing_ok=True)
        self.state = {}
        self.__dict__.pop("_api", None)

    # Accounts.

    def token(self, account, namespace="default", seconds=3600):
        """A token of a ServiceAccount, which is made where there is none."""
        self._exist(f"/api/v1/namespaces/{namespace}/serviceaccounts", {
            "apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account},
        })
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": seconds}}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return self.api("POST", path, asked)["status"]["token"]

    def account(self, account, namespace="default"):
        """The directory with what a pod of this ServiceAccount finds mounted (`token`, `ca.crt`, `namespace`), and a `kubeconfig`."""
        directory = self.dir / "accounts" / namespace / account
        directory.mkdir(parents=True, exist_ok=True)
        token = self.token(account, namespace)
        (directory / "token").write_text(token)
        (directory / "namespace").write_text(namespace)
        shutil.copy(self.ca, directory / "ca.crt")
        (directory / "kubeconfig").write_text(json.dumps(kubeconfig(self.url, self.ca, token, namespace)))
        return directory

    def grant(self, account, rules, namespace="default", name=None):
        """A Role of `rules` (lists of groups, resources and verbs) for a ServiceAccount."""
        name = name or account
        base = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
        version = "rbac.authorization.k8s.io/v1"
        self.api.apply(f"{base}/roles/{name}", {
            "apiVersion": version, "kind": "Role", "metadata": {"name": name},
            "rules": [{"apiGroups": groups, "resources": resources, "verbs": verbs} for groups, resources, verbs in rules],
        })
        self.api.apply(f"{base}/rolebindings/{name}", {
            "apiVersion": version, "kind": "RoleBinding", "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": account, "namespace": namespace}],
        })

    # Objects.

    def namespace(self, name):
        self._exist("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    def pod(self, name, ip=None, labels=None, annotations=None, namespace="default", ready=True, port=8000, grace_s=30,
            node="e2e"):
        """A pod as a kubelet would report it: running at `ip`, Ready or not. `ip=None`: one that has no address yet.

        No node of this name exists, so that nothing else touches the pod; where there are controllers, they remove such pods after
        a while: name a node of kwok."""
        path = f"/api/v1/namespaces/{namespace}/pods"
        self.api("POST", path, {
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": name, "labels": labels or {}, "annotations": annotations or {}},
            "spec": {
                "nodeName": node, "terminationGracePeriodSeconds": grace_s,
                "containers": [{"name": "engine", "image": "engine", "ports": [{"containerPort": port}]}],
            },
        })
        self.report(name, ip, ready, namespace)

    def report(self, name, ip=None, ready=True, namespace="default", container="engine"):
        """Writes a pod's status: its address and whether it is Ready."""
        ready = "True" if ready and ip else "False"
        status = {
            "phase": "Running" if ip else "Pending",
            "conditions": [{"type": kind, "status": ready} for kind in ("Ready", "ContainersReady")],
        }
        if ip:
            status |= {"podIP": ip, "podIPs": [{"ip": ip}], "hostIP": "10.99.0.1"}
            running = {"name": container, "image": container, "imageID": "", "restartCount": 0, "state": {"running": {}}}
            status["containerStatuses"] = [running | {"ready": ready == "True"}]
        self.api.merge(f"/api/v1/namespaces/{namespace}/pods/{name}/status", {"status": status})

    def terminate(self, name, namespace="default"):
        """Sets the pod's deletionTimestamp, as `kubectl delete` does; it stays until `remove`, as until its containers have ended."""
        self.api("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}")

    def remove(self, name, namespace="default"):
        """Deletes the pod at once, as a kubelet does when its containers have ended."""
        self.api("DELETE", f"/api/v1/namespaces/{namespace}/pods/{name}", {"gracePeriodSeconds": 0})

    def install_crds(self):
        """InferencePool and InferenceObjective, in both groups; returns when the API server serves them."""
        self.kubectl("apply", "--server-side", "-f", str(INFRA / "crds"))
        self.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(INFRA / "crds"))

    def inference_pool(self, name, labels, ports, picker="kvlane-epp", picker_port=9002, namespace="default"):
        """An InferencePool v1, made or brought to these; see `install_crds`."""
        self.api.apply(f"/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools/{name}", {
            "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool", "metadata": {"name": name},
            "spec": {
                "selector": {"matchLabels": labels}, "targetPorts": [{"number": port} for port in ports],
                "endpointPickerRef": {"name": picker, "port": {"number": picker_port}},
            },
        })

    def many(self, call, items, threads=8):
        """`call` for every item, several at a time."""
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            return list(pool.map(call, items))

    # Below.

    def _exist(self, path, body):
        status, answer = self.api.raw("POST", path, body)
        if status >= 300 and status != 409:
            raise ApiError("POST", path, status, answer)

    def _ready(self):
        if not self._alive("kube-apiserver"):
            log = (self.dir / "logs" / "kube-apiserver.log").read_text(errors="replace").splitlines()
            raise RuntimeError("the API server has ended:\n" + "\n".join(log[-15:]))
        try:
            ready = self.api.raw("GET", "/readyz")[0] == 200
            return ready and self.api.raw("GET", "/api/v1/namespaces/default")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def _start_controllers(self, nodes):
        pki = self.dir / "pki"
        self._spawn(
            "kube-controller-manager", f"--kubeconfig={self.kubeconfig}", "--secure-port=0", "--leader-elect=false",
            f"--service-account-private-key-file={pki}/accounts.key", f"--root-ca-file={pki}/ca.crt",
        )
        self._spawn("kube-scheduler", f"--kubeconfig={self.kubeconfig}", "--secure-port=0", "--leader-elect=false")
        # Pods are refused until the controllers have made this one.
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        until("there is a ServiceAccount 'default'", lambda: self.api.raw("GET", account)[0] == 200)
        if nodes:
            self._spawn(
                "kwok", f"--kubeconfig={self.kubeconfig}", f"--config={INFRA}/kwok-stages.yaml", "--manage-all-nodes",
                f"--cidr={POD_NETWORK}", "--node-ip=10.99.0.1", f"--server-address=127.0.0.1:{free_ports(1)[0]}",
            )
        for index in range(nodes):
            self._exist("/api/v1/nodes", {
                "apiVersion": "v1", "kind": "Node",
                "metadata": {"name": f"kwok-{index}", "annotations": {"kwok.x-k8s.io/node": "fake"}},
            })

    def _spawn(self, name, *options):
        # Appended to: what the API server said before it was killed is kept.
        with (self.dir / "logs" / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                [binary(name), *options], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self.children.append(child)
        self.state["pids"][name] = [child.pid, started(child.pid)]
        self._save()

    def _alive(self, name):
        pid, start = self.state["pids"].get(name, (0, None))
        return bool(pid) and started(pid) == start

    def _end(self, name):
        """kill -9, since a SIGTERM takes the API server 20 s; returns when the process is gone, and with it its port."""
        if self._alive(name):
            os.kill(self.state["pids"][name][0], signal.SIGKILL)
            until(f"{name} has ended", lambda: not self._alive(name))
        self.state["pids"].pop(name, None)
        self._save()

    def _save(self):
        if self.dir.exists():
            (self.dir / "state.json").write_text(json.dumps(self.state))


def until(what, condition, limit_s=READY_S_MAX):
    """The first true answer of `condition`; fails with `what` when none comes within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {limit_s} s in vain until {what}")
        time.sleep(POLL_S)
    return answer


def binary(name):
    path = INFRA / "bin" / name
    if not path.exists():
        raise SystemExit(f"{path} is missing: run e2e/k8s/setup.sh {name}")
    return str(path)


def started(pid):
    """When the process began, in ticks since the machine's start; None when it has ended. A pid alone may be another's by now."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return None
    # A process that is killed is a zombie as soon as its first thread has ended; the last one closes its sockets.
    if fields[0] == "Z" and threads == 1:
        # A child of ours that has ended stays until it is asked for.
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            pass
        return None
    return int(fields[19])


def free_ports(count):
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def is_free(port):
    try:
        socket.create_server(("127.0.0.1", port)).close()
        return True
    except OSError:
        return False


def make_pod_network_local():
    """Has the loopback interface take all addresses of POD_NETWORK, for engines at the addresses of pods. Wants root, once."""
    if POD_NETWORK not in subprocess.run(["ip", "addr", "show", "dev", "lo"], check=True, capture_output=True, text=True).stdout:
        subprocess.run(["ip", "addr", "add", POD_NETWORK, "dev", "lo"], check=True)


def make_pki(directory):
    """A CA, the API server's certificate, the key that signs ServiceAccounts' tokens, and an administrator's token."""
    directory.mkdir()

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.crt", "-days", "30", "-subj", "/CN=kvlane-e2e")
    openssl("req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=kube-apiserver")
    (directory / "server.ext").write_text(
        "basicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth\n"
        "subjectAltName=IP:127.0.0.1,IP:10.96.0.1,DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,"
        "DNS:kubernetes.default.svc,DNS:kubernetes.default.svc.cluster.local\n"
    )
    openssl("x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "30",
            "-extfile", "server.ext", "-out", "server.crt")
    openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "accounts.key")
    (directory / "tokens.csv").write_text(f'{ADMIN_TOKEN},admin,admin,"system:masters"\n')


def kubeconfig(url, ca, token, namespace="default"):
    """JSON, which is YAML, too."""
    return {
        "apiVersion": "v1", "kind": "Config", "current-context": "e2e",
        "clusters": [{"name": "e2e", "cluster": {
            "server": url, "certificate-authority-data": base64.b64encode(Path(ca).read_bytes()).decode(),
        }}],
        "users": [{"name": "e2e", "user": {"token": token}}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "e2e", "namespace": namespace}}],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["up", "start", "kill", "restart", "pause", "resume", "account", "status", "down"])
    parser.add_argument("name", nargs="?", help="of the ServiceAccount, for 'account'")
    parser.add_argument("--dir", default=str(WORK / "k8s"))
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--controllers", action="store_true", help="kube-controller-manager and kube-scheduler, too")
    parser.add_argument("--nodes", type=int, default=0, help="nodes of kwok; implies --controllers")
    options = parser.parse_args()
    cluster = Cluster(options.dir)
    if options.command == "up":
        cluster.up(options.controllers, options.nodes)
        print(cluster.kubeconfig)
        return
    if not cluster.state:
        sys.exit(f"no cluster in {cluster.dir}: python3 {Path(__file__).name} up --dir {cluster.dir}")
    if options.command == "account":
        print(cluster.account(options.name or parser.error("account wants a name"), options.namespace))
    elif options.command == "status":
        for name in cluster.state["pids"]:
            print(f"{name} {'runs' if cluster._alive(name) else 'has ended'}, pid {cluster.state['pids'][name][0]}")
    else:
        getattr(cluster, options.command)()


if __name__ == "__main__":
    main()
