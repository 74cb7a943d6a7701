#!/bin/sh
# Installs schemathesis into e2e/.work/api (or $E2E_WORK/api). Does nothing where that is done already.
# Wants Python 3.11 or later with venv. Fetches about 30 MB from PyPI.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
work=${E2E_WORK:-$here/../.work}
python=${PYTHON:-python3}
mkdir -p "$work"
work=$(cd "$work" && pwd)

want=$(sha256sum < "$here/requirements.txt")
[ "$(cat "$work/api/installed" 2> /dev/null || true)" = "$want" ] && exit 0
rm -rf "$work/api"
"$python" -m venv "$work/api"
"$work/api/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
echo "$want" > "$work/api/installed"
