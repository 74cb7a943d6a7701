#!/bin/sh
# Builds the reference endpoint picker from its Go module, to run beside ours behind the same Envoy. Does nothing where that is done.
#
# Wants Go 1.26 or later. Takes some 300 MB of modules from the Go module proxy, once, and two minutes of two cores. The program
# goes to $KVLANE_INFRA/bin (~/.cache/kvlane-infra) as reference-epp.
#
# It is that of the Gateway API Inference Extension, v1.5.0, which has become the core of llm-d's: filters, scorers, the approximate
# prefix index and the scraping of engines are this code. llm-d's own module adds its index of KV events, and does not build from
# the public proxy: that does not have llm-d-kv-cache, which it requires.
set -eu

module=sigs.k8s.io/gateway-api-inference-extension
version=v1.5.0

infra=${KVLANE_INFRA:-$HOME/.cache/kvlane-infra}
mkdir -p "$infra/bin" "$infra/src/reference-epp"
infra=$(cd "$infra" && pwd)

command -v go > /dev/null || {
    echo "reference: 'go' is missing: install Go 1.26 or later from https://go.dev/dl" >&2
    exit 1
}
if [ "$(cat "$infra/src/reference-epp/installed" 2> /dev/null || true)" != "$version" ]; then
    echo "reference: $module $version"
    # A module of ours that requires it, since `go install` asks the proxy for all its versions, which the proxy may not tell.
    (
        cd "$infra/src/reference-epp"
        printf 'module kvlane-e2e/reference-epp\n\ngo 1.26.0\n\nrequire %s %s\n' "$module" "$version" > go.mod
        printf '//go:build tools\n\npackage tools\n\nimport _ "%s/cmd/epp"\n' "$module" > tools.go
        go mod tidy
        CGO_ENABLED=0 go build -p "${E2E_JOBS:-$(nproc)}" -trimpath -buildvcs=false -ldflags "-s -w" \
            -o "$infra/bin/reference-epp" "$module/cmd/epp"
    ) > "$infra/reference-epp.log" 2>&1 || {
        tail -20 "$infra/reference-epp.log" >&2
        echo "reference: the build failed: $infra/reference-epp.log" >&2
        exit 1
    }
    echo "$version" > "$infra/src/reference-epp/installed"
fi
echo "reference: $infra/bin/reference-epp is $module $version"
