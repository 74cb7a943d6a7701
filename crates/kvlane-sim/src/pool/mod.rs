//! The KV cache as blocks: held by sequences or free; many free blocks still cache a prefix.
//!
//! As in vLLM (`vllm/v1/core/block_pool.py`) a block that no sequence holds keeps its content and its hash until it
//! is reused. The [`Eviction`] policy selects the block to reuse: the least recently used one by default. A sequence
//! frees its blocks from the tail, so the end of a conversation is evicted before its beginning. Two sequences that
//! compute the same block at the same time both hold a copy; only the first can be found.
//!
//! Evicted content may move to a lower tier, see [`crate::tier`].
//!
//! A block takes 16 bytes, and 32 to 64 in the hash table. Every operation probes that table once for each block.

mod log;
mod order;
mod table;

use foldhash::fast::FixedState;
use hashbrown::{HashMap, HashSet};
use kvlane_core::block::BlockHash;
use kvlane_core::event::{KvEvent, Tier};

use self::log::Log;
pub use self::order::Eviction;
use self::order::Order;
use self::table::Table;
use crate::tier::HostTier;

/// A hash map whose order is the same in every run.
pub type Map<K, V> = HashMap<K, V, FixedState>;

/// The index of a block in its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockId(u32);

/// No block: the end of a list, or content found without a block.
const NONE: u32 = u32::MAX;

/// Maximum blocks of a pool.
const BLOCKS_MAX: u32 = 1 << 29;

/// Instead of a link: the block is held.
const HELD: u32 = u32::MAX - 1;

/// Instead of a hash: the block has none. One hash in 2^64 is never found.
const UNNAMED: u64 = u64::MAX;

#[derive(Clone, Copy, Debug)]
struct Block {
    hash: u64,
    /// Number of holders, or its older neighbour in the free list.
    holders_or_older: u32,
    /// [`HELD`], or its newer neighbour in the free list.
    newer: u32,
}

/// Result of a lookup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// Blocks of the prompt's longest cached prefix.
    pub blocks: u32,
    /// Those that are held; to hold each of the others takes a free block.
    pub held: u32,
    /// Blocks after the cached prefix that are in host memory.
    pub host: u32,
}

/// A fixed number of blocks.
#[derive(Clone, Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    /// Blocks with a hash.
    named: Table,
    /// Free blocks, in the order of reuse.
    order: Order,
    free: u32,
    /// Evicted content that can still be found, with infinite eviction.
    ghosts: Option<HashSet<u64, FixedState>>,
    host: Option<HostTier>,
    log: Option<Log>,
}

// === impl BlockPool ===

impl BlockPool {
    /// A pool of `blocks` empty blocks with LRU eviction.
    pub fn new(blocks: u32) -> Self {
        Self::with_eviction(blocks, Eviction::Lru)
    }

    /// A pool of `blocks` empty blocks, 2^29 at most.
    pub fn with_eviction(blocks: u32, eviction: Eviction) -> Self {
        let blocks = blocks.min(BLOCKS_MAX);
        let empty = Block { hash: UNNAMED, holders_or_older: NONE, newer: NONE };
        let mut pool = Self {
            blocks: vec![empty; blocks as usize],
            named: Table::new(blocks),
            order: Order::new(eviction, blocks),
            free: 0,
            ghosts: (eviction == Eviction::Infinite).then(HashSet::default),
            host: None,
            log: None,
        };
        (0..blocks).for_each(|block| pool.put_newest(block));
        pool
    }

    /// Adds a lower tier that receives evicted content.
    pub fn set_host(&mut self, host: HostTier) {
        self.host = Some(host);
    }

    /// Starts to log changes of findable blocks, here as in `tier`, and in the lower tier.
    pub fn set_log(&mut self, tier: Tier) {
        self.log = Some(Log::new(tier));
    }

    /// Returns the changes since the last call, in order.
    pub fn drain_log(&mut self, each: impl FnMut(KvEvent)) {
        if let Some(log) = &mut self.log {
            log.drain(each);
        }
    }

