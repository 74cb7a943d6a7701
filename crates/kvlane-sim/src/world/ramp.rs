//! How a closed loop begins, and which of its conversations count.
//!
//! Clients that all begin at the same moment send in lock step: prompts of one length arrive together, are computed
//! together, and the answers end together. A real load generator shows this only in its first seconds. A [`Ramp`] spreads
//! the beginnings, and a [`Window`] leaves out what comes before and after the conversations that count.

use std::ops::Range;

use kvlane_core::rng::Rng;
use kvlane_core::time::Nanos;

use super::World;
use crate::engine::EngineStats;

/// Distinguishes the seed of the clients' beginnings from the world's own.
const STAGGER_SEED: u64 = 0x57A6_6E72;

/// The beginning of a closed loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ramp {
    /// Clients begin at uniformly random times within this; zero: all at once.
    pub stagger: Nanos,
    /// The requests that count, whole conversations: those before are a warm-up, those after keep the load up until all
    /// that count have ended.
    pub counted: Range<u32>,
}

/// The time in which the conversations that count began. In a closed loop, as many end in it as begin, so their number
/// over its length is the rate at which the fleet serves that many clients.
#[derive(Clone, Debug, Default)]
pub struct Window {
    /// When the first of them began.
    pub start: Nanos,
    /// When the first one after them began; without any, when the last of them ended.
    pub end: Nanos,
    /// The engines' counters at its start.
    pub before: Vec<EngineStats>,
    /// The engines' counters at its end.
    pub after: Vec<EngineStats>,
    /// The samples of the world that were taken in it.
    pub samples: Range<usize>,
}

/// The window of a run that is played with a ramp, while it is measured.
#[derive(Default)]
pub(super) struct Watch {
    ramp: Option<Ramp>,
    window: Window,
    opened: bool,
    closed: bool,
}

// === impl Watch ===

impl Watch {
    pub(super) fn new(ramp: &Ramp) -> Self {
        Self { ramp: Some(ramp.clone()), ..Self::default() }
    }

    /// When each client begins, from the start of the run.
    pub(super) fn starts(&self, clients: u32, seed: u64) -> Vec<Nanos> {
        let stagger_s = self.ramp.as_ref().map_or(0.0, |ramp| ramp.stagger.as_secs_f64());
        let mut rng = Rng::new(seed ^ STAGGER_SEED);
        (0..clients).map(|_| Nanos::from_secs_f64(rng.unit() * stagger_s)).collect()
    }

    /// A conversation begins: the window may open or close.
    pub(super) fn begins(&mut self, root: u32, world: &World) {
        let Some(Ramp { counted, .. }) = &self.ramp else { return };
        let (opens, closes) = (root >= counted.start, root >= counted.end);
        if opens && !self.opened {
            self.opened = true;
            let from = world.samples().len();
            (self.window.start, self.window.before) = (world.clock.now(), world.engine_stats());
            self.window.samples = from..from;
        }
        if closes && !self.closed {
            self.close(world.clock.now(), world);
        }
    }

    /// The window, when the run is over. `last_end` is when the last request that counts ended.
    pub(super) fn window(mut self, last_end: Nanos, world: &World) -> Window {
        if !self.closed {
            self.close(last_end, world);
        }
        self.window
    }

    fn close(&mut self, end: Nanos, world: &World) {
        self.closed = true;
        (self.window.end, self.window.after) = (end, world.engine_stats());
        self.window.samples.end = world.samples().len();
    }
}
