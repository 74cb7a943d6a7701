//! One endpoint's changes to the shared runs: one lock at a time, kept from one block to the next.

use std::sync::{PoisonError, RwLock, RwLockWriteGuard};

use super::Budget;
use super::runs::{Place, RunId, SPAN, Shard, next_shard, shard_of};
use crate::block::BlockHash;
use crate::endpoint::EndpointId;

pub(super) struct Writer<'a> {
    shards: &'a [RwLock<Shard>],
    budget: &'a Budget,
    endpoint: EndpointId,
    locked: Option<(usize, RwLockWriteGuard<'a, Shard>)>,
}

/// A block that the endpoint holds from now on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seat {
    pub(super) place: Place,
    /// The endpoint held it already, under another name.
    pub(super) already: bool,
}

// === impl Writer ===

impl<'a> Writer<'a> {
    pub(super) fn new(shards: &'a [RwLock<Shard>], budget: &'a Budget, endpoint: EndpointId) -> Self {
        Self { shards, budget, endpoint, locked: None }
    }

    #[inline]
    fn shard(&mut self, at: usize) -> &mut Shard {
        if self.locked.as_ref().is_some_and(|(locked, _)| *locked != at) {
            // Before the other is taken, not after: nobody ever holds two.
            self.locked = None;
        }
        let shards = self.shards;
        let lock = || (at, shards[at].write().unwrap_or_else(PoisonError::into_inner));
        &mut self.locked.get_or_insert_with(lock).1
    }

    /// Our hash of the block there.
    pub(super) fn hash(&mut self, Place { run, offset }: Place) -> Option<BlockHash> {
        self.shard(run.shard()).run(run).hashes().get(offset as usize).copied()
    }

    /// The endpoint holds `hash`, which follows the block at `after` or begins a prompt. The endpoint has to hold that
    /// one too, so that it keeps its place meanwhile. About `more` blocks are to follow. Nothing if there is no memory.
    #[inline]
    pub(super) fn seat(&mut self, after: Option<Place>, hash: BlockHash, more: usize) -> Option<Seat> {
        let (budget, endpoint) = (self.budget, self.endpoint);
        let Some(Place { run, offset }) = after else {
            return self.seat_first(shard_of(hash), hash, 0, None, more);
        };
        let before = run.shard();
        let found = self.shard(before).run_mut(run);
        let offset = offset + 1;
        let position = found.start + offset;
        match found.hashes().get(offset as usize) {
            Some(next) if *next == hash => {}
            None if !position.is_multiple_of(SPAN) => {
                if !found.push(hash, more, budget) {
                    return None;
                }
            }
            _ => {
                return self.seat_first(next_shard(before, position, hash), hash, position, Some(run), more);
            }
        }
        let already = found.hold(endpoint, 1 << offset, budget)? != 0;
        Some(Seat { place: Place { run, offset }, already })
    }

    /// As [`Writer::seat`], for the first block of a run.
    fn seat_first(
        &mut self,
        at: usize,
        hash: BlockHash,
        start: u32,
        parent: Option<RunId>,
        more: usize,
    ) -> Option<Seat> {
        let (budget, endpoint) = (self.budget, self.endpoint);
        let shard = self.shard(at);
        let known = shard.find(at, hash, start);
        let run = match known {
            Some(run) => run,
            None => shard.add(at, hash, start, parent, more, budget)?,
        };
        let Some(already) = shard.run_mut(run).hold(endpoint, 1, budget) else {
            // Only a run with many holders needs memory for one more, so it is not one that was just made.
            return None;
        };
        if let Some(parent) = parent.filter(|_| known.is_none()) {
            // It cannot have gone in between: the endpoint holds a block of it.
            self.shard(parent.shard()).run_mut(parent).children += 1;
        }
        Some(Seat { place: Place { run, offset: 0 }, already: already != 0 })
    }

    /// The endpoint holds these blocks of a run no more. Runs that nobody needs any longer go.
    #[inline]
    pub(super) fn let_go(&mut self, run: RunId, blocks: u64) {
        let (budget, endpoint) = (self.budget, self.endpoint);
        let shard = self.shard(run.shard());
        if shard.run_mut(run).let_go(endpoint, blocks, budget) || shard.run(run).children > 0 {
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
