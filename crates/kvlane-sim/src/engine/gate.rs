//! Why the head of the queue waits, so that it is not asked again in every step.

use foldhash::fast::FixedState;
use hashbrown::HashSet;
use kvlane_core::block::BlockHash;

/// The head of the queue had too few blocks. That changes only when as many are free as it lacked, or when someone else
/// computes a block of its prompt: whatever else happens to its prompt's blocks, they are let go or lost, and then it
/// needs more blocks, not fewer.
#[derive(Clone, Debug, Default)]
pub(super) struct Gate {
    /// Blocks it needs; 0 while the gate is open.
    needs: u32,
    wanted: HashSet<BlockHash, FixedState>,
}

// === impl Gate ===

impl Gate {
    /// Whether the head need not be asked with `free` blocks free.
    pub(super) fn holds(&self, free: u32) -> bool {
        free < self.needs
    }

    /// The head needs `needs` blocks, and this many only because others do not hold those of its prompt.
    pub(super) fn close(&mut self, needs: u32, prompt: impl Iterator<Item = BlockHash>) {
        if self.wanted.is_empty() {
            self.wanted.extend(prompt);
        }
        self.needs = needs;
    }

    /// A block can be found that could not before.
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
