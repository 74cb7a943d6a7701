//! One seat in the fleet: its engine, its link, and its faults.

use kvlane_core::endpoint::EndpointId;
use kvlane_core::health::{Probe, Probes, Thresholds};
use kvlane_core::time::Nanos;

use crate::engine::{Engine, EngineStats};
use crate::transfer::Transfer;

/// One seat in the fleet.
pub(super) struct Seat {
    pub engine: Engine,
    /// The router that places requests here.
    pub pool: usize,
    pub id: EndpointId,
    /// Its link for KV blocks.
    pub link: Transfer,
    pub trouble: Trouble,
    /// Counts engines: events of earlier engines are void.
    pub generation: u32,
    /// Time at which the engine is advanced next, if scheduled: not after its next event. Until then it may be some
    /// steps behind the clock.
    pub step_at: Option<Nanos>,
    /// Counters of earlier engines at this seat.
    pub buried: EngineStats,
    /// State of its probes.
    pub found: Found,
    /// Time for which this engine was paused: its own clock is behind by this much.
    behind: Nanos,
}

/// Faults of a seat: number in force of each kind.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    pub deaths: u32,
    pub pauses: u32,
    /// Start of its pause, by its own clock.
    still_since: Option<Nanos>,
    pub holes: u32,
    pub cuts: u32,
    pub floods: u32,
    pub drains: u32,
    /// Its engine is about to be replaced, and leaves when it has drained.
    pub leaving: u32,
    /// The seat is empty: its engine has left.
    pub away: bool,
    /// Factors on the duration of its steps, by fault.
    pub slow: Vec<(usize, f64)>,
    /// By fault: its `Retry-After`.
    pub busy: Vec<(usize, Option<Nanos>)>,
}

// === impl Seat ===

impl Seat {
    pub(super) fn new(engine: Engine, pool: usize, id: EndpointId, link: Transfer) -> Self {
        Self {
            engine,
            pool,
            id,
            link,
            trouble: Trouble::default(),
            generation: 0,
            step_at: None,
            buried: EngineStats::default(),
            found: Found::new(true),
            behind: Nanos::ZERO,
        }
    }

    /// Whether there is an engine that runs, or is paused.
    pub(super) fn alive(&self) -> bool {
        self.trouble.deaths == 0 && !self.trouble.away
    }

    /// Whether requests sent to it are answered soon.
    pub(super) fn answers(&self) -> bool {
        self.alive() && self.trouble.holes == 0 && self.trouble.pauses == 0
    }

    /// The engine's current time.
    pub(super) fn time(&self, now: Nanos) -> Nanos {
        self.trouble.still_since.unwrap_or(now - self.behind)
    }

    /// The world's time for a time of the engine; never while it is paused.
    pub(super) fn world_time(&self, at: Nanos) -> Option<Nanos> {
        self.trouble.still_since.is_none().then_some(at + self.behind)
    }

    /// Runs the engine up to `now`.
    pub(super) fn catch_up(&mut self, now: Nanos) {
        self.engine.catch_up(self.time(now));
    }

    /// Pauses the engine.
    pub(super) fn halt(&mut self, now: Nanos) {
        self.trouble.pauses += 1;
        if self.trouble.pauses == 1 {
            let time = self.time(now);
            self.engine.catch_up(time);
            self.trouble.still_since = Some(time);
        }
    }

    /// Ends one of the pauses.
    pub(super) fn go_on(&mut self, now: Nanos) {
        self.trouble.pauses -= 1;
        if self.trouble.pauses == 0
            && let Some(since) = self.trouble.still_since.take()
        {
            self.behind = now - since;
        }
    }

    /// Replaces the engine by an empty one.
    pub(super) fn replace_engine(&mut self, now: Nanos) {
        self.catch_up(now);
        self.buried = self.buried.followed_by(self.engine.stats());
        self.engine = Engine::new(self.engine.config().clone());
        self.set_slowdown(now);
        self.step_at = None;
        self.generation += 1;
    }

    /// Sets the speed from all faults that slow it down.
    pub(super) fn set_slowdown(&mut self, now: Nanos) {
        self.catch_up(now);
        self.engine.set_slowdown(self.trouble.slow.iter().map(|(_, factor)| factor).product());
    }
}

/// What an endpoint's probes have found.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub healthy: bool,
    /// Whether a connection was refused since the endpoint was last up.
    pub gone: bool,
    probes: Probes,
}

// === impl Found ===

impl Found {
    /// Before the first probe.
    pub(super) fn new(healthy: bool) -> Self {
        Self { healthy, gone: false, probes: Probes::default() }
    }

    /// Records a probe; returns whether the health has changed.
    pub(super) fn note(&mut self, thresholds: &Thresholds, probe: Probe) -> bool {
        let before = self.healthy;
        self.healthy = self.probes.note(thresholds, before, probe);
        self.healthy != before
    }
}
