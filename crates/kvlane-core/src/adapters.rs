//! Adapters (LoRA): which endpoint has which one loaded, how long a load takes, and how often each is asked for.
//!
//! An endpoint has slots for a number of adapters (vLLM's `max_loras`). A request whose adapter is not loaded waits for its
//! load, which evicts the least recently used adapter that no request uses; where all are in use, it waits for one that is
//! not. An endpoint loads one adapter at a time.
//!
//! What is loaded where follows from the router's own dispatches, and is corrected by what engines report
//! ([`AdapterReport`]). The time of a load is learned from first tokens that waited for one. Nothing here is touched
//! while no request names an adapter. A router does not know of the adapters that other routers have sent to an endpoint until
//! that reports them.

use foldhash::fast::FixedState;
use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use crate::endpoint::EndpointId;
use crate::request::{AdapterKey, RequestId};
use crate::table::ByEndpoint;
use crate::time::Nanos;

/// Seconds that a load takes before any was measured: an adapter of rank 16 for a model of 8 billion parameters, from a disk.
const LOAD_S: f64 = 0.3;
/// Most adapters that an endpoint is believed to hold if it reports no limit.
const HELD_MAX: u32 = 256;
/// Most adapters whose requests are counted. Beyond them the one that is loaded nowhere and was asked for longest ago is
/// forgotten.
const ADAPTERS_MAX: usize = 4096;
/// Loads over which their time, and that between two, is averaged.
const LOADS_MEAN: u32 = 16;
/// Loads from which an endpoint's own time counts.
const SURE: u32 = 4;
/// Requests over which the time between two requests of an adapter is averaged.
const GAPS_MEAN: u32 = 16;

/// What an engine reports of its adapters.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterReport {
    /// Adapters that it can have loaded at once; `None` if it does not say.
    pub slots: Option<u32>,
    /// Adapters of requests that run: these are loaded. Others may be.
    pub running: Vec<AdapterKey>,
    /// Adapters of requests that wait.
    pub waiting: Vec<AdapterKey>,
}

/// What an endpoint would have to do for the request's adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdapterRow {
    /// Whether the adapter is loaded there, or being loaded.
    pub loaded: bool,
    /// Whether it has a free slot.
    pub has_room: bool,
    /// Seconds until the adapter is loaded if the request is placed there: the load, loads before it, and the wait for a slot.
    pub wait_s: f64,
    /// Seconds of the load alone; 0 if it needs none.
    pub load_s: f64,
    /// What the load evicts, if anything.
    pub evicted: Option<Evicted>,
    /// What the engine has last reported of the adapter.
    pub reported: Reported,
}

/// How an adapter is used at an endpoint, for deciding which ones it is to have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterUse {
    /// Requests in flight that use it.
    pub users: u32,
    /// Orders adapters by their last use, in one pool; 0: it has not been used.
    pub used: u64,
}

/// An adapter that a load would evict.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evicted {
    /// Expected seconds between two of its requests.
    pub gap_s: f64,
    /// Whether no other endpoint has it loaded.
    pub last: bool,
}

/// An engine's last report of an adapter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reported {
    /// A request with it runs.
    Running,
    /// None does, and fewer adapters run and wait than it has slots.
    Room,
    /// No slot is free by this count, and a request with it waits.
    Waiting,
    /// None of these.
    #[default]
    Nothing,
}

/// The adapter of a request to place, as a policy sees it.
#[derive(Clone, Copy, Debug)]
pub struct AdapterView<'a> {
    /// By row of the table of candidates.
    pub rows: &'a [AdapterRow],
    /// Endpoints that have it loaded.
    pub copies: u32,
    /// Expected seconds between two of its requests.
    pub gap_s: f64,
    /// Seconds since the first request with an adapter.
    pub seen_s: f64,
    /// Mean seconds between two loads at an endpoint.
    pub load_gap_s: f64,
}

/// The adapters of a pool.
#[derive(Default)]
pub(crate) struct Adapters {
    slots: ByEndpoint<Slots>,
    asked: HashMap<AdapterKey, Asked, FixedState>,
    flights: HashMap<RequestId, Flight, FixedState>,
    /// Of all endpoints together.
    load: Mean,
    /// Time between two loads, and the last one.
    load_gap: Mean,
    last_load: Nanos,
    /// The first request with an adapter.
    began: Option<Nanos>,
    /// Number of placements and reports, the order of use.
    used: u64,
    /// Reused memory: the rows of the last request.
    rows: Vec<AdapterRow>,
}

