"""vLLM servers on the CPU, as the tests of this folder start them."""

import json
import os
from pathlib import Path

from engines import MODEL, WORK, Engine, free_port, metrics, request, until

CPU_GROUPS = Path("/sys/fs/cgroup/cpu")
# Short, so that a server which has had its part of a core waits only a moment for more.
QUOTA_PERIOD_US = 10_000

BLOCK_TOKENS = 32  # the smallest that vLLM's CPU attention takes


class Vllm(Engine):
    """One vLLM server. `wait_ready` before use."""

    context_tokens = 16_384
    weights = "model"
    cache_bytes = "256M"

    def __init__(self, number, port=None):
        self.number, self.port = number, port or free_port()
        super().__init__(
            f"vllm-{number}",
            [
                "nice", "-n", "5", str(WORK / "venv" / "bin" / "vllm"), "serve", str(WORK / self.weights),
                "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.port),
                "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", str(self.context_tokens),
                "--block-size", str(BLOCK_TOKENS), "--enable-prefix-caching", "--kv-cache-memory-bytes", self.cache_bytes,
                "--enable-prompt-tokens-details", *self.options(),
            ],
            {
                "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
                # For /reset_prefix_cache.
                "VLLM_SERVER_DEV_MODE": "1",
                # Left to itself every server would bind itself to the same core.
                "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                # What `tcp://*:0` is bound to.
                "VLLM_HOST_IP": "127.0.0.1",
            } | self.environment(),
        )

    def options(self):
        """What this server is started with beside the rest."""
        return []

    def environment(self):
        """The same for its environment."""
        return {}

    def running(self):
        return metrics(self.port)["vllm:num_requests_running"]

    def forget_prefixes(self):
        """Refused by vLLM as long as a request runs."""
        until("the prefix cache is empty", lambda: request(self.port, "/reset_prefix_cache", b"").json()["success"])

    def restarted(self):
        """Another server at the same address; this one must be dead."""
        return type(self)(self.number, self.port)


class WithEvents(Vllm):
    """One that publishes its KV events."""

    def __init__(self, number, port=None, events_ports=None):
        self.events_ports = events_ports or (free_port(), free_port())
        super().__init__(number, port)

    def options(self):
        events, replay = self.events_ports
        publisher = {
            "enable_kv_cache_events": True, "publisher": "zmq", "topic": f"kv@127.0.0.1:{self.port}@{MODEL}",
            "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}",
        }
        return ["--kv-events-config", json.dumps(publisher)]

    def restarted(self):
        return type(self)(self.number, self.port, self.events_ports)


class Publishing(WithEvents):
    """One that publishes its KV events, has an adapter, and so small a cache that it forgets within a conversation."""

    ADAPTER = "tiny-lora"
    CACHE_BLOCKS = 200
    context_tokens = 4096

    def options(self):
        return [
            *super().options(), "--num-gpu-blocks-override", str(self.CACHE_BLOCKS),
            "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
            "--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{self.ADAPTER}={WORK / 'model-lora'}",
        ]


class Parallel(Publishing):
    """Two engines behind one port, each with its own cache and feed."""

    def options(self):
        return [*super().options(), "--data-parallel-size", "2", "--api-server-count", "1"]


def limited(servers, parts):
    """Gives each server its part of a core, so that what one computes does not slow the others. Needs cgroups (version 1)
    and root."""
    for server, part in zip(servers, parts):
        group = CPU_GROUPS / f"kvlane-{server.name}"
        try:
            group.mkdir(exist_ok=True)
            (group / "cpu.cfs_period_us").write_text(str(QUOTA_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(int(part * QUOTA_PERIOD_US)))
        except OSError as error:
            raise AssertionError(f"no part of a core for {server.name}: {error}") from error
        for process in filter(str.isdigit, os.listdir("/proc")):
            # Servers lead a session each.
            try:
                if os.getsid(int(process)) == server.child.pid:
                    (group / "cgroup.procs").write_text(process)
            except ProcessLookupError:
                pass
    print(f"parts of a core: {', '.join(map(str, parts))}", flush=True)
