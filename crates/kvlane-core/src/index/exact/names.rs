//! Table of one endpoint's block names, each with the block's place and its number of copies.
//!
//! An entry takes 16 bytes; a cache line has four. An entry is in its home line or, where that is full, in the next
//! line with room. Home lines are in the order of the mixed names, so growing is one pass from front to back, and the
//! table can grow by half instead of doubling.

use super::Budget;
use super::runs::Place;
use crate::event::{EngineHash, Tier};

/// Most counted copies of one block in one tier; more than the concurrent requests of any engine.
const COPIES_MAX: u64 = (1 << COPY_BITS) - 1;
const COPY_BITS: u32 = 13;
const PLACE_SHIFT: u32 = 2 * COPY_BITS;

/// Entries per line.
const WIDTH: usize = 4;
/// Overflow lines after the last home line.
const SPILL: usize = 8;
const HOMES_MIN: usize = 8;

/// Number of an endpoint's copies of a block, by tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Copies(u64);

/// One cache line.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Line {
    /// Mixed names: those in use first, then zeros.
    keys: [u64; WIDTH],
    /// Places and copies.
    held: [u64; WIDTH],
}

#[derive(Debug, Default)]
pub(super) struct Names {
    lines: Vec<Line>,
    /// Number of home lines, without the overflow lines.
    homes: usize,
    len: usize,
}

/// A mixed name, computed once for all operations on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Key(pub(super) u64);

/// No line has room for the name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Full;

/// The position of a name in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct At {
    line: usize,
    entry: usize,
}

// === impl Copies ===

impl Copies {
    pub(super) fn one(tier: Tier) -> Self {
        Self(1 << shift(tier))
    }

    pub(super) fn of(self, tier: Tier) -> u32 {
        ((self.0 >> shift(tier)) & COPIES_MAX) as u32
    }

    /// Adds one copy; false if the counter is at its maximum.
    #[must_use]
    pub(super) fn add(&mut self, tier: Tier) -> bool {
        let room = u64::from(self.of(tier)) < COPIES_MAX;
        self.0 += u64::from(room) << shift(tier);
        room
    }

    /// Removes one copy; false if there is none.
    #[must_use]
    pub(super) fn take(&mut self, tier: Tier) -> bool {
        let any = self.of(tier) > 0;
        self.0 -= u64::from(any) << shift(tier);
        any
    }

    pub(super) fn none(self) -> bool {
        self.0 == 0
    }

    /// Whether there is a copy on the GPU.
    pub(super) fn on_gpu(self) -> bool {
        self.of(Tier::Gpu) > 0
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
    /// Mixes a name. Engines may number their blocks instead of hashing them; mixing spreads the names evenly. It is
    /// invertible, so that the table need not store the name as well. The finaliser of MurmurHash3 (A. Appleby, public
    /// domain). Zero is not a key: of 2^64 names, two are treated as one.
    #[inline]
    pub(super) fn of(EngineHash(name): EngineHash) -> Self {
        let name = name ^ UNLIKELY;
        let name = (name ^ (name >> 33)).wrapping_mul(MIX[0]);
        let name = (name ^ (name >> 33)).wrapping_mul(MIX[1]);
        Self((name ^ (name >> 33)).max(1))
    }

    pub(super) fn name(self) -> EngineHash {
        let key = (self.0 ^ (self.0 >> 33)).wrapping_mul(UNMIX[1]);
        let key = (key ^ (key >> 33)).wrapping_mul(UNMIX[0]);
        EngineHash(key ^ (key >> 33) ^ UNLIKELY)
    }
}

/// XORed into every name, so that the name mixed to zero is this one instead of zero: no engine numbers its blocks this
/// high.
const UNLIKELY: u64 = 0x9E37_79B9_7F4A_7C15;
const MIX: [u64; 2] = [0xFF51_AFD7_ED55_8CCD, 0xC4CE_B9FE_1A85_EC53];
const UNMIX: [u64; 2] = [inverse(MIX[0]), inverse(MIX[1])];

/// The inverse of an odd number modulo 2^64, by Newton's iteration: each round doubles the number of correct bits,
/// initially three.
const fn inverse(odd: u64) -> u64 {
    let mut inverse = odd;
    let mut round = 0;
    while round < 5 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(inverse)));
        round += 1;
    }
    inverse
}

// === impl Line ===

impl Line {
    /// Whether `key` is among the entries. Compares all four, which is faster than an early exit.
    #[inline]
    fn has(&self, Key(key): Key) -> bool {
        (self.keys[0] == key) | (self.keys[1] == key) | (self.keys[2] == key) | (self.keys[3] == key)
    }

    fn position(&self, Key(key): Key) -> usize {
        self.keys.iter().position(|&other| other == key).unwrap_or(0)
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.keys[WIDTH - 1] != 0
    }

    #[inline]
    fn len(&self) -> usize {
        self.keys.iter().map(|&key| usize::from(key != 0)).sum()
    }

    /// Removes an entry and closes the gap.
    fn take(&mut self, entry: usize) {
        let last = self.len() - 1;
        self.keys[entry] = self.keys[last];
        self.held[entry] = self.held[last];
        self.keys[last] = 0;
    }
}

// === impl Names ===

impl Names {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn bytes(&self) -> usize {
        self.lines.capacity() * size_of::<Line>()
    }

    #[inline]
    fn home(&self, Key(key): Key) -> usize {
        ((u128::from(key) * self.homes as u128) >> 64) as usize
    }

