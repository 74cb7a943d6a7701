//! Metrics of requests with latency objectives.

use prometheus_client::metrics::counter::Counter;

use super::labels::SloLabels;
use super::table::Requests;

/// The counters of one pool, looked up once.
pub struct SloMetrics {
    met: Counter,
    missed: Counter,
    refused: Counter,
}

// === impl SloMetrics ===

impl SloMetrics {
    pub(super) fn new(requests: &Requests, model: &str) -> Self {
        let counter = |outcome| {
            let labels = SloLabels { model: model.into(), outcome };
            requests.slo_requests.get_or_create(&labels).clone()
        };
        Self { met: counter("met"), missed: counter("missed"), refused: counter("refused") }
    }

    /// Counts an answer by whether it met the objectives of its request.
    pub fn answered(&self, is_met: bool) {
        if is_met { &self.met } else { &self.missed }.inc();
    }

    /// Counts a request that was refused.
    pub fn refused(&self) {
        self.refused.inc();
    }

    /// The requests of each outcome: met, missed and refused.
    pub fn counts(&self) -> [u64; 3] {
        [&self.met, &self.missed, &self.refused].map(Counter::get)
    }
}
