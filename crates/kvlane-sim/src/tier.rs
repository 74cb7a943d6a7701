//! The host's memory as a second tier of the cache: blocks that the accelerator evicts go there and come back over the
//! bus when a prompt wants them.
//!
//! It holds a fixed number of blocks and loses the longest unused. A block that comes back stays, and counts as used.
//! Writing to it costs nothing: engines copy evicted blocks beside the computation, and the bus has two directions.
//! Loads of one engine follow each other over one bus.

use kvlane_core::block::BlockHash;
use serde::{Deserialize, Serialize};

use crate::pool::BlockPool;

/// Size and speed of the host's memory.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CpuTier {
    /// Blocks it holds.
    pub blocks: u32,
    /// Bytes per second from the host to the engine's GPUs together. 20 GB/s is what BLIS assumes for host DRAM
    /// (inference-sim, device table).
    #[serde(default = "bytes_per_s")]
    pub bytes_per_s: f64,
    /// Seconds that a load takes beside its bytes.
    #[serde(default)]
    pub latency_s: f64,
    /// Whether others compute while a request's blocks come. If not, the step that admits it waits for them.
    #[serde(default = "overlap")]
    pub overlap: bool,
}

/// The blocks in the host's memory.
#[derive(Clone, Debug)]
pub struct HostTier {
    /// Nobody holds any of them.
    pool: Box<BlockPool>,
}

/// What has changed in the host's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredInHost {
    /// The block was not there before, and is there.
    pub new: bool,
    /// The block whose place it took.
    pub lost: Option<BlockHash>,
}

// === impl CpuTier ===

impl CpuTier {
    /// A tier of `blocks` blocks with the usual speed, loading while others compute.
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

    /// Whether it has a block.
    pub fn holds(&self, hash: BlockHash) -> bool {
        self.pool.lookup([hash]).blocks == 1
    }

    /// Blocks it has.
    pub fn blocks(&self) -> u32 {
        self.pool.cached()
    }

    /// Puts a block in, in the place of the longest unused one if it is full; one that is there counts as used.
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

    /// Empties it.
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
