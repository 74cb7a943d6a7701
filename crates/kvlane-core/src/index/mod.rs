//! Which endpoint holds which prefix.
//!
//! [`approx`] is fed by our own dispatches, for engines that do not tell what they cache; [`exact`] by the events of
//! those that do; [`speculation`] bridges the time until those have come. [`oracle`] has the naive references that the
//! property tests of both compare with.

pub mod approx;
pub mod exact;
#[cfg(test)]
pub(crate) mod oracle;
pub(crate) mod speculation;

use crate::endpoint::EndpointId;

/// For one prompt: how many leading blocks each endpoint is expected to hold. A reusable buffer.
#[derive(Clone, Debug, Default)]
pub struct Overlap {
    by_slot: Vec<(EndpointId, u32)>,
    holders: Vec<u16>,
    /// Memory for whoever fills it.
    scratch: Vec<EndpointId>,
}

// === impl Overlap ===

impl Overlap {
    /// Forgets everything, keeps the memory.
    pub fn clear(&mut self) {
        for slot in self.holders.drain(..) {
            self.by_slot[slot as usize].1 = 0;
        }
    }

    /// Endpoint `id` holds the first `blocks` blocks. A later call for the same endpoint replaces an earlier one; of
    /// two that have had the same slot, the newer one counts.
    pub(crate) fn set(&mut self, id: EndpointId, blocks: u32) {
        let slot = id.slot();
        if slot >= self.by_slot.len() {
            self.by_slot.resize(slot + 1, (id, 0));
        }
        let (holder, held) = self.by_slot[slot];
        if blocks == 0 || (held > 0 && holder > id) {
            return;
        }
        if held == 0 {
            self.holders.push(slot as u16);
        }
        self.by_slot[slot] = (id, blocks);
    }

    /// How many leading blocks endpoint `id` holds.
    pub fn blocks(&self, id: EndpointId) -> u32 {
        self.by_slot.get(id.slot()).filter(|(holder, _)| *holder == id).map_or(0, |(_, held)| *held)
    }

    /// The endpoints that hold at least one block, with how many leading blocks each holds.
    pub fn iter(&self) -> impl Iterator<Item = (EndpointId, u32)> {
        self.holders.iter().map(|&slot| self.by_slot[slot as usize])
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
