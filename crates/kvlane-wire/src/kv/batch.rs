//! A decoded batch of KV events, and its conversion to events under our own hashes.

use std::ops::Range;

use kvlane_core::block::{BlockHash, ChainSeed, ContentHash};
use kvlane_core::event::{EngineHash, KvEvent, StoredBlock, Tier};

/// One decoded message, in flat memory that is reused for the next message.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// The engine's timestamp: Unix time in seconds.
    pub ts: f64,
    /// Its data-parallel rank, if given.
    pub rank: Option<u32>,
    /// The changes, in order.
    pub events: Vec<Event>,
    /// Blocks stored by the events: the engine's name, and the hash of the block's contents.
    pub blocks: Vec<(EngineHash, ContentHash)>,
    /// Names of blocks without contents in the events.
    pub names: Vec<EngineHash>,
    /// Number of ignored events.
    pub ignored: Ignored,
    /// Number of block names read, ignored ones included.
    pub(super) named: usize,
    /// Layer groups that this message shows not to be full attention, one bit each.
    pub(super) groups_aside: u64,
    /// Names of adapters and salts, concatenated.
    pub(super) text: String,
    /// Scratch memory for the tokens of one block.
    pub(super) tokens: Vec<u8>,
}

/// One change. Ranges refer to [`Batch::blocks`] or [`Batch::names`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Blocks were stored.
    Stored(Stored),
    /// Known blocks were copied to another tier: a store without tokens.
    Copied {
        /// Range of [`Batch::names`].
        names: Range<u32>,
        /// The new tier.
        tier: Tier,
    },
    /// One copy of each block was removed.
    Removed {
        /// Range of [`Batch::names`].
        names: Range<u32>,
        /// The tier of the removed copy.
        tier: Tier,
        /// The layer group of the removed copy, if given.
        group: Option<u32>,
    },
    /// All blocks were removed.
    Cleared,
}

/// Consecutive stored blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The block before the first one, if any.
    pub parent: Option<EngineHash>,
    /// Range of [`Batch::blocks`].
    pub blocks: Range<u32>,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Their tier.
    pub tier: Tier,
    pub(super) lora: Option<Range<u32>>,
    pub(super) salt: Option<Range<u32>>,
}

/// Events that do not concern prefix reuse or cannot be interpreted, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ignored {
    /// Events of an unknown kind.
    pub unknown_events: u32,
    /// Stores of layer groups without full attention: sliding windows, states of Mamba layers.
    pub other_groups: u32,
    /// Stores whose hash also covers tokens after the block (vLLM 0.33 with a drafter): a block's own tokens do not
    /// determine its hash.
    pub lookahead: u32,
    /// Stores whose tokens are not plain ids, such as SGLang's pairs with a drafter.
    pub not_ids: u32,
}

/// Result of linking a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Linked {
    /// Events passed on.
    pub events: u32,
    /// Blocks stored by them.
    pub blocks: u32,
    /// Stores with an unknown parent; their blocks were skipped.
    pub unknown_parents: u32,
    /// Blocks skipped because of that.
    pub unknown_parent_blocks: u32,
    /// Removals of layer groups without full attention.
    pub other_groups: u32,
    /// Stores below the GPU that were passed over because their block size differs from the expected one, and removals
    /// of such blocks: a store of blocks has a size of its own, as LMCache has chunks of 256 tokens by default.
    pub other_tiers: u32,
    /// The block size of stores that were skipped because it differs from the expected one.
    pub other_block_size: Option<u32>,
    /// Blocks skipped because of that.
    pub other_size_blocks: u32,
}

/// Converts the batches of one feed to events. Remembers which layer groups are relevant, as removals do not say it.
#[derive(Clone, Debug, Default)]
pub struct Linker {
    groups_aside: u64,
    /// Stores below the GPU have been passed over for their block size, and will be removed.
    tier_aside: bool,
    /// Reused memory for the events.
    stored: Vec<StoredBlock>,
    names: Vec<EngineHash>,
}

// === impl Batch ===

