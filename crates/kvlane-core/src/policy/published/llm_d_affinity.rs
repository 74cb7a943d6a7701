//! `llm_d_affinity`: llm-d's prefix-cache-affinity filter, then its token-load scorer (llm-d/llm-d-router, commit
//! ebab687, `pkg/epp/framework/plugins/scheduling/filter/prefixcacheaffinity`, `scorer/tokenload`; its "optimized
//! baseline").
//!
//! Endpoints that hold at least `threshold` of the prompt are sticky. Only they remain, unless the least loaded of them
//! has more than `penalty_max_ms * prefill_tokens_s / 1000` queued tokens more than the least loaded of the others.
//! Among the remaining endpoints the fewest queued tokens win, where all values above `tokens_max` are equal; ties are
//! random. Queued tokens are `P`: as in llm-d, uncached prompt tokens up to the first token.
//!
//! The defaults are llm-d's: 0.8, 18,000 ms, 15,928 tokens/s (Qwen3-32B on two H100), 4,194,304 tokens, no exploration.
//! The set `llm_d_affinity_5s` has the 5,000 ms of its example. llm-d's share is of whole blocks; here it is of tokens,
//! and a trailing partial block counts as missing. Known limits: the prefill rate is a constant, 18 s is a long queue,
//! and decoding and KV space are ignored.

use serde::{Deserialize, Serialize};

use crate::bounded::{Amount, AtLeastOne, Share};
use crate::policy::{Candidate, CostUnit, PickContext, Policy, Reason};

/// Thresholds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Share of the prompt from which an endpoint is sticky, 0 to 1; at 0 no endpoint is sticky.
    pub threshold: Share,
    /// Milliseconds by which a sticky endpoint's queue may exceed the others'; 0 is no limit.
    pub penalty_max_ms: Amount,
    /// Prefill rate, in tokens per second.
    pub prefill_tokens_s: AtLeastOne,
    /// Queued tokens above which all endpoints are equal.
    pub tokens_max: u64,
}

impl Default for Config {
    fn default() -> Self {
        Self { penalty_max_ms: Amount::of(18_000.0), ..FIVE_SECONDS }
    }
}

/// With five seconds of queue instead of eighteen.
pub const FIVE_SECONDS: Config = Config {
    threshold: Share::of(0.8),
    penalty_max_ms: Amount::of(5_000.0),
    prefill_tokens_s: AtLeastOne::of(15_928.0),
    tokens_max: 4_194_304,
};

/// The policy.
pub struct LlmDAffinity {
    config: Config,
}

impl LlmDAffinity {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self { config }
    }
}

impl Policy for LlmDAffinity {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        let Config { threshold, penalty_max_ms, prefill_tokens_s, tokens_max } = self.config;
        let (threshold, penalty_max_ms) = (threshold.get(), penalty_max_ms.get());
        let prompt_tokens = f64::from(cx.request.prompt_tokens.max(1));
        let is_sticky =
            |row: &Candidate| threshold > 0.0 && f64::from(row.overlap_tokens) / prompt_tokens >= threshold;
        let queued = |row: &Candidate| row.load.in_flight.prefill_tokens as f64;
        let (mut sticky, mut others) = (f64::INFINITY, f64::INFINITY);
        for row in candidates {
            let least = if is_sticky(row) { &mut sticky } else { &mut others };
            *least = least.min(queued(row));
        }
        let too_far = penalty_max_ms > 0.0 && sticky - others > penalty_max_ms / 1e3 * prefill_tokens_s.get();
        let load = |row: &Candidate| queued(row).min(tokens_max as f64);
        cx.reason = match (sticky.is_finite(), too_far) {
            (false, _) => Reason::PrefixMiss,
            (true, true) => Reason::Saturated,
            (true, false) => Reason::PrefixHit,
        };
        match cx.reason {
            Reason::PrefixHit => cx.cheapest_of(candidates, is_sticky, load).unwrap_or(0),
            _ => cx.cheapest(candidates, load),
        }
    }

    fn cost_unit(&self) -> CostUnit {
        CostUnit::Tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::Case;

    fn check(name: &str, rows: &[(u32, u32, u64, u64)], expect: (usize, Reason)) {
        assert_eq!(Case::new(name, 100, rows).pick(), expect, "{rows:?}");
    }

    #[test]
    fn who_holds_four_fifths_is_sticky() {
        check("llm_d_affinity", &[(80, 9, 5000, 0), (79, 0, 0, 0)], (0, Reason::PrefixHit));
        check("llm_d_affinity", &[(79, 9, 5000, 0), (79, 0, 0, 0)], (1, Reason::PrefixMiss));
    }

    #[test]
    fn of_the_sticky_the_fewest_queued_tokens_win() {
        check("llm_d_affinity", &[(100, 0, 70, 0), (80, 0, 60, 0), (0, 0, 0, 0)], (1, Reason::PrefixHit));
    }

    #[test]
    fn a_sticky_queue_beyond_the_penalty_is_left() {
        // 18 s of 15,928 tokens/s are 286,704 tokens, 5 s are 79,640.
        check("llm_d_affinity", &[(100, 0, 286_804, 0), (0, 0, 100, 0)], (0, Reason::PrefixHit));
        check("llm_d_affinity", &[(100, 0, 286_805, 0), (0, 0, 100, 0)], (1, Reason::Saturated));
        check("llm_d_affinity_5s", &[(100, 0, 79_740, 0), (0, 0, 100, 0)], (0, Reason::PrefixHit));
        check("llm_d_affinity_5s", &[(100, 0, 79_741, 0), (0, 0, 100, 0)], (1, Reason::Saturated));
    }

    #[test]
    fn if_all_endpoints_hold_the_prefix_the_least_loaded_is_picked() {
        check("llm_d_affinity", &[(100, 0, 900_000, 0), (100, 0, 0, 0)], (1, Reason::PrefixHit));
    }
}
