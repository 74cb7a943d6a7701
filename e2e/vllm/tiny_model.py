"""Makes a Llama of four million random weights with a tokenizer of its own.

usage: tiny_model.py DIRECTORY

Its answers are noise. What it does have is everything that a router can get wrong: a chat template, byte-level BPE, a
context of 32,768 tokens, and a prefill that takes long enough for a cached prefix to show (2,048 bytes of KV cache per
token). The tokenizer is trained on Python's standard library, text that the machine has anyway.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096
CONTEXT_TOKENS = 32_768
CORPUS_FILES = 100
BEGIN, START, END, PAD = "<|begin|>", "<|start|>", "<|end|>", "<|pad|>"
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}"
    "<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def tokenizer():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    corpus = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:CORPUS_FILES]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, START, END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((path.read_text(errors="replace") for path in corpus), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token=BEGIN, eos_token=END, pad_token=PAD, model_max_length=CONTEXT_TOKENS
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def model(words):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


if __name__ == "__main__":
    words = tokenizer()
    words.save_pretrained(sys.argv[1])
    model(words).save_pretrained(sys.argv[1])
