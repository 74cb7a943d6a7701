//! Metrics of the recorder.

use prometheus_client::metrics::counter::Counter;

/// Counters of [`crate::recorder`].
#[derive(Clone, Debug, Default)]
pub struct RecorderMetrics {
    /// Bytes written.
    pub bytes: Counter,
    /// Inputs that were not written.
    pub lost: Counter,
}
