//! `least_tokens`: the fewest tokens in flight, `argmin(in_flight_tokens + L)` with `L` the prompt's tokens
//! (SivagurunathanV/token-aware-balancer).
//!
//! Tokens in flight are the prompts' tokens until their requests end, and the output tokens as they stream, which that
//! project lists as missing. `L` is the same for every endpoint and decides nothing; it is part of the recorded cost so
//! that receipts match the formula.

use serde::{Deserialize, Serialize};

use super::{Candidate, CostUnit, PickContext, Policy, Reason};

/// No parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {}

/// The policy.
pub struct LeastTokens;

impl LeastTokens {
    /// The policy with these parameters.
    pub fn new(_: Config) -> Self {
        Self
    }
}

impl Policy for LeastTokens {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        cx.reason = Reason::LeastLoaded;
        let prompt_tokens = f64::from(cx.request.prompt_tokens);
        cx.cheapest(candidates, |row| row.load.in_flight.context_tokens as f64 + prompt_tokens)
    }

    fn cost_unit(&self) -> CostUnit {
        CostUnit::Tokens
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::picks;
    use super::*;

    #[test]
    fn one_long_prompt_outweighs_many_short_ones() {
        let rows = [(0, 1, 0, 4000), (0, 30, 0, 300)];
        assert_eq!(picks(r#"{"name":"least_tokens"}"#, 10, &rows), [(1, Reason::LeastLoaded)]);
    }
}
