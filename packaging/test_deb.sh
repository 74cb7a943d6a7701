#!/usr/bin/env bash
# Installs a Debian package into an empty root, looks at what is there, and removes it again. Needs root, or fakeroot.
#
#   packaging/test_deb.sh FILE.deb
set -euo pipefail
[ "$(id -u)" = 0 ] || exec fakeroot "$0" "$@"
deb=$(realpath "$1")
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
fail() {
    echo "FAILED: $*" >&2
    exit 1
}
mkdir -p "$root"/var/lib/dpkg/{info,updates}
touch "$root/var/lib/dpkg/status"
# The libraries that it depends on are of this machine. Its scripts run outside of the root, where systemd is, or is not.
package() {
    dpkg --root="$root" --force-not-root --force-depends --force-script-chrootless "$@"
}

package --install "$deb" | tee "$root/said"
grep -q "systemctl enable --now kvlane.socket" "$root/said" || fail "it does not say what to do next"
"$root/usr/bin/kvlane" --version | grep -q "^kvlane $(dpkg-deb -f "$deb" Version)$" || fail "another version"
for file in usr/lib/systemd/system/kvlane.socket usr/lib/systemd/system/kvlane@.service etc/kvlane/kvlane.yaml \
    usr/share/man/man1/kvlane.1.gz usr/share/man/man1/kvlane-serve.1.gz usr/share/bash-completion/completions/kvlane \
    usr/share/zsh/vendor-completions/_kvlane usr/share/fish/vendor_completions.d/kvlane.fish usr/share/doc/kvlane/copyright; do
    [ -s "$root/$file" ] || fail "$file is missing"
done
grep -q "^ExecStart=/usr/bin/kvlane serve --config /etc/kvlane/kvlane.yaml" "$root/usr/lib/systemd/system/kvlane@.service" \
    || fail "the service starts something else"
bash -n "$root/usr/share/bash-completion/completions/kvlane" || fail "completions of bash"
zcat "$root/usr/share/man/man1/kvlane-serve.1.gz" > "$root/page" && grep -q 'worker\\-urls' "$root/page" || fail "the man page has no flags"
echo "workers: [{url: 'http://127.0.0.1:8001'}]" > "$root/etc/kvlane/kvlane.yaml"
"$root/usr/bin/kvlane" check --config "$root/etc/kvlane/kvlane.yaml" > /dev/null || fail "the configuration is refused"
if command -v systemd-analyze > /dev/null; then
    # It looks for the program of the unit at its place.
    sed "s|/usr/bin/kvlane|$root/usr/bin/kvlane|" "$root/usr/lib/systemd/system/kvlane@.service" > "$root/kvlane@29000.service"
    cp "$root/usr/lib/systemd/system/kvlane.socket" "$root/"
    systemd-analyze verify "$root/kvlane@29000.service" "$root/kvlane.socket" || fail "systemd does not take the units"
    systemd-analyze security --offline=true --threshold=30 "$root/kvlane@29000.service" | tail -1
fi

# A second installation keeps what the user wrote.
package --install --force-confold "$deb" > "$root/said"
grep -q 8001 "$root/etc/kvlane/kvlane.yaml" || fail "the configuration was replaced"
package --remove kvlane > /dev/null
[ ! -e "$root/usr/bin/kvlane" ] || fail "the program was not removed"
[ -e "$root/etc/kvlane/kvlane.yaml" ] || fail "the configuration was removed with the program"
package --purge kvlane > /dev/null
[ ! -e "$root/etc/kvlane/kvlane.yaml" ] || fail "the configuration was not purged"
echo "$(basename "$deb"): installed, updated, removed, purged"
