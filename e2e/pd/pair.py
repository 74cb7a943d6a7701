"""vLLM servers on the CPU that hand KV blocks to one another: by NIXL, by Mooncake, or by files in a folder."""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.dont_write_bytecode = True
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "vllm")]

from engines import MODEL, WORK, free_port, start
from fleet import Vllm

PRODUCER, CONSUMER, BOTH = "kv_producer", "kv_consumer", "kv_both"


class Stage(Vllm):
    """A server with a KV connector and KV events. `wait_ready` before use."""

    context_tokens = 8192
    connector: str

    def __init__(self, number, role=BOTH, port=None):
        self.role, self.events_ports = role, (free_port(), free_port())
        super().__init__(number, port)

    def options(self):
        events, replay = self.events_ports
        publisher = {
            "enable_kv_cache_events": True, "publisher": "zmq", "topic": f"kv@127.0.0.1:{self.port}@{MODEL}",
            "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}",
        }
        transfer = {"kv_connector": self.connector, "kv_role": self.role} | self.transfer()
        return ["--kv-events-config", json.dumps(publisher), "--kv-transfer-config", json.dumps(transfer)]

    def transfer(self):
        """What this connector's configuration has beside the rest."""
        return {}

    def restarted(self):
        return type(self)(self.number, self.role, self.port)


class Nixl(Stage):
    """Blocks are read by the decode server from the prefill server's memory."""

    connector = "NixlConnector"
    # Seconds for which a prefill server keeps blocks that are not fetched; a decode server that has the request renews them.
    lease_s = 30
    # What a decode server does with a request whose blocks cannot be fetched: `fail` (vLLM's default) or `recompute`.
    on_failure = "fail"

    def __init__(self, number, role=BOTH, port=None):
        self.side_channel_port = free_port()
        super().__init__(number, role, port)

    def transfer(self):
        return {
            "kv_buffer_device": "cpu", "kv_load_failure_policy": self.on_failure,
            "kv_connector_extra_config": {"kv_lease_duration": self.lease_s},
        }

    def environment(self):
        if not (WORK / "nixl" / "installed").exists():
            raise SystemExit(f"no NIXL in {WORK}: run e2e/pd/setup.sh")
        return {
            "PYTHONPATH": str(WORK / "nixl"), "UCX_TLS": "tcp,self,sysv,posix",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
        }


class Files(Stage):
    """Blocks are written to and read from a folder that both servers see."""

    connector = "ExampleConnector"
    folder = WORK / "pd-files"

    def transfer(self):
        return {"kv_connector_extra_config": {"shared_storage_path": str(self.folder)}}


class Push(Nixl):
    """Blocks are written by the prefill server into the decode server's memory. Its name is known in advance."""

    connector = "NixlPushConnector"

    @property
    def engine_id(self):
        return f"engine-{self.port}"

    def transfer(self):
        return super().transfer() | {"engine_id": self.engine_id}


class Mooncake(Stage):
    """Blocks are written by the prefill server when the decode server asks for them, by a name that the router has made."""

    connector = "MooncakeConnector"

    def __init__(self, number, role=BOTH, port=None):
        self.bootstrap_port = free_port()
        super().__init__(number, role, port)

    def transfer(self):
        return {"kv_connector_extra_config": {"mooncake_protocol": "tcp"}}

    def environment(self):
        return {
            "PYTHONPATH": str(WORK / "mooncake"), "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.bootstrap_port),
            # How long both sides wait for the other; 480 s by default.
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "60",
        }


standing: dict[type, list[Stage]] = {}


def pair_of(kind):
    """A prefill and a decode server of this kind, both ready. Others end: there is no room for two pairs everywhere."""
    for other in [other for other in standing if other is not kind]:
        for server in standing.pop(other):
            server.stop()
    name = kind.__name__.lower()
    servers = standing.setdefault(kind, None) or [kind(f"{name}-prefill"), kind(f"{name}-decode")]
    standing[kind] = [server if server.child.poll() is None else server.restarted() for server in servers]
    start(standing[kind])
    return standing[kind]
