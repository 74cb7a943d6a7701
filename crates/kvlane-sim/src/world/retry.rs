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
use super::play::{Flight, Play};
use super::split::{Leg, Stage};
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
    /// KV blocks did not arrive, or not in time.
    Transfer,
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
        let struck = self.legs_at(|flight| at.and_then(|at| flight.stage_at(at)));
        struck.iter().for_each(|&(request, _)| self.count_tokens(request));
        self.world.happen(Event::Fault(index));
        match fault {
            Fault::Death { endpoint, .. } => self.break_off(endpoint),
            Fault::GatewayDeath { gateway, .. } => self.lose_gateway(gateway),
            Fault::Reset { .. } => {
                for (request, stage) in struck {
                    self.attempt_failed(request, stage, Failed::Broken);
                }
            }
            // They wait for an event that will not come.
            Fault::BlackHole { .. } => {
                for (request, stage) in struck {
                    let leg = self.flights.get(&request).and_then(|flight| flight.leg(stage).copied());
                    leg.into_iter().for_each(|leg| self.cancel(request, leg));
                }
            }
            _ => {}
        }
        self.follow();
    }

    /// The requests of a gateway that has died end at their engines. Their clients send those without a token again.
    fn lose_gateway(&mut self, gateway: usize) {
        let (now, delay) = (self.now(), self.world.config.routing_delay);
        let mut lost: Vec<u32> =
            self.flights.iter().filter(|(_, f)| f.gateway == gateway).map(|(&request, _)| request).collect();
        lost.sort_unstable();
        for request in lost {
            if !self.flights.contains_key(&request) {
                continue;
            }
            self.count_tokens(request);
            if self.outcome(request).first_token.is_some() {
                self.settle(request, Some(Failure::Broken));
                continue;
            }
            self.cancel_legs(request);
            let next = self.next_gateway(request);
            let Some(flight) = self.flights.get_mut(&request) else { continue };
            let comes = flight.comes;
            *flight = Flight { gateway: next, comes, ..Flight::default() };
            let outcome = self.outcome(request);
            (outcome.attempts, outcome.resent, outcome.split) = (1, outcome.resent.saturating_add(1), None);
            if !comes {
                self.place_at(now + delay, request);
            }
        }
    }

    /// The requests of which `which` names a leg, in order.
    fn legs_at(&self, which: impl Fn(&Flight) -> Option<Stage>) -> Vec<(u32, Stage)> {
        let named = |(&request, flight)| Some((request, which(flight)?));
        let mut found: Vec<(u32, Stage)> = self.flights.iter().filter_map(named).collect();
        found.sort_unstable_by_key(|(request, _)| *request);
        found
    }

    /// An endpoint's requests break, and its transfers do not arrive.
    fn break_off(&mut self, endpoint: usize) {
        let now = self.now();
        for (request, stage) in self.legs_at(|flight| flight.stage_at(endpoint)) {
            self.attempt_failed(request, stage, Failed::Broken);
        }
        for (request, stage) in self.legs_at(|flight| flight.stage_from(endpoint, now)) {
            self.attempt_failed(request, stage, Failed::Transfer);
        }
    }

    /// Probes an endpoint. Requests that wait for the first token of an endpoint found down stop waiting.
    pub(super) fn probe(&mut self, event: Event, at: usize) {
        let was_healthy = self.world.nodes[at].found.healthy;
        self.world.happen(event);
        if was_healthy && !self.world.nodes[at].found.healthy {
            for (request, stage) in self.legs_at(|flight| flight.stage_at(at)) {
                if self.outcome(request).first_token.is_none() {
                    self.attempt_failed(request, stage, Failed::Broken);
                }
            }
        }
        self.follow();
    }

    /// Removes a leg of a request from its engine.
    pub(super) fn cancel(&mut self, request: u32, leg: Leg) {
        let now = self.now();
        let node = &mut self.world.nodes[leg.node];
        let time = node.time(now);
        node.engine.cancel(time, leg.id(request));
        self.world.watch(leg.node);
    }

    /// Removes a request from its engines.
    pub(super) fn cancel_legs(&mut self, request: u32) {
        let legs: Vec<Leg> =
            self.flights.get(&request).into_iter().flat_map(Flight::legs).map(|(_, leg)| leg).collect();
        legs.into_iter().for_each(|leg| self.cancel(request, leg));
    }

    /// Counts the tokens that a client has received of an answer that is about to break.
    pub(super) fn count_tokens(&mut self, request: u32) {
        let now = self.now();
        let Some(&Flight { answer: Some(leg), .. }) = self.flights.get(&request) else { return };
        let node = &mut self.world.nodes[leg.node];
        node.catch_up(now);
        let generated = node.engine.generated_tokens(leg.id(request)).unwrap_or(0);
        let outcome = self.outcome(request);
        if outcome.first_token.is_some() && generated > 0 {
            outcome.output_tokens = 1 + (generated - 1) / TOKENS_TOLD * TOKENS_TOLD;
        }
    }

    /// Schedules the first-token timeout of a leg that has been given to an engine. One that waits for blocks has its own,
    /// from when they are computed.
    pub(super) fn await_first_token(&mut self, request: u32, stage: Stage) {
        let (Some(rules), Some(flight)) = (&self.world.config.rules, self.flights.get(&request)) else {
            return;
        };
        let Some(&Leg { number: sent, .. }) = flight.leg(stage) else { return };
        let wait = match stage {
            Stage::Answer if self.awaits_prompt(request) => return,
            Stage::Answer if flight.prefill.is_some() => rules.transfer.min(rules.first_token),
            _ => rules.first_token,
        };
        if wait < Nanos::MAX {
            let (run, at) = (self.run, self.now() + wait);
            self.world.clock.schedule(at, Event::Late { run, request, sent });
        }
    }

    /// Schedules the check whether an answer has progressed.
    pub(super) fn await_more(&mut self, request: u32, tokens: u32) {
        let (Some(rules), Some(flight)) = (&self.world.config.rules, self.flights.get(&request)) else {
            return;
        };
        if rules.between_tokens < Nanos::MAX {
            let (run, at) = (self.run, self.now() + rules.between_tokens);
            let Some(&Leg { number: sent, .. }) = flight.answer.as_ref() else { return };
            self.world.clock.schedule(at, Event::Stalled { run, request, sent, tokens });
        }
    }

    /// The first-token timeout of a leg, unless the token has arrived or the request has been placed elsewhere.
    pub(super) fn late(&mut self, request: u32, sent: u32) {
        let Some(flight) = self.flights.get(&request) else { return };
        let (Some(stage), is_split) = (flight.stage_of(sent), flight.prefill.is_some()) else { return };
        if self.outcome(request).first_token.is_none() {
            let transfers = is_split && stage == Stage::Answer;
            self.attempt_failed(request, stage, if transfers { Failed::Transfer } else { Failed::Late });
        }
    }

    /// The answer fails if it has not progressed.
    pub(super) fn stalled(&mut self, request: u32, sent: u32, tokens: u32) {
        let Some(&Flight { answer: Some(leg), .. }) = self.flights.get(&request) else { return };
        if leg.number != sent {
            return;
        }
        let now = self.now();
        let node = &mut self.world.nodes[leg.node];
        node.catch_up(now);
        match node.engine.generated_tokens(leg.id(request)) {
            Some(generated) if generated > tokens => self.await_more(request, generated),
            _ => {
                self.count_tokens(request);
                self.attempt_failed(request, Stage::Answer, Failed::Late);
            }
        }
    }

    /// An endpoint did not answer a leg, or stopped answering.
    pub(super) fn attempt_failed(&mut self, request: u32, stage: Stage, how: Failed) {
        let retries_max = u32::from(self.world.config.attempts_max).saturating_sub(1);
        self.cancel_legs(request);
        self.tell_failed(request, stage, how);
        let Outcome { first_token, attempts, .. } = *self.outcome(request);
        let mut attempts = retry::Attempts::new(attempts.into());
        attempts.failed(matches!(how, Failed::Unreachable | Failed::Busy(_)));
        if first_token.is_some() || !attempts.may_retry(retries_max) {
            return self.settle(request, Some(how.failure()));
        }
        self.release(request);
        let outcome = self.outcome(request);
        (outcome.attempts, outcome.split) = (outcome.attempts + 1, None);
        if let Some(flight) = self.flights.get_mut(&request) {
            // Neither end is to blame for a transfer.
            let blamed = flight.leg(stage).filter(|_| how != Failed::Transfer);
            let blamed = blamed.map(|leg| self.world.nodes[leg.node].id);
            flight.failed.extend(blamed);
            (flight.answer, flight.prefill) = (None, None);
            flight.attempt += 1;
            flight.ended = Some(how);
        }
        self.follow();
        self.place_again(request, attempts);
    }

    /// Reports the outcome of an attempt to the router, which learns of its end by [`Input::Finished`]. Failed transfers
    /// are reported without rules too, as the times of the others are.
    fn tell_failed(&mut self, request: u32, stage: Stage, how: Failed) {
        let leg = self.flights.get(&request).and_then(|flight| flight.leg(stage));
        let Some(&Leg { node, .. }) = leg else { return };
        let (sent, request) = (request, self.leg_id(request, stage));
        let input = match how {
            Failed::Transfer => Input::TransferFailed { request },
            _ if self.world.config.rules.is_none() => return,
            Failed::Busy(retry_after) => Input::Busy { request, retry_after },
            Failed::Unreachable | Failed::Broken | Failed::Late => Input::Failed { request },
        };
        self.world.nodes[node].found.gone |= how == Failed::Unreachable;
        self.tell(sent, input);
    }

    /// Places a request again: after the pause that the rules say, if there are any.
    fn place_again(&mut self, request: u32, attempts: retry::Attempts) {
        let now = self.now();
        let rng = &mut self.world.rng;
        let rules = self.world.config.rules.as_ref();
        match rules.map_or(Nanos::ZERO, |rules| attempts.pause(&rules.backoff, || rng.unit())) {
            Nanos::ZERO => self.place(request),
            pause => self.place_at(now + pause, request),
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
            Self::Unreachable | Self::Broken | Self::Late | Self::Transfer => Failure::Broken,
        }
    }
}
