//! Applies a stored event: its blocks get places and names.

use super::names::{Copies, Full, Key};
use super::runs::Place;
use super::writer::{Writer, ones};
use super::{Applied, Budget, ExactIndex, Holder, Last, MoreNames, NAME_BYTES, Orphan};
use crate::block::BlockHash;
use crate::endpoint::EndpointId;
use crate::event::{EngineHash, Tier};

/// Most blocks processed together.
pub(super) const AT_ONCE: usize = 16;

/// A stored event in progress.
pub(super) struct Storing<'a> {
    budget: &'a Budget,
    holder: &'a mut Holder,
    writer: Writer<'a>,
    tier: Tier,
    after: After,
    last: Option<Last>,
    applied: Applied,
    /// A block could not be added, so none of its successors can.
    full: bool,
}

/// The predecessor of an event's next block.
#[derive(Clone, Copy, Debug)]
enum After {
    /// None: the block begins a prompt.
    Start,
    /// A block that the endpoint holds.
    Held(Place),
    /// A block that it does not hold.
    Missing(EngineHash),
}

// === impl Storing ===

impl<'a> Storing<'a> {
    pub(super) fn new(
        index: &'a ExactIndex,
        endpoint: EndpointId,
        holder: &'a mut Holder,
        tier: Tier,
        parent: Option<EngineHash>,
    ) -> Self {
        let last = holder.last.filter(|last| Some(last.name) == parent);
        let after = match (parent, last) {
            (None, _) => After::Start,
            (Some(_), Some(last)) => After::Held(last.place),
            (Some(name), None) => match holder.names.get(Key::of(name)) {
                Some((place, _)) => After::Held(place),
                None => After::Missing(name),
            },
        };
        let writer = index.writer(endpoint);
        let (budget, applied) = (&index.budget, Applied::default());
        Self { budget, holder, writer, tier, after, last, applied, full: false }
    }

    /// Our hash of the first block's predecessor.
    pub(super) fn hash_before(&mut self) -> Option<BlockHash> {
        match (self.after, self.last) {
            (_, Some(last)) => Some(last.hash),
            (After::Held(place), None) => self.writer.hash(place),
            (After::Missing(name), None) => self.holder.orphans.get(&name).map(|orphan| orphan.hash),
            (After::Start, None) => None,
        }
    }

    pub(super) fn reserve(&mut self, blocks: usize) {
        self.full |= !self.holder.names.reserve(blocks, self.budget);
    }

    /// Adds consecutive blocks, at most [`AT_ONCE`]; `more` blocks follow.
    #[inline]
    pub(super) fn blocks(
        &mut self,
        names: impl ExactSizeIterator<Item = EngineHash> + Clone,
        hashes: &[BlockHash],
        more: usize,
    ) {
        let after = match self.after {
            After::Start => None,
            After::Held(place) => Some(place),
            After::Missing(_) => return self.one_by_one(names, hashes),
        };
        if self.full || !self.holder.orphans.is_empty() {
            return self.one_by_one(names, hashes);
        }
        let mut keys = [Key::default(); AT_ONCE];
        keys.iter_mut().zip(names.clone()).for_each(|(key, name)| *key = Key::of(name));
        let done = self.together(after, &keys[..hashes.len()], hashes, more);
        if done < hashes.len() {
            self.one_by_one(names.skip(done), &hashes[done..]);
        }
    }

    /// Adds places, then names. Returns how many blocks were added: all, unless a name belongs to another block
    /// already.
    #[inline]
    fn together(&mut self, after: Option<Place>, keys: &[Key], hashes: &[BlockHash], more: usize) -> usize {
        let copies = Copies::one(self.tier);
        let (mut done, mut after) = (0, after);
        while done < keys.len() {
            let Some(row) = self.writer.add_blocks(after, &hashes[done..], more) else {
                self.full = true;
                break;
            };
            let Place { run, offset } = row.first;
            for n in 0..row.count as u32 {
                let place = Place { run, offset: offset + n };
                let already = row.already >> n & 1 != 0;
                let mut counted = true;
                // Whether the name belongs to another block, and its position; or that there is no memory for it.
                let other = match self.holder.names.insert(keys[done], place, copies, self.budget) {
                    Ok(None) if already => {
                        self.name_again(place, copies);
                        None
                    }
                    Ok(None) => {
                        if !copies.on_gpu() {
                            self.writer.set_lower(place, true);
                        }
                        None
                    }
                    Ok(Some(at)) => {
                        counted = self.holder.add_copy(at, self.tier, &mut self.writer);
                        let known = self.holder.names.place(at);
                        (known != place).then_some(Some(known))
                    }
                    Err(Full) => Some(None),
                };
                if let Some(other) = other {
                    let rest = ones(row.count - n as usize) & !(row.already >> n);
                    self.writer.remove_holder(run, rest << place.offset);
                    let Some(other) = other else {
                        self.full = true;
                        break;
                    };
                    self.count(counted);
                    (self.after, self.last) = (After::Held(other), None);
                    return done + 1;
                }
                self.count(counted);
                done += 1;
                after = Some(place);
            }
            if self.full {
                break;
            }
        }
        if let (Some(place), Some(last)) = (after, done.checked_sub(1)) {
            self.after = After::Held(place);
            self.last = Some(Last { name: keys[last].name(), place, hash: hashes[last] });
        }
        done
    }

