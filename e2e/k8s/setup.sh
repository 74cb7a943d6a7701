#!/bin/sh
# Builds a Kubernetes control plane without a container runtime: kubectl, helm, etcd, kube-apiserver, kwok (nodes that do not
# exist, whose pods get addresses and turn Ready), kube-controller-manager and kube-scheduler; and takes the CRDs of the Gateway API
# Inference Extension from its module. Does nothing where that is done.
#
#   e2e/k8s/setup.sh                      all of them, in this order
#   e2e/k8s/setup.sh kubectl helm         these only
#
# Wants Go 1.26 or later. Takes 1.5 GB of modules from the Go module proxy, once, and 8 minutes of two idle cores, 25 of busy ones;
# 500 MB stay. Everything is kept outside of the tree, in $KVLANE_INFRA (~/.cache/kvlane-infra): programs in bin, with a line
# for each finished one in bin/READY, and CRDs in crds.
set -eu

KUBERNETES=1.36.3
ETCD=3.6.16
KWOK=0.8.0
HELM=3.22.0
GAIE=1.5.0

infra=${KVLANE_INFRA:-$HOME/.cache/kvlane-infra}
jobs=${E2E_JOBS:-$(nproc)}
mkdir -p "$infra/bin" "$infra/src"
infra=$(cd "$infra" && pwd)
bin=$infra/bin
touch "$bin/READY"

command -v go > /dev/null || {
    echo "setup: 'go' is missing: install Go 1.26 or later from https://go.dev/dl" >&2
    exit 1
}

# Two of these at once would build the same programs twice and write the same files.
exec 9> "$infra/lock"
flock -n 9 || {
    echo "setup: another setup.sh is at work in $infra; waiting for its end"
    flock 9
}

ready() { # PROGRAM VERSION
    grep -qx "$1 $2" "$bin/READY" && { [ -x "$bin/$1" ] || [ -d "$infra/$1" ]; }
}

# Runs the command that leaves PROGRAM in $bin, unless it is there in this version already. A build that fails leaves its log.
build() { # PROGRAM VERSION COMMAND...
    program=$1 version=$2
    shift 2
    ready "$program" "$version" && return
    echo "setup: $program $version"
    start=$(date +%s)
    "$@" > "$infra/$program.log" 2>&1 || {
        tail -20 "$infra/$program.log" >&2
        echo "setup: building $program failed: $infra/$program.log" >&2
        exit 1
    }
    grep -v "^$program " "$bin/READY" > "$bin/READY.next" || true
    echo "$program $version" >> "$bin/READY.next"
    mv "$bin/READY.next" "$bin/READY"
    echo "setup: $program $version: $(($(date +%s) - start)) s"
}

compile() { # OUTPUT FLAGS PACKAGE
    CGO_ENABLED=0 go build -p "$jobs" -trimpath -buildvcs=false -ldflags "-s -w $2" -o "$bin/$1" "$3"
}

