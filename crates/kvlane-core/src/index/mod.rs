//! Prefix index: which endpoint holds which prefix.
//!
//! [`approx`] is fed by our own dispatches, for engines without KV events; [`exact`] by KV events; `speculation`
//! covers dispatched prompts until their events arrive; [`marks`] holds what routers of other replicas have sent, and a [`sketch`] says in few
//! bits what a whole fleet was sent. `oracle` has the naive references that the property tests of
//! both compare with.

pub mod approx;
pub mod exact;
pub mod marks;
#[cfg(test)]
pub(crate) mod oracle;
pub mod sketch;
pub(crate) mod speculation;

use crate::endpoint::EndpointId;

/// For one prompt: how many leading blocks each endpoint is predicted to hold. A reusable buffer.
#[derive(Clone, Debug, Default)]
pub struct Overlap {
    held: Counts,
    /// Of these, the blocks that are only below the GPU.
    lower: Counts,
    /// Scratch memory for the index that fills it.
    scratch: Vec<EndpointId>,
}

/// A number of blocks for each endpoint that has any.
#[derive(Clone, Debug, Default)]
struct Counts {
    by_slot: Vec<(EndpointId, u32)>,
    counted: Vec<u16>,
}

// === impl Overlap ===

impl Overlap {
    /// Empties the buffer and keeps its memory.
    pub fn clear(&mut self) {
        self.held.clear();
        self.lower.clear();
    }

    /// Sets the leading `blocks` that endpoint `id` holds. A later call for the same endpoint replaces an earlier one;
    /// of two endpoints with the same slot, the newer one counts.
    pub(crate) fn set(&mut self, id: EndpointId, blocks: u32) {
        self.held.set(id, blocks);
    }

    /// Adds to the blocks that endpoint `id` holds only below the GPU.
    fn add_lower(&mut self, id: EndpointId, blocks: u32) {
        self.lower.set(id, self.lower.of(id) + blocks);
    }

    /// Leading blocks that endpoint `id` holds, in any tier.
    pub fn blocks(&self, id: EndpointId) -> u32 {
        self.held.of(id)
    }

    /// How many of its leading blocks endpoint `id` holds only below the GPU, so that it has to load them. Only the exact
    /// index knows tiers.
    pub fn lower_blocks(&self, id: EndpointId) -> u32 {
        self.lower.of(id)
    }

    /// The endpoints that hold at least one block, with their number of leading blocks.
    pub fn iter(&self) -> impl Iterator<Item = (EndpointId, u32)> {
        self.held.counted.iter().map(|&slot| self.held.by_slot[slot as usize])
    }
}

// === impl Counts ===

impl Counts {
    fn clear(&mut self) {
        for slot in self.counted.drain(..) {
            self.by_slot[slot as usize].1 = 0;
        }
    }

    fn set(&mut self, id: EndpointId, blocks: u32) {
        let slot = id.slot();
        if slot >= self.by_slot.len() {
            self.by_slot.resize(slot + 1, (id, 0));
        }
        let (holder, held) = self.by_slot[slot];
        if blocks == 0 || (held > 0 && holder > id) {
            return;
        }
        if held == 0 {
            self.counted.push(slot as u16);
        }
        self.by_slot[slot] = (id, blocks);
    }

    fn of(&self, id: EndpointId) -> u32 {
        self.by_slot.get(id.slot()).filter(|(holder, _)| *holder == id).map_or(0, |(_, held)| *held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_that_had_the_same_slot_the_newer_one_counts() {
        let (old, new) = (EndpointId::new(0, 0), EndpointId::new(0, 1));
        for order in [[(old, 8), (new, 4)], [(new, 4), (old, 8)]] {
            let mut overlap = Overlap::default();
            order.into_iter().for_each(|(id, blocks)| overlap.set(id, blocks));
            assert_eq!(overlap.iter().collect::<Vec<_>>(), [(new, 4)]);
            overlap.clear();
            assert_eq!(overlap.iter().count(), 0);
        }
    }
}
