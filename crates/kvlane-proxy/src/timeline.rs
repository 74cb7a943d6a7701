//! The stages of one request until its response's head is sent.
//!
//! One stage follows the other without a gap: entering a stage ends the one before, at one reading of the clock. The
//! result is the `Server-Timing` header and a histogram per stage.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::HeaderValue;
use kvlane_core::time::Nanos;
use kvlane_fleet::clock::Clock;
use kvlane_wire::server_timing::{Stage, Stages};
use kvlane_wire::trace_context::{SpanId, TraceId};
use tokio::time::Instant;
use tracing::field::{DisplayValue, display};

use crate::traces::{RequestStages, RequestTrace, SPANS_MAX};

/// One request's stages so far.
#[derive(Debug)]
pub struct Timeline {
    clock: Clock,
    /// The request's id.
    request_id: HeaderValue,
    /// Its trace, if any.
    trace: Option<Arc<RequestTrace>>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The current stage,
    stage: Stage,
    /// and its start.
    since: Nanos,
    stages: Stages,
    /// The stages with their times, if they are recorded in a trace.
    intervals: Option<Vec<(Stage, Nanos, Nanos)>>,
    /// When the head was sent: no stage is added after that.
    closed: Option<Nanos>,
    /// The attempt that was answered.
    winner: Option<SpanId>,
}

// === impl Timeline ===

impl Timeline {
    /// A request whose head arrived at `received`; its body is read next.
    pub fn start(
        clock: Clock,
        received: Nanos,
        request_id: HeaderValue,
        trace: Option<Arc<RequestTrace>>,
    ) -> Self {
        let state = State {
            stage: Stage::Read,
            since: received,
            stages: Stages::default(),
            intervals: trace.as_ref().filter(|trace| trace.is_recorded()).map(|_| Vec::new()),
            closed: None,
            winner: None,
        };
        Self { clock, request_id, trace, state: Mutex::new(state) }
    }

    /// Starts the next stage and ends the current one.
    pub fn enter(&self, next: Stage) {
        self.enter_at(next, self.clock.now());
    }

    /// Like [`Timeline::enter`], at a given time.
    pub fn enter_at(&self, next: Stage, now: Nanos) {
        self.state().enter(next, now);
    }

    /// The request's id, for logs.
    pub fn request_id(&self) -> &str {
        self.request_id.to_str().unwrap_or_default()
    }

    /// The trace it is part of, for logs.
    pub fn trace_id(&self) -> Option<DisplayValue<TraceId>> {
        self.trace.as_ref().map(|trace| display(trace.id()))
    }

    /// Its trace.
    pub fn trace(&self) -> Option<&Arc<RequestTrace>> {
        self.trace.as_ref()
    }

    /// An engine that has had the whole request since `at` answers it; `attempt` is its span in a trace. What it has waited
    /// for is `stage`: the engine, or its KV blocks.
    pub fn answered(&self, at: Instant, stage: Stage, attempt: Option<SpanId>) {
        let mut state = self.state();
        state.enter(stage, self.clock.at(at));
        if state.closed.is_none() {
            state.winner = attempt;
        }
    }

    /// The attempt failed: its time counts as a retry.
    pub fn failed(&self) {
        self.state().stage = Stage::Retry;
    }

    /// The head is sent: returns all stages.
    pub fn close(&self) -> Stages {
        let now = self.clock.now();
        let mut state = self.state();
        let stage = state.stage;
        state.enter(stage, now);
        state.closed.get_or_insert(now);
        state.stages
    }

    /// The stages for the trace, once.
    pub fn request_stages(&self) -> RequestStages {
        let mut state = self.state();
        RequestStages {
            stages: state.intervals.take().unwrap_or_default(),
            began: state.closed,
            winner: state.winner,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl State ===

impl State {
    fn enter(&mut self, next: Stage, now: Nanos) {
        if self.closed.is_some() {
            return;
        }
        // Differences of whole microseconds, so that they add up to the whole.
        let micros = |at: Nanos| at.0 / 1000;
        self.stages.add(self.stage, micros(now).saturating_sub(micros(self.since)));
        if let Some(intervals) = &mut self.intervals
            && intervals.len() < SPANS_MAX
        {
            intervals.push((self.stage, self.since, self.since.max(now)));
        }
        // Other threads' readings of the clock are never later, but may be earlier.
        (self.stage, self.since) = (next, self.since.max(now));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ID: HeaderValue = HeaderValue::from_static("a");

    proptest! {
        /// Invariant: The stages of a request follow one another without a gap and add up to its time.
        ///
        /// Also held by `the_stages_add_up_to_at_most_the_requests_duration`.
        #[test]
        fn stages_add_up_to_the_whole_time(
            received in 0..1u64 << 40, steps in prop::collection::vec((0..8usize, 0..5_000_000u64, any::<bool>()), 0..20),
        ) {
            // The clock stands still, so closing adds no time.
            let timeline = Timeline::start(Clock::start(0.0), Nanos(received), ID, None);
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
            prop_assert_eq!(timeline.close(), stages, "a closed timeline does not change");
        }
    }

    #[test]
    fn the_time_of_failed_attempts_is_a_retry() {
        let timeline = Timeline::start(Clock::start(0.0), Nanos::ZERO, ID, None);
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
