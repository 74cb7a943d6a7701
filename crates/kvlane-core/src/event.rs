//! KV events: the changes of an engine's KV cache.
//!
//! Engines name blocks by their own hashes, which differ in kind and seed from engine to engine. Such a name is an
//! opaque key: it identifies the block that a removal or a parent refers to. A block's contents are identified by its
//! [`BlockHash`], computed here from the tokens that the engine reports, so it matches the blocks of prompts.

use serde::{Deserialize, Serialize};

use crate::block::BlockHash;

/// An engine's name of a block. Meaningful only to the engine that assigned it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EngineHash(pub u64);

/// Where an engine keeps a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// Accelerator memory.
    #[default]
    Gpu,
    /// Any tier below it: host memory, disk, or a store shared by several engines.
    Cpu,
}

/// A block with both of its names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StoredBlock {
    /// The engine's name.
    pub name: EngineHash,
    /// Our hash.
    pub hash: BlockHash,
}

/// A change of one endpoint's cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvEvent {
    /// Blocks were stored. An engine may keep several copies of a block, report each of them, and later remove each.
    Stored {
        /// The block before the first one; `None` if they begin a prompt.
        parent: Option<EngineHash>,
        /// The blocks, each following the one before it.
        blocks: Vec<StoredBlock>,
        /// Their tier.
        tier: Tier,
    },
    /// Blocks already known were copied to another tier.
    Copied {
        /// The blocks.
        blocks: Vec<EngineHash>,
        /// The new tier.
        tier: Tier,
    },
    /// One copy of each block was removed.
    Removed {
        /// The blocks.
        blocks: Vec<EngineHash>,
        /// The tier of the removed copy.
        tier: Tier,
    },
    /// All blocks in all tiers were removed.
    Cleared,
}
