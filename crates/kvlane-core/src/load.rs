//! Load of an endpoint: our requests and tokens in flight there, and the engine's own report.

use serde::{Deserialize, Serialize};

use crate::time::Nanos;

/// Our ledger for one endpoint. Reserved at the decision, so two requests never both see it idle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InFlight {
    /// Requests in flight.
    pub requests: u32,
    /// Those whose first token has not arrived, and whose prompt is computed here.
    #[serde(default)]
    pub prefilling: u32,
    /// Those that neither prefill nor decode here at the moment: another endpoint computes their KV blocks, or fetches them.
    #[serde(default)]
    pub moving: u32,
    /// Uncached prompt tokens, by prediction, of requests whose first token has not arrived.
    pub prefill_tokens: u64,
    /// Query-key pairs of those tokens: each pairs with itself and every token before it, cached or not.
    #[serde(default)]
    pub prefill_pairs: u64,
    /// Tokens to load from below the GPU, by prediction, for requests whose first token has not arrived.
    #[serde(default)]
    pub lower_tokens: u64,
    /// Prompt tokens of all requests in flight plus their output tokens so far.
    pub context_tokens: u64,
}

// === impl InFlight ===

impl InFlight {
    /// Requests in flight that have their prompt computed: the sequences of a decode step.
    pub fn decoding(&self) -> u32 {
        self.requests.saturating_sub(self.prefilling).saturating_sub(self.moving)
    }

    /// The mean over so many endpoints that have this load together, rounded.
    #[must_use]
    pub fn mean(&self, endpoints: u32) -> Self {
        let few = |sum: u32| sum.saturating_add(endpoints / 2) / endpoints.max(1);
        let many = |sum: u64| sum.saturating_add(u64::from(endpoints / 2)) / u64::from(endpoints.max(1));
        Self {
            requests: few(self.requests),
            prefilling: few(self.prefilling),
            moving: few(self.moving),
            prefill_tokens: many(self.prefill_tokens),
            prefill_pairs: many(self.prefill_pairs),
            lower_tokens: many(self.lower_tokens),
            context_tokens: many(self.context_tokens),
        }
    }
}

/// An engine's load report.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// Sequences in its batch.
    pub running: u32,
    /// Requests in its queue.
    pub waiting: u32,
    /// Share of its KV blocks in use, 0 to 1.
    pub kv_usage_ratio: f32,
    /// KV cache capacity in tokens, if reported.
    pub kv_capacity_tokens: Option<u64>,
}

/// One endpoint's load as a policy sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Our own ledger, exact and immediate.
    pub in_flight: InFlight,
    /// The engine's last report and its time, if any.
    pub reported: Option<(LoadReport, Nanos)>,
}
