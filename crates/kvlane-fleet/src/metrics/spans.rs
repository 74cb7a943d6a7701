//! Metrics of exported spans.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use super::table::Registration;

/// The outcome of a span.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct OutcomeLabel {
    /// `sent`, `dropped`, `failed` or `rejected`.
    outcome: &'static str,
}

/// Counts spans by outcome.
#[derive(Debug, Default)]
pub struct SpanMetrics(Family<OutcomeLabel, Counter>);

// === impl SpanMetrics ===

impl SpanMetrics {
    pub(super) fn register(&self, r: &mut Registration<'_>) {
        r.register("trace_spans", self.0.clone());
    }

    /// Counts spans by what became of them.
    pub fn note(&self, outcome: &'static str, spans: u64) {
        self.0.get_or_create(&OutcomeLabel { outcome }).inc_by(spans);
    }
}