    /// All blocks.
    pub fn capacity(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Blocks that are not held, including cached ones.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Blocks that are held.
    pub fn used(&self) -> u32 {
        self.capacity() - self.free
    }

    /// Blocks that can be found by their hash.
    pub fn cached(&self) -> u32 {
        self.named.len()
    }

    /// Cached prefix of `prompt`. A prompt's hashes are chained, so none occurs twice.
    pub fn lookup(&self, prompt: impl IntoIterator<Item = BlockHash>) -> Run {
        self.walk(prompt, |_| ())
    }

    /// As [`BlockPool::lookup`], and appends the blocks to `found`, for [`BlockPool::hold`].
    pub fn find(&self, prompt: impl IntoIterator<Item = BlockHash>, found: &mut Vec<BlockId>) -> Run {
        self.walk(prompt, |block| found.push(block))
    }

    fn walk(&self, prompt: impl IntoIterator<Item = BlockHash>, mut each: impl FnMut(BlockId)) -> Run {
        let mut run = Run::default();
        for BlockHash(hash) in prompt {
            if run.host == 0 {
                if let Some(block) = self.named.get(&self.blocks, hash) {
                    run.blocks += 1;
                    run.held += u32::from(self.blocks[block as usize].newer == HELD);
                    each(BlockId(block));
                    continue;
                }
                if self.ghosts.as_ref().is_some_and(|ghosts| ghosts.contains(&hash)) {
                    run.blocks += 1;
                    each(BlockId(NONE));
                    continue;
                }
            }
            match &self.host {
                Some(host) if host.holds(BlockHash(hash)) => run.host += 1,
                _ => break,
            }
        }
        run
    }

    /// Holds the result of the last [`BlockPool::find`], and appends it to `held`. `hash` returns those blocks'
    /// hashes by index. There must be a free block for each one that is not held.
    pub fn hold(&mut self, found: &[BlockId], hash: impl Fn(u32) -> BlockHash, held: &mut Vec<BlockId>) {
        let from = held.len();
        for &BlockId(block) in found {
            if block != NONE {
                if self.blocks[block as usize].newer == HELD {
                    self.blocks[block as usize].holders_or_older += 1;
                } else {
                    self.unlink(block);
                    self.blocks[block as usize].holders_or_older = 1;
                }
                self.order.hit(block);
            }
            held.push(BlockId(block));
        }
        if self.ghosts.is_none() {
            return;
        }
        // Only when all others are held, none of them can be taken for the content that is loaded.
        for (index, block) in (0..).zip(&mut held[from..]).filter(|(_, block)| block.0 == NONE) {
            let mut fresh = Vec::with_capacity(1);
            if self.take_free(1, &mut fresh) {
                *block = fresh[0];
                self.publish(*block, hash(index), || index.checked_sub(1).map(&hash));
                self.order.hit(block.0);
            }
        }
    }

    /// Marks blocks of host memory as used.
    pub fn touch_host(&mut self, hashes: impl IntoIterator<Item = BlockHash>) {
        hashes.into_iter().for_each(|hash| self.store_in_host(hash));
    }

    /// Holds `count` blocks, in eviction order, and appends them to `held`. Their cached content is lost. False, and
    /// without effect, if there are not enough.
    #[must_use]
    pub fn take_free(&mut self, count: u32, held: &mut Vec<BlockId>) -> bool {
        if count > self.free {
            return false;
        }
        for _ in 0..count {
            let block = self.order.first();
            self.unlink(block);
            let entry = &mut self.blocks[block as usize];
            entry.holders_or_older = 1;
            let hash = std::mem::replace(&mut entry.hash, UNNAMED);
            self.order.forget(block);
            if hash != UNNAMED {
                self.lose(block, hash);
            }
            held.push(BlockId(block));
        }
        true
    }

    /// The content that the next [`BlockPool::take_free`] evicts first, if the block has any.
    pub(crate) fn next_lost(&self) -> Option<BlockHash> {
        let block = (self.free > 0).then(|| self.order.first())?;
        let hash = self.blocks[block as usize].hash;
        (hash != UNNAMED).then_some(BlockHash(hash))
    }

    fn lose(&mut self, block: u32, hash: u64) {
        self.named.remove(hash, block);
        if let Some(ghosts) = &mut self.ghosts {
            ghosts.insert(hash);
            return;
        }
        // First the new location, then the removal: a listener never sees the content as lost.
        self.store_in_host(BlockHash(hash));
        if let Some(log) = &mut self.log {
            log.removed(BlockHash(hash), log.tier());
        }
    }

    fn store_in_host(&mut self, hash: BlockHash) {
        let Some(stored) = self.host.as_mut().map(|host| host.store(hash)) else { return };
        if let Some(log) = &mut self.log {
            if let Some(lost) = stored.lost {
                log.removed(lost, Tier::Cpu);
            }
            if stored.new {
                log.copied(hash, Tier::Cpu);
            }
        }
    }

    /// Makes a held block findable: it is full and contains the tokens of `hash`. Without effect if another block
    /// already does. `before` is called for its predecessor in its prompt, if changes are logged.
    pub fn publish(
        &mut self,
        block: BlockId,
        BlockHash(hash): BlockHash,
        before: impl FnOnce() -> Option<BlockHash>,
    ) {
        let BlockId(block) = block;
        debug_assert_eq!(self.blocks[block as usize].newer, HELD, "only a held block has content to publish");
        if self.blocks[block as usize].hash != UNNAMED || hash == UNNAMED {
            return;
        }
        if !self.named.insert(&self.blocks, hash, block) {
            return;
        }
        self.blocks[block as usize].hash = hash;
        let known = self.ghosts.as_ref().is_some_and(|ghosts| ghosts.contains(&hash));
        if let Some(log) = self.log.as_mut().filter(|_| !known) {
            log.stored(BlockHash(hash), before());
        }
    }

    /// Frees a sequence's blocks, in the order of the sequence.
    pub fn release(&mut self, held: &[BlockId]) {
        for &BlockId(block) in held.iter().rev() {
            let entry = &mut self.blocks[block as usize];
            debug_assert!(
                entry.newer == HELD && entry.holders_or_older > 0,
                "a block is released once for each time it is taken"
            );
            entry.holders_or_older -= 1;
            if entry.holders_or_older == 0 {
                self.put_newest(block);
            }
        }
    }

    /// Drops all content. Held blocks stay held and are never found again.
    pub fn forget(&mut self) {
        self.named.clear();
        self.blocks.iter_mut().for_each(|block| block.hash = UNNAMED);
        let mut free = Vec::new();
        let everything = self.take_free(self.free, &mut free);
        debug_assert!(everything, "as many as are free");
        (0..self.capacity()).for_each(|block| self.order.forget(block));
        free.reverse();
        self.release(&free);
        self.ghosts.iter_mut().for_each(HashSet::clear);
        self.log.iter_mut().for_each(Log::clear);
        self.host.iter_mut().for_each(HostTier::forget);
    }

    fn put_newest(&mut self, block: u32) {
        self.order.push(&mut self.blocks, block);
        self.free += 1;
    }

    fn unlink(&mut self, block: u32) {
        self.order.remove(&mut self.blocks, block);
        self.blocks[block as usize].newer = HELD;
        self.free -= 1;
    }
}

#[cfg(test)]
impl BlockPool {
    /// All hashes that can be found, in this tier and in the lower one.
    pub(crate) fn findable(&self) -> [std::collections::BTreeSet<BlockHash>; 2] {
        let hash = |block: u32| BlockHash(self.blocks[block as usize].hash);
        let ghosts = self.ghosts.iter().flatten().copied().map(BlockHash);
        let host = self.host.as_ref().map(|host| host.findable()).unwrap_or_default();
        [self.named.iter().map(hash).chain(ghosts).collect(), host]
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use kvlane_core::event::{EngineHash, StoredBlock};

    use super::*;

    fn hashes(ids: &[u64]) -> Vec<BlockHash> {
        ids.iter().copied().map(BlockHash).collect()
    }

    /// A sequence that uses cached blocks, computes the rest and publishes it.
    fn sequence(pool: &mut BlockPool, prompt: &[u64]) -> Vec<BlockId> {
        let prompt = hashes(prompt);
        let mut held = Vec::new();
        let mut hits = Vec::new();
        pool.find(prompt.iter().copied(), &mut hits);
        pool.hold(&hits, |index| prompt[index as usize], &mut held);
        let found = held.len();
        assert!(pool.take_free((prompt.len() - found) as u32, &mut held));
        for (at, block) in held.iter().enumerate().skip(found) {
            pool.publish(*block, prompt[at], || at.checked_sub(1).map(|before| prompt[before]));
        }
        held
    }

    fn found(pool: &BlockPool, prompt: &[u64]) -> u32 {
        pool.lookup(hashes(prompt)).blocks
    }

    #[test]
    fn a_released_sequence_is_found_until_its_blocks_are_needed() {
        let mut pool = BlockPool::new(4);
        let held = sequence(&mut pool, &[1, 2, 3]);
        assert_eq!((pool.used(), pool.cached()), (3, 3));
        assert_eq!(pool.lookup(hashes(&[1, 2, 9])), Run { blocks: 2, held: 2, host: 0 });
        pool.release(&held);
        assert_eq!((pool.used(), pool.cached()), (0, 3));
        assert_eq!(pool.lookup(hashes(&[1, 2, 9])), Run { blocks: 2, held: 0, host: 0 });
        sequence(&mut pool, &[7, 8, 9]);
        assert_eq!(found(&pool, &[1, 2, 3]), 1, "the tail went first");
    }

    #[test]
    fn the_longest_unused_sequence_goes_first() {
        let mut pool = BlockPool::new(4);
        let (a, b) = (sequence(&mut pool, &[1, 2]), sequence(&mut pool, &[3, 4]));
        pool.release(&a);
        pool.release(&b);
        let again = sequence(&mut pool, &[1, 2]);
        pool.release(&again);
        sequence(&mut pool, &[5, 6]);
        assert_eq!((found(&pool, &[1, 2]), found(&pool, &[3, 4])), (2, 0));
    }

    #[test]
    fn a_shared_block_is_free_when_its_last_holder_lets_go() {
        let mut pool = BlockPool::new(3);
        let (a, b) = (sequence(&mut pool, &[1, 2]), sequence(&mut pool, &[1, 3]));
        assert_eq!(pool.used(), 3);
        pool.release(&a);
        assert_eq!(pool.used(), 2);
        pool.release(&b);
        assert_eq!(pool.used(), 0);
    }

    #[test]
    fn a_hit_ends_at_the_first_missing_block() {
        let mut pool = BlockPool::new(8);
        sequence(&mut pool, &[1, 2, 3]);
        assert_eq!(found(&pool, &[2, 3]), 2, "hashes are chained by the caller, not here");
        assert_eq!(found(&pool, &[9, 1, 2, 3]), 0);
    }

    #[test]
    fn of_two_copies_only_the_first_is_found() {
        let mut pool = BlockPool::new(3);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        assert!(pool.take_free(1, &mut a) && pool.take_free(1, &mut b));
        pool.publish(a[0], BlockHash(1), || None);
        pool.publish(b[0], BlockHash(1), || None);
        assert_eq!(pool.cached(), 1);
        pool.release(&b);
        let mut rest = Vec::new();
        assert!(pool.take_free(2, &mut rest), "the copy is free");
        assert_eq!(found(&pool, &[1]), 1);
    }

    #[test]
    fn taking_more_than_is_free_takes_nothing() {
        let mut pool = BlockPool::new(2);
        let mut held = Vec::new();
        assert!(!pool.take_free(3, &mut held));
        assert_eq!((pool.free(), held.len()), (2, 0));
        assert!(!BlockPool::new(0).take_free(1, &mut held));
    }

    #[test]
    fn forgetting_leaves_holders_their_blocks() {
        let mut pool = BlockPool::new(3);
        let held = sequence(&mut pool, &[1, 2]);
        pool.forget();
        assert_eq!((found(&pool, &[1]), pool.used()), (0, 2));
        pool.release(&held);
        assert_eq!((pool.used(), pool.cached()), (0, 0));
    }

    /// Three one-block sequences come and go, some of them found again; then one block is needed.
    fn loser(eviction: Eviction, found_again: &[u64]) -> u64 {
        let mut pool = BlockPool::with_eviction(3, eviction);
        for prompt in [1, 2, 3].iter().chain(found_again) {
            let held = sequence(&mut pool, &[*prompt]);
            pool.release(&held);
        }
        sequence(&mut pool, &[9]);
        let lost: Vec<u64> = [1, 2, 3].into_iter().filter(|prompt| found(&pool, &[*prompt]) == 0).collect();
        lost.first().copied().unwrap_or(0)
    }

    #[test]
    fn each_policy_loses_what_it_says() {
        assert_eq!(loser(Eviction::Lru, &[1, 1, 1, 2, 3]), 1, "the longest unused");
        assert_eq!(loser(Eviction::Lfu, &[1, 1, 1, 2, 3]), 2, "the longest unused of those found once");
        assert_eq!(loser(Eviction::SessionLru, &[1]), 2, "the longest unused of those never found");
        assert_eq!(loser(Eviction::SessionLru, &[1, 1, 1, 2, 3]), 1, "the longest unused, if all were found");
        assert_eq!(loser(Eviction::Infinite, &[]), 0, "nothing");
    }

    #[test]
    fn a_count_of_uses_ends_with_the_content() {
        let mut pool = BlockPool::with_eviction(2, Eviction::Lfu);
        for prompt in [1, 1, 1, 2] {
            let held = sequence(&mut pool, &[prompt]);
            pool.release(&held);
        }
        pool.forget();
        for prompt in [3, 4, 4] {
            let held = sequence(&mut pool, &[prompt]);
            pool.release(&held);
        }
        sequence(&mut pool, &[5]);
        assert_eq!((found(&pool, &[3]), found(&pool, &[4])), (0, 1));
    }

    #[test]
    fn what_an_infinite_cache_finds_takes_blocks_all_the_same() {
        let mut pool = BlockPool::with_eviction(3, Eviction::Infinite);
        let held = sequence(&mut pool, &[1, 2, 3]);
        pool.release(&held);
        let other = sequence(&mut pool, &[4, 5]);
        assert_eq!(pool.lookup(hashes(&[1, 2, 3])), Run { blocks: 3, held: 0, host: 0 });
        pool.release(&other);
        let held = sequence(&mut pool, &[1, 2, 3]);
        assert_eq!((pool.used(), held.len()), (3, 3));
        assert_eq!(found(&pool, &[4, 5]), 2);
        pool.forget();
        assert_eq!(found(&pool, &[4, 5]), 0);
    }

    #[test]
    fn what_the_pool_loses_is_in_the_host() {
        let mut pool = BlockPool::new(2);
        pool.set_host(HostTier::new(2));
        for prompt in [[1, 2], [3, 4]] {
            let held = sequence(&mut pool, &prompt);
            pool.release(&held);
        }
        assert_eq!(pool.lookup(hashes(&[1, 2, 3])), Run { blocks: 0, held: 0, host: 2 });
        sequence(&mut pool, &[5]);
        assert_eq!(pool.lookup(hashes(&[3, 4])), Run { blocks: 1, held: 0, host: 1 }, "tail first");
        assert_eq!(pool.lookup(hashes(&[1, 2])).host, 1, "its tail came first and left first");
    }

    #[derive(Clone, Debug)]
    enum Op {
        Start(Vec<u64>),
        End(usize),
        Forget,
    }

    /// As in real chains, a block's hash identifies all blocks before it, and none occurs twice.
    fn chain(ids: Vec<u64>) -> Op {
        Op::Start(
            ids.into_iter()
                .scan(0, |parent, id| {
                    *parent = *parent * 4 + id + 1;
                    Some(*parent)
                })
                .collect(),
        )
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            6 => prop::collection::vec(0u64..3, 0..6).prop_map(chain),
            4 => (0usize..8).prop_map(Op::End),
            1 => Just(Op::Forget),
        ]
    }

