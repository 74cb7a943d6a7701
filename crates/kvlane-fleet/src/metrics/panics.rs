//! Panics of the process.

use std::sync::atomic::Ordering;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use super::table::Registration;
use crate::panics;

/// The place of a panic.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PanicLabel {
    /// The kind of thread.
    thread: &'static str,
}

/// Panics counted by [`crate::panics`].
#[derive(Debug, Default)]
pub struct PanicMetrics(Family<PanicLabel, Counter>);

// === impl PanicMetrics ===

impl PanicMetrics {
    pub(super) fn register(&self, r: &mut Registration<'_>) {
        r.register("panics", self.0.clone());
    }

    /// Copies the counts of every kind of thread.
    pub fn read(&self) {
        for (thread, count) in panics::counts() {
            self.0.get_or_create(&PanicLabel { thread }).inner().store(count, Ordering::Relaxed);
        }
    }
}
