//! A fleet in virtual time: engine models around the router that runs in production.
//!
//! Requests of a trace are sent, routed, computed and answered as events of one [`Clock`]. The router gets the same
//! inputs as from the gateway, at the same times: arrivals, first tokens, tokens, ends, load reports with their age,
//! KV events with their delay. So a policy behaves here as it does in the gateway.

mod cells;
mod faults;
mod gateways;
mod hints;
mod node;
mod play;
mod ramp;
mod retry;
mod split;
mod told;

use std::sync::Arc;

use kvlane_core::adapters::AdapterReport;
use kvlane_core::cache_accuracy::Feed;
use kvlane_core::disaggregation::Part;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::event::KvEvent;
use kvlane_core::load::LoadReport;
use kvlane_core::replica::{News, ReplicaId};
use kvlane_core::rng::Rng;
use kvlane_core::router::{self, Router, Scratch};
use kvlane_core::scheduler::{self, Input, Output, TOKENS_TOLD};
use kvlane_core::time::Nanos;
use serde::{Deserialize, Serialize};

use cells::{CellNews, Front, Telling};
pub use cells::{CellsConfig, Lookups, Sketches};
use gateways::Gateways;
pub use gateways::{Exchange, GatewaysConfig, Sample, Traffic};
pub use hints::{Hints, OutputClaim};
use node::Node;
pub use play::{Run, Send};
pub use ramp::{Ramp, Window};

use crate::clock::Clock;
use crate::engine::{Engine, EngineConfig, EngineEvent, EngineStats};
use crate::fault::{EventFeed, Fault};
use crate::rules::Rules;
use crate::transfer::{Transfer, TransferConfig};

/// An engine with more sequences than this is advanced step by step: computing its quiet time is linear in their
/// number, and the more there are the sooner one ends.
const QUIET_SEQUENCES_MAX: u32 = 64;

/// A fleet and its network.
#[derive(Clone, Debug)]
pub struct WorldConfig {
    /// The engines. At most 65,535.
    pub engines: Vec<EngineConfig>,
    /// The part of each engine in disaggregated serving; those beyond the list serve requests alone.
    pub parts: Vec<Part>,
    /// The router's configuration. Its blocks are the engines' blocks: all must have the same size.
    pub router: router::Config,
    /// The gateways, with such a router each.
    pub gateways: GatewaysConfig,
    /// Minimum number of tokens for an engine to fetch blocks that another one has cached, rather than compute them.
    pub fetch_tokens_min: Option<u32>,
    /// Links for KV blocks: each engine sends over its own.
    pub link: TransferConfig,
    /// Time from sending a request until it has been routed and has reached its engine: network, HTTP, tokenization.
    pub routing_delay: Nanos,
    /// Delivery of engines' load reports to the router, if any.
    pub reports: Option<ReportFeed>,
    /// Delivery of engines' KV events to a router with exact knowledge.
    pub events: EventFeed,
    /// Faults.
    pub faults: Vec<Fault>,
    /// Time from a death or a return until the router knows, if there are no rules for detecting it.
    pub health_delay: Nanos,
    /// Maximum attempts of a request, at least one; it is placed again only if its endpoint failed before its first
    /// token.
    pub attempts_max: u8,
    /// The gateway's reaction to faults. Without it, retries are immediate and no attempt times out, and the router
    /// learns of deaths and returns, but not of the outcome of an attempt; that suffices for deaths and slow
    /// endpoints. With any other fault the default applies if none is given.
    pub rules: Option<Rules>,
    /// Configuration that the router loads at every other [`Fault::Reload`]; without it, the configuration does not
    /// change.
    pub reloaded: Option<router::Config>,
    /// What the router is told about requests beside their prompts.
    pub hints: Hints,
    /// When clients give up.
    pub client_timeout: Option<Nanos>,
    /// Seed of the world's own randomness; the router has its own.
    pub seed: u64,
    /// A wall clock, to time decisions. Nothing in the world depends on it.
    pub stopwatch: Option<fn() -> Nanos>,
}

/// Delivery of load reports.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReportFeed {
    /// Time between two reports.
    pub interval: Nanos,
    /// Age of a report when it arrives.
    pub age: Nanos,
}

