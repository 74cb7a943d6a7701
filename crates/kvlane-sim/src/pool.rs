//! The KV cache as blocks: some held by sequences, the others free, in order of their last use, many of them still
//! holding a prefix worth finding.
//!
//! As in vLLM (`vllm/v1/core/block_pool.py`) a block that nobody holds keeps its content and its hash until it is
//! taken for something else, oldest first. A sequence gives its blocks back tail first, so the end of a conversation is
//! lost before its beginning. Two sequences that compute the same block at the same time both hold a copy; only the
//! first can be found.

use foldhash::fast::FixedState;
use hashbrown::HashMap;
use kvlane_core::block::BlockHash;

/// A hash map whose order is the same in every run.
pub type Map<K, V> = HashMap<K, V, FixedState>;

/// The index of a block in its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockId(u32);

/// No block: the end of the free list.
const NONE: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct Block {
    hash: Option<BlockHash>,
    holders: u32,
    /// Neighbours in the free list, while nobody holds it.
    older: u32,
    newer: u32,
}

/// What a lookup found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Run {
    /// Blocks of the prompt's longest cached beginning.
    pub blocks: u32,
    /// Those that nobody holds; taking the run makes that many fewer blocks free.
    pub idle: u32,
}

/// A fixed number of blocks.
#[derive(Clone, Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    by_hash: Map<BlockHash, u32>,
    oldest: u32,
    newest: u32,
    free: u32,
}

// === impl BlockPool ===

impl BlockPool {
    /// A pool of `blocks` empty blocks.
    pub fn new(blocks: u32) -> Self {
        let blocks = blocks.min(NONE - 1);
        let mut pool = Self {
            blocks: (0..blocks).map(|_| Block { hash: None, holders: 0, older: NONE, newer: NONE }).collect(),
            by_hash: Map::default(),
            oldest: NONE,
            newest: NONE,
            free: 0,
        };
        (0..blocks).for_each(|block| pool.put_newest(block));
        pool
    }

