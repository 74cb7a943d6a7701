//! The gateway's configuration: plain values with their defaults, each defined once.
//!
//! The same structs are the YAML file's sections; `kvlane config` prints them.

mod log;

use std::path::PathBuf;
use std::time::Duration;

pub use kvlane_control::health::Health;
pub use kvlane_core::block::BYTES_PER_TOKEN;
pub use kvlane_core::config::ConfigError;
use kvlane_core::config::{LEAST_TIME, MOST_TIME, within, wrong};
use kvlane_core::timing::TimingModel;
pub use kvlane_fleet::feed::config::KvEvents;
pub use kvlane_fleet::recording_writer::config::Recorder;
use kvlane_fleet::routing::validate_policy;
pub use kvlane_fleet::routing::{Breaker, Budget, PoolOverride, Routing};
use kvlane_fleet::timings::Timings;
pub use kvlane_fleet::tokenize::{Content, TokenSource, Tokens};
pub use kvlane_fleet::worker::config::{FeedSpec, WorkerSpec};
use kvlane_http::connections::ConnectionsConfig;
use kvlane_http::secret::Secret;
use kvlane_http::tls::TlsConfig;
pub use kvlane_proxy::attributes::Config as Hints;
pub use kvlane_proxy::auth::config::{KeySpec, Security};
pub use kvlane_proxy::config::{ExtraPath, Metrics, Server};
pub use kvlane_proxy::faults::{Continuation, Hedge, Multiplier, Retry, RouteTimeouts, Timeouts};
pub use kvlane_proxy::limits::config::LimitSpec;
use kvlane_proxy::paths::OwnPath;
use kvlane_proxy::salt::SaltKey;
pub use kvlane_proxy::traces::config::Tracing;
use serde::{Deserialize, Serialize};

pub use self::log::{Log, LogFormat};

/// The configuration of `kvlane serve`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The address for clients.
    pub server: Server,
    /// The address for Prometheus and operators.
    pub metrics: Metrics,
    /// The workers known at start; others can join at run time.
    pub workers: Vec<WorkerSpec>,
    /// How requests are placed.
    pub routing: Routing,
    /// How failing workers are detected.
    pub health: Health,
    /// Timeouts of a request's steps that are not in `server`.
    pub timeouts: Timeouts,
    /// How failed attempts are repeated.
    pub retry: Retry,
    /// Whether a stream whose engine dies continues on another endpoint.
    pub continuation: Continuation,
    /// Whether a request is sent to a second endpoint when the first is late.
    pub hedge: Hedge,
    /// When an endpoint that fails requests gets no more of them.
    pub breaker: Breaker,
    /// Connections to workers.
    pub upstream: ConnectionsConfig,
    /// KV events of engines.
    pub kv_events: KvEvents,
    /// How the tokens of prompts are counted.
    pub tokens: Tokens,
    /// Request attributes that clients may set: session, tenant, priority.
    pub hints: Hints,
    /// Authentication and authorization of clients and operators.
    pub auth: Security,
    /// What each client may use.
    pub limits: Vec<LimitSpec>,
    /// TLS for clients, operators and workers.
    pub tls: TlsConfig,
    /// Export of traces.
    pub tracing: Tracing,
    /// What is logged, and in which format.
    pub log: Log,
    /// Recording of the schedulers' inputs.
    pub recorder: Recorder,
}