# Kubernetes' go.mod replaces its staging modules by directories that only its own tree has: a module of ours names the published
# ones instead. They carry the version v0.36.3 where Kubernetes carries v1.36.3.
kubernetes_module() {
    directory=$infra/src/kubernetes-$KUBERNETES
    [ -f "$directory/tidy" ] && cd "$directory" && return
    rm -rf "$directory"
    mkdir -p "$directory"
    cd "$directory"
    module=$(go mod download -json "k8s.io/kubernetes@v$KUBERNETES" | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')
    {
        printf 'module kvlane-e2e/kubernetes\n\ngo 1.26.0\n\ngodebug default=go1.26\n\n'
        printf 'require k8s.io/kubernetes v%s\n\nreplace (\n' "$KUBERNETES"
        grep -oE '^[[:space:]]+k8s.io/[a-z-]+ => ./staging' "$module" \
            | awk -v version="v0.${KUBERNETES#1.}" '{print "\t" $1 " => " $1 " " version}'
        printf ')\n'
    } > go.mod
    {
        printf '//go:build tools\n\npackage tools\n\nimport (\n'
        for program in kube-apiserver kube-controller-manager kube-scheduler kubectl; do
            printf '\t_ "k8s.io/kubernetes/cmd/%s"\n' "$program"
        done
        printf ')\n'
    } > tools.go
    go mod tidy
    touch tidy
}

kubernetes() { # PROGRAM
    (
        kubernetes_module
        version=k8s.io/component-base/version
        minor=${KUBERNETES#1.}
        compile "$1" "-X $version.gitVersion=v$KUBERNETES -X $version.gitMajor=1 -X $version.gitMinor=${minor%.*}" \
            "k8s.io/kubernetes/cmd/$1"
    )
}

# The package that is etcd's main program is not one that `go install` takes: its module replaces others.
etcd() {
    directory=$infra/src/etcd-$ETCD
    mkdir -p "$directory"
    (
        cd "$directory"
        printf 'module kvlane-e2e/etcd\n\ngo 1.26.0\n\nrequire go.etcd.io/etcd/server/v3 v%s\n' "$ETCD" > go.mod
        printf 'package main\n\nimport (\n\t"os"\n\n\t"go.etcd.io/etcd/server/v3/etcdmain"\n)\n\n' > main.go
        printf 'func main() { etcdmain.Main(os.Args) }\n' >> main.go
        go mod tidy
        compile etcd "" .
    )
}

installed() { # PACKAGE@VERSION FLAGS
    CGO_ENABLED=0 GOBIN=$bin go install -p "$jobs" -trimpath -buildvcs=false -ldflags "-s -w $2" "$1"
}

# kwok runs by stages: what happens to a node and to a pod, and when. Those of its own module make pods Ready at once.
kwok() {
    installed "sigs.k8s.io/kwok/cmd/kwok@v$KWOK" "-X sigs.k8s.io/kwok/pkg/consts.Version=v$KWOK"
    module=$(go mod download -json "sigs.k8s.io/kwok@v$KWOK" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
    for stage in node/fast/node-initialize node/heartbeat/node-heartbeat pod/fast/pod-ready pod/fast/pod-complete \
        pod/fast/pod-delete; do
        echo "---"
        cat "$module/kustomize/stage/$stage.yaml"
    done > "$infra/kwok-stages.yaml"
}

# InferencePool is of the group inference.networking.k8s.io. InferenceObjective is of the group that it had in this module; llm-d has
# moved it to a group of its own, whose module the Go proxy may not have, so a second one of that group stands in for llm-d's.
crds() {
    module=$(go mod download -json "sigs.k8s.io/gateway-api-inference-extension@v$GAIE" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
    rm -rf "$infra/crds"
    mkdir "$infra/crds"
    for crd in inference.networking.k8s.io_inferencepools inference.networking.x-k8s.io_inferenceobjectives \
        inference.networking.x-k8s.io_inferencemodelrewrites; do
        cat "$module/config/crd/bases/$crd.yaml" > "$infra/crds/$crd.yaml"
    done
    sed 's/inference\.networking\.x-k8s\.io/llm-d.ai/' "$infra/crds/inference.networking.x-k8s.io_inferenceobjectives.yaml" \
        > "$infra/crds/llm-d.ai_inferenceobjectives.yaml"
}

[ $# -gt 0 ] || set -- kubectl helm etcd kube-apiserver kwok kube-controller-manager kube-scheduler crds
for program in "$@"; do
    case $program in
        kubectl | kube-apiserver | kube-controller-manager | kube-scheduler)
            build "$program" "$KUBERNETES" kubernetes "$program" ;;
        helm)
            build helm "$HELM" installed "helm.sh/helm/v3/cmd/helm@v$HELM" \
                "-X helm.sh/helm/v3/internal/version.version=v$HELM" ;;
        etcd) build etcd "$ETCD" etcd ;;
        kwok) build kwok "$KWOK" kwok ;;
        crds) build crds "$GAIE" crds ;;
        *)
            echo "setup: no program '$program'; those that can be built: kubectl helm etcd kube-apiserver kwok" \
                "kube-controller-manager kube-scheduler crds" >&2
            exit 2 ;;
    esac
done
echo "setup: $bin has $(cut -d' ' -f1 "$bin/READY" | tr '\n' ' ')"
