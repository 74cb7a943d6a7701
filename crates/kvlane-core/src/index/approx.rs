//! Approximate prefix index, fed by our own dispatches, for engines that publish no KV events.
//!
//! One radix tree over all endpoints. A node is a *run* of consecutive blocks without an observed branch; each run
//! lists the endpoints that hold it and how many of its blocks each holds. Because block hashes are chained, one
//! comparison at the end of a run decides the whole run, so a lookup costs per branch, not per block.
//!
//! Memory is bounded: every run and hold is counted, and the least recently used holds are evicted first. A touched
//! path is renewed leaf first and root last, so an endpoint's hold on a run is never newer than its hold on the parent
//! run. Evicting the oldest hold therefore removes leaves before their ancestors, and an endpoint's holds always form a
//! set of whole prefixes.

mod kept;

use std::hash::BuildHasher;

use foldhash::fast::FixedState;
use hashbrown::HashTable;

pub use self::kept::{Piece, Pieces};
use super::Overlap;
use crate::block::BlockHash;
use crate::endpoint::EndpointId;
use crate::time::Nanos;

/// Limits of the index.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Memory limit in bytes; beyond it the least recently used entries are evicted.
    pub memory_bytes_max: usize,
    /// An entry unused for this long counts as evicted by its engine.
    pub ttl: Nanos,
}

/// Predicts which endpoint holds which prefix. See the module documentation.
pub struct ApproxIndex {
    config: Config,
    runs: Vec<Run>,
    links: Vec<Link>,
    /// Runs by the hash of their first block, which is unique: it identifies the whole prefix up to there.
    heads: HashTable<u32>,
    hasher: FixedState,
    free_run: u32,
    free_link: u32,
    oldest: u32,
    newest: u32,
    bytes: usize,
    blocks_held: u64,
    /// The same by the holder's slot.
    held_by_slot: Vec<u64>,
    /// Scratch: the runs of a prompt and the endpoint's position in each.
    path: Vec<(u32, usize)>,
}

/// Consecutive blocks without a branch.
struct Run {
    /// Never empty while in use.
    hashes: Vec<BlockHash>,
    /// Holds by endpoint, stored contiguously since every lookup reads all of them.
    holds: Vec<Hold>,
    /// The parent run; also the next free run.
    parent: u32,
    /// Number of child runs.
    children: u32,
}

/// One endpoint holds the first `depth` blocks of a run.
#[derive(Clone, Copy)]
struct Hold {
    touched: Nanos,
    endpoint: EndpointId,
    depth: u32,
    /// Its position in the LRU list.
    link: u32,
}

/// One hold's position in the LRU list.
#[derive(Clone, Copy)]
struct Link {
    /// The hold's run and endpoint. The run is `NIL` while the link is free.
    run: u32,
    endpoint: EndpointId,
    /// The next older link; also the next free link.
    older: u32,
    newer: u32,
}

const NIL: u32 = u32::MAX;

/// Memory of one run without its hashes and holds: the record and its share of the slab's spare capacity, its slot in
/// `heads` at the table's lowest load, and the allocator's rounding of two vectors.
const RUN_BYTES: usize = size_of::<Run>() * 9 / 8 + 12 + 16;
/// Memory of one link, with its share of the slab's spare capacity.
const LINK_BYTES: usize = size_of::<Link>() * 9 / 8;
const HOLD_BYTES: usize = size_of::<Hold>();
const BLOCK_BYTES: usize = size_of::<BlockHash>();

/// Longest time before the driver's origin at which an entry can have been used: restored entries are older than the
/// process.
const ORIGIN: Nanos = Nanos::from_secs(7 * 24 * 3600);
/// Expired entries that one insert removes. They are ignored already, and a full sweep would delay requests.
const EXPIRED_PER_INSERT: usize = 64;
/// Entries that one call of [`ApproxIndex::remove_endpoint`] examines.
const REMOVED_PER_CALL: usize = 4096;

// === impl ApproxIndex ===

