#!/usr/bin/env python3
"""Step times of LLM layers with random weights on one GPU, to be put beside the simulator's timing model.

    python3 bench/gpu/step_times.py --out steps.jsonl            # up to 300 s on an H100
    python3 bench/gpu/step_times.py --out steps.jsonl --quick    # checks and a few rows, up to 45 s
    python3 bench/gpu/step_times.py --out steps.jsonl --cpu      # tiny shapes, same code, no times worth reading

A step computes the new tokens of a prompt, one token of each decoding sequence, or both, as in
`crates/kvlane-core/src/timing`. Its kernels are those that vLLM runs for it on one GPU, or close to them: cuBLAS, flash
attention, and Triton for the rest. A few layers with distinct weights are captured as a CUDA graph and replayed; a
model's step is that many times its layers, and the output matrix. The host's part of a step is not measured.
README.md beside this says what the rows mean.
"""

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

BEGAN = time.monotonic()
ON_GPU = "--cpu" not in sys.argv
if not ON_GPU:
    # Before the imports, or half of Triton is compiled.
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402
from torch.nn.attention.bias import causal_lower_right  # noqa: E402

DEVICE = "cuda" if ON_GPU else "cpu"
# On a CPU, Triton's interpreter multiplies the bits of bf16 as whole numbers.
BF16, FP8 = torch.bfloat16 if ON_GPU else torch.float16, torch.float8_e4m3fn
FP8_MAX = tl.constexpr(448.0)
EPS = 1e-6
# Of random weights, which are N(0, 0.02) as at the start of a training.
SPREAD = 0.02

# Models that the timing model knows. Their shapes are read from its own table, which has the keys and values of the
# `config.json` of meta-llama/Llama-3.1-8B, Qwen/Qwen3-32B and Qwen/Qwen3-30B-A3B on Hugging Face.
MODELS_JSON = Path(__file__).resolve().parents[2] / "crates/kvlane-core/data/models.json"
# In the order of importance.
ENGINES = [
    ("llama-3.1-8b", "bf16"),
    ("qwen3-30b-a3b", "bf16"),
    ("qwen3-32b", "bf16"),
    ("llama-3.1-8b", "fp8"),
    ("qwen3-32b", "fp8"),
]
# Layers with weights, keys and values of their own. The smallest has 218 MB, and the second-level cache 50 MB.
DISTINCT_LAYERS = 4 if ON_GPU else 1
# Layers of a graph of a decode step, so that the start of the graph is a small part of it.
DECODE_LAYERS = 8 if ON_GPU else 2
# cuBLAS takes products of few rows in 8 bits by another path; vLLM filled them up when it used `torch._scaled_mm`.
FEW_ROWS = 32
# Most that rounding to 8 bits may be off, of a norm. Triton's interpreter rounds 31.6 to 16.
FP8_ERROR = 4e-2 if ON_GPU else 3e-1
MEMORY_SHARE = 0.90
ACTIVATION_BYTES = 4 << 30
# How a kernel writes what a matrix multiplication reads.
PLAIN, ONE_SCALE, ROW_SCALES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
# After an error of the device another process goes on, without the row of that error.
RESTARTS_MAX = 5


# === shapes ===


@dataclass(frozen=True)
class Shape:
    """A decoder's dimensions, as in the timing model."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    head_norms: bool
    experts: int = 0
    per_token: int = 0
    expert_ffn: int = 0

    @classmethod
    def of(cls, name):
        config = json.loads(MODELS_JSON.read_text())[name]
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        return cls(
            name, config["num_hidden_layers"], hidden, heads, config["num_key_value_heads"],
            config.get("head_dim", hidden // heads), config["intermediate_size"], config["vocab_size"],
            # Qwen3 normalises each head of queries and keys before the rotary embedding.
            head_norms=config["architectures"][0].startswith("Qwen3"),
            experts=config.get("num_experts", 0), per_token=config.get("num_experts_per_tok", 0),
            expert_ffn=config.get("moe_intermediate_size", 0),
        )

    @property
    def group(self):
        """Query heads that share a head of keys and values."""
        return self.heads // self.kv_heads

    @property
    def query_width(self):
        return self.heads * self.head_dim

    @property
    def kv_width(self):
        return self.kv_heads * self.head_dim

    @property
    def qkv_width(self):
        return self.query_width + 2 * self.kv_width

    def common_parameters(self):
        """Of one layer's matrices that every token uses."""
        attention = self.hidden * (self.qkv_width + self.query_width)
        return attention + self.hidden * (self.experts or 3 * self.ffn)

    def expert_parameters(self):
        """Of one expert of one layer."""
        return 3 * self.hidden * self.expert_ffn


@dataclass(frozen=True)
class Step:
    """The work of one step."""

    new_tokens: int = 0
    cached_tokens: int = 0
    batch: int = 0
    context_tokens: int = 0

    @property
    def kind(self):
        return "mixed" if self.new_tokens and self.batch else "prefill" if self.new_tokens else "decode"

    @property
    def tokens(self):
        return self.new_tokens + self.batch

    @property
    def prompt_keys(self):
        return self.cached_tokens + self.new_tokens if self.new_tokens else 0

    @property
    def kv_tokens(self):
        """Tokens whose keys and values are held."""
        return self.prompt_keys + self.batch * self.context_tokens

    @property
    def output_rows(self):
        """Tokens that yield another: the prompt ends with this step."""
        return self.batch + (1 if self.new_tokens else 0)

    def shape(self):
        """The same as `kvlane_core::timing::StepShape`."""
        new, cached = self.new_tokens, self.cached_tokens
        return {
            "prefill_tokens": new,
            "prefill_pairs": new * cached + new * (new + 1) // 2,
            "prefill_context_tokens": cached if new else 0,
            "decode_seqs": self.batch,
            "decode_context_tokens": self.batch * self.context_tokens,
            "decode_shared_tokens": 0,
            "finished_prefills": 1 if new else 0,
        }


@dataclass(frozen=True)
class Row:
    """One measurement to make."""

    tier: int
    model: str
    dtype: str
    step: Step
    # All layers and the output matrix in one graph, to check the scaling of the others.
    whole: bool = False
    # A second measurement of the same.
    repeat: bool = False

    def label(self):
        step, work = self.step, []
        if step.new_tokens:
            work.append(f"{step.new_tokens} after {step.cached_tokens}")
        if step.batch:
            work.append(f"{step.batch} x {step.context_tokens}")
        name = f"{self.model}:{self.dtype} {step.kind} {', '.join(work)}"
        return name + " whole" * self.whole + " repeat" * self.repeat


def fits(shape, dtype, step):
    """Whether an engine's GPU would hold all weights, and the keys and values of this step."""
    if not ON_GPU:
        return True
    layer = shape.common_parameters() + shape.experts * shape.expert_parameters()
    weights = shape.layers * layer * (2 if dtype == "bf16" else 1) + 2 * 2 * shape.hidden * shape.vocab
    kv = step.kv_tokens * shape.layers * 2 * shape.kv_width * 2
    memory = torch.cuda.get_device_properties(0).total_memory
    return weights + kv + ACTIVATION_BYTES <= MEMORY_SHARE * memory


# === kernels ===


@triton.jit
def put(values, out, offsets, mask, scales, row, QUANT: tl.constexpr):
    """Stores one row, in 8 bits if asked for."""
    if QUANT == ONE_SCALE:
        values = values / tl.load(scales)
    if QUANT == ROW_SCALES:
        scale = tl.maximum(tl.max(tl.abs(values), 0) / FP8_MAX, 1e-8)
        tl.store(scales + row, scale)
        values = values / scale
    if QUANT != PLAIN:
        values = tl.minimum(tl.maximum(values, -FP8_MAX), FP8_MAX)
    tl.store(out + offsets, values.to(out.dtype.element_ty), mask=mask)


@triton.jit
def add_norm_kernel(x, residual, weight, out, scales, width, eps, BLOCK: tl.constexpr, QUANT: tl.constexpr):
    """Adds a layer's output to the residual, and normalises the sum."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < width
    offsets = row * width + i
    total = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(residual + offsets, total.to(residual.dtype.element_ty), mask=mask)
    normed = total / tl.sqrt(tl.sum(total * total, 0) / width + eps)
    normed *= tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    put(normed, out, offsets, mask, scales, row, QUANT)


@triton.jit
def silu_mul_kernel(x, out, scales, width, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, QUANT: tl.constexpr):
    """The activation of the feed-forward part: silu of the left half times the right half."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * CHUNKS
    scale = 1.0
    if QUANT == ONE_SCALE:
        scale = tl.load(scales)
    if QUANT == ROW_SCALES:
        highest = 0.0
        for chunk in range(CHUNKS):
            i = (first + chunk) * BLOCK + tl.arange(0, BLOCK)
            gate = tl.load(x + row * 2 * width + i, mask=i < width, other=0.0).to(tl.float32)
            up = tl.load(x + row * 2 * width + width + i, mask=i < width, other=0.0).to(tl.float32)
            highest = tl.maximum(highest, tl.max(tl.abs(gate * tl.sigmoid(gate) * up), 0))
        scale = tl.maximum(highest / FP8_MAX, 1e-8)
        tl.store(scales + row, scale)
    for chunk in range(CHUNKS):
        i = (first + chunk) * BLOCK + tl.arange(0, BLOCK)
        gate = tl.load(x + row * 2 * width + i, mask=i < width, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * width + width + i, mask=i < width, other=0.0).to(tl.float32)
        values = gate * tl.sigmoid(gate) * up / scale
        if QUANT != PLAIN:
            values = tl.minimum(tl.maximum(values, -FP8_MAX), FP8_MAX)
        tl.store(out + row * width + i, values.to(out.dtype.element_ty), mask=i < width)


