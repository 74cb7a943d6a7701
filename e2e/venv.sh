#!/bin/sh
# e2e/venv.sh SUITE: installs what e2e/SUITE/requirements.txt names into e2e/.work/SUITE (or $E2E_WORK/SUITE). Does nothing
# where that is done already. Wants Python 3.11 or later with venv, and PyPI.
set -eu

suite=$1
here=$(cd "$(dirname "$0")" && pwd)
work=${E2E_WORK:-$here/.work}
python=${PYTHON:-python3}
mkdir -p "$work"
work=$(cd "$work" && pwd)

want=$(sha256sum < "$here/$suite/requirements.txt")
[ "$(cat "$work/$suite/installed" 2> /dev/null || true)" = "$want" ] && exit 0
rm -rf "${work:?}/$suite"
"$python" -m venv "$work/$suite"
"$work/$suite/bin/pip" install --quiet --disable-pip-version-check -r "$here/$suite/requirements.txt"
echo "$want" > "$work/$suite/installed"