impl ApproxIndex {
    /// Changes the limits. Excess entries are evicted by later inserts.
    pub fn configure(&mut self, config: Config) {
        self.config = config;
    }

    /// An empty index.
    pub fn new(config: Config) -> Self {
        Self {
            config,
            runs: Vec::new(),
            links: Vec::new(),
            heads: HashTable::new(),
            hasher: FixedState::with_seed(0),
            free_run: NIL,
            free_link: NIL,
            oldest: NIL,
            newest: NIL,
            bytes: 0,
            blocks_held: 0,
            held_by_slot: Vec::new(),
            path: Vec::new(),
        }
    }

    /// Bytes in use, as counted against [`Config::memory_bytes_max`].
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Blocks held, each counted once per holder.
    pub fn blocks_held(&self) -> u64 {
        self.blocks_held
    }

    /// Blocks held by an endpoint and by its predecessors in its slot, as long as those are still being removed.
    pub fn blocks_of(&self, endpoint: EndpointId) -> u64 {
        self.held_by_slot.get(endpoint.slot()).copied().unwrap_or(0)
    }

    /// Sets, for every endpoint, how many leading blocks of `chain` it holds at `now`.
    pub fn lookup(&self, now: Nanos, chain: &[BlockHash], overlap: &mut Overlap) {
        overlap.clear();
        let mut done = 0;
        while let Some(run) = chain.get(done).and_then(|&hash| self.run_at(hash)) {
            let run = &self.runs[run as usize];
            let matched = common_len(&run.hashes, &chain[done..]);
            for hold in &run.holds {
                if now + ORIGIN - hold.touched <= self.config.ttl {
                    overlap.set(hold.endpoint, (done as u32) + hold.depth.min(matched as u32));
                }
            }
            done += matched;
            if matched < run.hashes.len() {
                break;
            }
        }
    }

    /// Records a dispatch: from now on `endpoint` holds all of these blocks.
    pub fn insert(&mut self, now: Nanos, chain: &[BlockHash], endpoint: EndpointId) {
        let touched = now + ORIGIN;
        let mut path = self.hold(chain, endpoint, touched);
        for &(run, position) in path.iter().rev() {
            let hold = &mut self.runs[run as usize].holds[position];
            hold.touched = touched;
            let link = hold.link;
            self.unlink(link);
            self.link_newest(link);
        }
        path.clear();
        self.path = path;
        self.evict(now);
    }

    /// Makes `endpoint` hold these blocks. Returns their runs and the endpoint's position in each. Blocks that it did
    /// not hold get `touched` as their time of use.
    fn hold(&mut self, chain: &[BlockHash], endpoint: EndpointId, touched: Nanos) -> Vec<(u32, usize)> {
        let mut path = std::mem::take(&mut self.path);
        let mut done = 0;
        while done < chain.len() {
            let rest = &chain[done..];
            let parent = path.last().map_or(NIL, |&(run, _)| run);
            let Some(mut run) = self.run_at(rest[0]) else {
                if self.can_grow(parent) {
                    self.grow(parent, rest);
                } else {
                    let run = self.add_run(rest.to_vec(), parent);
                    path.push((run, self.add_hold(run, endpoint, rest.len() as u32, touched)));
                }
                break;
            };
            let matched = common_len(&self.runs[run as usize].hashes, rest);
            // The prompt does not use the blocks after its end, so their hold must not be renewed with it.
            let held = |run: &Run| {
                run.holds.iter().find(|hold| hold.endpoint == endpoint).map_or(0, |hold| hold.depth)
            };
            let branches = matched < rest.len() || held(&self.runs[run as usize]) > matched as u32;
            if matched < self.runs[run as usize].hashes.len() && branches {
                run = self.split(run, matched);
            }
            let position = match self.position(run, endpoint) {
                Some(position) => position,
                None => self.add_hold(run, endpoint, 0, touched),
            };
            self.deepen(run, position, matched as u32);
            path.push((run, position));
            done += matched;
        }
        path
    }