@triton.jit
def quantise_kernel(x, out, scales, width, BLOCK: tl.constexpr, QUANT: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    values = tl.load(x + row * width + i, mask=i < width, other=0.0).to(tl.float32)
    put(values, out, row * width + i, i < width, scales, row, QUANT)


@triton.jit
def rotary_kernel(
    qkv, positions, cosines, sines, norms, eps, qkv_width, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr, HEAD_NORMS: tl.constexpr,
):
    """Rotary embedding of queries and keys in place, after their norms where the model has those."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    half: tl.constexpr = HEAD_DIM // 2
    i = tl.arange(0, half)
    left = qkv + row * qkv_width + heads[:, None] * HEAD_DIM + i[None, :]
    a = tl.load(left).to(tl.float32)
    b = tl.load(left + half).to(tl.float32)
    if HEAD_NORMS:
        inverse = 1.0 / tl.sqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HEAD_DIM + eps)
        # The first row of `norms` is for queries, the second for keys.
        norm = norms + tl.where(heads < HEADS, 0, HEAD_DIM)[:, None] + i[None, :]
        a = a * inverse[:, None] * tl.load(norm).to(tl.float32)
        b = b * inverse[:, None] * tl.load(norm + half).to(tl.float32)
    position = tl.load(positions + row)
    cosine = tl.load(cosines + position * half + i)[None, :]
    sine = tl.load(sines + position * half + i)[None, :]
    tl.store(left, (a * cosine - b * sine).to(qkv.dtype.element_ty))
    tl.store(left + half, (b * cosine + a * sine).to(qkv.dtype.element_ty))


@triton.jit
def store_kv_kernel(qkv, keys, values, slots, qkv_width, query_width, kv_width, BLOCK: tl.constexpr):
    """Writes the keys and values of the step's tokens to the cache."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    i = tl.arange(0, BLOCK)
    mask = i < kv_width
    source = qkv + row * qkv_width + query_width + i
    tl.store(keys + slot * kv_width + i, tl.load(source, mask=mask), mask=mask)
    tl.store(values + slot * kv_width + i, tl.load(source + kv_width, mask=mask), mask=mask)


@triton.jit
def prompt_kernel(
    q, k, v, out, new_tokens, cached, group, q_width, kv_width, out_width, scale, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):
    """Causal attention of a chunk to the cached tokens and itself. `scale` is for powers of two."""
    # The last tiles have most keys, so they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // group
    rows = tile * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, KEYS)
    query = tl.load(
        q + rows[:, None] * q_width + head * HEAD_DIM + d[None, :], mask=rows[:, None] < new_tokens, other=0.0
    )
    k += kv_head * HEAD_DIM
    v += kv_head * HEAD_DIM
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    # Keys that every query of the tile sees need no mask.
    unmasked = (cached + tile * ROWS) // KEYS * KEYS
    for start in range(0, unmasked, KEYS):
        key = tl.load(k + (start + n)[None, :] * kv_width + d[:, None])
        scores = tl.dot(query, key) * scale
        top = tl.maximum(highest, tl.max(scores, 1))
        p = tl.math.exp2(scores - top[:, None])
        fade = tl.math.exp2(highest - top)
        value = tl.load(v + (start + n)[:, None] * kv_width + d[None, :])
        total = total * fade + tl.sum(p, 1)
        sums = tl.dot(p.to(value.dtype), value, sums * fade[:, None])
        highest = top
    end = tl.minimum(cached + tile * ROWS + ROWS, cached + new_tokens)
    for start in range(unmasked, end, KEYS):
        at = start + n
        key = tl.load(k + at[None, :] * kv_width + d[:, None], mask=at[None, :] < end, other=0.0)
        scores = tl.dot(query, key) * scale
        scores = tl.where(at[None, :] <= cached + rows[:, None], scores, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, 1))
        p = tl.math.exp2(scores - top[:, None])
        fade = tl.math.exp2(highest - top)
        value = tl.load(v + at[:, None] * kv_width + d[None, :], mask=at[:, None] < end, other=0.0)
        total = total * fade + tl.sum(p, 1)
        sums = tl.dot(p.to(value.dtype), value, sums * fade[:, None])
        highest = top
    result = sums / total[:, None]
    target = out + rows[:, None] * out_width + head * HEAD_DIM + d[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=rows[:, None] < new_tokens)


