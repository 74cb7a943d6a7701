#!/usr/bin/env python3
"""Have vLLM's own code and transformers render the requests of cases.py with every template here.

usage: render.py TOKENIZER_DIR OUT      with the Python of an environment that has vLLM 0.32

OUT gets a line per template and request: template, name, path, body as text, and the rendered text with the number
of its token ids, or what was raised. Time stands still at 2026-11-20 16:37:30.
"""
import datetime
import json
import pathlib
import sys
from types import SimpleNamespace

import transformers.utils.chat_template_utils as hf_templates
from transformers import AutoTokenizer

from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest
from vllm.renderers import hf
from vllm.renderers.chat_utils import parse_chat_messages
from vllm.renderers.params import merge_kwargs

from cases import CASES

directory, out = sys.argv[1:3]
here = pathlib.Path(__file__).parent


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 11, 20, 16, 37, 30)


hf_templates.datetime = Clock
tokenizer = AutoTokenizer.from_pretrained(directory)
config = SimpleNamespace(
    multimodal_config=None, enable_prompt_embeds=False, max_model_len=1 << 20, hf_config=SimpleNamespace(model_type="llama"),
    revision=None, code_revision=None, tokenizer_revision=None, trust_remote_code=False, model=directory, tokenizer=directory,
    allowed_local_media_path="", allowed_media_domains=None, is_multimodal_model=False,
)


def render(request, messages, tools, template):
    """OnlineRenderer.preprocess_chat, HfRenderer.render_messages."""
    defaults = merge_kwargs({}, {"tools": tools, "tokenize": False})
    params = request.build_chat_params(template, "auto").with_defaults(defaults)
    detected = hf.resolve_chat_template_content_format(
        chat_template=params.chat_template, tools=params.chat_template_kwargs.get("tools"), given_format="auto",
        tokenizer=tokenizer, model_config=config)
    conversation, _, _ = parse_chat_messages(messages, config, content_format=detected)
    text = hf.safe_apply_chat_template(config, tokenizer, conversation, **params.get_apply_chat_template_kwargs())
    special = request.build_tok_params(config).add_special_tokens
    return text, tokenizer.encode(text, add_special_tokens=special)


def chat(request, template):
    tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
    return render(request, request.messages, tools, template)


def disabled_effort(template):
    """AnthropicServingMessages._probe_disabled_thinking_effort."""
    def probe(effort):
        request = ChatCompletionRequest(messages=[{"role": "user", "content": "Hi"}], reasoning_effort=effort)
        try:
            return chat(request, template)
        except Exception:
            return None
    none = probe("none")
    if none is None or any(probe(effort) == none for effort in ["low", "medium", "high", "xhigh", "max"]):
        return "low"
    return "none"


def run(path, body, template):
    if path == "/v1/messages":
        request = AnthropicMessagesRequest.model_validate(body)
        merge = AnthropicServingMessages._detect_merge_inline_system(template)
        return chat(AnthropicServingMessages.to_chat_completion_request(
            request, merge_inline_system=merge, disabled_thinking_effort=disabled_effort(template)), template)
    if path == "/v1/responses":
        request = ResponsesRequest.model_validate(body)
        tools = construct_tool_dicts(request.tools, request.tool_choice)
        messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
        return render(request, messages, tools, template)
    kind = TokenizeChatRequest if path == "/tokenize" else ChatCompletionRequest
    return chat(kind.model_validate(body), template)


rows = []
for template in sorted((here / "templates").glob("*.jinja")):
    source = template.read_text(encoding="utf-8")
    for name, path, body in CASES:
        row = {"template": template.stem, "name": name, "path": path, "body": json.dumps(body, ensure_ascii=False)}
        try:
            row["text"], tokens = run(path, json.loads(row["body"]), source)
            row["tokens"] = len(tokens)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"
        rows.append(json.dumps(row, ensure_ascii=False))
pathlib.Path(out).write_text("\n".join(rows) + "\n", encoding="utf-8")
