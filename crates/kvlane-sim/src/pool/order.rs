//! Order in which free blocks are reused.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{Block, NONE};

/// Eviction policy of a full cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Eviction {
    /// Least recently held first, as engines do.
    #[default]
    Lru,
    /// Least often found since it was stored first, then least recently held.
    Lfu,
    /// Blocks never found since they were stored first, then the rest; each by age. A turn that continues a session
    /// finds the earlier turns, so this protects active sessions.
    SessionLru,
    /// None: evicted content can still be found and returns at no cost. Sequences still need blocks. No machine does
    /// this; it is the upper bound.
    Infinite,
}

/// The free blocks in the order of reuse.
#[derive(Clone, Debug)]
pub(super) enum Order {
    /// By age.
    Age(List),
    /// By age, those never found first.
    Found { lists: [List; 2], found: Vec<bool> },
    /// By number of hits, then by age.
    Uses { free: BTreeSet<(u32, u64, u32)>, uses: Vec<u32>, freed: Vec<u64>, clock: u64 },
}

/// A list linked through the blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct List {
    oldest: u32,
    newest: u32,
}

// === impl Order ===

impl Order {
    pub(super) fn new(eviction: Eviction, blocks: u32) -> Self {
        let blocks = blocks as usize;
        let empty = List { oldest: NONE, newest: NONE };
        match eviction {
            Eviction::Lru | Eviction::Infinite => Self::Age(empty),
            Eviction::SessionLru => Self::Found { lists: [empty; 2], found: vec![false; blocks] },
            Eviction::Lfu => {
                Self::Uses { free: BTreeSet::new(), uses: vec![0; blocks], freed: vec![0; blocks], clock: 0 }
            }
        }
    }

    /// The block to reuse; [`NONE`] if none is free.
    pub(super) fn first(&self) -> u32 {
        match self {
            Self::Age(list) => list.oldest,
            Self::Found { lists: [fresh, found], .. } => {
                if fresh.oldest == NONE {
                    found.oldest
                } else {
                    fresh.oldest
                }
            }
            Self::Uses { free, .. } => free.first().map_or(NONE, |&(.., block)| block),
        }
    }

    /// A block becomes free.
    pub(super) fn push(&mut self, blocks: &mut [Block], block: u32) {
        match self {
            Self::Age(list) => list.push(blocks, block),
            Self::Found { lists, found } => lists[usize::from(found[block as usize])].push(blocks, block),
            Self::Uses { free, uses, freed, clock } => {
                *clock += 1;
                freed[block as usize] = *clock;
                free.insert((uses[block as usize], *clock, block));
                blocks[block as usize].newer = NONE;
            }
        }
    }

    /// A block is no longer free.
    pub(super) fn remove(&mut self, blocks: &mut [Block], block: u32) {
        match self {
            Self::Age(list) => list.remove(blocks, block),
            Self::Found { lists, found } => lists[usize::from(found[block as usize])].remove(blocks, block),
            Self::Uses { free, uses, freed, .. } => {
                free.remove(&(uses[block as usize], freed[block as usize], block));
            }
        }
    }

    /// A held block was found again.
    pub(super) fn hit(&mut self, block: u32) {
        match self {
            Self::Age(_) => {}
            Self::Found { found, .. } => found[block as usize] = true,
            Self::Uses { uses, .. } => uses[block as usize] += 1,
        }
    }

    /// A held block has lost its content.
    pub(super) fn forget(&mut self, block: u32) {
        match self {
            Self::Age(_) => {}
            Self::Found { found, .. } => found[block as usize] = false,
            Self::Uses { uses, .. } => uses[block as usize] = 0,
        }
    }
}

// === impl List ===

impl List {
    fn push(&mut self, blocks: &mut [Block], block: u32) {
        let older = self.newest;
        let entry = &mut blocks[block as usize];
        (entry.holders_or_older, entry.newer) = (older, NONE);
        match older {
            NONE => self.oldest = block,
            older => blocks[older as usize].newer = block,
        }
        self.newest = block;
    }

    fn remove(&mut self, blocks: &mut [Block], block: u32) {
        let Block { holders_or_older: older, newer, .. } = blocks[block as usize];
        match older {
            NONE => self.oldest = newer,
            older => blocks[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => blocks[newer as usize].holders_or_older = older,
        }
    }
}
