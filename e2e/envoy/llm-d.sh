#!/bin/sh
# Builds llm-d's endpoint picker from its Go module, to run beside ours behind the same Envoy. Does nothing where that is done.
#
# Wants Go 1.26 or later. Takes some 300 MB of modules from the Go module proxy, once, and two to five minutes of two cores. The
# program goes to $KVLANE_INFRA/bin (~/.cache/kvlane-infra) as llm-d-epp. v0.7.1 is the module of before its renaming from
# llm-d-inference-scheduler to llm-d-router; LLM_D names another module and version.
set -eu

module=${LLM_D:-github.com/llm-d/llm-d-inference-scheduler@v0.7.1}
infra=${KVLANE_INFRA:-$HOME/.cache/kvlane-infra}
mkdir -p "$infra/bin" "$infra/llm-d"
infra=$(cd "$infra" && pwd)

command -v go > /dev/null || {
    echo "llm-d: 'go' is missing: install Go 1.26 or later from https://go.dev/dl" >&2
    exit 1
}
if [ "$(cat "$infra/llm-d/installed" 2> /dev/null || true)" != "$module" ]; then
    echo "llm-d: ${module}"
    # A module of ours that requires it, since `go install` asks the proxy for all its versions, which the proxy may not tell.
    (
        cd "$infra/llm-d"
        printf 'module kvlane-e2e/llm-d\n\ngo 1.26.0\n\nrequire %s %s\n' "${module%@*}" "${module#*@}" > go.mod
        printf '//go:build tools\n\npackage tools\n\nimport _ "%s/cmd/epp"\n' "${module%@*}" > tools.go
        go mod tidy
        CGO_ENABLED=0 go build -p "${E2E_JOBS:-$(nproc)}" -trimpath -buildvcs=false -ldflags "-s -w" \
            -o "$infra/bin/llm-d-epp" "${module%@*}/cmd/epp"
    ) > "$infra/llm-d.log" 2>&1 || {
        tail -20 "$infra/llm-d.log" >&2
        echo "llm-d: the build failed: $infra/llm-d.log" >&2
        exit 1
    }
    echo "$module" > "$infra/llm-d/installed"
fi
echo "llm-d: $infra/bin/llm-d-epp is $module"
