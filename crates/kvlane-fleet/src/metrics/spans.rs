//! Metrics of exported spans.

use super::labels::OutcomeLabel;
use super::table::Gateway;

/// Counts spans by outcome.
#[derive(Debug, Default)]
pub struct SpanMetrics(pub(super) Gateway);

// === impl SpanMetrics ===

impl SpanMetrics {
    /// Counts spans by what became of them.
    pub fn note(&self, outcome: &'static str, spans: u64) {
        self.0.trace_spans.get_or_create(&OutcomeLabel { outcome }).inc_by(spans);
    }
}
