//! Block hashes: a prompt is cut into blocks of equal size, and each block's hash is chained to the one before it.
//!
//! Two prompts share their first n blocks exactly when their first n hashes are equal (up to a 64-bit collision). The
//! other properties that decide whether an engine may reuse a block (model, LoRA adapter and `cache_salt`) are the
//! chain's seed, so different tenants never match each other, at any position.
//!
//! Block contents are hashed by XXH3-64, the de-facto choice for router-side block hashes (Dynamo's
//! `dynamo-kv-hashing`, SMG's `event_tree.rs`), without a seed: for blocks above 240 bytes XXH3 would derive a secret
//! from the seed at each call. These hashes are internal and never compared with an engine's.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Prompt bytes that count as one token where no tokenizer counts them. About right for English text in current
/// vocabularies, and exact for prompts that are token ids (32-bit integers).
pub const BYTES_PER_TOKEN: usize = 4;

/// Chained hash of one full block of a prompt: it identifies the block and everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct BlockHash(pub u64);

/// Hash of one block's contents, independent of the blocks before it: its tokens and any other content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ContentHash(pub u64);

impl ContentHash {
    /// The hash of a block's bytes; tokens are four little-endian bytes each.
    pub fn of(block: &[u8]) -> Self {
        Self(xxh3_64(block))
    }

    /// The hash of a block that also holds content other than tokens, such as part of an image.
    #[must_use]
    pub fn with(self, key: &[u8]) -> Self {
        Self(xxh3_64_with_seed(key, self.0))
    }
}

/// The start of a chain: everything except the tokens that decides whether a block can be reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainSeed(u64);

impl ChainSeed {
    /// The seed for prompts of `model`, with this adapter and cache salt, if any.
    pub fn new(model: &str, lora: Option<&str>, cache_salt: Option<&str>) -> Self {
        let field = |seed, value: Option<&str>| match value {
            Some(text) => xxh3_64_with_seed(text.as_bytes(), mix(seed, 1)),
            None => mix(seed, 2),
        };
        Self(field(field(xxh3_64(model.as_bytes()), lora), cache_salt))
    }

    /// Appends the hashes of the full blocks of `bytes` to `out`. A trailing partial block has no hash.
    pub fn chain(self, bytes: &[u8], block_bytes: usize, out: &mut Vec<BlockHash>) {
        let mut parent = self.0;
        out.reserve(bytes.len() / block_bytes.max(1));
        out.extend(bytes.chunks_exact(block_bytes.max(1)).map(|block| {
            parent = link(parent, ContentHash::of(block));
            BlockHash(parent)
        }));
    }

    /// Like [`ChainSeed::chain`], for tokens.
    pub fn chain_tokens(self, tokens: &[u32], block_tokens: usize, out: &mut Vec<BlockHash>) {
        let mut parent = self.0;
        let mut bytes = Vec::with_capacity(4 * block_tokens.min(tokens.len()));
        out.reserve(tokens.len() / block_tokens.max(1));
        out.extend(tokens.chunks_exact(block_tokens.max(1)).map(|block| {
            bytes.clear();
            bytes.extend(block.iter().flat_map(|token| token.to_le_bytes()));
            parent = link(parent, ContentHash::of(&bytes));
            BlockHash(parent)
        }));
    }

    /// The hash of one block that follows `parent`, or starts the chain.
    pub fn next(self, parent: Option<BlockHash>, content: ContentHash) -> BlockHash {
        BlockHash(link(parent.map_or(self.0, |hash| hash.0), content))
    }
}

/// The hash of a block after `parent`: both are combined with constants, multiplied to 128 bits and folded, as in
/// wyhash and rapidhash. Both factors are hashes already. This step is the only serial dependency between blocks, of
/// which a prompt of 100,000 tokens has thousands.
fn link(parent: u64, ContentHash(content): ContentHash) -> u64 {
    let product = u128::from(parent ^ 0xD1B5_4A32_D192_ED03) * u128::from(content ^ 0x9E37_79B9_7F4A_7C15);
    (product >> 64) as u64 ^ product as u64
}

/// One round of SplitMix64's finaliser, to separate the cases of a seed.
fn mix(seed: u64, case: u64) -> u64 {
    let z = seed.wrapping_add(case.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z ^ (z >> 27)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(seed: ChainSeed, text: &[u8]) -> Vec<BlockHash> {
        let mut out = Vec::new();
        seed.chain(text, 4, &mut out);
        out
    }

    #[test]
    fn a_shared_prefix_shares_exactly_its_full_blocks() {
        let seed = ChainSeed::new("m", None, None);
        let (a, b) = (chain(seed, b"aaaabbbbcccc"), chain(seed, b"aaaabbbbdddde"));
        assert_eq!((a.len(), b.len()), (3, 3), "the partial block has no hash");
        assert_eq!(a[..2], b[..2]);
        assert_ne!(a[2], b[2]);
    }

    #[test]
    fn a_block_after_a_different_prefix_is_a_different_block() {
        let seed = ChainSeed::new("m", None, None);
        assert_ne!(chain(seed, b"aaaacccc")[1], chain(seed, b"bbbbcccc")[1]);
    }

    #[test]
    fn a_prompt_that_says_one_thing_for_ever_has_no_two_blocks_alike() {
        for text in [&[0u8; 400_000][..], &[0xFF; 400_000], &b"same".repeat(100_000)] {
            let chain = chain(ChainSeed::new("m", None, None), text);
            let distinct = |bits: u32| {
                chain.iter().map(|hash| hash.0 >> bits).collect::<std::collections::BTreeSet<u64>>().len()
            };
            assert_eq!(distinct(0), chain.len());
            // 100,000 values drawn at random from 2^20 contain 95,345 distinct ones.
            assert!((94_500..96_200).contains(&distinct(44)), "{}", distinct(44));
        }
    }

    /// Invariant: Prompts of different models, adapters or salts never match.
    #[test]
    fn model_adapter_and_salt_each_separate_the_chains() {
        let seeds = [
            ChainSeed::new("m", None, None),
            ChainSeed::new("n", None, None),
            ChainSeed::new("m", Some("x"), None),
            ChainSeed::new("m", None, Some("x")),
            ChainSeed::new("m", Some(""), None),
            ChainSeed::new("m", None, Some("")),
        ];
        for (i, a) in seeds.iter().enumerate() {
            for b in &seeds[..i] {
                assert_ne!(chain(*a, b"aaaa"), chain(*b, b"aaaa"));
            }
        }
    }

    #[test]
    fn chaining_one_block_at_a_time_gives_the_same_hashes() {
        let seed = ChainSeed::new("m", None, Some("t"));
        let (a, b) = (ContentHash::of(b"aaaa"), ContentHash::of(b"bbbb"));
        let first = seed.next(None, a);
        assert_eq!(chain(seed, b"aaaabbbb"), [first, seed.next(Some(first), b)]);
        assert_ne!(seed.next(None, a), seed.next(None, a.with(b"image")));
    }

    #[test]
    fn tokens_are_hashed_as_their_little_endian_bytes() {
        let seed = ChainSeed::new("m", None, None);
        let mut out = Vec::new();
        seed.chain_tokens(&[0x6161_6161, 0x6262_6262, 7], 1, &mut out);
        assert_eq!(out[..2], chain(seed, b"aaaabbbb"));
    }
}
