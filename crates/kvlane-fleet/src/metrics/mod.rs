//! The gateway's counters and histograms, and the handles that relay threads use.
//!
//! Labels are bounded: models and workers are those of the fleet, everything else is a closed set.

mod auth;
mod cache_accuracy;
mod faults;
mod feeds;
pub mod histogram;
mod labels;
mod limits;
mod panics;
mod recorder;
mod reuse;
mod slo;
mod spans;
mod stages;
pub mod table;

use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;

use kvlane_core::cache_accuracy::KnowledgeChange;
use kvlane_core::policy::{PolicyConfig, Reason};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

pub use self::auth::{AuthMetrics, OTHER_NAMES};
pub use self::cache_accuracy::CacheAccuracyMetrics;
pub use self::faults::FaultMetrics;
use self::faults::Shed;
pub use self::feeds::FeedMetrics;
use self::histogram::Histogram;
pub use self::labels::{
    AdapterLabel, Continued, DecodeLabels, DirectionLabel, EstimateLabels, FailureKind, FailureLabels,
    Hedged, MirrorLabels, ModelLabel, PredictionLabels, ReloadLabel, ReplicaLabel, RequestLabels,
    SelectionLabels, SourceLabel, StatLabels, TargetLabels, TokensLabel, WarmUpLabel, WorkerLabel,
    WorkerLabels,
};
pub use self::limits::{LimitMetrics, Reached};
use self::panics::PanicMetrics;
pub use self::recorder::RecorderMetrics;
pub use self::reuse::EngineReuse;
pub use self::slo::SloMetrics;
pub use self::spans::SpanMetrics;
use self::stages::PoolStages;
use self::table::{Discovery, Gateway, Knowledge, Replicas, Requests, Tokens, Workers};

/// All metrics.
#[expect(missing_docs, reason = "the groups are those of `table`")]
pub struct Metrics {
    pub registry: Mutex<Registry>,
    pub requests: Requests,
    pub tokens: Tokens,
    pub workers: Workers,
    pub discovery: Discovery,
    pub knowledge: Knowledge,
    pub replicas: Replicas,
    pub gateway: Gateway,
    pub faults: FaultMetrics,
    pub auth: AuthMetrics,
    pub limits: LimitMetrics,
    pub spans: SpanMetrics,
    pub panics: PanicMetrics,
    pub recorder: RecorderMetrics,
    pub feeds: FeedMetrics,
    pub cache_accuracy: CacheAccuracyMetrics,
}

/// One pool's handles, looked up once.
#[expect(missing_docs, reason = "each field is a row of `table`, which says what it counts")]
pub struct PoolMetrics {
    pub duration: Histogram,
    pub ttft: Histogram,
    pub kv_transfer: Histogram,
    pub tpot: Histogram,
    pub input_tokens: Counter,
    pub output_tokens: Counter,
    pub cached_tokens: Counter,
    pub predicted_tokens: Counter,
    /// Counted by the gateway, for every answered request.
    pub prompt_tokens: Counter,
    pub transferred_tokens: Counter,
    pub engine_reuse: EngineReuse,
    pub splits: Counter,
    pub tokenize: Histogram,
    pub retries: Counter,
    pub shed: Shed,
    pub slo: SloMetrics,
    pub stages: PoolStages,
    selections: Family<SelectionLabels, Counter>,
    cache_accuracy: CacheAccuracyMetrics,
}

// === impl PoolMetrics ===

impl PoolMetrics {
    /// The placement counters of one endpoint under `policy`.
    pub fn selection(&self, worker: &str, policy: &'static str) -> SelectionMetrics {
        SelectionMetrics(Reason::ALL.map(|reason| {
            let labels = SelectionLabels { worker: worker.into(), policy, reason: reason.name() };
            self.selections.get_or_create(&labels).clone()
        }))
    }

    /// Counts a change of an endpoint's cache knowledge.
    pub fn note_knowledge(&self, model: &str, change: KnowledgeChange) {
        self.cache_accuracy.note(model, change);
    }
}

/// One endpoint's counters by reason, looked up once.
pub struct SelectionMetrics([Counter; Reason::ALL.len()]);

// === impl SelectionMetrics ===

impl SelectionMetrics {
    /// Counts a placement.
    pub fn inc(&self, reason: Reason) {
        self.0[reason as usize].inc();
    }
}

