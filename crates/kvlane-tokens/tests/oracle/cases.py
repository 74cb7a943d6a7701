"""Requests that the templates are tried with: name, path, body."""

WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Get \"weather\" <b>&</b> for é",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "description": "Where"},
        "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
        "days": {"type": "integer", "default": 3, "minimum": 1.0, "maximum": 1e16},
        "list": {"type": "array", "items": {"type": "object", "properties": {"items": {"type": ["string", "null"]}}}},
        "any": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "number"}}]},
    }, "required": ["city"]}, "strict": None}, "extra": 1}
BARE = {"type": "function", "function": {"name": "now"}}
STRICT = {"type": "function", "function": {
    "strict": True, "parameters": {"type": "object", "properties": {}}, "name": "strict_one", "description": None}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def call(name, arguments, id="call_123456789"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


TOOL_TURN = [
    system("Be brief."), user("Weather?"),
    assistant(None, tool_calls=[call("get_weather", '{"city": "Köln", "days": 2.0, "x": [1, null, true]}')]),
    {"role": "tool", "tool_call_id": "call_123456789", "content": "{\"t\": 21}"},
    assistant("It is 21."), user("Thanks <think>"),
]
CHAT = "/v1/chat/completions"

CASES = [
    ("one", CHAT, {"messages": [user("hi")]}),
    ("system, trimmed or not", CHAT, {"messages": [system("  S \n"), user(" a\n"), assistant(" b "), user("c")]}),
    ("unicode", CHAT, {"messages": [user("Grüße 你好 🙂\u001c\u00a0\n\ttab \"q\" 'a' \\ {{ x }} {% if %}")]}),
    ("parts", CHAT, {"messages": [system([{"type": "text", "text": "s1"}, {"type": "text", "text": "s2"}]),
                                  user([{"type": "text", "text": "one "}, {"type": "text", "text": " two"}, {"type": "input_text", "text": "3"}])]}),
    ("tools", CHAT, {"messages": [system("S"), user("u")], "tools": [WEATHER, BARE, STRICT]}),
    ("tools not to be used", CHAT, {"messages": [user("u")], "tools": [BARE], "tool_choice": "none"}),
    ("tool turn", CHAT, {"messages": TOOL_TURN, "tools": [WEATHER]}),
    ("tool answers in parts", CHAT, {"messages": TOOL_TURN[:3] + [
        {"role": "tool", "tool_call_id": "call_123456789", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}),
    ("two calls", CHAT, {"messages": [user("u"), assistant("", tool_calls=[
        call("f", "{}", "call_000000001"), call("g", "[1]", "call_000000002"), call("h", "", "call_000000003"), call("i", "no json", "call_4")]),
        {"role": "tool", "tool_call_id": "call_000000001", "content": "1"}, {"role": "tool", "tool_call_id": "call_000000002", "content": "2"}]}),
    ("empty calls", CHAT, {"messages": [user("u"), assistant("a", tool_calls=[]), user("v")]}),
    ("thoughts", CHAT, {"messages": [user("u"), assistant("a", reasoning_content="because"), user("v"),
                                     assistant("<think>\nlong\n</think>\n\nb"), user("w"), assistant("c", reasoning="so")]}),
    ("thoughts and a call", CHAT, {"messages": [user("u"), assistant("", reasoning="why", tool_calls=[call("now", "{}")]),
                                                {"role": "tool", "tool_call_id": "call_123456789", "content": "12:00"}]}),
    ("developer", CHAT, {"messages": [system("S"), user("u"), {"role": "developer", "content": "D"}, user("v")]}),
    ("developer first", CHAT, {"messages": [{"role": "developer", "content": "D"}, user("v")]}),
    ("names and further keys", CHAT, {"messages": [{"role": "user", "name": "Ann", "content": "u", "color": "red"}]}),
    ("another role", CHAT, {"messages": [user("u"), {"role": "critic", "content": "c"}]}),
    ("no content", CHAT, {"messages": [user("u"), {"role": "assistant"}, user("v")]}),
    ("no generation prompt", CHAT, {"messages": [user("u"), assistant("a")], "add_generation_prompt": False}),
    ("continued", CHAT, {"messages": [user("u"), assistant("The answer is ")], "add_generation_prompt": False, "continue_final_message": True}),
    ("continued, with a prompt", CHAT, {"messages": [user("u"), assistant("The")], "continue_final_message": True}),
    ("thinking off", CHAT, {"messages": [user("u")], "chat_template_kwargs": {"enable_thinking": False, "date_string": "today", "other": None}}),
    ("effort", CHAT, {"messages": [user("u")], "reasoning_effort": "high"}),
    ("no effort", CHAT, {"messages": [user("u")], "reasoning_effort": "none"}),
    ("variables override", CHAT, {"messages": [user("u")], "chat_template_kwargs": {
        "bos_token": "<B>", "add_generation_prompt": False, "tools_first": True, "builtins": ["shell", "search"], "model_identity": "M", "documents": [{"title": "k", "text": "k"}]}}),
    ("tools among variables", CHAT, {"messages": [user("u")], "tools": [BARE], "chat_template_kwargs": {"tools": [{"function": {"name": "k"}}]}}),
    ("documents", CHAT, {"messages": [user("u")], "documents": [{"title": "A", "text": "alpha"}, {"title": "B", "text": "beta"}]}),
    ("special tokens added", CHAT, {"messages": [user("u")], "add_special_tokens": True}),
    ("billing line", CHAT, {"messages": [system("x-anthropic-billing-header: cch=1;\nrest"), user("u")]}),
    ("roles out of turn", CHAT, {"messages": [user("u"), user("v")]}),
    ("tokenize", "/tokenize", {"messages": [system("S"), user("u")], "tools": [BARE]}),
    ("anthropic, plain", "/v1/messages", {"model": "m", "max_tokens": 9, "system": "S", "messages": [user("u"), assistant("a"), user("v")]}),
    ("anthropic, blocks", "/v1/messages", {"model": "m", "max_tokens": 9,
        "system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "S1"}, {"type": "text", "text": "S2"}],
        "messages": [user([{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}])]}),
    ("anthropic, tools", "/v1/messages", {"model": "m", "max_tokens": 9,
        "tools": [{"name": "get_weather", "description": "W", "input_schema": {"properties": {"city": {"type": "string"}}}},
                  {"name": "now", "input_schema": {"type": "object"}}],
        "messages": [user("u"),
            assistant([{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "Let me see."},
                       {"type": "tool_use", "id": "toolu_123456789", "name": "get_weather", "input": {"city": "Köln", "n": 1.5}}]),
            user([{"type": "tool_result", "tool_use_id": "toolu_123456789", "content": [{"type": "text", "text": "21"}, {"type": "text", "text": "dry"}]}]),
            assistant([{"type": "text", "text": "21."}]),
            user([{"type": "text", "text": "ok"}])]}),
    ("anthropic, result and text", "/v1/messages", {"model": "m", "max_tokens": 9, "messages": [user("u"),
            assistant([{"type": "tool_use", "id": "toolu_123456789", "name": "now", "input": {}}]),
            user([{"type": "tool_result", "tool_use_id": "toolu_123456789", "content": "12"}, {"type": "text", "text": "and?"}])]}),
    ("anthropic, later system", "/v1/messages", {"model": "m", "max_tokens": 9, "system": "S", "messages": [
            user("u"), assistant("a"), {"role": "system", "content": "reminder"}, user("v")]}),
    ("anthropic, thinking off", "/v1/messages", {"model": "m", "max_tokens": 9, "thinking": {"type": "disabled"}, "messages": [user("u")]}),
    ("anthropic, effort", "/v1/messages", {"model": "m", "max_tokens": 9, "output_config": {"effort": "low"}, "messages": [user("u")]}),
    ("responses, text", "/v1/responses", {"input": "hi"}),
    ("responses, instructions", "/v1/responses", {"input": "hi", "instructions": "S", "reasoning": {"effort": "low"}}),
    ("responses, items", "/v1/responses", {"instructions": "S", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "because"}]},
            {"type": "function_call", "id": "f", "call_id": "call_123456789", "name": "now", "arguments": "{\"x\": 1}"},
            {"type": "function_call_output", "call_id": "call_123456789", "output": "12"},
            {"type": "message", "id": "m", "status": "completed", "role": "assistant", "content": [{"type": "output_text", "text": "noon", "annotations": []}]},
            {"type": "message", "role": "user", "content": "b"}],
        "tools": [{"type": "function", "name": "now", "description": "N", "parameters": {"type": "object", "properties": {}}, "strict": True}]}),
    ("responses, unfinished", "/v1/responses", {"input": [user("u"),
            {"type": "message", "id": "m", "status": "incomplete", "role": "assistant", "content": [{"type": "output_text", "text": "The ans", "annotations": []}]}]}),
]
