//! Runs: blocks in prompt order, each with its holders. Shared by all endpoints.
//!
//! A *run* is up to 64 consecutive blocks. It can start at any position and ends at the latest with its *span* of 64
//! positions. Where prompts diverge, the new branch is a run of its own: runs are never split, so a block keeps its
//! place as long as it has a holder. One bit per block and endpoint records the holders, so an endpoint that has evicted
//! a block in the middle is distinguished from one that has not. A second bit, for holders that have any such block, records
//! that the endpoint has the block only below the GPU.
//!
//! Runs are found by their first block. Since hashes are chained, the first block of a run identifies everything before
//! it.

use foldhash::fast::FixedState;
use hashbrown::{HashMap, HashTable};

use super::Budget;
use crate::block::BlockHash;
use crate::endpoint::EndpointId;

/// Positions per span; a run ends at a span's end. One bit each in [`Hold::blocks`].
pub(super) const SPAN: u32 = 64;
/// Positions within which a run that continues another at a span's end is in the same shard, so that a lookup locks
/// once for all of them.
pub(super) const GROUP: u32 = 1024;
pub(super) const SHARDS: usize = 1 << SHARD_BITS;
const SHARD_BITS: u32 = 6;
/// Most runs per shard.
const RUNS_MAX: usize = 1 << (u32::BITS - SHARD_BITS);
/// Runs allocated together.
const CHUNK: usize = 32;
/// Smallest growth of a run's hash capacity.
const HASHES_MIN: usize = 8;

/// Bytes reserved for a shard's first table of heads.
const HEADS_MIN: usize = 256;

/// Identifies a run as long as it has holders or children.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RunId(u32);

/// The place of a block. It does not change while the block has a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) run: RunId,
    pub(super) offset: u32,
}

/// The blocks of a run that one endpoint holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hold {
    /// Bit n is the n-th block. Never zero while in use.
    pub(super) blocks: u64,
    pub(super) endpoint: EndpointId,
}

#[derive(Debug)]
pub(super) struct Run {
    /// Never empty while in use. Blocks without a holder keep their place.
    hashes: Vec<BlockHash>,
    /// Holders by endpoint, if there are at most two.
    few: [Hold; 2],
    /// Holders by endpoint, if there are more.
    many: Vec<Hold>,
    /// The parent run; also the next free run.
    parent: Option<RunId>,
    /// Position of the first block.
    pub(super) start: u32,
    /// Number of child runs.
    pub(super) children: u32,
}

/// The start of a run.
#[derive(Clone, Copy, Debug)]
struct Head {
    hash: BlockHash,
    start: u32,
    run: u32,
}

/// Runs behind one lock.
#[derive(Debug, Default)]
pub(super) struct Shard {
    chunks: Vec<Vec<Run>>,
    heads: HashTable<Head>,
    free: Option<RunId>,
    /// By the index of a run: of the blocks that endpoints hold, those that are only below the GPU, by endpoint. No list is
    /// empty. Most engines have no lower tier, so runs have no room for this: with 8 bytes more in each of them, events and
    /// lookups took 5 to 8 % longer.
    lower: HashMap<u32, Vec<Hold>, FixedState>,
}

const NOBODY: Hold = Hold { blocks: 0, endpoint: EndpointId::new(0, 0) };

/// The shard of a block's run, unless the run continues one that ended with its span.
pub(super) fn shard_of(hash: BlockHash) -> usize {
    (spread(hash) >> (u64::BITS - SHARD_BITS)) as usize
}

