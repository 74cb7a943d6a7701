#!/bin/sh
# Installs the load generators that test_loadgens.py runs, each in an environment of its own under e2e/.work/loadgens.
#
#   AIPerf           Python 3.10 or later
#   inference-perf   Python 3.12 or later; left out, and said so, where there is none (PYTHON312 names one)
#
# `vllm bench serve` comes with vLLM: e2e/vllm/setup.sh.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
"$here/../venv.sh" loadgens/aiperf

for python in ${PYTHON312:-} python3.14 python3.13 python3.12 python3; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2> /dev/null; then
        PYTHON=$python "$here/../venv.sh" loadgens/inference-perf
        exit 0
    fi
done
echo "setup: inference-perf is left out: it wants Python 3.12 or later, name one in PYTHON312" >&2