// === impl Metrics ===

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// All metrics at zero.
    pub fn new() -> Self {
        let (requests, tokens, workers) = (Requests::default(), Tokens::default(), Workers::default());
        let (discovery, knowledge, gateway) =
            (Discovery::default(), Knowledge::default(), Gateway::default());
        let replicas = Replicas::default();
        let mut registry = Registry::with_prefix(table::PREFIX);
        requests.register(&mut registry);
        tokens.register(&mut registry);
        workers.register(&mut registry);
        discovery.register(&mut registry);
        knowledge.register(&mut registry);
        replicas.register(&mut registry);
        gateway.register(&mut registry);
        Self {
            registry: Mutex::new(registry),
            faults: FaultMetrics { requests: requests.clone(), workers: workers.clone() },
            auth: AuthMetrics { rows: gateway.clone(), names: AtomicUsize::new(0) },
            limits: LimitMetrics(gateway.clone()),
            spans: SpanMetrics(gateway.clone()),
            panics: PanicMetrics(gateway.clone()),
            recorder: RecorderMetrics {
                bytes: gateway.recorder_bytes.clone(),
                lost: gateway.recorder_segments_lost.clone(),
            },
            feeds: FeedMetrics(knowledge.clone()),
            cache_accuracy: CacheAccuracyMetrics(knowledge.clone()),
            requests,
            tokens,
            workers,
            discovery,
            knowledge,
            replicas,
            gateway,
        }
    }

    /// The handles of one pool.
    pub fn pool(&self, model: &str) -> PoolMetrics {
        let label = ModelLabel { model: model.into() };
        PoolMetrics {
            duration: self.requests.request_duration.get_or_create(&label).clone(),
            ttft: self.requests.ttft.get_or_create(&label).clone(),
            kv_transfer: self.requests.kv_transfer.get_or_create(&label).clone(),
            tpot: self.requests.tpot.get_or_create(&label).clone(),
            input_tokens: self.tokens.input_tokens.get_or_create(&label).clone(),
            output_tokens: self.tokens.output_tokens.get_or_create(&label).clone(),
            cached_tokens: self.tokens.cached_tokens.get_or_create(&label).clone(),
            predicted_tokens: self.tokens.predicted_cached_tokens.get_or_create(&label).clone(),
            prompt_tokens: self.tokens.prompt_tokens.get_or_create(&label).clone(),
            transferred_tokens: self.tokens.transferred_tokens.get_or_create(&label).clone(),
            engine_reuse: EngineReuse::new([
                self.tokens.engine_queried_tokens.get_or_create(&label).clone(),
                self.tokens.engine_hit_tokens.get_or_create(&label).clone(),
                self.tokens.engine_external_hit_tokens.get_or_create(&label).clone(),
            ]),
            splits: self.requests.splits.get_or_create(&label).clone(),
            tokenize: self.tokens.tokenize.get_or_create(&label).clone(),
            retries: self.requests.retries.get_or_create(&label).clone(),
            shed: self.faults.shed(&label),
            slo: SloMetrics::new(&self.requests, model),
            stages: PoolStages::new(&self.requests, model),
            selections: self.workers.worker_selection.clone(),
            cache_accuracy: self.cache_accuracy.clone(),
        }
    }

    /// Drops the metrics of an endpoint that has left.
    pub fn forget_endpoint(&self, worker: &str) {
        for policy in PolicyConfig::NAMES {
            for reason in Reason::ALL {
                let labels = SelectionLabels { worker: worker.into(), policy, reason: reason.name() };
                self.workers.worker_selection.remove(&labels);
            }
        }
    }

    /// Drops the metrics of a worker that has left, so that churn does not grow the exposition.
    pub fn forget_worker(&self, worker: &str) {
        self.workers.worker_health.remove(&WorkerLabel { worker: worker.into() });
        self.faults.forget_worker(worker);
        for kind in FailureKind::ALL {
            self.workers.worker_failures.remove(&FailureLabels { worker: worker.into(), kind });
        }
    }

    /// Counts a prompt whose tokens were estimated.
    pub fn note_estimate(&self, model: &str, why: &'static str) {
        self.tokens.prompts_estimated.get_or_create(&EstimateLabels { model: model.into(), why }).inc();
    }

    /// Counts an answer to a request for a name of the catalogue.
    pub fn note_target(&self, model: &str, target: &str, why: &'static str) {
        let labels = TargetLabels { model: model.into(), target: target.into(), why };
        self.requests.targets.get_or_create(&labels).inc();
    }

    /// Counts a failure of a worker.
    pub fn note_failure(&self, worker: &str, kind: FailureKind) {
        self.workers.worker_failures.get_or_create(&FailureLabels { worker: worker.into(), kind }).inc();
    }
}
