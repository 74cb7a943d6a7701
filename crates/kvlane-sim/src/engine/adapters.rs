//! Slots for adapters (LoRA), after vLLM's `max_loras`.
//!
//! A request whose adapter is not loaded waits for its load, and the queue behind it goes on. A load evicts the least recently
//! used adapter that no request uses; where all are in use, the request waits until one is not. Loads follow each other, and
//! steps go on meanwhile.
//!
//! In vLLM an adapter is in use while one of its requests runs; here also while one waits for a seat or for blocks.

use std::collections::VecDeque;

use kvlane_core::adapters::AdapterReport;
use kvlane_core::request::AdapterKey;
use kvlane_core::time::Nanos;

/// Slots of an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterSlots {
    /// Adapters that can be loaded at once (`--max-loras`), at least one.
    pub count: u32,
    /// Seconds that a load takes.
    pub load_s: f64,
}

/// The adapters of an engine, and the requests that wait for them.
#[derive(Clone, Debug)]
pub(super) struct Adapters {
    slots: AdapterSlots,
    held: Vec<Held>,
    /// Requests whose adapters are being loaded: when they are, and the indices of their sequences.
    loading: VecDeque<(Nanos, u32)>,
    /// Requests that wait for a slot, in the order of their arrival.
    wanting: VecDeque<(AdapterKey, u32)>,
    /// Time at which all loads are finished.
    loads_end: Nanos,
    /// Number of uses.
    used: u64,
    /// Number of loads.
    pub(super) loads: u64,
}

/// An adapter that is loaded or being loaded.
#[derive(Clone, Debug)]
struct Held {
    adapter: AdapterKey,
    /// Requests that use it.
    users: u32,
    used: u64,
    ready_at: Nanos,
}

// === impl Adapters ===

impl Adapters {
    /// No adapter is loaded.
    pub(super) fn new(slots: AdapterSlots) -> Self {
        Self {
            slots: AdapterSlots { count: slots.count.max(1), ..slots },
            held: Vec::new(),
            loading: VecDeque::new(),
            wanting: VecDeque::new(),
            loads_end: Nanos::ZERO,
            used: 0,
            loads: 0,
        }
    }

    /// The request at this index begins to use its adapter. It waits unless this returns true.
    pub(super) fn enter(&mut self, now: Nanos, adapter: AdapterKey, at: u32) -> bool {
        match self.hold(now, adapter) {
            None => {
                self.wanting.push_back((adapter, at));
                false
            }
            Some(ready_at) if ready_at <= now => true,
            Some(ready_at) => {
                self.loading.push_back((ready_at, at));
                false
            }
        }
    }

    /// Adds a use of an adapter, which is loaded if necessary. Returns when it is ready; `None` if there is no slot for it.
    fn hold(&mut self, now: Nanos, adapter: AdapterKey) -> Option<Nanos> {
        self.used += 1;
        let used = self.used;
        if let Some(held) = self.held.iter_mut().find(|held| held.adapter == adapter) {
            (held.users, held.used) = (held.users + 1, used);
            return Some(held.ready_at);
        }
        if self.held.len() >= self.slots.count as usize {
            let unused = (0..).zip(&self.held).filter(|(_, held)| held.users == 0);
            let (evicted, _) = unused.min_by_key(|(_, held)| held.used)?;
            self.held.swap_remove(evicted);
        }
        self.loads += 1;
        self.loads_end = self.loads_end.max(now) + Nanos::from_secs_f64(self.slots.load_s);
        self.held.push(Held { adapter, users: 1, used, ready_at: self.loads_end });
        Some(self.loads_end)
    }

    /// The request at this index ends, wherever it is: its use of its adapter ends. Requests that wait for a slot may get it.
    pub(super) fn leave(&mut self, now: Nanos, adapter: AdapterKey, at: u32) {
        if let Some(place) = self.wanting.iter().position(|(_, other)| *other == at) {
            self.wanting.remove(place);
            return;
        }
        self.loading.retain(|(_, other)| *other != at);
        if let Some(held) = self.held.iter_mut().find(|held| held.adapter == adapter) {
            held.users -= 1;
        }
        for _ in 0..self.wanting.len() {
            let Some((adapter, at)) = self.wanting.pop_front() else { return };
            self.enter_again(now, adapter, at);
        }
    }

