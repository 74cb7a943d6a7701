#!/usr/bin/env bash
# What the image holds, as a directory: the binary for one architecture, its bill of materials and the licence. The Dockerfile's
# first stage runs it, and so does rehearse.sh.
#
#     deploy/image/build.sh amd64|arm64 DIRECTORY [PROFILE]
#
# The other architecture than the machine's is cross-compiled: it needs `rustup target add` for its target, and Debian's C compiler
# for it (gcc-aarch64-linux-gnu and libc6-dev-arm64-cross, or gcc-x86-64-linux-gnu and libc6-dev-amd64-cross), because ring and
# mimalloc are partly C. The target glibc, not musl: its resolver asks again over TCP when a headless Service has many pods.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
architecture=${1:?usage: build.sh amd64|arm64 DIRECTORY [PROFILE]}
out=${2:?usage: build.sh amd64|arm64 DIRECTORY [PROFILE]}
profile=${3:-release}
case $architecture in
    amd64) machine=x86_64 ;;
    arm64) machine=aarch64 ;;
    *) echo "build.sh: no image for $architecture: amd64 or arm64" >&2; exit 2 ;;
esac
target=$machine-unknown-linux-gnu
if [ "$(uname -m)" != "$machine" ]; then
    export "CARGO_TARGET_$(tr a-z- A-Z_ <<< "$target")_LINKER=$machine-linux-gnu-gcc" "CC_${target//-/_}=$machine-linux-gnu-gcc"
fi
cargo build --locked --profile "$profile" --package kvlane --target "$target"
built=${CARGO_TARGET_DIR:-target}/$target/$([ "$profile" = dev ] && echo debug || echo "$profile")/kvlane
install -D --mode 755 "$built" "$out/usr/local/bin/kvlane"
install -D --mode 644 LICENSE "$out/usr/share/doc/kvlane/LICENSE"
python3 .ci/sbom.py "$target" > "$out/usr/share/doc/kvlane/kvlane.cdx.json"
# Snapshots and recordings: a volume is mounted over it. Without one it can be written all the same, in a container that may.
install -d --mode 755 "$out/var/lib/kvlane"
[ "$(id -u)" != 0 ] || chown 65532:65532 "$out/var/lib/kvlane"
