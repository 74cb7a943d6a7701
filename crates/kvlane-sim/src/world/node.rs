//! One node in the fleet: its engine, its link, and its faults.

use kvlane_core::disaggregation::Part;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::health::{Probe, Probes, Thresholds};
use kvlane_core::time::Nanos;

use crate::engine::{Engine, EngineStats};
use crate::transfer::Transfer;

/// One node in the fleet.
pub(super) struct Node {
    pub engine: Engine,
    pub id: EndpointId,
    /// Its part in disaggregated serving.
    pub part: Part,
    /// Its link for KV blocks.
    pub link: Transfer,
    pub active_faults: ActiveFaults,
    /// Counts engines: events of earlier engines are void.
    pub generation: u32,
    /// Time at which the engine is advanced next, if scheduled: not after its next event. Until then it may be some
    /// steps behind the clock.
    pub step_at: Option<Nanos>,
    /// Counters of earlier engines at this node.
    pub earlier_stats: EngineStats,
    /// State of its probes.
    pub found: Found,
    /// Time for which this engine was paused: its own clock is behind by this much.
    behind: Nanos,
}

/// Faults of a node: number in force of each kind.
#[derive(Debug, Default)]
pub(super) struct ActiveFaults {
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
    /// The node is empty: its engine has left.
    pub away: bool,
    /// Factors on the duration of its steps, by fault.
    pub slow: Vec<(usize, f64)>,
    /// By fault: its `Retry-After`.
    pub busy: Vec<(usize, Option<Nanos>)>,
    /// Faults of the transfers that it sends, by their index.
    pub transfers: Vec<usize>,
}

// === impl Node ===

impl Node {
    pub(super) fn new(engine: Engine, id: EndpointId, part: Part, link: Transfer) -> Self {
        Self {
            engine,
            id,
            part,
            link,
            active_faults: ActiveFaults::default(),
            generation: 0,
            step_at: None,
            earlier_stats: EngineStats::default(),
            found: Found::new(true),
            behind: Nanos::ZERO,
        }
    }

    /// Whether there is an engine that runs, or is paused.
    pub(super) fn alive(&self) -> bool {
        self.active_faults.deaths == 0 && !self.active_faults.away
    }

    /// Whether requests sent to it are answered soon.
    pub(super) fn answers(&self) -> bool {
        self.alive() && self.active_faults.holes == 0 && self.active_faults.pauses == 0
    }

    /// Whether it is to get no new requests.
    pub(super) fn is_draining(&self) -> bool {
        self.active_faults.drains + self.active_faults.leaving > 0
    }

    /// Whether its KV events come, and are true.
    pub(super) fn has_feed(&self) -> bool {
        let ActiveFaults { holes, cuts, floods, .. } = self.active_faults;
        self.alive() && holes + cuts + floods == 0
    }

    /// The engine's current time.
    pub(super) fn time(&self, now: Nanos) -> Nanos {
        self.active_faults.still_since.unwrap_or(now - self.behind)
    }

    /// The world's time for a time of the engine; never while it is paused.
    pub(super) fn world_time(&self, at: Nanos) -> Option<Nanos> {
        self.active_faults.still_since.is_none().then_some(at + self.behind)
    }

    /// Runs the engine up to `now`.
    pub(super) fn catch_up(&mut self, now: Nanos) {
        self.engine.catch_up(self.time(now));
    }

    /// Pauses the engine.
    pub(super) fn halt(&mut self, now: Nanos) {
        self.active_faults.pauses += 1;
        if self.active_faults.pauses == 1 {
            let time = self.time(now);
            self.engine.catch_up(time);
            self.active_faults.still_since = Some(time);
        }
    }

    /// Ends one of the pauses.
    pub(super) fn go_on(&mut self, now: Nanos) {
        self.active_faults.pauses -= 1;
        if self.active_faults.pauses == 0
            && let Some(since) = self.active_faults.still_since.take()
        {
            self.behind = now - since;
        }
    }

    /// Replaces the engine by an empty one.
    pub(super) fn replace_engine(&mut self, now: Nanos) {
        self.catch_up(now);
        self.earlier_stats = self.earlier_stats.followed_by(self.engine.stats());
        self.engine = Engine::new(self.engine.config().clone());
        self.set_slowdown(now);
        self.step_at = None;
        self.generation += 1;
    }

    /// Sets the speed from all faults that slow it down.
    pub(super) fn set_slowdown(&mut self, now: Nanos) {
        self.catch_up(now);
        self.engine.set_slowdown(self.active_faults.slow.iter().map(|(_, factor)| factor).product());
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
