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
mod spans;
mod stages;
pub mod table;

use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, PoisonError};

use kvlane_core::cache_accuracy::KnowledgeChange;
use kvlane_core::policy::{PolicyConfig, Reason};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

pub use self::auth::{AuthMetrics, OTHER_NAMES};
pub use self::cache_accuracy::CacheAccuracyMetrics;
use self::faults::Shed;
pub use self::faults::{Continued, FaultMetrics, Hedged};
pub use self::feeds::FeedMetrics;
use self::histogram::Histogram;
use self::labels::HistogramFamily;
pub use self::labels::{
    EstimateLabels, FailureKind, FailureLabels, ModelLabel, ReloadLabel, RequestLabels, SelectionLabels,
    TokensLabel, WorkerLabel, WorkerLabels,
};
pub use self::limits::{LimitMetrics, Reached};
use self::panics::PanicMetrics;
pub use self::recorder::RecorderMetrics;
pub use self::reuse::EngineReuse;
pub use self::spans::SpanMetrics;
use self::stages::{PoolStages, StageMetrics};
use self::table::Registration;

/// Upper bounds in seconds for times to first token and whole requests.
const LATENCY_BUCKETS: [f64; 18] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 25.0, 50.0, 100.0, 300.0,
    1000.0,
];
/// Upper bounds in seconds for the time per output token.
const TPOT_BUCKETS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0];

/// Upper bounds in seconds for the time that counting a prompt takes.
const TOKENIZE_BUCKETS: [f64; 12] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0];

/// All metrics.
#[expect(missing_docs, reason = "each field is a row of `table`, which says what it counts")]
pub struct Metrics {
    pub registry: Mutex<Registry>,
    pub requests: Family<RequestLabels, Counter>,
    pub duration: HistogramFamily<ModelLabel>,
    pub ttft: HistogramFamily<ModelLabel>,
    pub tpot: HistogramFamily<ModelLabel>,
    pub input_tokens: Family<ModelLabel, Counter>,
    pub output_tokens: Family<ModelLabel, Counter>,
    pub cached_tokens: Family<ModelLabel, Counter>,
    pub predicted_tokens: Family<ModelLabel, Counter>,
    pub prompt_tokens: Family<ModelLabel, Counter>,
    pub engine_queried_tokens: Family<ModelLabel, Counter>,
    pub engine_hit_tokens: Family<ModelLabel, Counter>,
    pub retries: Family<ModelLabel, Counter>,
    pub failures: Family<FailureLabels, Counter>,
    pub selections: Family<SelectionLabels, Counter>,
    pub health: Family<WorkerLabel, Gauge>,
    pub tokenize: HistogramFamily<ModelLabel>,
    pub prompts_estimated: Family<EstimateLabels, Counter>,
    pub tokenizer_queue: Gauge,
    pub tokenizer_cache_bytes: Gauge,
    pub tokenizer_tokens: Family<TokensLabel, Counter>,
    pub worker_requests: Family<WorkerLabels, Gauge>,
    pub worker_prefill_tokens: Family<WorkerLabels, Gauge>,
    pub worker_context_tokens: Family<WorkerLabels, Gauge>,
    pub worker_kv_usage: Family<WorkerLabels, Gauge<f64, AtomicU64>>,
    pub worker_prefill_rate: Family<WorkerLabels, Gauge<f64, AtomicU64>>,
    pub worker_decode_step: Family<WorkerLabels, Gauge<f64, AtomicU64>>,
    pub output_tokens_usual: Family<ModelLabel, Gauge<f64, AtomicU64>>,
    stages: StageMetrics,
    pub spans: SpanMetrics,
    pub faults: FaultMetrics,
    pub auth: AuthMetrics,
    pub recorder: RecorderMetrics,
    pub cache_accuracy: CacheAccuracyMetrics,
    pub feeds: FeedMetrics,
    pub reloads: Family<ReloadLabel, Counter>,
    pub tasks: Gauge,
    pub limits: LimitMetrics,
    pub panics: PanicMetrics,
    pub queue: Family<ModelLabel, Gauge>,
    pub index_bytes: Family<ModelLabel, Gauge>,
    pub index_blocks: Family<ModelLabel, Gauge>,
}

