//! Export and restore of the dispatch index, so that it survives a restart.
//!
//! The export consists of pieces: consecutive blocks, the block before them, and the time since their last use. Pieces
//! are exported in slices, so that no caller holds the lock for all of them. Between two slices the index may change: a
//! piece may be exported twice, as a whole and in parts, and the piece before another may be gone, or may have moved
//! into a slice already exported. Block hashes are chained, so each identifies the whole prompt up to it, and the
//! pieces still fit; a piece without its predecessor is dropped. Without changes in between, the export is complete.

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use super::{ApproxIndex, Link, NIL, ORIGIN};
use crate::block::BlockHash;
use crate::endpoint::EndpointId;
use crate::time::Nanos;

/// Entries that one call of [`ApproxIndex::export`] examines.
const EXPORTED_PER_CALL: usize = 1024;

/// Consecutive blocks held by an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The block before them; `None` if they begin a prompt.
    pub before: Option<BlockHash>,
    /// The blocks.
    pub blocks: Vec<BlockHash>,
    /// Time since their last use.
    pub age: Nanos,
}

/// The pieces of one endpoint, to be joined to prompts.
#[derive(Debug)]
pub struct Pieces {
    pieces: Vec<Piece>,
    /// The piece of each block, and the number of its blocks up to and including that block.
    places: HashMap<BlockHash, (u32, u32), FixedState>,
}

// === impl Pieces ===

impl Pieces {
    /// These pieces, least recently used first.
    pub fn new(mut pieces: Vec<Piece>) -> Self {
        // Of pieces used at the same time the longest prompt comes first, as its end is evicted first.
        pieces.sort_by_key(|piece| std::cmp::Reverse(piece.age));
        let mut places = HashMap::default();
        for (n, piece) in (0..).zip(&pieces) {
            for (len, block) in (1..).zip(&piece.blocks) {
                places.insert(*block, (n, len));
            }
        }
        Self { pieces, places }
    }

    /// Number of pieces.
    pub fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// The whole prompt up to the end of the `n`-th piece, and the time since its last use. `None` if a predecessor is
    /// missing.
    pub fn prompt(&self, n: usize) -> Option<(Vec<BlockHash>, Nanos)> {
        let last = self.pieces.get(n)?;
        let (mut piece, mut len, mut parts) = (last, last.blocks.len(), Vec::new());
        loop {
            parts.push(&piece.blocks[..len]);
            let Some(before) = piece.before else { break };
            // Guards against a cycle in the input.
            if parts.len() > self.pieces.len() {
                return None;
            }
            let &(at, blocks) = self.places.get(&before)?;
            (piece, len) = (&self.pieces[at as usize], blocks as usize);
        }
        parts.reverse();
        Some((parts.concat(), last.age))
    }
}

// === impl ApproxIndex ===

impl ApproxIndex {
    /// Exports the holds at `now` in one slice of all entries, starting at `from`, 0 at first. Returns the start of the
    /// next slice, if there is one.
    pub fn export(&self, now: Nanos, from: usize, out: &mut Vec<(EndpointId, Piece)>) -> Option<usize> {
        let to = self.links.len().min(from + EXPORTED_PER_CALL);
        for &Link { run, endpoint, .. } in self.links.get(from..to)? {
            let Some(position) = (run != NIL).then(|| self.position(run, endpoint)).flatten() else {
                continue;
            };
            let run = &self.runs[run as usize];
            let hold = run.holds[position];
            let age = now + ORIGIN - hold.touched;
            if age > self.config.ttl {
                continue;
            }
            let before = (run.parent != NIL).then(|| self.runs[run.parent as usize].hashes.last().copied());
            let blocks = run.hashes[..hold.depth as usize].to_vec();
            out.push((endpoint, Piece { before: before.flatten(), blocks, age }));
        }
        (to < self.links.len()).then_some(to)
    }

