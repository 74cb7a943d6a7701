//! Failed attempts: by faults, and by timeouts.
//!
//! Under [rules](crate::rules::Rules) the router gets the outcome of each attempt, and a request whose answer has not
//! begun is placed again on an endpoint that has not failed it yet: at once if its first attempt cost no work, else
//! after a pause.

use kvlane_core::decision::Rejection;
use kvlane_core::retry;
use kvlane_core::scheduler::{Input, TOKENS_TOLD};
use kvlane_core::time::Nanos;

use super::Event;
use super::play::{DECODE, Flight, Play};
use crate::fault::Fault;
use crate::outcome::{Failure, Outcome};

/// How an attempt failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failed {
    /// Connection refused.
    Unreachable,
    /// The connection broke.
    Broken,
    /// It timed out.
    Late,
    /// The endpoint was busy, with or without `Retry-After`.
    Busy(Option<Nanos>),
}

// === impl Play ===

impl Play<'_, '_> {
    /// A fault begins.
    pub(super) fn fault(&mut self, index: usize) {
        let fault = self.world.config.faults[index];
        let at = match fault {
            Fault::Death { endpoint, .. }
            | Fault::Reset { endpoint, .. }
            | Fault::BlackHole { endpoint, .. } => Some(endpoint),
            _ => None,
        };
        let mut struck: Vec<u32> = self
            .flights
            .iter()
            .filter(|(_, flight)| at.is_some() && flight.node == at)
            .map(|(&r, _)| r)
            .collect();
        struck.sort_unstable();
        struck.iter().for_each(|&request| self.count_tokens(request));
        self.world.happen(Event::Fault(index));
        match fault {
            Fault::Death { endpoint, .. } => self.break_off(endpoint),
            Fault::Reset { endpoint, .. } => {
                struck.iter().for_each(|&request| self.cancel(endpoint, request));
                for request in struck {
                    self.attempt_failed(request, endpoint, Failed::Broken);
                }
            }
            // They wait for an event that will not come.
            Fault::BlackHole { endpoint, .. } => {
                struck.iter().for_each(|&request| self.cancel(endpoint, request));
            }
            _ => {}
        }
        self.follow();
    }

    /// An endpoint's requests break, and its transfers do not arrive.
    fn break_off(&mut self, endpoint: usize) {
        let now = self.now();
        let hit = |flight: &Flight| {
            let awaited = flight.source == Some(endpoint) && flight.sent_by.is_none_or(|at| at > now);
            flight.node == Some(endpoint) || awaited && flight.node.is_some()
        };
        let mut broken: Vec<u32> =
            self.flights.iter().filter(|(_, flight)| hit(flight)).map(|(&request, _)| request).collect();
        broken.sort_unstable();
        for request in broken {
            // The receiver of a transfer has blocks for it.
            if let Some(node) =
                self.flights.get(&request).and_then(|flight| flight.node).filter(|&s| s != endpoint)
            {
                self.cancel(node, request);
            }
            self.attempt_failed(request, endpoint, Failed::Broken);
        }
    }

    /// Probes an endpoint. Requests that wait for the first token of an endpoint found down stop waiting.
    pub(super) fn probe(&mut self, event: Event, at: usize) {
        let was_healthy = self.world.nodes[at].found.healthy;
        self.world.happen(event);
        if was_healthy && !self.world.nodes[at].found.healthy {
            let mut waiting: Vec<u32> =
                self.flights.iter().filter(|(_, flight)| flight.node == Some(at)).map(|(&r, _)| r).collect();
            waiting.retain(|&request| self.awaits_first_token(request));
            waiting.sort_unstable();
            for request in waiting {
                self.cancel(at, request);
                self.attempt_failed(request, at, Failed::Broken);
            }
        }
        self.follow();
    }

    fn awaits_first_token(&mut self, request: u32) -> bool {
        let decodes = self.flights.get(&request).is_some_and(|flight| flight.pool == DECODE);
        !decodes || self.outcome(request).first_token.is_none()
    }

    /// Removes a request from its engine.
    pub(super) fn cancel(&mut self, at: usize, request: u32) {
        let now = self.now();
        let node = &mut self.world.nodes[at];
        let time = node.time(now);
        node.engine.cancel(time, u64::from(request));
        self.world.watch(at);
    }

    /// Counts the tokens that a client has received of an answer that is about to break.
    pub(super) fn count_tokens(&mut self, request: u32) {
        let now = self.now();
        let Some(Flight { pool: DECODE, node: Some(node), .. }) = self.flights.get(&request) else { return };
        let node = &mut self.world.nodes[*node];
        node.catch_up(now);
        let generated = node.engine.generated_tokens(u64::from(request)).unwrap_or(0);
        let outcome = self.outcome(request);
        if outcome.first_token.is_some() && generated > 0 {
            outcome.output_tokens = 1 + (generated - 1) / TOKENS_TOLD * TOKENS_TOLD;
        }
    }

    /// Schedules the first-token timeout of a request that has been given to an engine.
    pub(super) fn await_first_token(&mut self, request: u32, sent: u32) {
        let Some(rules) = &self.world.config.rules else { return };
        if rules.first_token < Nanos::MAX {
            let (run, at) = (self.run, self.now() + rules.first_token);
            self.world.clock.schedule(at, Event::Late { run, request, sent });
        }
    }

