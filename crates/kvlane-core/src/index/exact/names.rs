//! One endpoint's names of blocks, each with the block's place and how many copies the endpoint has.
//!
//! A table of 16 bytes an entry, sorted by the mixed name: an entry stands at or soon after where its name would stand
//! if all names were spread evenly. Sorted entries make a search end early, and growing is one pass from front to back,
//! so a table can grow by a quarter instead of doubling and be three quarters full.

use super::Budget;
use super::runs::Place;
use crate::event::{EngineHash, Tier};

/// Copies of one block in one tier that are counted; more than any engine runs requests at a time.
const COPIES_MAX: u64 = (1 << COPY_BITS) - 1;
const COPY_BITS: u32 = 13;
const PLACE_SHIFT: u32 = 2 * COPY_BITS;

/// Entries beyond the last one's natural place, for those that others have pushed aside.
const SPILL: usize = 32;
const CAPACITY_MIN: usize = 32;

/// How many copies an endpoint has of a block, by tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Copies(u64);

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// The mixed name.
    key: u64,
    /// Place and copies. Zero where there is no entry, since an entry has copies.
    held: u64,
}

#[derive(Debug, Default)]
pub(super) struct Names {
    entries: Vec<Entry>,
    /// Natural places: all entries but the spill.
    homes: usize,
    len: usize,
}

/// A name, mixed once for all that is asked about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key(pub(super) u64);

/// Where a name stands, or would stand.
#[derive(Clone, Copy, Debug)]
pub(super) enum Found {
    Here(usize),
    Not(usize),
}

// === impl Copies ===

impl Copies {
    pub(super) fn one(tier: Tier) -> Self {
        Self(1 << shift(tier))
    }

    pub(super) fn of(self, tier: Tier) -> u32 {
        ((self.0 >> shift(tier)) & COPIES_MAX) as u32
    }

    /// One more; false if that is more than can be counted.
    #[must_use]
    pub(super) fn add(&mut self, tier: Tier) -> bool {
        let room = u64::from(self.of(tier)) < COPIES_MAX;
        self.0 += u64::from(room) << shift(tier);
        room
    }

    /// One less; false if there is none.
    #[must_use]
    pub(super) fn take(&mut self, tier: Tier) -> bool {
        let any = self.of(tier) > 0;
        self.0 -= u64::from(any) << shift(tier);
        any
    }

    pub(super) fn none(self) -> bool {
        self.0 == 0
    }
}

fn shift(tier: Tier) -> u32 {
    match tier {
        Tier::Gpu => 0,
        Tier::Cpu => COPY_BITS,
    }
}

// === impl Key ===

impl Key {
    /// Engines may count their blocks instead of hashing them; an even spread is made here. Reversible, so that the
    /// table need not keep the name as well. The finaliser of MurmurHash3 (A. Appleby, public domain).
    pub(super) fn of(EngineHash(name): EngineHash) -> Self {
        let name = (name ^ (name >> 33)).wrapping_mul(MIX[0]);
        let name = (name ^ (name >> 33)).wrapping_mul(MIX[1]);
        Self(name ^ (name >> 33))
    }

    pub(super) fn name(self) -> EngineHash {
        let key = (self.0 ^ (self.0 >> 33)).wrapping_mul(UNMIX[1]);
        let key = (key ^ (key >> 33)).wrapping_mul(UNMIX[0]);
        EngineHash(key ^ (key >> 33))
    }
}

const MIX: [u64; 2] = [0xFF51_AFD7_ED55_8CCD, 0xC4CE_B9FE_1A85_EC53];
const UNMIX: [u64; 2] = [inverse(MIX[0]), inverse(MIX[1])];

/// The number that undoes a multiplication by an odd one modulo 2^64, by Newton's iteration: each round doubles the bits
/// that are right, of which there are three at first.
const fn inverse(odd: u64) -> u64 {
    let mut inverse = odd;
    let mut round = 0;
    while round < 5 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(inverse)));
        round += 1;
    }
    inverse
}

// === impl Names ===