    /// Restores a dispatch of these blocks to `endpoint`, `age` ago. Restore the least recently used first, and before
    /// any new dispatch to the endpoint. `hint` is the result of the previous call, 0 at first: it saves searching the
    /// LRU list.
    pub fn restore(
        &mut self,
        now: Nanos,
        age: Nanos,
        chain: &[BlockHash],
        endpoint: EndpointId,
        hint: u32,
    ) -> u32 {
        if age > self.config.ttl {
            return hint;
        }
        let touched = now + ORIGIN - age;
        let mut path = self.hold(chain, endpoint, touched);
        let mut hint = hint;
        for &(run, position) in path.iter().rev() {
            let hold = &mut self.runs[run as usize].holds[position];
            if hold.touched > touched {
                break;
            }
            hold.touched = touched;
            let link = hold.link;
            self.link_in_time(link, touched, hint);
            hint = link;
        }
        path.clear();
        self.path = path;
        self.evict(now);
        hint
    }

    /// Moves a hold to its position in the LRU list, searched from `hint` on if that is older.
    fn link_in_time(&mut self, at: u32, touched: Nanos, hint: u32) {
        let hint = if hint == at { self.links[at as usize].older } else { hint };
        self.unlink(at);
        let is_before = |index: &Self, link: u32| index.touched(link).is_some_and(|other| other <= touched);
        let first = [hint, self.oldest].into_iter().find(|&link| is_before(self, link));
        let Some(mut older) = first else { return self.link_oldest(at) };
        while is_before(self, self.links[older as usize].newer) {
            older = self.links[older as usize].newer;
        }
        self.link_newer_than(at, older);
    }

    fn link_oldest(&mut self, at: u32) {
        let newer = std::mem::replace(&mut self.oldest, at);
        self.links[at as usize].older = NIL;
        self.links[at as usize].newer = newer;
        match newer {
            NIL => self.newest = at,
            newer => self.links[newer as usize].older = at,
        }
    }

