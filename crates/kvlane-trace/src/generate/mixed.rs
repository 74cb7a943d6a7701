//! Short and long prompts without shared prefixes: the long ones delay the short ones.
//!
//! Defaults: short ones like the Azure conversation trace of 2023, one in ten as long as the tenth longest in a
//! hundred of Mooncake's conversation trace.

use serde::{Deserialize, Serialize};

use super::{Arrivals, BLOCK_TOKENS, Draft, Spread, TOKENS_MAX, a_share};
use crate::trace::TraceRequest;

/// Settings of the mixed workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Share of requests that are long.
    pub long_share: f64,
    /// Tokens of a short prompt.
    pub short_input_tokens: Spread,
    /// Tokens of its answer.
    pub short_output_tokens: Spread,
    /// Tokens of a long prompt.
    pub long_input_tokens: Spread,
    /// Tokens of its answer.
    pub long_output_tokens: Spread,
    /// Tokens of a block of the trace.
    pub block_tokens: u32,
    /// Arrivals of the requests.
    pub arrivals: Arrivals,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            long_share: 0.1,
            short_input_tokens: Spread::log_normal(1020.0, 2735.0, 14_050.0),
            short_output_tokens: Spread::log_normal(129.0, 424.0, 1000.0),
            long_input_tokens: Spread::log_normal(27_000.0, 85_000.0, 126_000.0),
            long_output_tokens: Spread::log_normal(350.0, 600.0, 2000.0),
            block_tokens: BLOCK_TOKENS,
            arrivals: Arrivals::default(),
        }
    }
}

// === impl Config ===

impl Config {
    pub(super) fn check(&self) -> Result<(), String> {
        a_share("long_share", self.long_share)?;
        self.short_input_tokens.check("short_input_tokens", 1.0, TOKENS_MAX)?;
        self.short_output_tokens.check("short_output_tokens", 1.0, TOKENS_MAX)?;
        self.long_input_tokens.check("long_input_tokens", 1.0, TOKENS_MAX)?;
        self.long_output_tokens.check("long_output_tokens", 1.0, TOKENS_MAX)
    }

    pub(super) fn fill(&self, draft: &mut Draft) {
        for (session, arrival_s) in (0..).zip(draft.starts.clone()) {
            let (input, output) = if draft.rng.unit() < self.long_share {
                (self.long_input_tokens, self.long_output_tokens)
            } else {
                (self.short_input_tokens, self.short_output_tokens)
            };
            let request = TraceRequest {
                arrival_s,
                input_tokens: input.tokens(&mut draft.rng, 1),
                output_tokens: output.tokens(&mut draft.rng, 1),
                session,
                ..TraceRequest::default()
            };
            let Some(_) = draft.push(request) else { return };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::{Workload, generate};

    #[test]
    fn the_long_ones_are_their_share() {
        let config = Config {
            long_share: 0.25,
            short_input_tokens: Spread::fixed(10),
            long_input_tokens: Spread::fixed(1000),
            arrivals: Arrivals::Closed { count: 4000 },
            ..Config::default()
        };
        let trace = generate(&Workload::Mixed(config), 1).unwrap();
        let long = trace.requests.iter().filter(|request| request.input_tokens == 1000).count();
        assert!((900..1100).contains(&long), "{long}");
        assert!(trace.requests.iter().all(|request| request.base.is_none()));
    }
}