/// Smallest value of `server.body_memory`.
const BODY_MEMORY_MIN: usize = 1 << 20;
/// Most paths with deadlines of their own.
const ROUTES_MAX: usize = 1000;

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
        let Self { routing, health, server, kv_events, .. } = self;
        within("kv_events.queue_messages", kv_events.queue_messages, 1, 10_000_000)?;
        within("kv_events.queue_bytes", kv_events.queue_bytes, 1 << 10, 1 << 40)?;
        within("routing.block_bytes", routing.block_bytes, 16, 1 << 20)?;
        within("routing.receipts", routing.receipts, 0, 100_000)?;
        within("routing.queue_size", routing.queue_size, 0, 1_000_000)?;
        within("health.failure_threshold", health.failure_threshold, 1, u32::MAX)?;
        within("health.success_threshold", health.success_threshold, 1, u32::MAX)?;
        within("server.relay_threads", server.relay_threads, 0, 1024)?;
        within("server.body_memory", server.body_memory, BODY_MEMORY_MIN, 1 << 40)?;
        if !health.path.starts_with('/') {
            return wrong("health.path", format!("'{}' must begin with '/'", health.path));
        }
        validate_policy("routing.policy", &routing.policy)?;
        if let Some(policy) = &routing.shadow_policy {
            validate_policy("routing.shadow_policy", policy)?;
        }
        for (model, pool) in &routing.pools {
            if model.is_empty() {
                return wrong("routing.pools", "a model's name is empty: write MODEL=POLICY".into());
            }
            if let Some(policy) = &pool.policy {
                validate_policy(&format!("routing.pools.{model}.policy"), policy)?;
            }
        }
        self.validate_faults()?;
        server.validate_paths(|path| OwnPath::of(path).is_some())?;
        self.tokens.validate()?;
        self.hints.validate()?;
        self.recorder.validate()?;
        self.validate_security()?;
        kvlane_proxy::limits::config::validate(&self.limits)?;
        self.tracing.validate()?;
        Ok(())
    }

    /// Files named by the configuration that are read when it takes effect.
    pub fn files(&self) -> Vec<PathBuf> {
        let routing = &self.routing;
        let timings = routing.pools.values().filter_map(|pool| pool.timing.as_ref()).chain(&routing.timing);
        // The name of a preset is not a file.
        let timings = timings.filter(|said| TimingModel::preset(said).is_err()).map(PathBuf::from);
        timings.chain(self.files_of_security()).chain(self.tracing.files()).collect()
    }

    fn validate_workers(&self) -> Result<(), ConfigError> {
        for (i, worker) in self.workers.iter().enumerate() {
            let field = format!("workers[{i}].url");
            if let Err(problem) = kvlane_http::address::Address::parse(&worker.url) {
                return wrong(&field, problem);
            }
            for (n, feed) in worker.kv_events.iter().enumerate() {
                feed.validate(&format!("workers[{i}].kv_events[{n}]"))?;
            }
            let name = kvlane_http::address::worker_name;
            let same = |other: &WorkerSpec| name(&other.url) == name(&worker.url);
            if self.workers[..i].iter().any(same) {
                return wrong(&field, format!("'{}' is listed twice", worker.url));
            }
        }
        Ok(())
    }

    fn validate_routes(&self) -> Result<(), ConfigError> {
        within("timeouts.routes", self.timeouts.routes.len(), 0, ROUTES_MAX)?;
        for (path, route) in &self.timeouts.routes {
            let field =
                |key: &str| format!("timeouts.routes.{path}{}{key}", if key.is_empty() { "" } else { "." });
            if !path.starts_with('/') {
                return wrong(&field(""), "a path must begin with '/', as in /v1/embeddings".into());
            }
            for (key, value) in [
                ("body_timeout", route.body_timeout),
                ("first_byte_timeout", route.first_byte_timeout),
                ("stream_idle_timeout", route.stream_idle_timeout),
                ("request_timeout", route.request_timeout),
            ] {
                if value.is_some_and(|value| value < LEAST_TIME || value > MOST_TIME) {
                    return wrong(
                        &field(key),
                        format!("it is out of range: must be {LEAST_TIME:?} to a year"),
                    );
                }
            }
        }
        Ok(())
    }

    fn validate_faults(&self) -> Result<(), ConfigError> {
        self.validate_routes()?;
        let Self { retry, continuation, .. } = self;
        within("continuation.max_per_request", continuation.max_per_request, 1, 100)?;
        within("continuation.buffer_bytes_max", continuation.buffer_bytes_max, 1 << 10, 1 << 30)?;
        within("retry.max_worker_retries", retry.max_worker_retries, 1, u32::MAX)?;
        Ok(())
    }

    fn validate_times(&self) -> Result<(), ConfigError> {
        let Self { server, routing, health, retry, breaker, upstream, kv_events, tokens, .. } = self;
        for (field, value, least) in [
            ("server.header_timeout", server.header_timeout, LEAST_TIME),
            ("server.body_timeout", server.body_timeout, LEAST_TIME),
            ("server.request_timeout", server.request_timeout, LEAST_TIME),
            ("server.stream_idle_timeout", server.stream_idle_timeout, LEAST_TIME),
            ("server.shutdown_grace", server.shutdown_grace, Duration::ZERO),
            ("server.reload_interval", server.reload_interval, Duration::ZERO),
            ("routing.queue_timeout", routing.queue_timeout, LEAST_TIME),
            ("routing.index_ttl", routing.index_ttl, LEAST_TIME),
            ("routing.index_snapshot_interval", routing.index_snapshot_interval, LEAST_TIME),
            ("health.interval", health.interval, LEAST_TIME),
            ("health.timeout", health.timeout, LEAST_TIME),
            ("retry.initial_backoff", retry.initial_backoff, Duration::ZERO),
            ("retry.max_backoff", retry.max_backoff, Duration::ZERO),
            ("breaker.cooldown", breaker.cooldown, LEAST_TIME),
            ("breaker.cooldown_max", breaker.cooldown_max, LEAST_TIME),
            ("breaker.slow_start", breaker.slow_start, Duration::ZERO),
            ("upstream.connect_timeout", upstream.connect_timeout, LEAST_TIME),
            ("upstream.idle_timeout", upstream.idle_timeout, Duration::ZERO),
            ("kv_events.silent_after", kv_events.silent_after, LEAST_TIME),
            ("kv_events.heartbeat", kv_events.heartbeat, LEAST_TIME),
            ("kv_events.snapshot_interval", kv_events.snapshot_interval, LEAST_TIME),
            ("tokens.engine_timeout", tokens.engine_timeout, LEAST_TIME),
            ("hedge.delay", self.hedge.delay.unwrap_or(LEAST_TIME), Duration::ZERO),
            ("timeouts.first_byte_timeout", self.timeouts.first_byte_timeout, LEAST_TIME),
        ] {
            if value < least || value > MOST_TIME {
                return wrong(field, format!("{value:?} is out of range: must be {least:?} to a year"));
            }
        }
        Ok(())
    }

    /// The workers' API keys, with the fields they are in.
    fn worker_keys(&self) -> impl Iterator<Item = (String, &Secret)> {
        let own = self.workers.iter().enumerate();
        let own =
            own.filter_map(|(i, worker)| Some((format!("workers[{i}].api_key"), worker.api_key.as_ref()?)));
        self.upstream.api_key.as_ref().map(|key| ("upstream.api_key".to_owned(), key)).into_iter().chain(own)
    }

    fn validate_security(&self) -> Result<(), ConfigError> {
        for (field, key) in self.worker_keys() {
            key.read().map_err(|problem| ConfigError { field, problem })?;
        }
        kvlane_http::tls::Tls::read(&self.tls)?;
        SaltKey::read(&self.auth)?;
        kvlane_proxy::auth::Auth::check(&self.auth, self.metrics.host)
    }

    /// The files of keys and certificates.
    fn files_of_security(&self) -> impl Iterator<Item = PathBuf> {
        let keys = self.worker_keys().filter_map(|(_, key)| key.file().map(PathBuf::from));
        let salts = self.auth.tenant_salt_key.as_ref().and_then(Secret::file).map(PathBuf::from);
        let tokens = self.auth.jwt.as_ref().and_then(|jwt| jwt.jwks_file.clone());
        self.auth.keys_file.clone().into_iter().chain(tokens).chain(salts).chain(keys).chain(self.tls.files())
    }

    /// What pools and connections to workers are set up with.
    pub fn fleet_settings(&self, timings: Timings) -> kvlane_fleet::settings::Settings {
        kvlane_fleet::settings::Settings {
            routing: self.routing.clone(),
            timings,
            breaker: self.breaker.clone(),
            retries: self.retry.budget,
            hedges: self.hedge.budget,
            kv_events: self.kv_events.clone(),
            tokens: self.tokens.clone(),
            upstream: self.upstream.clone(),
        }
    }

    /// What the request path is set up with.
    pub(crate) fn proxy_settings(&self) -> kvlane_proxy::settings::Settings {
        kvlane_proxy::settings::Settings {
            server: self.server.clone(),
            timeouts: self.timeouts.clone(),
            retry: self.retry.clone(),
            continuation: self.continuation.clone(),
            hedge: self.hedge.clone(),
            attributes: self.hints.clone(),
            auth: self.auth.clone(),
            limits: self.limits.clone(),
            tracing: self.tracing.clone(),
            probe_interval: self.health.interval,
        }
    }
}