    /// Removes the holds of `endpoint` in one slice of all entries, starting at `from`, 0 at first. Returns the start
    /// of the next slice, if there is one.
    pub fn remove_endpoint(&mut self, endpoint: EndpointId, from: usize) -> Option<usize> {
        let to = self.links.len().min(from + REMOVED_PER_CALL);
        for at in from..to {
            let link = self.links[at];
            if link.run != NIL && link.endpoint == endpoint {
                self.remove_hold(at as u32);
            }
        }
        (to < self.links.len()).then_some(to)
    }

    /// Withdraws the dispatch of a prompt with these blocks, except for blocks that a longer prompt given to `endpoint`
    /// continues without a branch.
    pub fn withdraw(&mut self, chain: &[BlockHash], endpoint: EndpointId) {
        let (mut done, mut links) = (0, Vec::new());
        while let Some(at) = chain.get(done).and_then(|&hash| self.run_at(hash)) {
            let run = &self.runs[at as usize];
            let matched = common_len(&run.hashes, &chain[done..]);
            match run.holds.iter().find(|hold| hold.endpoint == endpoint) {
                Some(hold) if hold.depth as usize > matched => links.clear(),
                Some(hold) => links.push(hold.link),
                None => {}
            }
            done += matched;
            if matched < run.hashes.len() {
                break;
            }
        }
        links.into_iter().rev().for_each(|link| self.remove_hold(link));
    }

    fn hash(&self, block: BlockHash) -> u64 {
        self.hasher.hash_one(block.0)
    }

    fn run_at(&self, first: BlockHash) -> Option<u32> {
        self.heads.find(self.hash(first), |&run| self.runs[run as usize].hashes[0] == first).copied()
    }

    fn position(&self, run: u32, endpoint: EndpointId) -> Option<usize> {
        self.runs[run as usize].holds.iter().position(|hold| hold.endpoint == endpoint)
    }

    /// Whether a run that the endpoint holds to its end can be extended in place: it has no other holder and no
    /// children.
    fn can_grow(&self, run: u32) -> bool {
        run != NIL && self.runs[run as usize].children == 0 && self.runs[run as usize].holds.len() == 1
    }

    fn grow(&mut self, run: u32, rest: &[BlockHash]) {
        let hashes = &mut self.runs[run as usize].hashes;
        hashes.reserve_exact(rest.len());
        hashes.extend_from_slice(rest);
        let len = hashes.len() as u32;
        self.bytes += rest.len() * BLOCK_BYTES;
        self.deepen(run, 0, len);
    }

    fn deepen(&mut self, run: u32, position: usize, depth: u32) {
        let hold = &mut self.runs[run as usize].holds[position];
        if depth > hold.depth {
            let (endpoint, more) = (hold.endpoint, depth - hold.depth);
            hold.depth = depth;
            self.note_held(endpoint, more);
        }
    }

    fn note_held(&mut self, endpoint: EndpointId, blocks: u32) {
        if endpoint.slot() >= self.held_by_slot.len() {
            self.held_by_slot.resize(endpoint.slot() + 1, 0);
        }
        self.held_by_slot[endpoint.slot()] += u64::from(blocks);
        self.blocks_held += u64::from(blocks);
    }

    fn note_lost(&mut self, endpoint: EndpointId, blocks: u32) {
        self.held_by_slot[endpoint.slot()] -= u64::from(blocks);
        self.blocks_held -= u64::from(blocks);
    }

    fn add_run(&mut self, hashes: Vec<BlockHash>, parent: u32) -> u32 {
        self.bytes += RUN_BYTES + hashes.len() * BLOCK_BYTES;
        let run = Run { hashes, holds: Vec::new(), parent, children: 0 };
        let at = if self.free_run == NIL {
            grow_by_an_eighth(&mut self.runs);
            self.runs.push(run);
            (self.runs.len() - 1) as u32
        } else {
            let at = self.free_run;
            self.free_run = self.runs[at as usize].parent;
            self.runs[at as usize] = run;
            at
        };
        if parent != NIL {
            self.runs[parent as usize].children += 1;
        }
        self.index_head(at);
        at
    }

