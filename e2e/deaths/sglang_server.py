"""SGLang as its deaths are recorded: with room for the requests of a scene, and its KV feed."""

import json

from engines import MODEL, WORK, Engine, free_port, request
from servers import Dying

PAGE_TOKENS = 16


class DyingSglang(Dying, Engine):
    engine = "sglang"
    # Ordered: the first says how much runs.
    progress = (
        "sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:generation_tokens_total", "sglang:prompt_tokens_total",
        "sglang:num_retracted_reqs",
    )

    def __init__(self, number, port=None, tokens=65_536):
        self.port, self.events_port = port or free_port(), free_port()
        publisher = {
            "publisher": "zmq", "topic": "kv", "endpoint": f"tcp://*:{self.events_port}",
            "replay_endpoint": f"tcp://*:{free_port()}",
        }
        super().__init__(
            f"sglang-dying-{number}",
            [
                "nice", "-n", "5", str(WORK / "sglang" / "bin" / "python"), "-m", "sglang.launch_server",
                "--model-path", str(WORK / "model"), "--served-model-name", MODEL,
                "--host", "127.0.0.1", "--port", str(self.port),
                "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
                "--page-size", str(PAGE_TOKENS), "--max-total-tokens", str(tokens),
                "--context-length", str(min(tokens, 16_384)),
                "--sleep-on-idle", "--enable-cache-report", "--enable-metrics", "--kv-events-config", json.dumps(publisher),
            ],
            {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )

    @staticmethod
    def role(title):
        return "engine core" if "sglang::scheduler" in title else "detokenizer" if "sglang::detokenizer" in title else None

    def asked_version(self):
        return request(self.port, "/server_info").json()["version"]
