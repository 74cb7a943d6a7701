//! What engines say they hold: every block with its holders, kept by the engines' own events.
//!
//! A block is held where an engine has stored it, in any tier, and has not removed every copy of it. Events of one
//! endpoint have to be applied in order; how they get here in order is the driver's business.
//!
//! Two parts. Per endpoint, a table from the engine's names to the blocks' places ([`names`]). For all endpoints
//! together, blocks in the order of their prompts, in runs of up to 64, with one bit for each block and holder ([`runs`]).
//! A lookup goes from run to run and asks for 64 blocks at a time; within the last run it halves. Since there is a bit
//! for every block, it is exact also where an engine has lost a block in the middle of a prompt: its prefix ends there,
//! and goes on when the block is stored again.
//!
//! An endpoint's table is behind a lock of its own, the runs are in shards behind one lock each, and whoever holds
//! several holds the table's and one shard's. A lookup takes shards' locks only, one at a time, to read.

mod names;
mod runs;
mod search;
mod snapshot;
mod storing;
mod writer;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use self::names::{Copies, Key, Names};
use self::runs::{Place, SHARDS, Shard, shard_of};
use self::search::Search;
use self::storing::{AT_ONCE, Storing};
use self::writer::Writer;
use super::Overlap;
use crate::abort_on_panic::AbortOnPanicGuard;
use crate::block::{BlockHash, ChainSeed, ContentHash};
use crate::endpoint::EndpointId;
use crate::event::{EngineHash, KvEvent, StoredBlock, Tier};

/// Limits of the index.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Bytes it may use; beyond that nothing more is taken in, and what is refused is counted.
    pub memory_bytes_max: usize,
}

/// Blocks and who holds them. Shared by those who look up and those who apply. See the module.
#[derive(Debug)]
pub struct ExactIndex {
    budget: Budget,
    /// What each endpoint holds, by slot.
    slots: Box<[OnceLock<Slots>]>,
    shards: Box<[RwLock<Shard>]>,
}

type Slots = Box<[Mutex<Holder>]>;

/// What an event said that the index could not follow. All zero when endpoint and index agree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Blocks taken in.
    pub stored: u32,
    /// Blocks let go.
    pub removed: u32,
    /// Names of blocks that are not known here.
    pub unknown: u32,
    /// Blocks that were refused for want of memory.
    pub refused: u32,
}

/// Bytes in use and how many there may be.
#[derive(Debug)]
struct Budget {
    used: AtomicUsize,
    max: AtomicUsize,
}

/// What one endpoint holds.
#[derive(Debug, Default)]
struct Holder {
    id: Option<EndpointId>,
    names: Names,
    /// Blocks that came after one that the endpoint does not hold. They cannot be part of any prefix before that one
    /// comes too; then they get their places.
    orphans: BTreeMap<EngineHash, Orphan>,
    /// Orphans by what they wait for.
    waiting: BTreeSet<(EngineHash, EngineHash)>,
    /// How many names more than one there are of a block.
    more_names: BTreeMap<Place, u32>,
    /// The block that was stored last: mostly the parent of the next.
    last: Option<Last>,
}

#[derive(Clone, Copy, Debug)]
struct Orphan {
    hash: BlockHash,
    parent: EngineHash,
    copies: Copies,
}

#[derive(Clone, Copy, Debug)]
struct Last {
    name: EngineHash,
    place: Place,
    hash: BlockHash,
}

/// Slots that get their memory together.
const SLOTS: usize = 64;
/// What one orphan costs in its two trees, of which nodes are half full at least.
const ORPHAN_BYTES: usize = 2 * size_of::<(EngineHash, Orphan)>() + 2 * size_of::<(EngineHash, EngineHash)>();
/// What a further name of a block costs.
const NAME_BYTES: usize = 2 * size_of::<(Place, u32)>();

// === impl ExactIndex ===

