"""Streams whose vLLM server is killed go on at another one, and read like streams that were not broken.

    e2e/vllm/setup.sh && e2e/.work/venv/bin/python e2e/vllm/test_continuation.py -v

One of two servers is killed (-9) in the middle of streams of every kind. With greedy decoding, the text, the ids, the end
and the usage that a client gets must be those of a stream that did not break.
"""

import json
import sys
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engines import MODEL, WORK, Gateway, begin, start, until
from fleet import Vllm
from tokenizers import Tokenizer

# So many that none is at its end when each has come to its first events and the server is killed.
TOKENS = 800
EVENTS = 20
PLAIN = """{{- bos_token }}
{%- for message in messages %}{{- '<|start|>' + message.role + '\\n' + message.content + '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}"""


class Precise(Vllm):
    """Decoding what was prefilled and what was decoded must not differ by rounding."""

    def options(self):
        # The model's own template trims messages, and its words begin with blanks.
        template = WORK / "plain.jinja"
        template.write_text(PLAIN)
        return ["--dtype", "float32", "--chat-template", str(template)]


def words():
    """Tokens of one word each, blank before it: text of these is cut into the tokens that it was made of."""
    tokenizer = Tokenizer.from_file(str(WORK / "model" / "tokenizer.json"))
    chosen = []
    for number in sorted(tokenizer.get_vocab().values()):
        text = tokenizer.decode([number])
        if text[:1] == " " and text[1:].isascii() and text[1:].isalpha():
            if tokenizer.encode(text, add_special_tokens=False).ids == [number]:
                chosen.append(number)
    return chosen


def requests():
    """Name, path and body of one stream of each kind."""
    common = {
        "model": MODEL, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": TOKENS, "temperature": 0,
        "ignore_eos": True, "repetition_penalty": 100.0,
    }
    completion = {"prompt": "Beware of"}
    chat = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Beware of what?"}]}
    said = {"role": "assistant", "content": "Of the"}
    prefilled = {"messages": [*chat["messages"], said], "continue_final_message": True, "add_generation_prompt": False}
    as_text, as_ids = {"allowed_token_ids": words()}, {"return_token_ids": True}
    for name, path, body in [
        ("completion", "/v1/completions", completion),
        ("chat", "/v1/chat/completions", chat),
        ("prefilled chat", "/v1/chat/completions", prefilled),
    ]:
        yield f"{name} by text", path, common | body | as_text
        yield f"{name} by ids", path, common | body | as_ids


class Heard:
    """What a client makes of a stream, event by event."""

    def __init__(self):
        self.text, self.ids, self.prompt, self.roles, self.heads = "", [], [], 0, set()
        self.finish, self.usage, self.error, self.done, self.events = [], None, None, 0, 0

    def take(self, data):
        self.events += 1
        if data == "[DONE]":
            self.done += 1
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = chunk["error"]
            return
        self.heads.add((chunk["id"], chunk["created"], chunk["model"], chunk["object"]))
        self.prompt += chunk.get("prompt_token_ids") or []
        for choice in chunk["choices"]:
            delta = choice.get("delta", {})
            self.text += choice.get("text", delta.get("content")) or ""
            self.roles += "role" in delta
            self.ids += choice.get("token_ids") or []
            self.prompt += choice.get("prompt_token_ids") or []
            self.finish += [choice["finish_reason"]] if choice["finish_reason"] else []
        if usage := chunk.get("usage"):
            self.usage = {what: usage[what] for what in ("prompt_tokens", "completion_tokens", "total_tokens")}

    def outcome(self):
        return {
            "text": self.text, "ids": self.ids, "prompt": self.prompt, "roles": self.roles, "heads": len(self.heads),
            "finish": self.finish, "usage": self.usage, "error": self.error, "done": self.done,
        }


class Stream:
    """One that has begun."""

    def __init__(self, port, path, body):
        self.connection, self.response = begin(port, path, body)
        assert self.response.status == 200, self.response.read()
        self.backend, self.heard = self.response.getheader("x-router-backend"), Heard()

    def read(self, events=None):
        """So many events, or all that are left."""
        while events is None or self.heard.events < events:
            line = self.response.readline()
            if not line:
                break
            if line.startswith(b"data: "):
                self.heard.take(line[6:].decode().rstrip("\n"))
        return self

    def close(self):
        self.connection.close()


class Continuation(unittest.TestCase):
    maxDiff = None

    def test_streams_of_a_killed_server_read_as_if_nothing_had_happened(self):
        servers = [Precise(number) for number in range(2)]
        start(servers)
        for server in servers:
            self.addCleanup(server.stop)
        gateway = Gateway(servers, "round_robin", "--set", "continuation.enabled=true")
        self.addCleanup(gateway.stop)
        doomed = servers[0]

        whole, streams = {}, {}
        for name, path, body in requests():
            stream = Stream(servers[1].port, path, body).read()
            stream.close()
            whole[name] = stream.heard.outcome()
            self.assertGreater(len(set(stream.heard.text.split())), TOKENS // 10, f"{name}: a text that tells nothing")
        for name, path, body in requests():
            while name not in streams:
                stream = Stream(gateway.port, path, body)
                if stream.backend == doomed.url:
                    streams[name] = stream
                else:
                    stream.close()
        for stream in streams.values():
            stream.read(EVENTS)
        doomed.kill()
        for name, stream in streams.items():
            with self.subTest(name):
                self.assertEqual(stream.read().heard.outcome(), whole[name])
            stream.close()
        outcomes = gateway.samples("kvlane_continuations_total")
        self.assertEqual(outcomes, {frozenset([("outcome", "resumed")]): float(len(streams))})
        until("the gateway's ledger is empty", lambda: gateway.in_flight() == (0, 0, 0))


if __name__ == "__main__":
    unittest.main()
