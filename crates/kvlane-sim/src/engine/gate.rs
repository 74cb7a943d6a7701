//! Why the head of the queue waits, so that it is not checked again in every step.

use foldhash::fast::FixedState;
use hashbrown::HashSet;
use kvlane_core::block::BlockHash;

/// The head of the queue lacked blocks. That changes only when enough blocks are free, or when another sequence
/// computes a block of its prompt: any other change to its prompt's blocks frees or evicts them, and then it needs
/// more blocks, not fewer.
#[derive(Clone, Debug, Default)]
pub(super) struct Gate {
    /// Blocks it needs; 0 while the gate is open.
    needs: u32,
    wanted: HashSet<BlockHash, FixedState>,
}

// === impl Gate ===

impl Gate {
    /// Whether the head need not be checked with `free` blocks free.
    pub(super) fn holds(&self, free: u32) -> bool {
        free < self.needs
    }

    /// The head needs `needs` blocks, given the blocks of its prompt that others hold now.
    pub(super) fn close(&mut self, needs: u32, prompt: impl Iterator<Item = BlockHash>) {
        if self.wanted.is_empty() {
            self.wanted.extend(prompt);
        }
        self.needs = needs;
    }

    /// A block can be found that could not be before.
    pub(super) fn published(&mut self, hash: BlockHash) {
        if self.needs > 0 && self.wanted.contains(&hash) {
            self.needs = 0;
        }
    }

    /// Another request is the head of the queue.
    pub(super) fn open(&mut self) {
        self.needs = 0;
        self.wanted.clear();
    }
}