impl ExactIndex {
    /// An empty index.
    pub fn new(config: Config) -> Self {
        let slots: Box<[_]> = (0..=usize::from(u16::MAX) / SLOTS).map(|_| OnceLock::new()).collect();
        let shards: Box<[_]> = (0..SHARDS).map(|_| RwLock::default()).collect();
        let bytes = size_of_val(&*slots) + size_of_val(&*shards);
        let budget = Budget { used: AtomicUsize::new(bytes), max: AtomicUsize::new(config.memory_bytes_max) };
        Self { budget, slots, shards }
    }

    /// Other limits from here on. What is beyond them stays, and nothing is taken in until it is gone.
    pub fn configure(&self, config: Config) {
        self.budget.max.store(config.memory_bytes_max, Ordering::Relaxed);
    }

    /// Our hash of the block that `endpoint` calls `name`, if it holds it.
    pub fn hash_of(&self, endpoint: EndpointId, name: EngineHash) -> Option<BlockHash> {
        let holder = self.holder(endpoint)?;
        if let Some(last) = holder.last.filter(|last| last.name == name) {
            return Some(last.hash);
        }
        match holder.names.get(Key::of(name)) {
            Some((place, _)) => self.writer(endpoint).hash(place),
            None => holder.orphans.get(&name).map(|orphan| orphan.hash),
        }
    }

    /// Applies what `endpoint` says has changed. What an endpoint says that has had its successor in its slot is ignored.
    pub fn apply(&self, endpoint: EndpointId, event: &KvEvent) -> Applied {
        match event {
            KvEvent::Stored { parent, blocks, tier } => self.store(endpoint, *parent, blocks, *tier),
            KvEvent::Copied { blocks, tier } => self.copy(endpoint, blocks, *tier),
            KvEvent::Removed { blocks, tier } => self.remove(endpoint, blocks, *tier),
            KvEvent::Cleared => {
                if let Some(mut holder) = self.enter(endpoint) {
                    self.clear(endpoint, &mut holder);
                }
                Applied::default()
            }
        }
    }

    /// Applies [`KvEvent::Stored`].
    pub fn store(
        &self,
        endpoint: EndpointId,
        parent: Option<EngineHash>,
        blocks: &[StoredBlock],
        tier: Tier,
    ) -> Applied {
        let Some(mut holder) = self.enter(endpoint) else { return Applied::default() };
        let mut storing = Storing::new(self, endpoint, &mut holder, tier, parent);
        storing.reserve(blocks.len());
        let mut left = blocks.len();
        for blocks in blocks.chunks(AT_ONCE) {
            left -= blocks.len();
            let mut hashes = [BlockHash(0); AT_ONCE];
            hashes.iter_mut().zip(blocks).for_each(|(hash, block)| *hash = block.hash);
            storing.blocks(blocks.iter().map(|block| block.name), &hashes[..blocks.len()], left);
        }
        storing.end()
    }

    /// As [`ExactIndex::store`], for blocks of which only the content is known: their hashes are chained here, to the
    /// parent's. If `endpoint` does not hold the parent, nothing is stored, and all blocks are counted as unknown.
    pub fn store_contents(
        &self,
        endpoint: EndpointId,
        seed: ChainSeed,
        parent: Option<EngineHash>,
        blocks: &[(EngineHash, ContentHash)],
        tier: Tier,
    ) -> Applied {
        let Some(mut holder) = self.enter(endpoint) else { return Applied::default() };
        let mut storing = Storing::new(self, endpoint, &mut holder, tier, parent);
        let mut before = storing.hash_before();
        if before.is_none() && parent.is_some() {
            return Applied { unknown: blocks.len() as u32, ..Applied::default() };
        }
        storing.reserve(blocks.len());
        let mut left = blocks.len();
        for blocks in blocks.chunks(AT_ONCE) {
            left -= blocks.len();
            let mut hashes = [BlockHash(0); AT_ONCE];
            for (hash, &(_, content)) in hashes.iter_mut().zip(blocks) {
                *hash = seed.next(before, content);
                before = Some(*hash);
            }
            storing.blocks(blocks.iter().map(|(name, _)| *name), &hashes[..blocks.len()], left);
        }
        storing.end()
    }

