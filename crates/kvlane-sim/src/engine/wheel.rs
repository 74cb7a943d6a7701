//! Wake-ups of sequences by decode step: a timing wheel over step numbers.
//!
//! All decoding sequences advance by one token in each decode step, so a sequence's next block, report or end is at a
//! step number that does not change. Entries are never removed: on wake-up it is checked whether the sequence still
//! runs under that order. A wake-up further away than the wheel's width comes early, finds nothing to do and is
//! inserted again.

/// Steps per turn of the wheel; a power of two.
const SLOTS: u64 = 256;

/// A running sequence: its seat and its admission. Ordered by admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Seat {
    /// Counts admissions; unique in the engine's life.
    pub(super) order: u64,
    /// Index of the sequence.
    pub(super) at: u32,
}

#[derive(Clone, Debug)]
pub(super) struct Wheel {
    slots: Vec<Vec<Seat>>,
}

// === impl Wheel ===

impl Wheel {
    pub(super) fn new() -> Self {
        Self { slots: vec![Vec::new(); SLOTS as usize] }
    }

    /// Wakes `seat` `steps` after step `tick`, or earlier if that is far away.
    pub(super) fn put(&mut self, tick: u64, steps: u32, seat: Seat) {
        let steps = u64::from(steps).min(SLOTS - 1);
        self.slots[((tick + steps) % SLOTS) as usize].push(seat);
    }

    /// Exchanges the seats that wake at step `tick`, in any order, for an empty list.
    pub(super) fn swap(&mut self, tick: u64, seats: &mut Vec<Seat>) {
        debug_assert!(seats.is_empty(), "the list is lent empty");
        std::mem::swap(&mut self.slots[(tick % SLOTS) as usize], seats);
    }
}
