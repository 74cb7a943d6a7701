#!/usr/bin/env bash
# A Debian package: the binary, systemd units, completions, man pages and /etc/kvlane/kvlane.yaml. dpkg-deb makes it.
#
#   packaging/deb.sh BINARY OUT
#
# The package starts nothing: the configuration has no workers yet.
set -euo pipefail
binary=$(realpath "$1")
mkdir -p "$2"
out=$(cd "$2" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
architecture=$(dpkg --print-architecture)
# The oldest C library that has everything that the binary names.
libc=$(grep -aoE 'GLIBC_2\.[0-9]+' "$binary" | sort -uV | tail -1 | cut -d_ -f2)
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2> /dev/null || date +%s)}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
packaging/stage.sh "$binary" "$work/staged"
root=$work/root
install -D -m 755 "$work/staged/kvlane" "$root/usr/bin/kvlane"
for unit in "$work"/staged/systemd/*; do
    install -D -m 644 "$unit" "$root/usr/lib/systemd/system/$(basename "$unit")"
done
install -D -m 644 packaging/deb/kvlane.yaml "$root/etc/kvlane/kvlane.yaml"
install -D -m 644 "$work/staged/completions/kvlane.bash" "$root/usr/share/bash-completion/completions/kvlane"
install -D -m 644 "$work/staged/completions/kvlane.zsh" "$root/usr/share/zsh/vendor-completions/_kvlane"
install -D -m 644 "$work/staged/completions/kvlane.fish" "$root/usr/share/fish/vendor_completions.d/kvlane.fish"
for page in "$work"/staged/man/*.1; do
    install -D -m 644 "$page" "$root/usr/share/man/man1/$(basename "$page")"
done
gzip -n9 "$root"/usr/share/man/man1/*
documents=$root/usr/share/doc/kvlane
install -D -m 644 packaging/deb/copyright "$documents/copyright"
install -m 644 "$work/staged/kvlane.example.yaml" README.md "$documents/"
gzip -n9c CHANGELOG.md > "$documents/changelog.gz"
mkdir -m 755 "$root/DEBIAN"
size=$(du -sk --exclude=DEBIAN "$root" | cut -f1)
sed -e "s/@VERSION@/$version/" -e "s/@ARCHITECTURE@/$architecture/" -e "s/@SIZE@/$size/" -e "s/@LIBC@/$libc/" packaging/deb/control.in > "$root/DEBIAN/control"
echo /etc/kvlane/kvlane.yaml > "$root/DEBIAN/conffiles"
install -m 755 packaging/deb/postinst packaging/deb/prerm packaging/deb/postrm "$root/DEBIAN/"
(cd "$root" && find . -type f ! -path './DEBIAN/*' -printf '%P\0' | sort -z | xargs -0 md5sum > DEBIAN/md5sums)
find "$root" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
dpkg-deb --root-owner-group --build "$root" "$out/kvlane_${version}_${architecture}.deb" > /dev/null
echo "$out/kvlane_${version}_${architecture}.deb"
