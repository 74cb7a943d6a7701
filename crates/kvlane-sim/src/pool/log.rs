//! What a pool would tell of itself.

use kvlane_core::block::BlockHash;
use kvlane_core::event::{EngineHash, KvEvent, StoredBlock, Tier};

/// Changes since the last [`Log::drain`]. Neighbours of one kind are one event.
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

    pub(super) fn stored(&mut self, hash: BlockHash) {
        let block = StoredBlock { name: EngineHash(hash.0), hash };
        match self.events.last_mut() {
            Some(KvEvent::Stored { blocks, .. }) => blocks.push(block),
            _ => self.events.push(KvEvent::Stored { parent: None, blocks: vec![block], tier: self.tier }),
        }
    }

    pub(super) fn removed(&mut self, BlockHash(hash): BlockHash) {
        let name = EngineHash(hash);
        match self.events.last_mut() {
            Some(KvEvent::Removed { blocks, .. }) => blocks.push(name),
            _ => self.events.push(KvEvent::Removed { blocks: vec![name], tier: self.tier }),
        }
    }

    /// Drops what has not been told: who hears that all is gone needs nothing else.
    pub(super) fn clear(&mut self) {
        self.events.clear();
    }

    pub(super) fn drain(&mut self, each: impl FnMut(KvEvent)) {
        self.events.drain(..).for_each(each);
    }
}