/// A fleet in virtual time. Caches, clock and router persist from run to run.
pub struct World {
    config: WorldConfig,
    gateways: Gateways,
    /// The front tier, if there are cells.
    front: Option<Front>,
    nodes: Vec<Node>,
    /// The node of each of the router's slots.
    slots: Vec<usize>,
    clock: Clock<Event>,
    rng: Rng,
    /// Number of reloads.
    reloads: u32,
    /// Number of requests ever sent: ids are unique.
    sent: u64,
    /// Number of requests and prefill legs ever given to engines.
    given: u32,
    /// Number of ids ever chosen for prefill legs.
    legs: u64,
    /// Number of requests sent to gateways in turn.
    turn: usize,
    /// Number of runs.
    runs: u32,
    /// Whether a report is scheduled.
    reporting: bool,
    /// Time of the engines' last load report.
    reported_at: Nanos,
    tick_at: Option<Nanos>,
    decisions: Decisions,
    /// Number of changes of the gateways' ledgers, at least.
    ledger_changes: u64,
    samples: Vec<Sample>,
    scratch: Scratch,
    outputs: Vec<Output>,
    engine_events: Vec<(Nanos, EngineEvent)>,
}

/// Number of decisions, and their duration if timed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decisions {
    /// Calls of [`Router::arrive`].
    pub count: u64,
    /// Wall-clock time in them.
    pub time: Nanos,
}

/// An event in a world.
#[derive(Debug)]
enum Event {
    /// The next conversation begins.
    Root { run: u32 },
    /// A client sends a request.
    Due { run: u32, request: u32 },
    /// A request reaches the router.
    Place { run: u32, request: u32 },
    /// A client gives up.
    Timeout { run: u32, request: u32 },
    /// An engine's step ends.
    Step { node: u16 },
    /// Engines report their load.
    Report,
    /// A load report arrives.
    Reported { node: u16, reported: LoadReport, adapters: Option<Box<AdapterReport>> },
    /// KV events of an engine arrive.
    Kv { node: u16, generation: u32, events: Vec<KvEvent> },
    /// A fault begins.
    Fault(usize),
    /// A fault ends.
    Over(usize),
    /// A flooded feed reports further false blocks.
    Flood { node: u16 },
    /// The router learns the health of endpoints.
    Health { node: u16 },
    /// An endpoint is probed.
    Probe { node: u16 },
    /// A probe that was not answered at once times out.
    Probed { node: u16, began: Nanos },
    /// The timeout of a request's first token.
    Late { run: u32, request: u32, sent: u32 },
    /// Check whether an answer has progressed since its last check.
    Stalled { run: u32, request: u32, sent: u32, tokens: u32 },
    /// A transfer of a request's KV blocks fails.
    Lost { run: u32, request: u32, sent: u32 },
    /// A gateway tells the others what it has placed.
    Exchange { gateway: u16 },
    /// News of a gateway come to another one.
    News { to: ReplicaId, from: ReplicaId, news: Arc<News> },
    /// A sample of the gateways' loads is taken.
    Sample,
    /// A cell tells the front tier.
    CellTells { cell: u16, what: Telling },
    /// News of a cell come to the front tier.
    CellHeard { cell: u16, news: Box<CellNews> },
    /// Deadline of a queued request.
    Tick,
}

// === impl World ===

impl World {
    /// A fleet with empty caches, at time zero.
    pub fn new(mut config: WorldConfig) -> Self {
        let engines = std::mem::take(&mut config.engines);
        let mut world = Self {
            rng: Rng::new(config.seed),
            gateways: Gateways::new(&config.router, &config.gateways, config.seed),
            front: config.gateways.cells.take().map(|cells| {
                Front::new(cells, config.seed, config.routing_delay, config.router.block_tokens)
            }),
            nodes: Vec::new(),
            slots: Vec::new(),
            clock: Clock::default(),
            reloads: 0,
            sent: 0,
            given: 0,
            legs: 0,
            turn: 0,
            runs: 0,
            reporting: false,
            reported_at: Nanos::ZERO,
            tick_at: None,
            decisions: Decisions::default(),
            ledger_changes: 0,
            samples: Vec::new(),
            scratch: Scratch::default(),
            outputs: Vec::new(),
            engine_events: Vec::new(),
            config,
        };
        world.join(engines);
        for (index, fault) in world.config.faults.iter().enumerate() {
            world.clock.schedule(fault.at(), Event::Fault(index));
        }
        if world.config.rules.is_none() && !world.config.faults.iter().all(Fault::is_plain) {
            world.config.rules = Some(Rules::default());
        }
        world.begin_probes();
        world.begin_exchange();
        world.begin_cells();
        world
    }