/// The slots of an endpoint.
#[derive(Default)]
struct Slots {
    max: Option<u32>,
    /// Those that are being loaded in the order of their loads.
    held: Vec<Held>,
    /// When its last load was finished, as first tokens tell.
    loaded_at: Nanos,
    load: Mean,
    reported: AdapterReport,
}

/// An adapter in a slot. Where requests wait for a slot, more are held than there are slots.
#[derive(Clone, Copy)]
struct Held {
    adapter: AdapterKey,
    /// Requests in flight that use it.
    users: u32,
    used: u64,
    /// When the request that caused its load was placed, until a first token tells that it is loaded.
    loading: Option<Nanos>,
}

/// A mean over recent loads.
#[derive(Clone, Copy, Default)]
struct Mean {
    secs: f64,
    samples: u32,
}

/// The requests of an adapter.
#[derive(Clone, Copy)]
struct Asked {
    count: u32,
    last: Nanos,
    mean_gap_s: f64,
    /// Endpoints that hold it.
    copies: u32,
}

/// A request in flight with an adapter.
struct Flight {
    adapter: AdapterKey,
    endpoint: EndpointId,
    /// Of one that waits for loads and no slot: when it was placed, and the expected seconds to its first token without them.
    timed: Option<(Nanos, f64)>,
}

// === impl AdapterRow ===

#[cfg(test)]
impl AdapterRow {
    /// An endpoint that has the adapter in so many seconds.
    pub(crate) fn loaded(wait_s: f64) -> Self {
        Self {
            loaded: true,
            has_room: false,
            wait_s,
            load_s: 0.0,
            evicted: None,
            reported: Reported::Running,
        }
    }

    /// An endpoint with a free slot.
    pub(crate) fn to_load(load_s: f64) -> Self {
        Self { loaded: false, has_room: true, load_s, reported: Reported::Room, ..Self::loaded(load_s) }
    }

    /// An endpoint that evicts the only copy of an adapter that is asked for again after `gap_s`.
    pub(crate) fn to_evict(load_s: f64, gap_s: f64) -> Self {
        let evicted = Some(Evicted { gap_s, last: true });
        Self { has_room: false, evicted, reported: Reported::Nothing, ..Self::to_load(load_s) }
    }
}

// === impl Adapters ===

impl Adapters {
    /// A request with this adapter is to be placed on one of these endpoints, whose answers usually take so many seconds.
    pub(crate) fn look(
        &mut self,
        now: Nanos,
        adapter: AdapterKey,
        endpoints: impl Iterator<Item = (EndpointId, f64)>,
    ) {
        self.began.get_or_insert(now);
        let mut found = std::mem::take(&mut self.rows);
        found.clear();
        found.extend(endpoints.map(|(endpoint, answer_s)| self.row(now, adapter, endpoint, answer_s)));
        self.rows = found;
    }

