//! What is counted of engines that are busy or fail, and of what is done about it.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::WorkerLabel;

/// What is counted of faults.
#[derive(Default)]
pub(crate) struct FaultMetrics {
    busy: Family<WorkerLabel, Counter>,
    continuations: Family<ContinuedLabel, Counter>,
}

/// What came of a stream that broke.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, EncodeLabelValue)]
#[allow(non_camel_case_types, reason = "the variants are the label values, word for word")]
pub(crate) enum Continued {
    /// Another engine has begun to write the rest.
    resumed,
    /// Nothing but the end was missing.
    closed,
    /// The answer is of a kind that cannot be continued.
    unfit,
    /// It had been continued as often as it may.
    exhausted,
    /// Nobody took the rest: no endpoint, no budget, or a refusal.
    refused,
    /// The other engine's stream does not continue the first.
    misfit,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ContinuedLabel {
    outcome: Continued,
}

// === impl FaultMetrics ===

impl FaultMetrics {
    pub(super) fn register(&self, r: &mut Registry) {
        r.register("worker_busy", "Attempts that were answered 429 or 503", self.busy.clone());
        r.register(
            "continuations",
            "Streams that broke, where they can be continued",
            self.continuations.clone(),
        );
    }

    /// An engine had too much to do.
    pub(crate) fn note_busy(&self, worker: &str) {
        self.busy.get_or_create(&WorkerLabel { worker: worker.into() }).inc();
    }

    /// A stream broke that might have been continued.
    pub(crate) fn note_continued(&self, outcome: Continued) {
        self.continuations.get_or_create(&ContinuedLabel { outcome }).inc();
    }

    pub(super) fn forget_worker(&self, worker: &str) {
        self.busy.remove(&WorkerLabel { worker: worker.into() });
    }
}
