//! `least_prefill`: `argmin (P + u)`, the endpoint with the fewest tokens to prefill before the first token.
//!
//! `P` is the uncached prompt tokens queued at the endpoint, `u` those of this request there. On equal endpoints with
//! prefill time proportional to tokens, this is the least predicted time to first token, as in Mooncake's Conductor
//! (FAST'25, algorithm 1). Known limits: it ignores decoding, and what a miss costs other requests.

use serde::{Deserialize, Serialize};

use super::{Candidate, CostUnit, PickContext, Policy, Reason};

/// No parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {}

/// The policy.
pub struct LeastPrefill;

impl LeastPrefill {
    /// The policy with these parameters.
    pub fn new(_: Config) -> Self {
        Self
    }
}

impl Policy for LeastPrefill {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        cx.reason = Reason::LowestCost;
        let request = cx.request;
        cx.cheapest(candidates, |row| {
            row.load.in_flight.prefill_tokens as f64 + f64::from(row.uncached_tokens(request))
        })
    }

    fn cost_unit(&self) -> CostUnit {
        CostUnit::Tokens
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::picks;
    use super::*;

    const LEAST_PREFILL: &str = r#"{"name":"least_prefill"}"#;

    #[test]
    fn a_hit_is_worth_the_queue_it_saves() {
        // Overlap, requests, queued prefill tokens, context tokens.
        assert_eq!(picks(LEAST_PREFILL, 100, &[(80, 9, 70, 0), (0, 0, 0, 0)]), [(0, Reason::LowestCost)]);
        assert_eq!(picks(LEAST_PREFILL, 100, &[(80, 0, 90, 0), (0, 9, 0, 0)]), [(1, Reason::LowestCost)]);
    }
}
