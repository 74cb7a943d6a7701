//! What an engine says its KV cache holds.

use serde::{Deserialize, Serialize};

use crate::block::BlockHash;

/// Where an engine keeps a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// The memory of the accelerator.
    #[default]
    Gpu,
    /// The memory of its host.
    Cpu,
}

/// A change of one endpoint's cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvEvent {
    /// Blocks can be found from now on.
    Stored {
        /// Which.
        blocks: Vec<BlockHash>,
        /// Where.
        tier: Tier,
    },
    /// Blocks cannot be found there any more.
    Removed {
        /// Which.
        blocks: Vec<BlockHash>,
        /// Where they were.
        tier: Tier,
    },
    /// Nothing can be found any more, in any tier.
    Cleared,
}