    /// When a hold was last used; `None` if the link is free.
    fn touched(&self, link: u32) -> Option<Nanos> {
        let &Link { run, endpoint, .. } = self.links.get(link as usize).filter(|link| link.run != NIL)?;
        self.position(run, endpoint).map(|at| self.runs[run as usize].holds[at].touched)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::Config;
    use super::super::tests::{ROOMY, chain, check, endpoint, lookup};
    use super::*;

    /// All entries of an index, by endpoint; calls `between` between two slices.
    fn export(
        index: &mut ApproxIndex,
        now: Nanos,
        mut between: impl FnMut(&mut ApproxIndex),
    ) -> BTreeMap<EndpointId, Pieces> {
        let (mut found, mut from) = (Vec::new(), Some(0));
        while let Some(at) = from {
            from = index.export(now, at, &mut found);
            between(index);
        }
        let mut by_endpoint: BTreeMap<_, Vec<Piece>> = BTreeMap::new();
        for (endpoint, piece) in found {
            by_endpoint.entry(endpoint).or_default().push(piece);
        }
        by_endpoint.into_iter().map(|(endpoint, pieces)| (endpoint, Pieces::new(pieces))).collect()
    }

    fn restore(index: &mut ApproxIndex, now: Nanos, later: Nanos, id: EndpointId, pieces: &Pieces) {
        let mut hint = 0;
        for n in 0..pieces.len() {
            if let Some((chain, age)) = pieces.prompt(n) {
                hint = index.restore(now, age + later, &chain, id, hint);
            }
        }
        check(index);
    }

    proptest! {
        /// Invariant: After a restart the index of dispatches gives the same overlaps as before.
        ///
        /// Also held by `after_a_restart_every_prompt_goes_to_the_holder_of_its_prefix`.
        ///
        /// For any dispatches at any times, an index restored from a complete export gives the same overlaps as the
        /// original, at once and later, whatever its clock's origin and however long the downtime.
        #[test]
        fn after_a_restart_the_same_overlaps(
            given in prop::collection::vec((prop::collection::vec(0u8..3, 1..12), 0u16..4, 0u64..9), 1..60),
            left in 0u16..5,
            ttl in 1u64..200,
            gone in 0u64..20,
            clock in 0u64..50,
            order in Just([0u16, 1, 2, 3]).prop_shuffle(),
        ) {
            let config = Config { ttl: Nanos(ttl), ..ROOMY };
            let (mut before, mut now) = (ApproxIndex::new(config), 0);
            for (text, to, pause) in &given {
                now += pause;
                before.insert(Nanos(now), &chain(text), endpoint(*to));
            }
            before.remove_endpoint(endpoint(left), 0);
            let kept = export(&mut before, Nanos(now), |_| {});
            let mut after = ApproxIndex::new(config);
            for id in order.map(endpoint) {
                if let Some(pieces) = kept.get(&id) {
                    restore(&mut after, Nanos(clock), Nanos(gone), id, pieces);
                }
            }
            for later in [0, 1, 5, 50, 300] {
                for (text, ..) in &given {
                    let expect = lookup(&before, now + gone + later, text);
                    prop_assert_eq!(lookup(&after, clock + later, text), expect, "{} later", later);
                }
            }
            // The restored index continues as the original does.
            for (text, to, _) in given.iter().take(9) {
                after.insert(Nanos(clock), &chain(text), endpoint(*to));
                check(&after);
            }
        }

        #[test]
        fn no_pieces_make_a_prompt_of_their_own(
            pieces in prop::collection::vec(
                (prop::option::of(0u64..9), prop::collection::vec(0u64..9, 0..4), 0u64..9), 0..9
            ),
        ) {
            let piece = |(before, blocks, age): (Option<u64>, Vec<u64>, u64)| Piece {
                before: before.map(BlockHash),
                blocks: blocks.into_iter().map(BlockHash).collect(),
                age: Nanos(age),
            };
            let pieces = Pieces::new(pieces.into_iter().map(piece).collect());
            for n in 0..pieces.len() {
                if let Some((chain, _)) = pieces.prompt(n) {
                    prop_assert!(chain.len() <= 4 * (pieces.len() + 1));
                }
            }
        }
    }

    #[test]
    fn what_changes_between_two_slices_may_be_left_out_and_the_rest_is_told() {
        let mut index = ApproxIndex::new(ROOMY);
        let text = |n: u32, end: u8| [&n.to_le_bytes()[..], &[7, 7, 7, end]].concat();
        for n in 0..3 * EXPORTED_PER_CALL as u32 {
            index.insert(Nanos(n.into()), &chain(&text(n, 1)), endpoint(0));
        }
        let (mut slices, mut changes) = (0, 0);
        let kept = export(&mut index, Nanos(9999), |index| {
            // Splits runs that were exported and runs that were not, and evicts some.
            slices += 1;
            for n in (slices..3 * EXPORTED_PER_CALL as u32).step_by(97) {
                changes += 2;
                index.insert(Nanos(9999), &chain(&text(n, 2)), endpoint(0));
                index.withdraw(&chain(&text(n + 1, 1)), endpoint(0));
            }
        });
        assert!(slices >= 3, "{slices}");
        let mut after = ApproxIndex::new(ROOMY);
        restore(&mut after, Nanos(0), Nanos(0), endpoint(0), &kept[&endpoint(0)]);
        let known = |index: &ApproxIndex, now, n| lookup(index, now, &text(n, 1)).get(&endpoint(0)).copied();
        let (mut lost, all) = (0, 3 * EXPORTED_PER_CALL as u32);
        for n in 0..all {
            lost += i32::from(known(&after, 0, n) < known(&index, 9999, n));
            assert!(known(&after, 0, n) <= Some(8), "{n}: no prompt got longer");
        }
        assert!(lost <= changes && lost < all as i32 / 4, "{lost} lost, {changes} changes");
    }
}
