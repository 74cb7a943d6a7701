//! What is counted of engines that are busy or fail, and of what is done about it.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::WorkerLabel;

/// What is counted of faults.
#[derive(Default)]
pub(crate) struct FaultMetrics {
    busy: Family<WorkerLabel, Counter>,
}

// === impl FaultMetrics ===

impl FaultMetrics {
    pub(super) fn register(&self, r: &mut Registry) {
        r.register("worker_busy", "Attempts that were answered 429 or 503", self.busy.clone());
    }

    /// An engine had too much to do.
    pub(crate) fn note_busy(&self, worker: &str) {
        self.busy.get_or_create(&WorkerLabel { worker: worker.into() }).inc();
    }

    pub(super) fn forget_worker(&self, worker: &str) {
        self.busy.remove(&WorkerLabel { worker: worker.into() });
    }
}
