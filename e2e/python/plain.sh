#!/bin/sh
# Builds the Python module without a wheel and runs those of its router's tests that need nothing but Python 3.10: for CI.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    echo "there is no python3 of 3.10 or later: the tests of the Python module are left out" >&2
    exit 0
fi
cd "$root"
cargo build --locked --package kvlane-py
package=$(mktemp -d)
trap 'rm -rf "$package"' EXIT
cp -R crates/kvlane-py/python/kvlane "$package/kvlane"
cp "${CARGO_TARGET_DIR:-target}/debug/libkvlane_py.so" "$package/kvlane/_core.abi3.so"
PYTHONPATH=$package python3 "$here/test_router.py"