    #[inline]
    pub(super) fn find(&self, key: Key) -> Option<At> {
        let home = self.home(key);
        for (line, entries) in self.lines.iter().enumerate().skip(home) {
            if entries.has(key) {
                return Some(At { line, entry: entries.position(key) });
            }
            if !entries.is_full() {
                break;
            }
        }
        None
    }

    pub(super) fn get(&self, key: Key) -> Option<(Place, Copies)> {
        self.find(key).map(|at| (self.place(at), self.copies(at)))
    }

    pub(super) fn place(&self, At { line, entry }: At) -> Place {
        Place::from_bits(self.lines[line].held[entry] >> PLACE_SHIFT)
    }

    pub(super) fn copies(&self, At { line, entry }: At) -> Copies {
        Copies(self.lines[line].held[entry] & ((1 << PLACE_SHIFT) - 1))
    }

    pub(super) fn set_copies(&mut self, At { line, entry }: At, copies: Copies) {
        let held = &mut self.lines[line].held[entry];
        *held = (*held >> PLACE_SHIFT << PLACE_SHIFT) | copies.0;
    }

    /// Adds one copy; false if the counter is at its maximum.
    #[must_use]
    pub(super) fn add_copy(&mut self, at: At, tier: Tier) -> bool {
        let mut copies = self.copies(at);
        let counted = copies.add(tier);
        self.set_copies(at, copies);
        counted
    }

    /// Reserves room for `more` names; false if there is no memory for it.
    #[must_use]
    #[inline]
    pub(super) fn reserve(&mut self, more: usize, budget: &Budget) -> bool {
        // At most 13 of 16 entries full.
        let len = self.len + more;
        len * 16 <= self.homes * WIDTH * 13 || self.grow(len, budget)
    }

    #[cold]
    fn grow(&mut self, len: usize, budget: &Budget) -> bool {
        let needed = len * 16 / (13 * WIDTH) + 1;
        self.rebuild(needed.max(self.homes + self.homes / 2).max(HOMES_MIN), budget)
    }

    /// Adds a name, or returns its position if it exists. The caller reserves room with [`Names::reserve`]; an error
    /// means that the neighbouring lines are full and there is no memory for a larger table.
    #[inline]
    pub(super) fn insert(
        &mut self,
        key: Key,
        place: Place,
        copies: Copies,
        budget: &Budget,
    ) -> Result<Option<At>, Full> {
        let held = (place.bits() << PLACE_SHIFT) | copies.0;
        self.put(key, held).or_else(|Full| {
            let larger = self.rebuild(self.homes + self.homes / 2 + HOMES_MIN, budget);
            if larger { self.put(key, held) } else { Err(Full) }
        })
    }

    #[inline]
    fn put(&mut self, key: Key, held: u64) -> Result<Option<At>, Full> {
        let home = self.home(key);
        for (line, entries) in self.lines.iter_mut().enumerate().skip(home) {
            if entries.has(key) {
                return Ok(Some(At { line, entry: entries.position(key) }));
            }
            if !entries.is_full() {
                let entry = entries.len();
                entries.keys[entry] = key.0;
                entries.held[entry] = held;
                self.len += 1;
                return Ok(None);
            }
        }
        Err(Full)
    }

    /// Removes a name. Entries in a later line than their home move up.
    pub(super) fn remove(&mut self, At { line, entry }: At) {
        let mut gap = line;
        let mut was_full = self.lines[gap].is_full();
        self.lines[gap].take(entry);
        self.len -= 1;
        let mut next = gap + 1;
        while was_full && next < self.lines.len() {
            let later = self.lines[next];
            let displaced = (0..later.len()).find(|&n| self.home(Key(later.keys[n])) <= gap);
            if let Some(entry) = displaced {
                let into = self.lines[gap].len();
                self.lines[gap].keys[into] = later.keys[entry];
                self.lines[gap].held[into] = later.held[entry];
                self.lines[next].take(entry);
                gap = next;
            }
            was_full = later.is_full();
            next += 1;
        }
    }

    /// Frees memory after many removals.
    pub(super) fn shrink(&mut self, budget: &Budget) {
        if self.len == 0 {
            self.clear(budget);
        } else if self.homes > HOMES_MIN && self.len < self.homes * WIDTH / 4 {
            let _ = self.rebuild((self.len / 2).max(HOMES_MIN), budget);
        }
    }

    pub(super) fn clear(&mut self, budget: &Budget) {
        budget.give(self.bytes());
        *self = Self::default();
    }

    fn rebuild(&mut self, mut homes: usize, budget: &Budget) -> bool {
        loop {
            let lines = homes + SPILL;
            if !budget.take(lines * size_of::<Line>()) {
                return false;
            }
            let mut other = Self { lines: vec![Line::default(); lines], homes, len: 0 };
            let fits = self.entries().all(|(key, held)| other.put(key, held).is_ok());
            if fits {
                let before = std::mem::replace(self, other);
                budget.give(before.bytes());
                return true;
            }
            budget.give(other.bytes());
            homes += homes / 4;
        }
    }

    fn entries(&self) -> impl Iterator<Item = (Key, u64)> {
        self.lines.iter().flat_map(|line| (0..line.len()).map(|n| (Key(line.keys[n]), line.held[n])))
    }

    /// All names with their places and copies, in table order.
    pub(super) fn iter(&self) -> impl Iterator<Item = (EngineHash, Place, Copies)> {
        let copies = |held: u64| Copies(held & ((1 << PLACE_SHIFT) - 1));
        self.entries()
            .map(move |(key, held)| (key.name(), Place::from_bits(held >> PLACE_SHIFT), copies(held)))
    }
}
