//! `aibrix`: AIBrix's `prefix-cache` (vllm-project/aibrix, commit e3e10f9e,
//! `pkg/plugins/gateway/algorithms/prefix_cache.go`).
//!
//! If `max B - min B > imbalance_max`: `argmin B`. Else, among the endpoints that hold any of the prompt and have `B <=
//! mean + deviations * standard deviation`, the longest match; ties go to the smallest `B`. Else `argmin B`. `B` is the
//! requests in flight; the deviation is that of all endpoints. The defaults are 8 and 1. Remaining ties are random.
//! Known limits: the constants do not adapt to load, and requests are counted without their length.

use serde::{Deserialize, Serialize};

use crate::bounded::Amount;
use crate::policy::{Candidate, CostUnit, PickContext, Policy, Reason};

/// Thresholds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Difference of requests in flight above which load alone decides (`AIBRIX_PREFIX_CACHE_LOAD_IMBALANCE_MIN_GAP`).
    pub imbalance_max: u32,
    /// Standard deviations above the mean up to which a match counts
    /// (`AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR`).
    pub deviations: Amount,
}

impl Default for Config {
    fn default() -> Self {
        Self { imbalance_max: 8, deviations: Amount::of(1.0) }
    }
}

/// The policy.
pub struct Aibrix {
    config: Config,
}

impl Aibrix {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self { config }
    }
}

impl Policy for Aibrix {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        let requests = |row: &Candidate| f64::from(row.load.in_flight.requests);
        let (mut min, mut max, mut sum, mut squares) = (u32::MAX, 0, 0.0, 0.0);
        for row in candidates {
            (min, max) = (min.min(row.load.in_flight.requests), max.max(row.load.in_flight.requests));
            (sum, squares) = (sum + requests(row), squares + requests(row) * requests(row));
        }
        if max - min > self.config.imbalance_max {
            cx.reason = Reason::Imbalance;
            return cx.cheapest(candidates, requests);
        }
        let mean = sum / candidates.len() as f64;
        let deviation = (squares / candidates.len() as f64 - mean * mean).max(0.0).sqrt();
        let usual = |row: &Candidate| requests(row) <= mean + self.config.deviations.get() * deviation;
        let matching = candidates.iter().filter(|row| row.overlap_tokens > 0);
        let longest = matching.clone().filter(|row| usual(row)).map(|row| row.overlap_tokens).max();
        let Some(longest) = longest else {
            cx.reason = if matching.count() > 0 { Reason::Saturated } else { Reason::PrefixMiss };
            return cx.cheapest(candidates, requests);
        };
        cx.reason = Reason::PrefixHit;
        cx.cheapest_of(candidates, |row| row.overlap_tokens == longest && usual(row), requests).unwrap_or(0)
    }

    fn cost_unit(&self) -> CostUnit {
        CostUnit::Requests
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::picks;

    const AIBRIX: &str = r#"{"name":"aibrix"}"#;

    #[test]
    fn the_longest_match_wins_and_of_equals_the_least_loaded() {
        let rows = [(32, 5, 0, 0), (64, 5, 0, 0), (64, 4, 0, 0), (0, 3, 0, 0)];
        assert_eq!(picks(AIBRIX, 100, &rows), [(2, Reason::PrefixHit)]);
    }

    #[test]
    fn an_unusually_loaded_holder_is_passed_over() {
        // Mean 3, deviation sqrt((9 + 1 + 0 + 4) / 4) = 1.87: 5 is above 4.87, 4 is not.
        let rows = [(0, 0, 0, 0), (32, 4, 0, 0), (0, 3, 0, 0), (64, 5, 0, 0)];
        assert_eq!(picks(AIBRIX, 100, &rows), [(1, Reason::PrefixHit)]);
        let nobody_else = [(0, 0, 0, 0), (0, 4, 0, 0), (0, 3, 0, 0), (64, 5, 0, 0)];
        assert_eq!(picks(AIBRIX, 100, &nobody_else), [(0, Reason::Saturated)]);
    }

    #[test]
    fn beyond_the_gap_only_requests_count() {
        assert_eq!(picks(AIBRIX, 100, &[(64, 9, 0, 0), (0, 0, 0, 0)]), [(1, Reason::Imbalance)]);
        // Mean 4, deviation 4: 8 is not above 8.
        assert_eq!(picks(AIBRIX, 100, &[(64, 8, 0, 0), (0, 0, 0, 0)]), [(0, Reason::PrefixHit)]);
    }

    #[test]
    fn without_a_match_the_least_loaded_gets_it() {
        assert_eq!(picks(AIBRIX, 100, &[(0, 2, 0, 0), (0, 1, 0, 0)]), [(1, Reason::PrefixMiss)]);
    }
}
