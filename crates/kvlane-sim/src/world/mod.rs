//! A fleet in virtual time: engine models around the router that runs in production.
//!
//! Requests of a trace are sent, routed, computed and answered as events of one [`Clock`]. The router is told what the
//! gateway would tell it, when it would: arrivals, first tokens, tokens, ends, load reports with their age, KV events
//! with their delay. Nothing else differs between the two, so what a policy does here it does there.

mod faults;
mod play;
mod retry;
mod seat;

use kvlane_core::cache_accuracy::Feed;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::event::KvEvent;
use kvlane_core::load::LoadReport;
use kvlane_core::rng::Rng;
use kvlane_core::router::{self, Router, Scratch};
use kvlane_core::scheduler::{self, Input, Output, TOKENS_TOLD};
use kvlane_core::time::Nanos;

pub use play::{Run, Send};
use seat::Seat;

use crate::clock::Clock;
use crate::engine::{Engine, EngineConfig, EngineEvent, EngineStats};
use crate::fault::{EventFeed, Fault};
use crate::rules::Rules;
use crate::transfer::{Transfer, TransferConfig};

/// An engine that runs more sequences than this is watched step by step: to find out how long it will be quiet takes as
/// long as they are many, and the more there are the sooner one ends.
const QUIET_SEQUENCES_MAX: u32 = 64;

/// A fleet and what it is connected by.
#[derive(Clone, Debug)]
pub struct WorldConfig {
    /// The engines, one each. At most 65,535.
    pub engines: Vec<EngineConfig>,
    /// How requests are routed. Its blocks are the engines' blocks: all must have the same size. Only this pool may
    /// have a queue.
    pub router: router::Config,
    /// Engines that compute prompts for `engines`, which then only decode; without, every engine does both.
    pub prefill: Option<PrefillPool>,
    /// Whether an engine fetches what another one of its pool has cached and it has not, rather than compute it: from so
    /// many tokens on.
    pub fetch_tokens_min: Option<u32>,
    /// What keys and values move over between engines: each engine sends over a link of its own.
    pub link: TransferConfig,
    /// Time from when a request is sent to when it is routed and has reached its engine: network, HTTP, tokenising.
    pub routing_delay: Nanos,
    /// How engines' load reports reach the router, if they do.
    pub reports: Option<ReportFeed>,
    /// How engines' KV events reach a router that is exact.
    pub events: EventFeed,
    /// What goes wrong.
    pub faults: Vec<Fault>,
    /// Time from a death or a return to when the router knows, where no rules say how it finds out.
    pub health_delay: Nanos,
    /// How often a request is placed at most, at least once; it is placed again only if its endpoint failed it before
    /// its first token.
    pub attempts_max: u8,
    /// What the gateway does about faults. Without, nobody waits before trying again or gives up on an endpoint, and the
    /// router is told of the dead and the returned, but not of what became of an attempt; that is enough for deaths and
    /// slow endpoints. With any other fault the default is in force where none are given.
    pub rules: Option<Rules>,
    /// What the router of `engines` reads at every other [`Fault::Reload`]; without, it is what it was.
    pub reloaded: Option<router::Config>,
    /// When clients give up.
    pub client_timeout: Option<Nanos>,
    /// Seed of the world's own randomness; the router has its own.
    pub seed: u64,
    /// A wall clock, if decisions are to be timed. Nothing in the world depends on it.
    pub stopwatch: Option<fn() -> Nanos>,
}

/// Engines that compute prompts and send their keys and values on.
#[derive(Clone, Debug)]
pub struct PrefillPool {
    /// The engines, one each.
    pub engines: Vec<EngineConfig>,
    /// How prompts are placed among them.
    pub router: router::Config,
}

/// How load reports reach the router.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReportFeed {
    /// Time between two reports.
    pub interval: Nanos,
    /// How old a report is when it arrives.
    pub age: Nanos,
}

/// A fleet in virtual time. Caches, clock and router live on from run to run.
pub struct World {
    config: WorldConfig,
    /// Of the decoding engines, and of the prefilling ones if they are others.
    routers: Vec<Router>,
    /// Of all pools, the decoding ones first.
    seats: Vec<Seat>,
    /// By pool: who sits in which of the router's slots.
    slots: Vec<Vec<usize>>,
    clock: Clock<Event>,
    rng: Rng,
    /// How often the configuration was read again.
    reloads: u32,
    /// Requests ever sent: ids are never used twice.
    sent: u64,
    /// Runs so far.
    runs: u32,
    /// Whether a report is scheduled.
    reporting: bool,
    /// When engines last said how loaded they are.
    reported_at: Nanos,
    tick_at: Option<Nanos>,
    decisions: Decisions,
    scratch: Scratch,
    outputs: Vec<Output>,
    engine_events: Vec<(Nanos, EngineEvent)>,
}

