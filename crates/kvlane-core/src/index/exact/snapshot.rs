//! Export of an endpoint's blocks as KV events.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;

use super::names::{Copies, Key};
use super::runs::{Place, RunId};
use super::{ExactIndex, Holder};
use crate::block::BlockHash;
use crate::endpoint::EndpointId;
use crate::event::{EngineHash, KvEvent, StoredBlock, Tier};

/// The export of one endpoint's blocks, by place.
struct Snapshot<'a> {
    holder: &'a Holder,
    names: BTreeMap<Place, Vec<(EngineHash, Copies)>>,
    runs: BTreeMap<RunId, ExportedRun>,
    /// Invented names for evicted blocks in the middle of a prompt: they are stored first and removed at the end.
    lost: BTreeMap<Place, EngineHash>,
    invented: BTreeSet<EngineHash>,
}

/// The exported part of a run: up to the last block that is held or that a held block follows.
struct ExportedRun {
    hashes: Vec<BlockHash>,
    parent: Option<RunId>,
    start: u32,
}

// === impl ExactIndex ===

impl ExactIndex {
    /// All blocks that `endpoint` holds, parents before children, for a snapshot. Applied to an index where the
    /// endpoint holds nothing, the events reproduce its state.
    pub fn export(&self, endpoint: EndpointId) -> Vec<KvEvent> {
        let Some(holder) = self.holder(endpoint) else { return Vec::new() };
        let mut names: BTreeMap<Place, Vec<(EngineHash, Copies)>> = BTreeMap::new();
        for (name, place, copies) in holder.names.iter() {
            names.entry(place).or_default().push((name, copies));
        }
        let runs = self.exported_runs(names.keys().copied());
        let mut snapshot =
            Snapshot { holder: &holder, names, runs, lost: BTreeMap::new(), invented: BTreeSet::new() };
        snapshot.events()
    }

    /// The runs of these places and their ancestors, of which the endpoint may hold nothing.
    fn exported_runs(&self, places: impl Iterator<Item = Place>) -> BTreeMap<RunId, ExportedRun> {
        let mut runs: BTreeMap<RunId, ExportedRun> = BTreeMap::new();
        let mut open: Vec<Place> = places.collect();
        while let Some(Place { run, offset }) = open.pop() {
            let len = offset as usize + 1;
            if runs.get(&run).is_some_and(|exported| exported.hashes.len() >= len) {
                continue;
            }
            let exported = self.export_run(run, len);
            if let Some(parent) = exported.parent {
                let before = self.export_run(parent, 0).start;
                open.push(Place { run: parent, offset: exported.start.saturating_sub(before + 1) });
            }
            runs.insert(run, exported);
        }
        runs
    }

    fn export_run(&self, run: RunId, len: usize) -> ExportedRun {
        let shard = self.shards[run.shard()].read().unwrap_or_else(PoisonError::into_inner);
        let run = shard.run(run);
        let hashes = run.hashes()[..len.min(run.hashes().len())].to_vec();
        ExportedRun { hashes, parent: run.parent(), start: run.start }
    }
}

// === impl Snapshot ===

impl Snapshot<'_> {
    fn events(&mut self) -> Vec<KvEvent> {
        let mut order: Vec<(u32, RunId)> =
            self.runs.iter().map(|(&run, exported)| (exported.start, run)).collect();
        order.sort_unstable();
        let mut events = Vec::new();
        for (_, run) in order {
            let hashes = self.runs[&run].hashes.clone();
            let parent = self.name_before(Place { run, offset: 0 });
            let blocks = (0..).zip(hashes).map(|(offset, hash)| {
                let name = self.name(Place { run, offset }, hash);
                StoredBlock { name, hash }
            });
            events.push(KvEvent::Stored { parent, blocks: blocks.collect(), tier: Tier::Gpu });
        }
        for (place, names) in self.names.clone() {
            let Some(hash) = self.hash(place) else { continue };
            for &(name, _) in &names[1..] {
                let parent = self.name_before(place);
                let blocks = vec![StoredBlock { name, hash }];
                events.push(KvEvent::Stored { parent, blocks, tier: Tier::Gpu });
            }
        }
        for (&name, orphan) in &self.holder.orphans {
            let blocks = vec![StoredBlock { name, hash: orphan.hash }];
            events.push(KvEvent::Stored { parent: Some(orphan.parent), blocks, tier: Tier::Gpu });
        }
        self.export_copies(&mut events);
        events
    }

    /// Adds the further copies; every block has been exported once, in the GPU tier.
    fn export_copies(&self, events: &mut Vec<KvEvent>) {
        let held = self.names.values().flatten().copied();
        let orphans = self.holder.orphans.iter().map(|(&name, orphan)| (name, orphan.copies));
        let (mut more, mut below, mut gone) = (Vec::new(), Vec::new(), Vec::new());
        for (name, copies) in held.chain(orphans) {
            let [gpu, cpu] = [Tier::Gpu, Tier::Cpu].map(|tier| copies.of(tier) as usize);
            more.extend(std::iter::repeat_n(name, gpu.saturating_sub(1)));
            below.extend(std::iter::repeat_n(name, cpu));
            gone.extend(std::iter::repeat_n(name, usize::from(gpu == 0)));
        }
        gone.extend(self.lost.values());
        for (blocks, tier) in [(more, Tier::Gpu), (below, Tier::Cpu)] {
            if !blocks.is_empty() {
                events.push(KvEvent::Copied { blocks, tier });
            }
        }
        if !gone.is_empty() {
            events.push(KvEvent::Removed { blocks: gone, tier: Tier::Gpu });
        }
    }

    fn hash(&self, Place { run, offset }: Place) -> Option<BlockHash> {
        self.runs.get(&run)?.hashes.get(offset as usize).copied()
    }

    /// The name of the block before this place; `None` if it begins a prompt.
    fn name_before(&mut self, Place { run, offset }: Place) -> Option<EngineHash> {
        let before = match offset.checked_sub(1) {
            Some(offset) => Place { run, offset },
            None => {
                let ExportedRun { parent, start, .. } = self.runs.get(&run)?;
                let (run, start) = ((*parent)?, *start);
                Place { run, offset: start.checked_sub(self.runs.get(&run)?.start + 1)? }
            }
        };
        let hash = self.hash(before)?;
        Some(self.name(before, hash))
    }

    fn name(&mut self, place: Place, BlockHash(hash): BlockHash) -> EngineHash {
        if let Some((name, _)) = self.names.get(&place).and_then(|names| names.first()) {
            return *name;
        }
        if let Some(name) = self.lost.get(&place) {
            return *name;
        }
        let mut name = EngineHash(hash);
        while self.holder.knows(name) || self.invented.contains(&name) {
            name.0 = name.0.wrapping_add(1);
        }
        self.invented.insert(name);
        self.lost.insert(place, name);
        name
    }
}

// === impl Holder ===

impl Holder {
    /// Whether a name is in use, as that of a block or as the missing parent of an orphan.
    fn knows(&self, name: EngineHash) -> bool {
        self.names.get(Key::of(name)).is_some()
            || self.orphans.contains_key(&name)
            || self.waiting_for(name).is_some()
    }
}
