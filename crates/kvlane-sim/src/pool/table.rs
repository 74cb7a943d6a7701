//! Hash table of blocks.
//!
//! Open addressing with linear probing and backward-shift deletion (Knuth, The Art of Computer Programming 3, 6.4,
//! algorithm R), at most a quarter full, because few probes matter more than few bytes. An entry is eight bytes, half
//! of them hash, and its ideal position is the upper part of that half: a lookup, insertion or deletion mostly costs
//! one cache line. A general hash map needs two or three, and insertions and evictions of a full cache dominate the
//! run time of the simulated engine.

use super::{Block, NONE};

#[derive(Clone, Copy, Debug)]
struct Entry {
    tag: u32,
    /// [`NONE`] if the entry is empty.
    block: u32,
}

const EMPTY: Entry = Entry { tag: 0, block: NONE };

/// Blocks by hash. The hashes themselves are stored with the blocks.
#[derive(Clone, Debug)]
pub(super) struct Table {
    /// A power of two of entries.
    entries: Vec<Entry>,
    /// Shift from a tag to its ideal position.
    shift: u32,
    len: u32,
}

/// Half of a hash, mixed: not every driver's hashes are random in all bits.
fn tag(hash: u64) -> u32 {
    (hash.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u32
}

// === impl Table ===

impl Table {
    /// An empty table for at most `blocks` blocks, at most 2^29.
    pub(super) fn new(blocks: u32) -> Self {
        let bits = (u64::from(blocks) * 4).next_power_of_two().trailing_zeros().clamp(1, 31);
        Self { entries: vec![EMPTY; 1 << bits], shift: 32 - bits, len: 0 }
    }

    pub(super) fn len(&self) -> u32 {
        self.len
    }

    pub(super) fn get(&self, blocks: &[Block], hash: u64) -> Option<u32> {
        self.find(blocks, hash).ok().map(|at| self.entries[at].block)
    }

    /// Inserts a block, unless there is one with this hash.
    pub(super) fn insert(&mut self, blocks: &[Block], hash: u64, block: u32) -> bool {
        let Err(at) = self.find(blocks, hash) else { return false };
        debug_assert!((self.len as usize) < self.entries.len() / 4, "no more blocks than it was made for");
        self.entries[at] = Entry { tag: tag(hash), block };
        self.len += 1;
        true
    }

    /// Deletes a block that was inserted with this hash.
    pub(super) fn remove(&mut self, hash: u64, block: u32) {
        let mask = self.entries.len() - 1;
        let mut hole = (tag(hash) >> self.shift) as usize;
        while self.entries[hole].block != block {
            debug_assert_ne!(self.entries[hole].block, NONE, "it was entered");
            hole = (hole + 1) & mask;
        }
        // Entries whose ideal position is the hole, or before it, move there.
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let entry = self.entries[at];
            if entry.block == NONE {
                break;
            }
            let best = (entry.tag >> self.shift) as usize;
            if (at.wrapping_sub(best) & mask) >= (at.wrapping_sub(hole) & mask) {
                self.entries[hole] = entry;
                hole = at;
            }
        }
        self.entries[hole] = EMPTY;
        self.len -= 1;
    }

    pub(super) fn clear(&mut self) {
        self.entries.fill(EMPTY);
        self.len = 0;
    }

    /// All blocks, in no particular order.
    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        self.entries.iter().map(|entry| entry.block).filter(|block| *block != NONE)
    }

    /// Position of the block with this hash, or else where it would be inserted.
    fn find(&self, blocks: &[Block], hash: u64) -> Result<usize, usize> {
        let (tag, mask) = (tag(hash), self.entries.len() - 1);
        let mut at = (tag >> self.shift) as usize;
        loop {
            let entry = self.entries[at];
            if entry.block == NONE {
                return Err(at);
            }
            if entry.tag == tag && blocks[entry.block as usize].hash == hash {
                return Ok(at);
            }
            at = (at + 1) & mask;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_table_is_a_map(ops in prop::collection::vec((any::<bool>(), 0u64..40), 0..200)) {
            // Many hashes have the same ideal position, including the last one.
            let hash = |id: u64| (id % 5).wrapping_mul(u64::MAX / 4) ^ id;
            let mut blocks = vec![Block { hash: 0, holders_or_older: NONE, newer: NONE }; 16];
            let (mut table, mut expected) = (Table::new(16), BTreeMap::new());
            for (insert, id) in ops {
                let named = hash(id);
                if insert {
                    let Some(block) = (0..16).find(|block| !expected.values().any(|b| b == block)) else { continue };
                    let is_new = !expected.contains_key(&named);
                    prop_assert_eq!(table.insert(&blocks, named, block), is_new);
                    if is_new {
                        blocks[block as usize].hash = named;
                        expected.insert(named, block);
                    }
                } else if let Some(block) = expected.remove(&named) {
                    table.remove(named, block);
                }
                for id in 0..40 {
                    prop_assert_eq!(table.get(&blocks, hash(id)), expected.get(&hash(id)).copied());
                }
                prop_assert_eq!(table.len() as usize, expected.len());
            }
        }
    }
}
