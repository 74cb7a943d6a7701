//! Begin and end of faults, and their detection by probes.
//!
//! The number of faults in force is counted per kind and endpoint, so overlapping faults combine: in any order of
//! begins and ends, an endpoint is affected while any of them lasts, and works normally when all have ended.

use kvlane_core::block::BlockHash;
use kvlane_core::cache_accuracy::Feed;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::event::{EngineHash, KvEvent, StoredBlock, Tier};
use kvlane_core::health::Probe;
use kvlane_core::router;
use kvlane_core::scheduler::{Input, Scheduler};
use kvlane_core::time::Nanos;

use super::{Event, World};
use crate::fault::Fault;
use crate::world::node::Found;

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
            Some(at) if at < self.nodes.len() => at,
            Some(_) => return,
            None => return self.begin_gateway_fault(index, fault),
        };
        let active_faults = &mut self.nodes[at].active_faults;
        match fault {
            Fault::Death { .. } => {
                active_faults.deaths += 1;
                if active_faults.deaths == 1 && !active_faults.away {
                    self.bury(at);
                }
            }
            Fault::Slow { factor, .. } => {
                active_faults.slow.push((index, factor));
                self.nodes[at].set_slowdown(now);
                self.watch(at);
            }
            Fault::Pause { .. } => {
                self.nodes[at].halt(now);
                self.watch(at);
            }
            Fault::BlackHole { .. } => active_faults.holes += 1,
            Fault::Busy { retry_after, .. } => active_faults.busy.push((index, retry_after)),
            Fault::CutFeed { .. } => {
                active_faults.cuts += 1;
                self.lose_feed(at);
            }
            Fault::FloodFeed { .. } => {
                active_faults.floods += 1;
                if active_faults.floods == 1 {
                    self.flood(at);
                }
            }
            Fault::Drain { .. } => {
                active_faults.drains += 1;
                self.tell_draining(at);
            }
            Fault::Replace { .. } => {
                active_faults.leaving += 1;
                self.tell_draining(at);
            }
            Fault::Transfers { .. } => active_faults.transfers.push(index),
            Fault::Reset { .. }
            | Fault::Reload { .. }
            | Fault::GatewayDeath { .. }
            | Fault::Partition { .. } => {}
        }
        if let Some(until) = fault.until() {
            self.clock.schedule(until, Event::Over(index));
        }
    }

    /// The effect of a fault that is not an endpoint's.
    fn begin_gateway_fault(&mut self, index: usize, fault: Fault) {
        match fault {
            Fault::GatewayDeath { gateway, .. } => self.end_gateway(gateway),
            Fault::Partition { one, other, .. } => self.gateways.part(index, [one, other]),
            _ => self.reload(),
        }
        if let Some(until) = fault.until() {
            self.clock.schedule(until, Event::Over(index));
        }
    }

    /// A fault ends.
    pub(super) fn end_fault(&mut self, index: usize) {
        let (now, fault) = (self.now(), self.config.faults[index]);
        let Some(at) = fault.endpoint() else {
            return match fault {
                Fault::GatewayDeath { gateway, .. } => self.begin_gateway(gateway),
                Fault::Partition { .. } => self.gateways.join_again(index, now),
                _ => {}
            };
        };
        let active_faults = &mut self.nodes[at].active_faults;
        match fault {
            Fault::Death { .. } => {
                active_faults.deaths -= 1;
                if active_faults.deaths == 0 && !active_faults.away {
                    self.revive(at);
                }
            }
            Fault::Slow { .. } => {
                active_faults.slow.retain(|(of, _)| *of != index);
                self.nodes[at].set_slowdown(now);
                self.watch(at);
            }
            Fault::Pause { .. } => {
                self.nodes[at].go_on(now);
                self.watch(at);
            }
            Fault::BlackHole { .. } => {
                active_faults.holes -= 1;
                self.begin_feed_anew(at);
            }
            Fault::Busy { .. } => active_faults.busy.retain(|(of, _)| *of != index),
            Fault::CutFeed { .. } => {
                active_faults.cuts -= 1;
                self.begin_feed_anew(at);
            }
            Fault::FloodFeed { .. } => {
                active_faults.floods -= 1;
                self.begin_feed_anew(at);
            }
            Fault::Drain { .. } => {
                active_faults.drains -= 1;
                self.tell_draining(at);
            }
            Fault::Replace { .. } => {
                active_faults.leaving -= 1;
                if active_faults.leaving == 0 && active_faults.away {
                    self.come(at);
                }
                self.tell_draining(at);
            }
            Fault::Transfers { .. } => active_faults.transfers.retain(|of| *of != index),
            Fault::Reset { .. }
            | Fault::Reload { .. }
            | Fault::GatewayDeath { .. }
            | Fault::Partition { .. } => {}
        }
    }

    /// Replaces a dead engine by an empty one, which accepts nothing until it is revived.
    fn bury(&mut self, at: usize) {
        let now = self.now();
        self.nodes[at].replace_engine(now);
        if self.config.rules.is_some() {
            return self.lose_feed(at);
        }
        self.clock.schedule(now + self.config.health_delay, Event::Health { node: at as u16 });
    }

    fn revive(&mut self, at: usize) {
        if self.config.rules.is_some() {
            return self.begin_feed_anew(at);
        }
        self.clock.schedule(self.now() + self.config.health_delay, Event::Health { node: at as u16 });
    }

    /// A draining endpoint has no request left: it leaves if it is to.
    pub(super) fn drained(&mut self, endpoint: EndpointId) {
        let now = self.now();
        let Some(&at) = self.slots.get(endpoint.slot()) else { return };
        let (node, gateways) = (&mut self.nodes[at], &mut self.gateways);
        let in_flight = |scheduler: &Scheduler| {
            scheduler.pool().get(endpoint).is_none_or(|endpoint| endpoint.load.in_flight.requests > 0)
        };
        if node.id != endpoint
            || node.active_faults.leaving == 0
            || node.active_faults.away
            || gateways.iter().any(|router| router.read(in_flight))
        {
            return;
        }
        node.active_faults.away = true;
        node.replace_engine(now);
        gateways.leave(now, endpoint, &mut self.outputs);
    }

    /// Another engine joins where one has left. Its first probe determines its health.
    fn come(&mut self, at: usize) {
        let now = self.now();
        let node = &mut self.nodes[at];
        node.active_faults.away = false;
        node.found = Found::new(node.active_faults.deaths == 0);
        let name = format!("engine-{at}-{}", node.generation).into();
        let Some(id) = self.gateways.join(now, &name, node.found.healthy, &mut self.outputs) else {
            return;
        };
        node.id = id;
        self.slots.resize(self.slots.len().max(id.slot() + 1), at);
        self.slots[id.slot()] = at;
        self.assign(at);
        self.lose_feed(at);
        self.begin_feed_anew(at);
    }

    fn tell_draining(&mut self, at: usize) {
        let now = self.now();
        let node = &self.nodes[at];
        let (endpoint, draining) = (node.id, node.is_draining());
        self.gateways.step(now, &Input::Draining { endpoint, draining }, &mut self.outputs);
    }

    /// Reports an endpoint's health to the router. One that has `started` again holds none of its predicted blocks.
    pub(super) fn tell_health(&mut self, at: usize, healthy: bool, started: bool) {
        let (now, node) = (self.now(), &self.nodes[at]);
        let (endpoint, gateways) = (node.id, &self.gateways);
        if started {
            gateways.forget(now, endpoint, &mut self.outputs);
        }
        gateways.step(now, &Input::Health { endpoint, healthy }, &mut self.outputs);
    }

    fn reload(&mut self) {
        let now = self.now();
        self.reloads += 1;
        self.gateways.configure(now, &self.current_config(), &mut self.outputs);
    }

    /// The configuration of gateways, as last reloaded.
    pub(super) fn current_config(&self) -> router::Config {
        let reloaded = self.config.reloaded.as_ref().filter(|_| self.reloads % 2 == 1);
        reloaded.unwrap_or(&self.config.router).clone()
    }

    // --- feeds

    fn lose_feed(&mut self, at: usize) {
        let (now, node) = (self.now(), &self.nodes[at]);
        if node.engine.config().kv_events {
            self.gateways.set_feed(now, node.id, Feed::Syncing, &mut self.outputs);
        }
    }

    /// A feed works again if it has no other fault: events reported before, and still in transit, are void.
    fn begin_feed_anew(&mut self, at: usize) {
        let now = self.now();
        let node = &mut self.nodes[at];
        if !node.has_feed() || !node.engine.config().kv_events {
            return;
        }
        node.generation += 1;
        let (gateways, id) = (&self.gateways, node.id);
        gateways.apply(id, &KvEvent::Cleared);
        gateways.set_feed(now, id, Feed::Live, &mut self.outputs);
    }

    /// Reports false blocks to the router.
    pub(super) fn flood(&mut self, at: usize) {
        let node = &self.nodes[at];
        if node.active_faults.floods == 0 || !node.engine.config().kv_events {
            return;
        }
        if node.answers() && node.active_faults.cuts == 0 {
            let rng = &mut self.rng;
            let block = |_| StoredBlock { name: EngineHash(rng.next_u64()), hash: BlockHash(rng.next_u64()) };
            let blocks = (0..FLOOD_BLOCKS).map(block).collect();
            self.gateways.apply(node.id, &KvEvent::Stored { parent: None, blocks, tier: Tier::Gpu });
        }
        self.clock.schedule(self.clock.now() + FLOOD_EVERY, Event::Flood { node: at as u16 });
    }

    // --- probes

    /// Schedules the first probe of every endpoint, staggered.
    pub(super) fn begin_probes(&mut self) {
        let Some(rules) = &self.config.rules else { return };
        let interval = rules.probes.interval.0;
        for at in 0..self.nodes.len() {
            let first = Nanos(interval / self.nodes.len() as u64 * at as u64);
            self.clock.schedule(first, Event::Probe { node: at as u16 });
        }
    }

    /// Probes an endpoint. One that refuses connections fails at once, one that does not answer delays the probe to
    /// its timeout.
    pub(super) fn probe(&mut self, at: usize) {
        let (now, node) = (self.now(), &mut self.nodes[at]);
        let Some(rules) = &self.config.rules else { return };
        let refused = !node.alive();
        node.found.gone |= node.active_faults.deaths > 0;
        if refused || node.answers() {
            return self.probed(at, now);
        }
        self.clock.schedule(now + rules.probes.timeout, Event::Probed { node: at as u16, began: now });
    }

    /// Ends a probe that began at this time.
    pub(super) fn probed(&mut self, at: usize, began: Nanos) {
        let (now, node) = (self.now(), &mut self.nodes[at]);
        let Some(rules) = &self.config.rules else { return };
        let probes = rules.probes;
        // As in the gateway, a probe that took longer than the interval is followed by the next at once.
        self.clock.schedule(now.max(began + probes.interval), Event::Probe { node: at as u16 });
        if node.active_faults.away {
            return;
        }
        let good = node.answers();
        let probe = match good {
            true => Probe::Success,
            false if node.alive() => Probe::Failure,
            false => Probe::Refused,
        };
        let changed = node.found.note(&probes.thresholds, probe);
        let started = good && std::mem::take(&mut node.found.gone);
        let healthy = node.found.healthy;
        if changed || started {
            self.tell_health(at, healthy, started);
        }
    }
}
