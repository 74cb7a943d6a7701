//! Host memory as a second tier of the cache: blocks evicted from the GPU are stored there and loaded over the bus
//! when a prompt needs them.
//!
//! It holds a fixed number of blocks and evicts the least recently used. A loaded block stays, and counts as used.
//! Writing costs nothing: engines copy evicted blocks concurrently with computation, and the bus is full duplex.
//! Loads of one engine are serialized on one bus.

use kvlane_core::block::BlockHash;
use serde::{Deserialize, Serialize};

use crate::pool::BlockPool;

/// Size and speed of host memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuTier {
    /// Blocks it holds.
    pub blocks: u32,
    /// Bytes per second from the host to the engine's GPUs together. 20 GB/s is what BLIS assumes for host DRAM
    /// (inference-sim, device table).
    #[serde(default = "bytes_per_s")]
    pub bytes_per_s: f64,
    /// Latency of a load in seconds, besides its bytes.
    #[serde(default)]
    pub latency_s: f64,
    /// Whether other sequences compute while a request's blocks load. If not, the step that admits the request waits
    /// for them.
    #[serde(default = "overlap")]
    pub overlap: bool,
}

/// The blocks in host memory.
#[derive(Clone, Debug)]
pub struct HostTier {
    /// Its blocks are never held by a sequence.
    pool: Box<BlockPool>,
}

/// Changes in host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredInHost {
    /// The block that was added.
    pub new: bool,
    /// The block that was evicted for it.
    pub lost: Option<BlockHash>,
}

// === impl CpuTier ===

impl CpuTier {
    /// A tier of `blocks` blocks with the default speed and overlapping loads.
    pub fn new(blocks: u32) -> Self {
        Self { blocks, bytes_per_s: bytes_per_s(), latency_s: 0.0, overlap: overlap() }
    }

    /// Seconds to load `bytes` bytes.
    pub fn load_secs(&self, bytes: f64) -> f64 {
        self.latency_s + bytes / self.bytes_per_s
    }
}

fn bytes_per_s() -> f64 {
    20e9
}

fn overlap() -> bool {
    true
}

// === impl HostTier ===

impl HostTier {
    /// An empty tier.
    pub fn new(blocks: u32) -> Self {
        Self { pool: Box::new(BlockPool::new(blocks)) }
    }

    /// Whether it holds a block.
    pub fn holds(&self, hash: BlockHash) -> bool {
        self.pool.lookup([hash]).blocks == 1
    }

    /// Number of blocks held.
    pub fn blocks(&self) -> u32 {
        self.pool.cached()
    }

    /// Adds a block, evicting the least recently used one if the tier is full; a block that is present counts as
    /// used.
    pub fn store(&mut self, hash: BlockHash) -> StoredInHost {
        let mut held = Vec::with_capacity(1);
        let mut stored = StoredInHost::default();
        if self.pool.find([hash], &mut held).blocks == 1 {
            let found = std::mem::take(&mut held);
            self.pool.hold(&found, |_| hash, &mut held);
        } else {
            stored.lost = self.pool.next_lost();
            if self.pool.take_free(1, &mut held) {
                self.pool.publish(held[0], hash, || None);
                stored.new = true;
            }
        }
        self.pool.release(&held);
        stored
    }

    /// Removes all blocks.
    pub fn forget(&mut self) {
        self.pool.forget();
    }
}

#[cfg(test)]
impl HostTier {
    pub(crate) fn findable(&self) -> std::collections::BTreeSet<BlockHash> {
        let [hashes, _] = self.pool.findable();
        hashes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_unused_block_leaves_first() {
        let mut tier = HostTier::new(2);
        for hash in [1, 2, 1, 3] {
            tier.store(BlockHash(hash));
        }
        let holds = [1, 2, 3].map(|hash| tier.holds(BlockHash(hash)));
        assert_eq!((holds, tier.blocks()), ([true, false, true], 2));
    }

    #[test]
    fn a_tier_without_blocks_holds_nothing() {
        let mut tier = HostTier::new(0);
        tier.store(BlockHash(1));
        assert!(!tier.holds(BlockHash(1)));
    }

    #[test]
    fn a_load_takes_its_latency_and_its_bytes() {
        let tier = CpuTier { latency_s: 0.5, ..CpuTier::new(10) };
        assert_eq!(tier.load_secs(40e9), 2.5);
    }
}
