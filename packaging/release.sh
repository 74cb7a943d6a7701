#!/usr/bin/env bash
# Everything that a release has, for this machine's architecture: a tarball, a Debian package, what the binary is built from, the
# text of a Homebrew formula, and checksums of all.
#
#   packaging/release.sh [OUT]        OUT is target/release-files by default
#
# KVLANE=FILE takes that binary instead of building one. SOURCE_DATE_EPOCH is the time of all files in the tarball and the
# package; it is the time of the last commit by default, so that the same commit and binary give the same bytes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-target/release-files}
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
target=$(rustc -vV | sed -n 's/^host: //p')
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2> /dev/null || date +%s)}
rm -rf "$out" && mkdir -p "$out"
out=$(cd "$out" && pwd)

if [ -z "${KVLANE:-}" ]; then
    cargo build --release --locked -p kvlane
    KVLANE=${CARGO_TARGET_DIR:-target}/release/kvlane
fi

name=kvlane-$version-$target
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
packaging/stage.sh "$KVLANE" "$work/$name"
# Of a tarball, the user chooses the place of the binary.
sed -i 's|/usr/bin/kvlane|/usr/local/bin/kvlane|' "$work/$name"/systemd/*

tar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner -C "$work" -cf - "$name" | gzip -n9 > "$out/$name.tar.gz"
if command -v dpkg-deb > /dev/null; then
    packaging/deb.sh "$KVLANE" "$out"
else
    echo "dpkg-deb is not here: no Debian package" >&2
fi
python3 .ci/sbom.py "$target" > "$out/$name.cdx.json"
git archive --format=tar --prefix="kvlane-$version/" HEAD | gzip -n9 > "$out/kvlane-$version-source.tar.gz"
source_sha256=$(sha256sum "$out/kvlane-$version-source.tar.gz" | cut -d' ' -f1)
sed -e "s/@VERSION@/$version/g" -e "s/@SHA256@/$source_sha256/" packaging/kvlane.rb.in > "$out/kvlane.rb"
(cd "$out" && sha256sum -- *.tar.gz *.json *.rb $(ls -- *.deb 2> /dev/null) > SHA256SUMS)
ls -l "$out"
