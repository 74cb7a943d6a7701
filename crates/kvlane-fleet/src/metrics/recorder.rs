//! Metrics of the recorder.

use prometheus_client::metrics::counter::Counter;

use super::table::Registration;

/// Counters of [`crate::recorder`].
#[derive(Clone, Debug, Default)]
pub struct RecorderMetrics {
    /// Bytes written.
    pub bytes: Counter,
    /// Inputs that were not written.
    pub lost: Counter,
}

// === impl RecorderMetrics ===

impl RecorderMetrics {
    pub(super) fn register(&self, r: &mut Registration<'_>) {
        r.register("recorder_bytes", self.bytes.clone());
        r.register("recorder_segments_lost", self.lost.clone());
    }
}
