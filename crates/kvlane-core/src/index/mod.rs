//! Which endpoint holds which prefix.
//!
//! [`approx`] is fed by our own dispatches, for engines that do not tell what they cache. [`oracle`] is the naive
//! reference that the property tests compare with.

pub mod approx;
#[cfg(test)]
pub(crate) mod oracle;

use crate::endpoint::EndpointId;

/// For one prompt: how many leading blocks each endpoint is expected to hold. A reusable buffer.
#[derive(Clone, Debug, Default)]
pub struct Overlap {
    by_slot: Vec<u32>,
    holders: Vec<EndpointId>,
}

// === impl Overlap ===

impl Overlap {
    /// Forgets everything, keeps the memory.
    pub fn clear(&mut self) {
        for holder in self.holders.drain(..) {
            self.by_slot[holder.slot()] = 0;
        }
    }

    /// Endpoint `id` holds the first `blocks` blocks. A later call for the same endpoint replaces an earlier one.
    pub(crate) fn set(&mut self, id: EndpointId, blocks: u32) {
        if blocks == 0 {
            return;
        }
        let slot = id.slot();
        if slot >= self.by_slot.len() {
            self.by_slot.resize(slot + 1, 0);
        }
        if self.by_slot[slot] == 0 {
            self.holders.push(id);
        }
        self.by_slot[slot] = blocks;
    }

    /// The endpoints that hold at least one block, with how many leading blocks each holds.
    pub fn iter(&self) -> impl Iterator<Item = (EndpointId, u32)> {
        self.holders.iter().map(|&id| (id, self.by_slot[id.slot()]))
    }
}
