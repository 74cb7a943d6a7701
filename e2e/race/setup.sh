#!/bin/sh
# Installs what race.py compares kvlane with. Does nothing where that is done already.
#
#   Debian packages, where the program is missing (root or sudo):  wrk, nginx-light, haproxy
#   PyPI packages, into e2e/race/.work/venv:                       sglang-router, vllm-router
#
# RACE_WORK names another directory than e2e/race/.work, PYTHON another interpreter than python3.
set -eu

SGLANG_ROUTER=0.3.2
VLLM_ROUTER=0.1.17

here=$(cd "$(dirname "$0")" && pwd)
work=${RACE_WORK:-$here/.work}
python=${PYTHON:-python3}
# Where Debian puts daemons; not everybody's PATH has it.
PATH=$PATH:/usr/sbin:/sbin

missing=
for program in wrk nginx haproxy; do
    command -v "$program" > /dev/null || missing="$missing $program"
done
if [ -n "$missing" ]; then
    packages=$(printf %s "$missing" | sed 's/nginx/nginx-light/')
    command -v apt-get > /dev/null || {
        echo "setup: install these yourself, this machine has no apt-get:$missing" >&2
        exit 1
    }
    root=
    [ "$(id -u)" = 0 ] || root=sudo
    echo "setup: Debian packages:$packages"
    $root apt-get update -qq
    # shellcheck disable=SC2086
    $root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages > /dev/null
fi

# What is installed is known by what was asked for.
want="sglang-router==$SGLANG_ROUTER vllm-router==$VLLM_ROUTER"
mkdir -p "$work"
if [ "$(cat "$work/installed" 2> /dev/null || true)" != "$want" ]; then
    echo "setup: PyPI packages: $want"
    rm -rf "$work/installed" "$work/venv"
    "$python" -m venv "$work/venv" || {
        echo "setup: '$python -m venv' failed; on Debian: apt-get install python3-venv" >&2
        exit 1
    }
    # shellcheck disable=SC2086
    "$work/venv/bin/pip" install --quiet --disable-pip-version-check $want
    printf '%s\n' "$want" > "$work/installed"
fi
echo "setup: $work is complete"
