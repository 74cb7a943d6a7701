#!/usr/bin/env bash
# packaging/wheel.sh [DIRECTORY]: builds the Python package's wheel into DIRECTORY (default: target/wheels).
#
# The wheel has the module (one build for Python 3.10 and later) and the program, stripped, which pip puts on the PATH.
# PROFILE=dev builds both quickly; KVLANE=FILE packs that program instead of building one. Needs cargo and python3;
# maturin is taken from the PATH, or from PyPI into target/maturin.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
out=${1:-$target/wheels}
mkdir -p "$out"
out=$(cd "$out" && pwd)
profile=${PROFILE:-release}
program=${KVLANE:+$(realpath "$KVLANE")}
cd "$root/crates/kvlane-py"

maturin=$(command -v maturin || true)
if [ -z "$maturin" ]; then
    maturin=$target/maturin/bin/maturin
    [ -x "$maturin" ] || {
        python3 -m venv "$target/maturin"
        "$target/maturin/bin/pip" install --quiet --disable-pip-version-check 'maturin>=1.9.4,<2'
    }
fi

if [ -z "$program" ]; then
    cargo build --locked --profile "$profile" --package kvlane --bin kvlane
    program=$target/$([ "$profile" = dev ] && echo debug || echo "$profile")/kvlane
fi
mkdir -p kvlane.data/scripts
strip -o kvlane.data/scripts/kvlane "$program"

# maturin looks at the module alone: the oldest glibc that the wheel is for is the one that the program needs.
tag=()
glibc=$(grep -aoE 'GLIBC_2\.[0-9]+' kvlane.data/scripts/kvlane | sort -t. -k2 -n | tail -1 | cut -d. -f2)
[ -z "$glibc" ] || tag=(--compatibility "manylinux_2_$glibc")
"$maturin" build --locked --profile "$profile" --out "$out" "${tag[@]}"
