"""vLLM's gRPC servers on the CPU, and calls of them."""

import itertools
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engines import MODEL, WORK, Engine, free_port

PACKAGES = WORK / "grpc"
sys.path.insert(0, str(PACKAGES))

import grpc
from smg_grpc_proto import vllm_engine_pb2 as messages
from smg_grpc_proto import vllm_engine_pb2_grpc as services

BLOCK_TOKENS = 32  # the smallest that vLLM's CPU attention takes
CONTEXT_TOKENS = 4096
numbers = itertools.count()


class GrpcServer(Engine):
    """`python -m vllm.entrypoints.launchers.grpc_server`, which publishes its KV events over ZeroMQ."""

    def __init__(self, number, port=None):
        self.number, self.port, self.events_port = number, port or free_port(), free_port()
        publisher = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{self.events_port}"}
        super().__init__(
            f"vllm-grpc-{number}",
            [
                "nice", "-n", "5", str(WORK / "venv" / "bin" / "python"), "-m", "vllm.entrypoints.launchers.grpc_server",
                "--model", str(WORK / "model"), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(self.port),
                "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", str(CONTEXT_TOKENS),
                "--block-size", str(BLOCK_TOKENS), "--enable-prefix-caching", "--kv-cache-memory-bytes", "256M",
                "--kv-events-config", json.dumps(publisher),
            ],
            {
                "PYTHONPATH": os.pathsep.join([str(PACKAGES), os.environ.get("PYTHONPATH", "")]),
                "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
                "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1",
                # Otherwise it computes prompts of every length for minutes before it says that it serves.
                "SMG_VLLM_SERVICER_WARMUP": "off",
            },
        )

    @property
    def url(self):
        return f"grpc://127.0.0.1:{self.port}"

    @property
    def worker(self):
        """Its entry in the gateway's configuration."""
        return {"url": self.url, "kv_events": {"endpoint": f"tcp://127.0.0.1:{self.events_port}"}}

    def is_ready(self):
        self.check_alive()
        try:
            return Client(self.port).stub.HealthCheck(messages.HealthCheckRequest(), timeout=5).healthy
        except grpc.RpcError:
            return False

    def running(self):
        return self.loads().num_running_reqs

    def loads(self):
        (load,) = Client(self.port).stub.GetLoads(messages.GetLoadsRequest()).loads
        return load


class Client:
    """A gRPC client of a server, or of the gateway."""

    def __init__(self, port):
        # A channel of its own: otherwise channels to one address share a connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        self.stub = services.VllmEngineStub(grpc.insecure_channel(f"127.0.0.1:{port}", options=options))

    def generate(self, ids, max_tokens=8, stream=True, **metadata):
        """A call; iterate over its messages."""
        request = messages.GenerateRequest(
            request_id=f"request-{os.getpid()}-{next(numbers)}",
            tokenized=messages.TokenizedInput(input_ids=ids),
            sampling_params=messages.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
            stream=stream,
        )
        fields = [(name.replace("_", "-"), value) for name, value in metadata.items()]
        return self.stub.Generate(request, metadata=fields, timeout=120)


def tokens(answer):
    """The token ids of a whole answer, from its chunks or from its last message."""
    chunks = [token for message in answer if message.HasField("chunk") for token in message.chunk.token_ids]
    return chunks or list(answer[-1].complete.output_ids)