    fn index_head(&mut self, run: u32) {
        let (runs, hasher) = (&self.runs, &self.hasher);
        let rehash = |&run: &u32| hasher.hash_one(runs[run as usize].hashes[0].0);
        self.heads.insert_unique(rehash(&run), run, rehash);
    }

    fn unindex_head(&mut self, run: u32, first: BlockHash) {
        if let Ok(entry) = self.heads.find_entry(self.hash(first), |&at| at == run) {
            entry.remove();
        }
    }

    /// Frees a run without holders and children, and then its parent if that has none either.
    fn release(&mut self, mut run: u32) {
        while run != NIL && self.runs[run as usize].holds.is_empty() && self.runs[run as usize].children == 0
        {
            let Run { hashes, holds, parent, .. } = &mut self.runs[run as usize];
            let hashes = std::mem::take(hashes);
            self.bytes -=
                RUN_BYTES + hashes.len() * BLOCK_BYTES + std::mem::take(holds).capacity() * HOLD_BYTES;
            let parent = std::mem::replace(parent, self.free_run);
            self.unindex_head(run, hashes[0]);
            self.free_run = run;
            if parent != NIL {
                self.runs[parent as usize].children -= 1;
            }
            run = parent;
        }
    }

    /// Splits a run before block `at` and returns the first part, which is a new run. The second part keeps the old
    /// index, so that its children still name their parent.
    fn split(&mut self, run: u32, at: usize) -> u32 {
        let mut hashes = std::mem::take(&mut self.runs[run as usize].hashes);
        let tail = hashes.split_off(at);
        hashes.shrink_to_fit();
        self.unindex_head(run, hashes[0]);
        self.bytes -= hashes.len() * BLOCK_BYTES;
        let parent = self.runs[run as usize].parent;
        let head = self.add_run(hashes, parent);
        if parent != NIL {
            self.runs[parent as usize].children -= 1;
        }
        self.runs[head as usize].children = 1;
        self.runs[run as usize].hashes = tail;
        self.runs[run as usize].parent = head;
        self.index_head(run);

        let at = at as u32;
        let holds = std::mem::take(&mut self.runs[run as usize].holds);
        self.bytes -= holds.capacity() * HOLD_BYTES;
        for hold in holds {
            if hold.depth > at {
                self.push_hold(run, Hold { depth: hold.depth - at, ..hold });
                self.note_lost(hold.endpoint, at);
                // As old as the hold it was split from, and evicted right after it.
                let position = self.add_hold(head, hold.endpoint, at, hold.touched);
                let link = self.runs[head as usize].holds[position].link;
                self.unlink(link);
                self.link_newer_than(link, hold.link);
            } else {
                self.links[hold.link as usize].run = head;
                self.push_hold(head, hold);
            }
        }
        // The second part may have no holder.
        self.release(run);
        head
    }

    /// Adds a hold as the newest in the LRU list; returns its position in the run.
    fn add_hold(&mut self, run: u32, endpoint: EndpointId, depth: u32, touched: Nanos) -> usize {
        let new = Link { run, endpoint, older: NIL, newer: NIL };
        let link = if self.free_link == NIL {
            grow_by_an_eighth(&mut self.links);
            self.links.push(new);
            (self.links.len() - 1) as u32
        } else {
            let link = self.free_link;
            self.free_link = self.links[link as usize].older;
            self.links[link as usize] = new;
            link
        };
        self.link_newest(link);
        self.bytes += LINK_BYTES;
        self.note_held(endpoint, depth);
        self.push_hold(run, Hold { touched, endpoint, depth, link })
    }

