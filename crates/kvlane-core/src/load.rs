//! Load of one endpoint: what we have in flight there, in requests and in tokens, and what it says of itself.

use serde::{Deserialize, Serialize};

use crate::time::Nanos;

/// Our own ledger for one endpoint. Reserved at the decision, so two requests never both see it idle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InFlight {
    /// Requests placed there and not yet over.
    pub requests: u32,
    /// Those of them whose first token is still to come.
    #[serde(default)]
    pub prefilling: u32,
    /// Prompt tokens that its caches are not expected to hold, of requests whose first token is still to come.
    pub prefill_tokens: u64,
    /// Query-key pairs of those tokens: one for each of them and each token before it, cached or not.
    #[serde(default)]
    pub prefill_pairs: u64,
    /// Prompt tokens of all requests in flight plus the output tokens they have streamed so far.
    pub context_tokens: u64,
}

/// What an engine says of itself, and when it said so.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// Sequences in its batch.
    pub running: u32,
    /// Requests in its queue.
    pub waiting: u32,
    /// Share of its KV blocks in use, 0 to 1.
    pub kv_usage_ratio: f32,
    /// Tokens its KV cache can hold, where it tells.
    pub kv_capacity_tokens: Option<u64>,
}

/// One endpoint's load as a policy sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Load {
    /// Our own ledger, exact and immediate.
    pub in_flight: InFlight,
    /// The engine's last report and the time it was taken, if it reports at all.
    pub reported: Option<(LoadReport, Nanos)>,
}
