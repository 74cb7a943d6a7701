//! The token count of a prompt, and the chain of its blocks.

use kvlane_core::block::{BYTES_PER_TOKEN, BlockHash, ChainSeed, ContentHash};
use kvlane_tokens::Prompt;
use kvlane_wire::kv::image_key;

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

    /// Of a prompt, which may have images. A block with a part of an image has a key of it, as the engine's blocks have.
    pub fn of_prompt(seed: ChainSeed, prompt: &Prompt, block_tokens: u32) -> Self {
        let whole = Self::of(seed, &prompt.tokens, block_tokens).with_others(prompt.other_tokens);
        let Some(first) = prompt.placed.first() else { return whole };
        let (size, mut chain) = (block_tokens as usize, whole.chain);
        chain.truncate(first.first / size);
        let mut images = prompt.placed.as_slice();
        let (mut bytes, mut key) = (Vec::with_capacity(4 * size), Vec::new());
        for (at, block) in prompt.tokens.chunks_exact(size).enumerate().skip(chain.len()) {
            let start = at * size;
            bytes.clear();
            bytes.extend(block.iter().flat_map(|token| token.to_le_bytes()));
            let mut content = ContentHash::of(&bytes);
            while let [image, rest @ ..] = images
                && image.first + image.tokens <= start
            {
                images = rest;
            }
            for image in images.iter().take_while(|image| image.first < start + size) {
                key.clear();
                image_key(&image.name, image.first as i64 - start as i64, &mut key);
                content = content.with(&key);
            }
            chain.push(seed.next(chain.last().copied(), content));
        }
        Self { chain, ..whole }
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

#[cfg(test)]
mod tests {
    use kvlane_tokens::Placed;

    use super::*;

    #[test]
    fn blocks_with_a_part_of_an_image_have_its_key() {
        let seed = ChainSeed::new("m", None, None);
        let tokens: Vec<u32> = (0..14).collect();
        let of = |placed: &[(usize, usize, &str)]| {
            let placed =
                placed.iter().map(|&(first, tokens, name)| Placed { first, tokens, name: name.into() });
            let prompt = Prompt { tokens: tokens.clone(), placed: placed.collect(), ..Prompt::default() };
            let counted = Counted::of_prompt(seed, &prompt, 4);
            assert_eq!(counted.tokens, 14);
            counted.chain
        };
        let key = |block: usize, keys: &[(&str, i64)]| {
            let bytes: Vec<u8> =
                tokens[4 * block..][..4].iter().flat_map(|token| token.to_le_bytes()).collect();
            keys.iter().fold(ContentHash::of(&bytes), |content, (name, offset)| {
                let mut key = Vec::new();
                image_key(name, *offset, &mut key);
                content.with(&key)
            })
        };
        let chain = |contents: &[ContentHash]| {
            let mut chain: Vec<BlockHash> = Vec::new();
            for content in contents {
                chain.push(seed.next(chain.last().copied(), *content));
            }
            chain
        };
        assert_eq!(of(&[]), chain(&[key(0, &[]), key(1, &[]), key(2, &[])]));
        assert_eq!(of(&[(3, 3, "a")]), chain(&[key(0, &[("a", 3)]), key(1, &[("a", -1)]), key(2, &[])]));
        // Two in one block; the second ends with it, and the last begins behind all full blocks.
        let three = of(&[(4, 2, "a"), (6, 2, "b"), (12, 1, "c")]);
        assert_eq!(three, chain(&[key(0, &[]), key(1, &[("a", 0), ("b", 2)]), key(2, &[])]));
    }
}
