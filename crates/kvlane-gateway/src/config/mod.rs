//! The gateway's configuration. Each key is one field of its owner's section, with its description, default and bounds.

mod log;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

pub use kvlane_control::health::Health;
pub use kvlane_control::replicas::config::Replicas;
pub use kvlane_core::block::BYTES_PER_TOKEN;
pub use kvlane_core::budget::Config as Budget;
pub use kvlane_core::config::ConfigError;
use kvlane_core::config::{Setting, wrong};
use kvlane_core::section;
use kvlane_core::timing::TimingModel;
pub use kvlane_fleet::adapters::{AdapterSpec, Adapters};
pub use kvlane_fleet::catalogue::{FallbackSpec, MirrorSpec, ModelSpec, TargetSpec};
pub use kvlane_fleet::disaggregation::Disaggregation;
pub use kvlane_fleet::discovery::config::{Discovery, Kubernetes};
pub use kvlane_fleet::feed::config::KvEvents;
use kvlane_fleet::readiness::Bounds;
pub use kvlane_fleet::recording_writer::config::Recorder;
pub use kvlane_fleet::routing::{Breaker, PoolOverride, Routing};
use kvlane_fleet::timings::Timings;
pub use kvlane_fleet::tokenize::{Content, TokenSource, Tokens};
use kvlane_fleet::worker::config::workers;
pub use kvlane_fleet::worker::config::{FeedSpec, ProviderSpec, WorkerSpec};
use kvlane_http::client::{Client, origin_and_path};
use kvlane_http::connections::ConnectionsConfig;
use kvlane_http::secret::Secret;
use kvlane_http::tls::TlsConfig;
pub use kvlane_proxy::attributes::Config as Hints;
pub use kvlane_proxy::auth::config::{KeySpec, Security};
pub use kvlane_proxy::config::{ExtraPath, Metrics, Server};
pub use kvlane_proxy::ext_proc::config::EndpointPicker;
pub use kvlane_proxy::faults::{Continuation, Hedge, Retry, RouteTimeouts, Timeouts};
pub use kvlane_proxy::limits::config::LimitSpec;
pub use kvlane_proxy::objectives::ObjectiveSpec;
use kvlane_proxy::paths::OwnPath;
use kvlane_proxy::salt::SaltKey;
pub use kvlane_proxy::traces::config::Tracing;

pub use self::log::{Log, LogFormat};

section! {
    /// The configuration of `kvlane serve`.
    pub struct Config {
        /// The clients' port, and limits of requests.
        pub server: Server = Server::default();
        /// The port of `/metrics` and the admin API. Keep it private.
        pub metrics: Metrics = Metrics::default();
        /// The workers known from the start, as in `[http://10.0.0.7:8000]`, or each with the keys below; others can
        /// join at run time.
        #[serde(deserialize_with = "workers")]
        pub workers: Vec<WorkerSpec> = Vec::new();
        /// Discovery of workers by Kubernetes, DNS or a file.
        pub discovery: Discovery = Discovery::default();
        /// Exchange of requests in flight and of sent prompts with other replicas of the gateway (docs/replicas.md).
        pub replicas: Replicas = Replicas::default();
        /// Names of models that clients use, and what serves them (docs/models.md): aliases, canaries, fallbacks, mirrors; as in
        /// `gpt-4o: {targets: [{model: llama-70b}]}`.
        pub models: BTreeMap<String, ModelSpec> = BTreeMap::new();
        /// Adapters (LoRA) that kvlane has engines load and unload (docs/models.md); none by default.
        pub adapters: Adapters = Adapters::default();
        /// Placement of requests.
        pub routing: Routing = Routing::default();
        /// Prefill and decode of a request on two workers (docs/disaggregation.md).
        pub disaggregation: Disaggregation = Disaggregation::default();
        /// Health checks of workers.
        pub health: Health = Health::default();
        /// Timeouts of a request's steps, in addition to those in the section `server`.
        pub timeouts: Timeouts = Timeouts::default();
        /// Retries of failed attempts, only before the first byte of an answer has gone to the client.
        pub retry: Retry = Retry::default();
        /// Continuation of a streamed completion or chat on another endpoint if its engine dies.
        pub continuation: Continuation = Continuation::default();
        /// Hedging: a streamed request is also sent to a second endpoint if its first byte is late.
        pub hedge: Hedge = Hedge::default();
        /// The endpoint picker for Envoy (`kvlane epp`): its ports, and what it does with answers.
        pub epp: EndpointPicker = EndpointPicker::default();
        /// Circuit breakers of endpoints.
        pub breaker: Breaker = Breaker::default();
        /// Connections to workers.
        pub upstream: ConnectionsConfig = ConnectionsConfig::default();
        /// KV events of engines (docs/kv-events.md).
        pub kv_events: KvEvents = KvEvents::default();
        /// Tokenization of prompts.
        pub tokens: Tokens = Tokens::default();
        /// Hints of clients about their requests, in headers. Of each list the first header with a valid value is
        /// used; an empty list ignores these hints.
        pub hints: Hints = Hints::default();
        /// Authentication of clients and operators (docs/operations.md, "Security"). If any key is configured,
        /// clients need one; if a key of a viewer or admin is configured, operators need one. `metrics.host` listens
        /// beyond loopback only then.
        pub auth: Security = Security::default();
        /// Limits of each client, as in `{key: '*', model: '*', requests_per_minute: 600, concurrent_requests: 50}`.
        /// Entries for different models all apply.
        pub limits: Vec<LimitSpec> = Vec::new(), in 0..=10_000;
        /// Latency objectives of requests (docs/operations.md), as in
        /// `{model: llama-70b, priority: interactive, ttft: 500ms, tpot: 50ms, if_missed: refuse}`. The first entry that
        /// matches a request counts; a header of the request replaces the target that it names.
        pub objectives: Vec<ObjectiveSpec> = Vec::new(), in 0..=1000;
        /// Certificates, all files PEM. A reload reads them again, and a change of a file triggers a reload.
        pub tls: TlsConfig = TlsConfig::default();
        /// Traces of requests (OpenTelemetry). They contain no prompts, answers, keys or sessions.
        pub tracing: Tracing = Tracing::default();
        /// Logs on stderr. Flags override these keys.
        pub log: Log = Log::default();
        /// Recordings of scheduler inputs for `kvlane explain` and `kvlane simulate --trace`: docs/explain.md. No
        /// prompts.
        pub recorder: Recorder = Recorder::default();
    }
}

