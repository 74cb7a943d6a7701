#!/bin/sh
# Installs what test_prometheus.py needs. Does nothing where that is done already.
#
#   Debian package, where promtool is missing (root or sudo):  prometheus
#   PyPI packages, into e2e/.work/prometheus:                  opentelemetry-proto, grafana-foundation-sdk
#   an OpenTelemetry collector, into e2e/.work/otelcol, if OTELCOL=1 (Go 1.25 or later; minutes of compiling)
set -eu

here=$(cd "$(dirname "$0")" && pwd)
if ! command -v promtool > /dev/null; then
    command -v apt-get > /dev/null || {
        echo "setup: install prometheus and promtool yourself, this machine has no apt-get" >&2
        exit 1
    }
    root=
    [ "$(id -u)" = 0 ] || root=sudo
    $root apt-get update -qq
    $root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends prometheus > /dev/null
fi
"$here/../venv.sh" prometheus

work=${E2E_WORK:-$here/../.work}
if [ -n "${OTELCOL:-}" ] && [ ! -x "$work/otelcol/otelcol" ]; then
    cp "$here/otelcol.yaml" "$work/"
    cd "$work"
    go run go.opentelemetry.io/collector/cmd/builder@v0.160.0 --config otelcol.yaml
fi
