"""The tokenizer of the tiny models: byte-level BPE with the split of Llama 3, and a chat template.

It is trained on Python's standard library, text that every machine has, so there is nothing to download. Wants the
package `tokenizers` only.
"""

import sysconfig
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 4096
CORPUS_FILES = 100
BEGIN, START, END, PAD = "<|begin|>", "<|start|>", "<|end|>", "<|pad|>"
SPECIAL = [BEGIN, START, END, PAD, "<think>", "</think>", "<tool_call>", "</tool_call>"]
# Beside code: what code has none of.
PHRASES = ["Grüße aus Köln, naïve façade", "你好，世界", "Привет, мир", "こんにちは", "🙂🚀"]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Does what templates of published models do: a macro, a namespace, tools as JSON, calls with arguments that are text or
# objects, parts, a date, a refusal, variables that only some requests give.
TEMPLATE = """
{%- macro said(content) -%}
    {%- if content is string -%}{{ content | trim }}
    {%- elif content is iterable -%}
        {%- for part in content -%}
            {%- if part.type == 'text' -%}{{ part.text }}
            {%- else -%}{{ raise_exception('This model reads text only, not ' ~ part.type) }}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro %}
{{- bos_token }}
{%- set first = namespace(system='') %}
{%- if messages and messages[0].role == 'system' %}
    {%- set first.system = said(messages[0].content) %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- if first.system or tools %}
    {{- '<|start|>system\\n' + first.system }}
    {%- if tools %}
        {{- '\\n\\nToday is ' + strftime_now('%d %B %Y') + '. You may call:' }}
        {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {%- endif %}
    {{- '<|end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|start|>assistant\\n' + (said(message.content) if message.content else '') }}
        {%- for call in message.tool_calls %}
            {%- set function = call.function if call.function is defined else call %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else (function.arguments | tojson) }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|end|>\\n' }}
    {%- elif message.role in ['system', 'user', 'assistant', 'tool'] %}
        {{- '<|start|>' + message.role + '\\n' + said(message.content) + '<|end|>\\n' }}
    {%- else %}
        {{- raise_exception('Nobody is called ' ~ message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""".lstrip()


def tokenizer():
    """Trains it: a few seconds."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus(), trainer)
    begin = (BEGIN, bpe.token_to_id(BEGIN))
    bpe.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[begin])
    return bpe


def corpus():
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:CORPUS_FILES]:
        yield path.read_text(errors="replace")
    for phrase in PHRASES:
        yield " ".join([phrase] * 20)
