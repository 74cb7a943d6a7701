//! `prefix_aware`: longest match below a saturation limit (zxuhan/llm-router).
//!
//! Endpoints are ordered by match, longest first, then by requests in flight; remaining ties are random. The first one
//! with fewer than `saturation_inflight` requests gets the request; when all are saturated, the least loaded.

use serde::{Deserialize, Serialize};

use super::{Candidate, CostUnit, PickContext, Policy, Reason};

/// Saturation limit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Requests in flight at which an endpoint is skipped. The project's default; its cloud benchmark used 4.
    pub saturation_inflight: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self { saturation_inflight: 8 }
    }
}

/// The policy.
pub struct PrefixAware {
    config: Config,
}

impl PrefixAware {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self { config }
    }
}

impl Policy for PrefixAware {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        let saturated = |row: &Candidate| row.load.in_flight.requests >= self.config.saturation_inflight;
        let open_longest =
            candidates.iter().filter(|row| !saturated(row)).map(|row| row.overlap_tokens).max();
        let longest = candidates.iter().map(|row| row.overlap_tokens).max().unwrap_or(0);
        let requests = |row: &Candidate| f64::from(row.load.in_flight.requests);
        let Some(open_longest) = open_longest else {
            cx.reason = Reason::Saturated;
            return cx.cheapest(candidates, requests);
        };
        cx.reason = match open_longest {
            _ if open_longest < longest => Reason::Saturated,
            0 => Reason::PrefixMiss,
            _ => Reason::PrefixHit,
        };
        cx.cheapest(candidates, |row| {
            if row.overlap_tokens == open_longest && !saturated(row) { requests(row) } else { f64::INFINITY }
        })
    }

    fn cost_unit(&self) -> CostUnit {
        CostUnit::Requests
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::picks;
    use super::*;

    const DEFAULT: &str = r#"{"name":"prefix_aware"}"#;

    #[test]
    fn the_longest_match_wins_whatever_its_length() {
        let rows = [(0, 0, 0, 0), (16, 7, 0, 0), (8, 0, 0, 0)];
        assert_eq!(picks(DEFAULT, 1000, &rows), [(1, Reason::PrefixHit)]);
    }

    #[test]
    fn a_saturated_holder_spills_to_the_next_longest_match() {
        let rows = [(0, 0, 0, 0), (64, 8, 0, 0), (8, 3, 0, 0)];
        assert_eq!(picks(DEFAULT, 100, &rows), [(2, Reason::Saturated)]);
    }

    #[test]
    fn without_a_match_the_least_loaded_share_the_request() {
        let rows = [(0, 1, 0, 0), (0, 1, 0, 0), (0, 2, 0, 0)];
        assert_eq!(picks(DEFAULT, 100, &rows), [(0, Reason::PrefixMiss), (1, Reason::PrefixMiss)]);
    }

    #[test]
    fn when_all_are_saturated_the_least_loaded_gets_it() {
        let rows = [(64, 12, 0, 0), (0, 9, 0, 0)];
        assert_eq!(picks(DEFAULT, 100, &rows), [(1, Reason::Saturated)]);
    }
}
