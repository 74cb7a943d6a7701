"""An engine that does what the last message of a request says, in the exact shapes of OpenAI's and Anthropic's APIs.

    call the tool      answers with a call of the first tool; after a tool's result, says what that was
    status 429         refuses, in the envelope of the API
    wait               answers nothing until the client has gone
    drip               a stream that goes on until the client has gone
    break              two pieces of a stream, then the connection is reset
    anything else      is answered with itself, in upper case

What it was sent, and how many clients left before their end, is in `bodies`, `headers` and `gone`.
"""

import json
import re
import select
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MODEL = "scripted"
ARGUMENTS = ['{"city": ', '"Köln"}']
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 529: "overloaded_error",
}


class ScriptedEngine:
    """One, on a free port of loopback."""

    def __init__(self):
        self.bodies, self.headers, self.gone, self.changed = [], [], 0, threading.Condition()
        engine = self

        class Handler(Connection):
            script = engine

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.port}"

    def note(self, body, headers):
        with self.changed:
            self.bodies.append(body)
            self.headers.append(headers)
            self.changed.notify_all()

    def note_gone(self):
        with self.changed:
            self.gone += 1
            self.changed.notify_all()

    def wait_gone(self, count, limit_s=30):
        with self.changed:
            assert self.changed.wait_for(lambda: self.gone >= count, limit_s), f"{self.gone} of {count} have gone"

    def wait_asked(self, count, limit_s=30):
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.bodies) >= count, limit_s), len(self.bodies)

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


class Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: ScriptedEngine

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/health":
            return self.whole(200, {})
        if self.path == "/v1/models":
            card = {"id": MODEL, "object": "model", "created": 1, "owned_by": "e2e"}
            return self.whole(200, {"object": "list", "data": [card]})
        return self.whole(404, {"error": {"message": "not here", "type": "NotFoundError", "code": 404}})

    def do_POST(self):
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        body = json.loads(raw)
        self.script.note(body, dict(self.headers))
        said = last_text(body)
        api = {
            "/v1/chat/completions": Chat, "/v1/messages": Messages, "/v1/responses": Responses,
        }.get(self.path)
        if self.path == "/v1/messages/count_tokens":
            return self.whole(200, {"input_tokens": 42})
        if api is None:
            return self.whole(404, {"error": {"message": self.path, "type": "NotFoundError", "code": 404}})
        if status := re.fullmatch(r"status (\d+)", said):
            return self.refuse(api, int(status[1]))
        if said == "wait":
            return self.until_gone()
        if not body.get("stream"):
            return self.whole(200, api.whole(body, said))
        self.begin_stream()
        try:
            if said == "drip":
                while not self.is_gone(0.01):
                    self.piece(api.drop())
                return self.left()
            for number, event in enumerate(api.events(body, said)):
                self.piece(event)
                if said == "break" and number == 2:
                    return self.reset()
            self.piece("")
        except OSError:
            self.left()

    def whole(self, status, body, **fields):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        for name, value in fields.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, api, status):
        self.whole(status, api.refusal(status, f"scripted {status}"))

    def begin_stream(self):
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def piece(self, text):
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def is_gone(self, wait_s):
        readable, _, _ = select.select([self.connection], [], [], wait_s)
        return bool(readable) and self.connection.recv(1, socket.MSG_PEEK) == b""

    def until_gone(self):
        while not self.is_gone(0.05):
            pass
        self.left()

    def left(self):
        self.script.note_gone()
        self.close_connection = True

    def reset(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


def last_text(body):
    """The text of the last message, whatever the API."""
    given = body.get("messages", body.get("input", ""))
    if isinstance(given, str):
        return given
    last = given[-1]
    if last.get("type") == "function_call_output":
        return f"result {last['output']}"
    content = last.get("content") or ""
    if isinstance(content, str):
        return f"result {content}" if last.get("role") == "tool" else content
    part = content[-1]
    if part.get("type") == "tool_result":
        result = part["content"]
        return f"result {result if isinstance(result, str) else result[0]['text']}"
    return part.get("text", "")


def data(value):
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


def named(value):
    return f"event: {value['type']}\n{data(value)}"


def halves(text):
    middle = len(text) // 2
    return [text[:middle], text[middle:]]


class Chat:
    """/v1/chat/completions"""

    @staticmethod
    def call(body):
        name = body["tools"][0]["function"]["name"]
        return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": "".join(ARGUMENTS)}}

    @classmethod
    def whole(cls, body, said):
        calls = said == "call the tool"
        message = {"role": "assistant", "content": None if calls else said.upper()}
        if calls:
            message["tool_calls"] = [cls.call(body)]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls" if calls else "stop"}
        return {
            "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice],
            "usage": USAGE,
        }

    @staticmethod
    def chunk(delta, reason=None):
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return data({
            "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice],
        })

    @classmethod
    def drop(cls):
        return cls.chunk({"content": "drop "})

    @classmethod
    def events(cls, body, said):
        yield cls.chunk({"role": "assistant", "content": ""})
        if said == "call the tool":
            call = cls.call(body)
            call["function"]["arguments"] = ""
            yield cls.chunk({"tool_calls": [{"index": 0, **call}]})
            for part in ARGUMENTS:
                yield cls.chunk({"tool_calls": [{"index": 0, "function": {"arguments": part}}]})
            yield cls.chunk({}, "tool_calls")
        else:
            for part in halves(said.upper()):
                yield cls.chunk({"content": part})
            yield cls.chunk({}, "stop")
        if (body.get("stream_options") or {}).get("include_usage"):
            yield data({
                "id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [],
                "usage": USAGE,
            })
        yield "data: [DONE]\n\n"

    @staticmethod
    def refusal(status, message):
        return {"error": {"message": message, "type": "scripted", "param": None, "code": status}}


class Messages:
    """/v1/messages"""

    USAGE = {"input_tokens": 7, "output_tokens": 3}

    @classmethod
    def message(cls, content, reason):
        return {
            "id": "msg_1", "type": "message", "role": "assistant", "model": MODEL, "content": content,
            "stop_reason": reason, "stop_sequence": None, "usage": cls.USAGE,
        }

    @classmethod
    def whole(cls, body, said):
        if said == "call the tool":
            call = {"type": "tool_use", "id": "toolu_1", "name": body["tools"][0]["name"]}
            return cls.message([call | {"input": json.loads("".join(ARGUMENTS))}], "tool_use")
        return cls.message([{"type": "text", "text": said.upper()}], "end_turn")

    @staticmethod
    def drop():
        delta = {"type": "text_delta", "text": "drop "}
        return named({"type": "content_block_delta", "index": 0, "delta": delta})

    @classmethod
    def events(cls, body, said):
        yield named({"type": "message_start", "message": cls.message([], None)})
        calls = said == "call the tool"
        block = {"type": "text", "text": ""}
        if calls:
            block = {"type": "tool_use", "id": "toolu_1", "name": body["tools"][0]["name"], "input": {}}
        yield named({"type": "content_block_start", "index": 0, "content_block": block})
        for part in ARGUMENTS if calls else halves(said.upper()):
            delta = {"type": "input_json_delta", "partial_json": part} if calls else {"type": "text_delta", "text": part}
            yield named({"type": "content_block_delta", "index": 0, "delta": delta})
        yield named({"type": "content_block_stop", "index": 0})
        reason = "tool_use" if calls else "end_turn"
        yield named({
            "type": "message_delta", "delta": {"stop_reason": reason, "stop_sequence": None}, "usage": cls.USAGE,
        })
        yield named({"type": "message_stop"})

    @staticmethod
    def refusal(status, message):
        return {"type": "error", "error": {"type": KINDS.get(status, "api_error"), "message": message}}


class Responses:
    """/v1/responses"""

    @classmethod
    def response(cls, output, status="completed"):
        usage = {
            "input_tokens": 7, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 10,
        }
        return {
            "id": "resp_1", "object": "response", "created_at": 1, "model": MODEL, "status": status, "output": output,
            "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None,
            "usage": usage if status == "completed" else None,
        }

    @classmethod
    def item(cls, body, said):
        if said == "call the tool":
            return {
                "type": "function_call", "id": "fc_1", "call_id": "call_1", "status": "completed",
                "name": body["tools"][0]["name"], "arguments": "".join(ARGUMENTS),
            }
        part = {"type": "output_text", "text": said.upper(), "annotations": [], "logprobs": []}
        return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part]}

    @classmethod
    def whole(cls, body, said):
        return cls.response([cls.item(body, said)])

    @staticmethod
    def drop():
        return named({
            "type": "response.output_text.delta", "sequence_number": 9, "item_id": "msg_1", "output_index": 0,
            "content_index": 0, "delta": "drop ", "logprobs": [],
        })

    @classmethod
    def events(cls, body, said):
        item, number = cls.item(body, said), iter(range(100))
        calls = item["type"] == "function_call"
        place = {"item_id": item["id"], "output_index": 0}

        def event(kind, **fields):
            return named({"type": kind, "sequence_number": next(number), **fields})

        yield event("response.created", response=cls.response([], "in_progress"))
        empty = item | ({"arguments": ""} if calls else {"content": []}) | {"status": "in_progress"}
        yield event("response.output_item.added", output_index=0, item=empty)
        if calls:
            for part in ARGUMENTS:
                yield event("response.function_call_arguments.delta", **place, delta=part)
            yield event("response.function_call_arguments.done", **place, arguments=item["arguments"], name=item["name"])
        else:
            part = item["content"][0]
            place["content_index"] = 0
            yield event("response.content_part.added", **place, part=part | {"text": ""})
            for text in halves(part["text"]):
                yield event("response.output_text.delta", **place, delta=text, logprobs=[])
            yield event("response.output_text.done", **place, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **place, part=part)
        yield event("response.output_item.done", output_index=0, item=item)
        yield event("response.completed", response=cls.response([item]))

    refusal = Chat.refusal