@triton.jit
def merge_kernel(
    left, right, left_lse, right_lse, out, rows, left_row, left_head, right_row, right_head,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
):
    """One attention of two, over the cached keys and over the chunk's own. The sums of exponentials are [head, row]."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)
    d = tl.arange(0, HEAD_DIM)
    a = tl.load(left_lse + heads * rows + row)
    b = tl.load(right_lse + heads * rows + row)
    top = tl.maximum(a, b)
    a = tl.exp(a - top)
    b = tl.exp(b - top)
    one = tl.load(left + row * left_row + heads[:, None] * left_head + d[None, :]).to(tl.float32)
    other = tl.load(right + row * right_row + heads[:, None] * right_head + d[None, :]).to(tl.float32)
    result = (one * a[:, None] + other * b[:, None]) / (a + b)[:, None]
    target = out + row * HEADS * HEAD_DIM + heads[:, None] * HEAD_DIM + d[None, :]
    tl.store(target, result.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["splits", "group", "kv_heads"])
def decode_kernel(
    q, k, v, out, partial, partial_lse, context, chunk, splits, group, kv_heads, q_width, out_width, kv_width, scale,
    HEAD_DIM: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
):
    """Attention of one token of each sequence to a part of its context: the queries that share a head of keys are the
    rows of one product. Query head `g * kv_heads + h` uses head `h`, as good an order as any for random weights."""
    sequence = tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    split = tl.program_id(1)
    rows = tl.arange(0, 16)
    d = tl.arange(0, HEAD_DIM)
    n = tl.arange(0, KEYS)
    at_row = (rows * kv_heads + head)[:, None] * HEAD_DIM + d[None, :]
    is_row = rows[:, None] < group
    query = tl.load(q + sequence * q_width + at_row, mask=is_row, other=0.0)
    # Keys and values of many sequences are more than 2^31 numbers.
    base = sequence.to(tl.int64) * context * kv_width + head * HEAD_DIM
    k += base
    v += base
    highest = tl.full([16], float("-inf"), tl.float32)
    total = tl.zeros([16], tl.float32)
    sums = tl.zeros([16, HEAD_DIM], tl.float32)
    end = tl.minimum(split * chunk + chunk, context)
    for start in range(split * chunk, end, KEYS):
        at = start + n
        key = tl.load(k + at[None, :] * kv_width + d[:, None], mask=at[None, :] < end, other=0.0)
        scores = tl.where(at[None, :] < end, tl.dot(query, key) * scale, float("-inf"))
        top = tl.maximum(highest, tl.max(scores, 1))
        p = tl.math.exp2(scores - top[:, None])
        fade = tl.math.exp2(highest - top)
        value = tl.load(v + at[:, None] * kv_width + d[None, :], mask=at[:, None] < end, other=0.0)
        total = total * fade + tl.sum(p, 1)
        sums = tl.dot(p.to(value.dtype), value, sums * fade[:, None])
        highest = top
    result = sums / total[:, None]
    if SPLIT:
        part = ((sequence * kv_heads + head) * splits + split) * group + rows
        tl.store(partial + part[:, None] * HEAD_DIM + d[None, :], result, mask=is_row)
        tl.store(partial_lse + part, highest + tl.math.log2(total), mask=rows < group)
    else:
        tl.store(out + sequence * out_width + at_row, result.to(out.dtype.element_ty), mask=is_row)


@triton.jit(do_not_specialize=["splits", "group", "kv_heads"])
def decode_merge_kernel(
    partial, partial_lse, out, splits, group, kv_heads, HEAD_DIM: tl.constexpr, SPLITS_MAX: tl.constexpr
):
    """One attention of the splits of a context."""
    sequence = tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    row = tl.program_id(1)
    s = tl.arange(0, SPLITS_MAX)
    d = tl.arange(0, HEAD_DIM)
    part = ((sequence * kv_heads + head) * splits + s) * group + row
    lse = tl.load(partial_lse + part, mask=s < splits, other=float("-inf"))
    weight = tl.math.exp2(lse - tl.max(lse, 0))
    values = tl.load(partial + part[:, None] * HEAD_DIM + d[None, :], mask=s[:, None] < splits, other=0.0)
    result = tl.sum(values * weight[:, None], 0) / tl.sum(weight, 0)
    target = out + (sequence * group * kv_heads + row * kv_heads + head) * HEAD_DIM + d
    tl.store(target, result.to(out.dtype.element_ty))


@triton.jit
def route_kernel(logits, experts, weights, ranks, counts, EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr):
    """A token's experts and their weights; each of its pairs gets a place in the queue of its expert."""
    token = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    j = tl.arange(0, PER_TOKEN)
    left = tl.load(logits + token * EXPERTS + e).to(tl.float32)
    top = tl.max(left, 0)
    shares = tl.zeros([PER_TOKEN], tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        expert = tl.argmax(left, 0)
        shares = tl.where(j == choice, tl.exp(tl.max(left, 0) - top), shares)
        tl.store(experts + token * PER_TOKEN + choice, expert)
        tl.store(ranks + token * PER_TOKEN + choice, tl.atomic_add(counts + expert, 1))
        left = tl.where(e == expert, float("-inf"), left)
    tl.store(weights + token * PER_TOKEN + j, shares / tl.sum(shares, 0))


@triton.jit
def place_kernel(
    experts, ranks, counts, ends, order, places, pairs, EXPERTS: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sorts the pairs of token and expert by expert: `order` is each place's token, `places` each pair's place."""
    e = tl.arange(0, EXPERTS)
    count = tl.load(counts + e)
    end = tl.cumsum(count, 0)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pair < pairs
    expert = tl.load(experts + pair, mask=mask, other=0)
    start = tl.sum(tl.where(expert[:, None] == e[None, :], (end - count)[None, :], 0), 1)
    place = start + tl.load(ranks + pair, mask=mask, other=0)
    tl.store(order + place, pair // PER_TOKEN, mask=mask)
    tl.store(places + pair, place, mask=mask)
    if tl.program_id(0) == 0:
        tl.store(ends + e, end)


@triton.jit
def gather_kernel(x, order, out, width, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    token = tl.load(order + place).to(tl.int64)
    i = tl.arange(0, BLOCK)
    tl.store(out + place * width + i, tl.load(x + token * width + i, mask=i < width), mask=i < width)


@triton.jit
def expert_kernel(
    x, weight, out, order, counts, n_width, k_width, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Products of each expert's rows and its matrix; `order` is each row's place in `x`."""
    e = tl.arange(0, EXPERTS)
    count = tl.load(counts + e)
    tiles = (count + ROWS - 1) // ROWS
    tiles_end = tl.cumsum(tiles, 0)
    blocks = tl.cdiv(n_width, COLUMNS)
    tile = tl.program_id(0) // blocks
    if tile >= tl.max(tiles_end, 0):
        return
    expert = tl.sum(tl.where(tiles_end <= tile, 1, 0), 0)
    is_expert = e == expert
    start = tl.sum(tl.where(is_expert, tl.cumsum(count, 0) - count, 0), 0)
    end = start + tl.sum(tl.where(is_expert, count, 0), 0)
    first = start + (tile - tl.sum(tl.where(is_expert, tiles_end - tiles, 0), 0)) * ROWS
    rows = first + tl.arange(0, ROWS)
    is_row = rows < end
    columns = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < n_width
    i = tl.arange(0, DEPTH)
    source = tl.load(order + rows, mask=is_row, other=0)
    x += source.to(tl.int64)[:, None] * k_width + i[None, :]
    weight += expert.to(tl.int64) * n_width * k_width + columns[None, :] * k_width + i[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in range(0, k_width, DEPTH):
        a = tl.load(x, mask=is_row[:, None], other=0.0)
        b = tl.load(weight, mask=is_column[None, :], other=0.0)
        sums = tl.dot(a, b, sums)
        x += DEPTH
        weight += DEPTH
    target = out + rows.to(tl.int64)[:, None] * n_width + columns[None, :]
    tl.store(target, sums.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def combine_kernel(x, places, weights, out, width, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """A token's sum of what its experts gave."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        place = tl.load(places + token * PER_TOKEN + choice).to(tl.int64)
        share = tl.load(weights + token * PER_TOKEN + choice)
        total += share * tl.load(x + place * width + i, mask=i < width, other=0.0).to(tl.float32)
    tl.store(out + token * width + i, total.to(out.dtype.element_ty), mask=i < width)


# === activations and matrices ===


def random(*size, spread=1.0):
    return torch.empty(*size, dtype=BF16, device=DEVICE).normal_(0.0, spread)


def warps_of(width):
    return 8 if width > 2048 else 4


class Activation:
    """What a matrix multiplication reads: bf16, or fp8 with a scale for all or for each row."""

    def __init__(self, rows, width, dtype):
        self.width = width
        self.dtype = dtype
        self.quant = PLAIN if dtype == "bf16" else ONE_SCALE
        self.values = random(rows, width)
        # Normalised inputs reach from -5 to 5, and fp8 to 448.
        self.scale = torch.full((), 0.02, device=DEVICE)
        self.row_scales = torch.full((rows, 1), 0.02, device=DEVICE)
        if dtype == "fp8":
            self.values = (self.values / 0.02).to(FP8)

    @property
    def scales(self):
        return self.row_scales if self.quant == ROW_SCALES else self.scale

    def add_norm(self, x, residual, weight, rows):
        block = triton.next_power_of_2(self.width)
        add_norm_kernel[(rows,)](
            x, residual, weight, self.values, self.scales, self.width, EPS, BLOCK=block, QUANT=self.quant.value,
            num_warps=warps_of(block),
        )

    def silu_mul(self, x, rows):
        block = min(1024, triton.next_power_of_2(self.width))
        blocks = triton.cdiv(self.width, block)
        chunks, blocks = (blocks, 1) if self.quant == ROW_SCALES else (1, blocks)
        silu_mul_kernel[(rows, blocks)](
            x, self.values, self.scales, self.width, CHUNKS=chunks, BLOCK=block, QUANT=self.quant.value
        )

    def quantise(self, x, rows):
        block = triton.next_power_of_2(self.width)
        quantise_kernel[(rows,)](
            x, self.values, self.scales, self.width, BLOCK=block, QUANT=self.quant.value, num_warps=warps_of(block)
        )

    def dequantised(self, rows):
        values = self.values[:rows].float()
        if self.quant == PLAIN:
            return values
        return values * (self.row_scales[:rows] if self.quant == ROW_SCALES else self.scale)


class Matrix:
    """A random matrix [outputs, inputs], in 8 bits with a scale for all or for each output."""

    def __init__(self, outputs, inputs, dtype):
        self.values = random(outputs, inputs, spread=SPREAD)
        if dtype == "fp8":
            self.values = (self.values / (SPREAD / 64)).to(FP8)
        self.scale = torch.full((), SPREAD / 64, device=DEVICE)
        self.column_scales = torch.full((1, outputs), SPREAD / 64, device=DEVICE)

    def times(self, x, out, rows):
        if x.quant == PLAIN:
            torch.mm(x.values[:rows], self.values.t(), out=out[:rows])
            return
        by_row = x.quant == ROW_SCALES
        torch._scaled_mm(
            x.values[:rows], self.values.t(), scale_a=x.row_scales[:rows] if by_row else x.scale,
            scale_b=self.column_scales if by_row else self.scale, out_dtype=BF16, use_fast_accum=True, out=out[:rows],
        )

    def dequantised(self):
        return self.values.float() * (self.scale if self.values.dtype == FP8 else 1.0)


# === attention ===


def flash_attention(q, k, v, causal):
    """q, k, v: [sequences, heads, tokens, head_dim]. A causal query ends with the last key."""
    backends = [SDPBackend.FLASH_ATTENTION] if ON_GPU else [SDPBackend.MATH]
    mask = causal_lower_right(q.shape[2], k.shape[2]) if causal else None
    with sdpa_kernel(backends):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])


def heads_of(tokens, heads):
    """[tokens, heads * head_dim] as [1, heads, tokens, head_dim], without a copy."""
    return tokens.unflatten(1, (heads, -1)).transpose(0, 1).unsqueeze(0)


def prompt_by_flash(shape, step, q, k, v, out):
    """PyTorch's FlashAttention-2."""
    result = flash_attention(heads_of(q, shape.heads), heads_of(k, shape.kv_heads), heads_of(v, shape.kv_heads), True)
    return result[0].transpose(0, 1).reshape(step.new_tokens, -1)


def prompt_by_cudnn(shape, step, q, k, v, out):
    """cuDNN, whose causal mask is only for as many queries as keys: with cached tokens, two attentions are merged."""
    cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention
    q, k, v = heads_of(q, shape.heads), heads_of(k, shape.kv_heads), heads_of(v, shape.kv_heads)
    cached = step.cached_tokens
    own = cudnn(q, k[:, :, cached:], v[:, :, cached:], None, cached > 0, 0.0, True, False)
    if not cached:
        return own[0][0].transpose(0, 1).reshape(step.new_tokens, -1)
    before = cudnn(q, k[:, :, :cached], v[:, :, :cached], None, True, 0.0, False, False)
    left, right = before[0][0], own[0][0]
    merge_kernel[(step.new_tokens,)](
        left, right, before[1].contiguous(), own[1].contiguous(), out, step.new_tokens, left.stride(1), left.stride(0),
        right.stride(1), right.stride(0), HEADS=shape.heads, HEAD_DIM=shape.head_dim, num_warps=8,
    )
    return out


def prompt_by_triton(shape, step, q, k, v, out, rows=128, keys=64, warps=8, stages=3):
    grid = (triton.cdiv(step.new_tokens, rows), shape.heads)
    prompt_kernel[grid](
        q, k, v, out, step.new_tokens, step.cached_tokens, shape.group, q.stride(0), shape.kv_width, shape.query_width,
        shape.head_dim**-0.5 * math.log2(math.e), HEAD_DIM=shape.head_dim, ROWS=rows, KEYS=keys, num_warps=warps,
        num_stages=stages,
    )
    return out


PROMPT_WAYS = {
    "flash2": prompt_by_flash,
    "cudnn": prompt_by_cudnn,
    "triton": prompt_by_triton,
    "triton_wide": functools.partial(prompt_by_triton, keys=128, stages=2),
}


class Splits:
    """Decode attention by a Triton kernel that splits the context into parts, as FlashDecoding does."""

    SPLITS_MAX = 64
    KEYS = 64

    def __init__(self, shape, step, programs):
        heads = step.batch * shape.kv_heads
        splits = min(self.SPLITS_MAX, triton.cdiv(step.context_tokens, self.KEYS), triton.cdiv(programs, heads))
        self.chunk = triton.cdiv(triton.cdiv(step.context_tokens, splits), self.KEYS) * self.KEYS
        # Chunks are rounded up, so fewer of them may do.
        self.splits = triton.cdiv(step.context_tokens, self.chunk)
        parts = heads * self.splits * shape.group if self.splits > 1 else 1
        self.partial = torch.empty(parts, shape.head_dim, device=DEVICE)
        self.lse = torch.empty(parts, device=DEVICE)

    def __call__(self, shape, step, q, k, v, out):
        grid = (step.batch * shape.kv_heads, self.splits)
        decode_kernel[grid](
            q, k, v, out, self.partial, self.lse, step.context_tokens, self.chunk, self.splits, shape.group,
            shape.kv_heads, q.stride(0), shape.query_width, shape.kv_width, shape.head_dim**-0.5 * math.log2(math.e),
            HEAD_DIM=shape.head_dim, KEYS=self.KEYS, SPLIT=self.splits > 1, num_warps=4, num_stages=3,
        )
        if self.splits > 1:
            decode_merge_kernel[(step.batch * shape.kv_heads, shape.group)](
                self.partial, self.lse, out, self.splits, shape.group, shape.kv_heads, HEAD_DIM=shape.head_dim,
                SPLITS_MAX=self.SPLITS_MAX, num_warps=4,
            )
        return out


def decode_by_flash(shape, step, q, k, v, out):
    """PyTorch's FlashAttention-2, with the queries that share a head of keys as the rows of one. The order of heads is
    that of `decode_kernel`, for which the result needs no copy."""
    q = q.unflatten(1, (shape.group, shape.kv_heads, shape.head_dim)).transpose(1, 2)
    k, v = (part.view(step.batch, step.context_tokens, shape.kv_heads, -1).transpose(1, 2) for part in (k, v))
    return flash_attention(q, k, v, causal=False).transpose(1, 2).reshape(step.batch, -1)


def decode_ways(shape, step):
    """By name; numbers are how many programs for each multiprocessor are aimed at."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count if ON_GPU else 4
    ways = {"flash2": decode_by_flash}
    seen = set()
    for share in (1, 2, 4, 8):
        way = Splits(shape, step, share * processors)
        if way.splits not in seen:
            seen.add(way.splits)
            ways[f"split{share}"] = way
    return ways


# === experts ===

# Rows, columns and depth of a tile, warps and stages.
EXPERT_TILES = {
    "triton16": (16, 128, 128, 4, 3),
    "triton16_narrow": (16, 64, 128, 4, 4),
    "triton64": (64, 128, 64, 4, 4),
    "triton128": (128, 128, 64, 8, 3),
    "triton128_wide": (128, 256, 64, 8, 3),
}
if not ON_GPU:
    EXPERT_TILES = {"triton16": (16, 32, 16, 4, 2), "triton64": (64, 32, 16, 4, 2)}


class Router:
    """Which experts the tokens of a step use. The logits are random and of their own for each layer, so that tokens
    choose at random, as the timing model says; those of random weights would be alike for tokens that are alike."""

    def __init__(self, shape, tokens, layers):
        self.shape, self.tokens, self.pairs = shape, tokens, tokens * shape.per_token
        whole = functools.partial(torch.zeros, dtype=torch.int32, device=DEVICE)
        self.logits = [random(tokens, shape.experts) for _ in range(layers)]
        self.experts, self.ranks, self.order, self.places = (whole(self.pairs) for _ in range(4))
        self.in_order = torch.arange(self.pairs, dtype=torch.int32, device=DEVICE)
        self.counts, self.ends = whole(shape.experts), whole(shape.experts)
        self.weights = torch.zeros(self.pairs, device=DEVICE)

    def route(self, layer):
        sizes = {"EXPERTS": self.shape.experts, "PER_TOKEN": self.shape.per_token}
        self.counts.zero_()
        route_kernel[(self.tokens,)](
            self.logits[layer], self.experts, self.weights, self.ranks, self.counts, **sizes, num_warps=1
        )
        place_kernel[(triton.cdiv(self.pairs, 64),)](
            self.experts, self.ranks, self.counts, self.ends, self.order, self.places, self.pairs, **sizes, BLOCK=64
        )

    def combine(self, x, out):
        width = self.shape.hidden
        combine_kernel[(self.tokens,)](
            x, self.places, self.weights, out, width, PER_TOKEN=self.shape.per_token,
            BLOCK=triton.next_power_of_2(width), num_warps=8,
        )

    def touched(self):
        """Experts that at least one token uses, mean over the layers."""
        used = []
        for layer in range(len(self.logits)):
            self.route(layer)
            used.append((self.counts > 0).sum().item())
        return statistics.mean(used)


class GroupedProduct:
    """Both products of the experts by PyTorch's grouped matrix multiplication (CUTLASS)."""

    def __init__(self, router):
        self.router = router
        self.gathered = random(router.pairs, router.shape.hidden)
        self.product = getattr(F, "grouped_mm", None) or torch._grouped_mm

    def up(self, x, weight, out):
        router, width = self.router, self.router.shape.hidden
        gather_kernel[(router.pairs,)](
            x, router.order, self.gathered, width, BLOCK=triton.next_power_of_2(width)
        )
        return self.product(self.gathered, weight.transpose(1, 2), offs=router.ends)

    def down(self, x, weight, out):
        return self.product(x, weight.transpose(1, 2), offs=self.router.ends)


class TiledProduct:
    """The same by a Triton kernel like vLLM's fused experts."""

    def __init__(self, router, tiles):
        self.router = router
        self.rows, self.columns, self.depth, self.warps, self.stages = tiles

    def product(self, x, weight, out, order):
        router = self.router
        n_width, k_width = weight.shape[1:]
        tiles = min(router.pairs, router.shape.experts + router.pairs // self.rows)
        expert_kernel[(tiles * triton.cdiv(n_width, self.columns),)](
            x, weight, out, order, router.counts, n_width, k_width, EXPERTS=router.shape.experts, ROWS=self.rows,
            COLUMNS=self.columns, DEPTH=self.depth, num_warps=self.warps, num_stages=self.stages,
        )
        return out

    def up(self, x, weight, out):
        return self.product(x, weight, out, self.router.order)

    def down(self, x, weight, out):
        return self.product(x, weight, out, self.router.in_order)


def expert_ways(router):
    """By name: those whose tiles suit the tokens of an expert."""
    mean = router.pairs / router.shape.experts
    names = [name for name, tiles in EXPERT_TILES.items() if tiles[0] <= max(16, 4 * mean) and 8 * tiles[0] >= mean]
    return {"grouped_mm": GroupedProduct(router)} | {name: TiledProduct(router, EXPERT_TILES[name]) for name in names}


# === measuring ===


class Records:
    """The file of results: a JSON object on each line, written at once."""

    def __init__(self, path):
        self.file = open(path, "a") if path else None

    def write(self, row, **fields):
        if self.file:
            self.file.write(json.dumps({"row": row} | fields) + "\n")
            self.file.flush()


class Gauge:
    """The GPU's clock and power, read while it works."""

    def __init__(self):
        self.nvml = None
        if not ON_GPU:
            return
        try:
            import pynvml

            pynvml.nvmlInit()
            self.handle = pynvml.nvmlDeviceGetHandleByIndex(0)
            self.nvml = pynvml
        except Exception as error:
            print(f"clocks are not read: {error!r}")

    def read(self):
        if not self.nvml:
            return {}
        try:
            return {
                "sm_mhz": self.nvml.nvmlDeviceGetClockInfo(self.handle, self.nvml.NVML_CLOCK_SM),
                "power_w": round(self.nvml.nvmlDeviceGetPowerUsage(self.handle) / 1000),
            }
        except Exception:
            return {}


@dataclass
class Timing:
    ms: float
    # From the tenth to the ninetieth percentile, over the median.
    spread: float
    clocks: dict = field(default_factory=dict)


class Clock:
    """Times work as replays of a CUDA graph, by events."""

    def __init__(self):
        self.gauge = Gauge()
        if ON_GPU:
            self.stream = torch.cuda.Stream()
            torch.cuda.set_stream(self.stream)

    def time(self, work, ms=80.0, least=7, most=40):
        """`ms`: how long to measure, for at least and at most so many replays."""
        if not ON_GPU:
            began = time.perf_counter()
            work()
            return Timing((time.perf_counter() - began) * 1e3, 0.0)
        graph = self.capture(work)
        one = self.replays(graph, 1)[0][0]
        count = max(least, min(most, math.ceil(ms / one)))
        times, clocks = self.replays(graph, count)
        times.sort()
        median = statistics.median(times)
        return Timing(median, (times[int(0.9 * (count - 1))] - times[int(0.1 * (count - 1))]) / median, clocks)

    def capture(self, work):
        # Compiles, and makes the handles and workspaces of libraries, which a capture must not.
        work()
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            work()
        except Exception:
            try:
                graph.capture_end()
            except Exception:
                pass
            raise
        graph.capture_end()
        graph.replay()
        return graph

    def replays(self, graph, count):
        """Milliseconds of each. The GPU waits a little first, so that replays follow each other without the host."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda._sleep(1_000_000)
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        clocks = self.gauge.read() if count > 1 else {}
        self.stream.synchronize()
        return [events[i].elapsed_time(events[i + 1]) for i in range(count)], clocks


class Choices:
    """Of several ways to compute the same, the fastest for each shape."""

    def __init__(self, clock, records):
        self.clock, self.records = clock, records
        # Ways that gave wrong results, or cannot be used here.
        self.barred = set()
        self.chosen = {}

    def fastest(self, what, key, ways):
        """The name of the fastest of `ways`, which are functions by name."""
        if (what, key) in self.chosen:
            return self.chosen[what, key]
        times, errors = {}, {}
        for name, work in ways.items():
            if (what, name) in self.barred:
                continue
            try:
                times[name] = self.clock.time(work, ms=6.0, least=3, most=10).ms
            except Exception as error:
                self.unless_lost(what, name)
                errors[name] = brief(error)
        self.records.write("choice", of=what, shape=key, ms=times, errors=errors)
        if not times:
            raise RuntimeError(f"no way to compute {what}: {errors}")
        self.chosen[what, key] = min(times, key=times.get)
        return self.chosen[what, key]

    def unless_lost(self, what, name):
        """Raises if an error has broken the device for this process; the next one will not go that way."""
        if not ON_GPU:
            return
        try:
            torch.cuda.synchronize()
        except Exception as error:
            self.records.write("check", of=f"{what} by {name}", ok=False, why=f"the device is lost: {brief(error)}")
            raise


def brief(error):
    return f"{type(error).__name__}: {str(error).strip()[:300]}"


# === impl Model ===


class Model:
    """Layers of a model with random weights."""

    def __init__(self, shape, dtype, output_matrix):
        self.shape, self.dtype, self.output_matrix = shape, dtype, output_matrix
        self.layers = [self.layer() for _ in range(DISTINCT_LAYERS)]
        self.final_norm = random(shape.hidden, spread=0.1) + 1
        self.head_times = {}

    def layer(self):
        shape, dtype = self.shape, self.dtype
        layer = {
            "qkv": Matrix(shape.qkv_width, shape.hidden, dtype),
            "o": Matrix(shape.hidden, shape.query_width, dtype),
            "norm": random(2, shape.hidden, spread=0.1) + 1,
            "head_norms": random(2, shape.head_dim, spread=0.1) + 1,
        }
        if shape.experts:
            layer["router"] = Matrix(shape.experts, shape.hidden, "bf16")
            layer["up"] = random(shape.experts, 2 * shape.expert_ffn, shape.hidden, spread=SPREAD)
            layer["down"] = random(shape.experts, shape.hidden, shape.expert_ffn, spread=SPREAD)
        else:
            layer["up"] = Matrix(2 * shape.ffn, shape.hidden, dtype)
            layer["down"] = Matrix(shape.hidden, shape.ffn, dtype)
        return layer

    def engine(self):
        name = torch.cuda.get_device_name(0) if ON_GPU else "CPU"
        gpu = next((known for known in ("H100", "H200", "A100") if known in name), name).lower()
        return f"{self.shape.name}{':fp8' * (self.dtype == 'fp8')}@{gpu}"


class Caches:
    """Keys and values of each distinct layer, for all models."""

    def __init__(self, numbers):
        self.keys = [random(numbers) for _ in range(DISTINCT_LAYERS)]
        self.values = [random(numbers) for _ in range(DISTINCT_LAYERS)]


class Rotary:
    """Cosines and sines of the rotary embedding."""

    def __init__(self, positions, head_dim):
        frequencies = 500_000.0 ** (-torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)
        angles = torch.arange(positions, device=DEVICE)[:, None] * frequencies[None, :]
        self.cosines, self.sines = angles.cos().contiguous(), angles.sin().contiguous()

    def __call__(self, shape, qkv, positions, norms, rows):
        heads = shape.heads + shape.kv_heads
        block = math.gcd(heads, 4)
        rotary_kernel[(rows, heads // block)](
            qkv, positions, self.cosines, self.sines, norms, EPS, shape.qkv_width, HEADS=shape.heads,
            HEAD_DIM=shape.head_dim, BLOCK=block, HEAD_NORMS=shape.head_norms, num_warps=1,
        )


def store_kv(shape, qkv, keys, values, slots, rows):
    store_kv_kernel[(rows,)](
        qkv, keys, values, slots, shape.qkv_width, shape.query_width, shape.kv_width,
        BLOCK=triton.next_power_of_2(shape.kv_width), num_warps=4,
    )


# The parts of a step that are left out, one after the other, to find what each takes.
PARTS = ["decoding", "prompts", "routing", "traffic"]


class Pass:
    """One step through layers of a model: its buffers, and the fastest way for each part."""

    def __init__(self, model, step, caches, rotary, choices):
        self.model, self.step, self.caches, self.rotary = model, step, caches, rotary
        shape, tokens = model.shape, step.tokens
        self.shape = shape
        rows = max(tokens, FEW_ROWS)
        self.x = random(rows, shape.hidden)
        self.residual = random(rows, shape.hidden)
        self.normed = Activation(rows, shape.hidden, model.dtype)
        self.normed_ffn = Activation(rows, shape.hidden, model.dtype)
        self.qkv = random(rows, shape.qkv_width)
        self.attended = random(rows, shape.query_width)
        self.attended_in = Activation(rows, shape.query_width, model.dtype)
        self.positions, self.slots = self.places()
        if shape.experts:
            self.router = Router(shape, tokens, DISTINCT_LAYERS)
            self.router.route(0)
            self.router_logits = random(rows, shape.experts)
            self.gate_up = random(self.router.pairs, 2 * shape.expert_ffn)
            self.activated = Activation(self.router.pairs, shape.expert_ffn, model.dtype)
            self.expert_out = random(self.router.pairs, shape.hidden)
        else:
            self.router = None
            self.gate_up = random(rows, 2 * shape.ffn)
            self.activated = Activation(rows, shape.ffn, model.dtype)
        self.matrix_rows = tokens
        self.by = {}
        self.choose(choices)

    def places(self):
        """Each token's position, and its slot in the cache: the prompt's slots come first, then each sequence's. A
        decoding token is the last of its context."""
        step = self.step
        prompt = torch.arange(step.cached_tokens, step.prompt_keys, device=DEVICE)
        last = torch.full((step.batch,), step.context_tokens - 1, device=DEVICE)
        starts = step.prompt_keys + torch.arange(step.batch, device=DEVICE) * step.context_tokens
        return torch.cat([prompt, last]).long(), torch.cat([prompt, starts + last]).long()

    def choose(self, choices):
        shape, step = self.shape, self.step
        heads = (shape.heads, shape.kv_heads, shape.head_dim)
        if step.new_tokens:
            ways = PROMPT_WAYS
            key = heads + (step.new_tokens, step.cached_tokens)
            works = {name: functools.partial(self.each_layer, self.prompts, way) for name, way in ways.items()}
            self.by["prompts"] = choices.fastest("prompts", key, works)
            self.prompt_way = ways[self.by["prompts"]]
        if step.batch:
            ways = decode_ways(shape, step)
            key = heads + (step.batch, step.context_tokens)
            works = {name: functools.partial(self.each_layer, self.decoding, way) for name, way in ways.items()}
            self.by["decoding"] = choices.fastest("decoding", key, works)
            self.decode_way = ways[self.by["decoding"]]
        if shape.experts:
            ways = expert_ways(self.router)
            works = {name: functools.partial(self.each_layer, self.experts, way) for name, way in ways.items()}
            self.by["experts"] = choices.fastest("experts", (shape.name, step.tokens), works)
            self.expert_way = ways[self.by["experts"]]
        if self.model.dtype == "fp8":
            ways = {"one_scale": (ONE_SCALE, step.tokens), "row_scales": (ROW_SCALES, step.tokens)}
            if step.tokens < FEW_ROWS:
                ways["one_scale_filled"] = (ONE_SCALE, FEW_ROWS)
            works = {name: functools.partial(self.matrices_by, *way) for name, way in ways.items()}
            self.by["matrices"] = choices.fastest("matrices", (shape.name, step.tokens), works)
            self.set_scaling(*ways[self.by["matrices"]])

    def each_layer(self, part, way):
        for layer in range(DISTINCT_LAYERS):
            part(layer, way)

    def set_scaling(self, quant, rows):
        self.matrix_rows = rows
        for activation in (self.normed, self.normed_ffn, self.attended_in, self.activated):
            activation.quant = quant

    def matrices_by(self, quant, rows):
        self.set_scaling(quant, rows)
        self.forward({"matrices"}, DISTINCT_LAYERS)

    def prompts(self, layer, way):
        new, keys, shape = self.step.new_tokens, self.step.prompt_keys, self.shape
        k, v = (part[layer][: keys * shape.kv_width].view(keys, -1) for part in (self.caches.keys, self.caches.values))
        return way(shape, self.step, self.qkv[:new, : shape.query_width], k, v, self.attended[:new])

    def decoding(self, layer, way):
        new, tokens, shape = self.step.new_tokens, self.step.tokens, self.shape
        first, last = self.step.prompt_keys * shape.kv_width, self.step.kv_tokens * shape.kv_width
        k, v = (part[layer][first:last].view(-1, shape.kv_width) for part in (self.caches.keys, self.caches.values))
        return way(shape, self.step, self.qkv[new:tokens, : shape.query_width], k, v, self.attended[new:tokens])

    def experts(self, layer, way, activate=None):
        weights = self.model.layers[layer]
        up = way.up(self.normed_ffn.values, weights["up"], self.gate_up)
        if activate:
            activate(up)
        return way.down(self.activated.values, weights["down"], self.expert_out)

    def forward(self, parts, layers):
        """Runs only `parts` of a layer, with whatever the buffers hold for the others."""
        shape, step, tokens = self.shape, self.step, self.step.tokens
        x, rows = self.x, self.matrix_rows
        traffic, matrices = "traffic" in parts, "matrices" in parts
        for layer in range(layers):
            layer %= DISTINCT_LAYERS
            weights = self.model.layers[layer]
            if traffic:
                self.normed.add_norm(x, self.residual, weights["norm"][0], tokens)
            if matrices:
                weights["qkv"].times(self.normed, self.qkv, rows)
            if traffic:
                self.rotary(shape, self.qkv, self.positions, weights["head_norms"], tokens)
                keys, values = self.caches.keys[layer], self.caches.values[layer]
                store_kv(shape, self.qkv, keys, values, self.slots, tokens)
            attended = self.attended
            if step.new_tokens and "prompts" in parts:
                attended = self.into(attended, self.prompts(layer, self.prompt_way), 0)
            if step.batch and "decoding" in parts:
                attended = self.into(attended, self.decoding(layer, self.decode_way), step.new_tokens)
            if self.model.dtype == "fp8":
                if traffic:
                    self.attended_in.quantise(attended, tokens)
            else:
                self.attended_in.values = attended
            if matrices:
                weights["o"].times(self.attended_in, x, rows)
            if traffic:
                self.normed_ffn.add_norm(x, self.residual, weights["norm"][1], tokens)
            if self.router:
                self.feed_forward_of_experts(layer, parts)
                continue
            if matrices:
                weights["up"].times(self.normed_ffn, self.gate_up, rows)
            if traffic:
                self.activated.silu_mul(self.gate_up, tokens)
            if matrices:
                weights["down"].times(self.activated, x, rows)

    def feed_forward_of_experts(self, layer, parts):
        router, out = self.router, self.expert_out
        if "matrices" in parts:
            self.model.layers[layer]["router"].times(self.normed_ffn, self.router_logits, self.step.tokens)
        if "routing" in parts:
            router.route(layer)
        activate = (lambda up: self.activated.silu_mul(up, router.pairs)) if "traffic" in parts else None
        if "matrices" in parts:
            out = self.experts(layer, self.expert_way, activate)
        elif activate:
            activate(self.gate_up)
        if "routing" in parts:
            router.combine(out, self.x)

    def into(self, whole, part, first):
        """Attention's result as the next matrix reads it. Where prompts and decoding sequences share a step, a result
        that the kernel put elsewhere is copied, which vLLM need not."""
        if self.step.kind != "mixed":
            return part
        target = whole[first : first + part.shape[0]]
        if part.data_ptr() != target.data_ptr():
            target.copy_(part)
        return whole

    def head(self):
        """The final norm and the output matrix, which has 16 bits in all models; without sampling."""
        rows = self.step.output_rows
        hidden = Activation(rows, self.shape.hidden, "bf16")
        logits = torch.empty(rows, self.shape.vocab, dtype=BF16, device=DEVICE)
        first = self.step.tokens - rows

        def work():
            hidden.add_norm(self.x[first:], self.residual[first:], self.model.final_norm, rows)
            self.model.output_matrix.times(hidden, logits, rows)

        return work


class Bench:
    """Everything that rows share."""

    def __init__(self, records, shapes, deadline):
        self.records, self.shapes, self.deadline = records, shapes, deadline
        self.clock = Clock()
        self.choices = Choices(self.clock, records)
        self.caches = self.rotary = None
        self.models, self.output_matrices = {}, {}

    def model(self, shape, dtype):
        """Made when first asked for, and kept."""
        key = (shape.name, dtype)
        if key not in self.models:
            if shape.name not in self.output_matrices:
                self.output_matrices[shape.name] = Matrix(shape.vocab, shape.hidden, "bf16")
            self.models[key] = Model(shape, dtype, self.output_matrices[shape.name])
        return self.models[key]

    def prepare(self, numbers, positions, head_dim):
        self.caches = Caches(numbers)
        self.rotary = Rotary(positions, head_dim)

    def measure(self, row):
        model, step = self.model(self.shapes[row.model], row.dtype), row.step
        run = Pass(model, step, self.caches, self.rotary, self.choices)
        shape = model.shape
        head = run.head()
        layers = DECODE_LAYERS if step.kind == "decode" else DISTINCT_LAYERS
        parts = {"matrices"} | set(PARTS)

        run.forward(parts, layers)
        head()
        if not torch.isfinite(run.residual[: step.tokens].float()).all() or not torch.isfinite(run.x).all():
            raise RuntimeError("the layers' output is not finite")

        fields = {
            "engine": model.engine(), "model": shape.name, "dtype": row.dtype, "kind": step.kind,
            "new_tokens": step.new_tokens, "cached_tokens": step.cached_tokens, "batch": step.batch,
            "context_tokens": step.context_tokens, "step": step.shape(), "tier": row.tier, "repeat": row.repeat,
            "whole": row.whole, "fits": fits(shape, row.dtype, step), "by": run.by,
        }
        if row.whole:

            def everything():
                run.forward(parts, shape.layers)
                head()

            timing = self.clock.time(everything)
            return fields | {"step_ms": timing.ms, "spread": timing.spread} | timing.clocks

        full = self.clock.time(functools.partial(run.forward, set(parts), layers))
        if step.output_rows not in model.head_times:
            model.head_times[step.output_rows] = self.clock.time(head, ms=15.0).ms
        head_ms = model.head_times[step.output_rows]
        # A part takes what the step takes less without it.
        taken, left = {}, full.ms
        absent = {"decoding": not step.batch, "prompts": not step.new_tokens, "routing": not shape.experts}
        for part in PARTS:
            if absent.get(part):
                continue
            parts = parts - {part}
            without = self.clock.time(functools.partial(run.forward, set(parts), layers), ms=40.0, least=5).ms
            taken[part] = (left - without) * shape.layers / layers
            left = without
        taken["matrices"] = left * shape.layers / layers
        taken["head"] = head_ms
        layer_ms = full.ms / layers
        return fields | {
            "step_ms": layer_ms * shape.layers + head_ms, "layer_ms": layer_ms, "head_ms": head_ms,
            "spread": full.spread, "parts": taken, "layers_in_graph": layers,
        } | self.rates(run, taken) | full.clocks

    def rates(self, run, taken):
        """What the parts reach, to be read beside the data sheet's rates times the timing model's efficiencies."""
        model, shape, step = run.model, run.shape, run.step
        work, size = step.shape(), 2 if model.dtype == "bf16" else 1
        touched = run.router.touched() if run.router else 0
        active = shape.common_parameters() + shape.per_token * shape.expert_parameters()
        weights = (shape.common_parameters() + touched * shape.expert_parameters()) * size
        amounts = {
            "matrix_tflops": ("matrices", 2 * active * step.tokens),
            "weight_tb_per_s": ("matrices", weights),
            "prompt_tflops": ("prompts", 4 * shape.query_width * work["prefill_pairs"]),
            "kv_tb_per_s": ("decoding", 2 * 2 * shape.kv_width * work["decode_context_tokens"]),
        }
        # A difference of two times may be below what can be measured.
        rates = {
            name: amount * shape.layers / taken[part] * 1e-9
            for name, (part, amount) in amounts.items()
            if taken.get(part, 0.0) > 0.0
        }
        return {"rates": rates} | ({"experts_touched": touched} if run.router else {})


# === checks ===


class Checks:
    """Every kernel beside the same in float32 on fresh random inputs, before anything is timed."""

    FORMATS = (("bf16", PLAIN, 1e-2), ("one scale", ONE_SCALE, FP8_ERROR), ("row scales", ROW_SCALES, FP8_ERROR))

    def __init__(self, bench):
        self.bench = bench
        self.failed = []
        head_dim = 128 if ON_GPU else 16
        hidden = 512 if ON_GPU else 64
        # As many experts as the rows have, which share the compiled kernels.
        experts, per_token = (128, 8) if ON_GPU else (16, 4)
        self.shape = Shape(
            "check", 1, hidden, 8, 2, head_dim, 2 * hidden, 1024, True, experts, per_token, hidden // 2
        )

    def run(self):
        parts = [self.norms, self.activations, self.rotary, self.matrices]
        for check in parts + [self.prompts, self.merge, self.decoding, self.experts]:
            try:
                check()
            except Exception as error:
                traceback.print_exc()
                self.report(check.__name__, math.nan, 0.0, brief(error))
                if ON_GPU:
                    torch.cuda.synchronize()

    def report(self, what, error, most, why=None):
        ok = error < most
        found = None if math.isnan(error) else error
        self.bench.records.write("check", of=what, relative_error=found, most=most, ok=ok, why=why)
        print(f"check {what}: " + (f"relative error {error:.1e}" if ok else f"FAILED, {why or error} (at most {most})"))
        if not ok:
            self.failed.append(what)
        return ok

    def compare(self, what, out, reference, most):
        error = ((out.float() - reference).norm() / reference.norm()).item()
        return self.report(what, error, most)

    def ways(self, what, ways, reference, most):
        """Bars the ways that are wrong or cannot be used."""
        usable = 0
        for name, work in ways.items():
            if (what, name) in self.bench.choices.barred:
                continue
            try:
                ok = self.compare(f"{what} by {name}", work(), reference, most)
            except Exception as error:
                self.bench.choices.unless_lost(what, name)
                ok = False
                self.bench.records.write("check", of=f"{what} by {name}", ok=False, why=brief(error))
                print(f"check {what} by {name}: not usable here, {brief(error)}")
            usable += ok
            if not ok:
                self.bench.choices.barred.add((what, name))
        if not usable:
            self.report(what, math.nan, most, "no way is usable")

    def activation(self, rows, width, quant):
        made = Activation(rows, width, "bf16" if quant == PLAIN else "fp8")
        made.quant = quant
        return made

    def norms(self):
        rows, width = 5, 4080 if ON_GPU else 48
        x, residual, weight = random(rows, width), random(rows, width), random(width)
        total = x.float() + residual.float()
        reference = total / (total.square().mean(1, keepdim=True) + EPS).sqrt() * weight.float()
        for name, quant, most in self.FORMATS:
            out, summed = self.activation(rows, width, quant), residual.clone()
            out.add_norm(x, summed, weight, rows)
            self.compare(f"norm, {name}", out.dequantised(rows), reference, most)
        self.compare("residual", summed, total, 1e-2)

    def activations(self):
        rows, width = 5, 1488 if ON_GPU else 48
        x = random(rows, 2 * width)
        gate, up = x.float().chunk(2, 1)
        for name, quant, most in self.FORMATS:
            out = self.activation(rows, width, quant)
            out.silu_mul(x, rows)
            self.compare(f"silu, {name}", out.dequantised(rows), F.silu(gate) * up, most)
            if quant != PLAIN:
                out.quantise(gate.to(BF16).contiguous(), rows)
                self.compare(f"quantise, {name}", out.dequantised(rows), gate, most)

    def rotary(self):
        shape, rows = self.shape, 7
        rotary = Rotary(64, shape.head_dim)
        positions = torch.randint(0, 64, (rows,), device=DEVICE)
        norms = random(2, shape.head_dim)
        qkv = random(rows, shape.qkv_width)
        heads = qkv.float().view(rows, -1, shape.head_dim)
        normed = heads / (heads.square().mean(2, keepdim=True) + EPS).sqrt()
        normed[:, : shape.heads] *= norms[0].float()
        normed[:, shape.heads :] *= norms[1].float()
        a, b = normed.chunk(2, 2)
        cosines, sines = rotary.cosines[positions][:, None], rotary.sines[positions][:, None]
        turned = torch.cat([a * cosines - b * sines, b * cosines + a * sines], 2)
        reference = torch.cat([turned[:, : -shape.kv_heads], heads[:, -shape.kv_heads :]], 1).flatten(1)
        rotary(shape, qkv, positions, norms, rows)
        self.compare("rotary", qkv, reference, 1e-2)
        keys, values = (torch.full((32 * shape.kv_width,), math.nan, dtype=BF16, device=DEVICE) for _ in range(2))
        slots = torch.randperm(32, device=DEVICE)[:rows]
        store_kv(shape, qkv, keys, values, slots, rows)
        stored = torch.cat([keys.view(32, -1)[slots], values.view(32, -1)[slots]], 1)
        self.compare("stored keys and values", stored, qkv[:, shape.query_width :].float(), 1e-6)

    def matrices(self):
        for rows in (1, 40):
            plain, matrix = Activation(max(rows, FEW_ROWS), 256, "bf16"), Matrix(384, 256, "bf16")
            out = torch.full((max(rows, FEW_ROWS), 384), math.nan, dtype=BF16, device=DEVICE)
            matrix.times(plain, out, rows)
            self.compare(f"matrix of {rows} rows", out[:rows], plain.dequantised(rows) @ matrix.dequantised().t(), 1e-2)
        rows = 40
        x, matrix = Activation(rows, 256, "fp8"), Matrix(384, 256, "fp8")
        reference = x.dequantised(rows) @ matrix.dequantised().t()

        def times(quant):
            out = torch.full((rows, 384), math.nan, dtype=BF16, device=DEVICE)
            x.quant = quant
            matrix.times(x, out, rows)
            return out

        ways = {"one_scale": functools.partial(times, ONE_SCALE), "row_scales": functools.partial(times, ROW_SCALES)}
        self.ways("matrices", ways, reference, 1e-2)
        if ("matrices", "one_scale") in self.bench.choices.barred:
            self.bench.choices.barred.add(("matrices", "one_scale_filled"))

    def prompts(self):
        shape = self.shape
        for new, cached in ((208, 0), (208, 336), (64, 0)) if ON_GPU else ((20, 0), (20, 33)):
            step = Step(new, cached)
            qkv = random(new, shape.qkv_width)
            q = qkv[:, : shape.query_width]
            k, v = random(step.prompt_keys, shape.kv_width), random(step.prompt_keys, shape.kv_width)
            heads = q.float().view(new, shape.heads, -1).transpose(0, 1)
            keys, values = (
                part.float().view(-1, shape.kv_heads, shape.head_dim).repeat_interleave(shape.group, 1).transpose(0, 1)
                for part in (k, v)
            )
            scores = heads @ keys.transpose(1, 2) * shape.head_dim**-0.5
            seen = torch.arange(step.prompt_keys, device=DEVICE) <= cached + torch.arange(new, device=DEVICE)[:, None]
            reference = (scores.masked_fill(~seen, -math.inf).softmax(2) @ values).transpose(0, 1).flatten(1)

            def by(way, step=step, q=q, k=k, v=v):
                out = torch.full((step.new_tokens, shape.query_width), math.nan, dtype=BF16, device=DEVICE)
                return way(shape, step, q, k, v, out)

            self.ways("prompts", {n: functools.partial(by, way) for n, way in PROMPT_WAYS.items()}, reference, 1e-2)

    def merge(self):
        """Of two attentions, as cuDNN leaves them: each head's sums of exponentials are in a row."""
        heads, head_dim, rows = self.shape.heads, self.shape.head_dim, 9
        left, right = random(rows, heads, head_dim), random(rows, heads, head_dim)
        lse = torch.randn(2, heads, rows, device=DEVICE)
        shares = lse.softmax(0).transpose(1, 2).unsqueeze(3)
        reference = left.float() * shares[0] + right.float() * shares[1]
        out = torch.full((rows, heads * head_dim), math.nan, dtype=BF16, device=DEVICE)
        merge_kernel[(rows,)](
            left, right, lse[0], lse[1], out, rows, left.stride(0), left.stride(1), right.stride(0), right.stride(1),
            HEADS=heads, HEAD_DIM=head_dim, num_warps=8,
        )
        self.compare("merge of two attentions", out, reference.flatten(1), 1e-2)

    def decoding(self):
        shape = self.shape
        for batch, context in ((3, 1008), (2, 64)) if ON_GPU else ((3, 150), (2, 30)):
            step = Step(batch=batch, context_tokens=context)
            q = random(batch, shape.qkv_width)[:, : shape.query_width]
            k, v = random(batch * context, shape.kv_width), random(batch * context, shape.kv_width)
            heads = q.float().view(batch, shape.group, shape.kv_heads, -1).transpose(1, 2)
            keys, values = (
                part.float().view(batch, context, shape.kv_heads, -1).transpose(1, 2) for part in (k, v)
            )
            scores = heads @ keys.transpose(2, 3) * shape.head_dim**-0.5
            reference = (scores.softmax(3) @ values).transpose(1, 2).flatten(1)

            def by(way, step=step, q=q, k=k, v=v):
                out = torch.full((step.batch, shape.query_width), math.nan, dtype=BF16, device=DEVICE)
                return way(shape, step, q, k, v, out)

            works = {name: functools.partial(by, way) for name, way in decode_ways(shape, step).items()}
            self.ways("decoding", works, reference, 1e-2)

    def experts(self):
        shape, hidden, ffn = self.shape, self.shape.hidden, self.shape.expert_ffn
        tokens = 300 if ON_GPU else 24
        router = Router(shape, tokens, 1)
        # Logits of few bits have ties, which two programs may break in different ways.
        router.logits[0] = torch.randperm(tokens * shape.experts, device=DEVICE).view(tokens, -1).float() / tokens
        router.route(0)
        x, up = random(tokens, hidden), random(shape.experts, 2 * ffn, hidden, spread=SPREAD)
        down = random(shape.experts, hidden, ffn, spread=SPREAD)
        shares, chosen = router.logits[0].float().topk(shape.per_token, 1)
        shares = shares.softmax(1)
        reference = torch.zeros(tokens, hidden, device=DEVICE)
        for choice in range(shape.per_token):
            for token in range(tokens):
                expert = chosen[token, choice]
                gate, right = (up[expert].float() @ x[token].float()).chunk(2)
                reference[token] += shares[token, choice] * (down[expert].float() @ (F.silu(gate) * right))

        def by(way):
            # Poisoned: a row that no program writes shows.
            gate_up, expert_out, out = (
                torch.full((n, width), math.nan, dtype=BF16, device=DEVICE)
                for n, width in ((router.pairs, 2 * ffn), (router.pairs, hidden), (tokens, hidden))
            )
            activated = Activation(router.pairs, ffn, "bf16")
            activated.silu_mul(way.up(x, up, gate_up), router.pairs)
            router.combine(way.down(activated.values, down, expert_out), out)
            return out

        ways = {"grouped_mm": GroupedProduct(router)}
        ways |= {name: TiledProduct(router, tiles) for name, tiles in EXPERT_TILES.items()}
        self.ways("experts", {name: functools.partial(by, way) for name, way in ways.items()}, reference, 2e-2)


# === the plan ===


@dataclass(frozen=True)
class Sizes:
    """Steps to measure."""

    prompts: tuple = (256, 512, 1024, 2048, 4096, 8192)
    cached: tuple = (0, 4096, 16384)
    batches: tuple = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    contexts: tuple = (512, 2048, 8192)
    mixed_prompts: tuple = (512, 2048)
    mixed_batches: tuple = (32, 128)
    # Over all decoding sequences. Keys and values of so many take 17 GB for the layers that are measured.
    context_tokens_max: int = 1 << 20

    def steps(self):
        """Each step with its tier: the lower, the more it is wanted."""
        first_new, long_cached = (512, 2048, 8192), self.cached[-1]
        for new in self.prompts:
            for cached in self.cached:
                if (cached == 0 and new in first_new) or (new, cached) == (2048, 16384):
                    tier = 0
                elif cached == 0 or (new, cached) in ((2048, 4096), (8192, 4096), (512, long_cached)):
                    tier = 1
                else:
                    tier = 2
                yield tier, Step(new, cached)
        for batch in self.batches:
            for context in self.contexts:
                if batch * context > self.context_tokens_max:
                    continue
                core = batch in (1, 8, 32, 128)
                if core and context == 2048:
                    tier = 0
                elif core or (context == 2048 and batch in (64, 256)):
                    tier = 1
                else:
                    tier = 2
                yield tier, Step(batch=batch, context_tokens=context)
        middle = self.contexts[len(self.contexts) // 2]
        for cached in self.cached[:2]:
            for new in self.mixed_prompts:
                for batch in self.mixed_batches:
                    tier = 2 if cached else 0 if (new, batch) in ((512, 32), (2048, 128)) else 1
                    yield tier, Step(new, cached, batch, middle)

    def positions(self):
        return max(max(self.prompts) + max(self.cached), max(self.contexts))


def plan(sizes, engines, shapes):
    """All rows, the most wanted first; those that no real engine could hold come later."""
    middle = sizes.contexts[len(sizes.contexts) // 2]
    again = [Step(batch=32 if 32 in sizes.batches else sizes.batches[-1], context_tokens=middle)]
    again.append(Step(2048 if 2048 in sizes.prompts else sizes.prompts[-1]))
    rows = []
    for model, dtype in engines:
        for tier, step in sizes.steps():
            rows.append(Row(tier, model, dtype, step))
        rows.append(Row(1, model, dtype, again[0], whole=True))
        rows += [Row(1, model, dtype, step, repeat=True) for step in again]

    def key(row):
        beyond = not fits(shapes[row.model], row.dtype, row.step)
        return (row.tier + beyond, row.repeat, engines.index((row.model, row.dtype)))

    return sorted(rows, key=key)


def quick_plan():
    """One or two rows of each kind."""
    decode, prompt = Step(batch=32, context_tokens=2048), Step(2048)
    steps = {
        ("llama-3.1-8b", "bf16"): [
            prompt, Step(2048, 16384), decode, Step(batch=1, context_tokens=2048), Step(512, 0, 32, 2048),
        ],
        ("llama-3.1-8b", "fp8"): [decode, prompt, Step(batch=1, context_tokens=2048)],
        ("qwen3-30b-a3b", "bf16"): [decode, prompt],
        ("qwen3-32b", "bf16"): [decode],
        ("qwen3-32b", "fp8"): [Step(512, 4096)],
    }
    rows = [Row(0, *engine, step) for engine, some in steps.items() for step in some]
    return rows[:5] + [Row(0, "llama-3.1-8b", "bf16", decode, whole=True)] + rows[5:]


# === the run ===


def ceilings(bench):
    """What the GPU reaches without a model: a copy, and large matrix products on random data."""
    found = {}
    size, side = (1 << 30, 8192) if ON_GPU else (1 << 16, 64)

    def rate(name, unit, amount, work):
        try:
            timing = bench.clock.time(work, ms=60.0)
            # 1e9 a millisecond are 1e12 a second.
            found[name] = {unit: amount / timing.ms * 1e-9, "spread": timing.spread} | timing.clocks
            print(f"{name}: {found[name][unit]:.3g} {unit}, {timing.clocks}")
        except Exception as error:
            found[name] = {"error": brief(error)}
            print(f"{name}: {brief(error)}")

    def product(name, dtype, quant):
        x, matrix = Activation(side, side, dtype), Matrix(side, side, dtype)
        x.quant = quant
        out = torch.empty(side, side, dtype=BF16, device=DEVICE)
        rate(f"product, {name}", "tflops", 2 * side**3, lambda: matrix.times(x, out, side))

    source = random(size)
    rate("copy", "tb_per_s", 2 * source.nbytes, functools.partial(torch.empty_like(source).copy_, source))
    product("bf16", "bf16", PLAIN)
    product("fp8", "fp8", ONE_SCALE)
    product("fp8 by rows", "fp8", ROW_SCALES)
    return found


def about():
    """The machine, as read."""
    facts = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    facts["device"] = DEVICE
    if ON_GPU:
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name, "processors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory, "l2_bytes": getattr(properties, "L2_cache_size", None),
            "cudnn": torch.backends.cudnn.version(), "cuda": torch.version.cuda,
        }
        names = "driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,power.limit,temperature.gpu"
        try:
            command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
            answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
            facts["nvidia_smi"] = dict(zip(names.split(","), answer.strip().splitlines()[0].split(", "), strict=True))
        except Exception as error:
            facts["nvidia_smi"] = brief(error)
    return facts


def tiny():
    """Shapes and sizes for a CPU: the same code, and no times worth reading."""
    base = {"layers": 3, "hidden": 64, "heads": 8, "kv_heads": 2, "head_dim": 16, "ffn": 96, "vocab": 128}
    shapes = {
        "llama-3.1-8b": Shape("llama-3.1-8b", **base, head_norms=False),
        "qwen3-32b": Shape("qwen3-32b", **base, head_norms=True),
        "qwen3-30b-a3b": Shape("qwen3-30b-a3b", **base, head_norms=True, experts=8, per_token=2, expert_ffn=32),
    }
    return shapes, Sizes((8,), (0, 24), (2,), (40,), (8,), (2,), 80)


def earlier(path):
    """Of earlier processes of this run: labels of rows that are measured or failed, and ways that are barred."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    labels = [row["label"] for row in rows if row["row"] in ("step", "error")]
    barred = [tuple(row["of"].split(" by ")) for row in rows if row["row"] == "check" and not row["ok"]]
    return labels, {way for way in barred if len(way) == 2}


def restart(records, arguments):
    """An error of the device stays with its process: another one goes on with the next row."""
    count = arguments.resume + 1
    if count > RESTARTS_MAX:
        sys.exit("the device failed too often")
    left = max(1, arguments.budget_s - (time.monotonic() - BEGAN))
    records.write("restart", count=count, budget_s=left)
    own = [sys.executable, __file__, "--out", arguments.out, "--budget-s", f"{left:.0f}", "--resume", str(count)]
    if arguments.quick:
        own.append("--quick")
    if arguments.models:
        own += ["--models", arguments.models]
    sys.stdout.flush()
    os.execv(sys.executable, own)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, help="file of results, a JSON object on each line; what it has is kept")
    parser.add_argument("--budget-s", type=float, help="seconds after which no row begins (300; 45 with --quick)")
    parser.add_argument("--quick", action="store_true", help="checks, ceilings and one or two rows of each kind")
    parser.add_argument("--cpu", action="store_true", help="tiny shapes on the CPU, to find errors in this program")
    parser.add_argument("--models", help="only these, with commas, as in qwen3-32b:fp8,llama-3.1-8b:bf16")
    parser.add_argument("--resume", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.budget_s = arguments.budget_s or (45.0 if arguments.quick else 300.0)
    return arguments


def main():
    arguments = parse_arguments()
    if ON_GPU and not torch.cuda.is_available():
        sys.exit("PyTorch finds no GPU; --cpu runs the same code with tiny shapes")
    deadline = BEGAN + arguments.budget_s
    done, barred = earlier(arguments.out) if arguments.resume else ([], set())
    records = Records(arguments.out)
    torch.manual_seed(arguments.resume)
    torch.set_grad_enabled(False)
    engines = [tuple(name.split(":")) for name in arguments.models.split(",")] if arguments.models else ENGINES
    if unknown := [":".join(engine) for engine in engines if engine not in ENGINES]:
        sys.exit(f"--models: {', '.join(unknown)} is not known; known are {', '.join(map(':'.join, ENGINES))}")
    if ON_GPU:
        shapes, sizes = {name: Shape.of(name) for name, _ in engines}, Sizes()
    else:
        shapes, sizes = tiny()

    bench = Bench(records, shapes, deadline)
    header = about()
    print(header)
    records.write("header", **header, budget_s=arguments.budget_s, quick=arguments.quick, at_s=time.monotonic() - BEGAN)
    bench.choices.barred |= barred
    checks = Checks(bench)
    try:
        checks.run()
    except Exception as error:
        print(f"the device is lost: {brief(error)}")
        restart(records, arguments)
    print(f"checks: {time.monotonic() - BEGAN:.0f} s since the start")
    if not arguments.resume:
        records.write("ceilings", **ceilings(bench))
    rows = quick_plan() if arguments.quick and ON_GPU else plan(sizes, engines, shapes)
    rows = [row for row in rows if (row.model, row.dtype) in engines and row.label() not in done]
    kv_width = max(shape.kv_width for shape in shapes.values())
    largest = max(row.step.kv_tokens for row in rows)
    bench.prepare(largest * kv_width, sizes.positions() + 1, next(iter(shapes.values())).head_dim)
    print(f"ready: {time.monotonic() - BEGAN:.0f} s since the start, {len(rows)} rows")
    errors = measure_all(bench, rows, arguments)

    records.write("end", errors=errors, failed_checks=checks.failed, seconds=time.monotonic() - BEGAN, **about())
    print(f"end after {time.monotonic() - BEGAN:.0f} s: {errors} errors, failed checks: {checks.failed or 'none'}")
    sys.exit(1 if checks.failed or errors else 0)


def measure_all(bench, rows, arguments):
    """Measures rows until the time is over. Returns the number of errors."""
    errors, slowest = 0, {}
    for index, row in enumerate(rows):
        began = time.monotonic()
        if began + 1.2 * slowest.get(row.step.kind, 0.0) > bench.deadline:
            bench.records.write("left_out", rows=[left.label() for left in rows[index:]])
            print(f"time is over: {len(rows) - index} rows are left out")
            break
        try:
            fields = bench.measure(row)
        except Exception as error:
            errors += 1
            bench.records.write("error", label=row.label(), plan=asdict(row), why=brief(error))
            print(f"{row.label()}: {brief(error)}")
            if not isinstance(error, torch.cuda.OutOfMemoryError):
                traceback.print_exc()
            del error
            if ON_GPU:
                recover(bench, arguments)
            continue
        if ON_GPU:
            # What the row's graphs held; a capture cannot take it back when memory is short.
            torch.cuda.empty_cache()
        took = time.monotonic() - began
        # The first rows of a kind compile; what they took says little about the next.
        slowest[row.step.kind] = max(0.7 * slowest.get(row.step.kind, 0.0), took)
        bench.records.write("step", label=row.label(), **fields, took_s=took, at_s=time.monotonic() - BEGAN)
        parts = " ".join(f"{name} {ms:.2f}" for name, ms in fields.get("parts", {}).items())
        rates = " ".join(f"{name} {rate:.3g}" for name, rate in fields.get("rates", {}).items())
        by = ",".join(fields["by"].values())
        time_ms = f"{fields['step_ms']:.3f} ms ±{fields['spread']:.1%}"
        print(f"{row.label()}: {time_ms} | {parts} | {rates} | {by} | {took:.1f} s")
    return errors


def recover(bench, arguments):
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:
        print(f"the device is lost: {brief(error)}")
        restart(bench.records, arguments)


if __name__ == "__main__":
    main()
