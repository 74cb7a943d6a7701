//! `dynamo`: the sum of prefill and decode blocks (NVIDIA Dynamo's KV router; crate `dynamo-kv-router` 1.6.1,
//! `src/scheduling/selector/reference.rs`).
//!
//! `argmin (prefill_load_scale * max(0, (P + L) / b - overlap_credit * m / b) + (T + L) / b)`, with `P` the uncached
//! prompt tokens queued at the endpoint, `L` the prompt's tokens, `m` those of them that it is expected to hold, `T`
//! the tokens of all contexts there and `b` the block size. The defaults are Dynamo's: credit 1, scale 1, request
//! weight 0, no decay, temperature 0, so the lowest cost wins and ties are random. Dynamo counts blocks shared by
//! several requests in flight once and does not count output; kvlane counts them per request, and output as it streams.
//! Dynamo also gives credit for other tiers (host 0.75, disk 0.25), which a row does not distinguish.
//!
//! The set `dynamo_lmetric` is its `lmetric` option, the product of both: `prefill * ((T + L) / b + 1)`. Only there
//! does `b` matter; it is 16, vLLM's.
//!
//! Known limit: a block to prefill and a block to decode weigh the same, though the first takes a hundred times as
//! long.

use serde::{Deserialize, Serialize};

use crate::bounded::Amount;
use crate::policy::{Candidate, PickContext, Policy, Reason};

/// How prefill and decode blocks are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// Their sum.
    Sum,
    /// The product of prefill blocks and decode blocks plus one.
    Product,
}

/// Weights, with Dynamo's defaults.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Credit in prefill blocks for a cached block.
    pub overlap_credit: Amount,
    /// Weight of prefill blocks.
    pub prefill_load_scale: Amount,
    /// Block size in tokens.
    pub block_tokens: u32,
    /// Sum or product.
    pub form: Form,
}

impl Default for Config {
    fn default() -> Self {
        Self { form: Form::Sum, ..LMETRIC }
    }
}

/// Dynamo's `lmetric` option.
pub const LMETRIC: Config = Config {
    overlap_credit: Amount::of(1.0),
    prefill_load_scale: Amount::of(1.0),
    block_tokens: 16,
    form: Form::Product,
};

/// The policy.
pub struct Dynamo {
    config: Config,
}

impl Dynamo {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self { config }
    }
}

impl Policy for Dynamo {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        cx.reason = Reason::LowestCost;
        let Config { overlap_credit, prefill_load_scale, block_tokens, form } = self.config;
        let (overlap_credit, prefill_load_scale) = (overlap_credit.get(), prefill_load_scale.get());
        let blocks = |tokens: f64| tokens / f64::from(block_tokens.max(1));
        let prompt_tokens = f64::from(cx.request.prompt_tokens);
        cx.cheapest(candidates, |row| {
            let ledger = row.load.in_flight;
            let credit = overlap_credit * blocks(f64::from(row.overlap_tokens));
            let prefill = (blocks(ledger.prefill_tokens as f64 + prompt_tokens) - credit).max(0.0);
            let decode = blocks(ledger.context_tokens as f64 + prompt_tokens);
            match form {
                Form::Sum => prefill_load_scale * prefill + decode,
                Form::Product => prefill_load_scale * prefill * (decode + 1.0),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::Case;

    // Overlap, requests, queued prefill tokens, context tokens. In blocks of 16, with a prompt of 10 blocks: 6 cached,
    // 4 queued and 20 in flight at the first endpoint, none at the second.
    const ROWS: [(u32, u32, u64, u64); 2] = [(96, 2, 64, 320), (0, 0, 0, 0)];

    #[test]
    fn blocks_to_prefill_and_to_decode_add_up() {
        let mut case = Case::new("dynamo", 160, &ROWS);
        assert_eq!(case.pick(), (1, Reason::LowestCost));
        assert_eq!(case.costs, [8.0 + 30.0, 10.0 + 10.0]);
    }

    #[test]
    fn or_are_multiplied() {
        let mut case = Case::new("dynamo_lmetric", 160, &ROWS);
        assert_eq!(case.pick(), (1, Reason::LowestCost));
        assert_eq!(case.costs, [8.0 * 31.0, 10.0 * 11.0]);
    }

    #[test]
    fn credit_does_not_make_a_prompt_cheaper_than_nothing() {
        let mut case = Case::new("dynamo", 160, &[(999, 0, 0, 16), (0, 0, 0, 0)]);
        assert_eq!(case.pick().0, 0);
        assert_eq!(case.costs, [0.0 + 11.0, 10.0 + 10.0]);
    }
}
