"""A gateway on loopback in front of mock engines, to be attacked. Only Python's own library is used."""

import contextlib
import json
import os
import re
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

KVLANE = os.environ.get("KVLANE", str(Path(__file__).resolve().parents[2] / "target" / "release" / "kvlane"))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def chat(text, model="mock", **fields):
    """The body of a chat."""
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": model, "messages": messages, "max_tokens": 1} | fields).encode()


def get(port, path):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return answer.read().decode()


class Rss:
    """Resident memory of a process, in MiB."""

    def __init__(self, pid):
        self.pid = pid
        self.before = self.most = self.now()

    def now(self):
        with open(f"/proc/{self.pid}/status", encoding="ascii") as status:
            return int(re.search(r"VmRSS:\s+(\d+) kB", status.read())[1]) / 1024

    def look(self):
        self.most = max(self.most, self.now())


class Arena:
    """Starts a gateway and its engines, and ends them."""

    def __init__(self, settings=(), engines=1, config=None, engine_urls=(), feeds=()):
        self.settings, self.engines, self.config = settings, engines, config or {}
        # KV event feeds of the engines, one each.
        self.feeds = feeds
        self.urls, self.processes, self.files = list(engine_urls), [], contextlib.ExitStack()

    def start(self, *arguments):
        process = subprocess.Popen([KVLANE, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.processes.append(process)
        return process

    def __enter__(self):
        for _ in range(self.engines):
            port = free_port()
            self.start("mock-engine", "--port", str(port), "--speed", "100")
            self.urls.append(f"http://127.0.0.1:{port}")
        self.port, self.metrics_port = free_port(), free_port()
        config = {
            "server": {"port": self.port},
            "metrics": {"port": self.metrics_port},
            "workers": [{"url": url} for url in self.urls],
        }
        for worker, feed in zip(config["workers"], self.feeds):
            worker["kv_events"] = {"endpoint": feed}
        for section, fields in self.config.items():
            config[section] = config.get(section, {}) | fields if isinstance(fields, dict) else fields
        file = self.files.enter_context(tempfile.NamedTemporaryFile("w", suffix=".yaml"))
        json.dump(config, file)
        file.flush()
        settings = [word for setting in self.settings for word in ("--set", setting)]
        self.gateway = self.start("serve", "--config", file.name, *settings)
        until = time.monotonic() + 60
        while not self.is_ready():
            assert self.gateway.poll() is None, "the gateway has ended"
            assert time.monotonic() < until, "the gateway is not ready"
            time.sleep(0.05)
        return self

    def is_ready(self):
        try:
            return bool(get(self.metrics_port, "/readiness"))
        except OSError:
            return False

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
        self.files.close()

    @contextlib.contextmanager
    def watch(self):
        """Looks at the gateway's memory every 20 ms."""
        rss, over = Rss(self.gateway.pid), threading.Event()

        def look():
            while not over.wait(0.02):
                rss.look()

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        try:
            yield rss
        finally:
            over.set()
            looking.join()

    def metric(self, name, labels=""):
        """A sample, or 0."""
        text = get(self.metrics_port, "/metrics")
        found = re.search(rf"^{name}(?:{{[^}}]*{labels}[^}}]*}})? (\S+)$", text, re.M)
        return float(found[1]) if found else 0.0
