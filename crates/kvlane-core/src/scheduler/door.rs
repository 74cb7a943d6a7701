//! Who goes in, who waits, who is turned away: the scheduler in front of its policy.

use super::flights::{Flight, Turn};
use super::gate::Fit;
use super::{Input, Output, Scheduler};
use crate::decision::{Refused, Rejection};
use crate::queue::{Account, Lane, Waiting};
use crate::request::{SchedulingRequest, SessionKey};
use crate::time::Nanos;

/// Of those who wait, how many are looked at for one who can go, while the endpoints that the first may go to take none.
const LOOKED_AT_MAX: usize = 16;

// === impl Input ===

impl Input {
    /// Whether it changes which endpoints take requests, or what they hold.
    pub(super) fn is_of_fleet(&self) -> bool {
        use Input::{Draining, Health, Joined, Left, Reported};
        matches!(self, Joined { .. } | Draining { .. } | Left { .. } | Health { .. } | Reported { .. })
    }
}

// === impl Scheduler ===

impl Scheduler {
    /// A request wants a place: it gets one, or waits, or is refused.
    pub(super) fn arrive(&mut self, now: Nanos, waiting: Waiting, out: &mut Vec<Output>) {
        let request = &waiting.request;
        let id = request.id;
        if self.flights.contains(id) || self.queue.contains(id) {
            // It has its place already, or waits for it: an answer to one of two would be lost.
            return;
        }
        let again = request.attempt > 0;
        let lane = if again { Lane::GoesOn } else { self.lane(request) };
        let may_go = lane == Lane::GoesOn || !self.queue.anyone_begins() && self.may_begin(request);
        if again || !self.is_full() && may_go && !self.queue.anyone_goes_on() {
            // Whoever has been placed before makes nobody else give up.
            let can_wait = if again { self.queue.has_room() } else { self.config.queue_len_max > 0 };
            match self.fill_rows(now, request, &waiting.overlap, can_wait) {
                Fit::Rows => {
                    self.queue.pass(Account::of(request, lane));
                    self.enter(now, request.session);
                    return self.place(now, &waiting, lane, true, out);
                }
                Fit::Later => {}
                Fit::Nobody => return self.refuse(now, request, false, Rejection::NoEndpoint, out),
            }
        }
        self.stalled = false;
        let session = waiting.request.session.filter(|_| lane == Lane::GoesOn);
        let left_out = self.queue.push(waiting, lane);
        if left_out.as_ref().is_none_or(|(other, _)| other.request.id != id) {
            self.enter(now, session);
        }
        if let Some((other, lane)) = left_out {
            let entered = lane == Lane::GoesOn && other.request.id != id;
            self.refuse(now, &other.request, entered, Rejection::QueueFull, out);
        }
    }

    /// Whether a request has to be admitted.
    fn lane(&self, request: &SchedulingRequest) -> Lane {
        match (&self.admission, request.session) {
            (Some(admission), Some(session)) => admission.lane(session),
            _ => Lane::GoesOn,
        }
    }

    /// Whether there is room for the conversation of a request that is not active.
    pub(super) fn may_begin(&self, request: &SchedulingRequest) -> bool {
        self.admission.as_ref().is_none_or(|admission| admission.has_room(request.prompt_tokens))
    }

    /// A request of an active conversation comes.
    fn enter(&mut self, now: Nanos, session: Option<SessionKey>) {
        if let (Some(admission), Some(session)) = (&mut self.admission, session) {
            admission.enter(now, session);
        }
    }

    /// A request of an active conversation is over.
    pub(super) fn leave(&mut self, now: Nanos, session: Option<SessionKey>, context_tokens: Option<u64>) {
        if let (Some(admission), Some(session)) = (&mut self.admission, session) {
            admission.leave(now, session, context_tokens);
        }
    }

    /// Refuses a request. `entered` is whether its conversation is active for it.
    fn refuse(
        &mut self,
        now: Nanos,
        request: &SchedulingRequest,
        entered: bool,
        why: Rejection,
        out: &mut Vec<Output>,
    ) {
        if entered {
            self.leave(now, request.session, None);
        }
        out.push(Output::Reject { request: request.id, refused: Refused::at_once(why) });
    }

    /// Whether as much is in flight as may be.
    pub(super) fn is_full(&self) -> bool {
        self.config.in_flight_max > 0 && self.flights.len() >= self.config.in_flight_max as usize
    }

    /// Lets go of those who have waited too long, then places whom there is room for.
    pub(super) fn drain_queue(&mut self, now: Nanos, out: &mut Vec<Output>) {
        while let Some((waiting, lane)) = self.queue.pop_expired(now) {
            self.stalled = false;
            self.refuse(now, &waiting.request, lane == Lane::GoesOn, Rejection::QueueTimeout, out);
        }
        if let Some(admission) = &mut self.admission {
            admission.expire(now);
        }
        while !self.stalled && !self.is_full() {
            let may_begin = self.queue.first_gated().is_some_and(|request| self.may_begin(request));
            let Some(place) = self.next_turn(now, may_begin) else {
                if let Some(admission) = self.admission.as_mut().filter(|_| self.queue.anyone_begins()) {
                    admission.hold_back();
                }
                break;
            };
            let Some((waiting, lane)) = self.queue.take_turn(place) else { break };
            if let (true, Some(session), Some(admission)) =
                (lane.is_gated(), waiting.request.session, &mut self.admission)
            {
                admission.enter(now, session);
                self.queue.begun(session, || admission.enter(now, session));
            }
            match self.fill_rows(now, &waiting.request, &waiting.overlap, false) {
                Fit::Rows => self.place(now, &waiting, lane, false, out),
                Fit::Later | Fit::Nobody => {
                    self.refuse(now, &waiting.request, true, Rejection::NoEndpoint, out);
                }
            }
        }
    }

    /// Whose turn it is of those who wait: the first one for whom there is an endpoint.
    fn next_turn(&mut self, now: Nanos, may_begin: bool) -> Option<u64> {
        let mut first = self.queue.in_order(may_begin).take(LOOKED_AT_MAX).peekable();
        let anyone = first.peek().is_some();
        let place = first.find(|(_, waiting)| self.can_go(now, &waiting.request)).map(|(place, _)| place);
        // Conversations may begin as time goes by.
        self.stalled = anyone && place.is_none() && self.admission.is_none();
        place
    }

    /// A turn of a conversation is over: what it found in the cache is evidence.
    pub(super) fn turn_over(&mut self, now: Nanos, flight: &Flight) {
        let Some(Turn { session, sent_tokens, held_tokens }) = flight.turn else { return };
        if let (Some(admission), Some(held_tokens), true) =
            (&mut self.admission, held_tokens, flight.computed)
        {
            admission.observe(flight.prompt_tokens, sent_tokens, held_tokens);
            admission.conclude();
        }
        self.leave(now, Some(session), flight.computed.then_some(flight.context_tokens));
    }
}
