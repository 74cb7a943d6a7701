#!/bin/sh
# Installs vLLM's environment (see setup.sh) and, beside it, LMCache, a store of KV blocks. Does nothing where that is done already.
# 17 MB from PyPI.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
"$here/setup.sh"
work=$(cd "${E2E_WORK:-$here/../.work}" && pwd)

# Without their dependencies, of which vLLM's environment has what runs without a GPU.
packages="lmcache==0.5.6 sortedcontainers==2.4.0 opentelemetry-exporter-prometheus==0.66b2"
if [ "$(cat "$work/lmcache/installed" 2> /dev/null || true)" != "$packages" ]; then
    echo "setup: PyPI packages: $packages"
    rm -rf "$work/lmcache"
    # shellcheck disable=SC2086
    UV_LINK_MODE=copy "$work/venv/bin/uv" pip install --quiet --python "$work/venv/bin/python" --no-deps \
        --target "$work/lmcache" $packages
    echo "$packages" > "$work/lmcache/installed"
fi
echo "setup: $work/lmcache is complete"
