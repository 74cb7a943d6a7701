//! Begin and end of faults, and their detection by probes.
//!
//! The number of faults in force is counted per kind and endpoint, so overlapping faults combine: in any order of
//! begins and ends, an endpoint is affected while any of them lasts, and works normally when all have ended.

use kvlane_core::block::BlockHash;
use kvlane_core::cache_accuracy::Feed;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::event::{EngineHash, KvEvent, StoredBlock, Tier};
use kvlane_core::health::Probe;
use kvlane_core::scheduler::{Input, Scheduler};
use kvlane_core::time::Nanos;

use super::{Event, World};
use crate::fault::Fault;
use crate::world::seat::Found;

/// Time between two batches of a flooded feed.
const FLOOD_EVERY: Nanos = Nanos::from_millis(20);
/// Blocks in one batch.
const FLOOD_BLOCKS: usize = 64;

// === impl World ===

impl World {
    /// The effect of a fault on the fleet. The run handles its effect on requests.
    pub(super) fn begin_fault(&mut self, index: usize) {
        let (now, fault) = (self.now(), self.config.faults[index]);
        let at = match fault.endpoint() {
            Some(at) if at < self.seats.len() => at,
            Some(_) => return,
            None => return self.reload(),
        };
        let trouble = &mut self.seats[at].trouble;
        match fault {
            Fault::Death { .. } => {
                trouble.deaths += 1;
                if trouble.deaths == 1 && !trouble.away {
                    self.bury(at);
                }
            }
            Fault::Slow { factor, .. } => {
                trouble.slow.push((index, factor));
                self.seats[at].set_slowdown(now);
                self.watch(at);
            }
            Fault::Pause { .. } => {
                self.seats[at].halt(now);
                self.watch(at);
            }
            Fault::BlackHole { .. } => trouble.holes += 1,
            Fault::Busy { retry_after, .. } => trouble.busy.push((index, retry_after)),
            Fault::CutFeed { .. } => {
                trouble.cuts += 1;
                self.lose_feed(at);
            }
            Fault::FloodFeed { .. } => {
                trouble.floods += 1;
                if trouble.floods == 1 {
                    self.flood(at);
                }
            }
            Fault::Drain { .. } => {
                trouble.drains += 1;
                self.tell_draining(at);
            }
            Fault::Replace { .. } => {
                trouble.leaving += 1;
                self.tell_draining(at);
            }
            Fault::Reset { .. } | Fault::Reload { .. } => {}
        }
        if let Some(until) = fault.until() {
            self.clock.schedule(until, Event::Over(index));
        }
    }

    /// A fault ends.
    pub(super) fn end_fault(&mut self, index: usize) {
        let (now, fault) = (self.now(), self.config.faults[index]);
        let Some(at) = fault.endpoint() else { return };
        let trouble = &mut self.seats[at].trouble;
        match fault {
            Fault::Death { .. } => {
                trouble.deaths -= 1;
                if trouble.deaths == 0 && !trouble.away {
                    self.revive(at);
                }
            }
            Fault::Slow { .. } => {
                trouble.slow.retain(|(of, _)| *of != index);
                self.seats[at].set_slowdown(now);
                self.watch(at);
            }
            Fault::Pause { .. } => {
                self.seats[at].go_on(now);
                self.watch(at);
            }
            Fault::BlackHole { .. } => {
                trouble.holes -= 1;
                self.begin_feed_anew(at);
            }
            Fault::Busy { .. } => trouble.busy.retain(|(of, _)| *of != index),
            Fault::CutFeed { .. } => {
                trouble.cuts -= 1;
                self.begin_feed_anew(at);
            }
            Fault::FloodFeed { .. } => {
                trouble.floods -= 1;
                self.begin_feed_anew(at);
            }
            Fault::Drain { .. } => {
                trouble.drains -= 1;
                self.tell_draining(at);
            }
            Fault::Replace { .. } => {
                trouble.leaving -= 1;
                if trouble.leaving == 0 && trouble.away {
                    self.come(at);
                }
                self.tell_draining(at);
            }
            Fault::Reset { .. } | Fault::Reload { .. } => {}
        }
    }

    /// Replaces a dead engine by an empty one, which accepts nothing until it is revived.
    fn bury(&mut self, at: usize) {
        let now = self.now();
        self.seats[at].replace_engine(now);
        if self.config.rules.is_some() {
            return self.lose_feed(at);
        }
        self.clock.schedule(now + self.config.health_delay, Event::Health { seat: at as u16 });
    }

    fn revive(&mut self, at: usize) {
        if self.config.rules.is_some() {
            return self.begin_feed_anew(at);
        }
        self.clock.schedule(self.now() + self.config.health_delay, Event::Health { seat: at as u16 });
    }

    /// A draining endpoint has no request left: it leaves if it is to. Endpoints of two pools may have the same id,
    /// so the pool of the requests is checked.
    pub(super) fn drained(&mut self, endpoint: EndpointId) {
        let now = self.now();
        for pool in 0..self.routers.len() {
            let Some(&at) = self.slots[pool].get(endpoint.slot()) else { continue };
            let (seat, router) = (&mut self.seats[at], &self.routers[pool]);
            let in_flight = |scheduler: &Scheduler| {
                scheduler.pool().get(endpoint).is_none_or(|endpoint| endpoint.load.in_flight.requests > 0)
            };
            if seat.id != endpoint || seat.trouble.leaving == 0 || seat.trouble.away || router.read(in_flight)
            {
                continue;
            }
            seat.trouble.away = true;
            seat.replace_engine(now);
            router.leave(now, endpoint, &mut self.outputs);
        }
    }

