#!/usr/bin/env python3
"""Cut the requests with known token ids out of captures of a real vLLM.

usage: fixtures.py CAPTURES OUT

CAPTURES holds chat-golden.jsonl and captures of KV events with the requests that caused them; OUT gets
chat-golden.jsonl and served.jsonl: path, body as text (its key order counts), token ids, rendered text.
"""
import json
import pathlib
import sys

captures, out = map(pathlib.Path, sys.argv[1:3])


def write(name, rows):
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (out / name).write_text(text, encoding="utf-8")


rows = []
for line in (captures / "chat-golden.jsonl").open(encoding="utf-8"):
    line = json.loads(line)
    rows.append({
        "name": "golden",
        "path": "/tokenize",
        "body": json.dumps(line["request"], ensure_ascii=False),
        "tokens": line["tokens"],
        "text": line.get("rendered_as_vllm"),
        "error": line["error"] and line["error"]["message"],
    })
write("chat-golden.jsonl", rows)

rows, seen = [], set()
for capture in ["default-sha256-int", "lora-chat"]:
    requests = {}
    for line in (captures / f"{capture}.jsonl").open(encoding="utf-8"):
        line = json.loads(line)
        if line["kind"] == "request":
            requests[line["name"]] = line
        elif line["kind"] == "response" and line.get("prompt_token_ids"):
            request = requests[line["name"]]
            body = json.dumps(request["body"], ensure_ascii=False)
            if ("chat" in request["path"] or line["name"] == "shorter than one block") and body not in seen:
                seen.add(body)
                rows.append({
                    "name": f"{capture}: {line['name']}",
                    "path": request["path"],
                    "body": body,
                    "tokens": line["prompt_token_ids"],
                })
write("served.jsonl", rows)
