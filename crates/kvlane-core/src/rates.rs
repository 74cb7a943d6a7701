//! How fast an endpoint works: a step's time as a sum of a few products.

use serde::{Deserialize, Serialize};

/// What an engine's steps take, in seconds. A step that computes prompt tokens and decodes takes the sum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// For each uncached prompt token.
    pub prefill_token_s: f64,
    /// For each query-key pair of those tokens.
    pub prefill_pair_s: f64,
    /// For any step: reading the weights, starting kernels.
    pub step_s: f64,
    /// For each decoding sequence.
    pub sequence_s: f64,
    /// For each token of their contexts.
    pub context_token_s: f64,
}

// === impl Rates ===

impl Default for Rates {
    /// An 8-billion-parameter model on one H100.
    fn default() -> Self {
        Self {
            prefill_token_s: 25e-6,
            prefill_pair_s: 1.0e-9,
            step_s: 6.5e-3,
            sequence_s: 20e-6,
            context_token_s: 45e-9,
        }
    }
}

impl Rates {
    /// Seconds to compute so many prompt tokens with so many query-key pairs.
    pub fn prefill_s(&self, tokens: u64, pairs: u64) -> f64 {
        self.prefill_token_s * tokens as f64 + self.prefill_pair_s * pairs as f64
    }

    /// Seconds of a step in which `sequences` decode, with `context_tokens` before them in all.
    pub fn decode_step_s(&self, sequences: u32, context_tokens: u64) -> f64 {
        self.step_s + self.sequence_s * f64::from(sequences) + self.context_token_s * context_tokens as f64
    }
}
