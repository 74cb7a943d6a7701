"""Makes a Llama of four million random weights, with the tokenizer of the other tiny models, as llama.cpp reads it.

usage: tiny_gguf.py FILE

Wants numpy, tokenizers and llama.cpp's own `gguf` in the path.
"""

import json
import sys

import gguf
import numpy
from words import BEGIN, END, PAD, SPECIAL, TEMPLATE, tokenizer

CONTEXT_TOKENS = 32_768
HIDDEN, FEED_FORWARD, LAYERS, HEADS, KV_HEADS = 256, 768, 4, 4, 2


def write(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    words(writer)
    weights(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def words(writer):
    bpe = json.loads(tokenizer().to_str())["model"]
    ids = bpe["vocab"]
    control = set(SPECIAL)
    ordered = sorted(ids, key=ids.get)
    kinds = [gguf.TokenType.CONTROL if word in control else gguf.TokenType.NORMAL for word in ordered]
    writer.add_vocab_size(len(ordered))
    writer.add_tokenizer_model("gpt2")
    # Llama 3's way to split, by llama.cpp's name for it.
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(ordered)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in bpe["merges"]])
    writer.add_bos_token_id(ids[BEGIN])
    writer.add_eos_token_id(ids[END])
    writer.add_pad_token_id(ids[PAD])
    writer.add_chat_template(TEMPLATE)


def weights(writer):
    random = numpy.random.default_rng(0)

    def matrix(name, rows, columns):
        writer.add_tensor(f"{name}.weight", random.normal(0, 0.02, (rows, columns)).astype(numpy.float16))

    def norm(name):
        writer.add_tensor(f"{name}.weight", numpy.ones(HIDDEN, dtype=numpy.float32))

    kv = HIDDEN // HEADS * KV_HEADS
    # The output's weights are the embedding's, transposed.
    matrix("token_embd", len(tokenizer().get_vocab()), HIDDEN)
    norm("output_norm")
    for layer in range(LAYERS):
        prefix = f"blk.{layer}"
        norm(f"{prefix}.attn_norm")
        norm(f"{prefix}.ffn_norm")
        matrix(f"{prefix}.attn_q", HIDDEN, HIDDEN)
        matrix(f"{prefix}.attn_k", kv, HIDDEN)
        matrix(f"{prefix}.attn_v", kv, HIDDEN)
        matrix(f"{prefix}.attn_output", HIDDEN, HIDDEN)
        matrix(f"{prefix}.ffn_gate", FEED_FORWARD, HIDDEN)
        matrix(f"{prefix}.ffn_up", FEED_FORWARD, HIDDEN)
        matrix(f"{prefix}.ffn_down", HIDDEN, FEED_FORWARD)


if __name__ == "__main__":
    write(sys.argv[1])
