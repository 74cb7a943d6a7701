//! The gateway's configuration: plain values with their defaults, each defined once.
//!
//! The same structs are the YAML file's sections; `kvlane config` prints them.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use kvlane_core::index::{approx, exact};
use kvlane_core::policy::{PolicyConfig, name_or_config};
use kvlane_core::time::Nanos;
use kvlane_core::timing::TimingModel;
use kvlane_core::{router, scheduler};
use kvlane_wire::engine::resolve;
use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

pub use crate::hints::Config as Hints;
use crate::timings::Timings;
pub use crate::tokenize::{Content, TokenSource, Tokens};

/// Prompt bytes taken for one token where no tokenizer counts them. About right for English text in current
/// vocabularies, and exact for prompts that are token ids (32-bit integers).
pub const BYTES_PER_TOKEN: usize = 4;

/// Everything `kvlane serve` can be told.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The address clients talk to.
    pub server: Server,
    /// The address Prometheus and operators talk to.
    pub metrics: Metrics,
    /// The engines known from the start; others can join while running.
    pub workers: Vec<WorkerSpec>,
    /// How requests are placed.
    pub routing: Routing,
    /// How failing workers are found.
    pub health: Health,
    /// How failed attempts are repeated.
    pub retry: Retry,
    /// Connections to workers.
    pub upstream: Upstream,
    /// What engines tell of their caches.
    pub kv_events: KvEvents,
    /// How the tokens of prompts are counted.
    pub tokens: Tokens,
    /// What clients may say of their requests.
    pub hints: Hints,
}

/// The address clients talk to, and what is accepted there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Server {
    /// Address to listen on.
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one.
    pub port: u16,
    /// Threads that relay requests; 0 is one per core.
    pub relay_threads: usize,
    /// Largest request body in bytes; beyond it 413.
    pub max_payload_size: usize,
    /// Time a client has for a request's head, also on an idle connection.
    #[serde(with = "humantime_serde")]
    pub header_timeout: Duration,
    /// Time a client has for a request's body.
    #[serde(with = "humantime_serde")]
    pub body_timeout: Duration,
    /// Time a whole request may take, queue included.
    #[serde(with = "humantime_serde")]
    pub request_timeout: Duration,
    /// Silence between two pieces of an answer after which it counts as broken; also how long a client may leave it
    /// unread.
    #[serde(with = "humantime_serde")]
    pub stream_idle_timeout: Duration,
    /// Time that requests in flight have to end after SIGTERM.
    #[serde(with = "humantime_serde")]
    pub shutdown_grace: Duration,
    /// Request headers that may carry a request id, in order of preference.
    pub request_id_headers: Vec<String>,
}

impl Default for Server {
    fn default() -> Self {
        Self {
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 30_000,
            relay_threads: 0,
            max_payload_size: 64 << 20,
            header_timeout: Duration::from_secs(60),
            body_timeout: Duration::from_secs(60),
            request_timeout: Duration::from_secs(1800),
            stream_idle_timeout: Duration::from_secs(300),
            shutdown_grace: Duration::from_secs(180),
            request_id_headers: vec!["x-request-id".into(), "x-correlation-id".into()],
        }
    }
}

/// The address for `/metrics` and the admin API.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Metrics {
    /// Address to listen on.
    pub host: IpAddr,
    /// Port to listen on; 0 takes a free one.
    pub port: u16,
}

impl Default for Metrics {
    fn default() -> Self {
        Self { host: IpAddr::V4(Ipv4Addr::LOCALHOST), port: 29_000 }
    }
}

/// One engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WorkerSpec {
    /// `http://host:port`, with a path prefix if need be.
    pub url: String,
    /// The model it serves; asked of its `/v1/models` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none", alias = "model_id")]
    pub model: Option<String>,
    /// Where it publishes KV events: one feed, or one for each of its data-parallel ranks from 0 on. Asked of it when
    /// absent.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "one_or_several")]
    pub kv_events: Vec<FeedSpec>,
}

// === impl WorkerSpec ===

impl WorkerSpec {
    /// A worker that is asked for everything else.
    pub fn new(url: impl Into<String>) -> Self {
        Self { url: url.into(), model: None, kv_events: Vec::new() }
    }
}

