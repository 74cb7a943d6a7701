"""Two isolated tenants, one of which attacks with paths, bodies, fields and forged tokens.

    e2e/attack/tenants.py [--requests 1000000] [--seed 1]

An engine of this program's own looks at what reaches it: never a path that is on no list, never a body without the salt of
the tenant that sent it, never another tenant's salt. Prints how many requests were sent, answered and seen; ends with 1 when
one was wrong. The seed that is printed makes the same requests again.
"""

import argparse
import asyncio
import hashlib
import json
import random
import sys
from collections import Counter
from urllib.parse import unquote

from arena import Arena
from stub import Stub

SALTED = ["/v1/chat/completions", "/v1/completions", "/v1/responses"]
OTHERS = [
    "/v1/embeddings", "/v1/messages", "/generate", "/tokenize", "/v1/rerank", "/v1/score", "/v1/audio/speech", "/v1/files",
    "/v1/files/a/content", "/v1/load_lora_adapter", "/reset_prefix_cache", "/v1/moderations", "/pooling", "/metrics", "/workers",
]
TENANTS = {"ann": "key-of-ann", "bob": "key-of-bob"}
AT_ONCE = 64


def mangled(rng, path):
    """A path that some server may take for `path`, or for nothing."""
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        at = rng.randrange(1, len(path) + 1)
        how = rng.randrange(10)
        if how == 0 and at < len(path):
            path = path[:at] + f"%{ord(path[at]):02x}" + path[at + 1:]
        elif how == 1:
            path = path[:at] + rng.choice([";x", ";a=b", "%00", "%2f", "%5c", "\\", "\t", "%09"]) + path[at:]
        elif how == 2:
            path = path.replace("/", rng.choice(["//", "/./", "/x/../", "/%2e%2e/", "\\"]), 1)
        elif how == 3:
            path += rng.choice(["/", "?", "?x=/v1/completions", "#x", "/..", "/.", "%20", "/%2e%2e/completions"])
        elif how == 4:
            path = path.swapcase() if rng.random() < 0.5 else path.title()
        elif how == 5:
            path = "http://x" + path
        elif how == 6:
            path = path[:at] + chr(rng.randrange(0x21, 0x7F)) + path[at:]
    return path


def body(rng, number):
    """A body with arbitrary salts."""
    prompt = f"{number} {rng.random()}"
    said = {"model": "mock", "prompt": prompt, "input": prompt, "messages": [{"role": "user", "content": prompt}]}
    guesses = [hashlib.sha256(b"bob").hexdigest(), "bob", "", None, 7, {"a": 1}, TENANTS["bob"]]
    text = json.dumps(said)
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        key = rng.choice(["cache_salt", "cache\\u005fsalt", "Cache_Salt", "extra_body", "lora_path", "extra_key"])
        pair = f'"{key}": {json.dumps(rng.choice(guesses))}'
        text = f"{{{pair}, {text[1:]}" if rng.random() < 0.5 else f"{text[:-1]}, {pair}}}"
    how = rng.randrange(20)
    if how == 0:
        text = f"[{text}]"
    elif how == 1:
        text = f"\ufeff{text}"
    elif how == 2:
        text += text
    elif how == 3:
        text = text.replace("messages", "m\\u0065ssages")
    elif how == 4:
        text = f" \r\n\t{text}\n"
    return text.encode()


class Judge:
    """Requests that reach the engine, compared with their senders: each request has its sender's name in a field."""

    def __init__(self):
        self.salts, self.wrong, self.seen = {}, [], Counter()

    def look(self, method, target, fields, text):
        if "x-sender" not in fields:
            return  # The gateway's own question.
        self.seen[method] += 1
        path = unquote(target.partition("?")[0])
        if target.partition("?")[0] != path or path not in [*SALTED, *OTHERS]:
            self.wrong.append(f"{method} {target!r} reached the engine")
        if any(word in path for word in ("load_lora", "reset_prefix", "workers")):
            self.wrong.append(f"{target!r}: administration")
        who = fields["x-sender"]
        try:
            pairs = json.loads(text, object_pairs_hook=list) if text else []
        except ValueError:
            pairs = None
        if path not in SALTED:
            return
        salts = [value for key, value in pairs or [] if key == "cache_salt"]
        if len(salts) != 1:
            self.wrong.append(f"{who}: {target!r} with {len(salts)} salts: {text[:200]!r}")
        elif not isinstance(salts[0], str) or (who == "bob" and self.salts.setdefault("bob", salts[0]) != salts[0]):
            self.wrong.append(f"{who}: {target!r} with the salt {salts[0]!r}")
        elif who != "bob" and salts[0] == self.salts.get("bob"):
            self.wrong.append(f"{who} got bob's salt: {text[:200]!r}")


async def sender(arena, rng, numbers, statuses):
    reader = writer = None
    for number in numbers:
        # Bob is the victim and sends ordinary requests.
        who = "bob" if number % 50 == 0 else "ann"
        if who == "bob":
            path, text, method = "/v1/completions", json.dumps({"model": "mock", "prompt": str(number)}).encode(), "POST"
        else:
            path, text = mangled(rng, rng.choice(SALTED * 4 + OTHERS)), body(rng, number)
            method = rng.choice(["POST"] * 12 + ["GET", "PUT", "post"])
        key = TENANTS[who] if rng.random() < 0.98 or who == "bob" else rng.choice(["", "key-of-", "eyJhbGciOiJub25lIn0.e30."])
        more = rng.choice(["", "", "", "x-llm-d-inference-fairness-id: bob\r\n", "x-session-id: bob\r\n", "x-tenant: bob\r\n"])
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nx-sender: {who}\r\n{more}"
        try:
            if writer is None:
                reader, writer = await asyncio.open_connection("127.0.0.1", arena.port)
            writer.write(head.encode("latin-1") + b"content-length: %d\r\n\r\n" % len(text) + text)
            said = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)
            statuses[said[9:12].decode()] += 1
            length = next((int(line[16:]) for line in said.lower().split(b"\r\n") if line.startswith(b"content-length: ")), 0)
            await reader.readexactly(length)
            if b"connection: close" in said.lower():
                writer.close()
                writer = None
        except (OSError, asyncio.IncompleteReadError):
            statuses["closed"] += 1
            writer = None


async def attack(arena, arguments, judge):
    rng, statuses = random.Random(arguments.seed), Counter()
    each = arguments.requests // AT_ONCE
    await asyncio.gather(*(
        sender(arena, random.Random(rng.random()), range(n * each, (n + 1) * each), statuses) for n in range(AT_ONCE)
    ))
    return statuses


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    arguments = parser.parse_args()
    judge = Judge()
    keys = [{"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()} for name, key in TENANTS.items()]
    config = {"auth": {"isolate_tenants": True, "keys": keys}}
    stub = Stub(judge.look)
    with Arena(engines=0, engine_urls=[stub.url], config=config) as arena:
        statuses = asyncio.run(attack(arena, arguments, judge))
    sent, seen = sum(statuses.values()), sum(judge.seen.values())
    print(f"seed {arguments.seed}: {sent} sent, {dict(statuses.most_common())}, {seen} reached the engine, {len(judge.wrong)} wrong")
    for wrong in judge.wrong[:20]:
        print(wrong)
    return 1 if judge.wrong or not judge.seen["POST"] or not statuses["400"] else 0


if __name__ == "__main__":
    sys.exit(main())
