//! Endpoints: one routable engine each, and the pool of endpoints that serve one model.
//!
//! The [`Pool`] is the only owner of the fleet's state and of the in-flight ledger per endpoint.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::breaker::Breaker;
use crate::busy::Busy;
use crate::cache_accuracy::CacheAccuracy;
use crate::disaggregation::Part;
use crate::load::{InFlight, Load, LoadReport};
use crate::rates::{Pace, Told};
use crate::time::{Nanos, micros_since};

/// Unique id of an endpoint within its pool: a slot, and how often the slot has been reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EndpointId(u32);

impl EndpointId {
    /// The `generation`-th endpoint in `slot`.
    pub const fn new(slot: u16, generation: u16) -> Self {
        Self(((generation as u32) << 16) | slot as u32)
    }

    /// Position in the pool, dense and small: an index for tables by endpoint.
    pub const fn slot(self) -> usize {
        (self.0 & 0xFFFF) as usize
    }

    /// Slot and generation as one number, for hashing.
    pub(crate) const fn number(self) -> u32 {
        self.0
    }

    pub(crate) const fn numbered(number: u32) -> Self {
        Self(number)
    }

    /// How often the slot had been reused.
    #[cfg(test)]
    pub(crate) const fn generation(self) -> u16 {
        (self.0 >> 16) as u16
    }

    /// Whether `self` occupied the slot before `other`, which has the same slot. Generations wrap at 65,536.
    pub(crate) const fn is_before(self, other: Self) -> bool {
        let later = ((other.0 >> 16) as u16).wrapping_sub((self.0 >> 16) as u16);
        0 < later && later < 1 << 15
    }
}

/// One routable engine.
#[derive(Clone, Debug)]
pub struct Endpoint {
    /// Its id.
    pub id: EndpointId,
    /// Its display name: its address.
    pub name: Arc<str>,
    /// Whether requests may be placed on it.
    pub healthy: bool,
    /// It accepts no new requests and leaves when its last request is over.
    pub draining: bool,
    /// Its part in disaggregated serving.
    pub part: Part,
    /// Its load: this router's requests in flight there.
    pub load: Load,
    /// Requests in flight there of this pool's routers in other replicas, as far as they have told.
    pub elsewhere: InFlight,
    /// The state of its KV event feed, and the accuracy of predictions about its cache.
    pub cache_accuracy: CacheAccuracy,
    /// Its measured speed.
    pub pace: Pace,
    /// What its engine has told of its own steps.
    pub(crate) told: Option<Told>,
    /// TPOT objectives of this router's requests in flight there that should meet them.
    pub(crate) tpots: Tpots,
    /// Since when it computes the first of this router's prompts that wait there, if any does.
    pub(crate) computing_since: Nanos,
    /// Its circuit breaker.
    pub breaker: Breaker,
    /// Whether it has stopped making progress on its requests in flight.
    pub stalled: bool,
    /// Its back-off after a busy answer.
    pub busy: Busy,
    /// When it recovered, during slow start.
    pub back_since: Option<Nanos>,
    /// Whether it was healthy before: the first time it becomes healthy is not a recovery.
    pub(crate) was_healthy: bool,
}

/// TPOT objectives in milliseconds, and how many requests have each.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tpots(BTreeMap<u32, u32>);

/// The endpoints that serve one model. At most 65,535.
#[derive(Debug, Default)]
pub struct Pool {
    slots: Vec<Slot>,
    /// Slots whose endpoint may have changed since [`Pool::take_changed`].
    changed: Vec<u16>,
}

#[derive(Debug, Default)]
struct Slot {
    generation: u16,
    endpoint: Option<Endpoint>,
    /// Whether it is among the changed slots.
    changed: bool,
}

// === impl Endpoint ===

impl Endpoint {
    /// Requests in flight there, of all routers.
    pub fn in_flight(&self) -> InFlight {
        self.load.in_flight.plus(&self.elsewhere)
    }

    /// Its load as one router's that had placed all requests.
    pub(crate) fn load_of_all(&self) -> Load {
        Load { in_flight: self.in_flight(), ..self.load }
    }

    /// Seconds for which it has computed the first of this router's prompts that wait there.
    pub(crate) fn computing_s(&self, now: Nanos) -> f64 {
        if self.load.in_flight.prefilling == 0 {
            return 0.0;
        }
        f64::from(micros_since(self.computing_since.micros(), now)) * 1e-6
    }
}

// === impl Tpots ===