/// How many decisions were made, and what they took if they were timed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decisions {
    /// Calls of [`Router::arrive`].
    pub count: u64,
    /// Wall-clock time in them.
    pub time: Nanos,
}

/// What happens in a world.
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
    Step { seat: u16 },
    /// Engines say how loaded they are.
    Report,
    /// What they said arrives.
    Reported { seat: u16, reported: LoadReport },
    /// What an engine says of its cache arrives.
    Kv { seat: u16, generation: u32, events: Vec<KvEvent> },
    /// Something goes wrong.
    Fault(usize),
    /// It is over.
    Over(usize),
    /// A flooded feed says more of what is not so.
    Flood { seat: u16 },
    /// The router learns who is fit.
    Health { seat: u16 },
    /// An endpoint is probed.
    Probe { seat: u16 },
    /// A probe that was not answered at once is over.
    Probed { seat: u16, began: Nanos },
    /// A request has waited for its first token for as long as it may.
    Late { run: u32, request: u32, sent: u32 },
    /// It is looked whether an answer has come on since it was so long.
    Stalled { run: u32, request: u32, sent: u32, tokens: u32 },
    /// Somebody may have waited too long.
    Tick,
}

// === impl World ===

impl World {
    /// A fleet with empty caches, at time zero.
    pub fn new(mut config: WorldConfig) -> Self {
        let pools = [
            Some((std::mem::take(&mut config.engines), config.router.clone())),
            config.prefill.take().map(|pool| (pool.engines, pool.router)),
        ];
        let mut world = Self {
            rng: Rng::new(config.seed),
            routers: Vec::new(),
            seats: Vec::new(),
            slots: Vec::new(),
            clock: Clock::default(),
            reloads: 0,
            sent: 0,
            runs: 0,
            reporting: false,
            reported_at: Nanos::ZERO,
            tick_at: None,
            decisions: Decisions::default(),
            scratch: Scratch::default(),
            outputs: Vec::new(),
            engine_events: Vec::new(),
            config,
        };
        for (pool, (engines, router)) in pools.into_iter().flatten().enumerate() {
            world.add_pool(pool, engines, router);
        }
        for (index, fault) in world.config.faults.iter().enumerate() {
            world.clock.schedule(fault.at(), Event::Fault(index));
        }
        if world.config.rules.is_none() && !world.config.faults.iter().all(Fault::is_plain) {
            world.config.rules = Some(Rules::default());
        }
        world.begin_probes();
        world
    }

    fn add_pool(&mut self, pool: usize, engines: Vec<EngineConfig>, config: router::Config) {
        let exact = config.exact.is_some();
        let (router, mut slots) = (Router::new(config), Vec::new());
        for (n, mut engine) in engines.into_iter().enumerate() {
            (engine.kv_events, engine.token_every) = (exact, TOKENS_TOLD);
            let name = format!("engine-{n}").into();
            let Some(id) = router.join(Nanos::ZERO, name, true, false, &mut self.outputs) else { break };
            if exact {
                router.set_feed(Nanos::ZERO, id, Feed::Live, &mut self.outputs);
            }
            slots.push(self.seats.len());
            self.seats.push(Seat::new(Engine::new(engine), pool, id, Transfer::new(self.config.link)));
        }
        self.routers.push(router);
        self.slots.push(slots);
    }

    /// Where an endpoint of a pool sits.
    fn seat_of(&self, pool: usize, endpoint: EndpointId) -> usize {
        self.slots[pool][endpoint.slot()]
    }

    /// The time.
    pub fn now(&self) -> Nanos {
        self.clock.now()
    }

    /// The router of the engines that decode.
    pub fn router(&self) -> &Router {
        &self.routers[0]
    }

    /// Decisions so far.
    pub fn decisions(&self) -> Decisions {
        self.decisions
    }

    /// Counters and gauges of each place in the fleet, those that only prefill last. Counters go on over a death.
    pub fn engine_stats(&self) -> Vec<EngineStats> {
        self.seats.iter().map(|seat| seat.buried.followed_by(seat.engine.stats())).collect()
    }

    /// Lets `span` pass in which no request is sent.
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