/// Where one rank of an engine publishes KV events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FeedSpec {
    /// `tcp://host:port` of its PUB socket. A host of `*` is that of the worker.
    pub endpoint: String,
    /// `tcp://host:port` of its replay socket, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replay: Option<String>,
    /// What its messages' topic begins with; empty for all.
    #[serde(default)]
    pub topic: String,
}

/// A list, or its only member.
fn one_or_several<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<FeedSpec>, D::Error> {
    struct Feeds;
    impl<'de> Visitor<'de> for Feeds {
        type Value = Vec<FeedSpec>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("{endpoint: tcp://host:port} or a list of those, one per rank")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut feeds: A) -> Result<Vec<FeedSpec>, A::Error> {
            let mut all = Vec::new();
            while let Some(feed) = feeds.next_element()? {
                all.push(feed);
            }
            Ok(all)
        }

        fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Vec<FeedSpec>, A::Error> {
            Ok(vec![FeedSpec::deserialize(MapAccessDeserializer::new(map))?])
        }
    }
    deserializer.deserialize_any(Feeds)
}

/// How requests are placed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Routing {
    /// The policy of every pool that `pools` does not name.
    #[serde(deserialize_with = "name_or_config")]
    pub policy: PolicyConfig,
    /// What differs for the pool of one model.
    pub pools: BTreeMap<String, PoolOverride>,
    /// How long the engines take: a timing file that `kvlane calibrate` wrote, or `model@gpu`. It is learned; with one,
    /// learning begins there.
    pub timing: Option<String>,
    /// Whether new conversations wait while those that go on fill the fleet's caches.
    pub session_admission: bool,
    /// Requests in flight per pool beyond which others wait; 0 is no limit.
    pub max_concurrent_requests: u32,
    /// Requests that may wait per pool; beyond it they are shed with 429.
    pub queue_size: u32,
    /// Time a request may wait for its place.
    #[serde(with = "humantime_serde")]
    pub queue_timeout: Duration,
    /// Prompt bytes per block of the prefix index.
    pub block_bytes: u32,
    /// Bytes the prefix index of one pool may use.
    pub index_memory: usize,
    /// Time after which an unused prefix counts as evicted.
    #[serde(with = "humantime_serde")]
    pub index_ttl: Duration,
    /// Decisions kept per pool for `GET /decisions`.
    pub receipts: u32,
    /// Seed of random choices.
    pub seed: u64,
}

impl Default for Routing {
    fn default() -> Self {
        Self {
            policy: PolicyConfig::FleetCost(Default::default()),
            pools: BTreeMap::new(),
            timing: None,
            session_admission: false,
            max_concurrent_requests: 0,
            queue_size: 100,
            queue_timeout: Duration::from_secs(60),
            block_bytes: 256,
            index_memory: 256 << 20,
            index_ttl: Duration::from_secs(1800),
            receipts: 1024,
            seed: 0,
        }
    }
}

/// What differs for one pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PoolOverride {
    /// Its policy.
    #[serde(deserialize_with = "some_policy", skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyConfig>,
    /// How long its engines take: a timing file, or `model@gpu`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timing: Option<String>,
    /// Who counts its tokens: the path of a tokenizer, `auto`, `engine` or `estimate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// A file with its chat template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<PathBuf>,
}

fn some_policy<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PolicyConfig>, D::Error> {
    name_or_config(deserializer).map(Some)
}

/// How failing workers are found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Health {
    /// Path of the probe.
    pub path: String,
    /// Time between two probes of one worker. A worker that is down is probed as often.
    #[serde(with = "humantime_serde")]
    pub interval: Duration,
    /// Time a probe may take.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
    /// Failures in a row, of probes or of requests, that make a worker unhealthy.
    pub failure_threshold: u32,
    /// Good probes in a row that make it healthy again.
    pub success_threshold: u32,
}

impl Default for Health {
    fn default() -> Self {
        Self {
            path: "/health".into(),
            interval: Duration::from_secs(2),
            timeout: Duration::from_secs(5),
            failure_threshold: 3,
            success_threshold: 2,
        }
    }
}

