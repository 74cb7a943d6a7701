//! The token count of a prompt, and the chain of its blocks.

use kvlane_core::block::{BYTES_PER_TOKEN, BlockHash, ChainSeed};

/// A counted prompt.
pub struct Counted {
    /// The hash of each full block.
    pub chain: Vec<BlockHash>,
    /// The prompt's length, in tokens.
    pub tokens: u32,
}

// === impl Counted ===

impl Counted {
    /// Of a tokenized prompt.
    pub fn of(seed: ChainSeed, tokens: &[u32], block_tokens: u32) -> Self {
        let mut chain = Vec::new();
        seed.chain_tokens(tokens, block_tokens as usize, &mut chain);
        Self { chain, tokens: u32::try_from(tokens.len()).unwrap_or(u32::MAX).max(1) }
    }

    /// Of the first of several prompts; the others have this many tokens.
    #[must_use]
    pub fn with_others(self, tokens: u32) -> Self {
        Self { tokens: self.tokens.saturating_add(tokens), ..self }
    }

    /// The estimate for a rendered prompt, four bytes per token, as `kvlane mock-engine` counts.
    pub fn estimate(seed: ChainSeed, rendered: &[u8], block_tokens: u32) -> Self {
        let mut chain = Vec::new();
        seed.chain(rendered, block_tokens as usize * BYTES_PER_TOKEN, &mut chain);
        let tokens = rendered.len().div_ceil(BYTES_PER_TOKEN);
        Self { chain, tokens: u32::try_from(tokens).unwrap_or(u32::MAX).max(1) }
    }
}