impl Tpots {
    pub(crate) fn add(&mut self, most_ms: u32) {
        *self.0.entry(most_ms).or_default() += 1;
    }

    pub(crate) fn remove(&mut self, most_ms: u32) {
        if let Entry::Occupied(mut entry) = self.0.entry(most_ms) {
            *entry.get_mut() -= 1;
            if *entry.get() == 0 {
                entry.remove();
            }
        }
    }

    /// How many are met by steps of `before_ms` and missed by those of `with_ms`.
    pub(crate) fn between(&self, before_ms: f64, with_ms: f64) -> u32 {
        let (first, end) = (before_ms.ceil() as u32, with_ms.ceil() as u32);
        if first < end { self.0.range(first..end).map(|(_, requests)| requests).sum() } else { 0 }
    }
}

// === impl Pool ===

impl Pool {
    /// By slot: its generation, and its endpoint.
    pub(crate) fn slots(&self) -> impl Iterator<Item = (u16, Option<&Endpoint>)> {
        self.slots.iter().map(|slot| (slot.generation, slot.endpoint.as_ref()))
    }

    /// Adds an empty slot with the generation of `id`. Slots must be added in order.
    pub(crate) fn skip(&mut self, id: EndpointId) {
        if id.slot() == self.slots.len() {
            self.slots.push(Slot { generation: (id.0 >> 16) as u16, ..Slot::default() });
        }
    }

    /// The id that the next [`Pool::join`] must use; `None` if the pool is full.
    pub fn next_id(&self) -> Option<EndpointId> {
        let free = self.slots.iter().position(|slot| slot.endpoint.is_none());
        let slot = free.unwrap_or(self.slots.len());
        let generation = free.map_or(0, |slot| self.slots[slot].generation);
        Some(EndpointId::new(u16::try_from(slot).ok()?, generation))
    }

    /// Adds a healthy, idle endpoint. An id other than [`Pool::next_id`] is ignored: it comes from a recording of a
    /// different pool.
    pub fn join(&mut self, id: EndpointId, name: Arc<str>) {
        if self.next_id() != Some(id) {
            return;
        }
        if id.slot() == self.slots.len() {
            self.slots.push(Slot::default());
        }
        self.join_at(id, name);
    }

    /// Adds an endpoint in an existing free slot, with the generation of its id.
    pub(crate) fn join_at(&mut self, id: EndpointId, name: Arc<str>) {
        let generation = (id.0 >> 16) as u16;
        let free = |slot: &&mut Slot| slot.endpoint.is_none() && slot.generation == generation;
        let Some(slot) = self.slots.get_mut(id.slot()).filter(free) else { return };
        slot.endpoint = Some(Endpoint {
            id,
            name,
            healthy: true,
            draining: false,
            part: Part::default(),
            load: Load::default(),
            elsewhere: InFlight::default(),
            cache_accuracy: CacheAccuracy::default(),
            pace: Pace::default(),
            told: None,
            tpots: Tpots::default(),
            computing_since: Nanos::ZERO,
            breaker: Breaker::default(),
            stalled: false,
            busy: Busy::default(),
            back_since: None,
            was_healthy: false,
        });
        self.note_change(id.slot());
    }

    /// Notes that the endpoint in a slot has changed.
    pub(crate) fn note_change(&mut self, slot: usize) {
        if let Some(of) = self.slots.get_mut(slot)
            && !std::mem::replace(&mut of.changed, true)
        {
            self.changed.push(slot as u16);
        }
    }

    /// A slot whose endpoint may have changed since it was last returned, and the endpoint.
    pub(crate) fn take_changed(&mut self) -> Option<(usize, Option<&Endpoint>)> {
        let slot = usize::from(self.changed.pop()?);
        self.slots[slot].changed = false;
        Some((slot, self.slots[slot].endpoint.as_ref()))
    }

    /// The number of slots.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// The endpoint in a slot.
    pub(crate) fn at(&self, slot: usize) -> Option<&Endpoint> {
        self.slots.get(slot)?.endpoint.as_ref()
    }

    /// Removes an endpoint; its id is not reused.
    pub fn leave(&mut self, id: EndpointId) {
        if self.get(id).is_some() {
            let slot = &mut self.slots[id.slot()];
            slot.endpoint = None;
            slot.generation = slot.generation.wrapping_add(1);
            self.note_change(id.slot());
        }
    }

    /// The endpoint, if it is still in the pool.
    pub fn get(&self, id: EndpointId) -> Option<&Endpoint> {
        self.slots.get(id.slot())?.endpoint.as_ref().filter(|endpoint| endpoint.id == id)
    }