    /// Applies [`KvEvent::Copied`].
    fn copy(&self, endpoint: EndpointId, names: &[EngineHash], tier: Tier) -> Applied {
        let mut applied = Applied::default();
        let Some(mut holder) = self.enter(endpoint) else { return applied };
        for &name in names {
            let counted = match holder.names.find(Key::of(name)) {
                Some(at) => holder.names.add_copy(at, tier),
                None => match holder.orphans.get_mut(&name) {
                    Some(orphan) => orphan.copies.add(tier),
                    None => {
                        applied.unknown += 1;
                        continue;
                    }
                },
            };
            applied.stored += u32::from(counted);
            applied.refused += u32::from(!counted);
        }
        applied
    }

    /// Applies [`KvEvent::Removed`].
    pub fn remove(&self, endpoint: EndpointId, names: &[EngineHash], tier: Tier) -> Applied {
        let mut applied = Applied::default();
        let Some(mut holder) = self.enter(endpoint) else { return applied };
        let holder = &mut *holder;
        let mut writer = self.writer(endpoint);
        holder.last = None;
        for &name in names {
            let known = match holder.names.find(Key::of(name)) {
                Some(at) => {
                    let mut copies = holder.names.copies(at);
                    let known = copies.take(tier);
                    if copies.none() {
                        let place = holder.names.place(at);
                        holder.names.remove(at);
                        if !holder.has_other_name(place, &self.budget) {
                            writer.let_go(place.run, 1 << place.offset);
                        }
                    } else {
                        holder.names.set_copies(at, copies);
                    }
                    known
                }
                None => holder.remove_orphan(name, tier, &self.budget),
            };
            applied.removed += u32::from(known);
            applied.unknown += u32::from(!known);
        }
        holder.names.shrink(&self.budget);
        applied
    }

    /// How many leading blocks of `chain` each endpoint holds, in any tier.
    pub fn lookup(&self, chain: &[BlockHash], overlap: &mut Overlap) {
        overlap.clear();
        let mut search = Search::new(chain, std::mem::take(&mut overlap.scratch));
        let mut at = chain.first().map(|&first| shard_of(first));
        while let Some(shard) = at {
            let runs = self.shards[shard].read().unwrap_or_else(PoisonError::into_inner);
            at = search.through(shard, &runs, overlap);
        }
        overlap.scratch = search.end(overlap);
    }

    /// Forgets all that an endpoint holds, and the endpoint: what is said of it later counts as a new one's.
    pub fn remove_endpoint(&self, endpoint: EndpointId) {
        if let Some(mut holder) = self.enter(endpoint) {
            self.clear(endpoint, &mut holder);
        }
    }

    /// Pairs of block and holder.
    pub fn blocks_held(&self) -> u64 {
        let holders = self.slots.iter().filter_map(OnceLock::get).flatten();
        holders.map(|holder| lock(holder).len()).sum()
    }

    /// Blocks that one endpoint holds.
    pub fn blocks_of(&self, endpoint: EndpointId) -> u64 {
        self.holder(endpoint).map_or(0, |holder| holder.len())
    }

    /// Bytes in use, as counted against [`Config::memory_bytes_max`].
    pub fn bytes(&self) -> usize {
        self.budget.used.load(Ordering::Relaxed)
    }