/// How failed attempts are repeated. Only before the first byte of an answer has gone to the client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Retry {
    /// Attempts of one request on one worker before it is sent to another.
    pub max_worker_retries: u32,
    /// Attempts of one request beside the first.
    pub max_total_retries: u32,
}

impl Default for Retry {
    fn default() -> Self {
        Self { max_worker_retries: 1, max_total_retries: 5 }
    }
}

/// Connections to workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Upstream {
    /// Time to connect.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
    /// Time after which an idle connection is not used again. Below the 5 s after which uvicorn, and so vLLM and
    /// SGLang, close it.
    #[serde(with = "humantime_serde")]
    pub idle_timeout: Duration,
    /// Idle connections kept per worker and relay thread.
    pub idle_max: usize,
}

impl Default for Upstream {
    fn default() -> Self {
        Self { connect_timeout: Duration::from_secs(5), idle_timeout: Duration::from_secs(4), idle_max: 256 }
    }
}

/// What engines tell of their caches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KvEvents {
    /// Whether the events of engines that publish any are read.
    pub enabled: bool,
    /// Where an engine publishes that does not say so: port of rank 0, each further rank one higher; 0 for nowhere.
    pub port: u16,
    /// Its replay socket, likewise.
    pub replay_port: u16,
    /// Messages of one feed that may wait to be applied; beyond it some are dropped and asked for again.
    pub queue_messages: usize,
    /// Bytes of them.
    pub queue_bytes: usize,
    /// Silence after which a feed that should have said something counts as broken.
    #[serde(with = "humantime_serde")]
    pub silent_after: Duration,
    /// Time between two signs of life asked of an engine's socket; without any for three times as long, the connection
    /// is made anew.
    #[serde(with = "humantime_serde")]
    pub heartbeat: Duration,
    /// Bytes that the index of one pool may use.
    pub index_memory: usize,
    /// File in which what engines hold is kept over a restart of the gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<PathBuf>,
    /// Time between two writings of it.
    #[serde(with = "humantime_serde")]
    pub snapshot_interval: Duration,
}

impl Default for KvEvents {
    fn default() -> Self {
        Self {
            enabled: true,
            port: 0,
            replay_port: 0,
            queue_messages: 50_000,
            queue_bytes: 32 << 20,
            silent_after: Duration::from_secs(10),
            heartbeat: Duration::from_secs(5),
            index_memory: 1 << 30,
            snapshot: None,
            snapshot_interval: Duration::from_secs(30),
        }
    }
}

/// What is wrong with a configuration, where, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct ConfigError {
    /// The field, as `section.key`.
    pub field: String,
    /// What is wrong and what would be right.
    pub problem: String,
}

/// The shortest and the longest time that makes sense anywhere.
const LEAST_TIME: Duration = Duration::from_millis(1);
const MOST_TIME: Duration = Duration::from_secs(365 * 24 * 3600);

pub(crate) fn wrong<T>(field: &str, problem: String) -> Result<T, ConfigError> {
    Err(ConfigError { field: field.into(), problem })
}

pub(crate) fn within<T: PartialOrd + fmt::Display>(
    field: &str,
    value: T,
    least: T,
    most: T,
) -> Result<(), ConfigError> {
    if value < least || value > most {
        return wrong(field, format!("{value} is out of range: take {least} to {most}"));
    }
    Ok(())
}