    /// Another engine joins where one has left. Its first probe determines its health.
    fn come(&mut self, at: usize) {
        let now = self.now();
        let seat = &mut self.seats[at];
        seat.trouble.away = false;
        seat.found = Found::new(seat.trouble.deaths == 0);
        let (pool, healthy) = (seat.pool, seat.found.healthy);
        let name = format!("engine-{at}-{}", seat.generation).into();
        let Some(id) = self.routers[pool].join(now, name, healthy, false, &mut self.outputs) else { return };
        seat.id = id;
        let slots = &mut self.slots[pool];
        slots.resize(slots.len().max(id.slot() + 1), at);
        slots[id.slot()] = at;
        self.lose_feed(at);
        self.begin_feed_anew(at);
    }

    fn tell_draining(&mut self, at: usize) {
        let now = self.now();
        let seat = &self.seats[at];
        let draining = seat.trouble.drains + seat.trouble.leaving > 0;
        let endpoint = seat.id;
        self.routers[seat.pool].step(now, Input::Draining { endpoint, draining }, &mut self.outputs);
    }

    /// Reports an endpoint's health to the router. One that has `started` again holds none of its predicted blocks.
    pub(super) fn tell_health(&mut self, at: usize, healthy: bool, started: bool) {
        let (now, seat) = (self.now(), &self.seats[at]);
        let (endpoint, router) = (seat.id, &self.routers[seat.pool]);
        if started {
            router.forget(now, endpoint, &mut self.outputs);
        }
        router.step(now, Input::Health { endpoint, healthy }, &mut self.outputs);
    }

    fn reload(&mut self) {
        let now = self.now();
        self.reloads += 1;
        let usual = &self.config.router;
        let read = self.config.reloaded.as_ref().filter(|_| self.reloads % 2 == 1).unwrap_or(usual);
        self.routers[0].configure(now, read.clone(), &mut self.outputs);
    }

    // --- feeds

    fn lose_feed(&mut self, at: usize) {
        let (now, seat) = (self.now(), &self.seats[at]);
        if seat.engine.config().kv_events {
            self.routers[seat.pool].set_feed(now, seat.id, Feed::Syncing, &mut self.outputs);
        }
    }

    /// A feed works again if it has no other fault: events reported before, and still in transit, are void.
    fn begin_feed_anew(&mut self, at: usize) {
        let now = self.now();
        let seat = &mut self.seats[at];
        let trouble = &seat.trouble;
        if !seat.alive()
            || trouble.holes + trouble.cuts + trouble.floods > 0
            || !seat.engine.config().kv_events
        {
            return;
        }
        seat.generation += 1;
        let (router, id) = (&self.routers[seat.pool], seat.id);
        router.apply(id, &KvEvent::Cleared);
        router.set_feed(now, id, Feed::Live, &mut self.outputs);
    }

    /// Reports false blocks to the router.
    pub(super) fn flood(&mut self, at: usize) {
        let seat = &self.seats[at];
        if seat.trouble.floods == 0 || !seat.engine.config().kv_events {
            return;
        }
        if seat.answers() && seat.trouble.cuts == 0 {
            let rng = &mut self.rng;
            let block = |_| StoredBlock { name: EngineHash(rng.next_u64()), hash: BlockHash(rng.next_u64()) };
            let blocks = (0..FLOOD_BLOCKS).map(block).collect();
            self.routers[seat.pool]
                .apply(seat.id, &KvEvent::Stored { parent: None, blocks, tier: Tier::Gpu });
        }
        self.clock.schedule(self.clock.now() + FLOOD_EVERY, Event::Flood { seat: at as u16 });
    }

    // --- probes

    /// Schedules the first probe of every endpoint, staggered.
    pub(super) fn begin_probes(&mut self) {
        let Some(rules) = &self.config.rules else { return };
        let interval = rules.probes.interval.0;
        for at in 0..self.seats.len() {
            let first = Nanos(interval / self.seats.len() as u64 * at as u64);
            self.clock.schedule(first, Event::Probe { seat: at as u16 });
        }
    }

    /// Probes an endpoint. One that refuses connections fails at once, one that does not answer delays the probe to
    /// its timeout.
    pub(super) fn probe(&mut self, at: usize) {
        let (now, seat) = (self.now(), &mut self.seats[at]);
        let Some(rules) = &self.config.rules else { return };
        let refused = !seat.alive();
        seat.found.gone |= seat.trouble.deaths > 0;
        if refused || seat.answers() {
            return self.probed(at, now);
        }
        self.clock.schedule(now + rules.probes.timeout, Event::Probed { seat: at as u16, began: now });
    }

    /// Ends a probe that began at this time.
    pub(super) fn probed(&mut self, at: usize, began: Nanos) {
        let (now, seat) = (self.now(), &mut self.seats[at]);
        let Some(rules) = &self.config.rules else { return };
        let probes = rules.probes;
        // As in the gateway, a probe that took longer than the interval is followed by the next at once.
        self.clock.schedule(now.max(began + probes.interval), Event::Probe { seat: at as u16 });
        if seat.trouble.away {
            return;
        }
        let good = seat.answers();
        let probe = match good {
            true => Probe::Success,
            false if seat.alive() => Probe::Failure,
            false => Probe::Refused,
        };
        let changed = seat.found.note(&probes.thresholds, probe);
        let started = good && std::mem::take(&mut seat.found.gone);
        let healthy = seat.found.healthy;
        if changed || started {
            self.tell_health(at, healthy, started);
        }
    }
}