    /// Tries a request that waits for a slot. Those that still find none stay in order.
    fn enter_again(&mut self, now: Nanos, adapter: AdapterKey, at: u32) {
        match self.hold(now, adapter) {
            None => self.wanting.push_back((adapter, at)),
            Some(ready_at) => self.loading.push_back((ready_at.max(now), at)),
        }
    }

    /// A request whose adapter has been loaded by now.
    pub(super) fn next_ready(&mut self, now: Nanos) -> Option<u32> {
        let place = self.loading.iter().position(|(ready_at, _)| *ready_at <= now)?;
        self.loading.remove(place).map(|(_, at)| at)
    }

    /// When the next request is ready.
    pub(super) fn next_at(&self) -> Option<Nanos> {
        self.loading.iter().map(|(ready_at, _)| *ready_at).min()
    }

    /// Requests that wait for a load or a slot.
    pub(super) fn waiting(&self) -> usize {
        self.loading.len() + self.wanting.len()
    }

    /// A report with these adapters of requests in flight: whether the request runs, and its adapter.
    pub(super) fn report(&self, in_flight: impl Iterator<Item = (bool, AdapterKey)>) -> AdapterReport {
        let mut reported = AdapterReport { slots: Some(self.slots.count), ..AdapterReport::default() };
        for (runs, adapter) in in_flight {
            if runs { &mut reported.running } else { &mut reported.waiting }.push(adapter);
        }
        for adapters in [&mut reported.running, &mut reported.waiting] {
            adapters.sort_unstable();
            adapters.dedup();
        }
        reported
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u32) -> AdapterKey {
        AdapterKey::named(&n.to_le_bytes())
    }

    fn slots(count: u32) -> Adapters {
        Adapters::new(AdapterSlots { count, load_s: 1.0 })
    }

    fn at(secs: u64) -> Nanos {
        Nanos::from_secs(secs)
    }

    #[test]
    fn loads_follow_each_other_and_a_loaded_adapter_waits_for_none() {
        let mut adapters = slots(2);
        assert!(!adapters.enter(at(0), key(1), 1) && !adapters.enter(at(0), key(2), 2));
        assert!(!adapters.enter(at(0), key(1), 3), "it is being loaded");
        assert_eq!((adapters.next_at(), adapters.next_ready(at(0))), (Some(at(1)), None));
        let ready = |adapters: &mut Adapters, now| {
            std::iter::from_fn(|| adapters.next_ready(now)).collect::<Vec<_>>()
        };
        assert_eq!(ready(&mut adapters, at(1)), [1, 3]);
        assert_eq!(ready(&mut adapters, at(2)), [2]);
        assert!(adapters.enter(at(2), key(2), 4));
        assert_eq!(adapters.loads, 2);
    }

    #[test]
    fn the_least_recently_used_adapter_without_a_request_is_evicted() {
        let mut adapters = slots(2);
        (1..=2).for_each(|n| _ = adapters.enter(at(0), key(n), n));
        adapters.leave(at(3), key(1), 1);
        adapters.leave(at(3), key(2), 2);
        assert!(adapters.enter(at(3), key(1), 3), "the first is used again");
        assert!(!adapters.enter(at(3), key(3), 4), "and the second evicted");
        assert!(!adapters.enter(at(9), key(2), 5));
        assert_eq!((adapters.wanting.len(), adapters.loads), (1, 3), "both slots are in use");
        adapters.leave(at(9), key(3), 4);
        assert_eq!((adapters.next_at(), adapters.loads), (Some(at(10)), 4));
    }

    #[test]
    fn a_cancelled_request_gives_up_its_place_wherever_it_waits() {
        let mut adapters = slots(1);
        adapters.enter(at(0), key(1), 1);
        adapters.enter(at(0), key(2), 2);
        adapters.leave(at(0), key(2), 2);
        assert_eq!(adapters.waiting(), 1, "only the load");
        adapters.leave(at(0), key(1), 1);
        assert_eq!((adapters.waiting(), adapters.held[0].users), (0, 0));
    }
}
