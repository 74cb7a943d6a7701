"""The rows of docs/apis.md: each path that an engine has, with a body for it.

An engine must answer a request through the gateway with the status that it gives without: a legal request does not fail
because of the gateway, and what the engine refuses, it refuses in its own words.
"""

import re
from pathlib import Path

from engines import request

APIS = Path(__file__).resolve().parents[1] / "docs" / "apis.md"
MESSAGES = [{"role": "user", "content": "the river and the road"}]
CHAT = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
PROMPT = {"prompt": "the river and the road", "max_tokens": 4, "temperature": 0}
INPUT = {"input": "the river and the road"}
RANK = {"query": "the river", "documents": ["the road", "the river bank"]}
BODIES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": PROMPT,
    "/v1/messages": CHAT,
    "/v1/responses": INPUT | {"max_output_tokens": 16},
    "/generate": {"text": "the river", "sampling_params": {"max_new_tokens": 4}},
    "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}},
    "/completion": {"prompt": "the river", "n_predict": 4},
    "/infill": {"input_prefix": "the", "input_suffix": "road", "n_predict": 4},
    "/invocations": CHAT,
    "/embedding": INPUT | {"content": "the river"},
    "/encode": {"text": "the river"},
    "/classify": INPUT | {"text": "the river"},
    "/v1/classify": INPUT | {"text": "the river"},
    "/score": {"text_1": "the river", "text_2": "the road"},
    "/v1/score": {"text_1": "the river", "text_2": "the road", "query": "the river", "items": ["the road"]},
    "/v1/chat/completions/batch": CHAT | {"messages": [MESSAGES]},
    "/v2/embed": {"texts": ["the river"], "input_type": "search_query", "embedding_types": ["float"]},
    "/generative_scoring": RANK | {"items": ["a"], "label_token_ids": [5, 6]},
    "/v2/rerank": RANK, "/rerank": RANK, "/v1/rerank": RANK, "/reranking": RANK, "/v1/reranking": RANK,
    "/tokenize": {"prompt": "the river", "content": "the river"},
    "/v1/tokenize": {"prompt": "the river"},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/detokenize": {"tokens": [5, 6, 7]},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/chat/completions/input_tokens": {"messages": MESSAGES},
    "/v1/responses/input_tokens": INPUT,
    "/v1/completions/render": PROMPT,
    "/v1/responses/render": INPUT,
    "/apply-template": {"messages": MESSAGES},
}


def rows(engine):
    """The (path, methods, whether its body is a form) that clients may call on this engine. Sockets are left out, and methods of
    gRPC, which e2e/grpc calls."""
    text = APIS.read_text().split("<!-- clients -->")[1].split("<!-- end of clients -->")[0]
    for line in re.findall(r"^\| `(.*)$", text, re.MULTILINE):
        path, methods, model, _, answer, _, engines = [cell.strip(" `|") for cell in line.split("|")[:7]]
        # Of a method that fewer engines have, these follow in brackets.
        methods = re.findall(r"(\w+)(?: \((.*?)\))?(?:, |$)", methods)
        methods = [method for method, fewer in methods if not fewer or engine in fewer.split(", ")]
        is_grpc = path.startswith("/vllm.grpc.")
        if engine in engines.split(", ") and answer != "WebSocket" and not is_grpc:
            yield path.replace("{}", "none_1"), methods, model == "form"


def status(port, model, path, method, is_form):
    """What a server answers; a streamed answer is read to its end."""
    if method in ("GET", "DELETE"):
        return request(port, path, method=method, headers={"x-kvlane-model": model}, timeout_s=300).status
    if is_form:
        part = '--b\r\ncontent-disposition: form-data; name="{}"{}\r\n\r\n{}\r\n'
        form = part.format("model", "", model) + part.format("file", '; filename="a.wav"', "RIFF") + "--b--\r\n"
        kind = {"content-type": "multipart/form-data; boundary=b"}
        return request(port, path, form.encode(), headers=kind, timeout_s=300).status
    body = BODIES.get(path) or BODIES.get(path.removesuffix("/render")) or INPUT
    return request(port, path, {"model": model} | body, method=method, timeout_s=300).status


def check(test, engine, port, gateway, model):
    """Each row by its name, without the gateway and through it; returns how many rows, and how many the engine took."""
    count = taken = 0
    for path, methods, is_form in rows(engine):
        for method in methods:
            with test.subTest(path=path, method=method):
                direct = status(port, model, path, method, is_form)
                through = status(gateway.port, model, path, method, is_form)
                count, taken = count + 1, taken + (direct < 300)
                # Of several engines each could have the object: that none has it is said before one is asked to change it.
                unknown = "none_1" in path and direct in (404, 405)
                test.assertIn(through, (direct, 404) if unknown else (direct,))
    return count, taken