impl Names {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
    }

    fn home(&self, Key(key): Key) -> usize {
        ((u128::from(key) * self.homes as u128) >> 64) as usize
    }

    #[inline]
    pub(super) fn find(&self, key: Key) -> Found {
        let home = self.home(key);
        let mut at = home;
        for entry in self.entries.get(home..).unwrap_or_default() {
            if entry.key >= key.0 || entry.held == 0 {
                if entry.key == key.0 && entry.held != 0 {
                    return Found::Here(at);
                }
                break;
            }
            at += 1;
        }
        Found::Not(at)
    }

    pub(super) fn get(&self, key: Key) -> Option<(Place, Copies)> {
        match self.find(key) {
            Found::Here(at) => Some((self.place(at), self.copies(at))),
            Found::Not(_) => None,
        }
    }

    pub(super) fn place(&self, at: usize) -> Place {
        Place::from_bits(self.entries[at].held >> PLACE_SHIFT)
    }

    pub(super) fn copies(&self, at: usize) -> Copies {
        Copies(self.entries[at].held & ((1 << PLACE_SHIFT) - 1))
    }

    pub(super) fn set_copies(&mut self, at: usize, copies: Copies) {
        let held = &mut self.entries[at].held;
        *held = (*held >> PLACE_SHIFT << PLACE_SHIFT) | copies.0;
    }

    /// One copy more; false if that is more than can be counted.
    #[must_use]
    pub(super) fn add_copy(&mut self, at: usize, tier: Tier) -> bool {
        let mut copies = self.copies(at);
        let counted = copies.add(tier);
        self.set_copies(at, copies);
        counted
    }

    /// Makes sure that `more` names fit; false if there is no memory for that.
    #[must_use]
    pub(super) fn reserve(&mut self, more: usize, budget: &Budget) -> bool {
        let len = self.len + more;
        // At most 13 of 16 full.
        if len * 16 <= self.homes * 13 {
            return true;
        }
        let homes = (len * 16 / 13 + 1).max(self.homes + self.homes / 4).max(CAPACITY_MIN);
        self.rebuild(homes, budget)
    }

    /// Takes in a name that [`Names::find`] has not found, and would stand at `at`. There has to be room, see
    /// [`Names::reserve`]; false if its neighbours leave none all the same and there is no memory for a larger table.
    #[must_use]
    #[inline]
    pub(super) fn insert(
        &mut self,
        at: usize,
        key: Key,
        place: Place,
        copies: Copies,
        budget: &Budget,
    ) -> bool {
        let entry = Entry { key: key.0, held: (place.bits() << PLACE_SHIFT) | copies.0 };
        let Some(free) = self.entries[at..].iter().position(|entry| entry.held == 0) else {
            if !self.rebuild(self.homes + self.homes / 4, budget) {
                return false;
            }
            return match self.find(key) {
                Found::Not(at) => self.insert(at, key, place, copies, budget),
                Found::Here(_) => true,
            };
        };
        self.entries.copy_within(at..at + free, at + 1);
        self.entries[at] = entry;
        self.len += 1;
        true
    }

    /// Lets a name go. Those behind it that are not in their natural place move up.
    pub(super) fn remove(&mut self, at: usize) {
        let mut end = at + 1;
        while let Some(entry) = self.entries.get(end) {
            if entry.held == 0 || self.home(Key(entry.key)) == end {
                break;
            }
            end += 1;
        }
        self.entries.copy_within(at + 1..end, at);
        self.entries[end - 1] = Entry::default();
        self.len -= 1;
    }

    /// Gives memory back after many have gone.
    pub(super) fn shrink(&mut self, budget: &Budget) {
        if self.len == 0 {
            self.clear(budget);
        } else if self.homes > CAPACITY_MIN && self.len < self.homes / 4 {
            let _ = self.rebuild((self.len * 2).max(CAPACITY_MIN), budget);
        }
    }

    pub(super) fn clear(&mut self, budget: &Budget) {
        budget.give(self.bytes());
        *self = Self::default();
    }

    fn rebuild(&mut self, homes: usize, budget: &Budget) -> bool {
        let mut homes = homes;
        loop {
            let capacity = homes + SPILL;
            if !budget.take(capacity * size_of::<Entry>()) {
                return false;
            }
            let mut larger = Self { entries: vec![Entry::default(); capacity], homes, len: self.len };
            // In order, so each goes to its natural place or right behind the one before it.
            let mut next = 0;
            let fits = self.entries.iter().filter(|entry| entry.held != 0).all(|entry| {
                next = next.max(larger.home(Key(entry.key)));
                let free = larger.entries.get_mut(next);
                next += 1;
                free.map(|free| *free = *entry).is_some()
            });
            if fits {
                let smaller = std::mem::replace(self, larger);
                budget.give(smaller.bytes());
                return true;
            }
            budget.give(larger.bytes());
            homes += homes / 4;
        }
    }

    /// All names with their places and copies, in the table's order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (EngineHash, Place, Copies)> {
        (0..self.entries.len())
            .filter(|&at| self.entries[at].held != 0)
            .map(|at| (Key(self.entries[at].key).name(), self.place(at), self.copies(at)))
    }
}