/// Fibonacci hashing (Knuth, The Art of Computer Programming 6.4): our hashes are evenly distributed already, those of
/// tests are not.
fn spread(BlockHash(hash): BlockHash) -> u64 {
    (hash ^ (hash >> 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// The hash in a shard's table, without the bits that chose the shard, which are equal within it.
fn spread_in_shard(hash: BlockHash) -> u64 {
    spread(hash).rotate_left(SHARD_BITS) >> 2
}

/// The shard of the run that begins at `position` with `hash`, after a run in shard `before`.
pub(super) fn next_shard(before: usize, position: u32, hash: BlockHash) -> usize {
    match position.is_multiple_of(SPAN) && !position.is_multiple_of(GROUP) {
        true => before,
        false => shard_of(hash),
    }
}

// === impl RunId ===

impl RunId {
    fn new(shard: usize, index: u32) -> Self {
        Self(index << SHARD_BITS | shard as u32)
    }

    pub(super) fn shard(self) -> usize {
        self.0 as usize % SHARDS
    }

    fn index(self) -> u32 {
        self.0 >> SHARD_BITS
    }
}

// === impl Place ===

impl Place {
    /// Packed into 38 bits.
    pub(super) fn bits(self) -> u64 {
        u64::from(self.run.0) << 6 | u64::from(self.offset)
    }

    pub(super) fn from_bits(bits: u64) -> Self {
        Self { run: RunId((bits >> 6) as u32), offset: bits as u32 % SPAN }
    }
}

// === impl Run ===

impl Run {
    pub(super) fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    pub(super) fn parent(&self) -> Option<RunId> {
        self.parent
    }

    /// The position after its last block.
    pub(super) fn end(&self) -> u32 {
        self.start + self.hashes.len() as u32
    }

    /// All holders of any of its blocks, by endpoint.
    #[inline]
    pub(super) fn holds(&self) -> &[Hold] {
        if self.many.is_empty() {
            let few = usize::from(self.few[0].blocks != 0) + usize::from(self.few[1].blocks != 0);
            &self.few[..few]
        } else {
            &self.many
        }
    }

    /// Number of leading blocks of `chain` that it contains, given that it contains the first.
    #[inline]
    pub(super) fn common(&self, chain: &[BlockHash]) -> usize {
        let most = self.hashes.len().min(chain.len());
        if self.hashes[most - 1] == chain[most - 1] {
            return most;
        }
        // Chained hashes: where two are equal, all before them are equal.
        let (mut equal, mut differs) = (1, most - 1);
        while equal < differs {
            let middle = equal + (differs - equal) / 2;
            if self.hashes[middle] == chain[middle] {
                equal = middle + 1;
            } else {
                differs = middle;
            }
        }
        equal
    }

    /// Makes `endpoint` hold these blocks as well. Returns those that it held already; `None` if there is no memory.
    #[inline]
    pub(super) fn hold(&mut self, endpoint: EndpointId, blocks: u64, budget: &Budget) -> Option<u64> {
        if self.many.is_empty() {
            for hold in &mut self.few {
                if hold.endpoint == endpoint && hold.blocks != 0 {
                    let already = hold.blocks & blocks;
                    hold.blocks |= blocks;
                    return Some(already);
                }
            }
            let new = Hold { blocks, endpoint };
            if self.few[0].blocks == 0 {
                self.few[0] = new;
                return Some(0);
            }
            if self.few[1].blocks == 0 {
                self.few[1] = new;
                self.few.sort_unstable_by_key(|hold| hold.endpoint);
                return Some(0);
            }
        }
        match self.many.binary_search_by_key(&endpoint, |hold| hold.endpoint) {
            Ok(at) => {
                let already = self.many[at].blocks & blocks;
                self.many[at].blocks |= blocks;
                Some(already)
            }
            Err(_) => {
                let from = if self.many.is_empty() { &self.few[..] } else { &[] };
                let needed = self.many.len() + from.len() + 1;
                if needed > self.many.capacity() {
                    let capacity = needed + needed / 4;
                    if !budget.take((capacity - self.many.capacity()) * size_of::<Hold>()) {
                        return None;
                    }
                    self.many.reserve_exact(capacity - self.many.len());
                }
                self.many.extend_from_slice(from);
                self.few = [NOBODY; 2];
                let at = self.many.partition_point(|hold| hold.endpoint < endpoint);
                self.many.insert(at, Hold { blocks, endpoint });
                Some(0)
            }
        }
    }

    /// Removes `endpoint` as a holder of these blocks. Returns whether the run still has a holder.
    pub(super) fn remove_holder(&mut self, endpoint: EndpointId, blocks: u64, budget: &Budget) -> bool {
        if self.many.is_empty() {
            for hold in self.few.iter_mut().filter(|hold| hold.endpoint == endpoint) {
                hold.blocks &= !blocks;
            }
            if self.few[0].blocks == 0 {
                self.few.swap(0, 1);
            }
        } else if let Ok(at) = self.many.binary_search_by_key(&endpoint, |hold| hold.endpoint) {
            self.many[at].blocks &= !blocks;
            if self.many[at].blocks == 0 {
                self.many.remove(at);
                let before = self.many.capacity();
                if let [first, second] = self.many[..] {
                    self.few = [first, second];
                    self.many = Vec::new();
                } else if self.many.len() < before / 4 {
                    self.many.shrink_to(before / 2);
                }
                budget.give((before - self.many.capacity()) * size_of::<Hold>());
            }
        }
        !self.holds().is_empty()
    }

    /// Matches `hashes` with the run's blocks from the `from`-th on and appends missing ones, as far as the span has
    /// room and there is memory. Returns how many match. `more` blocks are likely to follow.
    #[inline]
    pub(super) fn extend(
        &mut self,
        from: usize,
        hashes: &[BlockHash],
        more: usize,
        budget: &Budget,
    ) -> usize {
        let len = self.hashes.len();
        let same = |(ours, theirs): &(&BlockHash, &BlockHash)| ours == theirs;
        let known = self.hashes[from..].iter().zip(hashes).take_while(same).count();
        if from + known < len {
            return known;
        }
        let room = (SPAN - self.start % SPAN) as usize;
        let new = &hashes[known..hashes.len().min(room - from)];
        if len + new.len() > self.hashes.capacity() {
            let capacity = (len + (new.len() + more).max(len / 2).max(HASHES_MIN)).min(room);
            if !budget.take((capacity - self.hashes.capacity()) * size_of::<BlockHash>()) {
                return known;
            }
            self.hashes.reserve_exact(capacity - len);
        }
        self.hashes.extend_from_slice(new);
        known + new.len()
    }
}

// === impl Shard ===

impl Shard {
    #[inline]
    pub(super) fn run(&self, run: RunId) -> &Run {
        let index = run.index() as usize;
        &self.chunks[index / CHUNK][index % CHUNK]
    }

    #[inline]
    pub(super) fn run_mut(&mut self, run: RunId) -> &mut Run {
        let index = run.index() as usize;
        &mut self.chunks[index / CHUNK][index % CHUNK]
    }

    /// Whether an endpoint holds a block of these runs only below the GPU.
    #[inline]
    pub(super) fn has_lower(&self) -> bool {
        !self.lower.is_empty()
    }

    /// Of the blocks that endpoints hold of a run, those that are only below the GPU, by endpoint.
    pub(super) fn lower(&self, run: RunId) -> &[Hold] {
        self.lower.get(&run.index()).map_or(&[], Vec::as_slice)
    }

    /// Notes that `endpoint` holds these blocks only below the GPU, or that it does not. Exceeds the memory budget if
    /// necessary: otherwise blocks in host memory would count as those on the GPU.
    #[cold]
    pub(super) fn set_lower(
        &mut self,
        run: RunId,
        Hold { blocks, endpoint }: Hold,
        is_lower: bool,
        budget: &Budget,
    ) {
        if !is_lower && self.lower(run).is_empty() {
            return;
        }
        let before = self.lower.allocation_size();
        let holds = self.lower.entry(run.index()).or_default();
        let capacity = holds.capacity();
        match holds.binary_search_by_key(&endpoint, |hold| hold.endpoint) {
            Ok(at) if is_lower => holds[at].blocks |= blocks,
            Ok(at) => {
                holds[at].blocks &= !blocks;
                if holds[at].blocks == 0 {
                    holds.remove(at);
                }
            }
            Err(at) if is_lower => holds.insert(at, Hold { blocks, endpoint }),
            Err(_) => {}
        }
        let mut kept = holds.capacity();
        if holds.is_empty() {
            kept = 0;
            self.lower.remove(&run.index());
        }
        if self.lower.is_empty() {
            self.lower = HashMap::default();
        }
        let after = self.lower.allocation_size() + kept * size_of::<Hold>();
        budget.correct(before + capacity * size_of::<Hold>(), after);
    }

    /// The run that begins at `start` with `hash`. `shard` is the index of this shard.
    #[inline]
    pub(super) fn find(&self, shard: usize, hash: BlockHash, start: u32) -> Option<RunId> {
        let is = |head: &Head| head.hash == hash && head.start == start;
        self.heads.find(spread_in_shard(hash), is).map(|head| RunId::new(shard, head.run))
    }

    /// Adds a run that begins at `start` with `hash`, without holders; `None` if there is no memory.
    pub(super) fn add(
        &mut self,
        shard: usize,
        hash: BlockHash,
        start: u32,
        parent: Option<RunId>,
        more: usize,
        budget: &Budget,
    ) -> Option<RunId> {
        let (hashes, many) = (Vec::new(), Vec::new());
        let mut new = Run { hashes, few: [NOBODY; 2], many, parent, start, children: 0 };
        if self.free.is_none() && self.chunks.last().is_none_or(|chunk| chunk.len() == CHUNK) {
            if self.chunks.len() == RUNS_MAX / CHUNK || !budget.take(CHUNK * size_of::<Run>()) {
                return None;
            }
            self.chunks.push(Vec::with_capacity(CHUNK));
        }
        let before = self.heads.allocation_size();
        // A full table doubles.
        let growth = if self.heads.len() == self.heads.capacity() { (2 * before).max(HEADS_MIN) } else { 0 };
        if !budget.take(growth) {
            return None;
        }
        if new.extend(0, &[hash], more, budget) == 0 {
            budget.give(growth);
            return None;
        }
        let run = match self.free {
            Some(run) => {
                self.free = self.run(run).parent;
                *self.run_mut(run) = new;
                run
            }
            None => {
                let chunk = self.chunks.len() - 1;
                self.chunks[chunk].push(new);
                RunId::new(shard, (chunk * CHUNK + self.chunks[chunk].len() - 1) as u32)
            }
        };
        let head = Head { hash, start, run: run.index() };
        self.heads.insert_unique(spread_in_shard(hash), head, |head| spread_in_shard(head.hash));
        budget.correct(growth, self.heads.allocation_size() - before);
        Some(run)
    }

    /// Frees a run without holders and children; returns its parent.
    pub(super) fn free(&mut self, run: RunId, budget: &Budget) -> Option<RunId> {
        let free = self.free;
        let freed = self.run_mut(run);
        debug_assert!(freed.holds().is_empty() && freed.children == 0);
        let hashes = std::mem::take(&mut freed.hashes);
        let parent = std::mem::replace(&mut freed.parent, free);
        budget.give(hashes.capacity() * size_of::<BlockHash>());
        if let Ok(head) = self.heads.find_entry(spread_in_shard(hashes[0]), |head| head.run == run.index()) {
            head.remove();
        }
        self.free = Some(run);
        parent
    }
}

#[cfg(test)]
impl Shard {
    /// Number of runs in use, and the bytes of this shard.
    pub(super) fn audit(&self) -> (usize, usize) {
        let runs = || self.chunks.iter().flatten();
        let used = runs().filter(|run| !run.hashes.is_empty());
        for run in used.clone() {
            assert!(
                !run.holds().is_empty() || run.children > 0,
                "a run in use has a holder or a child: {run:?}"
            );
            assert!(run.end() <= (run.start / SPAN + 1) * SPAN);
            assert!(run.holds().is_sorted_by_key(|hold| hold.endpoint));
            assert!(run.holds().iter().all(|hold| hold.blocks >> (run.hashes.len() - 1) <= 1));
        }
        assert_eq!(used.clone().count(), self.heads.len());
        let lists = runs().map(|run| {
            let many = run.many.capacity() * size_of::<Hold>();
            run.hashes.capacity() * size_of::<BlockHash>() + many
        });
        for (&run, lower) in &self.lower {
            assert!(!lower.is_empty() && lower.is_sorted_by_key(|hold| hold.endpoint));
            let run = &self.chunks[run as usize / CHUNK][run as usize % CHUNK];
            for Hold { blocks, endpoint } in lower {
                let hold = run.holds().iter().find(|hold| hold.endpoint == *endpoint).expect("a holder");
                assert!(*blocks != 0 && blocks & !hold.blocks == 0, "what is in a lower tier is held");
            }
        }
        let lower = self.lower.values().map(|holds| holds.capacity() * size_of::<Hold>()).sum::<usize>();
        let tables = self.heads.allocation_size() + self.lower.allocation_size();
        let chunks = self.chunks.len() * CHUNK * size_of::<Run>();
        (used.count(), chunks + lists.sum::<usize>() + lower + tables)
    }
}
