//! One decoded message, and how it becomes events under our own hashes.

use std::ops::Range;

use kvlane_core::block::{BlockHash, ChainSeed, ContentHash};
use kvlane_core::event::{EngineHash, KvEvent, StoredBlock, Tier};

/// What one message says, in flat memory that the next message uses again.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// When the engine made it: Unix time in seconds, by its own clock.
    pub ts: f64,
    /// The data-parallel rank it is of, where told.
    pub rank: Option<u32>,
    /// What has changed, in order.
    pub events: Vec<Event>,
    /// Blocks that the events speak of: the engine's name, and the hash of what the block holds.
    pub blocks: Vec<(EngineHash, ContentHash)>,
    /// Names of blocks that the events speak of without saying what they hold.
    pub names: Vec<EngineHash>,
    /// What was passed over.
    pub ignored: Ignored,
    /// Names of blocks that were read, those that were passed over among them.
    pub(super) named: usize,
    /// Groups of layers that this message shows not to be full attention, one bit each.
    pub(super) groups_aside: u64,
    /// Names of adapters and salts, one after another.
    pub(super) text: String,
    /// Memory for the tokens of one block.
    pub(super) tokens: Vec<u8>,
}

/// A change that one message tells of. Ranges are of [`Batch::blocks`] or [`Batch::names`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Blocks can be found from now on.
    Stored(Stored),
    /// Blocks that are known already are in another tier as well: a store without tokens.
    Copied {
        /// Which of [`Batch::names`].
        names: Range<u32>,
        /// Where to.
        tier: Tier,
    },
    /// One copy of each block is gone.
    Removed {
        /// Which of [`Batch::names`].
        names: Range<u32>,
        /// Where it was.
        tier: Tier,
        /// The group of layers whose copy it was, where told.
        group: Option<u32>,
    },
    /// Nothing can be found any more.
    Cleared,
}

/// Blocks stored, each following the one before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// The block before the first of them, if any.
    pub parent: Option<EngineHash>,
    /// Which of [`Batch::blocks`].
    pub blocks: Range<u32>,
    /// Tokens of each.
    pub block_tokens: u32,
    /// Where.
    pub tier: Tier,
    pub(super) lora: Option<Range<u32>>,
    pub(super) salt: Option<Range<u32>>,
}

/// Events that say nothing about the reuse of prefixes, or that cannot be understood, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ignored {
    /// Events of a kind not known here.
    pub unknown_events: u32,
    /// Stores of groups of layers that are not full attention: sliding windows, states of Mamba layers.
    pub other_groups: u32,
    /// Stores whose hash covers tokens after the block as well (vLLM 0.33 with a drafter): its own tokens do not
    /// determine such a block.
    pub lookahead: u32,
    /// Stores whose tokens are not plain ids, such as the pairs of SGLang with a drafter.
    pub not_ids: u32,
}

/// What became of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Linked {
    /// Events handed over.
    pub events: u32,
    /// Blocks stored among them.
    pub blocks: u32,
    /// Stores whose parent is not known; their blocks were skipped.
    pub unknown_parents: u32,
    /// Blocks skipped with them.
    pub unknown_parent_blocks: u32,
    /// Removals of groups that are not full attention.
    pub other_groups: u32,
    /// The block size of stores that were skipped because it is not the one asked for.
    pub other_block_size: Option<u32>,
    /// Blocks skipped for their size.
    pub other_size_blocks: u32,
}

/// Turns the batches of one feed into events. It knows which groups of layers count, as removals do not say it.
#[derive(Clone, Debug, Default)]
pub struct Linker {
    groups_aside: u64,
    /// Memory of the events handed over.
    stored: Vec<StoredBlock>,
    names: Vec<EngineHash>,
}

// === impl Batch ===

impl Batch {
    /// Forgets everything but its memory, and of that what few messages need.
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

    /// What it takes to apply it, about: its events, and the names of blocks in them.
    pub fn work(&self) -> usize {
        self.named.saturating_add(self.events.len())
    }

    /// The adapter whose blocks these are. Versions that tell only its number yield a name that no adapter has.
    pub fn lora(&self, stored: &Stored) -> Option<&str> {
        stored.lora.clone().and_then(|range| self.text.get(indices(range)))
    }

    /// The `cache_salt` of the chain that these blocks begin.
    pub fn salt(&self, stored: &Stored) -> Option<&str> {
        stored.salt.clone().and_then(|range| self.text.get(indices(range)))
    }

    /// The block size of its first store, in tokens: how a pool learns it.
    pub fn block_tokens(&self) -> Option<u32> {
        self.events.iter().find_map(|event| match event {
            Event::Stored(stored) => Some(stored.block_tokens),
            _ => None,
        })
    }
}

// === impl Linker ===

impl Linker {
    /// Hands over `batch` as events under our own hashes, in order.
    ///
    /// `block_tokens` is the pool's block size, `seed` the start of a chain of an adapter and a salt, `hash_of` our hash
    /// of a block that this engine holds, as of the events handed over before.
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
                    KvEvent::Removed { blocks: self.names_of(batch, names), tier: *tier }
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

/// Lists that are longer give their memory back: a step of an engine changes some thousand blocks at most.
const KEPT: usize = 1 << 14;

/// Gives back what an empty list keeps beyond [`KEPT`].
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

    /// A batch of one removal of so many blocks, each named in one byte.
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
        // Two events of which each alone would do.
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
