//! Exact prefix index: every block with its holders, kept up to date by the engines' KV events.
//!
//! A block is held by an endpoint that has stored it, in any tier, and has not removed every copy of it. Of these blocks,
//! those without a copy on the GPU are counted as well: the engine has to load them. Events of one
//! endpoint have to be applied in order; the driver is responsible for that order.
//!
//! The index has two parts. Per endpoint, a table from the engine's block names to places (`names`). For all
//! endpoints together, blocks in prompt order, in runs of up to 64, with one bit per block and holder (`runs`). A
//! lookup goes from run to run and checks 64 blocks at a time; within the last run it uses binary search. Since every
//! block has a bit, the index is exact even where an engine has evicted a block in the middle of a prompt: its prefix
//! ends there, and continues when the block is stored again.
//!
//! An endpoint's table has its own lock, and the runs are in shards with one lock each. A writer holds at most the
//! table's lock and one shard's lock. A lookup takes only shard locks, one at a time, for reading.

mod names;
mod runs;
mod search;
mod snapshot;
mod storing;
mod writer;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use self::names::{At, Copies, Key, Names};
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
    /// Memory limit in bytes; beyond it no block is added, and refused blocks are counted.
    pub memory_bytes_max: usize,
}

/// Blocks and their holders, shared by lookups and event writers. See the module documentation.
#[derive(Debug)]
pub struct ExactIndex {
    budget: Budget,
    /// Each endpoint's blocks, by slot.
    slots: Box<[OnceLock<Slots>]>,
    shards: Box<[RwLock<Shard>]>,
}

type Slots = Box<[Mutex<Holder>]>;

/// Result of applying an event. `unknown` and `refused` are zero when endpoint and index agree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Blocks added.
    pub stored: u32,
    /// Blocks removed.
    pub removed: u32,
    /// Block names that the index does not know.
    pub unknown: u32,
    /// Blocks refused for lack of memory.
    pub refused: u32,
}

/// Bytes in use and their limit.
#[derive(Debug)]
struct Budget {
    used: AtomicUsize,
    max: AtomicUsize,
}

/// One endpoint's blocks.
#[derive(Debug, Default)]
struct Holder {
    id: Option<EndpointId>,
    names: Names,
    /// Blocks whose parent the endpoint does not hold. They cannot be part of any prefix until the parent is stored;
    /// then they get their places.
    orphans: BTreeMap<EngineHash, Orphan>,
    /// Orphans by missing parent.
    waiting: BTreeSet<(EngineHash, EngineHash)>,
    /// Additional names of blocks.
    more_names: BTreeMap<Place, MoreNames>,
    /// The block stored last: usually the parent of the next.
    last: Option<Last>,
}

#[derive(Clone, Copy, Debug)]
struct Orphan {
    hash: BlockHash,
    parent: EngineHash,
    copies: Copies,
}

/// Names of a block that has more than one.
#[derive(Clone, Copy, Debug)]
struct MoreNames {
    /// All but one of them.
    more: u32,
    /// Those that have a copy on the GPU.
    on_gpu: u32,
}

#[derive(Clone, Copy, Debug)]
struct Last {
    name: EngineHash,
    place: Place,
    hash: BlockHash,
}