    fn join(&mut self, engines: Vec<EngineConfig>) {
        let exact = self.config.router.exact.is_some();
        for (n, mut engine) in engines.into_iter().enumerate() {
            (engine.kv_events, engine.token_every) = (exact, TOKENS_TOLD);
            let name = format!("engine-{n}").into();
            let Some(id) = self.gateways.join(Nanos::ZERO, &name, true, &mut self.outputs) else { break };
            if exact {
                self.gateways.set_feed(Nanos::ZERO, id, Feed::Live, &mut self.outputs);
            }
            let part = self.config.parts.get(n).copied().unwrap_or_default();
            self.slots.push(n);
            let engine = Engine::new(engine);
            if let Some(reported) = engine.adapter_report() {
                let reported = Input::Adapters { endpoint: id, reported };
                self.gateways.step(Nanos::ZERO, &reported, &mut self.outputs);
            }
            self.nodes.push(Node::new(engine, id, part, Transfer::new(self.config.link)));
            self.assign(n);
        }
    }

    /// Tells the router a node's part in disaggregated serving.
    fn assign(&mut self, at: usize) {
        let Node { id: endpoint, part, .. } = self.nodes[at];
        if part != Part::default() {
            self.gateways.step(self.clock.now(), &Input::Assigned { endpoint, part }, &mut self.outputs);
        }
    }

    /// Node of an endpoint.
    fn seat_of(&self, endpoint: EndpointId) -> usize {
        self.slots[endpoint.slot()]
    }

    /// The current time.
    pub fn now(&self) -> Nanos {
        self.clock.now()
    }

    /// The router of the first gateway.
    pub fn router(&self) -> &Router {
        self.gateways.at(0)
    }

    /// The routers of the gateways that live.
    pub fn routers(&self) -> impl Iterator<Item = &Router> {
        self.gateways.iter()
    }

    /// What gateways have told each other so far.
    pub fn exchanged(&self) -> Traffic {
        self.gateways.traffic
    }

    /// Samples of the gateways' loads so far.
    pub fn samples(&self) -> &[Sample] {
        &self.samples
    }

    /// Decisions so far.
    pub fn decisions(&self) -> Decisions {
        self.decisions
    }

    /// Counters and gauges of each node in the fleet. Counters continue after a death.
    pub fn engine_stats(&self) -> Vec<EngineStats> {
        self.nodes.iter().map(|node| node.earlier_stats.followed_by(node.engine.stats())).collect()
    }

    /// Lets `span` pass without sending requests.
    pub fn rest(&mut self, span: Nanos) {
        let until = self.now() + span;
        while self.clock.next_at().is_some_and(|at| at <= until) {
            if let Some(event) = self.clock.next_event() {
                self.happen(event);
            }
            for output in std::mem::take(&mut self.outputs) {
                if let Output::Drained { endpoint } = output {
                    self.drained(endpoint);
                }
            }
        }
        self.clock.move_to(until);
    }

    /// Processes the fleet's events while no request is in flight.
    fn happen(&mut self, event: Event) {
        let now = self.now();
        match event {
            Event::Report => self.report(false),
            Event::Reported { node, reported, adapters } => {
                let endpoint = self.nodes[usize::from(node)].id;
                self.gateways.step(now, &Input::Reported { endpoint, reported }, &mut self.outputs);
                if let Some(adapters) = adapters {
                    let reported = *adapters;
                    self.gateways.step(now, &Input::Adapters { endpoint, reported }, &mut self.outputs);
                }
            }
            Event::Kv { node, generation, events } => {
                let Node { id, generation: current, .. } = self.nodes[usize::from(node)];
                if generation == current {
                    events.iter().for_each(|event| self.gateways.apply(id, event));
                }
            }
            Event::Fault(index) => self.begin_fault(index),
            Event::Over(index) => self.end_fault(index),
            Event::Flood { node } => self.flood(node.into()),
            Event::Health { node } => {
                let healthy = self.nodes[usize::from(node)].alive();
                self.tell_health(node.into(), healthy, healthy);
            }
            Event::Probe { node } => self.probe(node.into()),
            Event::Probed { node, began } => self.probed(node.into(), began),
            Event::Tick => {
                self.tick_at = None;
                self.gateways.step(now, &Input::Tick, &mut self.outputs);
            }
            Event::Exchange { gateway } => self.exchange(gateway),
            Event::News { to, from, news } => {
                let news = Arc::unwrap_or_clone(news);
                self.gateways.hear(to, from, now, news, &mut self.outputs);
            }
            Event::Sample => self.sample(),
            Event::CellTells { cell, what } => self.cell_tells(cell, what),
            Event::CellHeard { cell, news } => self.cell_heard(cell, *news),
            Event::Step { node } => self.nodes[usize::from(node)].step_at = None,
            Event::Root { .. }
            | Event::Due { .. }
            | Event::Place { .. }
            | Event::Timeout { .. }
            | Event::Late { .. }
            | Event::Stalled { .. }
            | Event::Lost { .. } => {}
        }
    }