impl Batch {
    /// Clears the batch. Keeps its memory up to `KEPT` entries per list.
    pub fn clear(&mut self) {
        self.ts = 0.0;
        self.rank = None;
        self.named = 0;
        self.events.clear();
        self.blocks.clear();
        self.names.clear();
        self.ignored = Ignored::default();
        self.groups_aside = 0;
        self.text.clear();
        shrink(&mut self.events);
        shrink(&mut self.blocks);
        shrink(&mut self.names);
        self.text.shrink_to(KEPT);
    }

    /// Approximate cost of applying it: its events and the block names in them.
    pub fn work(&self) -> usize {
        self.named.saturating_add(self.events.len())
    }

    /// The adapter of these blocks. For versions that give only a number, a name that no adapter has.
    pub fn lora(&self, stored: &Stored) -> Option<&str> {
        stored.lora.clone().and_then(|range| self.text.get(indices(range)))
    }

    /// The `cache_salt` of the chain that these blocks begin.
    pub fn salt(&self, stored: &Stored) -> Option<&str> {
        stored.salt.clone().and_then(|range| self.text.get(indices(range)))
    }

    /// The block size of its first store on the GPU, in tokens, from which a pool learns it.
    pub fn block_tokens(&self) -> Option<u32> {
        self.events.iter().find_map(|event| match event {
            Event::Stored(stored) if stored.tier == Tier::Gpu => Some(stored.block_tokens),
            _ => None,
        })
    }
}

// === impl Linker ===

impl Linker {
    /// Passes on `batch` as events under our own hashes, in order.
    ///
    /// `block_tokens` is the pool's block size, `seed` gives the chain seed of an adapter and a salt, and `hash_of`
    /// gives our hash of a block that this engine holds after the events passed on before.
    pub fn link(
        &mut self,
        batch: &Batch,
        block_tokens: u32,
        mut seed: impl FnMut(Option<&str>, Option<&str>) -> ChainSeed,
        mut hash_of: impl FnMut(EngineHash) -> Option<BlockHash>,
        mut each: impl FnMut(&KvEvent),
    ) -> Linked {
        self.groups_aside |= batch.groups_aside;
        let mut linked = Linked::default();
        for event in &batch.events {
            let event = match event {
                Event::Stored(stored) => {
                    let count = stored.blocks.end - stored.blocks.start;
                    if stored.block_tokens != block_tokens && stored.tier != Tier::Gpu {
                        self.tier_aside = true;
                        linked.other_tiers += 1;
                        continue;
                    }
                    if stored.block_tokens != block_tokens {
                        linked.other_block_size = Some(stored.block_tokens);
                        linked.other_size_blocks = linked.other_size_blocks.saturating_add(count);
                        continue;
                    }
                    let before = match stored.parent.map(&mut hash_of) {
                        Some(None) => {
                            linked.unknown_parents += 1;
                            linked.unknown_parent_blocks = linked.unknown_parent_blocks.saturating_add(count);
                            continue;
                        }
                        Some(Some(hash)) => Some(hash),
                        None => None,
                    };
                    let seed = seed(batch.lora(stored), batch.salt(stored));
                    let mut blocks = std::mem::take(&mut self.stored);
                    blocks.clear();
                    blocks.extend(batch.blocks[indices(stored.blocks.clone())].iter().scan(
                        before,
                        |before, &(name, content)| {
                            let hash = seed.next(*before, content);
                            *before = Some(hash);
                            Some(StoredBlock { name, hash })
                        },
                    ));
                    linked.blocks = linked.blocks.saturating_add(count);
                    KvEvent::Stored { parent: stored.parent, blocks, tier: stored.tier }
                }
                Event::Copied { names, tier } => {
                    KvEvent::Copied { blocks: self.names_of(batch, names), tier: *tier }
                }
                Event::Removed { group: Some(group), .. } if self.is_aside(*group) => {
                    linked.other_groups += 1;
                    continue;
                }
                Event::Removed { names, tier, .. } => {
                    let mut blocks = self.names_of(batch, names);
                    if self.tier_aside && *tier != Tier::Gpu {
                        blocks.retain(|&name| hash_of(name).is_some());
                        if blocks.is_empty() {
                            linked.other_tiers += 1;
                            self.names = blocks;
                            continue;
                        }
                    }
                    KvEvent::Removed { blocks, tier: *tier }
                }
                Event::Cleared => KvEvent::Cleared,
            };
            linked.events += 1;
            each(&event);
            match event {
                KvEvent::Stored { blocks, .. } => self.stored = blocks,
                KvEvent::Copied { blocks, .. } | KvEvent::Removed { blocks, .. } => self.names = blocks,
                KvEvent::Cleared => {}
            }
        }
        self.stored.clear();
        self.names.clear();
        shrink(&mut self.stored);
        shrink(&mut self.names);
        linked
    }

