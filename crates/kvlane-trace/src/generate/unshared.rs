//! Prompts without shared prefixes.

use serde::{Deserialize, Serialize};

use super::{Arrivals, BLOCK_TOKENS, Draft, Spread, TOKENS_MAX};
use crate::trace::TraceRequest;

/// Settings of the unshared workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Tokens of a prompt.
    pub input_tokens: Spread,
    /// Tokens of an answer.
    pub output_tokens: Spread,
    /// Tokens of a block of the trace.
    pub block_tokens: u32,
    /// Arrivals of the requests.
    pub arrivals: Arrivals,
}

impl Default for Config {
    /// A thousand tokens in, a hundred out.
    fn default() -> Self {
        Self {
            input_tokens: Spread::fixed(1000),
            output_tokens: Spread::fixed(100),
            block_tokens: BLOCK_TOKENS,
            arrivals: Arrivals::default(),
        }
    }
}

// === impl Config ===

impl Config {
    pub(super) fn check(&self) -> Result<(), String> {
        self.input_tokens.check("input_tokens", 1.0, TOKENS_MAX)?;
        self.output_tokens.check("output_tokens", 1.0, TOKENS_MAX)
    }

    pub(super) fn fill(&self, draft: &mut Draft) {
        for (session, arrival_s) in (0..).zip(draft.starts.clone()) {
            let input_tokens = self.input_tokens.tokens(&mut draft.rng, 1);
            let output_tokens = self.output_tokens.tokens(&mut draft.rng, 1);
            let request =
                TraceRequest { arrival_s, input_tokens, output_tokens, session, ..TraceRequest::default() };
            let Some(_) = draft.push(request) else { return };
        }
    }
}
