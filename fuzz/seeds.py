#!/usr/bin/env python3
"""Fills fuzz/corpus with what real engines sent, cut from the captures in the tree."""
import gzip, json, pathlib

here = pathlib.Path(__file__).parent
captures = here.parent / "crates/kvlane-wire/tests/data/kv-events"
corpus = here / "corpus"


def put(target, name, data):
    folder = corpus / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


for path in sorted(captures.rglob("*.jsonl*")):
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for number, line in enumerate(map(json.loads, text.splitlines())):
        if line["kind"] == "frame":
            payload = bytes.fromhex(line["frames_hex"][-1])
            if len(payload) < 4096:
                put("kv_events", f"{path.name}-{number}", payload)
        if line.get("kv_event_sources"):
            put("answers", path.name, json.dumps(line["kv_event_sources"]).encode())

body = b'{"model":"m","messages":[{"role":"user","content":"hi"}],"stream":true,"max_tokens":5}'
put("body", "chat", body)
event = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
usage = b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}\n\ndata: [DONE]\n\n'
put("sse", "stream", b"\x20" + event + usage)
put("metrics", "vllm", b'vllm:num_requests_running{engine="0"} 3\nvllm:prefix_cache_hits_total{engine="0"} 4\n'
    b'vllm:prefix_cache_queries_total{engine="0"} 9\nvllm:cache_config_info{block_size="32",engine="0"} 1\n')
put("answers", "models", b'{"data":[{"id":"m","root":"/m","max_model_len":16384}]}')
put("answers", "sglang", b'{"kv_events":{"publisher":"zmq","endpoint_host":"*","endpoint_port_base":5557,"dp_size":2,"block_size":16}}')
greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + b"\x00" + bytes(31)
ready = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
put("zmtp", "pub", b"\x40" + greeting + ready + b"\x01\x02kv\x01\x08" + bytes(8) + b"\x00\x01\x90")
put("sequence", "gap", bytes([1, 0, 0, 0, 6, 0, 0, 2, 0, 1, 2, 2, 1, 4, 0, 1, 4, 1, 1, 6, 0, 0]))

# For each request of the target: a stream that breaks, and one that goes on.
head = b'data: {"id":"1","object":"o","created":1,"model":"m","choices":[{"index":0,'
ids = b'"prompt_token_ids":[1],"token_ids":[2],'
for choice, said in [(0, b'"text":"a "'), (1, ids + b'"text":"a"'), (2, b'"delta":{"role":"assistant","content":"a\\n"}'),
                     (3, b'"delta":{"content":"\xc3\xa9"},"finish_reason":null')]:
    chunk = head + said + b'}],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}\n\n'
    rest = chunk.replace(b'"choices":[{"index":0,', b'"choices":[{"finish_reason":"stop","index":0,')
    put("resume", f"chunks-{choice}", bytes([choice | 0x40]) + chunk + b"data: {\0" + chunk + b"\0" + rest + b"data: [DONE]\n\n")
