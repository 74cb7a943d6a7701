#!/bin/sh
# Installs vLLM's environment (see e2e/vllm/setup.sh) and, beside it, NIXL and Mooncake, which move KV blocks from one server to
# another. Does nothing where that is done already. They take 230 and 140 MB of disk, from PyPI.
#
# Mooncake wants libibverbs.so.1 (Debian: apt-get install libibverbs1), though it is used over TCP; it is left out without.
set -eu

# torch's wheel says CUDA 13, so that NIXL looks for its module of that name. No CUDA library is used.
NIXL=1.5.1
# The one that wants no CUDA library.
MOONCAKE=0.3.13.post1

here=$(cd "$(dirname "$0")" && pwd)
"$here/../vllm/setup.sh"
work=$(cd "${E2E_WORK:-$here/../.work}" && pwd)

# Into a folder of its own: vLLM's environment stays what its requirements say. Without dependencies, which are CUDA's libraries.
fetch() {
    folder=$work/$1
    shift
    echo "setup: PyPI packages: $*"
    rm -rf "$folder"
    UV_LINK_MODE=copy "$work/venv/bin/uv" pip install --quiet --python "$work/venv/bin/python" --no-deps --target "$folder" "$@"
}

if [ "$(cat "$work/nixl/installed" 2> /dev/null || true)" != "$NIXL" ]; then
    fetch nixl "nixl==$NIXL" "nixl-cu13==$NIXL"
    echo "$NIXL" > "$work/nixl/installed"
fi

want=$MOONCAKE-$(sha256sum < "$here/mooncake_on_cpu.py" | cut -d' ' -f1)
if ! "$work/venv/bin/python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2> /dev/null; then
    echo "setup: Mooncake is left out, libibverbs.so.1 is missing: apt-get install libibverbs1" >&2
elif [ "$(cat "$work/mooncake/installed" 2> /dev/null || true)" != "$want" ]; then
    fetch mooncake "mooncake-transfer-engine-non-cuda==$MOONCAKE"
    # vLLM finds its plugins by what distributions say of themselves.
    claim=$work/mooncake/mooncake_on_cpu-0.dist-info
    mkdir -p "$claim"
    cp "$here/mooncake_on_cpu.py" "$work/mooncake/"
    printf 'Metadata-Version: 2.1\nName: mooncake-on-cpu\nVersion: 0\n' > "$claim/METADATA"
    printf '[vllm.general_plugins]\nmooncake_on_cpu = mooncake_on_cpu:register\n' > "$claim/entry_points.txt"
    echo "$want" > "$work/mooncake/installed"
fi
echo "setup: $work is complete"
