//! Flags of other routers that set nothing here, so that their command lines can be pasted.
//!
//! A flag that kvlane has, too, is a row of [`super::flags`] or one of [`super::MoreArgs`]. Every other one is here: it either
//! has no effect, which a warning says at the start with the reason, or it is refused with what to write instead. The lists of all names
//! are in the files beside this one; docs/migrate.md is made from all of these.

#[cfg(test)]
mod page;
#[cfg(test)]
mod surface;

use anyhow::{Result, bail};
use clap::{Arg, ArgAction, ArgMatches};

/// What becomes of some flags, and why.
#[derive(Clone, Copy, Debug)]
pub(super) struct Group {
    pub(super) answer: Answer,
    /// Their names. `name=` takes a value, `name=*` any number of them.
    pub(super) flags: &'static [&'static str],
}

/// What becomes of a flag. It comes after `--name`, so it begins in the middle of a sentence.
#[derive(Clone, Copy, Debug)]
pub(super) enum Answer {
    /// It is accepted and has no effect.
    Ignored(&'static str),
    /// It is refused.
    Refused(&'static str),
}

use Answer::{Ignored, Refused};

/// All of them.
pub(super) const GROUPS: &[Group] = &[
    group(
        Ignored("workers may come and go at any time; each gets requests when it answers its probe"),
        &["worker-startup-timeout-secs=", "worker-startup-check-interval=", "worker-startup-delay="],
    ),
    group(Ignored("several models can always be served"), &["enable-igw"]),
    group(
        Ignored("data-parallel ranks are found out and placed on"),
        &["dp-aware", "intra-node-data-parallel-size=", "dp-minimum-tokens-scheduler"],
    ),
    group(
        Ignored("the index is bounded by `routing.index_memory` and `routing.index_ttl`"),
        &[
            "eviction-interval-secs=",
            "max-tree-size=",
            "cache-ttl-secs=",
            "cache-index=",
            "cache-boundaries=",
        ],
    ),
    group(
        Ignored("block sizes and models of KV events are read from the engines"),
        &[
            "kv-event-block-size=",
            "kv-event-model=",
            "kv-index=",
            "kv-connector-annotation=",
            "kv-engine-id-annotation=",
        ],
    ),
    group(
        Ignored(
            "conversations are forgotten by how recently they were used, and begin where the policy says",
        ),
        &[
            "max-idle-secs=",
            "sticky-key-idle-secs=",
            "assignment-mode=",
            "kv-aware-session-affinity-ttl-secs=",
        ],
    ),
    group(
        Ignored("this policy has no such parameter here (docs/guide.md#policies)"),
        &[
            "bucket-adjust-interval-secs=",
            "router-temperature=",
            "kv-penalty-host=",
            "kv-penalty-external=",
            "kv-penalty-disk=",
            "prefix-token-count=",
            "prefix-hash-load-factor=",
            "prefix-hash-balance-abs-threshold=",
            "least-load-kv-pressure-weight=",
            "least-load-default-throughput=",
            "least-load-mean-prefill-tokens=",
            "least-load-max-waiting-requests=",
            "power-of-two-load-metric=",
            "balance-token-usage-threshold=",
            "selection-policy=",
            "selection-accounting-ttl-ms=",
            "overlap-decay=",
            "selection-temperature=",
        ],
    ),
    group(
        Ignored("`fleet_cost` prices the load of each worker, and needs no threshold for it"),
        &[
            "overload-token-usage-threshold=",
            "worker-overload-waiting-requests=",
            "worker-overload-token-usage=",
            "worker-overload-protection",
            "disable-worker-overload-protection",
            "load-monitor-interval=",
            "disable-load-monitoring",
            "worker-warmup-secs=",
            "worker-warmup-share=",
            "worker-warmup-blocks=",
            "worker-warmup-thin-ratio=",
            "worker-warmup-divert-every=",
        ],
    ),
    group(
        Ignored("a worker that stops making progress is found out from its requests and its KV events"),
        &["worker-stall-secs=", "worker-wedge-secs=", "worker-stale-secs="],
    ),
    group(Ignored("one answered request closes a circuit breaker"), &["cb-success-threshold="]),
    group(
        Ignored("failures in a row open a circuit breaker, however long they take"),
        &["cb-window-duration-secs="],
    ),
    group(
        Ignored("probes cannot be switched off: models, ranks and loads are learned with them"),
        &["disable-health-check"],
    ),
    group(
        Ignored("a worker that fails its probes gets no requests and is probed until it answers or leaves"),
        &[
            "remove-unhealthy-workers",
            "no-remove-unhealthy-workers",
            "worker-auto-recovery",
            "no-worker-auto-recovery",
        ],
    ),
    group(
        Ignored("what was tokenized is always kept, within `tokens.cache_memory`"),
        &[
            "tokenizer-cache-enable-l0",
            "tokenizer-cache-l0-max-entries=",
            "tokenizer-cache-l0-max-memory=",
            "tokenizer-cache-enable-l1",
            "tokenizer-cache-l1-max-memory=",
        ],
    ),
    group(Ignored("`--set tokens.source=estimate` loads no tokenizer"), &["disable-tokenizer-autoload"]),
    group(
        Ignored("engines parse reasoning and tool calls; start them with their own flags for it"),
        &["reasoning-parser=", "tool-call-parser=", "parser="],
    ),
    group(
        Ignored("no responses and no conversations are stored here; engines keep their own"),
        &[
            "history-backend=",
            "history-memory-max-responses=",
            "history-memory-max-items=",
            "history-memory-retention-secs=",
            "oracle-wallet-path=",
            "oracle-tns-alias=",
            "oracle-connect-descriptor=",
            "oracle-username=",
            "oracle-password=",
            "oracle-external-auth",
            "oracle-pool-min=",
            "oracle-pool-max=",
            "oracle-pool-timeout-secs=",
            "postgres-db-url=",
            "postgres-pool-max=",
            "postgres-op-timeout-secs=",
            "redis-url=",
            "redis-pool-max=",
            "redis-retention-days=",
            "redis-op-timeout-secs=",
            "schema-config=",
            "storage-context-headers=*",
            "max-background-responses=",
        ],
    ),
    group(Ignored("which engine a worker is, is found out"), &["backend="]),
    group(Ignored("the log goes to stderr, where a service manager or `2> FILE` keeps it"), &["log-dir="]),
    group(
        Ignored("what operators change is always logged, with the name of their key"),
        &["control-plane-audit-enabled"],
    ),
    group(Ignored("spans are sent where `--otlp-traces-endpoint` names a collector"), &["enable-trace"]),
    group(
        Ignored("histograms have fixed buckets"),
        &["prometheus-duration-buckets=*", "priority-scheduler-tenant-metric-top-n="],
    ),
    group(
        Ignored("`/liveness` and `/readiness` are on the metrics port, which relay threads do not serve"),
        &["health-check-port="],
    ),
    group(
        Ignored("a request is kept for a retry as long as it waits, within `server.body_memory`"),
        &["max-buffered-request-bytes="],
    ),
    group(
        Ignored(
            "idle connections are closed at `server.header_timeout`, and connections to workers are HTTP/1.1",
        ),
        &["idle-connection-timeout-secs=", "upstream-http2"],
    ),
    group(Ignored("nothing is sent on a stream but what its engine sends"), &["sse-keepalive-secs="]),
    group(
        Ignored("changes of workers are applied at once"),
        &["job-queue-capacity=", "job-queue-concurrency=", "discovery-check-interval-secs="],
    ),
    group(
        Ignored("images and audio are fetched and computed by the engines"),
        &[
            "multimodal-tensor-transport=",
            "multimodal-shm-min-bytes=",
            "multimodal-max-inflight-bytes=",
            "mm-per-request-image-limit=",
            "mm-processing=",
            "mm-pixel-cache-mb=",
            "mm-pixel-rdma",
            "mm-allowed-media-domains=",
            "mm-allow-private-media-hosts",
            "rdma-listen-ip=",
            "rdma-slot-ttl-s=",
            "log-mm-timing",
        ],
    ),
    group(
        Ignored("there is no such fallback and no such profile"),
        &["router-disable-arg-fallback", "jemalloc-prof-dir="],
    ),
    group(
        Ignored(
            "requests wait in one queue, for whatever worker is free first: `--queue-size`, `--queue-timeout-secs`",
        ),
        &[
            "prefill-max-inflight-requests-per-worker=",
            "prefill-queue-size=",
            "prefill-queue-timeout-secs=",
            "pd-admission-wait-secs=",
        ],
    ),
    group(Refused("use `--policy random`"), &["mini-lb"]),
    group(
        Refused("`kvlane migrate FILE` turns it into a configuration for `--config`"),
        &["config-file=", "epd-config="],
    ),
    group(
        Refused("name keys in `auth.keys`, or the issuer of tokens in `auth.jwt`"),
        &["api-key-validation-urls="],
    ),
    group(
        Ignored("a body is read as it comes, and what is known of caches follows the engines"),
        &["stream-request-bodies-over=", "kv-indexer-ttl-secs=", "kv-indexer-max-entries="],
    ),
    group(
        Refused(
            "requests to start with: `limits: [{key: '*', requests_per_minute: N}]` in the configuration (docs/configuration.md#limits)",
        ),
        &["rate-limit-tokens-per-second="],
    ),
    group(
        Refused("write `limits` into the configuration (docs/configuration.md#limits)"),
        &["tenant-rate-limit-enabled", "tenant-rate-limit-config="],
    ),
    group(
        Refused("priorities come from `hints.priority_headers`, with their names in `hints.priorities`"),
        &[
            "priority-scheduler-enabled",
            "priority-scheduler-default-max-class=",
            "priority-scheduler-config=",
        ],
    ),
    group(
        Refused("set `routing.queue_size` to 0: what finds no free worker is then 429"),
        &["worker-overload-shed"],
    ),
    group(
        Refused("tenants are named by `hints.tenant_headers`, and by keys"),
        &["trust-tenant-header", "tenant-header-name="],
    ),
    group(
        Refused("use `--policy session_sticky`; `hints.session_headers` names the headers of a conversation"),
        &["routing-key-override", "sticky-sessions", "routing-key-headers=*"],
    ),
    group(
        Refused("set `routing.session_admission` to true: it admits whole conversations"),
        &["enable-program-scheduling", "program-scheduling-config-json="],
    ),
    group(
        Refused("name the workers with `--worker-urls`, `--workers-file`, `--dns-discovery` or `--selector`"),
        &["vllm-discovery-address=", "discovery-provider=", "discovery-file=", "zmq-engine-count="],
    ),
    group(
        Refused("let a load balancer or an Envoy filter in front run it: kvlane runs no plug-ins"),
        &[
            "wasm-middleware=",
            "wasm-middleware-sha256=",
            "wasm-middleware-route=",
            "enable-wasm",
            "storage-hook-wasm-path=",
        ],
    ),
    group(Refused("call tools from the application: kvlane runs none"), &["mcp-config-path="]),
    group(
        Refused("have the load balancer in front answer for other origins (`Access-Control-Allow-Origin`)"),
        &["cors-allowed-origins=*"],
    ),
    group(
        Refused("write `auth.jwt.role_claim` and `auth.jwt.roles` into the configuration"),
        &["jwt-role-mapping=*"],
    ),
    group(
        Refused("use `--replicas-listen` and `--replicas-peer` (docs/replicas.md)"),
        &[
            "enable-mesh",
            "mesh-server-name=",
            "mesh-host=",
            "mesh-advertise-host=",
            "mesh-port=",
            "mesh-peer-urls=*",
            "router-selector=*",
        ],
    ),
    group(
        Refused(
            "use `replicas.certificate`, `replicas.private_key` and `replicas.ca` (docs/replicas.md#security)",
        ),
        &["mesh-tls-ca-cert=", "mesh-tls-cert=", "mesh-tls-key="],
    ),
    group(
        Refused("split prefill and decode only: engines encode images themselves"),
        &["epd-disaggregation", "encode=*", "encode-policy=", "encode-selector=*"],
    ),
    group(
        Refused("let engines serve the other name, as with vLLM's `--served-model-name`"),
        &["model-alias=", "model-id-from="],
    ),
    group(
        Refused("call the engines themselves: their administration is not relayed"),
        &["enable-rl", "rl-control-timeout-secs=", "rl-fanout-concurrency="],
    ),
];

/// Flags of production-stack's router.
const STACK: &[Group] = &[
    group(
        Refused("write `--worker-urls http://HOST:PORT`, several separated by spaces"),
        &["static-backends=*"],
    ),
    group(
        Ignored("workers are asked for their models"),
        &["static-models=*", "static-model-labels=*", "static-model-types=*"],
    ),
    group(
        Refused("let engines serve the other name, as with vLLM's `--served-model-name`"),
        &["static-aliases=*"],
    ),
    group(Ignored("workers are probed, none is asked to generate"), &["static-backend-health-checks"]),
    group(Refused("write `--policy`"), &["routing-logic="]),
    group(Refused("set `hints.session_headers` in the configuration"), &["session-key="]),
    group(Refused("write `--selector LABEL=VALUE`"), &["k8s-label-selector="]),
    group(Refused("write `--service-discovery-namespace`"), &["k8s-namespace="]),
    group(Refused("write `--service-discovery-port`"), &["k8s-port="]),
    group(
        Refused("write `--selector` for pods, `--dns-discovery` for names, `--workers-file` for a file"),
        &["service-discovery-type=", "k8s-service-discovery-type="],
    ),
    group(
        Ignored("caches are known from the engines' KV events: LMCache's controller is not asked"),
        &[
            "lmcache-controller-port=",
            "lmcache-health-check-interval=",
            "lmcache-worker-timeout=",
            "kv-aware-threshold=",
        ],
    ),
    group(Ignored("`fleet_cost` prices a match of any length"), &["prefix-min-match-length="]),
    group(
        Refused("write `--prefill-selector` and `--decode-selector`, or `--prefill URL` and `--decode URL`"),
        &["prefill-model-labels=*", "decode-model-labels=*"],
    ),
    group(Refused("write `--retry-max-retries`"), &["max-instance-failover-reroute-attempts="]),
    group(
        Refused("let a load balancer or an Envoy filter in front run it: kvlane runs no plug-ins"),
        &["callbacks=", "request-rewriter="],
    ),
    group(
        Ignored("files and batches are relayed to an engine, and none is stored here"),
        &["enable-batch-api", "file-storage-class=", "file-storage-path=", "batch-processor="],
    ),
    group(
        Ignored(
            "loads of engines are read with the probes (`health.interval`), and figures are on the metrics port",
        ),
        &["engine-stats-interval=", "request-stats-window=", "log-stats", "log-stats-interval="],
    ),
    group(
        Refused("write a configuration for `--config`; SIGHUP reads it again (docs/operations.md#reload)"),
        &["dynamic-config-json=", "dynamic-config-yaml="],
    ),
    group(
        Refused(
            "have another proxy in front do it: no semantic cache and no detection of personal data is here",
        ),
        &["feature-gates=", "semantic-cache-model=", "semantic-cache-dir=", "semantic-cache-threshold="],
    ),
    group(Refused("write `--otlp-traces-endpoint` for traces"), &["sentry-dsn="]),
    group(Refused("kvlane serves engines of your own only"), &["external-providers-config="]),
];

/// Flags of llm-d's endpoint picker.
const PICKER: &[Group] = &[
    group(
        Refused(
            "the policy replaces plug-ins with weights: `--policy`, or `routing.policy: {name: weighted, …}` (docs/guide.md)",
        ),
        &["config-text="],
    ),
    group(Ignored("InferencePools of `inference.networking.k8s.io` are read"), &["pool-group="]),
    group(Refused("write `--set tls.certificate=FILE` and `--set tls.private_key=FILE`"), &["cert-path="]),
    group(Refused("write `--prometheus-port`"), &["metrics-port="]),
    group(Refused("use keys of viewers (`auth.keys`), or `--open-metrics`"), &["metrics-endpoint-auth"]),
    group(
        Refused("write `--health-check-interval-secs`: engines' metrics are read with the probes"),
        &["refresh-metrics-interval=", "metrics-staleness-threshold="],
    ),
    group(Ignored("metrics are computed when they are read"), &["refresh-prometheus-metrics-interval="]),
    group(Ignored("`GET /decisions` has each candidate with its price"), &["emit-endpoint-scores"]),
    group(
        Ignored("which engine a worker is, and the names of its metrics, are found out"),
        &[
            "model-server-metrics-port=",
            "model-server-metrics-path=",
            "model-server-metrics-scheme=",
            "model-server-metrics-https-insecure-skip-verify",
            "total-queued-requests-metric=",
            "total-running-requests-metric=",
            "kv-cache-usage-percentage-metric=",
            "lora-info-metric=",
            "cache-info-metric=",
        ],
    ),
    group(Ignored("all replicas are active, none leads"), &["ha-enable-leader-election"]),
    group(Refused("write `--shutdown-grace-period-secs`"), &["drain-timeout="]),
    group(Ignored("there is no such profile"), &["enable-pprof"]),
    group(Ignored("spans are sent where `--otlp-traces-endpoint` names a collector"), &["tracing"]),
];

/// Flags of engines, and names that are easily taken for flags.
const ELSEWHERE: &[Group] = &[
    group(
        Refused("write `--worker-urls http://HOST:PORT`, several separated by spaces"),
        &["workers=*", "worker=*", "backends=*", "upstream=*", "url=*"],
    ),
    group(
        Refused("it is a flag of the engine: set it there"),
        &["served-model-name=*", "tensor-parallel-size=", "gpu-memory-utilization=", "max-model-len="],
    ),
    group(Refused("write `--log-level debug`"), &["verbose", "debug"]),
];

/// Policies of other routers, and the one that does most nearly the same.
pub(super) const POLICIES: &[(&str, &str)] = &[
    ("manual", "session_sticky"),
    ("sticky_least_loaded", "session_sticky"),
    ("bucket", "least_prefill"),
    ("passthrough", "random"),
];

const fn group(answer: Answer, flags: &'static [&'static str]) -> Group {
    Group { answer, flags }
}

fn groups() -> impl Iterator<Item = &'static Group> {
    [GROUPS, STACK, PICKER, ELSEWHERE].into_iter().flatten()
}