    /// All blocks.
    pub fn capacity(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Blocks that nobody holds, cached ones among them.
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Blocks that somebody holds.
    pub fn used(&self) -> u32 {
        self.capacity() - self.free
    }

    /// Blocks that can be found by their hash.
    pub fn cached(&self) -> u32 {
        self.by_hash.len() as u32
    }

    /// How much of the beginning of `prompt` is here. A prompt's hashes are chained, so none occurs twice.
    pub fn lookup(&self, prompt: impl IntoIterator<Item = BlockHash>) -> Run {
        let mut run = Run::default();
        for block in prompt.into_iter().map_while(|hash| self.by_hash.get(&hash)) {
            run.blocks += 1;
            run.idle += u32::from(self.blocks[*block as usize].holders == 0);
        }
        run
    }

    /// Holds the longest cached beginning of `prompt` and appends its blocks to `held`.
    pub fn take_cached(&mut self, prompt: impl IntoIterator<Item = BlockHash>, held: &mut Vec<BlockId>) {
        for hash in prompt {
            let Some(&block) = self.by_hash.get(&hash) else { break };
            if self.blocks[block as usize].holders == 0 {
                self.unlink(block);
            }
            self.blocks[block as usize].holders += 1;
            held.push(BlockId(block));
        }
    }

    /// Holds `count` blocks, the longest unused ones, and appends them to `held`. Whatever they cached is gone. False,
    /// and nothing happens, if there are not as many.
    #[must_use]
    pub fn take_free(&mut self, count: u32, held: &mut Vec<BlockId>) -> bool {
        if count > self.free {
            return false;
        }
        for _ in 0..count {
            let block = self.oldest;
            self.unlink(block);
            let entry = &mut self.blocks[block as usize];
            entry.holders = 1;
            if let Some(hash) = entry.hash.take() {
                self.by_hash.remove(&hash);
            }
            held.push(BlockId(block));
        }
        true
    }

    /// Makes a held block findable: it is full and holds what `hash` stands for. Without effect if another block
    /// already does.
    pub fn publish(&mut self, block: BlockId, hash: BlockHash) {
        let entry = &mut self.blocks[block.0 as usize];
        debug_assert!(entry.holders > 0, "only a held block has content to publish");
        if entry.hash.is_none() && self.by_hash.try_insert(hash, block.0).is_ok() {
            entry.hash = Some(hash);
        }
    }

    /// Gives up a sequence's blocks, in the order of the sequence.
    pub fn release(&mut self, held: &[BlockId]) {
        for &BlockId(block) in held.iter().rev() {
            let entry = &mut self.blocks[block as usize];
            debug_assert!(entry.holders > 0, "a block is released once for each time it is taken");
            entry.holders -= 1;
            if entry.holders == 0 {
                self.put_newest(block);
            }
        }
    }

    /// Forgets all content. Held blocks stay held and are never found again.
    pub fn forget(&mut self) {
        self.by_hash.clear();
        self.blocks.iter_mut().for_each(|block| block.hash = None);
    }

    fn put_newest(&mut self, block: u32) {
        let older = self.newest;
        self.blocks[block as usize].older = older;
        self.blocks[block as usize].newer = NONE;
        match older {
            NONE => self.oldest = block,
            older => self.blocks[older as usize].newer = block,
        }
        self.newest = block;
        self.free += 1;
    }

    fn unlink(&mut self, block: u32) {
        let Block { older, newer, .. } = self.blocks[block as usize];
        match older {
            NONE => self.oldest = newer,
            older => self.blocks[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.blocks[newer as usize].older = older,
        }
        self.free -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hashes(ids: &[u64]) -> Vec<BlockHash> {
        ids.iter().copied().map(BlockHash).collect()
    }

    /// A sequence that finds what it can, computes the rest and publishes it.
    fn sequence(pool: &mut BlockPool, prompt: &[u64]) -> Vec<BlockId> {
        let prompt = hashes(prompt);
        let mut held = Vec::new();
        pool.take_cached(prompt.iter().copied(), &mut held);
        let found = held.len();
        assert!(pool.take_free((prompt.len() - found) as u32, &mut held));
        for (block, hash) in held.iter().zip(&prompt).skip(found) {
            pool.publish(*block, *hash);
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
        assert_eq!(pool.lookup(hashes(&[1, 2, 9])), Run { blocks: 2, idle: 0 });
        pool.release(&held);
        assert_eq!((pool.used(), pool.cached()), (0, 3));
        assert_eq!(pool.lookup(hashes(&[1, 2, 9])), Run { blocks: 2, idle: 2 });
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
        assert_eq!(found(&pool, &[2, 3]), 2, "hashes are chained by whoever makes them, not here");
        assert_eq!(found(&pool, &[9, 1, 2, 3]), 0);
    }

    #[test]
    fn of_two_copies_only_the_first_is_found() {
        let mut pool = BlockPool::new(3);
        let (mut a, mut b) = (Vec::new(), Vec::new());
        assert!(pool.take_free(1, &mut a) && pool.take_free(1, &mut b));
        pool.publish(a[0], BlockHash(1));
        pool.publish(b[0], BlockHash(1));
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

    #[derive(Clone, Debug)]
    enum Op {
        Start(Vec<u64>),
        End(usize),
        Forget,
    }

    /// As real chains are: a block's hash tells of all before it, and none occurs twice.
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

    proptest! {
        #[test]
        fn blocks_are_conserved_and_used_ones_are_exactly_the_held_ones(
            blocks in 0u32..20,
            ops in prop::collection::vec(op(), 0..60),
        ) {
            let mut pool = BlockPool::new(blocks);
            let mut sequences: Vec<Vec<BlockId>> = Vec::new();
            for op in ops {
                match op {
                    Op::Start(prompt) => {
                        let run = pool.lookup(hashes(&prompt));
                        let missing = prompt.len() as u32 - run.blocks;
                        if missing <= pool.free() - run.idle {
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
