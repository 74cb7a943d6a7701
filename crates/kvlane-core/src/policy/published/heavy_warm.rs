//! `heavy_warm`: heavy prompts by decode load, others by cache hit and token load (the agentic study "elastic P/D",
//! `--heavy-threshold` of its cache-aware proxy).
//!
//! A prompt is heavy if at least `heavy_tokens` of it are uncached even at the endpoint with the longest match. It goes
//! to the endpoint with the least decode load `T - P`: tokens of all contexts there that are not queued for prefill.
//! Any other prompt goes where `T + u` is least: tokens of all contexts there plus the uncached tokens of this prompt.
//! The default is the study's 20,000 tokens; ties are random.
//!
//! The study describes the placement of light prompts as "cache hit and token-level load balancing" without a formula;
//! the sum is our interpretation. Known limits: the threshold fits one model and one GPU, and a heavy prompt ignores
//! the prefill queue. The study measured no difference within one machine.

use serde::{Deserialize, Serialize};

use crate::policy::{Candidate, CostUnit, PickContext, Policy, Reason};

/// The threshold.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Uncached tokens from which a prompt is heavy.
    pub heavy_tokens: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self { heavy_tokens: 20_000 }
    }
}

/// The policy.
pub struct HeavyWarm {
    config: Config,
}

impl HeavyWarm {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self { config }
    }
}

impl Policy for HeavyWarm {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        let request = cx.request;
        let new_tokens = candidates.iter().map(|row| row.uncached_tokens(request)).min().unwrap_or(0);
        if new_tokens >= self.config.heavy_tokens {
            cx.reason = Reason::LeastLoaded;
            return cx.cheapest(candidates, |row| {
                row.load.in_flight.context_tokens.saturating_sub(row.load.in_flight.prefill_tokens) as f64
            });
        }
        cx.reason = Reason::LowestCost;
        cx.cheapest(candidates, |row| {
            row.load.in_flight.context_tokens as f64 + f64::from(row.uncached_tokens(request))
        })
    }

    fn cost_unit(&self) -> CostUnit {
        CostUnit::Tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::Case;

    // Overlap, requests, queued prefill tokens, context tokens.
    const ROWS: [(u32, u32, u64, u64); 2] = [(1000, 4, 9000, 12_000), (0, 2, 0, 4000)];

    #[test]
    fn a_heavy_prompt_goes_where_least_is_decoded() {
        let mut case = Case::new("heavy_warm", 21_000, &ROWS);
        assert_eq!(case.pick(), (0, Reason::LeastLoaded));
        assert_eq!(case.costs, [3000.0, 4000.0]);
    }

    #[test]
    fn a_lighter_one_where_load_and_miss_are_least() {
        let mut case = Case::new("heavy_warm", 20_999, &ROWS);
        assert_eq!(case.pick(), (1, Reason::LowestCost));
        assert_eq!(case.costs, [12_000.0 + 19_999.0, 4000.0 + 20_999.0]);
    }
}
