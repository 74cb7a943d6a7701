#!/usr/bin/env bash
# A directory with the stripped binary and what belongs to it: completions, man pages, systemd units, an example, documents.
#
#   packaging/stage.sh BINARY DIRECTORY
set -euo pipefail
binary=$(realpath "$1")
mkdir -p "$2"
dir=$(cd "$2" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$dir"/{man,completions,systemd}
install -m 755 "$binary" "$dir/kvlane"
strip "$dir/kvlane" 2> /dev/null || true
"$binary" man "$dir/man"
for shell in bash zsh fish; do
    "$binary" completions "$shell" > "$dir/completions/kvlane.$shell"
done
cp deploy/systemd/* "$dir/systemd/"
sed -i 's|/usr/local/bin/kvlane|/usr/bin/kvlane|' "$dir"/systemd/*
cp config/example.yaml "$dir/kvlane.example.yaml"
cp README.md CHANGELOG.md LICENSE "$dir/"
find "$dir" -type f ! -name kvlane -exec chmod 644 {} +