    /// What [`Adapters::look`] has found.
    pub(crate) fn view(&self, now: Nanos, adapter: AdapterKey) -> AdapterView<'_> {
        let copies = self.asked.get(&adapter).map_or(0, |asked| asked.copies);
        let gap_s = self.load_gap.secs.max((now - self.last_load).as_secs_f64());
        AdapterView {
            rows: &self.rows,
            copies,
            gap_s: self.gap_s(now, adapter),
            seen_s: self.seen_s(now),
            load_gap_s: gap_s * self.rows.len() as f64,
        }
    }

    /// How an adapter is used at an endpoint.
    pub(crate) fn use_of(&self, endpoint: EndpointId, adapter: AdapterKey) -> AdapterUse {
        let held =
            self.slots.get(endpoint).and_then(|slots| slots.held.iter().find(|held| held.adapter == adapter));
        held.map_or_else(AdapterUse::default, |held| AdapterUse { users: held.users, used: held.used })
    }

    /// Whether requests wait there until an adapter is loaded.
    pub(crate) fn loads_at(&self, endpoint: EndpointId) -> bool {
        let slots = self.slots.get(endpoint);
        slots.is_some_and(|slots| slots.held.iter().any(|held| held.loading.is_some()))
    }

    /// Adapters that an endpoint can have loaded at once, if it has reported that.
    pub(crate) fn slots_of(&self, endpoint: EndpointId) -> Option<u32> {
        self.slots.get(endpoint)?.max
    }

    fn seen_s(&self, now: Nanos) -> f64 {
        self.began.map_or(0.0, |began| (now - began).as_secs_f64())
    }

    /// Expected seconds between two requests of an adapter.
    fn gap_s(&self, now: Nanos, adapter: AdapterKey) -> f64 {
        let Some(asked) = self.asked.get(&adapter) else { return self.seen_s(now) };
        match asked.count {
            0 | 1 => self.seen_s(now),
            _ => asked.mean_gap_s.max((now - asked.last).as_secs_f64()),
        }
    }

    fn row(&self, now: Nanos, adapter: AdapterKey, endpoint: EndpointId, answer_s: f64) -> AdapterRow {
        let nothing = Slots::default();
        let slots = self.slots.get(endpoint).unwrap_or(&nothing);
        let reported = slots.reported_of(adapter);
        let (load_s, progress_s) = slots.load_s(now, &self.load);
        let wait_for = |loads: usize| (loads as f64 * load_s - progress_s).max(0.0);
        let loads = slots.held.iter().filter(|held| held.loading.is_some()).count();
        if let Some(place) = slots.held.iter().position(|held| held.adapter == adapter) {
            let is_loading = slots.held[place].loading.is_some();
            let before = slots.held[..place].iter().filter(|held| held.loading.is_some()).count();
            let wait_s = if is_loading { wait_for(before + 1) } else { 0.0 };
            return AdapterRow {
                loaded: true,
                has_room: false,
                wait_s,
                load_s: 0.0,
                evicted: None,
                reported,
            };
        }
        let has_room = slots.held.len() < slots.max() as usize;
        let evicted = slots.evictable().filter(|_| !has_room).map(|held| Evicted {
            gap_s: self.gap_s(now, held.adapter),
            last: self.asked.get(&held.adapter).is_none_or(|asked| asked.copies <= 1),
        });
        let mut wait_s = wait_for(loads);
        if !has_room && evicted.is_none() {
            let users = f64::from(slots.held.iter().map(|held| held.users).min().unwrap_or(0));
            // The last of so many answers, each at a random place of its usual length.
            wait_s = wait_s.max(answer_s * users / (users + 1.0));
        }
        AdapterRow { loaded: false, has_room, wait_s: wait_s + load_s, load_s, evicted, reported }
    }

    /// A request was placed. `first_token_s` is the expected time to its first token without a load. Returns whether it waits
    /// for a load or a slot.
    pub(crate) fn placed(
        &mut self,
        now: Nanos,
        request: RequestId,
        adapter: AdapterKey,
        at: (EndpointId, AdapterRow),
        first_token_s: f64,
    ) -> bool {
        let (endpoint, AdapterRow { loaded, wait_s, has_room, evicted, .. }) = at;
        self.used += 1;
        let used = self.used;
        let slots = self.slots.get_or_insert(endpoint, Slots::default);
        match slots.held.iter_mut().find(|held| held.adapter == adapter) {
            Some(held) => (held.users, held.used) = (held.users.saturating_add(1), used),
            None => {
                slots.held.push(Held { adapter, users: 1, used, loading: Some(now) });
                let before = std::mem::replace(&mut self.last_load, now);
                self.load_gap.see((now - before).as_secs_f64());
                self.copied(adapter, 1);
                self.trim(endpoint);
            }
        }
        let timed = (!loaded && (has_room || evicted.is_some())).then_some((now, first_token_s));
        self.flights.insert(request, Flight { adapter, endpoint, timed });
        wait_s > 0.0
    }

    /// Counts a request of an adapter. One that is tried again counts once.
    pub(crate) fn ask(&mut self, now: Nanos, adapter: AdapterKey) {
        self.make_room(adapter);
        let first = Asked { count: 0, last: now, mean_gap_s: 0.0, copies: 0 };
        let asked = self.asked.entry(adapter).or_insert(first);
        if asked.count > 0 {
            let weight = 1.0 / f64::from(asked.count.min(GAPS_MEAN));
            asked.mean_gap_s += weight * ((now - asked.last).as_secs_f64() - asked.mean_gap_s);
        }
        (asked.count, asked.last) = (asked.count.saturating_add(1), now);
    }

    fn make_room(&mut self, adapter: AdapterKey) {
        if self.asked.len() < ADAPTERS_MAX || self.asked.contains_key(&adapter) {
            return;
        }
        let absent = self.asked.iter().filter(|(_, asked)| asked.copies == 0);
        let oldest = absent.min_by_key(|(key, asked)| (asked.last, **key)).map(|(key, _)| *key);
        oldest.into_iter().for_each(|key| _ = self.asked.remove(&key));
    }

    /// Changes the number of endpoints that hold an adapter.
    fn copied(&mut self, adapter: AdapterKey, by: i32) {
        self.make_room(adapter);
        let first = Asked { count: 0, last: Nanos::ZERO, mean_gap_s: 0.0, copies: 0 };
        let asked = self.asked.entry(adapter).or_insert(first);
        asked.copies = asked.copies.saturating_add_signed(by);
    }

    /// Evicts what an endpoint cannot hold.
    fn trim(&mut self, endpoint: EndpointId) {
        loop {
            let slots = self.slots.get_or_insert(endpoint, Slots::default);
            let Some(evicted) = slots.over().map(|place| slots.held.remove(place)) else { return };
            self.copied(evicted.adapter, -1);
        }
    }

    /// The first token of a request has arrived; `seen` is whether its time is known.
    pub(crate) fn first_token(&mut self, now: Nanos, request: RequestId, seen: bool) {
        let Some(flight) = self.flights.get_mut(&request) else { return };
        let (adapter, timed) = (flight.adapter, flight.timed.take());
        let slots = self.slots.get_or_insert(flight.endpoint, Slots::default);
        if let Some(held) = slots.held.iter_mut().find(|held| held.adapter == adapter) {
            held.loading = None;
        }
        let Some((placed, first_token_s)) = timed.filter(|_| seen) else { return };
        let loaded_at = now - Nanos::from_secs_f64(first_token_s);
        let before = std::mem::replace(&mut slots.loaded_at, loaded_at);
        let taken_s = (loaded_at - placed.max(before)).as_secs_f64();
        slots.load.see(taken_s);
        self.load.see(taken_s);
    }

    /// Whether no request with an adapter is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.flights.is_empty()
    }

    /// A request is over.
    pub(crate) fn finished(&mut self, request: RequestId) {
        let Some(Flight { adapter, endpoint, .. }) = self.flights.remove(&request) else { return };
        let slots = self.slots.get_or_insert(endpoint, Slots::default);
        if let Some(held) = slots.held.iter_mut().find(|held| held.adapter == adapter) {
            held.users = held.users.saturating_sub(1);
            // No first token will tell.
            held.loading = held.loading.filter(|_| held.users > 0);
        }
        self.trim(endpoint);
    }

    /// An engine reports its adapters.
    pub(crate) fn report(&mut self, endpoint: EndpointId, reported: AdapterReport) {
        let slots = self.slots.get_or_insert(endpoint, Slots::default);
        slots.max = reported.slots.or(slots.max);
        let absent = |adapter: &&AdapterKey| slots.held.iter().all(|held| held.adapter != **adapter);
        let unknown: Vec<_> = reported.running.iter().filter(absent).copied().collect();
        slots.reported = reported;
        for adapter in unknown {
            self.used += 1;
            let held = Held { adapter, users: 0, used: self.used, loading: None };
            self.slots.get_or_insert(endpoint, Slots::default).held.push(held);
            self.copied(adapter, 1);
        }
        self.trim(endpoint);
    }

    /// An endpoint has restarted or left: nothing is loaded there.
    pub(crate) fn forget(&mut self, endpoint: EndpointId) {
        if self.slots.get(endpoint).is_none() {
            return;
        }
        let slots = self.slots.get_or_insert(endpoint, Slots::default);
        slots.reported = AdapterReport::default();
        let forgotten = std::mem::take(&mut slots.held);
        forgotten.into_iter().for_each(|held| self.copied(held.adapter, -1));
    }
}