    fn eviction() -> impl Strategy<Value = Eviction> {
        prop_oneof![
            Just(Eviction::Lru),
            Just(Eviction::Lfu),
            Just(Eviction::SessionLru),
            Just(Eviction::Infinite),
        ]
    }

    /// The state of a listener that received all events.
    fn replay(events: &[KvEvent]) -> [BTreeSet<BlockHash>; 2] {
        let mut known = <[BTreeSet<BlockHash>; 2]>::default();
        for event in events {
            match event {
                KvEvent::Stored { parent, blocks, tier } => {
                    let mut before = parent.map_or(0, |EngineHash(name)| name);
                    for StoredBlock { hash, .. } in blocks {
                        assert!(known[*tier as usize].insert(*hash), "{hash:?} is stored once");
                        assert_eq!((hash.0 - 1) / 4, before, "each follows the one before it");
                        before = hash.0;
                    }
                }
                KvEvent::Copied { blocks, tier } => {
                    for name in blocks {
                        assert!(known[0].contains(&BlockHash(name.0)), "{name:?} has been told of");
                        assert!(known[*tier as usize].insert(BlockHash(name.0)), "{name:?} is copied once");
                    }
                }
                KvEvent::Removed { blocks, tier } => {
                    for name in blocks {
                        assert!(known[*tier as usize].remove(&BlockHash(name.0)), "{name:?} was there");
                    }
                }
                KvEvent::Cleared => known = Default::default(),
            }
        }
        known
    }

