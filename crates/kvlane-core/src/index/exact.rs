//! What engines say they hold: every block with its holders, kept by the engines' own events.
//!
//! A block is held where an engine has stored it in any tier and has not removed it from all of them. Events of one
//! endpoint have to be applied in order; how they get here in order is the driver's business.

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use super::Overlap;
use crate::block::BlockHash;
use crate::endpoint::EndpointId;
use crate::event::{KvEvent, Tier};

/// Blocks and who holds them.
#[derive(Clone, Debug, Default)]
pub struct ExactIndex {
    holders: HashMap<BlockHash, Vec<Holder>, FixedState>,
}

/// One endpoint that holds a block, and in which tiers.
#[derive(Clone, Copy, Debug)]
struct Holder {
    endpoint: EndpointId,
    /// One bit for each [`Tier`].
    tiers: u8,
}

const fn bit(tier: Tier) -> u8 {
    match tier {
        Tier::Gpu => 1,
        Tier::Cpu => 2,
    }
}

// === impl ExactIndex ===

impl ExactIndex {
    /// Applies what `endpoint` says has changed.
    pub fn apply(&mut self, endpoint: EndpointId, event: &KvEvent) {
        match event {
            KvEvent::Stored { blocks, tier } => blocks.iter().for_each(|hash| {
                let holders = self.holders.entry(*hash).or_default();
                match holders.iter_mut().find(|holder| holder.endpoint == endpoint) {
                    Some(holder) => holder.tiers |= bit(*tier),
                    None => holders.push(Holder { endpoint, tiers: bit(*tier) }),
                }
            }),
            KvEvent::Removed { blocks, tier } => blocks.iter().for_each(|hash| {
                let Some(holders) = self.holders.get_mut(hash) else { return };
                if let Some(at) = holders.iter().position(|holder| holder.endpoint == endpoint) {
                    holders[at].tiers &= !bit(*tier);
                    if holders[at].tiers == 0 {
                        holders.swap_remove(at);
                    }
                }
                if holders.is_empty() {
                    self.holders.remove(hash);
                }
            }),
            KvEvent::Cleared => self.remove_endpoint(endpoint),
        }
    }

    /// How many leading blocks of `chain` each endpoint holds, in any tier.
    pub fn lookup(&self, chain: &[BlockHash], overlap: &mut Overlap) {
        overlap.clear();
        let Some(first) = chain.first().and_then(|hash| self.holders.get(hash)) else { return };
        let mut left: Vec<EndpointId> = first.iter().map(|holder| holder.endpoint).collect();
        for (blocks, hash) in (1..).zip(&chain[1..]) {
            let holders = self.holders.get(hash).map_or(&[][..], Vec::as_slice);
            left.retain(|&endpoint| {
                let holds = holders.iter().any(|holder| holder.endpoint == endpoint);
                if !holds {
                    overlap.set(endpoint, blocks);
                }
                holds
            });
            if left.is_empty() {
                return;
            }
        }
        left.iter().for_each(|&endpoint| overlap.set(endpoint, chain.len() as u32));
    }

    /// Forgets all that an endpoint holds.
    pub fn remove_endpoint(&mut self, endpoint: EndpointId) {
        self.holders.retain(|_, holders| {
            holders.retain(|holder| holder.endpoint != endpoint);
            !holders.is_empty()
        });
    }

    /// Pairs of block and holder.
    pub fn blocks_held(&self) -> u64 {
        self.holders.values().map(|holders| holders.len() as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn endpoint(slot: u16) -> EndpointId {
        EndpointId::new(slot, 0)
    }

    fn hashes(ids: &[u64]) -> Vec<BlockHash> {
        ids.iter().copied().map(BlockHash).collect()
    }

    fn found(index: &ExactIndex, chain: &[u64]) -> Vec<(EndpointId, u32)> {
        let mut overlap = Overlap::default();
        index.lookup(&hashes(chain), &mut overlap);
        let mut found: Vec<_> = overlap.iter().collect();
        found.sort_unstable();
        found
    }

    fn stored(ids: &[u64], tier: Tier) -> KvEvent {
        KvEvent::Stored { blocks: hashes(ids), tier }
    }

    fn removed(ids: &[u64], tier: Tier) -> KvEvent {
        KvEvent::Removed { blocks: hashes(ids), tier }
    }

    #[test]
    fn each_holder_is_found_with_its_leading_run() {
        let mut index = ExactIndex::default();
        index.apply(endpoint(0), &stored(&[1, 2, 3], Tier::Gpu));
        index.apply(endpoint(1), &stored(&[1], Tier::Gpu));
        index.apply(endpoint(2), &stored(&[2, 3], Tier::Gpu));
        assert_eq!(found(&index, &[1, 2, 3, 4]), [(endpoint(0), 3), (endpoint(1), 1)]);
        assert_eq!(found(&index, &[]), []);
        assert_eq!(index.blocks_held(), 6);
    }

    #[test]
    fn a_block_is_held_until_it_has_left_its_last_tier() {
        let mut index = ExactIndex::default();
        for tier in [Tier::Gpu, Tier::Cpu, Tier::Gpu] {
            index.apply(endpoint(0), &stored(&[1], tier));
        }
        index.apply(endpoint(0), &removed(&[1], Tier::Gpu));
        assert_eq!(found(&index, &[1]), [(endpoint(0), 1)]);
        index.apply(endpoint(0), &removed(&[1], Tier::Cpu));
        assert_eq!((found(&index, &[1]), index.blocks_held()), (vec![], 0));
    }

    #[test]
    fn who_clears_keeps_nothing_and_others_keep_all() {
        let mut index = ExactIndex::default();
        index.apply(endpoint(0), &stored(&[1, 2], Tier::Gpu));
        index.apply(endpoint(1), &stored(&[1], Tier::Gpu));
        index.apply(endpoint(0), &KvEvent::Cleared);
        assert_eq!(found(&index, &[1, 2]), [(endpoint(1), 1)]);
    }

    proptest! {
        #[test]
        fn after_any_events_it_holds_what_the_engines_hold(
            events in prop::collection::vec((0u16..3, 0u8..8, prop::collection::vec(0u64..6, 1..4), any::<bool>()), 0..60),
        ) {
            let mut index = ExactIndex::default();
            let mut truth: [BTreeSet<(u64, u8)>; 3] = Default::default();
            for (slot, kind, ids, cpu) in events {
                let tier = if cpu { Tier::Cpu } else { Tier::Gpu };
                let held = &mut truth[slot as usize];
                let event = match kind {
                    0 => KvEvent::Cleared,
                    1..=3 => removed(&ids, tier),
                    _ => stored(&ids, tier),
                };
                match kind {
                    0 => held.clear(),
                    1..=3 => ids.iter().for_each(|id| _ = held.remove(&(*id, bit(tier)))),
                    _ => ids.iter().for_each(|id| _ = held.insert((*id, bit(tier)))),
                }
                index.apply(endpoint(slot), &event);
            }
            let chain = [0u64, 1, 2, 3, 4, 5];
            let holds = |slot: usize, id: u64| (1..=2).any(|tier| truth[slot].contains(&(id, tier)));
            for start in 0..chain.len() {
                let expected: Vec<_> = (0..3usize)
                    .map(|slot| (endpoint(slot as u16), chain[start..].iter().take_while(|id| holds(slot, **id)).count() as u32))
                    .filter(|(_, blocks)| *blocks > 0)
                    .collect();
                prop_assert_eq!(found(&index, &chain[start..]), expected);
            }
        }
    }
}
