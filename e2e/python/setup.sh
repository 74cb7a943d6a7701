#!/bin/sh
# Builds the Python package's wheel and installs it into a fresh e2e/.work/python (or $E2E_WORK/python), with what the tests need.
#
# PROFILE=dev builds quickly, KVLANE=FILE packs a program that is there: see packaging/wheel.sh. PYTHON names another
# interpreter than python3. Wants PyPI.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
work=${E2E_WORK:-$here/../.work}
mkdir -p "$work"
work=$(cd "$work" && pwd)

rm -rf "${work:?}/python" "$work/wheel"
"$here/../../packaging/wheel.sh" "$work/wheel"
"${PYTHON:-python3}" -m venv "$work/python"
"$work/python/bin/pip" install --quiet --disable-pip-version-check "$work"/wheel/kvlane-*.whl
"$work/python/bin/python" -c 'import kvlane, sys; sys.exit(bool({"pandas", "polars", "numpy"} & set(sys.modules)))'
"$work/python/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
