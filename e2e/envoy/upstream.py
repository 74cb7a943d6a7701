#!/usr/bin/env python3
"""Engines whose answers say what has reached them: `upstream.py [--sick] HOST:PORT...` serves each address until it is killed.

A POST is answered with the address it came to, its headers, and the length and the SHA-256 of its body; with `"stream": true` by
as many server-sent events as its `max_tokens`, `gap_ms` apart. GET /health, /v1/models and /metrics answer as an idle vLLM does.
With `--sick` before the addresses everything is answered with 503, and each POST is a line of the output.
Python's own library only.
"""

import asyncio
import functools
import hashlib
import json
import sys
import time

MODEL = "tiny"
HEAD_BYTES_MAX = 64 << 10
# A vLLM's page has some 30 kB, nearly all of it buckets: whoever reads it often pays for them.
HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_inference_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
    "request_generation_tokens", "iteration_tokens_total", "request_params_n", "request_params_max_tokens",
)
LABELS = f'engine="0",model_name="{MODEL}"'
IDLE = "".join(
    [f"# TYPE vllm:{name} gauge\nvllm:{name}{{{LABELS}}} 0.0\n"
     for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
    + [f'vllm:cache_config_info{{block_size="16",num_gpu_blocks="10000",{LABELS}}} 1.0\n']
    + [f'vllm:{name}_bucket{{{LABELS},le="{bound}.0"}} 0.0\n' for name in HISTOGRAMS for bound in range(28)]
).encode()
MODELS = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 131072}]}).encode()


async def read_body(reader, headers):
    if "chunked" in headers.get("transfer-encoding", ""):
        body = bytearray()
        while size := int((await reader.readline()).split(b";")[0], 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readline()
        return bytes(body)
    return await reader.readexactly(int(headers.get("content-length", 0)))


def answer(kind, body):
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (kind, len(body), body)


def completion(address, headers, body):
    """What a client finds in `choices` is an answer; what a test wants to know is in `seen`: `at` in seconds of the machine's clock."""
    seen = {"engine": address, "headers": headers, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    seen["at"] = time.monotonic()
    return json.dumps({
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1700000000, "model": MODEL, "seen": seen,
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": len(body) // 4, "completion_tokens": 1, "total_tokens": len(body) // 4 + 1},
    }).encode()


async def stream(writer, address, wanted):
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-engine: %s\r\ntransfer-encoding: chunked\r\n\r\n"
        % address.encode()
    )
    for index in range(wanted.get("max_tokens", 16)):
        delta = {"choices": [{"index": 0, "delta": {"content": f"t{index} "}}], "object": "chat.completion.chunk"}
        await event(writer, json.dumps(delta).encode())
        await asyncio.sleep(wanted.get("gap_ms", 0) / 1e3)
    await event(writer, b"[DONE]")
    writer.write(b"0\r\n\r\n")


async def event(writer, data):
    writer.write(b"%x\r\ndata: %s\n\n\r\n" % (len(data) + 8, data))
    await writer.drain()


async def serve(reader, writer, sick=False):
    address = "{}:{}".format(*writer.get_extra_info("sockname")[:2])
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            method, path, _ = head[0].split(" ", 2)
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:-2])}
            body = await read_body(reader, headers)
            if sick:
                if method == "POST":
                    print(method, path, flush=True)
                writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")
            elif method == "POST":
                wanted = json.loads(body) if body.startswith(b"{") else {}
                if wanted.get("stream"):
                    await stream(writer, address, wanted)
                else:
                    writer.write(answer(b"application/json", completion(address, headers, body)))
            elif path == "/metrics":
                writer.write(answer(b"text/plain", IDLE))
            elif path == "/v1/models":
                writer.write(answer(b"application/json", MODELS))
            elif path == "/health":
                writer.write(answer(b"text/plain", b""))
            else:
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            await writer.drain()
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def main():
    sick = sys.argv[1] == "--sick"
    for address in sys.argv[1 + sick:]:
        host, port = address.rsplit(":", 1)
        await asyncio.start_server(functools.partial(serve, sick=sick), host, int(port), limit=HEAD_BYTES_MAX)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