    pub(crate) fn get_mut(&mut self, id: EndpointId) -> Option<&mut Endpoint> {
        self.note_change(id.slot());
        self.slots.get_mut(id.slot())?.endpoint.as_mut().filter(|endpoint| endpoint.id == id)
    }

    /// All endpoints in slot order.
    pub fn endpoints(&self) -> impl Iterator<Item = &Endpoint> {
        self.slots.iter().filter_map(|slot| slot.endpoint.as_ref())
    }

    /// All endpoints in slot order. Changes must be [noted](Pool::note_change).
    pub(crate) fn endpoints_mut(&mut self) -> impl Iterator<Item = &mut Endpoint> {
        self.slots.iter_mut().filter_map(|slot| slot.endpoint.as_mut())
    }

    /// Healthy endpoints that are not draining, in slot order. Whether they accept requests at the moment is not
    /// checked.
    pub fn eligible(&self) -> impl Iterator<Item = &Endpoint> {
        self.endpoints().filter(|endpoint| endpoint.healthy && !endpoint.draining)
    }

    /// Number of eligible endpoints and their total KV cache capacity in tokens. Endpoints that report no capacity
    /// count with the mean of the others; 0 if none reports.
    pub(crate) fn kv_capacity_tokens(&self) -> (usize, u64) {
        let told = |endpoint: &Endpoint| endpoint.load.reported?.0.kv_capacity_tokens;
        let (count, known, sum) = self.eligible().fold((0, 0, 0u64), |(count, known, sum), endpoint| {
            let told = told(endpoint);
            (count + 1, known + u64::from(told.is_some()), sum.saturating_add(told.unwrap_or(0)))
        });
        (count, sum.checked_div(known).unwrap_or(0).saturating_mul(count as u64))
    }

    /// Sets whether an endpoint is healthy.
    pub fn set_health(&mut self, id: EndpointId, healthy: bool) {
        if let Some(endpoint) = self.get_mut(id) {
            endpoint.healthy = healthy;
        }
    }

    /// Sets whether an endpoint is draining.
    pub fn set_draining(&mut self, id: EndpointId, draining: bool) {
        if let Some(endpoint) = self.get_mut(id) {
            endpoint.draining = draining;
        }
    }

    /// Stores an engine's load report.
    pub fn report(&mut self, id: EndpointId, now: Nanos, reported: LoadReport) {
        if let Some(endpoint) = self.get_mut(id) {
            endpoint.load.reported = Some((reported, now));
        }
    }

    /// The cache accuracy of an endpoint that is still in the pool.
    pub(crate) fn cache_accuracy_mut(&mut self, id: EndpointId) -> Option<&mut CacheAccuracy> {
        self.get_mut(id).map(|endpoint| &mut endpoint.cache_accuracy)
    }

    /// The ledger of an endpoint that is still in the pool.
    pub(crate) fn in_flight_mut(&mut self, id: EndpointId) -> Option<&mut InFlight> {
        self.get_mut(id).map(|endpoint| &mut endpoint.load.in_flight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn join(pool: &mut Pool, name: &str) -> EndpointId {
        let id = pool.next_id().expect("room");
        pool.join(id, name.into());
        id
    }

    /// Invariant: An endpoint's id is never reused for its successor.
    ///
    /// Also held by `settling_after_the_endpoint_left_touches_no_successor_in_its_slot`.
    #[test]
    fn a_reused_slot_has_a_new_id() {
        let mut pool = Pool::default();
        let (a, b) = (join(&mut pool, "a"), join(&mut pool, "b"));
        pool.leave(a);
        let c = join(&mut pool, "c");
        assert_eq!(c.slot(), a.slot());
        assert_ne!(c, a);
        assert!(pool.get(a).is_none(), "the old id is invalid");
        assert_eq!(pool.endpoints().map(|e| e.id).collect::<Vec<_>>(), [c, b]);
    }

    #[test]
    fn only_healthy_endpoints_that_stay_are_eligible() {
        let mut pool = Pool::default();
        let (a, b, c) = (join(&mut pool, "a"), join(&mut pool, "b"), join(&mut pool, "c"));
        pool.set_health(a, false);
        pool.set_draining(b, true);
        assert_eq!(pool.eligible().map(|e| e.id).collect::<Vec<_>>(), [c]);
        pool.set_health(a, true);
        assert_eq!(pool.eligible().count(), 2);
    }
}
