#!/bin/sh
# Installs SGLang beside vLLM for CPU, in e2e/.work/sglang (or under $E2E_WORK). Does nothing where that is done already.
#
# SGLang is not made for machines without a GPU. It takes torch and what else it can from vLLM's environment
# (e2e/vllm/setup.sh, which this runs), and stand-ins for its CUDA kernels and for HiCache's copies. Wants what that wants.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
"$here/../vllm/setup.sh"
work=$(cd "${E2E_WORK:-$here/../.work}" && pwd)

want=$(cd "$here" && cat requirements.txt kernel_stub.py hicache_on_cpu.py setup.sh "$work/installed" | sha256sum | cut -d' ' -f1)
if [ "$(cat "$work/sglang/installed" 2> /dev/null || true)" != "$want" ]; then
    echo "setup: packages (300 MB)"
    rm -rf "$work/sglang"
    python=$work/venv/bin/python
    "$python" -m venv "$work/sglang"
    UV_LINK_MODE=copy "$work/venv/bin/uv" pip install --quiet --python "$work/sglang/bin/python" --no-deps \
        -r "$here/requirements.txt"
    packages() { "$1" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])'; }
    ours=$(packages "$work/sglang/bin/python")
    packages "$python" > "$ours/vllm.pth"
    mkdir -p "$ours/sgl_kernel"
    cp "$here/kernel_stub.py" "$ours/sgl_kernel/__init__.py"
    # SGLang finds its plugins by what distributions say of themselves. In a folder of its own, for servers that want it.
    claim=$work/sglang/hicache/hicache_on_cpu-0.dist-info
    mkdir -p "$claim"
    cp "$here/hicache_on_cpu.py" "$work/sglang/hicache/"
    printf 'Metadata-Version: 2.1\nName: hicache-on-cpu\nVersion: 0\n' > "$claim/METADATA"
    printf '[sglang.srt.plugins]\nhicache_on_cpu = hicache_on_cpu:register\n' > "$claim/entry_points.txt"
    echo "$want" > "$work/sglang/installed"
fi
echo "setup: $work/sglang is complete"
