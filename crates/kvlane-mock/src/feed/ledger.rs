//! Tokens of the engine's blocks: the engine model knows only hashes, a feed reports tokens.
//!
//! A block becomes findable by a request in the engine, so the texts of those requests suffice: they are added when a
//! request is queued and removed after the last event that may refer to them.

use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use kvlane_core::block::BlockHash;

use crate::tokens;

/// A request's tokens, and the other inputs of its block hashes.
#[derive(Debug)]
pub(crate) struct Text {
    /// The rendered prompt.
    pub(crate) rendered: Vec<u8>,
    pub(crate) prompt_tokens: u32,
    /// The seed of its answer.
    pub(crate) key: u64,
    pub(crate) lora: Option<String>,
    pub(crate) salt: Option<String>,
    /// The hashes of its full blocks, answer included.
    pub(crate) blocks: Arc<[BlockHash]>,
    /// The engine gets each hash XOR this value: 0, unless the feed reports false blocks for this request.
    pub(crate) mask: u64,
}

/// One block of a text.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) text: Arc<Text>,
    pub(super) index: u32,
}

#[derive(Debug)]
struct Entry {
    place: Place,
    /// Requests in the engine that have this block.
    requests: u32,
}

/// The texts of all requests whose blocks may still be reported.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    places: Map<Entry>,
    /// For blocks in the engine's cache that can never be found: the hash that the feed reports.
    lies: Map<BlockHash>,
}

/// By block hashes, which are hashes already.
type Map<T> = std::collections::HashMap<u64, T, BuildHasherDefault<Unhashed>>;

#[derive(Debug, Default)]
struct Unhashed(u64);

impl Hasher for Unhashed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}

// === impl Text ===

impl Text {
    /// Its hashes in the engine.
    pub(crate) fn engine_blocks(&self) -> Arc<[BlockHash]> {
        match self.mask {
            0 => self.blocks.clone(),
            mask => self.blocks.iter().map(|hash| BlockHash(hash.0 ^ mask)).collect(),
        }
    }

    /// Appends the token ids of block `index`.
    pub(super) fn token_ids(&self, index: u32, block_tokens: u32, out: &mut Vec<u32>) {
        let from = index * block_tokens;
        let end = from.saturating_add(block_tokens);
        // The prompt's last token may have fewer bytes.
        let bytes = self.rendered.len().min(tokens::TOKEN_BYTES * from.min(self.prompt_tokens) as usize);
        let of_prompt = (end.min(self.prompt_tokens)).saturating_sub(from);
        out.extend(tokens::ids(&self.rendered[bytes..]).take(of_prompt as usize));
        let answer = from.max(self.prompt_tokens)..end.max(self.prompt_tokens);
        out.extend(answer.map(|at| tokens::answer_id(self.key, at - self.prompt_tokens)));
    }
}

// === impl Place ===

impl Place {
    pub(super) fn hash(&self) -> BlockHash {
        self.text.blocks[self.index as usize]
    }

    /// The previous block.
    pub(super) fn parent(&self) -> Option<BlockHash> {
        self.text.blocks[..self.index as usize].last().copied()
    }
}

// === impl Ledger ===

impl Ledger {
    /// Adds a request.
    pub(super) fn enter(&mut self, text: &Arc<Text>) {
        for (index, hash) in (0..).zip(text.blocks.iter()) {
            let place = || Entry { place: Place { text: text.clone(), index }, requests: 0 };
            self.places.entry(hash.0 ^ text.mask).or_insert_with(place).requests += 1;
        }
    }

    /// Removes a request; blocks that only it had will not be reported.
    pub(super) fn leave(&mut self, text: &Text) {
        for hash in text.blocks.iter() {
            if let std::collections::hash_map::Entry::Occupied(mut entry) =
                self.places.entry(hash.0 ^ text.mask)
            {
                entry.get_mut().requests -= 1;
                if entry.get().requests == 0 {
                    entry.remove();
                }
            }
        }
    }

    /// Contents of a block that the engine has stored.
    pub(super) fn stored(&mut self, hash: BlockHash) -> Option<Place> {
        let place = self.places.get(&hash.0)?.place.clone();
        if place.text.mask != 0 {
            self.lies.insert(hash.0, place.hash());
        }
        Some(place)
    }

    /// The hash that the feed has reported for a block that the engine has evicted.
    pub(super) fn removed(&mut self, hash: BlockHash) -> BlockHash {
        self.lies.remove(&hash.0).unwrap_or(hash)
    }

    pub(super) fn cleared(&mut self) {
        self.lies.clear();
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.places.is_empty() && self.lies.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(rendered: &[u8], blocks: &[u64], mask: u64) -> Arc<Text> {
        Arc::new(Text {
            rendered: rendered.to_vec(),
            prompt_tokens: rendered.len().div_ceil(4) as u32,
            key: 1,
            lora: None,
            salt: None,
            blocks: blocks.iter().copied().map(BlockHash).collect(),
            mask,
        })
    }

    #[test]
    fn a_block_across_the_end_of_the_prompt_has_tokens_of_both() {
        let text = text(b"aaaabbbbcc", &[1, 2, 3], 0);
        let of = |index| {
            let mut ids = Vec::new();
            text.token_ids(index, 2, &mut ids);
            ids
        };
        let word = |at| tokens::answer_id(1, at);
        assert_eq!(of(0), [0x6161_6161, 0x6262_6262]);
        assert_eq!(of(1), [0x6363, word(0)]);
        assert_eq!(of(2), [word(1), word(2)]);
    }

    #[test]
    fn a_block_is_known_as_long_as_a_request_has_it() {
        let mut ledger = Ledger::default();
        let (a, b) = (text(b"aaaabbbb", &[1, 2], 0), text(b"aaaacccc", &[1, 3], 0));
        ledger.enter(&a);
        ledger.enter(&b);
        ledger.leave(&a);
        assert!(ledger.stored(BlockHash(1)).is_some() && ledger.stored(BlockHash(2)).is_none());
        ledger.leave(&b);
        assert!(ledger.is_empty());
    }

    #[test]
    fn a_lie_is_told_under_the_hash_that_is_expected_and_taken_back_under_it() {
        let mut ledger = Ledger::default();
        let lie = text(b"aaaa", &[1], 0xF0);
        assert_eq!(lie.engine_blocks().as_ref(), [BlockHash(0xF1)]);
        ledger.enter(&lie);
        assert_eq!(ledger.stored(BlockHash(0xF1)).expect("entered").hash(), BlockHash(1));
        ledger.leave(&lie);
        assert_eq!(ledger.removed(BlockHash(0xF1)), BlockHash(1));
        assert!(ledger.is_empty());
    }
}
