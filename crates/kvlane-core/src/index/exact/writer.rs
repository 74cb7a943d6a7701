//! Changes of one endpoint to the shared runs. Holds one shard lock at a time, across consecutive blocks.

use std::sync::{PoisonError, RwLock, RwLockWriteGuard};

use super::Budget;
use super::runs::{Hold, Place, RunId, SPAN, Shard, next_shard, shard_of};
use crate::block::BlockHash;
use crate::endpoint::EndpointId;

pub(super) struct Writer<'a> {
    shards: &'a [RwLock<Shard>],
    budget: &'a Budget,
    endpoint: EndpointId,
    locked: Option<(usize, RwLockWriteGuard<'a, Shard>)>,
}

/// Blocks of one run that the endpoint holds as the result of an event.
#[derive(Clone, Copy, Debug)]
pub(super) struct Row {
    pub(super) first: Place,
    pub(super) count: usize,
    /// Bit n: the endpoint already held the n-th block under another name.
    pub(super) already: u64,
}

// === impl Writer ===

impl<'a> Writer<'a> {
    pub(super) fn new(shards: &'a [RwLock<Shard>], budget: &'a Budget, endpoint: EndpointId) -> Self {
        Self { shards, budget, endpoint, locked: None }
    }

    #[inline]
    fn shard(&mut self, at: usize) -> &mut Shard {
        if self.locked.as_ref().is_some_and(|(locked, _)| *locked != at) {
            // Released before the next lock is taken, so that a thread never holds two.
            self.locked = None;
        }
        let shards = self.shards;
        let lock = || (at, shards[at].write().unwrap_or_else(PoisonError::into_inner));
        &mut self.locked.get_or_insert_with(lock).1
    }

    /// Our hash of the block at a place.
    pub(super) fn hash(&mut self, Place { run, offset }: Place) -> Option<BlockHash> {
        self.shard(run.shard()).run(run).hashes().get(offset as usize).copied()
    }

    /// Makes the endpoint hold these consecutive blocks, which follow the block at `after` or begin a prompt. The
    /// endpoint must hold the block at `after`, so that it keeps its place meanwhile. Processes the blocks that fit
    /// into one run, at least one; `None` if there is no memory. About `more` blocks follow.
    #[inline]
    pub(super) fn add_blocks(
        &mut self,
        after: Option<Place>,
        hashes: &[BlockHash],
        more: usize,
    ) -> Option<Row> {
        let (budget, endpoint) = (self.budget, self.endpoint);
        let Some(Place { run, offset }) = after else {
            return self.add_first(shard_of(hashes[0]), hashes, 0, None, more);
        };
        let before = run.shard();
        let found = self.shard(before).run_mut(run);
        let offset = offset + 1;
        let position = found.start + offset;
        let count = found.extend(offset as usize, hashes, more, budget);
        if count == 0 {
            if offset as usize == found.hashes().len() && !position.is_multiple_of(SPAN) {
                return None;
            }
            return self.add_first(
                next_shard(before, position, hashes[0]),
                hashes,
                position,
                Some(run),
                more,
            );
        }
        let already = found.hold(endpoint, ones(count) << offset, budget)? >> offset;
        Some(Row { first: Place { run, offset }, count, already })
    }

    /// Like [`Writer::add_blocks`], where the first block begins a run.
    fn add_first(
        &mut self,
        at: usize,
        hashes: &[BlockHash],
        start: u32,
        parent: Option<RunId>,
        more: usize,
    ) -> Option<Row> {
        let (budget, endpoint) = (self.budget, self.endpoint);
        let shard = self.shard(at);
        let known = shard.find(at, hashes[0], start);
        let run = match known {
            Some(run) => run,
            None => shard.add(at, hashes[0], start, parent, hashes.len() - 1 + more, budget)?,
        };
        let found = shard.run_mut(run);
        let count = 1 + found.extend(1, &hashes[1..], more, budget);
        // Only a run with many holders needs memory for one more, so a run just created never does.
        let already = found.hold(endpoint, ones(count), budget)?;
        if let Some(parent) = parent.filter(|_| known.is_none()) {
            // The parent still exists: the endpoint holds one of its blocks.
            self.shard(parent.shard()).run_mut(parent).children += 1;
        }
        Some(Row { first: Place { run, offset: 0 }, count, already })
    }

    /// Notes that the endpoint holds a block only below the GPU, or that it does not.
    pub(super) fn set_lower(&mut self, Place { run, offset }: Place, is_lower: bool) {
        let (budget, endpoint) = (self.budget, self.endpoint);
        let hold = Hold { blocks: 1 << offset, endpoint };
        self.shard(run.shard()).set_lower(run, hold, is_lower, budget);
    }

    /// Whether the endpoint holds a block only below the GPU.
    pub(super) fn is_lower(&mut self, Place { run, offset }: Place) -> bool {
        let endpoint = self.endpoint;
        let lower = self.shard(run.shard()).lower(run);
        lower.iter().any(|hold| hold.endpoint == endpoint && hold.blocks >> offset & 1 != 0)
    }

    /// Removes the endpoint as a holder of these blocks of a run, and frees runs that are no longer needed.
    #[inline]
    pub(super) fn remove_holder(&mut self, run: RunId, blocks: u64) {
        let (budget, endpoint) = (self.budget, self.endpoint);
        let shard = self.shard(run.shard());
        if shard.has_lower() {
            shard.set_lower(run, Hold { blocks, endpoint }, false, budget);
        }
        if shard.run_mut(run).remove_holder(endpoint, blocks, budget) || shard.run(run).children > 0 {
            return;
        }
        let mut parent = shard.free(run, budget);
        while let Some(run) = parent {
            let shard = self.shard(run.shard());
            let found = shard.run_mut(run);
            found.children -= 1;
            if found.children > 0 || !found.holds().is_empty() {
                return;
            }
            parent = shard.free(run, budget);
        }
    }
}

/// A mask of `count` ones, at most 64.
pub(super) fn ones(count: usize) -> u64 {
    u64::MAX >> (u64::BITS as usize - count)
}