    fn names_of(&mut self, batch: &Batch, names: &Range<u32>) -> Vec<EngineHash> {
        let mut out = std::mem::take(&mut self.names);
        out.clear();
        out.extend_from_slice(&batch.names[indices(names.clone())]);
        out
    }

    fn is_aside(&self, group: u32) -> bool {
        group < u64::BITS && self.groups_aside >> group & 1 == 1
    }
}

/// List capacity that is kept between messages: one step of an engine changes at most a few thousand blocks.
const KEPT: usize = 1 << 14;

/// Frees the capacity of an empty list beyond [`KEPT`].
fn shrink<T>(list: &mut Vec<T>) {
    if list.capacity() > KEPT {
        list.shrink_to(KEPT);
    }
}

fn indices(range: Range<u32>) -> Range<usize> {
    range.start as usize..range.end as usize
}

#[cfg(test)]
mod tests {
    use super::super::{DecodeError, NAMES_MAX, decode};
    use super::*;

    /// A batch with one removal of `names` blocks, each named in one byte.
    fn removal(names: usize) -> Vec<u8> {
        let mut message = vec![0x92, 0x01, 0x91, 0x92, 0xAC];
        message.extend_from_slice(b"BlockRemoved");
        message.push(0xDD);
        message.extend_from_slice(&u32::try_from(names).expect("a length").to_be_bytes());
        message.resize(message.len() + names, 0x07);
        message
    }

    fn bytes(batch: &Batch, linker: &Linker) -> usize {
        8 * (batch.names.capacity() + linker.names.capacity())
            + 16 * (batch.blocks.capacity() + linker.stored.capacity())
            + size_of::<Event>() * batch.events.capacity()
            + batch.text.capacity()
    }

    #[test]
    fn a_message_with_too_many_names_is_refused_before_they_take_memory() {
        let mut batch = Batch::default();
        assert_eq!(decode(&removal(NAMES_MAX), &mut batch), Ok(()));
        assert_eq!((batch.names.len(), batch.work()), (NAMES_MAX, NAMES_MAX + 1));
        for beyond in [NAMES_MAX + 1, 15_000_000] {
            let mut batch = Batch::default();
            assert_eq!(decode(&removal(beyond), &mut batch), Err(DecodeError::TooManyNames(beyond)));
            assert!(bytes(&batch, &Linker::default()) < 1 << 20);
        }
        // Two events, each within the limit alone.
        let mut two = removal(NAMES_MAX);
        two[2] = 0x92;
        two.extend_from_slice(&removal(1)[3..]);
        assert_eq!(decode(&two, &mut batch), Err(DecodeError::TooManyNames(NAMES_MAX + 1)));
    }

    #[test]
    fn a_long_message_leaves_no_memory_behind() {
        let (mut batch, mut linker) = (Batch::default(), Linker::default());
        decode(&removal(NAMES_MAX), &mut batch).expect("a batch");
        let seed = ChainSeed::new("m", None, None);
        let mut removed = 0;
        linker.link(
            &batch,
            16,
            |_, _| seed,
            |_| None,
            |event| {
                if let KvEvent::Removed { blocks, .. } = event {
                    removed += blocks.len();
                }
            },
        );
        batch.clear();
        assert_eq!(removed, NAMES_MAX);
        assert!(bytes(&batch, &linker) < 1 << 20, "{} bytes", bytes(&batch, &linker));
    }
}
