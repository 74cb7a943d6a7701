#!/usr/bin/env bash
# Writes the CRDs that the chart's optional objects need to a directory, out of their projects' Go modules, for tests:
#
#     deploy/helm/crds.sh DIRECTORY && kubectl apply --server-side --filename DIRECTORY
#
# Needs go, and a module proxy or the modules in its cache.
set -euo pipefail
directory=${1:?usage: crds.sh DIRECTORY}
mkdir -p "$directory"
# take MODULE VERSION FILES: copies them.
take() {
    local module=$1 version=$2 found
    shift 2
    found=$(cd / && go mod download -json "$module@$version" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
    for file in "$@"; do install -m 644 "$found/$file" "$directory/"; done
}
take sigs.k8s.io/gateway-api-inference-extension v1.5.0 config/crd/bases/inference.networking.k8s.io_inferencepools.yaml
take sigs.k8s.io/gateway-api v1.4.0 config/crd/standard/gateway.networking.k8s.io_httproutes.yaml
take github.com/prometheus-operator/prometheus-operator v0.85.0 \
    example/prometheus-operator-crd/monitoring.coreos.com_{servicemonitors,podmonitors,prometheusrules}.yaml
take github.com/cert-manager/cert-manager v1.19.1 deploy/crds/cert-manager.io_certificates.yaml
take github.com/kedacore/keda/v2 v2.21.0 config/crd/bases/keda.sh_scaledobjects.yaml
ls "$directory"
