#!/bin/sh
# Installs vLLM's environment (see e2e/vllm/setup.sh) and, beside it, the packages of its gRPC server, into e2e/.work/grpc (or
# under $E2E_WORK): 8 MB from PyPI. Does nothing where that is done already.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
"$here/../vllm/setup.sh"
work=$(cd "${E2E_WORK:-$here/../.work}" && pwd)

want=$(cat "$here/requirements.txt" "$work/installed" | sha256sum | cut -d' ' -f1)
if [ "$(cat "$work/grpc/installed" 2> /dev/null || true)" != "$want" ]; then
    rm -rf "$work/grpc"
    # Without dependencies: the rest is in vLLM's environment.
    UV_LINK_MODE=copy "$work/venv/bin/uv" pip install --quiet --python "$work/venv/bin/python" --no-deps --target "$work/grpc" \
        -r "$here/requirements.txt"
    echo "$want" > "$work/grpc/installed"
fi
echo "setup: $work/grpc is complete"
