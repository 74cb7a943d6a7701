#!/usr/bin/env python3
"""Condenses what `step_times.py` wrote into `crates/kvlane-lab/data/steps-h100.json`.

    python3 bench/gpu/steps_data.py steps.jsonl 2026-11-26 > crates/kvlane-lab/data/steps-h100.json

Left out are steps that one GPU could not hold (`fits` is false), and the second measurements and whole models, of which
only the largest difference from the first measurement is kept.
"""

import json
import sys

SORTED_BY = ("batch", "context_tokens", "new_tokens", "cached_tokens")


def shape(row):
    """The step of a row, from its tokens and sequences: the data file has only these."""
    new, cached, seqs = row["new_tokens"], row["cached_tokens"], row["batch"]
    return {
        "prefill_tokens": new,
        "prefill_pairs": new * cached + new * (new + 1) // 2,
        "prefill_context_tokens": cached,
        "decode_seqs": seqs,
        "decode_context_tokens": seqs * row["context_tokens"],
        "decode_shared_tokens": 0,
        "finished_prefills": int(new > 0),
    }


def digits(value):
    return float(f"{value:.4g}")


def condensed(row):
    if shape(row) != row["step"]:
        raise SystemExit(f"{row['label']}: its step is not that of its tokens and sequences")
    parts = row["parts"]
    kept = {
        "engine": row["engine"],
        "new_tokens": row["new_tokens"],
        "cached_tokens": row["cached_tokens"],
        "seqs": row["batch"],
        "context_tokens": row["context_tokens"],
        "step_ms": digits(row["step_ms"]),
        "matrices_ms": digits(parts["matrices"]),
        "head_ms": digits(parts["head"]),
        "prompts_ms": digits(parts.get("prompts", 0)),
        "decoding_ms": digits(parts.get("decoding", 0)),
        "rest_ms": digits(parts["traffic"] + parts.get("routing", 0)),
    }
    return {key: value for key, value in kept.items() if value}


def key(row):
    return row["engine"], tuple(row["step"].items())


def main():
    path, date = sys.argv[1:]
    with open(path) as lines:
        rows = [json.loads(line) for line in lines]
    header = next(row for row in rows if row["row"] == "header")
    ceilings = next(row for row in rows if row["row"] == "ceilings")
    steps = [row for row in rows if row["row"] == "step"]
    first = [row for row in steps if not row["whole"] and not row["repeat"]]
    by_step = {key(row): row["step_ms"] for row in first}

    def largest_percent(kind):
        return digits(max(abs(100 * (row["step_ms"] / by_step[key(row)] - 1)) for row in steps if row[kind]))

    kept = sorted(
        (row for row in first if row["fits"]),
        key=lambda row: (row["engine"], *(row[name] for name in SORTED_BY)),
    )
    clocks = [row["sm_mhz"] for row in kept]
    fields = {
        "about": "Steps of models with random weights on one GPU, without the host's part; `bench/gpu/step_times.py`. "
        "Kernels are those of cuBLAS, PyTorch, cuDNN and Triton, not vLLM's; keys and values are contiguous; "
        "experts are chosen at random",
        "date": date,
        "gpu": header["gpu"],
        "software": f"PyTorch {header['torch']}, Triton {header['triton']}, cuDNN {header['cudnn']}",
        "sm_mhz": [min(clocks), max(clocks)],
        "power_limit": header["nvidia_smi"]["power.limit"],
        "copy_tb_per_s": digits(ceilings["copy"]["tb_per_s"]),
        "product_bf16_tflops": digits(ceilings["product, bf16"]["tflops"]),
        "product_fp8_tflops": digits(ceilings["product, fp8"]["tflops"]),
        "repeat_percent": largest_percent("repeat"),
        "whole_percent": largest_percent("whole"),
        "left_out_not_fitting": sum(not row["fits"] for row in first),
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}," for name, value in fields.items()]
    lines.append('  "rows": [')
    lines.append(",\n".join(f"    {json.dumps(condensed(row))}" for row in kept))
    print("\n".join(["{", *lines, "  ]", "}"]))


if __name__ == "__main__":
    main()