/// Slots allocated together.
const SLOTS: usize = 64;
/// Memory of one orphan in its two trees, whose nodes are at least half full.
const ORPHAN_BYTES: usize = 2 * size_of::<(EngineHash, Orphan)>() + 2 * size_of::<(EngineHash, EngineHash)>();
/// Memory of an additional name of a block.
const NAME_BYTES: usize = 2 * size_of::<(Place, MoreNames)>();

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

    /// Changes the limits. Contents beyond them stay, and no block is added until they are below.
    pub fn configure(&self, config: Config) {
        self.budget.max.store(config.memory_bytes_max, Ordering::Relaxed);
    }

    /// Our hash of the block that `endpoint` names `name`, if it holds it.
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

    /// Applies an event of `endpoint`. Events of an endpoint whose slot has been reused are ignored.
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

    /// Like [`ExactIndex::store`], for blocks given by content: their hashes are chained here to the parent's. If
    /// `endpoint` does not hold the parent, nothing is stored, and all blocks are counted as unknown.
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
        let mut writer = self.writer(endpoint);
        for &name in names {
            let counted = match holder.names.find(Key::of(name)) {
                Some(at) => holder.add_copy(at, tier, &mut writer),
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
                    let (place, mut copies) = (holder.names.place(at), holder.names.copies(at));
                    let was_on_gpu = copies.on_gpu();
                    let known = copies.take(tier);
                    let left_gpu = was_on_gpu && !copies.on_gpu();
                    if copies.none() {
                        holder.names.remove(at);
                        match holder.remove_name(place, left_gpu, &self.budget) {
                            Some(on_gpu) if left_gpu => writer.set_lower(place, !on_gpu),
                            Some(_) => {}
                            None => writer.remove_holder(place.run, 1 << place.offset),
                        }
                    } else {
                        holder.names.set_copies(at, copies);
                        if left_gpu {
                            holder.note_gpu(place, false, &mut writer);
                        }
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

    /// Sets how many leading blocks of `chain` each endpoint holds, in any tier, and how many of them only below the GPU.
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

    /// Removes an endpoint and all its blocks. Later events for it count as those of a new endpoint.
    pub fn remove_endpoint(&self, endpoint: EndpointId) {
        if let Some(mut holder) = self.enter(endpoint) {
            self.clear(endpoint, &mut holder);
        }
    }

    /// Number of pairs of block and holder.
    pub fn blocks_held(&self) -> u64 {
        let holders = self.slots.iter().filter_map(OnceLock::get).flatten();
        holders.map(|holder| lock(holder).len()).sum()
    }

    /// Number of blocks that one endpoint holds.
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

    /// The state of `endpoint`, if it is the current occupant of its slot.
    fn holder(&self, endpoint: EndpointId) -> Option<MutexGuard<'_, Holder>> {
        let slots = self.slots[endpoint.slot() / SLOTS].get()?;
        let holder = lock(&slots[endpoint.slot() % SLOTS]);
        (holder.id == Some(endpoint)).then_some(holder)
    }

    /// Like [`ExactIndex::holder`], for an event: first removes what an older endpoint left in the slot.
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

    /// Removes the endpoint's blocks, run by run, without visiting others.
    fn clear(&self, endpoint: EndpointId, holder: &mut Holder) {
        let mut places: Vec<Place> = holder.names.iter().map(|(_, place, _)| place).collect();
        places.sort_unstable();
        let mut writer = self.writer(endpoint);
        for blocks in places.chunk_by(|a, b| a.run == b.run) {
            writer.remove_holder(blocks[0].run, blocks.iter().fold(0, |all, place| all | 1 << place.offset));
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
    /// Takes `bytes` if that many are available.
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

    /// `actual` bytes are used where `taken` were reserved.
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

    /// A block has lost a name, and with it a copy on the GPU if `left_gpu`. If it has another name: whether it is on the
    /// GPU under any.
    fn remove_name(&mut self, place: Place, left_gpu: bool, budget: &Budget) -> Option<bool> {
        if self.more_names.is_empty() {
            return None;
        }
        let names = self.more_names.get_mut(&place)?;
        names.more -= 1;
        names.on_gpu -= u32::from(left_gpu);
        let MoreNames { more, on_gpu } = *names;
        if more == 0 {
            self.more_names.remove(&place);
            budget.give(NAME_BYTES);
        }
        Some(on_gpu > 0)
    }

    /// Adds a copy of a block; false if the counter is at its maximum.
    fn add_copy(&mut self, at: At, tier: Tier, writer: &mut Writer<'_>) -> bool {
        let was_on_gpu = self.names.copies(at).on_gpu();
        let counted = self.names.add_copy(at, tier);
        if tier == Tier::Gpu && !was_on_gpu {
            self.note_gpu(self.names.place(at), true, writer);
        }
        counted
    }

    /// Under one of its names, a block has got its first copy on the GPU or lost its last one.
    fn note_gpu(&mut self, place: Place, is_on_gpu: bool, writer: &mut Writer<'_>) {
        let is_lower = match self.more_names.get_mut(&place) {
            Some(names) if is_on_gpu => {
                names.on_gpu += 1;
                false
            }
            Some(names) => {
                names.on_gpu -= 1;
                names.on_gpu == 0
            }
            None => !is_on_gpu,
        };
        writer.set_lower(place, is_lower);
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

    /// Removes one copy of an orphan; false if there is no such copy.
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
