"""llama.cpp's server as its deaths are recorded: one process, which has no KV feed."""

import re
import subprocess

from engines import MODEL, WORK, Engine, free_port
from servers import Dying

BINARY = WORK / "llamacpp" / "build" / "bin" / "llama-server"
# As many as a scene has requests.
SLOTS = 28


class DyingLlama(Dying, Engine):
    engine = "llamacpp"
    progress = (
        "llamacpp:requests_processing", "llamacpp:requests_deferred", "llamacpp:tokens_predicted_total",
        "llamacpp:prompt_tokens_total", "llamacpp:n_decode_total",
    )

    def __init__(self, number, port=None, context_tokens=SLOTS * 16_384, unified=False):
        self.port = port or free_port()
        super().__init__(
            f"llama-dying-{number}",
            [
                "nice", "-n", "5", str(BINARY), "--model", str(WORK / "llamacpp" / "model.gguf"), "--alias", MODEL,
                "--host", "127.0.0.1", "--port", str(self.port), "--ctx-size", str(context_tokens),
                "--parallel", str(SLOTS), "--threads", "1", "--metrics", "--no-webui", "--jinja",
                # One cache for all slots rather than a part of it for each.
                *(["--kv-unified"] if unified else []),
            ],
        )

    @staticmethod
    def role(title):
        return None

    def asked_version(self):
        said = subprocess.run([BINARY, "--version"], capture_output=True, text=True, check=True)
        return re.search(r"version: (\S+)", said.stdout + said.stderr)[1]