    /// Schedules the check whether an answer has progressed.
    pub(super) fn await_more(&mut self, request: u32, tokens: u32) {
        let (Some(rules), Some(flight)) = (&self.world.config.rules, self.flights.get(&request)) else {
            return;
        };
        if rules.between_tokens < Nanos::MAX {
            let (run, sent, at) = (self.run, flight.sent, self.now() + rules.between_tokens);
            self.world.clock.schedule(at, Event::Stalled { run, request, sent, tokens });
        }
    }

    /// The first-token timeout of a request, unless the token has arrived or the request has been placed elsewhere.
    pub(super) fn late(&mut self, request: u32, sent: u32) {
        let Some(&Flight { node: Some(node), sent: last, .. }) = self.flights.get(&request) else { return };
        if last == sent && self.awaits_first_token(request) {
            self.cancel(node, request);
            self.attempt_failed(request, node, Failed::Late);
        }
    }

    /// The answer fails if it has not progressed.
    pub(super) fn stalled(&mut self, request: u32, sent: u32, tokens: u32) {
        let Some(&Flight { node: Some(at), sent: last, .. }) = self.flights.get(&request) else { return };
        if last != sent {
            return;
        }
        let now = self.now();
        let node = &mut self.world.nodes[at];
        node.catch_up(now);
        match node.engine.generated_tokens(u64::from(request)) {
            Some(generated) if generated > tokens => self.await_more(request, generated),
            _ => {
                self.count_tokens(request);
                self.cancel(at, request);
                self.attempt_failed(request, at, Failed::Late);
            }
        }
    }

    /// An endpoint did not answer, or stopped answering.
    pub(super) fn attempt_failed(&mut self, request: u32, endpoint: usize, how: Failed) {
        let retries_max = u32::from(self.world.config.attempts_max).saturating_sub(1);
        self.tell_failed(request, endpoint, how);
        let Outcome { first_token, attempts, .. } = *self.outcome(request);
        let mut attempts = retry::Attempts::new(attempts.into());
        attempts.failed(matches!(how, Failed::Unreachable | Failed::Busy(_)));
        if first_token.is_some() || !attempts.may_retry(retries_max) {
            return self.settle(request, Some(how.failure()));
        }
        self.release(request);
        self.outcome(request).attempts += 1;
        let prefill = self.world.routers.len() - 1;
        let failed = self.world.nodes[endpoint].id;
        if let Some(flight) = self.flights.get_mut(&request) {
            if flight.pool == DECODE && prefill != DECODE {
                // The prefill engine that held the prompt is gone: it has to be computed again.
                *flight = Flight { pool: prefill, ..Flight::default() };
            } else {
                if flight.node == Some(endpoint) {
                    flight.failed.push(failed);
                }
                (flight.node, flight.source, flight.sent_by) = (None, None, None);
                flight.attempt += 1;
            }
            flight.ended = Some(how);
        }
        self.follow();
        self.place_again(request, attempts);
    }

    /// Reports the outcome of an attempt to the router, which learns of its end by [`Input::Finished`].
    fn tell_failed(&mut self, request: u32, endpoint: usize, how: Failed) {
        let Some(flight) = self.flights.get(&request).filter(|flight| flight.node == Some(endpoint)) else {
            return;
        };
        if self.world.config.rules.is_none() {
            return;
        }
        self.world.nodes[endpoint].found.gone |= how == Failed::Unreachable;
        let (now, request) = (self.now(), self.id(request));
        let input = match how {
            Failed::Busy(retry_after) => Input::Busy { request, retry_after },
            Failed::Unreachable | Failed::Broken | Failed::Late => Input::Failed { request },
        };
        self.world.routers[flight.pool].step(now, input, &mut self.world.outputs);
    }

    /// Places a request again: after the pause that the rules say, if there are any.
    fn place_again(&mut self, request: u32, attempts: retry::Attempts) {
        let (now, run) = (self.now(), self.run);
        let rng = &mut self.world.rng;
        let rules = self.world.config.rules.as_ref();
        match rules.map_or(Nanos::ZERO, |rules| attempts.pause(&rules.backoff, || rng.unit())) {
            Nanos::ZERO => self.place(request),
            pause => self.world.clock.schedule(now + pause, Event::Place { run, request }),
        }
    }

    /// The router rejects a request.
    pub(super) fn rejected(&mut self, request: u32, why: Rejection) {
        let ruled = self.world.config.rules.is_some();
        let failure = match self.flights.get(&request) {
            // The outcome of the last attempt is more specific.
            Some(Flight { ended: Some(how), .. }) if ruled && why == Rejection::NoEndpoint => how.failure(),
            _ => Failure::Rejected(why),
        };
        self.over(request, Some(failure));
    }
}

// === impl Failed ===

impl Failed {
    /// The failure that the client sees if no other endpoint is tried.
    fn failure(self) -> Failure {
        match self {
            Self::Busy(_) => Failure::Busy,
            Self::Unreachable | Self::Broken | Self::Late => Failure::Broken,
        }
    }
}
