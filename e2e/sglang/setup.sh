#!/bin/sh
# Installs SGLang beside vLLM for CPU, in e2e/.work/sglang (or under $E2E_WORK). Does nothing where that is done already.
#
# SGLang is not made for machines without a GPU. It takes torch and what else it can from vLLM's environment
# (e2e/vllm/setup.sh, which this runs), and a stand-in for its CUDA kernels. Wants what that wants.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
"$here/../vllm/setup.sh"
work=$(cd "${E2E_WORK:-$here/../.work}" && pwd)

want=$(cd "$here" && cat requirements.txt kernel_stub.py setup.sh "$work/installed" | sha256sum | cut -d' ' -f1)
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
    echo "$want" > "$work/sglang/installed"
fi
echo "setup: $work/sglang is complete"
