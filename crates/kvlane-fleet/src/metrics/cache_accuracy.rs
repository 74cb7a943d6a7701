//! Metrics of predicted and reported prefix reuse.

use std::sync::atomic::{AtomicU64, Ordering};

use kvlane_core::cache_accuracy::{Knowledge, KnowledgeChange, Totals};
use kvlane_core::endpoint::Endpoint;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::labels::WorkerLabels;
use super::table::Registration;

/// One source of knowledge about a worker's cache.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KnowledgeLabels {
    worker: String,
    model: String,
    knowledge: &'static str,
}

/// A change between two sources.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ChangeLabels {
    model: String,
    from: &'static str,
    to: &'static str,
}

/// Counters and gauges of [`kvlane_core::cache_accuracy`].
#[derive(Clone, Debug, Default)]
pub struct CacheAccuracyMetrics {
    knowledge: Family<KnowledgeLabels, Gauge>,
    changes: Family<ChangeLabels, Counter>,
    answers: Family<WorkerLabels, Counter>,
    wrong: Family<WorkerLabels, Counter>,
    predicted: Family<WorkerLabels, Counter>,
    reported: Family<WorkerLabels, Counter>,
    both: Family<WorkerLabels, Counter>,
    precision: Family<WorkerLabels, Gauge<f64, AtomicU64>>,
    recall: Family<WorkerLabels, Gauge<f64, AtomicU64>>,
}

// === impl CacheAccuracyMetrics ===

impl CacheAccuracyMetrics {
    pub(super) fn register(&self, r: &mut Registration<'_>) {
        r.register("worker_knowledge", self.knowledge.clone());
        r.register("knowledge_changes", self.changes.clone());
        r.register("prediction_answers", self.answers.clone());
        r.register("prediction_wrong", self.wrong.clone());
        r.register("prediction_predicted_tokens", self.predicted.clone());
        r.register("prediction_reported_tokens", self.reported.clone());
        r.register("prediction_both_tokens", self.both.clone());
        r.register("prediction_precision_ratio", self.precision.clone());
        r.register("prediction_recall_ratio", self.recall.clone());
    }

    /// Counts a change of what is known of a cache.
    pub fn note(&self, model: &str, change: KnowledgeChange) {
        let labels = ChangeLabels { model: model.into(), from: change.from.name(), to: change.to.name() };
        self.changes.get_or_create(&labels).inc();
    }

    /// Called before the endpoints are read, so that endpoints that have left disappear.
    pub fn clear(&self) {
        self.knowledge.clear();
        for counters in [&self.answers, &self.wrong, &self.predicted, &self.reported, &self.both] {
            counters.clear();
        }
        [&self.precision, &self.recall].into_iter().for_each(Family::clear);
    }

    /// Sets the gauges of an endpoint.
    pub fn read(&self, labels: &WorkerLabels, endpoint: &Endpoint) {
        let accuracy = &endpoint.cache_accuracy;
        for knowledge in Knowledge::ALL {
            let WorkerLabels { worker, model } = labels.clone();
            let labels = KnowledgeLabels { worker, model, knowledge: knowledge.name() };
            self.knowledge.get_or_create(&labels).set((knowledge == accuracy.knowledge()).into());
        }
        let Totals { answers, wrong, predicted, reported, both } = accuracy.totals();
        for (counters, total) in [
            (&self.answers, answers),
            (&self.wrong, wrong),
            (&self.predicted, predicted),
            (&self.reported, reported),
            (&self.both, both),
        ] {
            counters.get_or_create(labels).inner().store(total, Ordering::Relaxed);
        }
        self.precision.get_or_create(labels).set(accuracy.precision().into());
        self.recall.get_or_create(labels).set(accuracy.recall().into());
    }
}
