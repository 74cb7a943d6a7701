//! `conductor`: the least predicted time to first token (Mooncake's Conductor, FAST'25, algorithm 1).
//!
//! `argmin (T_queue + T_prefill)`, in seconds: the prefill time of the prompts queued at the endpoint, and that of this
//! prompt there, both by the endpoint's rates with their query-key pairs. Ties are random. Conductor's third term, the
//! time to copy a longer prefix from another node once that is more than `kvcache_balancing_threshold` times the local
//! one, has no counterpart: kvlane copies no blocks. Its rejection of requests that would miss a target belongs to
//! admission. Known limits: it ignores decoding, and what a miss costs other requests.

use serde::{Deserialize, Serialize};

use crate::policy::{Candidate, CostUnit, PickContext, Policy, Reason};

/// No parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {}

/// The policy.
pub struct Conductor;

impl Conductor {
    /// The policy with these parameters.
    pub fn new(_: Config) -> Self {
        Self
    }
}

impl Policy for Conductor {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        cx.reason = Reason::LowestCost;
        let request = cx.request;
        cx.cheapest(candidates, |row| {
            let ledger = row.load.in_flight;
            let own_s =
                row.rates.prefill_s(u64::from(row.uncached_tokens(request)), row.uncached_pairs(request));
            row.rates.prefill_s(ledger.prefill_tokens, ledger.prefill_pairs) + own_s
        })
    }

    fn cost_unit(&self) -> CostUnit {
        CostUnit::Seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::{Case, near};

    #[test]
    fn a_queue_and_an_own_miss_count_by_what_they_take() {
        let mut case = Case::new("conductor", 1000, &[(800, 0, 0, 0), (0, 0, 0, 0)]);
        for row in &mut case.rows {
            (row.rates.prefill_token_s, row.rates.prefill_pair_s) = (1e-3, 1e-6);
        }
        case.rows[0].load.in_flight.prefill_tokens = 500;
        case.rows[0].load.in_flight.prefill_pairs = 500 * 501 / 2;
        // 500 tokens and 125,250 pairs, then 200 tokens with 200 * 800 + 200 * 201 / 2 pairs, against 1,000 tokens with
        // 500,500 pairs.
        assert_eq!(case.pick(), (0, Reason::LowestCost));
        near(&case.costs, &[0.500 + 0.125_25 + 0.200 + 0.180_1, 1.000 + 0.500_5]);
    }

    #[test]
    fn a_slow_endpoint_is_worth_a_shorter_queue() {
        let mut case = Case::new("conductor", 1000, &[(0, 0, 500, 0), (0, 0, 0, 0)]);
        case.rows[1].rates.prefill_token_s *= 4.0;
        assert_eq!(case.pick().0, 0);
    }
}
