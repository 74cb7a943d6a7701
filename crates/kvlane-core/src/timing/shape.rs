//! What a model computes and reads, from its dimensions.

use serde::{Deserialize, Serialize};

use super::ELEMENT_BYTES;

/// The dimensions of a dense decoder, as in its Hugging Face `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelShape {
    /// Short name, as in a preset: `qwen2.5-7b`.
    pub name: String,
    /// `num_hidden_layers`.
    pub layers: u32,
    /// `hidden_size`.
    pub hidden: u32,
    /// `num_attention_heads`.
    pub heads: u32,
    /// `num_key_value_heads`.
    pub kv_heads: u32,
    /// `head_dim`.
    pub head_dim: u32,
    /// `intermediate_size`.
    pub ffn: u32,
    /// `vocab_size`.
    pub vocab: u32,
}

// === impl ModelShape ===

impl ModelShape {
    /// Weights of all layers' matrices.
    pub fn linear_parameters(&self) -> f64 {
        let [hidden, heads, kv_heads, head_dim, ffn] =
            [self.hidden, self.heads, self.kv_heads, self.head_dim, self.ffn].map(f64::from);
        let attention = 2.0 * hidden * heads * head_dim + 2.0 * hidden * kv_heads * head_dim;
        f64::from(self.layers) * (attention + 3.0 * hidden * ffn)
    }

    /// Weights of the output matrix; the embedding has as many.
    pub fn head_parameters(&self) -> f64 {
        f64::from(self.hidden) * f64::from(self.vocab)
    }

    /// Bytes of all weights.
    pub fn weight_bytes(&self) -> f64 {
        ELEMENT_BYTES * (self.linear_parameters() + 2.0 * self.head_parameters())
    }

    /// Bytes of keys and values of one token, over all GPUs.
    pub fn kv_bytes_per_token(&self) -> u64 {
        2 * u64::from(self.layers)
            * u64::from(self.kv_heads)
            * u64::from(self.head_dim)
            * ELEMENT_BYTES as u64
    }
}
