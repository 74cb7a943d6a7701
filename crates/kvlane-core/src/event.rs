//! What an engine says its KV cache holds.
//!
//! Engines name blocks by hashes of their own, which differ in kind and seed from engine to engine. Such a name is an
//! opaque key: it says which block a removal or a parent means, and nothing else. What a block holds is told by its
//! [`BlockHash`], computed here from the tokens that the engine reports, so it matches the blocks of prompts.

use serde::{Deserialize, Serialize};

use crate::block::BlockHash;

/// An engine's own name of a block. Only the engine that gave it knows what it means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EngineHash(pub u64);

/// Where an engine keeps a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// The memory of the accelerator.
    #[default]
    Gpu,
    /// Anything below it: the memory of its host, a disk, a store that several engines share.
    Cpu,
}

/// A block under both of its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StoredBlock {
    /// The engine's.
    pub name: EngineHash,
    /// Ours.
    pub hash: BlockHash,
}

/// A change of one endpoint's cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvEvent {
    /// Blocks can be found from now on. Engines keep several copies of a block at times, tell of each, and later remove
    /// each.
    Stored {
        /// The block before the first of them; none if they begin a prompt.
        parent: Option<EngineHash>,
        /// Which, each following the one before it.
        blocks: Vec<StoredBlock>,
        /// Where.
        tier: Tier,
    },
    /// Blocks that are known already are in another tier as well.
    Copied {
        /// Which.
        blocks: Vec<EngineHash>,
        /// Where to.
        tier: Tier,
    },
    /// One copy of each block is gone.
    Removed {
        /// Which.
        blocks: Vec<EngineHash>,
        /// Where it was.
        tier: Tier,
    },
    /// Nothing can be found any more, in any tier.
    Cleared,
}