    fn writer(&self, endpoint: EndpointId) -> Writer<'_> {
        Writer::new(&self.shards, &self.budget, endpoint)
    }

    /// What `endpoint` holds, if it is the one that was heard of last in its slot.
    fn holder(&self, endpoint: EndpointId) -> Option<MutexGuard<'_, Holder>> {
        let slots = self.slots[endpoint.slot() / SLOTS].get()?;
        let holder = lock(&slots[endpoint.slot() % SLOTS]);
        (holder.id == Some(endpoint)).then_some(holder)
    }

    /// As [`ExactIndex::holder`], for an event: what an older endpoint in the slot left behind goes first.
    fn enter(&self, endpoint: EndpointId) -> Option<AbortOnPanicGuard<MutexGuard<'_, Holder>>> {
        let slots = self.slots[endpoint.slot() / SLOTS].get_or_init(|| {
            let slots: Slots = (0..SLOTS).map(|_| Mutex::default()).collect();
            self.budget.used.fetch_add(size_of_val(&*slots), Ordering::Relaxed);
            slots
        });
        let mut holder = AbortOnPanicGuard::of(lock(&slots[endpoint.slot() % SLOTS]));
        match holder.id {
            Some(id) if id == endpoint => {}
            Some(id) if endpoint.is_before(id) => return None,
            older => {
                if let Some(older) = older {
                    self.clear(older, &mut holder);
                }
                holder.id = Some(endpoint);
            }
        }
        Some(holder)
    }

    /// Visits what the endpoint holds, and nothing else, run by run.
    fn clear(&self, endpoint: EndpointId, holder: &mut Holder) {
        let mut places: Vec<Place> = holder.names.iter().map(|(_, place, _)| place).collect();
        places.sort_unstable();
        let mut writer = self.writer(endpoint);
        for blocks in places.chunk_by(|a, b| a.run == b.run) {
            writer.let_go(blocks[0].run, blocks.iter().fold(0, |all, place| all | 1 << place.offset));
        }
        holder.names.clear(&self.budget);
        self.budget
            .give(holder.orphans.len() * ORPHAN_BYTES + holder.more_names.values().count() * NAME_BYTES);
        *holder = Holder { id: holder.id, ..Holder::default() };
    }
}

fn lock(holder: &Mutex<Holder>) -> MutexGuard<'_, Holder> {
    holder.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl Budget ===

impl Budget {
    /// Takes so many bytes if there are as many.
    #[must_use]
    fn take(&self, bytes: usize) -> bool {
        if bytes == 0 {
            return true;
        }
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        let fits = before.checked_add(bytes).is_some_and(|used| used <= self.max.load(Ordering::Relaxed));
        if !fits {
            self.give(bytes);
        }
        fits
    }

    fn give(&self, bytes: usize) {
        if bytes > 0 {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    /// `actual` bytes are used where `taken` were expected.
    fn correct(&self, taken: usize, actual: usize) {
        if actual >= taken {
            self.used.fetch_add(actual - taken, Ordering::Relaxed);
        } else {
            self.give(taken - actual);
        }
    }
}

// === impl Holder ===

impl Holder {
    fn len(&self) -> u64 {
        (self.names.len() + self.orphans.len()) as u64
    }

    /// Whether a block that has lost a name has another one.
    fn has_other_name(&mut self, place: Place, budget: &Budget) -> bool {
        if self.more_names.is_empty() {
            return false;
        }
        let Some(more) = self.more_names.get_mut(&place) else { return false };
        *more -= 1;
        if *more == 0 {
            self.more_names.remove(&place);
            budget.give(NAME_BYTES);
        }
        true
    }

    fn add_orphan(&mut self, name: EngineHash, orphan: Orphan, budget: &Budget) -> bool {
        let fits = budget.take(ORPHAN_BYTES);
        if fits {
            self.waiting.insert((orphan.parent, name));
            self.orphans.insert(name, orphan);
        }
        fits
    }

    fn take_orphan(&mut self, name: EngineHash, budget: &Budget) -> Option<Orphan> {
        let orphan = self.orphans.remove(&name)?;
        self.waiting.remove(&(orphan.parent, name));
        budget.give(ORPHAN_BYTES);
        Some(orphan)
    }

    /// False if there is no such copy.
    fn remove_orphan(&mut self, name: EngineHash, tier: Tier, budget: &Budget) -> bool {
        let Some(orphan) = self.orphans.get_mut(&name) else { return false };
        let known = orphan.copies.take(tier);
        if orphan.copies.none() {
            self.take_orphan(name, budget);
        }
        known
    }

    fn waiting_for(&self, parent: EngineHash) -> Option<EngineHash> {
        let all = (parent, EngineHash(0))..=(parent, EngineHash(u64::MAX));
        self.waiting.range(all).next().map(|&(_, name)| name)
    }
}

#[cfg(test)]
mod tests;
