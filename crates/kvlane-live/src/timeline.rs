//! Where the time of one request goes until its answer's head is sent.
//!
//! One stage follows the other without a gap: whoever enters the next one ends the one before, at one reading of the
//! clock. What comes of it is the `Server-Timing` header and a histogram per stage.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kvlane_core::time::Nanos;
use kvlane_wire::server_timing::{Stage, Stages};
use tokio::time::Instant;

use crate::clock::Clock;

/// One request's stages so far.
#[derive(Debug)]
pub(crate) struct Timeline {
    clock: Clock,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// What is going on,
    stage: Stage,
    /// and since when.
    since: Nanos,
    stages: Stages,
    /// The head is on its way: nothing is added any more.
    closed: bool,
}

// === impl Timeline ===

impl Timeline {
    /// A request whose head came at `received`: its body is to be read.
    pub(crate) fn start(clock: Clock, received: Nanos) -> Self {
        let state = State { stage: Stage::Read, since: received, stages: Stages::default(), closed: false };
        Self { clock, state: Mutex::new(state) }
    }

    /// The next stage begins, and the one before is over.
    pub(crate) fn enter(&self, next: Stage) {
        self.enter_at(next, self.clock.now());
    }

    /// As [`Timeline::enter`], at a time that somebody has read already.
    pub(crate) fn enter_at(&self, next: Stage, now: Nanos) {
        self.state().enter(next, now);
    }

    /// The engine has had the whole request since `at`.
    pub(crate) fn sent(&self, at: Instant) {
        self.enter_at(Stage::Engine, self.clock.at(at));
    }

    /// What was sent has come to nothing, and is counted as such.
    pub(crate) fn failed(&self) {
        self.state().stage = Stage::Retry;
    }

    /// The head goes out: all stages.
    pub(crate) fn close(&self) -> Stages {
        let now = self.clock.now();
        let mut state = self.state();
        let stage = state.stage;
        state.enter(stage, now);
        state.closed = true;
        state.stages
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl State ===

impl State {
    fn enter(&mut self, next: Stage, now: Nanos) {
        if self.closed {
            return;
        }
        // Differences of whole microseconds, so that they add up to the whole.
        let micros = |at: Nanos| at.0 / 1000;
        self.stages.add(self.stage, micros(now).saturating_sub(micros(self.since)));
        // Clocks of other threads are no later, but may have been read earlier.
        (self.stage, self.since) = (next, self.since.max(now));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn stages_add_up_to_the_whole_time(
            received in 0..1u64 << 40, steps in prop::collection::vec((0..8usize, 0..5_000_000u64, any::<bool>()), 0..20),
        ) {
            // It stands still, so closing adds nothing.
            let timeline = Timeline::start(Clock::start(0.0), Nanos(received));
            let mut now = received;
            for (stage, nanos, fails) in steps {
                now += nanos;
                timeline.enter_at(Stage::ALL[stage], Nanos(now));
                if fails {
                    timeline.failed();
                }
            }
            let stages = timeline.close();
            prop_assert_eq!(stages.total(), now / 1000 - received / 1000);
            timeline.enter_at(Stage::Queue, Nanos(now + 1_000_000));
            prop_assert_eq!(timeline.close(), stages, "it is closed");
        }
    }

    #[test]
    fn what_came_to_nothing_is_a_retry() {
        let timeline = Timeline::start(Clock::start(0.0), Nanos::ZERO);
        let at = |ms: u64| Nanos(ms * 1_000_000);
        timeline.enter_at(Stage::Place, at(1));
        timeline.enter_at(Stage::Send, at(2));
        timeline.failed();
        timeline.enter_at(Stage::Place, at(5));
        timeline.enter_at(Stage::Send, at(6));
        timeline.enter_at(Stage::Engine, at(8));
        let stages: Vec<_> =
            timeline.close().iter().map(|(stage, micros)| (stage.name(), micros / 1000)).collect();
        assert_eq!(stages, [("read", 1), ("place", 2), ("retry", 3), ("send", 2), ("engine", 0)]);
    }
}
