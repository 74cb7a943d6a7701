#!/bin/sh
# Installs the two SDKs into e2e/.work/sdk (or $E2E_WORK/sdk). Does nothing where that is done already.
# Wants Python 3.11 or later with venv. Fetches about 15 MB from PyPI.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
work=${E2E_WORK:-$here/../.work}
python=${PYTHON:-python3}
mkdir -p "$work"
work=$(cd "$work" && pwd)

want=$(sha256sum < "$here/requirements.txt")
[ "$(cat "$work/sdk/installed" 2> /dev/null || true)" = "$want" ] && exit 0
rm -rf "$work/sdk"
"$python" -m venv "$work/sdk"
"$work/sdk/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
echo "$want" > "$work/sdk/installed"
