#!/usr/bin/env python3
"""Instructions of the gateway per request, counted by callgrind: a measure that does not move with the machine's load.

    cargo build --release --locked -p kvlane && python3 e2e/instructions.py
    SIZE=60000 python3 e2e/instructions.py 'before=/tmp/kvlane-before' 'after=target/release/kvlane' 'nixl=target/release/kvlane --kv-connector nixl'
    python3 e2e/instructions.py plain=target/release/kvlane 'alias@gpt=target/release/kvlane --config e2e/models/cost.yaml'

Each argument is a name, the model that is asked for (`m` if it is left out), a binary and options of `kvlane serve`. Streamed chats of SIZE bytes with answers of eight tokens are
sent one after another; what 200 of them take is subtracted from what 1,200 take. Instructions of user space only: neither the
kernel's work nor waiting for memory counts, and a copy of a long body counts more than it costs (valgrind counts `rep movsb` by
the byte). Also printed: how many requests were split. Python's standard library and valgrind; Linux.
"""

import http.client
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

FEW, MANY = 200, 1200
SIZE = int(os.environ.get("SIZE", "6000"))
ROUNDS = int(os.environ.get("ROUNDS", "2"))
READY_S_MAX = 120
EVENT = b'data: {"object":"chat.completion.chunk","model":"m","choices":[{"index":0,"delta":{"content":" a"}}]}\n\n'
WHOLE = {
    "object": "chat.completion",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 100, "completion_tokens": 1},
    "kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]],
                           "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "localhost",
                           "remote_port": 5600, "tp_size": 1},
}
KVLANE = Path(__file__).resolve().parent.parent / "target" / "release" / "kvlane"


class Engine(http.server.BaseHTTPRequestHandler):
    """Lists one model and answers every chat at once."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self):
        models = {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 131072}]}
        self.reply(200 if self.path in ("/health", "/v1/models") else 404, json.dumps(models).encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if b'"stream":true' in body:
            self.reply(200, EVENT * 8 + b"data: [DONE]\n\n", "text/event-stream")
        else:
            self.reply(200, json.dumps(WHOLE).encode())

    def reply(self, status, body, kind="application/json"):
        head = f"HTTP/1.1 {status} .\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.wfile.write(head.encode() + body)

    def log_message(self, *_):
        pass


def started():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def counted(binary, options, model, requests):
    """Instructions of a gateway that serves so many requests, and how many of them it split."""
    engines = [started(), started()]
    urls = [f"http://127.0.0.1:{engine.server_port}" for engine in engines]
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out", binary, "serve",
                   "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", "0", "--set", "health.interval=1h",
                   *options, "--worker-urls", *urls]
        gateway = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        client, split = ready(port), 0
        for number in range(requests):
            content = f"{number:06} " + "some words of a prompt " * (SIZE // 23)
            body = json.dumps({"model": model, "stream": True, "messages": [{"role": "user", "content": content}]},
                              separators=(",", ":"))
            client.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
            answer = client.getresponse()
            if answer.status != 200 or b"[DONE]" not in answer.read():
                sys.exit(f"a request was answered {answer.status}")
            split += answer.getheader("x-router-prefill") is not None
        gateway.send_signal(signal.SIGTERM)
        said = gateway.communicate(timeout=READY_S_MAX)[1].decode()
    for engine in engines:
        engine.shutdown()
    found = re.search(r"Collected : (\d+)", said)
    if not found:
        sys.exit(f"callgrind said nothing of its count:\n{said[-1000:]}")
    return int(found[1]), split


def free_port():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Engine) as server:
        return server.server_port


def ready(port):
    due = time.monotonic() + READY_S_MAX
    while time.monotonic() < due:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_S_MAX)
        try:
            client.request("GET", "/readiness")
            answer = client.getresponse()
            answer.read()
            if answer.status == 200:
                return client
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit(f"the gateway was not ready after {READY_S_MAX} s")


def main():
    for argument in sys.argv[1:] or [f"kvlane={KVLANE}"]:
        name, command = argument.split("=", 1)
        binary, *options = command.split()
        model = name.partition("@")[2] or "m"
        rounds = []
        for _ in range(ROUNDS):
            few, _ = counted(binary, options, model, FEW)
            many, split = counted(binary, options, model, MANY)
            rounds.append(f"{(many - few) / (MANY - FEW):,.0f}")
        print(f"{name:20} {', '.join(rounds)} instructions per request; {split} of {MANY} split", flush=True)


if __name__ == "__main__":
    main()