/// All flags with what becomes of them.
fn all() -> impl Iterator<Item = (&'static str, Answer)> {
    groups().flat_map(|group| group.flags.iter().map(|flag| (name(flag), group.answer)))
}

fn name(flag: &'static str) -> &'static str {
    flag.split('=').next().unwrap_or_default()
}

/// The flags for the command line. None is in the help.
pub(super) fn args() -> impl Iterator<Item = Arg> {
    let flags = groups().flat_map(|group| group.flags);
    flags.map(|flag| {
        let arg = Arg::new(name(flag)).long(name(flag)).hide(true);
        match flag.split_once('=') {
            None => arg.action(ArgAction::SetTrue),
            Some((_, "")) => arg.action(ArgAction::Append).allow_hyphen_values(true),
            Some(_) => arg.action(ArgAction::Append).num_args(0..),
        }
    })
}

/// Those that a command line has.
pub(super) fn given(matches: &ArgMatches) -> Vec<(&'static str, Answer)> {
    let is_given = |name| matches.value_source(name) == Some(clap::parser::ValueSource::CommandLine);
    all().filter(|(name, _)| is_given(name)).collect()
}

/// Refuses what cannot be done.
///
/// # Errors
/// The first flag that is refused, and what to write instead.
pub(super) fn refuse(given: &[(&'static str, Answer)]) -> Result<()> {
    match given.iter().find(|(_, answer)| matches!(answer, Refused(_))) {
        Some((name, answer)) => bail!("{}", said(name, *answer)),
        None => Ok(()),
    }
}

/// What has no effect, and why.
pub(super) fn ignored(given: &[(&'static str, Answer)]) -> impl Iterator<Item = String> {
    let ignored = given.iter().filter(|(_, answer)| matches!(answer, Ignored(_)));
    ignored.map(|(name, answer)| said(name, *answer))
}

/// What becomes of a flag, in a sentence.
pub(super) fn said(name: &str, answer: Answer) -> String {
    match answer {
        Refused(instead) => format!("--{name} is not a flag of kvlane: {instead}"),
        Ignored(why) => format!("--{name} has no effect: {why}"),
    }
}

/// Refuses a policy that has another name here.
///
/// # Errors
/// It has.
pub(super) fn check_policy(flag: &str, policy: &str) -> Result<()> {
    match POLICIES.iter().find(|(other, _)| *other == policy) {
        Some((_, own)) => bail!("{flag} {policy}: kvlane has no such policy; the nearest is `{own}`"),
        None => Ok(()),
    }
}
