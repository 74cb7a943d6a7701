//! One place in the fleet: its engine, its link, and what is wrong with it.

use kvlane_core::endpoint::EndpointId;
use kvlane_core::time::Nanos;

use crate::engine::{Engine, EngineStats};
use crate::rules::Found;
use crate::transfer::Transfer;

/// One place in the fleet.
pub(super) struct Seat {
    pub engine: Engine,
    /// Which of the routers places requests here.
    pub pool: usize,
    pub id: EndpointId,
    /// What it sends keys and values over.
    pub link: Transfer,
    pub trouble: Trouble,
    /// Counts engines: what an earlier one had to say is void.
    pub generation: u32,
    /// When to look at the engine next, if that is scheduled: not after it has something to tell. Until then it may be
    /// some steps behind the clock.
    pub step_at: Option<Nanos>,
    /// Counters of engines that were here before.
    pub buried: EngineStats,
    /// What its probes have found.
    pub found: Found,
    /// Time that this engine has not lived through: its own clock is behind by so much.
    behind: Nanos,
}

/// What is wrong with it: how many of the faults in force say so.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    pub deaths: u32,
    pub pauses: u32,
    /// Since when it stands still, by its own clock.
    still_since: Option<Nanos>,
    pub holes: u32,
    pub cuts: u32,
    pub floods: u32,
    pub drains: u32,
    /// Its engine is about to be replaced, and leaves when it has drained.
    pub leaving: u32,
    /// Nobody is here: its engine has left.
    pub away: bool,
    /// Factors on the length of its steps, by the faults they come from.
    pub slow: Vec<(usize, f64)>,
    /// By the faults: when it says to come again.
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

    /// Whether there is an engine that runs, or would if it were let.
    pub(super) fn alive(&self) -> bool {
        self.trouble.deaths == 0 && !self.trouble.away
    }

    /// Whether what is sent to it is answered before long.
    pub(super) fn answers(&self) -> bool {
        self.alive() && self.trouble.holes == 0 && self.trouble.pauses == 0
    }

    /// What time it is for the engine.
    pub(super) fn time(&self, now: Nanos) -> Nanos {
        self.trouble.still_since.unwrap_or(now - self.behind)
    }

    /// When the world reaches a time of the engine's; never while it stands still.
    pub(super) fn world_time(&self, at: Nanos) -> Option<Nanos> {
        self.trouble.still_since.is_none().then_some(at + self.behind)
    }

    /// Runs the engine up to `now`.
    pub(super) fn catch_up(&mut self, now: Nanos) {
        self.engine.catch_up(self.time(now));
    }

    /// The engine stands still.
    pub(super) fn halt(&mut self, now: Nanos) {
        self.trouble.pauses += 1;
        if self.trouble.pauses == 1 {
            let time = self.time(now);
            self.engine.catch_up(time);
            self.trouble.still_since = Some(time);
        }
    }

    /// One reason less to stand still.
    pub(super) fn go_on(&mut self, now: Nanos) {
        self.trouble.pauses -= 1;
        if self.trouble.pauses == 0
            && let Some(since) = self.trouble.still_since.take()
        {
            self.behind = now - since;
        }
    }

    /// An empty engine takes the place of this one.
    pub(super) fn replace_engine(&mut self, now: Nanos) {
        self.catch_up(now);
        self.buried = self.buried.followed_by(self.engine.stats());
        self.engine = Engine::new(self.engine.config().clone());
        self.set_slowdown(now);
        self.step_at = None;
        self.generation += 1;
    }

    /// As slow as all that slows it down.
    pub(super) fn set_slowdown(&mut self, now: Nanos) {
        self.catch_up(now);
        self.engine.set_slowdown(self.trouble.slow.iter().map(|(_, factor)| factor).product());
    }
}