fn validate_policy(field: &str, policy: &PolicyConfig) -> Result<(), ConfigError> {
    match policy {
        PolicyConfig::CacheAware(config) => {
            within(&format!("{field}.cache_threshold"), config.cache_threshold, 0.0, 1.0)?;
            within(&format!("{field}.balance_rel_threshold"), config.balance_rel_threshold, 1.0, f64::MAX)
        }
        PolicyConfig::PrefixAware(config) => {
            within(&format!("{field}.saturation_inflight"), config.saturation_inflight, 1, u32::MAX)
        }
        PolicyConfig::Weighted(config) => {
            within(&format!("{field}.queue"), config.queue, 0.0, f64::MAX)?;
            within(&format!("{field}.kv"), config.kv, 0.0, f64::MAX)?;
            within(&format!("{field}.prefix"), config.prefix, 0.0, f64::MAX)?;
            within(&format!("{field}.active_request"), config.active_request, 0.0, f64::MAX)?;
            within(&format!("{field}.no_hit_lru"), config.no_hit_lru, 0.0, f64::MAX)
        }
        PolicyConfig::LlmDAffinity(config) => {
            within(&format!("{field}.threshold"), config.threshold, 0.0, 1.0)?;
            within(&format!("{field}.penalty_max_ms"), config.penalty_max_ms, 0.0, f64::MAX)?;
            within(&format!("{field}.prefill_tokens_s"), config.prefill_tokens_s, 1.0, f64::MAX)
        }
        PolicyConfig::Dynamo(config) => {
            within(&format!("{field}.overlap_credit"), config.overlap_credit, 0.0, f64::MAX)?;
            within(&format!("{field}.prefill_load_scale"), config.prefill_load_scale, 0.0, f64::MAX)?;
            within(&format!("{field}.block_tokens"), config.block_tokens, 1, u32::MAX)
        }
        PolicyConfig::Aibrix(config) => {
            within(&format!("{field}.deviations"), config.deviations, 0.0, f64::MAX)
        }
        PolicyConfig::Preble(config) => within(&format!("{field}.window_s"), config.window_s, 1.0, f64::MAX),
        PolicyConfig::SmgLeastLoad(config) => {
            within(&format!("{field}.kv_pressure_s"), config.kv_pressure_s, 0.0, f64::MAX)?;
            within(&format!("{field}.throughput_tokens_s"), config.throughput_tokens_s, 1.0, f64::MAX)
        }
        PolicyConfig::ConsistentHash(config) => {
            within(&format!("{field}.load_factor"), config.load_factor, 1.0, f64::MAX)?;
            within(&format!("{field}.virtual_nodes"), config.virtual_nodes, 1, 4096)
        }
        PolicyConfig::PrefixHash(config) => {
            within(&format!("{field}.load_factor"), config.load_factor, 1.0, f64::MAX)?;
            within(&format!("{field}.load_margin"), config.load_margin, 0.0, f64::MAX)?;
            within(&format!("{field}.virtual_nodes"), config.virtual_nodes, 1, 4096)
        }
        PolicyConfig::Dlpm(config) => {
            within(&format!("{field}.quantum_tokens"), config.quantum_tokens, 1, u32::MAX)?;
            within(&format!("{field}.output_weight"), config.output_weight, 0.0, f64::MAX)
        }
        _ => Ok(()),
    }
}

// === impl FeedSpec ===

impl FeedSpec {
    /// A feed without a replay socket, of any topic.
    pub fn new(endpoint: &str) -> Self {
        Self { endpoint: endpoint.into(), replay: None, topic: String::new() }
    }

    /// Checks that both addresses are some.
    ///
    /// # Errors
    /// What is wrong, with `field` as the name of this feed.
    pub fn validate(&self, field: &str) -> Result<(), ConfigError> {
        let named = [("endpoint", Some(&self.endpoint)), ("replay", self.replay.as_ref())];
        for (key, address) in named.into_iter().filter_map(|(key, address)| Some((key, address?))) {
            let resolved = resolve(address, "host");
            if resolved.is_none_or(|address| address.starts_with(':') || address.ends_with(":0")) {
                let problem = format!("'{address}' is no address of a ZeroMQ socket, write tcp://host:port");
                return wrong(&format!("{field}.{key}"), problem);
            }
        }
        Ok(())
    }
}

// === impl Config ===

