"""The engines whose deaths are recorded, and the processes that each is made of."""

import json
import resource
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.dont_write_bytecode = True
for folder in (HERE, HERE.parent, HERE.parent / "vllm", HERE.parent / "sglang", HERE.parent / "llamacpp"):
    sys.path.insert(0, str(folder))

from engines import WORK, free_port, request
from fleet import Vllm

ADAPTER = "tiny-lora"


def children(pid):
    """All descendants of a process, nearest first."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [int(child), *children(int(child))]
    return found


def title(pid):
    """The command line of a process, which Python servers set to their role."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except OSError:
        return False


def limit_memory(pid, spare_bytes=0):
    """Lets no further memory be mapped by a process: its next large allocation fails."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + spare_bytes
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


class Dying:
    """What the recorder needs of an engine beside its port."""

    engine: str
    # Samples that show whether the engine makes progress.
    progress: tuple[str, ...]
    apis = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")

    def wait_ready(self):
        super().wait_ready()
        self.version = self.asked_version()

    def directory(self):
        """The folder of its captures: patch releases die alike."""
        return f"{self.engine}-{self.version_of_captures()}"

    def version_of_captures(self):
        return ".".join(self.version.split(".")[:2])

    def api_server(self):
        return self.child.pid

    def processes(self):
        """Role and pid of each process."""
        return {"api server": self.child.pid} | {
            role: pid for pid in children(self.child.pid) for role in [self.role(title(pid))] if role
        }

    def core(self):
        """The process that schedules and keeps the KV cache; `None` where the API server does that itself."""
        return self.processes().get("engine core")

    def worker(self):
        """The process that runs the model."""
        return self.processes().get("worker") or self.core() or self.api_server()


class DyingVllm(Dying, Vllm):
    engine = "vllm"
    progress = (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total",
        "vllm:iteration_tokens_total_count", "vllm:prompt_tokens_total", "vllm:num_preemptions_total",
    )

    def __init__(self, number, port=None, blocks=None, context_tokens=None):
        self.rank, self.blocks, self.context_tokens = number, blocks, context_tokens or Vllm.context_tokens
        self.events_port = free_port()
        super().__init__(f"dying-{number}", port)

    def restarted(self):
        """Another server at the same address; this one must be dead."""
        return type(self)(self.rank, self.port, self.blocks, self.context_tokens)

    def options(self):
        publisher = {
            "enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv", "endpoint": f"tcp://*:{self.events_port}",
        }
        blocks = ["--num-gpu-blocks-override", str(self.blocks)] if self.blocks else []
        return [
            "--kv-events-config", json.dumps(publisher), *blocks,
            "--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={WORK / 'model-lora'}",
        ]

    @staticmethod
    def role(title):
        roles = {"VLLM::EngineCore": "engine core", "VLLM::Worker": "worker"}
        return next((role for name, role in roles.items() if title.startswith(name)), None)

    def asked_version(self):
        return request(self.port, "/version").json()["version"]


def made(engine, number, **options):
    """A server of `engine`. Imports only what that engine's environment has."""
    if engine == "vllm":
        return DyingVllm(number, **options)
    if engine == "sglang":
        from sglang_server import DyingSglang

        return DyingSglang(number, **options)
    from llama_server import DyingLlama

    return DyingLlama(number, **options)
