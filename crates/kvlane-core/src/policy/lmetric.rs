//! `lmetric`: `argmin (P + u) * (B + 1)` (LMetric, arXiv 2603.15202; blitz-serving/blitz-router).
//!
//! `P` is the uncached prompt tokens queued at the endpoint, `u` those of this request there, `B` the requests in
//! flight there. The first factor is the wait for the first token, the second the number of requests in the batch that
//! it delays. Known limits: a fully cached prompt makes any queue of cached prompts look free, and past KV saturation
//! the product spreads groups and their misses.
//!
//! The set `lmetric_no_queue`, `argmin u * (B + 1)`, is steadier under overload and has a longer time to first token
//! below it.

use serde::{Deserialize, Serialize};

use super::{Candidate, PickContext, Policy, Reason};

/// Whether the queue counts.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Whether queued tokens count.
    pub queue: bool,
}

/// Without queued tokens.
pub const NO_QUEUE: Config = Config { queue: false };

impl Default for Config {
    fn default() -> Self {
        Self { queue: true }
    }
}

/// The policy.
pub struct LMetric {
    config: Config,
}

impl LMetric {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self { config }
    }
}

impl Policy for LMetric {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        cx.reason = Reason::LowestCost;
        let request = cx.request;
        cx.cheapest(candidates, |row| {
            let queued = if self.config.queue { row.load.in_flight.prefill_tokens as f64 } else { 0.0 };
            (queued + f64::from(row.uncached_tokens(request)))
                * (f64::from(row.load.in_flight.requests) + 1.0)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::picks;
    use super::*;

    const LMETRIC: &str = r#"{"name":"lmetric"}"#;

    #[test]
    fn a_hit_is_worth_its_tokens_times_the_batch() {
        // 20 tokens at a batch of 4 cost 80; 100 tokens at a batch of 1 cost 100; with one more request, 100.
        assert_eq!(picks(LMETRIC, 100, &[(80, 3, 0, 0), (0, 0, 0, 0)]), [(0, Reason::LowestCost)]);
        assert_eq!(picks(LMETRIC, 100, &[(80, 5, 0, 0), (0, 0, 0, 0)]), [(1, Reason::LowestCost)]);
    }

    #[test]
    fn queued_prefill_counts_as_much_as_an_own_miss() {
        assert_eq!(picks(LMETRIC, 100, &[(100, 0, 150, 0), (0, 0, 0, 0)]), [(1, Reason::LowestCost)]);
    }
}