    /// What happens to the fleet while no request is in it.
    fn happen(&mut self, event: Event) {
        let now = self.now();
        match event {
            Event::Report => self.report(false),
            Event::Reported { seat, reported } => {
                let Seat { id: endpoint, pool, .. } = self.seats[usize::from(seat)];
                self.routers[pool].step(now, Input::Reported { endpoint, reported }, &mut self.outputs);
            }
            Event::Kv { seat, generation, events } => {
                let Seat { id, pool, generation: current, .. } = self.seats[usize::from(seat)];
                if generation == current {
                    events.iter().for_each(|event| _ = self.routers[pool].apply(id, event));
                }
            }
            Event::Fault(index) => self.begin_fault(index),
            Event::Over(index) => self.end_fault(index),
            Event::Flood { seat } => self.flood(seat.into()),
            Event::Health { seat } => {
                let healthy = self.seats[usize::from(seat)].alive();
                self.tell_health(seat.into(), healthy, healthy);
            }
            Event::Probe { seat } => self.probe(seat.into()),
            Event::Probed { seat, began } => self.probed(seat.into(), began),
            Event::Tick => {
                self.tick_at = None;
                self.routers[0].step(now, Input::Tick, &mut self.outputs);
            }
            Event::Step { seat } => self.seats[usize::from(seat)].step_at = None,
            Event::Root { .. }
            | Event::Due { .. }
            | Event::Place { .. }
            | Event::Timeout { .. }
            | Event::Late { .. }
            | Event::Stalled { .. } => {}
        }
    }

    /// Sends every living engine's load on its way, and schedules the next report if there is a reason for one.
    fn report(&mut self, again: bool) {
        let Some(feed) = self.config.reports else { return };
        let now = self.now();
        for (n, seat) in self.seats.iter_mut().enumerate().filter(|(_, seat)| seat.answers()) {
            seat.catch_up(now);
            let stats = seat.engine.stats();
            let reported = LoadReport {
                running: stats.running,
                waiting: stats.waiting,
                kv_usage_ratio: stats.kv_blocks_used as f32 / stats.kv_blocks.max(1) as f32,
                kv_capacity_tokens: Some(
                    u64::from(stats.kv_blocks) * u64::from(seat.engine.config().block_tokens),
                ),
            };
            self.clock.schedule(now + feed.age, Event::Reported { seat: n as u16, reported });
        }
        (self.reporting, self.reported_at) = (false, now);
        if again {
            self.resume_reports();
        }
    }

    /// Schedules the next report, if there are any and none is: a whole number of intervals after the last one, so that
    /// it does not show that nobody reported while there was nothing to say.
    fn resume_reports(&mut self) {
        let Some(feed) = self.config.reports.filter(|_| !self.reporting) else { return };
        let interval = feed.interval.0.max(1);
        let intervals = (self.now() - self.reported_at).0.div_ceil(interval).max(1);
        let at = self.reported_at + Nanos(interval.saturating_mul(intervals));
        self.clock.schedule(at, Event::Report);
        self.reporting = true;
    }

    /// Schedules when to look at the engine at `seat` next. What changes in its cache has to be passed on at once.
    fn watch(&mut self, seat: usize) {
        let here = &mut self.seats[seat];
        let Seat { engine, .. } = here;
        let quiet = !engine.config().kv_events && engine.stats().running <= QUIET_SEQUENCES_MAX;
        let next = if quiet { engine.quiet_until() } else { engine.next_deadline() };
        let next = next.and_then(|at| here.world_time(at));
        if next != here.step_at {
            here.step_at = next;
            if let Some(at) = next {
                self.clock.schedule(at, Event::Step { seat: seat as u16 });
            }
        }
    }

    /// Passes on what the engine at `seat` says of its cache.
    fn tell_kv_events(&mut self, seat: usize) {
        let Seat { engine, generation, pool, id, trouble, .. } = &mut self.seats[seat];
        let router = &self.routers[*pool];
        let mut events = Vec::new();
        engine.take_kv_events(&mut events);
        if events.is_empty() || trouble.cuts > 0 || trouble.holes > 0 {
            return;
        }
        let events: Vec<KvEvent> = events.into_iter().map(|(_, event)| event).collect();
        let EventFeed { delay, jitter, lost, duplicated } = self.config.events;
        if delay == Nanos::ZERO && jitter == Nanos::ZERO && lost == 0.0 && duplicated == 0.0 {
            return events.iter().for_each(|event| _ = router.apply(*id, event));
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
            let event = Event::Kv { seat: seat as u16, generation: *generation, events: events.clone() };
            self.clock.schedule(self.clock.now() + delay + late, event);
        }
    }

    /// Makes sure that time is told to the router when its queue's next deadline passes.
    fn watch_queue(&mut self) {
        let scheduler::Config { in_flight_max, endpoint_in_flight_max, session_admission, .. } =
            self.config.router.scheduler;
        let nobody_waits = in_flight_max == 0 && endpoint_in_flight_max == 0 && !session_admission;
        if nobody_waits && self.config.rules.is_none() {
            return;
        }
        let Some(at) = self.routers[0].read(|scheduler| scheduler.next_deadline()) else { return };
        if self.tick_at.is_none_or(|tick_at| at < tick_at) {
            self.tick_at = Some(at);
            self.clock.schedule(at, Event::Tick);
        }
    }
}
