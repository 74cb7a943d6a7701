"""Envoy, kvlane's endpoint picker and engines on loopback, each a process. See e2e/engines.py for what they have in common."""

import json
import os
import re
import socket
import sys
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from data_plane import data_plane  # noqa: E402
from engines import KVLANE, WORK, Engine, Process, free_port, metrics, request, until  # noqa: E402, F401

INFRA = Path(os.environ.get("KVLANE_INFRA", Path.home() / ".cache" / "kvlane-infra"))
ENVOY = INFRA / "envoy" / "envoy"
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
READY_S_MAX = 60


class Upstreams(Process):
    """Engines of `upstream.py`, all in one process."""

    def __init__(self, count=3, addresses=None, name="upstream", options=()):
        self.addresses = addresses or [("127.0.0.1", free_port()) for _ in range(count)]
        super().__init__(name, [sys.executable, str(HERE / "upstream.py"), *options, *(f"{h}:{p}" for h, p in self.addresses)])
        # They begin in this order. To ask all of many again and again would keep them from it.
        until("the engines listen", lambda: listens(self.addresses[-1]))

    @property
    def urls(self):
        return [f"http://{host}:{port}" for host, port in self.addresses]

    @property
    def names(self):
        return {f"{host}:{port}" for host, port in self.addresses}


class Mock(Engine):
    """`kvlane mock-engine`."""

    def __init__(self, *options):
        self.port = free_port()
        super().__init__(f"mock-{self.port}", [KVLANE, "mock-engine", "--port", str(self.port), *options])


class Picker(Process):
    """`kvlane epp` in front of engines at `urls`."""

    def __init__(self, urls, *options, name="picker", tls=True):
        self.port, self.health_port, self.admin_port = free_port(), free_port(), free_port()
        ports = ["--grpc-port", self.port, "--grpc-health-port", self.health_port, "--prometheus-port", self.admin_port]
        secure = [] if tls else ["--secure-serving", "false"]
        command = [KVLANE, "epp", *map(str, ports), *secure, *options]
        super().__init__(name, [*command, *(["--worker-urls", *urls] if urls else [])])

    def readiness(self):
        self.check_alive()
        try:
            return request(self.admin_port, "/readiness", timeout_s=5)
        except OSError:
            return None

    def wait_ready(self, engines=0):
        """Until it answers, and has `engines` of them in rotation."""
        def ready():
            answer = self.readiness()
            if not answer or (engines and answer.status != 200):
                return False
            return not engines or metrics(self.admin_port).get("kvlane_worker_healthy", engines) >= engines

        until(f"{self.name} is ready", ready, READY_S_MAX)
        return self


class Envoy(Process):
    """Envoy itself, one worker thread, with a configuration of data_plane.py."""

    def __init__(self, way, engines, pickers=(), tls=True, wait=True):
        if not ENVOY.exists():
            raise SystemExit(f"{ENVOY} is missing: run e2e/envoy/setup.sh")
        self.port, self.admin_port = free_port(), free_port()
        hosts = [("127.0.0.1", picker.port) for picker in pickers]
        WORK.mkdir(parents=True, exist_ok=True)
        config = WORK / f"envoy-{way}.json"
        config.write_text(json.dumps(data_plane(way, self.port, self.admin_port, engines, hosts, tls=tls), indent=2))
        super().__init__(f"envoy-{way}", [
            str(ENVOY), "-c", str(config), "--concurrency", "1", "--disable-hot-restart", "-l", "warn",
        ])
        until("Envoy is ready", lambda: self.admin("/ready").startswith("LIVE"), READY_S_MAX)
        if wait:
            for picker in pickers:
                picker.check_alive()
            until("Envoy finds all pickers healthy", lambda: self.healthy_pickers() == len(hosts), READY_S_MAX)

    def admin(self, path):
        self.check_alive()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}{path}", timeout=5) as answer:
                return answer.read().decode()
        except OSError:
            return ""

    def healthy_pickers(self):
        return len(re.findall(r"^pickers::.*::health_flags::healthy$", self.admin("/clusters"), re.M))


def listens(address):
    try:
        socket.create_connection(address, timeout=5).close()
        return True
    except OSError:
        return False


def cpu_s(process):
    """CPU time of a process and of its threads so far."""
    fields = Path(f"/proc/{process.child.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def rss_mib(process):
    status = Path(f"/proc/{process.child.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024


def chat(text, **fields):
    """The body of a chat."""
    return json.dumps({"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 8} | fields).encode()
