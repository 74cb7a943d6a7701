//! Naive reference indexes: every endpoint's set of block hashes, and every endpoint's copies by name. Slow, obviously
//! correct, for tests only.

use std::collections::{BTreeMap, BTreeSet};

use super::exact::Applied;
use crate::block::BlockHash;
use crate::endpoint::EndpointId;
use crate::event::{EngineHash, KvEvent, StoredBlock, Tier};

#[derive(Default)]
pub(crate) struct OracleIndex {
    held: BTreeMap<EndpointId, BTreeSet<BlockHash>>,
}

impl OracleIndex {
    pub(crate) fn insert(&mut self, chain: &[BlockHash], endpoint: EndpointId) {
        self.held.entry(endpoint).or_default().extend(chain);
    }

    pub(crate) fn remove_endpoint(&mut self, endpoint: EndpointId) {
        self.held.remove(&endpoint);
    }

    pub(crate) fn lookup(&self, chain: &[BlockHash]) -> BTreeMap<EndpointId, u32> {
        let leading =
            |held: &BTreeSet<BlockHash>| chain.iter().take_while(|hash| held.contains(hash)).count() as u32;
        self.held.iter().map(|(&id, held)| (id, leading(held))).filter(|&(_, blocks)| blocks > 0).collect()
    }
}

/// The engines' cache contents, according to their events.
#[derive(Default)]
pub(crate) struct ExactOracle {
    pub(crate) held: BTreeMap<EndpointId, BTreeMap<EngineHash, (BlockHash, Vec<Tier>)>>,
}

impl ExactOracle {
    pub(crate) fn apply(&mut self, endpoint: EndpointId, event: &KvEvent) -> Applied {
        let held = self.held.entry(endpoint).or_default();
        let mut applied = Applied::default();
        match event {
            KvEvent::Stored { blocks, tier, .. } => {
                for &StoredBlock { name, hash } in blocks {
                    held.entry(name).or_insert((hash, Vec::new())).1.push(*tier);
                    applied.stored += 1;
                }
            }
            KvEvent::Copied { blocks, tier } => {
                for name in blocks {
                    match held.get_mut(name) {
                        Some((_, copies)) => {
                            copies.push(*tier);
                            applied.stored += 1;
                        }
                        None => applied.unknown += 1,
                    }
                }
            }
            KvEvent::Removed { blocks, tier } => {
                for name in blocks {
                    let copies = held.get_mut(name).map(|(_, copies)| copies);
                    let copy = copies.as_ref().and_then(|copies| copies.iter().position(|copy| copy == tier));
                    match (copies, copy) {
                        (Some(copies), Some(copy)) => {
                            copies.swap_remove(copy);
                            if copies.is_empty() {
                                held.remove(name);
                            }
                            applied.removed += 1;
                        }
                        _ => applied.unknown += 1,
                    }
                }
            }
            KvEvent::Cleared => held.clear(),
        }
        applied
    }

    /// Leading blocks in any tier, and how many of them only below the GPU.
    pub(crate) fn lookup(&self, chain: &[BlockHash]) -> BTreeMap<EndpointId, (u32, u32)> {
        let leading = |held: &BTreeMap<EngineHash, (BlockHash, Vec<Tier>)>| {
            let hashes: BTreeSet<BlockHash> = held.values().map(|(hash, _)| *hash).collect();
            let on_gpu = held.values().filter(|(_, copies)| copies.contains(&Tier::Gpu));
            let on_gpu: BTreeSet<BlockHash> = on_gpu.map(|(hash, _)| *hash).collect();
            let found = || chain.iter().take_while(|hash| hashes.contains(hash));
            (found().count() as u32, found().filter(|hash| !on_gpu.contains(hash)).count() as u32)
        };
        let held = self.held.iter().map(|(&id, held)| (id, leading(held)));
        held.filter(|&(_, (blocks, _))| blocks > 0).collect()
    }
}
