#!/usr/bin/env bash
# The image without a container runtime: its files, with the libraries that its base has, as the root of a process with uid 65532,
# read-only but for the state's directory, in namespaces of its own. Checks that kvlane starts there, serves, picks, writes its
# snapshots, and ends in order.
#
#     deploy/image/rehearse.sh [BINARY]
#
# Without BINARY it builds the image's files (build.sh, PROFILE=release unless set). Needs root, for namespaces and chroot; Linux,
# util-linux, python3, curl, and for the library check objdump. What only a runtime can check is in docs/kubernetes.md.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ "${1:-}" != inside ]; then
    [ "$(id -u)" = 0 ] || { echo "rehearse.sh: run it as root: namespaces and chroot need it" >&2; exit 2; }
    root=$(mktemp -d)
    chmod 755 "$root"
    trap 'rm -rf "$root"' EXIT
    if [ $# -gt 0 ]; then
        install -D --mode 755 "$1" "$root/usr/local/bin/kvlane"
        install -d "$root/var/lib/kvlane"
    else
        case $(uname -m) in x86_64) architecture=amd64 ;; aarch64) architecture=arm64 ;; esac
        "$here/build.sh" "$architecture" "$root" "${PROFILE:-release}"
    fi
    # Own mounts, processes and network: nothing of the machine is changed, and no port is taken.
    unshare --mount --pid --net --ipc --uts --fork --kill-child --mount-proc "$here/rehearse.sh" inside "$root"
    exit
fi

root=$2
log=$root.log
trap 'rm -f "$log" "$log.body"' EXIT
fail() { echo "FAILED: $*" >&2; [ ! -s "$log" ] || tail -5 "$log" >&2; exit 1; }
binary=$root/usr/local/bin/kvlane

# === The base: what gcr.io/distroless/cc-debian12 has and the binary asks for ===

# Debian 12 has glibc 2.36. Its libraries that the base holds:
held='^(ld-linux-(x86-64|aarch64)\.so\.[12]|lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp|atomic)\.so\.[0-9]+)$'
while read -r name path; do
    [[ $name =~ $held ]] || fail "the binary needs $name, which the base does not have"
    install -D --mode 755 "$path" "$root$path"
done < <(ldd "$binary" | awk '$2 == "=>" { print $1, $3 } $1 ~ /^\// { n = split($1, part, "/"); print part[n], $1 }')
newest=$(objdump -T "$binary" | grep -oE 'GLIBC_[0-9.]+' | sort -uV | tail -1)
[ "$(printf '%s\nGLIBC_2.36\n' "$newest" | sort -V | tail -1)" = GLIBC_2.36 ] || fail "the binary needs $newest; Debian 12 has GLIBC_2.36"
mkdir -p "$root"/{etc/ssl/certs,etc/kvlane,proc,dev,tmp}
echo 'nonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin' > "$root/etc/passwd"
echo 'hosts: files dns' > "$root/etc/nsswitch.conf"
echo '127.0.0.1 localhost' > "$root/etc/hosts"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/" 2> /dev/null || true

# What the chart mounts: a configuration, and hashes of keys.
printf 'operator admin %s\n' "$(printf rehearsal-operator | sha256sum | cut -d' ' -f1)" > "$root/etc/kvlane/keys"
cat > "$root/etc/kvlane/config.yaml" <<'YAML'
server: {host: 0.0.0.0, port: 30000, shutdown_delay: 1s, shutdown_grace: 10s}
metrics: {host: 0.0.0.0, port: 29000}
epp: {host: 0.0.0.0}
auth: {keys_file: /etc/kvlane/keys, open_clients: true}
workers: [{url: "http://127.0.0.1:8000"}]
routing: {index_snapshot: /var/lib/kvlane/index.snapshot}
log: {format: json}
YAML

# === The container ===

mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs -o size=16m,mode=755 tmpfs "$root/dev"
for device in "null 1 3" "random 1 8" "urandom 1 9"; do
    read -r name major minor <<< "$device"
    mknod --mode 666 "$root/dev/$name" c "$major" "$minor"
done
mount -t tmpfs -o size=64m,uid=65532,gid=65532 tmpfs "$root/var/lib/kvlane"
mount -o remount,bind,ro "$root"
! touch "$root/written" 2> /dev/null || fail "the root file system can be written"
python3 - <<'PYTHON'
# Brings up the loopback interface of this network.
import fcntl, socket, struct
with socket.socket() as s:
    fcntl.ioctl(s, 0x8914, struct.pack("16sh14x", b"lo", 1))
PYTHON

# kvlane as the image starts it. Each of these replaces itself by the next, so that $! is kvlane.
kvlane=(setpriv --no-new-privs chroot --userspec=65532:65532 "$root" /usr/local/bin/kvlane)
# answers CODE URL [CURL ARGUMENTS]: until URL answers with CODE, at most ten seconds.
answers() {
    local code=$1 url=$2 seen; shift 2
    for _ in $(seq 100); do
        seen=$(curl --silent --output "$log.body" --max-time 5 --write-out '%{http_code}' "$@" "$url" || true)
        [ "$seen" != "$code" ] || return 0
        sleep 0.1
    done
    fail "$url answered $seen, not $code"
}
# ends PID: SIGTERM, and exit code 0.
ends() { kill -TERM "$1"; wait "$1" || fail "exit code $? after SIGTERM"; }
passed() { echo "ok: $*"; }

version=$("${kvlane[@]}" --version)
passed "$version, $(stat --format=%s "$binary") bytes, needs $newest"
"${kvlane[@]}" mock-engine --host 127.0.0.1 --port 8000 --speed 50 > "$log" 2>&1 &
engine=$!
answers 200 http://127.0.0.1:8000/health
passed "mock-engine starts"
"${kvlane[@]}" check --config /etc/kvlane/config.yaml > "$log" 2>&1 || fail "kvlane check"
"${kvlane[@]}" serve --config /etc/kvlane/config.yaml > "$log" 2>&1 &
gateway=$!
answers 200 http://127.0.0.1:30000/readiness
grep -q '^Uid:.*65532.*65532' "/proc/$gateway/status" || fail "kvlane does not run as 65532"
grep -q '^CapEff:.0000000000000000$' "/proc/$gateway/status" || fail "kvlane has capabilities"
answers 200 http://127.0.0.1:30000/v1/chat/completions --header 'content-type: application/json' \
    --data '{"model": "mock", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}'
answers 401 http://127.0.0.1:29000/metrics
answers 200 http://127.0.0.1:29000/metrics --header 'authorization: Bearer rehearsal-operator'
passed "serve answers a request as uid 65532 without capabilities; operators need their key"
ends "$gateway"
[ -s "$root/var/lib/kvlane/index.snapshot" ] || fail "no snapshot was written"
[ -z "$(find "$root" -xdev -newer "$root/etc/kvlane/config.yaml" -type f)" ] || fail "something was written outside of the state's directory"
passed "SIGTERM: exit code 0, and a snapshot"
"${kvlane[@]}" epp --config /etc/kvlane/config.yaml > "$log" 2>&1 &
picker=$!
answers 200 http://127.0.0.1:29000/readiness
for port in 9002 9003; do (exec 3<> "/dev/tcp/127.0.0.1/$port") 2> /dev/null || fail "epp does not listen on $port"; done
ends "$picker"
passed "epp is ready, on its two ports"
kill "$engine"
