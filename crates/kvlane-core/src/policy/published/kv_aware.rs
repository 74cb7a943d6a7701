//! `kv_aware`: `argmin (new + P) * (B + 1)` (vllm-project/router 0.1.17, `src/policies/kv_aware.rs`).
//!
//! `new` is the prompt's uncached tokens at the endpoint, `P` the uncached prompt tokens queued there, `B` the requests
//! in flight. It differs from `lmetric` by one token: the last token of a prompt is always computed, so it is never
//! credited, and a fully cached prompt still costs more where more requests are in flight. Temperature 0: the lowest
//! cost wins, ties are random. Its credits for other tiers (host 0.8, external 0.6, disk 0.3) need tiers that a row
//! does not distinguish. Known limit, as for `lmetric`: past KV saturation the product spreads prefixes and their
//! misses.

use serde::{Deserialize, Serialize};

use crate::policy::{Candidate, PickContext, Policy, Reason};

/// No parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {}

/// The policy.
pub struct KvAware;

impl KvAware {
    /// The policy with these parameters.
    pub fn new(_: Config) -> Self {
        Self
    }
}

impl Policy for KvAware {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        cx.reason = Reason::LowestCost;
        let request = cx.request;
        let at_least = request.prompt_tokens.min(1);
        cx.cheapest(candidates, |row| {
            let new = f64::from(row.uncached_tokens(request).max(at_least));
            (new + row.load.in_flight.prefill_tokens as f64) * (f64::from(row.load.in_flight.requests) + 1.0)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::Case;

    #[test]
    fn new_and_queued_tokens_times_the_batch() {
        let mut case = Case::new("kv_aware", 100, &[(80, 3, 10, 0), (0, 0, 0, 0)]);
        assert_eq!(case.pick(), (1, Reason::LowestCost));
        assert_eq!(case.costs, [30.0 * 4.0, 100.0]);
    }

    #[test]
    fn the_last_token_is_never_credited() {
        let mut case = Case::new("kv_aware", 128, &[(128, 9, 0, 0), (128, 0, 0, 0)]);
        assert_eq!(case.pick().0, 1);
        assert_eq!(case.costs, [10.0, 1.0]);
    }
}
