//! Metrics of predicted and reported prefix reuse.

use std::sync::atomic::Ordering;

use kvlane_core::cache_accuracy::{Knowledge, KnowledgeChange, Totals};
use kvlane_core::endpoint::Endpoint;
use prometheus_client::metrics::family::Family;

use super::labels::{ChangeLabels, KnowledgeLabels, WorkerLabels};
use super::table;

/// Counters and gauges of [`kvlane_core::cache_accuracy`].
#[derive(Clone, Debug, Default)]
pub struct CacheAccuracyMetrics(pub(super) table::Knowledge);

// === impl CacheAccuracyMetrics ===

impl CacheAccuracyMetrics {
    /// Counts a change of what is known of a cache.
    pub fn note(&self, model: &str, change: KnowledgeChange) {
        let labels = ChangeLabels { model: model.into(), from: change.from.name(), to: change.to.name() };
        self.0.knowledge_changes.get_or_create(&labels).inc();
    }

    /// Called before the endpoints are read, so that endpoints that have left disappear.
    pub fn clear(&self) {
        self.0.worker_knowledge.clear();
        for counters in [
            &self.0.prediction_answers,
            &self.0.prediction_wrong,
            &self.0.prediction_predicted_tokens,
            &self.0.prediction_reported_tokens,
            &self.0.prediction_both_tokens,
            &self.0.prediction_outside_tokens,
        ] {
            counters.clear();
        }
        [&self.0.prediction_precision_ratio, &self.0.prediction_recall_ratio]
            .into_iter()
            .for_each(Family::clear);
    }

    /// Sets the gauges of an endpoint.
    pub fn read(&self, labels: &WorkerLabels, endpoint: &Endpoint) {
        let accuracy = &endpoint.cache_accuracy;
        for knowledge in Knowledge::ALL {
            let WorkerLabels { worker, model } = labels.clone();
            let labels = KnowledgeLabels { worker, model, knowledge: knowledge.name() };
            self.0.worker_knowledge.get_or_create(&labels).set((knowledge == accuracy.knowledge()).into());
        }
        let Totals { answers, wrong, predicted, reported, both, outside } = accuracy.totals();
        for (counters, total) in [
            (&self.0.prediction_answers, answers),
            (&self.0.prediction_wrong, wrong),
            (&self.0.prediction_predicted_tokens, predicted),
            (&self.0.prediction_reported_tokens, reported),
            (&self.0.prediction_both_tokens, both),
            (&self.0.prediction_outside_tokens, outside),
        ] {
            counters.get_or_create(labels).inner().store(total, Ordering::Relaxed);
        }
        self.0.prediction_precision_ratio.get_or_create(labels).set(accuracy.precision().into());
        self.0.prediction_recall_ratio.get_or_create(labels).set(accuracy.recall().into());
    }
}
