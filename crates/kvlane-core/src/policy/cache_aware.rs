//! `cache_aware`: SGLang's cache-aware balancing (SGLang v0.4; sgl-model-gateway `policies/cache_aware.rs`).
//!
//! The fleet is imbalanced when `max - min > balance_abs_threshold` and `max > balance_rel_threshold * min`, in
//! requests in flight. In an imbalanced fleet, the least loaded endpoint gets the request. Otherwise the endpoint with
//! the longest matching prefix gets it if the match is more than `cache_threshold` of the prompt, and the least loaded
//! endpoint if not. Equal matches go to the least loaded.

use serde::{Deserialize, Serialize};

use super::{Candidate, CostUnit, PickContext, Policy, Reason};
use crate::bounded::{AtLeastOne, Share};

/// Thresholds, with the defaults of the SGLang router's command line; [`RUST`] has those of its library.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Share of the prompt that must match for a cache hit, 0 to 1.
    pub cache_threshold: Share,
    /// Difference of requests in flight above which the fleet may count as imbalanced.
    pub balance_abs_threshold: u32,
    /// Ratio of requests in flight above which the fleet may count as imbalanced.
    pub balance_rel_threshold: AtLeastOne,
}

/// Defaults of the router's Rust crate, which its command line overrides.
pub const RUST: Config =
    Config {
        cache_threshold: Share::of(0.5),
        balance_abs_threshold: 32,
        balance_rel_threshold: AtLeastOne::of(1.1),
    };

impl Default for Config {
    fn default() -> Self {
        Self {
            cache_threshold: Share::of(0.3),
            balance_abs_threshold: 64,
            balance_rel_threshold: AtLeastOne::of(1.5),
        }
    }
}

/// The policy.
pub struct CacheAware {
    config: Config,
}

impl CacheAware {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self { config }
    }
}

impl Policy for CacheAware {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        let (mut min, mut max, mut longest) = (u32::MAX, 0, 0);
        for row in candidates {
            min = min.min(row.load.in_flight.requests);
            max = max.max(row.load.in_flight.requests);
            longest = longest.max(row.overlap_tokens);
        }
        let requests = |row: &Candidate| f64::from(row.load.in_flight.requests);
        let imbalanced = max - min > self.config.balance_abs_threshold
            && f64::from(max) > self.config.balance_rel_threshold.get() * f64::from(min);
        if imbalanced {
            cx.reason = Reason::Imbalance;
            return cx.cheapest(candidates, requests);
        }
        let matches = f64::from(longest) > self.config.cache_threshold.get() * f64::from(cx.request.prompt_tokens);
        if !matches {
            cx.reason = Reason::PrefixMiss;
            return cx.cheapest(candidates, requests);
        }
        cx.reason = Reason::PrefixHit;
        cx.cheapest(
            candidates,
            |row| {
                if row.overlap_tokens == longest { requests(row) } else { f64::INFINITY }
            },
        )
    }

    fn cost_unit(&self) -> CostUnit {
        CostUnit::Requests
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::picks;
    use super::*;

    const DEFAULT: &str = r#"{"name":"cache_aware"}"#;

    #[test]
    fn a_match_above_the_threshold_decides() {
        assert_eq!(picks(DEFAULT, 100, &[(31, 5, 0, 0), (0, 0, 0, 0)]), [(0, Reason::PrefixHit)]);
    }

    #[test]
    fn a_match_at_the_threshold_does_not() {
        assert_eq!(picks(DEFAULT, 100, &[(30, 5, 0, 0), (0, 0, 0, 0)]), [(1, Reason::PrefixMiss)]);
    }

    #[test]
    fn of_equal_matches_the_least_loaded_wins() {
        let rows = [(64, 5, 0, 0), (64, 2, 0, 0), (0, 0, 0, 0)];
        assert_eq!(picks(DEFAULT, 100, &rows), [(1, Reason::PrefixHit)]);
    }

    #[test]
    fn an_imbalance_needs_both_thresholds() {
        assert_eq!(picks(DEFAULT, 100, &[(99, 65, 0, 0), (0, 0, 0, 0)]), [(1, Reason::Imbalance)]);
        assert_eq!(picks(DEFAULT, 100, &[(99, 64, 0, 0), (0, 0, 0, 0)]), [(0, Reason::PrefixHit)]);
        assert_eq!(picks(DEFAULT, 100, &[(99, 300, 0, 0), (0, 201, 0, 0)]), [(0, Reason::PrefixHit)]);
    }
}
