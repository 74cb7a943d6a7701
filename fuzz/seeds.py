#!/usr/bin/env python3
"""Fills fuzz/corpus: with what fuzzing has found and is kept here, minimised, and with what is in the tree: captures of
real engines, templates, traces, examples of every file.

    fuzz/seeds.py            # fills fuzz/corpus
    fuzz/seeds.py --keep D   # keeps what is in the folders of D, one per target, in fuzz/kept
"""
import gzip, io, json, pathlib, sys, tarfile

here = pathlib.Path(__file__).parent
captures = here.parent / "crates/kvlane-wire/tests/data/kv-events"
crates, corpus, kept = here.parent / "crates", here / "corpus", here / "kept"

# The same files make the same archive.
if sys.argv[1:2] == ["--keep"]:
    kept.mkdir(exist_ok=True)
    for folder in sorted(path for path in pathlib.Path(sys.argv[2]).iterdir() if path.is_dir()):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for number, data in enumerate(sorted(path.read_bytes() for path in folder.iterdir())):
                entry = tarfile.TarInfo(f"kept-{number}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
        (kept / f"{folder.name}.tar.gz").write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    sys.exit()


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
put("body", "transfer", body[:-1] + b',"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,'
    b'"remote_block_ids":[[1]],"remote_engine_id":"e"},"vllm_xargs":{"kv_transfer_params":"x"},"n":2}')
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

# Each body with the template it was tried with; some are tried with all.
names = ["deepseek", "gemma", "harmony", "llama", "mistral", "phi", "python", "qwen"]
tests = crates / "kvlane-tokens/tests"
for number, line in enumerate(map(json.loads, (tests / "data/templates.jsonl").read_text().splitlines())):
    put("prompts", f"{line['template']}-{number}", bytes([names.index(line["template"])]) + line["body"].encode())
for path in sorted((tests / "oracle/templates").glob("*.jinja")):
    put("templates", path.name, path.read_bytes())
put("templates", "loop", b"{% for m in messages %}{{ m.role ~ m['content'][0] | trim }}{% if loop.last %}{{ raise_exception('x') }}"
    b"{% endif %}{% endfor %}{% macro f(a, b=1) %}{{ a | tojson(indent=2) }}{% endmacro %}{{ f(tools) }}"
    b"{{ strftime_now('%d %b %Y') }}{% set ns = namespace(i=0) %}{% generation %}x{% endgeneration %}")
put("texts", "words", "Hello  you're 1234567 x = {\n    'a': [1, 2]\n}\r\n \n\n 你好，世界 🙂 e\u0301".encode())
put("texts", "special", b"<|im_start|>user\nhi<|im_end|><|eot_id|><think></think><|")
vocabulary = {chr(256 + n) if n < 33 else chr(n): n for n in range(127)} | {"he": 127, "ll": 128, "hell": 129}
bpe = {"added_tokens": [], "normalizer": {"type": "NFC"}, "model": {"type": "BPE", "vocab": vocabulary, "merges": [["h", "e"], "l l", ["he", "ll"]]},
       "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}}
put("tokenizer_files", "bpe", b"\x00" + json.dumps(bpe).encode())
settings = {"tokenizer_class": "LlamaTokenizer", "bos_token": {"content": "<s>"}, "eos_token": "</s>", "add_bos_token": True,
            "chat_template": [{"name": "default", "template": "{{ messages }}"}, {"name": "tool_use", "template": "{{ tools }}"}],
            "added_tokens_decoder": {"1": {"content": "<s>", "special": True, "lstrip": False, "rstrip": True}}}
put("tokenizer_files", "settings", b"\x01" + json.dumps(settings).encode())
put("tokenizer_files", "specials", b"\x02" + json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>"}).encode())
put("tokenizer_files", "ranks", b"\x03" + b"IQ== 0\nIg== 1\nIw== 2\nISI= 3\n")

traces = crates / "kvlane-trace/tests/data"
known = sorted(path for path in traces.iterdir() if path.suffix in (".csv", ".jsonl"))
for path in known:
    for form in (0x0F, 0x2F, 0x9F):
        put("traces", f"{path.name}-{form}", bytes([form]) + b"".join(path.read_bytes().splitlines(True)[:4])[:6000])
put("traces", "normal", b'\x0f{"kvlane_trace":1,"block_tokens":512}\n{"t":0.5,"in":1000,"out":5}\n'
    b'{"t":1,"in":1000,"out":5,"s":1,"base":0,"shared":2,"after":0,"think":0.5}\n')
put("traces", "bailian", b'\x0f{"chat_id":55,"parent_chat_id":-1,"timestamp":1.5,"input_length":33,"output_length":9,"type":"text",'
    b'"turn":1,"hash_ids":[1,2,3]}\n{"chat_id":159,"parent_chat_id":55,"timestamp":61.114,"input_length":64,'
    b'"output_length":13,"type":"text","turn":2,"hash_ids":[1,2,4,5]}\n')
put("traces", "burstgpt", b"\x0fTimestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    b"5,a,1.5,ChatGPT,100,60,160,Conversation log\n46,,2,GPT-4,300,230,530,API log\n")
record = (b'{"id":0,"scheduled_s":0.5,"sent_s":0.5,"end_s":2.0,"prompt_tokens":100,"output_tokens":30,"status":200,"session":4}\n'
          b'{"id":1,"scheduled_s":3.0,"sent_s":3.0,"end_s":4.0,"prompt_tokens":200,"output_tokens":3,"status":200,"base":0,'
          b'"shared_tokens":112}\n')
put("traces", "recording", b"\x0f" + record)
put("records", "prompts", b'{"messages":[{"role":"user","content":"hi"}],"session":"a","think_s":1.5}\n{"prompt":[1,2],"output_tokens":3}\n')
put("telemetry", "trace", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
put("telemetry", "stages", b'read;dur=0.041, parse;desc="a, b";dur=0.062, engine;dur=87.310')
put("records", "two", record)

put("files", "config", b"\x00" + (here.parent / "config/example.yaml").read_bytes())
for path in sorted((here.parent / "scenarios").glob("*.yaml")):
    put("files", path.name, b"\x01" + path.read_bytes())
put("files", "matrix", b"\x02" + (crates / "kvlane-lab/examples/placement/matrix.yaml").read_bytes())
put("files", "model", b'\x04{"model_type":"qwen2","hidden_size":3584,"num_hidden_layers":28,"num_attention_heads":28,"num_key_value_heads":4,'
    b'"intermediate_size":18944,"vocab_size":152064,"torch_dtype":"bfloat16","sliding_window":4096}')

for number, head in enumerate([
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close, x-a\r\nx-a: b\r\n\r\nhello",
    b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5;x=y\r\nhello\r\n0\r\na: b\r\n\r\n",
    b"HTTP/1.0 502 Bad Gateway\r\n\r\nuntil it closes",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\ntransfer-encoding: gzip, chunked\r\n\r\n",
]):
    put("upstream", f"answer-{number}", bytes([number & 1, 20]) + head)
put("requests", "hints", b"\x00session\n\x03Bearer sk-1\n\x06interactive\n\x0750\n")
put("requests", "query", b"/decisions?limit=5&model=a%2Fb&url=http%3A%2F%2Fh:1")
put("requests", "address", b"http://[::1]:8000/engines/a/")
u32 = lambda number: number.to_bytes(4, "little")
text = lambda text: u32(len(text)) + text
event = b"\x01\x00" + bytes(8) + u32(1) + bytes(16) + b"\x03\x01" + u32(1) + bytes(8)
put("snapshot", "held", b"\x00" + u32(1) + text(b"http://a") + text(b"m") + text(b"h:1") + bytes(16) + u32(16) + u32(2) + event)

# For each request of the target: a stream that breaks, and one that goes on.
head = b'data: {"id":"1","object":"o","created":1,"model":"m","choices":[{"index":0,'
ids = b'"prompt_token_ids":[1],"token_ids":[2],'
for choice, said in [(0, b'"text":"a "'), (1, ids + b'"text":"a"'), (2, b'"delta":{"role":"assistant","content":"a\\n"}'),
                     (3, b'"delta":{"content":"\xc3\xa9"},"finish_reason":null')]:
    chunk = head + said + b'}],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}\n\n'
    rest = chunk.replace(b'"choices":[{"index":0,', b'"choices":[{"finish_reason":"stop","index":0,')
    put("resume", f"chunks-{choice}", bytes([choice | 0x40]) + chunk + b"data: {\0" + chunk + b"\0" + rest + b"data: [DONE]\n\n")

put("snapshot", "given", b"\x01\x01" + text(b"http://a") + text(b"m") + u32(16) + b"\x01\x02" + u32(0) + b"\x01" + bytes(16) + u32(1) + bytes(8) + b"\x00")
signed = b"eyJhbGciOiJFZERTQSIsImtpZCI6ImUifQ.eyJpc3MiOiJpIiwiYXVkIjoiYSIsInN1YiI6InUiLCJleHAiOjIwMDAwMDAwMDB9." + b"A" * 86
claims = b'{"iss":"i","aud":["a"],"sub":"u","exp":2000000000,"nbf":1.5,"roles":["admin"]}'
put("identity", "token", signed + b"\0" + claims + b'\0{"keys":[{"kty":"RSA","use":"sig","alg":"RS256","n":"AQAB","e":"AQAB"},'
    b'{"kty":"OKP","crv":"Ed25519","x":"11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]}')

for path in sorted(kept.glob("*.tar.gz")):
    with tarfile.open(path) as archive:
        for entry in archive.getmembers():
            put(path.name.removesuffix(".tar.gz"), entry.name, archive.extractfile(entry).read())