    /// Sends the load of every living engine, and schedules the next report if there is a reason for one.
    fn report(&mut self, again: bool) {
        let Some(feed) = self.config.reports else { return };
        let now = self.now();
        for (n, node) in self.nodes.iter_mut().enumerate().filter(|(_, node)| node.answers()) {
            node.catch_up(now);
            let stats = node.engine.stats();
            let reported = LoadReport {
                running: stats.running,
                waiting: stats.waiting,
                kv_usage_ratio: stats.kv_blocks_used as f32 / stats.kv_blocks.max(1) as f32,
                kv_capacity_tokens: Some(
                    u64::from(stats.kv_blocks) * u64::from(node.engine.config().block_tokens),
                ),
            };
            let adapters = node.engine.adapter_report().map(Box::new);
            self.clock.schedule(now + feed.age, Event::Reported { node: n as u16, reported, adapters });
        }
        (self.reporting, self.reported_at) = (false, now);
        if again {
            self.resume_reports();
        }
    }

    /// Schedules the next report, if reports are on and none is scheduled: at a whole number of intervals after the
    /// last one, so that a gap in reporting is not visible.
    fn resume_reports(&mut self) {
        let Some(feed) = self.config.reports.filter(|_| !self.reporting) else { return };
        let interval = feed.interval.0.max(1);
        let intervals = (self.now() - self.reported_at).0.div_ceil(interval).max(1);
        let at = self.reported_at + Nanos(interval.saturating_mul(intervals));
        self.clock.schedule(at, Event::Report);
        self.reporting = true;
    }

    /// Schedules when to advance the engine at `node` next. Changes of its cache have to be forwarded at once.
    fn watch(&mut self, node: usize) {
        let here = &mut self.nodes[node];
        let Node { engine, .. } = here;
        let quiet = !engine.config().kv_events && engine.stats().running <= QUIET_SEQUENCES_MAX;
        let next = if quiet { engine.quiet_until() } else { engine.next_deadline() };
        let next = next.and_then(|at| here.world_time(at));
        if next != here.step_at {
            here.step_at = next;
            if let Some(at) = next {
                self.clock.schedule(at, Event::Step { node: node as u16 });
            }
        }
    }

    /// Forwards the KV events of the engine at `node`.
    fn tell_kv_events(&mut self, node: usize) {
        let Node { engine, generation, id, active_faults, .. } = &mut self.nodes[node];
        let mut events = Vec::new();
        engine.take_kv_events(&mut events);
        if events.is_empty() || active_faults.cuts > 0 || active_faults.holes > 0 {
            return;
        }
        let events: Vec<KvEvent> = events.into_iter().map(|(_, event)| event).collect();
        let EventFeed { delay, jitter, lost, duplicated } = self.config.events;
        if delay == Nanos::ZERO && jitter == Nanos::ZERO && lost == 0.0 && duplicated == 0.0 {
            return events.iter().for_each(|event| self.gateways.apply(*id, event));
        }
        let copies = if self.rng.unit() < lost {
            0
        } else if self.rng.unit() < duplicated {
            2
        } else {
            1
        };
        for _ in 0..copies {
            let late = Nanos((jitter.0 as f64 * self.rng.unit()) as u64);
            let event = Event::Kv { node: node as u16, generation: *generation, events: events.clone() };
            self.clock.schedule(self.clock.now() + delay + late, event);
        }
    }

    /// Schedules a wake-up of the router at its queue's next deadline.
    fn watch_queue(&mut self) {
        let scheduler::Config {
            max_concurrent_requests, max_requests_per_endpoint, session_admission, ..
        } = self.config.router.scheduler;
        let nobody_waits =
            max_concurrent_requests == 0 && max_requests_per_endpoint == 0 && !session_admission;
        if nobody_waits && self.config.rules.is_none() {
            return;
        }
        let Some(at) = self.gateways.next_deadline() else { return };
        if self.tick_at.is_none_or(|tick_at| at < tick_at) {
            self.tick_at = Some(at);
            self.clock.schedule(at, Event::Tick);
        }
    }
}
