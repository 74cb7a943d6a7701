//! Changes of a pool, for KV events.

use kvlane_core::block::BlockHash;
use kvlane_core::event::{EngineHash, KvEvent, StoredBlock, Tier};

/// Changes since the last [`Log::drain`]. Adjacent changes of one kind are one event; stored blocks only if they are
/// consecutive.
#[derive(Clone, Debug)]
pub(super) struct Log {
    tier: Tier,
    events: Vec<KvEvent>,
}

// === impl Log ===

impl Log {
    pub(super) fn new(tier: Tier) -> Self {
        Self { tier, events: Vec::new() }
    }

    pub(super) fn tier(&self) -> Tier {
        self.tier
    }

    /// Records a block and its predecessor in its prompt.
    pub(super) fn stored(&mut self, hash: BlockHash, before: Option<BlockHash>) {
        let block = StoredBlock { name: name(hash), hash };
        match self.events.last_mut() {
            Some(KvEvent::Stored { blocks, .. }) if blocks.last().map(|last| last.hash) == before => {
                blocks.push(block);
            }
            _ => {
                let parent = before.map(name);
                self.events.push(KvEvent::Stored { parent, blocks: vec![block], tier: self.tier });
            }
        }
    }

    /// A recorded block is in `to` as well.
    pub(super) fn copied(&mut self, hash: BlockHash, to: Tier) {
        match self.events.last_mut() {
            Some(KvEvent::Copied { blocks, tier }) if *tier == to => blocks.push(name(hash)),
            _ => self.events.push(KvEvent::Copied { blocks: vec![name(hash)], tier: to }),
        }
    }

    pub(super) fn removed(&mut self, hash: BlockHash, from: Tier) {
        match self.events.last_mut() {
            Some(KvEvent::Removed { blocks, tier }) if *tier == from => blocks.push(name(hash)),
            _ => self.events.push(KvEvent::Removed { blocks: vec![name(hash)], tier: from }),
        }
    }

    /// Drops unpublished changes: after a reset event nothing else is needed.
    pub(super) fn clear(&mut self) {
        self.events.clear();
    }

    pub(super) fn drain(&mut self, each: impl FnMut(KvEvent)) {
        self.events.drain(..).for_each(each);
    }
}

/// The engine's name of a block: our hash of it, since its value does not matter.
fn name(BlockHash(hash): BlockHash) -> EngineHash {
    EngineHash(hash)
}