    proptest! {
        /// Invariant: Simulated KV events describe exactly what can be found in the cache.
        ///
        /// Also held by `events_of_the_cache_are_in_order_and_tell_exactly_what_it_holds`.
        #[test]
        fn events_tell_exactly_what_can_be_found(
            blocks in 0u32..20,
            host in prop::option::of(0u32..10),
            eviction in eviction(),
            ops in prop::collection::vec(op(), 0..60),
        ) {
            let mut pool = BlockPool::with_eviction(blocks, eviction);
            if let Some(host) = host {
                pool.set_host(HostTier::new(host));
            }
            pool.set_log(Tier::Gpu);
            let (mut sequences, mut events) = (Vec::<Vec<BlockId>>::new(), Vec::new());
            for op in ops {
                match op {
                    Op::Start(prompt) => {
                        if prompt.len() as u32 - pool.lookup(hashes(&prompt)).held <= pool.free() {
                            sequences.push(sequence(&mut pool, &prompt));
                        }
                    }
                    Op::End(at) if at < sequences.len() => pool.release(&sequences.swap_remove(at)),
                    Op::End(_) => {}
                    Op::Forget => {
                        pool.forget();
                        events.push(KvEvent::Cleared);
                    }
                }
                pool.drain_log(|event| events.push(event));
                prop_assert_eq!(replay(&events), pool.findable());
            }
        }

        #[test]
        fn blocks_are_conserved_and_used_ones_are_exactly_the_held_ones(
            blocks in 0u32..20,
            eviction in eviction(),
            ops in prop::collection::vec(op(), 0..60),
        ) {
            let mut pool = BlockPool::with_eviction(blocks, eviction);
            let mut sequences: Vec<Vec<BlockId>> = Vec::new();
            for op in ops {
                match op {
                    Op::Start(prompt) => {
                        let run = pool.lookup(hashes(&prompt));
                        if prompt.len() as u32 - run.held <= pool.free() {
                            sequences.push(sequence(&mut pool, &prompt));
                        }
                    }
                    Op::End(at) if at < sequences.len() => pool.release(&sequences.swap_remove(at)),
                    Op::End(_) => {}
                    Op::Forget => pool.forget(),
                }
                let mut held: Vec<BlockId> = sequences.iter().flatten().copied().collect();
                held.sort_unstable();
                held.dedup();
                prop_assert_eq!(pool.used(), held.len() as u32);
                prop_assert_eq!(pool.used() + pool.free(), blocks);
                prop_assert!(pool.cached() <= blocks);
            }
            sequences.iter().for_each(|held| pool.release(held));
            let mut all = Vec::new();
            prop_assert!(pool.take_free(blocks, &mut all), "the free list holds every block");
            all.sort_unstable();
            all.dedup();
            prop_assert_eq!(all.len() as u32, blocks);
            prop_assert_eq!(pool.cached(), 0);
        }
    }
}