// === impl Mean ===

impl Mean {
    fn see(&mut self, secs: f64) {
        self.samples = (self.samples + 1).min(LOADS_MEAN);
        self.secs += (secs - self.secs) / f64::from(self.samples);
    }
}

// === impl Slots ===

impl Slots {
    fn max(&self) -> u32 {
        self.max.unwrap_or(HELD_MAX).max(1)
    }

    /// The adapter that is evicted next; none while all are in use.
    fn evictable(&self) -> Option<&Held> {
        self.held.iter().filter(|held| held.users == 0).min_by_key(|held| held.used)
    }

    /// The place of an adapter that must be evicted, if any can.
    fn over(&self) -> Option<usize> {
        let evicted = self.evictable().filter(|_| self.held.len() > self.max() as usize)?.adapter;
        self.held.iter().position(|held| held.adapter == evicted)
    }

    /// Seconds of a load, and for how long the one in progress has been going on. A load takes at least as long as that.
    fn load_s(&self, now: Nanos, pool: &Mean) -> (f64, f64) {
        let begun = self.held.iter().find_map(|held| held.loading);
        let progress_s = begun.map_or(0.0, |placed| (now - placed.max(self.loaded_at)).as_secs_f64());
        let known = [&self.load, pool].into_iter().find(|time| time.samples >= SURE);
        let secs = known.or(Some(pool).filter(|pool| pool.samples > 0)).map_or(LOAD_S, |time| time.secs);
        (secs.max(progress_s), progress_s)
    }