impl Config {
    /// Checks what types cannot: ranges and addresses.
    ///
    /// # Errors
    /// The first field that is out of range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.validate_workers()?;
        self.validate_times()?;
        Timings::read(&self.routing)?;
        let Self { routing, health, retry, server, kv_events, .. } = self;
        within("kv_events.queue_messages", kv_events.queue_messages, 1, 10_000_000)?;
        within("kv_events.queue_bytes", kv_events.queue_bytes, 1 << 10, 1 << 40)?;
        within("routing.block_bytes", routing.block_bytes, 16, 1 << 20)?;
        within("routing.receipts", routing.receipts, 0, 100_000)?;
        within("routing.queue_size", routing.queue_size, 0, 1_000_000)?;
        within("health.failure_threshold", health.failure_threshold, 1, u32::MAX)?;
        within("health.success_threshold", health.success_threshold, 1, u32::MAX)?;
        within("retry.max_worker_retries", retry.max_worker_retries, 1, u32::MAX)?;
        within("server.relay_threads", server.relay_threads, 0, 1024)?;
        if !health.path.starts_with('/') {
            return wrong("health.path", format!("'{}' must begin with '/'", health.path));
        }
        validate_policy("routing.policy", &routing.policy)?;
        for (model, pool) in &routing.pools {
            if model.is_empty() {
                return wrong("routing.pools", "a model's name is empty: write MODEL=POLICY".into());
            }
            if let Some(policy) = &pool.policy {
                validate_policy(&format!("routing.pools.{model}.policy"), policy)?;
            }
        }
        self.tokens.validate()?;
        self.hints.validate()?;
        Ok(())
    }

    fn validate_workers(&self) -> Result<(), ConfigError> {
        for (i, worker) in self.workers.iter().enumerate() {
            let field = format!("workers[{i}].url");
            if let Err(problem) = crate::address::Address::parse(&worker.url) {
                return wrong(&field, problem);
            }
            for (n, feed) in worker.kv_events.iter().enumerate() {
                feed.validate(&format!("workers[{i}].kv_events[{n}]"))?;
            }
            let same =
                |other: &WorkerSpec| other.url.trim_end_matches('/') == worker.url.trim_end_matches('/');
            if self.workers[..i].iter().any(same) {
                return wrong(&field, format!("'{}' is there twice", worker.url));
            }
        }
        Ok(())
    }

    fn validate_times(&self) -> Result<(), ConfigError> {
        let Self { server, routing, health, upstream, kv_events, tokens, .. } = self;
        for (field, value, least) in [
            ("server.header_timeout", server.header_timeout, LEAST_TIME),
            ("server.body_timeout", server.body_timeout, LEAST_TIME),
            ("server.request_timeout", server.request_timeout, LEAST_TIME),
            ("server.stream_idle_timeout", server.stream_idle_timeout, LEAST_TIME),
            ("server.shutdown_grace", server.shutdown_grace, Duration::ZERO),
            ("routing.queue_timeout", routing.queue_timeout, LEAST_TIME),
            ("routing.index_ttl", routing.index_ttl, LEAST_TIME),
            ("health.interval", health.interval, LEAST_TIME),
            ("health.timeout", health.timeout, LEAST_TIME),
            ("upstream.connect_timeout", upstream.connect_timeout, LEAST_TIME),
            ("upstream.idle_timeout", upstream.idle_timeout, Duration::ZERO),
            ("kv_events.silent_after", kv_events.silent_after, LEAST_TIME),
            ("kv_events.heartbeat", kv_events.heartbeat, LEAST_TIME),
            ("kv_events.snapshot_interval", kv_events.snapshot_interval, LEAST_TIME),
            ("tokens.engine_timeout", tokens.engine_timeout, LEAST_TIME),
        ] {
            if value < least || value > MOST_TIME {
                return wrong(field, format!("{value:?} is out of range: take {least:?} to a year"));
            }
        }
        Ok(())
    }

    /// How the pool of `model` is routed, whose engines take as long as `timing` says.
    pub(crate) fn router(&self, model: &str, timing: Option<&TimingModel>) -> router::Config {
        let routing = &self.routing;
        let own = routing.pools.get(model).and_then(|differs| differs.policy.as_ref());
        let policy = own.unwrap_or(&routing.policy);
        let nanos = |span: Duration| Nanos(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX));
        router::Config {
            scheduler: scheduler::Config {
                policy: policy.clone(),
                in_flight_max: routing.max_concurrent_requests,
                queue_len_max: routing.queue_size,
                queue_timeout: nanos(routing.queue_timeout),
                timing: timing.cloned().map(Box::new),
                session_admission: routing.session_admission,
                receipts_max: routing.receipts,
                seed: routing.seed,
            },
            index: approx::Config { memory_bytes_max: routing.index_memory, ttl: nanos(routing.index_ttl) },
            exact: self
                .kv_events
                .enabled
                .then_some(exact::Config { memory_bytes_max: self.kv_events.index_memory }),
            block_tokens: routing.block_bytes / BYTES_PER_TOKEN as u32,
        }
    }
}