// === impl Config ===

impl Config {
    /// Checks the bounds of all keys, and what bounds cannot.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.check("")?;
        self.validate_workers()?;
        self.validate_paths()?;
        self.discovery.validate()?;
        self.adapters.validate(&self.models)?;
        self.replicas.validate()?;
        if self.discovery.kubernetes.enabled && !cfg!(feature = "kubernetes") {
            return wrong(
                "discovery.kubernetes.enabled",
                "this build cannot watch Kubernetes: build kvlane with its feature `kubernetes`".into(),
            );
        }
        Timings::read(&self.routing)?;
        if self.routing.pools.contains_key("") {
            return wrong("routing.pools", "a model's name is empty: write MODEL=POLICY".into());
        }
        self.server.validate_paths(|path| OwnPath::of(path).is_some())?;
        self.tokens.validate()?;
        self.hints.validate()?;
        self.recorder.validate()?;
        self.validate_security()?;
        kvlane_proxy::limits::config::validate(&self.limits)?;
        kvlane_proxy::objectives::validate(&self.objectives, &self.hints.priorities)?;
        kvlane_fleet::catalogue::validate(&self.models)?;
        kvlane_fleet::catalogue::validate_providers(&self.models, &self.workers)?;
        self.tracing.validate()
    }

    /// Files named by the configuration that are read when it takes effect.
    pub fn files(&self) -> Vec<PathBuf> {
        let routing = &self.routing;
        let timings = routing.pools.values().filter_map(|pool| pool.timing.as_ref()).chain(&routing.timing);
        // The name of a preset is not a file.
        let timings = timings.filter(|said| TimingModel::preset(said).is_err()).map(PathBuf::from);
        let others = self.tracing.files().chain(self.replicas.files());
        timings.chain(self.files_of_security()).chain(others).collect()
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
            worker.validate_provider(&format!("workers[{i}].provider"))?;
            let name = kvlane_http::address::worker_name;
            let same = |other: &WorkerSpec| name(&other.url) == name(&worker.url);
            if self.workers[..i].iter().any(same) {
                return wrong(&field, format!("'{}' is listed twice", worker.url));
            }
        }
        Ok(())
    }

    fn validate_paths(&self) -> Result<(), ConfigError> {
        if !self.health.path.starts_with('/') {
            return wrong("health.path", format!("'{}' must begin with '/'", self.health.path));
        }
        if let Some(url) = &self.routing.empty_pool_webhook
            && let Err(problem) = Client::at(origin_and_path(url).0, Duration::from_secs(1))
        {
            return wrong("routing.empty_pool_webhook", problem);
        }
        match self.timeouts.routes.keys().find(|path| !path.starts_with('/')) {
            Some(path) => wrong(
                &format!("timeouts.routes.{path}"),
                "a path must begin with '/', as in /v1/embeddings".into(),
            ),
            None => Ok(()),
        }
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
        self.replicas.tls()?;
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
            models: self.models.clone(),
            adapters: self.adapters.clone(),
            routing: self.routing.clone(),
            timings,
            disaggregation: self.disaggregation.clone(),
            breaker: self.breaker.clone(),
            retries: self.retry.budget,
            hedges: self.hedge.budget,
            kv_events: self.kv_events.clone(),
            tokens: self.tokens.clone(),
            upstream: self.upstream.clone(),
            start: Bounds {
                workers: self.health.sync_timeout,
                sources: self.discovery.sync_timeout,
                snapshot: self.replicas.snapshot_timeout(),
            },
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
            objectives: self.objectives.clone(),
            tracing: self.tracing.clone(),
            probe_interval: self.health.interval,
        }
    }
}
