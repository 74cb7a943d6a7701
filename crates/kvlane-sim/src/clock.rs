//! Virtual time: a queue of events, in order of (time, sequence).
//!
//! Events at the same time happen in the order in which they were scheduled, so a run depends only on its inputs and
//! its seed.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use kvlane_core::time::Nanos;

/// Pending events, and the current time.
#[derive(Debug)]
pub struct Clock<E> {
    now: Nanos,
    sequence: u64,
    pending: BinaryHeap<Reverse<Pending<E>>>,
}

#[derive(Debug)]
struct Pending<E> {
    at: Nanos,
    sequence: u64,
    event: E,
}

// === impl Clock ===

impl<E> Default for Clock<E> {
    fn default() -> Self {
        Self { now: Nanos::ZERO, sequence: 0, pending: BinaryHeap::new() }
    }
}

impl<E> Clock<E> {
    /// The time of the last event.
    pub fn now(&self) -> Nanos {
        self.now
    }

    /// Schedules `event` at `at`, or now if that has passed.
    pub fn schedule(&mut self, at: Nanos, event: E) {
        let at = at.max(self.now);
        self.pending.push(Reverse(Pending { at, sequence: self.sequence, event }));
        self.sequence += 1;
    }

    /// The next event; advances the time to it.
    pub fn next_event(&mut self) -> Option<E> {
        let Reverse(Pending { at, event, .. }) = self.pending.pop()?;
        self.now = at;
        Some(event)
    }

    /// Time of the next event.
    pub fn next_at(&self) -> Option<Nanos> {
        self.pending.peek().map(|Reverse(pending)| pending.at)
    }

    /// Advances the time without an event: not past the next event, and never back.
    pub fn move_to(&mut self, at: Nanos) {
        self.now = self.now.max(self.next_at().map_or(at, |next| next.min(at)));
    }
}

impl<E> Pending<E> {
    fn key(&self) -> (Nanos, u64) {
        (self.at, self.sequence)
    }
}

impl<E> PartialEq for Pending<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<E> Eq for Pending<E> {}

impl<E> PartialOrd for Pending<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Pending<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Invariant: Virtual time never goes back, and events of equal time keep their order.
        #[test]
        fn time_never_goes_back_and_equal_times_keep_their_order(
            acts in prop::collection::vec((any::<bool>(), 0u64..50), 0..200),
        ) {
            let mut clock = Clock::default();
            let (mut last, mut count) = ((Nanos::ZERO, 0), 0);
            for (schedule, at) in acts {
                if schedule {
                    let at = Nanos(at).max(clock.now());
                    clock.schedule(at, (at, count));
                    count += 1;
                } else if let Some(event) = clock.next_event() {
                    prop_assert_eq!(clock.now(), event.0);
                    prop_assert!(event.0 >= last.0 && (event.0 > last.0 || event.1 > last.1 || last.1 == 0));
                    last = event;
                }
            }
        }
    }

    #[test]
    fn what_is_late_happens_at_once() {
        let mut clock = Clock::default();
        clock.schedule(Nanos(10), 'a');
        assert_eq!(clock.next_event(), Some('a'));
        clock.schedule(Nanos(5), 'b');
        assert_eq!((clock.next_event(), clock.now()), (Some('b'), Nanos(10)));
        clock.move_to(Nanos(20));
        clock.move_to(Nanos(1));
        assert_eq!(clock.now(), Nanos(20));
    }
}