    /// Most runs have a single holder, a few have the whole fleet: capacity grows by a quarter.
    fn push_hold(&mut self, run: u32, hold: Hold) -> usize {
        let holds = &mut self.runs[run as usize].holds;
        let before = holds.capacity();
        if holds.len() == before {
            holds.reserve_exact(before / 4 + 1);
        }
        holds.push(hold);
        self.bytes += (holds.capacity() - before) * HOLD_BYTES;
        holds.len() - 1
    }

    /// Removes a hold from its run and from the LRU list, and frees the run if it was the last.
    fn remove_hold(&mut self, at: u32) {
        let Link { run, endpoint, .. } = self.links[at as usize];
        if let Some(position) = self.position(run, endpoint) {
            let holds = &mut self.runs[run as usize].holds;
            let (hold, before) = (holds.swap_remove(position), holds.capacity());
            if holds.len() < before / 4 {
                holds.shrink_to(holds.len() * 2);
            }
            self.bytes -= (before - holds.capacity()) * HOLD_BYTES;
            self.note_lost(hold.endpoint, hold.depth);
        }
        self.bytes -= LINK_BYTES;
        self.unlink(at);
        self.links[at as usize].run = NIL;
        self.links[at as usize].older = self.free_link;
        self.free_link = at;
        self.release(run);
    }

    fn evict(&mut self, now: Nanos) {
        while self.oldest != NIL && self.bytes > self.config.memory_bytes_max {
            self.remove_hold(self.oldest);
        }
        for _ in 0..EXPIRED_PER_INSERT {
            let Some(&Link { run, endpoint, .. }) = self.links.get(self.oldest as usize) else { break };
            let touched = self.position(run, endpoint).map(|at| self.runs[run as usize].holds[at].touched);
            if touched.is_none_or(|touched| now + ORIGIN - touched <= self.config.ttl) {
                break;
            }
            self.remove_hold(self.oldest);
        }
    }

    fn link_newest(&mut self, at: u32) {
        self.links[at as usize].older = self.newest;
        self.links[at as usize].newer = NIL;
        match self.newest {
            NIL => self.oldest = at,
            newest => self.links[newest as usize].newer = at,
        }
        self.newest = at;
    }

    fn link_newer_than(&mut self, at: u32, than: u32) {
        let newer = std::mem::replace(&mut self.links[than as usize].newer, at);
        self.links[at as usize].newer = newer;
        self.links[at as usize].older = than;
        match newer {
            NIL => self.newest = at,
            newer => self.links[newer as usize].older = at,
        }
    }

    fn unlink(&mut self, at: u32) {
        let Link { older, newer, .. } = self.links[at as usize];
        match older {
            NIL => self.oldest = newer,
            older => self.links[older as usize].newer = newer,
        }
        match newer {
            NIL => self.newest = older,
            newer => self.links[newer as usize].older = older,
        }
    }
}

/// Doubling would leave up to half of a large slab unused.
fn grow_by_an_eighth<T>(slab: &mut Vec<T>) {
    if slab.len() == slab.capacity() {
        slab.reserve_exact(slab.len() / 8 + 16);
    }
}