/// One pool's handles, looked up once.
#[expect(missing_docs, reason = "each field is a row of `table`, which says what it counts")]
pub struct PoolMetrics {
    pub duration: Histogram,
    pub ttft: Histogram,
    pub tpot: Histogram,
    pub input_tokens: Counter,
    pub output_tokens: Counter,
    pub cached_tokens: Counter,
    pub predicted_tokens: Counter,
    /// Counted by the gateway, for every answered request.
    pub prompt_tokens: Counter,
    pub engine_reuse: EngineReuse,
    pub tokenize: Histogram,
    pub retries: Counter,
    pub shed: Shed,
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
        let latency: fn() -> Histogram = || Histogram::fine(LATENCY_BUCKETS);
        let tpot: fn() -> Histogram = || Histogram::fine(TPOT_BUCKETS);
        let metrics = Self {
            registry: Mutex::new(Registry::with_prefix(table::PREFIX)),
            requests: Family::default(),
            duration: Family::new_with_constructor(latency),
            ttft: Family::new_with_constructor(latency),
            tpot: Family::new_with_constructor(tpot),
            input_tokens: Family::default(),
            output_tokens: Family::default(),
            cached_tokens: Family::default(),
            predicted_tokens: Family::default(),
            prompt_tokens: Family::default(),
            engine_queried_tokens: Family::default(),
            engine_hit_tokens: Family::default(),
            retries: Family::default(),
            failures: Family::default(),
            selections: Family::default(),
            health: Family::default(),
            tokenize: Family::new_with_constructor(|| Histogram::new(TOKENIZE_BUCKETS)),
            prompts_estimated: Family::default(),
            tokenizer_queue: Gauge::default(),
            tokenizer_cache_bytes: Gauge::default(),
            tokenizer_tokens: Family::default(),
            worker_requests: Family::default(),
            worker_prefill_tokens: Family::default(),
            worker_context_tokens: Family::default(),
            worker_kv_usage: Family::default(),
            worker_prefill_rate: Family::default(),
            worker_decode_step: Family::default(),
            output_tokens_usual: Family::default(),
            stages: StageMetrics::default(),
            spans: SpanMetrics::default(),
            faults: FaultMetrics::default(),
            auth: AuthMetrics::default(),
            recorder: RecorderMetrics::default(),
            cache_accuracy: CacheAccuracyMetrics::default(),
            feeds: FeedMetrics::default(),
            reloads: Family::default(),
            tasks: Gauge::default(),
            limits: LimitMetrics::default(),
            panics: PanicMetrics::default(),
            queue: Family::default(),
            index_bytes: Family::default(),
            index_blocks: Family::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&self) {
        let mut registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        let mut r = Registration::new(&mut registry);
        r.register("requests", self.requests.clone());
        r.register("request_duration", self.duration.clone());
        r.register("ttft", self.ttft.clone());
        r.register("tpot", self.tpot.clone());
        r.register("input_tokens", self.input_tokens.clone());
        r.register("output_tokens", self.output_tokens.clone());
        r.register("cached_tokens", self.cached_tokens.clone());
        r.register("predicted_cached_tokens", self.predicted_tokens.clone());
        r.register("prompt_tokens", self.prompt_tokens.clone());
        r.register("engine_queried_tokens", self.engine_queried_tokens.clone());
        r.register("engine_hit_tokens", self.engine_hit_tokens.clone());
        r.register("retries", self.retries.clone());
        r.register("worker_failures", self.failures.clone());
        r.register("worker_selection", self.selections.clone());
        r.register("worker_health", self.health.clone());
        r.register("worker_requests_active", self.worker_requests.clone());
        r.register("worker_prefill_tokens", self.worker_prefill_tokens.clone());
        r.register("worker_context_tokens", self.worker_context_tokens.clone());
        r.register("worker_kv_usage_ratio", self.worker_kv_usage.clone());
        r.register("worker_prefill_tokens_per_second", self.worker_prefill_rate.clone());
        r.register("worker_decode_step", self.worker_decode_step.clone());
        r.register("output_tokens_usual", self.output_tokens_usual.clone());
        self.stages.register(&mut r);
        self.spans.register(&mut r);
        self.faults.register(&mut r);
        self.auth.register(&mut r);
        self.recorder.register(&mut r);
        self.cache_accuracy.register(&mut r);
        self.feeds.register(&mut r);
        self.limits.register(&mut r);
        self.panics.register(&mut r);
        r.register("config_reloads", self.reloads.clone());
        r.register("tasks", self.tasks.clone());
        r.register("queue_requests", self.queue.clone());
        r.register("tokenize", self.tokenize.clone());
        r.register("prompts_estimated", self.prompts_estimated.clone());
        r.register("tokenizer_queue", self.tokenizer_queue.clone());
        r.register("tokenizer_cache_bytes", self.tokenizer_cache_bytes.clone());
        r.register("tokenizer_tokens", self.tokenizer_tokens.clone());
        r.register("index_bytes", self.index_bytes.clone());
        r.register("index_blocks", self.index_blocks.clone());
        r.finish();
    }