    /// Adds blocks one by one, in any state.
    #[cold]
    fn one_by_one(&mut self, names: impl Iterator<Item = EngineHash>, hashes: &[BlockHash]) {
        for (name, &hash) in names.zip(hashes) {
            let key = Key::of(name);
            let taken = match self.holder.names.find(key) {
                Some(at) => {
                    let place = self.holder.names.place(at);
                    self.after = After::Held(place);
                    self.last = Some(Last { name, place, hash });
                    self.holder.add_copy(at, self.tier, &mut self.writer)
                }
                None => !self.full && self.take_in(key, name, hash),
            };
            self.count(taken);
        }
    }

    #[inline]
    fn count(&mut self, taken: bool) {
        self.applied.stored += u32::from(taken);
        self.applied.refused += u32::from(!taken);
    }

    fn take_in(&mut self, key: Key, name: EngineHash, hash: BlockHash) -> bool {
        let mut copies = Copies::one(self.tier);
        let after = match self.after {
            After::Start => None,
            After::Held(place) => Some(place),
            After::Missing(parent) => {
                self.after = After::Missing(name);
                self.last = None;
                return match self.holder.orphans.get_mut(&name) {
                    Some(orphan) => orphan.copies.add(self.tier),
                    None => self.holder.add_orphan(name, Orphan { hash, parent, copies }, self.budget),
                };
            }
        };
        if let Some(orphan) = self.holder.take_orphan(name, self.budget) {
            copies = orphan.copies;
            let _ = copies.add(self.tier);
        }
        let Some(place) = self.add_blocks(key, after, hash, copies) else {
            self.full = true;
            return false;
        };
        self.after = After::Held(place);
        self.last = Some(Last { name, place, hash });
        if !self.holder.orphans.is_empty() {
            self.adopt(name, place);
        }
        true
    }

    fn add_blocks(
        &mut self,
        key: Key,
        after: Option<Place>,
        hash: BlockHash,
        copies: Copies,
    ) -> Option<Place> {
        let row = self.writer.add_blocks(after, &[hash], 0)?;
        let place = row.first;
        if self.holder.names.insert(key, place, copies, self.budget).is_err() {
            if row.already == 0 {
                self.writer.remove_holder(place.run, 1 << place.offset);
            }
            return None;
        }
        if row.already != 0 {
            self.name_again(place, copies);
        } else if !copies.on_gpu() {
            self.writer.set_lower(place, true);
        }
        Some(place)
    }

    /// Adds another name of a block, with its copies. Exceeds the memory budget if necessary: the name is in the table
    /// already, and its removal must not remove the block of the other name.
    #[cold]
    fn name_again(&mut self, place: Place, copies: Copies) {
        let was_lower = self.writer.is_lower(place);
        let names = self.holder.more_names.entry(place).or_insert_with(|| {
            self.budget.correct(0, NAME_BYTES);
            MoreNames { more: 0, on_gpu: u32::from(!was_lower) }
        });
        names.more += 1;
        if copies.on_gpu() {
            names.on_gpu += 1;
            if was_lower {
                self.writer.set_lower(place, false);
            }
        }
    }

    /// Gives places to the orphans of `parent`, and to their descendants.
    fn adopt(&mut self, parent: EngineHash, place: Place) {
        let mut parents = vec![(parent, place)];
        while let Some((parent, place)) = parents.pop() {
            while let Some(name) = self.holder.waiting_for(parent) {
                let Some(orphan) = self.holder.take_orphan(name, self.budget) else { break };
                let room = self.holder.names.reserve(1, self.budget);
                let place =
                    room.then(|| self.add_blocks(Key::of(name), Some(place), orphan.hash, orphan.copies));
                match place.flatten() {
                    Some(place) => parents.push((name, place)),
                    None => self.applied.refused += 1,
                }
            }
        }
    }

    pub(super) fn end(self) -> Applied {
        self.holder.last = self.last;
        self.applied
    }
}