/// Number of equal leading hashes. Chained hashes are equal up to some point and different after it, so the end is
/// compared first and the point is then found by binary search.
fn common_len(a: &[BlockHash], b: &[BlockHash]) -> usize {
    let len = a.len().min(b.len());
    if len == 0 || a[len - 1] == b[len - 1] {
        return len;
    }
    let (mut same, mut different) = (0, len - 1);
    while same < different {
        let middle = same + (different - same) / 2;
        if a[middle] == b[middle] { same = middle + 1 } else { different = middle }
    }
    same
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::super::oracle::OracleIndex;
    use super::*;
    use crate::block::ChainSeed;

    pub(super) const ROOMY: Config = Config { memory_bytes_max: usize::MAX, ttl: Nanos::MAX };

    pub(super) fn chain(text: &[u8]) -> Vec<BlockHash> {
        let mut out = Vec::new();
        ChainSeed::new("m", None, None).chain(text, 1, &mut out);
        out
    }

    pub(super) fn endpoint(n: u16) -> EndpointId {
        EndpointId::new(n, 0)
    }

    pub(super) fn lookup(index: &ApproxIndex, now: u64, text: &[u8]) -> BTreeMap<EndpointId, u32> {
        let mut overlap = Overlap::default();
        index.lookup(Nanos(now), &chain(text), &mut overlap);
        overlap.iter().collect()
    }

    /// Asserts the invariants that hold between any two calls.
    pub(super) fn check(index: &ApproxIndex) {
        let live: Vec<u32> =
            (0..index.runs.len() as u32).filter(|&r| !index.runs[r as usize].hashes.is_empty()).collect();
        assert_eq!(index.heads.len(), live.len());
        let (mut bytes, mut blocks, mut held) = (0, 0, BTreeMap::new());
        let mut by_slot = BTreeMap::new();
        for &at in &live {
            let run = &index.runs[at as usize];
            bytes += RUN_BYTES + run.hashes.len() * BLOCK_BYTES + run.holds.capacity() * HOLD_BYTES;
            assert!(!run.holds.is_empty(), "a run without holds is freed");
            assert_eq!(
                run.children as usize,
                live.iter().filter(|&&c| index.runs[c as usize].parent == at).count()
            );
            for &Hold { endpoint, depth, link, touched } in &run.holds {
                let back = index.links[link as usize];
                assert_eq!((back.run, back.endpoint), (at, endpoint));
                assert!(depth >= 1 && depth as usize <= run.hashes.len());
                bytes += LINK_BYTES;
                blocks += u64::from(depth);
                *by_slot.entry(endpoint.slot()).or_insert(0) += u64::from(depth);
                assert!(held.insert(link, touched).is_none());
                if run.parent != NIL {
                    let parent = &index.runs[run.parent as usize];
                    let before =
                        index.position(run.parent, endpoint).expect("a holder of a run holds its parent");
                    assert_eq!(parent.holds[before].depth as usize, parent.hashes.len());
                    assert!(parent.holds[before].touched >= touched);
                }
            }
        }
        assert_eq!((index.bytes, index.blocks_held), (bytes, blocks));
        for (slot, held) in index.held_by_slot.iter().enumerate() {
            assert_eq!(by_slot.get(&slot).unwrap_or(&0), held, "slot {slot}");
        }
        let (mut at, mut last) = (index.oldest, Nanos::ZERO);
        while at != NIL {
            let touched = held.remove(&at).expect("each hold appears once");
            assert!(touched >= last, "the LRU list is ordered by time");
            last = touched;
            at = index.links[at as usize].newer;
        }
        assert!(held.is_empty(), "every hold is in the LRU list");
    }

    #[test]
    fn a_prompt_matches_up_to_where_it_branches() {
        let mut index = ApproxIndex::new(ROOMY);
        index.insert(Nanos(1), &chain(b"aaaabbbb"), endpoint(0));
        index.insert(Nanos(2), &chain(b"aaaacc"), endpoint(1));
        check(&index);
        assert_eq!(lookup(&index, 3, b"aaaabbxx"), [(endpoint(0), 6), (endpoint(1), 4)].into());
        assert_eq!(lookup(&index, 3, b"xaaa"), [].into());
        assert_eq!(lookup(&index, 3, b""), [].into());
    }

    #[test]
    fn a_growing_conversation_stays_one_run() {
        let mut index = ApproxIndex::new(ROOMY);
        for turn in 1..20 {
            index.insert(Nanos(turn), &chain(&vec![b'a'; turn as usize * 7]), endpoint(3));
        }
        check(&index);
        assert_eq!(index.heads.len(), 1);
        assert_eq!(lookup(&index, 20, &[b'a'; 200]), [(endpoint(3), 133)].into());
    }

    #[test]
    fn an_entry_expires_after_its_ttl_unless_it_is_used() {
        let mut index = ApproxIndex::new(Config { ttl: Nanos(10), ..ROOMY });
        index.insert(Nanos(0), &chain(b"aaaa"), endpoint(0));
        index.insert(Nanos(8), &chain(b"aa"), endpoint(0));
        index.insert(Nanos(8), &chain(b"bbbb"), endpoint(0));
        assert_eq!(lookup(&index, 18, b"bbbb").len(), 1);
        assert_eq!(lookup(&index, 19, b"bbbb").len(), 0, "expired, though still stored");
        index.insert(Nanos(30), &chain(b"c"), endpoint(0));
        check(&index);
        assert_eq!(index.blocks_held(), 1);
    }

    #[test]
    fn a_prompt_does_not_renew_what_lies_behind_its_end() {
        let mut index = ApproxIndex::new(Config { ttl: Nanos(10), ..ROOMY });
        index.insert(Nanos(0), &chain(b"aaaaaaaa"), endpoint(0));
        index.insert(Nanos(9), &chain(b"aa"), endpoint(0));
        check(&index);
        assert_eq!(lookup(&index, 12, b"aaaaaaaa"), [(endpoint(0), 2)].into());
    }

    /// Invariant: No operation of the prefix index visits all entries.
    ///
    /// Also held by `an_endpoint_is_removed_in_slices_while_others_come_in_between`.
    #[test]
    fn after_a_lull_one_insert_removes_few_and_many_remove_all() {
        let mut index = ApproxIndex::new(Config { ttl: Nanos(10), ..ROOMY });
        let prompts = EXPIRED_PER_INSERT as u64 * 3;
        (0..prompts).for_each(|n| index.insert(Nanos(0), &chain(&n.to_le_bytes()), endpoint(0)));
        let before = index.links.len() as u64;
        index.insert(Nanos(99), &chain(b"z"), endpoint(0));
        let live = |index: &ApproxIndex| index.links.iter().filter(|link| link.run != NIL).count() as u64;
        assert_eq!(live(&index), before + 1 - EXPIRED_PER_INSERT as u64);
        (0..8).for_each(|_| index.insert(Nanos(99), &chain(b"z"), endpoint(0)));
        check(&index);
        assert_eq!(live(&index), 1);
    }

    #[test]
    fn an_endpoint_is_removed_in_slices_while_others_come_in_between() {
        let mut index = ApproxIndex::new(ROOMY);
        for n in 0..REMOVED_PER_CALL as u64 {
            index.insert(Nanos(n), &chain(&n.to_le_bytes()), endpoint((n % 3) as u16));
        }
        let (mut from, mut calls) = (Some(0), 0);
        while let Some(at) = from {
            from = index.remove_endpoint(endpoint(1), at);
            calls += 1;
            index.insert(Nanos(9999), &chain(&[calls; 9]), endpoint(2));
        }
        assert!(calls > 1);
        check(&index);
        assert!(index.links.iter().all(|link| link.run == NIL || link.endpoint != endpoint(1)));
    }

    #[test]
    fn the_least_recently_used_prefix_goes_first_and_memory_stays_bounded() {
        let one = {
            let mut index = ApproxIndex::new(ROOMY);
            index.insert(Nanos(1), &chain(b"aaaa"), endpoint(0));
            index.bytes()
        };
        let mut index = ApproxIndex::new(Config { memory_bytes_max: one * 2, ..ROOMY });
        index.insert(Nanos(1), &chain(b"aaaa"), endpoint(0));
        index.insert(Nanos(2), &chain(b"bbbb"), endpoint(0));
        index.insert(Nanos(3), &chain(b"aaaa"), endpoint(0));
        index.insert(Nanos(4), &chain(b"cccc"), endpoint(0));
        check(&index);
        assert_eq!(lookup(&index, 5, b"bbbb"), [].into());
        assert_eq!(lookup(&index, 5, b"aaaa").len() + lookup(&index, 5, b"cccc").len(), 2);
    }

    #[test]
    fn a_prompt_larger_than_the_whole_index_is_not_kept() {
        let mut index = ApproxIndex::new(Config { memory_bytes_max: 100, ..ROOMY });
        index.insert(Nanos(1), &chain(&[7; 1000]), endpoint(0));
        check(&index);
        assert_eq!(index.bytes(), 0);
    }

    #[derive(Clone, Debug)]
    enum Op {
        Insert(Vec<u8>, u16),
        Leave(u16),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let text = prop::collection::vec(0u8..3, 1..12);
        let op = prop_oneof![
            12 => (text, 0u16..4).prop_map(|(text, e)| Op::Insert(text, e)),
            1 => (0u16..4).prop_map(Op::Leave),
        ];
        prop::collection::vec(op, 1..60)
    }

    proptest! {
        /// Invariant: With enough memory the prefix index equals the naive index for any order of inserts and
        /// removals.
        ///
        /// Also held by `with_room_exactly_what_was_used_lately_is_held`.
        #[test]
        fn with_room_it_equals_the_naive_index(ops in ops(), probe in prop::collection::vec(0u8..3, 0..14)) {
            let (mut index, mut oracle) = (ApproxIndex::new(ROOMY), OracleIndex::default());
            for (now, op) in ops.into_iter().enumerate() {
                match op {
                    Op::Insert(text, e) => {
                        index.insert(Nanos(now as u64), &chain(&text), endpoint(e));
                        oracle.insert(&chain(&text), endpoint(e));
                    }
                    Op::Leave(e) => {
                        assert_eq!(index.remove_endpoint(endpoint(e), 0), None);
                        oracle.remove_endpoint(endpoint(e));
                    }
                }
                check(&index);
                prop_assert_eq!(lookup(&index, now as u64, &probe), oracle.lookup(&chain(&probe)));
            }
        }

        #[test]
        fn with_room_exactly_what_was_used_lately_is_held(
            ops in ops(),
            ttl in 1u64..30,
            probe in prop::collection::vec(0u8..3, 0..14),
        ) {
            let mut index = ApproxIndex::new(Config { ttl: Nanos(ttl), ..ROOMY });
            let mut used: BTreeMap<(EndpointId, BlockHash), u64> = BTreeMap::new();
            for (now, op) in ops.into_iter().enumerate() {
                let now = now as u64;
                let Op::Insert(text, e) = op else { continue };
                index.insert(Nanos(now), &chain(&text), endpoint(e));
                used.extend(chain(&text).into_iter().map(|block| ((endpoint(e), block), now)));
                check(&index);
                let fresh = |e, block| used.get(&(e, block)).is_some_and(|used| now - used <= ttl);
                let leading = |e| chain(&probe).into_iter().take_while(|&block| fresh(e, block)).count() as u32;
                let expect: BTreeMap<_, _> =
                    (0..4).map(endpoint).map(|e| (e, leading(e))).filter(|&(_, blocks)| blocks > 0).collect();
                prop_assert_eq!(lookup(&index, now, &probe), expect);
            }
        }

        /// Invariant: Short of memory, the prefix index stays within its limit, evicts, and never reports a block
        /// that was not inserted.
        ///
        /// Also held by `the_least_recently_used_prefix_goes_first_and_memory_stays_bounded`.
        #[test]
        fn when_short_of_room_it_forgets_but_never_invents(ops in ops(), bytes in 0usize..1500, ttl in 1u64..40) {
            let mut index = ApproxIndex::new(Config { memory_bytes_max: bytes, ttl: Nanos(ttl) });
            let mut oracle = OracleIndex::default();
            for (now, op) in ops.into_iter().enumerate() {
                let Op::Insert(text, e) = op else { continue };
                index.insert(Nanos(now as u64), &chain(&text), endpoint(e));
                oracle.insert(&chain(&text), endpoint(e));
                check(&index);
                prop_assert!(index.bytes() <= bytes);
                let all = oracle.lookup(&chain(&text));
                for (id, blocks) in lookup(&index, now as u64, &text) {
                    prop_assert!(blocks <= all[&id]);
                }
            }
        }
    }
}