    /// The handles of one pool.
    pub fn pool(&self, model: &str) -> PoolMetrics {
        let label = ModelLabel { model: model.into() };
        PoolMetrics {
            duration: self.duration.get_or_create(&label).clone(),
            ttft: self.ttft.get_or_create(&label).clone(),
            tpot: self.tpot.get_or_create(&label).clone(),
            input_tokens: self.input_tokens.get_or_create(&label).clone(),
            output_tokens: self.output_tokens.get_or_create(&label).clone(),
            cached_tokens: self.cached_tokens.get_or_create(&label).clone(),
            predicted_tokens: self.predicted_tokens.get_or_create(&label).clone(),
            prompt_tokens: self.prompt_tokens.get_or_create(&label).clone(),
            engine_reuse: EngineReuse::new(
                self.engine_queried_tokens.get_or_create(&label).clone(),
                self.engine_hit_tokens.get_or_create(&label).clone(),
            ),
            tokenize: self.tokenize.get_or_create(&label).clone(),
            retries: self.retries.get_or_create(&label).clone(),
            shed: self.faults.shed(&label),
            stages: self.stages.pool(model),
            selections: self.selections.clone(),
            cache_accuracy: self.cache_accuracy.clone(),
        }
    }

    /// Drops the metrics of an endpoint that has left.
    pub fn forget_endpoint(&self, worker: &str) {
        for policy in PolicyConfig::NAMES {
            for reason in Reason::ALL {
                let labels = SelectionLabels { worker: worker.into(), policy, reason: reason.name() };
                self.selections.remove(&labels);
            }
        }
    }

    /// Drops the metrics of a worker that has left, so that churn does not grow the exposition.
    pub fn forget_worker(&self, worker: &str) {
        self.health.remove(&WorkerLabel { worker: worker.into() });
        self.faults.forget_worker(worker);
        use FailureKind::{
            broken, connect, connect_timeout, garbage, mid_stream, stalled, status, timeout, unfit,
        };
        for kind in [connect, connect_timeout, broken, garbage, status, mid_stream, timeout, unfit, stalled] {
            self.failures.remove(&FailureLabels { worker: worker.into(), kind });
        }
    }

    /// Counts a prompt whose tokens were estimated.
    pub fn note_estimate(&self, model: &str, why: &'static str) {
        self.prompts_estimated.get_or_create(&EstimateLabels { model: model.into(), why }).inc();
    }

    /// Counts a failure of a worker.
    pub fn note_failure(&self, worker: &str, kind: FailureKind) {
        self.failures.get_or_create(&FailureLabels { worker: worker.into(), kind }).inc();
    }
}