    fn reported_of(&self, adapter: AdapterKey) -> Reported {
        let AdapterReport { slots, running, waiting } = &self.reported;
        let has_room = slots.is_none_or(|slots| ((running.len() + waiting.len()) as u64) < u64::from(slots));
        match () {
            () if running.contains(&adapter) => Reported::Running,
            () if has_room => Reported::Room,
            () if waiting.contains(&adapter) => Reported::Waiting,
            () => Reported::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    const ANSWER_S: f64 = 0.7;

    fn key(n: u64) -> AdapterKey {
        AdapterKey::named(&n.to_le_bytes())
    }

    fn endpoint(slot: u16) -> EndpointId {
        EndpointId::new(slot, 0)
    }

    fn at(millis: u64) -> Nanos {
        Nanos::from_millis(millis)
    }

    /// Two endpoints with two slots each.
    fn adapters() -> Adapters {
        let mut adapters = Adapters::default();
        for slot in 0..2 {
            adapters.report(endpoint(slot), AdapterReport { slots: Some(2), ..AdapterReport::default() });
        }
        adapters
    }

    fn rows(adapters: &mut Adapters, now: Nanos, adapter: u64) -> Vec<AdapterRow> {
        adapters.look(now, key(adapter), [0, 1].map(|slot| (endpoint(slot), ANSWER_S)).into_iter());
        adapters.view(now, key(adapter)).rows.to_vec()
    }

    /// A request with an adapter is placed in a slot, which answers it after `millis`.
    fn serve(adapters: &mut Adapters, id: u64, now: u64, (adapter, slot): (u64, u16), millis: u64) {
        place(adapters, id, now, (adapter, slot));
        adapters.first_token(at(now + millis), RequestId(id), true);
        adapters.finished(RequestId(id));
    }

    fn place(adapters: &mut Adapters, id: u64, now: u64, (adapter, slot): (u64, u16)) -> bool {
        adapters.ask(at(now), key(adapter));
        let row = rows(adapters, at(now), adapter)[usize::from(slot)];
        adapters.placed(at(now), RequestId(id), key(adapter), (endpoint(slot), row), 0.0)
    }

    /// Invariant: An endpoint is believed to hold the adapters that it was sent last, as many as it has slots, and those in use.
    #[test]
    fn the_least_recently_used_adapter_without_a_request_is_evicted() {
        let mut adapters = adapters();
        (1..=2).for_each(|n| serve(&mut adapters, n, 10 * n, (n, 0), 5));
        let found = rows(&mut adapters, at(100), 3);
        assert!(!found[0].has_room && found[1].has_room);
        assert!(found[0].evicted.is_some_and(|evicted| evicted.last));
        place(&mut adapters, 3, 100, (1, 0));
        serve(&mut adapters, 4, 110, (3, 0), 5);
        assert!(!rows(&mut adapters, at(200), 2)[0].loaded, "the first was in use");
        assert!(rows(&mut adapters, at(200), 1)[0].loaded);
        let used = |n| adapters.use_of(endpoint(0), key(n));
        assert_eq!((used(1).users, used(3).users, used(2)), (1, 0, AdapterUse::default()));
        assert!(used(3).used > used(1).used, "it was used later");
        adapters.forget(endpoint(0));
        assert!(!rows(&mut adapters, at(200), 1)[0].loaded);
    }

    #[test]
    fn a_copy_elsewhere_makes_an_eviction_free() {
        let mut adapters = adapters();
        serve(&mut adapters, 1, 0, (1, 0), 5);
        serve(&mut adapters, 2, 10, (2, 0), 5);
        serve(&mut adapters, 3, 20, (1, 1), 5);
        let evicted = rows(&mut adapters, at(30), 3)[0].evicted.expect("both slots are taken");
        assert!(!evicted.last);
        assert_eq!(adapters.view(at(30), key(1)).copies, 2);
        adapters.forget(endpoint(1));
        assert_eq!(adapters.view(at(30), key(1)).copies, 1);
    }

    #[test]
    fn where_all_slots_are_in_use_a_request_waits_for_an_answer() {
        let mut adapters = adapters();
        (1..=2).for_each(|n| _ = place(&mut adapters, n, 0, (n, 0)));
        (1..=2).for_each(|n| adapters.first_token(at(400), RequestId(n), true));
        let row = rows(&mut adapters, at(400), 3)[0];
        assert!(!row.has_room && row.evicted.is_none());
        assert!(row.wait_s > row.load_s + 0.3, "half of an answer: {row:?}");
        assert!(place(&mut adapters, 3, 400, (3, 0)));
        adapters.finished(RequestId(1));
        assert!(!rows(&mut adapters, at(500), 1)[0].loaded, "it gives way to the one that waits");
    }

    /// Invariant: The time of a load is learned from first tokens that waited for one, however many loads came before it.
    #[test]
    fn loads_follow_each_other_and_their_time_is_learned() {
        let mut adapters = adapters();
        (1..=2).for_each(|n| _ = place(&mut adapters, n, 0, (n, 0)));
        assert_eq!(rows(&mut adapters, at(0), 2)[0].wait_s, 2.0 * LOAD_S);
        assert_eq!(
            rows(&mut adapters, at(800), 2)[0].wait_s,
            0.8,
            "a load takes at least as long as the one in progress"
        );
        adapters.first_token(at(1000), RequestId(1), true);
        adapters.first_token(at(2000), RequestId(2), true);
        let row = rows(&mut adapters, at(2000), 3)[1];
        assert!((row.load_s - 1.0).abs() < 1e-9 && row.wait_s == row.load_s, "{row:?}");
        assert_eq!(rows(&mut adapters, at(2000), 2)[0].wait_s, 0.0);
    }

    #[test]
    fn what_engines_report_corrects_what_was_sent() {
        let mut adapters = adapters();
        (1..=2).for_each(|n| serve(&mut adapters, n, 10 * n, (n, 0), 5));
        let reported = AdapterReport { slots: Some(2), running: vec![key(7)], waiting: vec![key(8)] };
        adapters.report(endpoint(0), reported);
        let of = |adapters: &mut Adapters, n| rows(adapters, at(100), n)[0];
        assert!(of(&mut adapters, 7).loaded && of(&mut adapters, 2).loaded && !of(&mut adapters, 1).loaded);
        let reported = [7, 8, 9].map(|n| of(&mut adapters, n).reported);
        assert_eq!(reported, [Reported::Running, Reported::Waiting, Reported::Nothing]);
    }

    #[test]
    fn adapters_beyond_the_bound_are_forgotten() {
        let mut adapters = Adapters::default();
        (0..2 * ADAPTERS_MAX as u64).for_each(|n| adapters.ask(at(n), key(n)));
        assert_eq!(adapters.asked.len(), ADAPTERS_MAX);
        (0..4).for_each(|n| adapters.ask(at(9000 + 500 * n), key(9000)));
        assert!((adapters.gap_s(at(10_500), key(9000)) - 0.5).abs() < 1e-9);
    }
}
