//! Lookup of a prompt in the runs.

use super::runs::{GROUP, Hold, Run, SPAN, Shard, next_shard};
use super::writer::ones;
use crate::block::BlockHash;
use crate::endpoint::EndpointId;
use crate::index::Overlap;

/// A lookup and its progress.
pub(super) struct Search<'a> {
    chain: &'a [BlockHash],
    done: usize,
    /// Endpoints that hold all blocks found so far.
    holders: Vec<EndpointId>,
}

/// Spans per group.
const AHEAD: usize = (GROUP / SPAN) as usize;

// === impl Search ===

impl<'a> Search<'a> {
    /// Starts a lookup, reusing the memory of `holders`.
    pub(super) fn new(chain: &'a [BlockHash], mut holders: Vec<EndpointId>) -> Self {
        holders.clear();
        Self { chain, done: 0, holders }
    }

    /// Follows the prompt through one shard. Returns the shard in which it may continue.
    pub(super) fn through(&mut self, shard: usize, runs: &Shard, overlap: &mut Overlap) -> Option<usize> {
        loop {
            // First runs of all spans ahead that can be in this shard. They do not depend on each other, so their
            // memory accesses overlap.
            let mut ahead = [None; AHEAD];
            let left = AHEAD - self.done / SPAN as usize % AHEAD;
            let mut found = 0;
            let mut position = self.done;
            while found < left && position < self.chain.len() {
                ahead[found] = runs.find(shard, self.chain[position], position as u32);
                if ahead[found].is_none() {
                    break;
                }
                found += 1;
                position = (position / SPAN as usize + 1) * SPAN as usize;
            }
            for at in 0..found {
                let Some(id) = ahead[at] else { break };
                let run = runs.run(id);
                let next = ahead.get(at + 1).copied().flatten().map(|next| runs.run(next));
                let common = match next {
                    // A child that starts at the run's end implies that the whole run matches.
                    Some(next) if next.parent() == Some(id) && next.start == run.end() => run.hashes().len(),
                    _ => run.common(&self.chain[self.done..]),
                };
                if runs.has_lower() {
                    self.count_lower(runs.lower(id), run, common as u32, overlap);
                }
                self.narrow(run.holds(), common as u32, overlap);
                self.done += common;
                let ends_span = (self.done as u32).is_multiple_of(SPAN);
                if self.holders.is_empty() || self.done == self.chain.len() {
                    return None;
                }
                if !ends_span || at + 1 == found {
                    break;
                }
            }
            if found == 0 {
                return None;
            }
            let next = next_shard(shard, self.done as u32, self.chain[self.done]);
            if next != shard {
                return Some(next);
            }
        }
    }

    /// Counts the blocks below the GPU among the next `common` ones, of the endpoints that hold all blocks before them.
    #[cold]
    fn count_lower(&self, lower: &[Hold], run: &Run, common: u32, overlap: &mut Overlap) {
        for lower in lower {
            if self.done > 0 && self.holders.binary_search(&lower.endpoint).is_err() {
                continue;
            }
            let hold = run.holds().binary_search_by_key(&lower.endpoint, |hold| hold.endpoint);
            let held = hold.map_or(0, |at| run.holds()[at].blocks);
            let leading = held.trailing_ones().min(common);
            if leading > 0 {
                overlap.add_lower(lower.endpoint, (lower.blocks & ones(leading as usize)).count_ones());
            }
        }
    }

    /// Keeps the holders that also hold the next `common` blocks. Sets the overlap of the others, which is final.
    fn narrow(&mut self, holds: &[Hold], common: u32, overlap: &mut Overlap) {
        let done = self.done as u32;
        if done == 0 {
            for hold in holds {
                let leading = hold.blocks.trailing_ones().min(common);
                if leading == common {
                    self.holders.push(hold.endpoint);
                } else {
                    overlap.set(hold.endpoint, leading);
                }
            }
            return;
        }
        let mut holds = holds.iter().peekable();
        self.holders.retain(|&endpoint| {
            while holds.next_if(|hold| hold.endpoint < endpoint).is_some() {}
            let hold = holds.next_if(|hold| hold.endpoint == endpoint);
            let leading = hold.map_or(0, |hold| hold.blocks.trailing_ones().min(common));
            if leading < common {
                overlap.set(endpoint, done + leading);
            }
            leading == common
        });
    }

    /// Ends the lookup: the remaining holders hold all blocks that were found.
    pub(super) fn end(self, overlap: &mut Overlap) -> Vec<EndpointId> {
        for &endpoint in &self.holders {
            overlap.set(endpoint, self.done as u32);
        }
        self.holders
    }
}
