"""Makes a Llama of four million random weights with a tokenizer of its own, and a LoRA adapter for it.

usage: tiny_model.py DIRECTORY

Its answers are noise. What it does have is everything that a router can get wrong: a chat template, byte-level BPE, a
context of 32,768 tokens, and a prefill that takes long enough for a cached prefix to show (2,048 bytes of KV cache per
token). The adapter goes to DIRECTORY-lora.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from words import BEGIN, END, PAD, TEMPLATE, tokenizer

CONTEXT_TOKENS = 32_768
HIDDEN, LAYERS, HEADS, KV_HEADS = 256, 4, 4, 2
RANK = 4


def words():
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), bos_token=BEGIN, eos_token=END, pad_token=PAD, model_max_length=CONTEXT_TOKENS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = TEMPLATE
    return wrapped


def model(words):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def adapter(directory, base, rank=RANK):
    """Random, so that keys and values differ from the base model's."""
    directory.mkdir(parents=True, exist_ok=True)
    kv = HIDDEN // HEADS * KV_HEADS
    weights = {}
    for layer in range(LAYERS):
        for name, out in [("q_proj", HIDDEN), ("k_proj", kv), ("v_proj", kv)]:
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = 0.1 * torch.randn(rank, HIDDEN, dtype=torch.bfloat16)
            weights[f"{prefix}.lora_B.weight"] = 0.1 * torch.randn(out, rank, dtype=torch.bfloat16)
    save_file(weights, directory / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base), "r": rank, "lora_alpha": 8,
        "lora_dropout": 0.0, "bias": "none", "target_modules": ["q_proj", "k_proj", "v_proj"], "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    words = words()
    words.save_pretrained(target)
    model(words).save_pretrained(target)
    adapter(target.with_name(f"{target.name}-lora"), target)
