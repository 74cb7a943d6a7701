//! Admission: dispatches, queues or rejects a request before the policy picks an endpoint.

use super::availability::{Choice, IfNoneAvailable};
use super::in_flight::{InFlightRequest, Turn};
use super::slo::SloFit;
use super::{Input, Output, Scheduler};
use crate::breaker::State;
use crate::cache_accuracy::Prediction;
use crate::decision::{Refused, Rejection};
use crate::endpoint::EndpointId;
use crate::policy::Candidate;
use crate::queue::{Account, Lane, Waiting};
use crate::request::{AnswerEnd, RequestId, SchedulingRequest, SessionKey};
use crate::time::Nanos;

/// Queued requests examined per turn, in queue order, for one that an endpoint accepts.
const EXAMINED_MAX: usize = 16;

/// Smallest `Retry-After`, which counts whole seconds.
const RETRY_AFTER_MIN: Nanos = Nanos::from_secs(1);
/// Finished requests per second below which the rate is not used: one in 30 s.
const FINISHED_MIN_S: f64 = 1.0 / 30.0;
/// `Retry-After` where the rate is too low to estimate a wait. Short enough to find free capacity soon, long enough not
/// to load a stalled fleet with retries.
const RETRY_AFTER_UNKNOWN: Nanos = Nanos::from_secs(5);

/// A dequeued request that holds a dispatch slot. Its endpoint is chosen after the prefix lookup.
#[derive(Debug)]
pub(super) struct Dequeued {
    pub(super) waiting: Waiting,
    pub(super) lane: Lane,
    /// Its position in the queue.
    place: u64,
}

// === impl Input ===

impl Input {
    /// Whether the input changes which endpoints accept requests, or their capacity.
    pub(super) fn changes_fleet(&self) -> bool {
        use Input::{Assigned, Draining, Health, Joined, Left, Reported, Stalled};
        matches!(
            self,
            Joined { .. }
                | Assigned { .. }
                | Draining { .. }
                | Left { .. }
                | Health { .. }
                | Stalled { .. }
                | Reported { .. }
        )
    }

    /// Whether the input changes which endpoints accept requests.
    pub(super) fn changes_availability(&self) -> bool {
        self.changes_fleet() && !matches!(self, Self::Reported { .. })
    }
}

// === impl Scheduler ===

impl Scheduler {
    /// A request arrives: dispatches, queues or rejects it.
    pub(super) fn arrive(
        &mut self,
        now: Nanos,
        waiting: Waiting,
        overlap: &[(EndpointId, Prediction)],
        out: &mut Vec<Output>,
    ) {
        let request = &waiting.request;
        let id = request.id;
        if self.flights.contains(id) || self.waits(id) {
            // The request is already in flight or queued; a second entry with its id would lose one of the two answers.
            return;
        }
        if let Some(waited) = request.hedge {
            return self.hedge(now, &waiting, waited, overlap, out);
        }
        let again = request.attempt > 0;
        if !again {
            self.retries.earn(now, &self.config.retries);
            self.hedges.earn(now, &self.config.hedges);
        }
        let lane = if again { Lane::Active } else { self.lane(request) };
        let may_go = lane == Lane::Active || !self.queue.has_gated() && self.may_admit(request);
        // A new request does not overtake queued requests, nor take the slot of a dequeued one.
        let first = !self.queue.has_ungated() && (self.dequeued.is_empty() || !self.may_be_unavailable());
        let mut fit = None;
        if again || !self.is_full() && may_go && first {
            // A retry does not displace a queued request.
            let can_wait = if again { self.queue.has_room() } else { self.config.queue_size > 0 };
            let or_else = if can_wait { IfNoneAvailable::Wait } else { IfNoneAvailable::TryLeastBad };
            fit = Some(self.fill_candidates(now, request, overlap, or_else));
        }
        if fit == Some(Choice::NoEndpoint) {
            return self.refuse(now, request, false, Rejection::NoEndpoint, out);
        }
        if again && !self.retries.spend(now, &self.config.retries) {
            return self.refuse(now, request, false, Rejection::BudgetSpent, out);
        }
        if fit == Some(Choice::Rows) {
            let fit = self.keep_within_slo(now, &waiting);
            if let SloFit::Refused { late } = fit {
                return self.refuse_late(now, request, false, late, out);
            }
            self.queue.pass(Account::of(request, lane));
            self.enter(now, request.session);
            return self.place(now, &waiting, lane, out);
        }
        self.queue_blocked = false;
        let session = waiting.request.session.filter(|_| lane == Lane::Active);
        let left_out = self.queue.push(waiting, lane);
        if left_out.as_ref().is_none_or(|(other, _)| other.request.id != id) {
            self.enter(now, session);
        }
        if let Some((other, lane)) = left_out {
            let entered = lane == Lane::Active && other.request.id != id;
            self.refuse(now, &other.request, entered, Rejection::QueueFull, out);
        }
    }

    /// Places a hedge: a second copy of a request in flight whose first copy has waited for `waited`. It goes to the
    /// endpoint with the earliest expected first token, once the first copy has waited for as long as that takes. So a
    /// request waits at most twice as long as necessary, whenever its first copy would have answered. A rejection for
    /// being too early says by how much.
    fn hedge(
        &mut self,
        now: Nanos,
        waiting: &Waiting,
        waited: Nanos,
        overlap: &[(EndpointId, Prediction)],
        out: &mut Vec<Output>,
    ) {
        let request = &waiting.request;
        let busy = self.is_full() || self.queued() > 0;
        self.shortlist.left_out = 0;
        let fit = if busy {
            Choice::NoEndpoint
        } else {
            self.fill_rows(now, request, overlap, IfNoneAvailable::Refuse)
        };
        if fit == Choice::Rows {
            let pool = &self.pool;
            let proven = |id| pool.get(id).is_some_and(|endpoint| endpoint.breaker.state() == State::Closed);
            self.rows.retain(|row| proven(row.endpoint));
        }
        let expected_s = |row: &Candidate| row.first_token_s(request);
        let soonest = self.rows.iter().copied().min_by(|a, b| expected_s(a).total_cmp(&expected_s(b)));
        let Some(soonest) = soonest.filter(|_| fit == Choice::Rows) else {
            return self.refuse(now, request, false, Rejection::NoEndpoint, out);
        };
        let early = Nanos::from_secs_f64(expected_s(&soonest)) - waited;
        if early > Nanos::ZERO {
            let refused = Refused { why: Rejection::NoEndpoint, retry_after: early };
            return out.push(Output::Reject { request: request.id, refused });
        }
        self.rows.clear();
        self.rows.push(soonest);
        if !self.hedges.spend(now, &self.config.hedges) {
            return self.refuse(now, request, false, Rejection::BudgetSpent, out);
        }
        self.queue.pass(Account::of(request, Lane::Active));
        self.enter(now, request.session);
        self.place(now, waiting, Lane::Active, out);
    }

    /// Whether a request is queued.
    pub fn waits(&self, request: RequestId) -> bool {
        self.queue.contains(request) || self.dequeued.contains_key(&request)
    }

    /// Whether a request needs session admission.
    fn lane(&self, request: &SchedulingRequest) -> Lane {
        match (&self.admission, request.session) {
            (Some(admission), Some(session)) => admission.lane(session),
            _ => Lane::Active,
        }
    }

    /// Whether there is capacity for the conversation of a request that is not active.
    pub(super) fn may_admit(&self, request: &SchedulingRequest) -> bool {
        self.admission.as_ref().is_none_or(|admission| admission.has_room(request.prompt_tokens))
    }

    /// A request of an active conversation has arrived.
    fn enter(&mut self, now: Nanos, session: Option<SessionKey>) {
        if let (Some(admission), Some(session)) = (&mut self.admission, session) {
            admission.enter(now, session);
        }
    }

    /// A request of an active conversation is over.
    pub(super) fn leave(
        &mut self,
        now: Nanos,
        session: Option<SessionKey>,
        context_tokens: Option<u64>,
        end: Option<AnswerEnd>,
    ) {
        if let (Some(admission), Some(session)) = (&mut self.admission, session) {
            admission.leave(now, session, context_tokens, end);
        }
    }

    /// An answer has ended.
    pub(super) fn ended(&mut self, request: RequestId, end: AnswerEnd) {
        let turn = self.flights.get_mut(request).and_then(|flight| flight.turn.as_mut());
        if let Some(known) = turn.and_then(|turn| turn.end.as_mut()) {
            *known = end;
        }
    }

    /// Rejects a request. `entered` is whether it was counted in its conversation.
    fn refuse(
        &mut self,
        now: Nanos,
        request: &SchedulingRequest,
        entered: bool,
        why: Rejection,
        out: &mut Vec<Output>,
    ) {
        let retry_after = match why {
            Rejection::NoEndpoint => Nanos::ZERO,
            Rejection::QueueFull
            | Rejection::QueueTimeout
            | Rejection::BudgetSpent
            | Rejection::SloMissed => self.retry_after(now),
        };
        self.reject(now, request, entered, Refused { why, retry_after }, out);
    }

    /// Rejects a request that should miss its objectives on every endpoint, by `late` on the soonest one: after that
    /// time, a request like it should meet them there.
    fn refuse_late(
        &mut self,
        now: Nanos,
        request: &SchedulingRequest,
        entered: bool,
        late: Nanos,
        out: &mut Vec<Output>,
    ) {
        if late == Nanos::ZERO {
            return self.refuse(now, request, entered, Rejection::SloMissed, out);
        }
        let retry_after = late.min(self.config.queue_timeout).max(RETRY_AFTER_MIN);
        self.reject(now, request, entered, Refused { why: Rejection::SloMissed, retry_after }, out);
    }

    fn reject(
        &mut self,
        now: Nanos,
        request: &SchedulingRequest,
        entered: bool,
        refused: Refused,
        out: &mut Vec<Output>,
    ) {
        if entered {
            self.leave(now, request.session, None, Some(AnswerEnd::Unknown));
        }
        out.push(Output::Reject { request: request.id, refused });
    }

    /// Estimated wait of a request arriving at `now`: all queued requests ahead of it, at the recent rate of finished
    /// requests.
    fn retry_after(&mut self, now: Nanos) -> Nanos {
        let ahead = (self.queued() + 1) as f64;
        let rate_s = self.finished.rate_s(now);
        let span =
            if rate_s > FINISHED_MIN_S { Nanos::from_secs_f64(ahead / rate_s) } else { RETRY_AFTER_UNKNOWN };
        span.min(self.config.queue_timeout).max(RETRY_AFTER_MIN)
    }

    /// Whether the pool's in-flight limit is reached.
    pub(super) fn is_full(&self) -> bool {
        let taken = self.in_flight() + self.dequeued.len();
        self.config.max_concurrent_requests > 0 && taken >= self.config.max_concurrent_requests as usize
    }

    /// Rejects expired requests, and those whose targets have passed if that is what they want; then dequeues those for
    /// which there is room. A dequeued request holds its slot; its endpoint is chosen after its prefix has been looked
    /// up again.
    pub(super) fn drain_queue(&mut self, now: Nanos, out: &mut Vec<Output>) {
        while let Some((waiting, lane)) = self.queue.pop_expired(now) {
            self.queue_blocked = false;
            self.refuse(now, &waiting.request, lane == Lane::Active, Rejection::QueueTimeout, out);
        }
        while let Some((place, request)) = self.queue.first_missed(now) {
            self.queue_blocked = false;
            if !request.is_refused_if_late() {
                self.queue.miss(place);
                continue;
            }
            let id = request.id;
            let Some((waiting, lane)) = self.queue.remove(id) else { break };
            self.refuse(now, &waiting.request, lane == Lane::Active, Rejection::SloMissed, out);
        }
        if let Some(admission) = &mut self.admission {
            admission.expire(now);
        }
        while !self.queue_blocked && !self.is_full() {
            let may_admit = self.queue.first_gated().is_some_and(|request| self.may_admit(request));
            let Some(place) = self.next_turn(now, may_admit) else {
                if let Some(admission) = self.admission.as_mut().filter(|_| self.queue.has_gated()) {
                    admission.hold_back();
                }
                break;
            };
            let Some((waiting, lane)) = self.queue.take_turn(place) else { break };
            if let (true, Some(session), Some(admission)) =
                (lane.is_gated(), waiting.request.session, &mut self.admission)
            {
                admission.enter(now, session);
                self.queue.admit_session(session, || admission.enter(now, session));
            }
            let request = waiting.request.id;
            self.dequeued.insert(request, Dequeued { waiting, lane, place });
            out.push(Output::Refresh { request });
        }
    }

    /// Places a dequeued request with its fresh prefix lookup.
    pub(super) fn refreshed(
        &mut self,
        now: Nanos,
        request: RequestId,
        overlap: &[(EndpointId, Prediction)],
        out: &mut Vec<Output>,
    ) {
        // The request may have been cancelled meanwhile.
        let Some(Dequeued { waiting, lane, place }) = self.dequeued.remove(&request) else { return };
        self.queue_blocked = false;
        match self.fill_candidates(now, &waiting.request, overlap, IfNoneAvailable::Wait) {
            Choice::Rows => match self.keep_within_slo(now, &waiting) {
                SloFit::Refused { late } => self.refuse_late(now, &waiting.request, true, late, out),
                // Those behind it may meet theirs; it comes again as best effort.
                SloFit::BestEffort if waiting.due.is_some() && self.queue.len() > 0 => {
                    self.queue.put_back(place, Waiting { due: None, ..waiting });
                }
                SloFit::Met | SloFit::BestEffort => self.place(now, &waiting, lane, out),
            },
            Choice::Later => self.queue.put_back(place, waiting),
            Choice::NoEndpoint => self.refuse(now, &waiting.request, true, Rejection::NoEndpoint, out),
        }
    }

    /// The first queued request that an endpoint accepts.
    fn next_turn(&mut self, now: Nanos, may_admit: bool) -> Option<u64> {
        let mut first = self.queue.in_order(may_admit).take(EXAMINED_MAX).peekable();
        let anyone = first.peek().is_some();
        let place =
            first.find(|(_, waiting)| self.can_dispatch(now, &waiting.request)).map(|(place, _)| place);
        // With session admission, conversations may also begin as time passes.
        self.queue_blocked = anyone && place.is_none() && self.admission.is_none();
        place
    }

    /// A turn is over: reports its cache reuse to session admission.
    pub(super) fn turn_over(&mut self, now: Nanos, flight: &InFlightRequest) {
        let Some(Turn { session, sent_tokens, held_tokens, end }) = flight.turn else { return };
        if let (Some(admission), Some(held_tokens), true) =
            (&mut self.admission, held_tokens, flight.computed)
        {
            admission.observe(flight.prompt_tokens, sent_tokens, held_tokens);
            admission.end_round();
        }
        self.leave(now, Some(session), flight.computed.then_some(flight.context_tokens), end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounded::Share;
    use crate::breaker;
    use crate::budget::{self, PerSecond};
    use crate::request::Claims;
    use crate::scheduler::Config;
    use crate::scheduler::tests::{World, config, endpoint, placed};

    fn patient(max_concurrent_requests: u32) -> Config {
        Config {
            max_concurrent_requests,
            queue_timeout: Nanos::from_secs(60),
            queue_size: 100,
            ..config("prefix_aware")
        }
    }

    fn holds(slot: u16, tokens: u32) -> (EndpointId, Prediction) {
        (endpoint(slot), Prediction { exact: 0, approximate: tokens, lower: 0 })
    }

    fn refused(out: &[Output]) -> Option<Refused> {
        out.iter().find_map(|output| match output {
            Output::Reject { refused, .. } => Some(*refused),
            _ => None,
        })
    }

    fn ask(
        world: &mut World,
        request: SchedulingRequest,
        overlap: &[(EndpointId, Prediction)],
    ) -> Vec<Output> {
        world.step(Input::Arrived { request, overlap: overlap.to_vec(), block_tokens: 16 })
    }

    #[test]
    fn the_end_of_an_answer_and_a_last_request_reach_session_admission() {
        for (claims_last, end, lane) in [
            (false, AnswerEnd::ToolCalls, Lane::Active),
            (false, AnswerEnd::Unknown, Lane::Active),
            (true, AnswerEnd::ToolCalls, Lane::Returning),
        ] {
            let config = Config { session_admission: true, ..patient(0) };
            let mut world = World::new(config, 1);
            let session = Some(SessionKey(7));
            let claims = Claims { is_last: claims_last, ..Claims::default() };
            let request = SchedulingRequest { session, claims, ..SchedulingRequest::new(RequestId(1), 100) };
            assert!(placed(&ask(&mut world, request, &[])).is_some());
            world.step(Input::FirstToken { request: RequestId(1) });
            world.step(Input::Ended { request: RequestId(1), end });
            world.step(Input::Finished { request: RequestId(1) });
            let admission = world.scheduler.admission.as_ref().expect("on");
            assert_eq!(admission.lane(SessionKey(7)), lane, "{end:?}");
            admission.check();
        }
    }

    #[test]
    fn a_queued_request_goes_where_its_prefix_is_when_it_is_dispatched() {
        let mut world = World::new(patient(1), 2);
        world.arrive(0, 100, &[]);
        assert_eq!(world.arrive(1, 100, &[(endpoint(0), 96)]), []);
        world.known = vec![holds(1, 96)];
        let out = world.step(Input::Finished { request: RequestId(0) });
        assert_eq!(placed(&out), Some(endpoint(1)));
        assert_eq!(world.ledger(1).prefill_tokens, 4, "by the fresh lookup");
    }

    #[test]
    fn a_dequeued_request_keeps_its_slot_and_returns_it_when_it_ends() {
        let mut world = World::new(patient(1), 1);
        world.arrive(0, 100, &[]);
        (1..4).for_each(|id| assert_eq!(world.arrive(id, 100, &[]), []));
        world.lazy = true;
        assert_eq!(world.step(Input::Finished { request: RequestId(0) }), []);
        assert_eq!((world.unknown.as_slice(), world.scheduler.queued()), (&[RequestId(1)][..], 3));
        assert_eq!(world.arrive(4, 100, &[]), [], "the slot belongs to a dequeued request");
        assert_eq!(world.step(Input::Finished { request: RequestId(1) }), []);
        assert_eq!(world.unknown, [RequestId(1), RequestId(2)], "the slot goes to the next request");
        let mut out = Vec::new();
        world.lazy = false;
        world.look_up(&mut out);
        assert_eq!(out.iter().filter_map(Output::request).collect::<Vec<_>>(), [RequestId(2)]);
        assert_eq!((world.scheduler.in_flight(), world.scheduler.queued()), (1, 2));
    }

    #[test]
    fn a_dequeued_request_that_loses_its_slot_is_the_next_again() {
        let mut world = World::new(Config { max_requests_per_endpoint: 1, ..patient(0) }, 1);
        world.arrive(0, 100, &[]);
        (1..4).for_each(|id| assert_eq!(world.arrive(id, 100, &[]), []));
        world.lazy = true;
        assert_eq!(world.step(Input::Finished { request: RequestId(0) }), []);
        assert_eq!(world.unknown, [RequestId(1)], "one slot is free");
        assert_eq!(world.arrive(4, 100, &[]), [], "a new request does not get the slot");
        let again = SchedulingRequest { attempt: 1, ..SchedulingRequest::new(RequestId(9), 10) };
        assert!(placed(&ask(&mut world, again, &[])).is_some(), "a retry takes the slot");
        let mut out = Vec::new();
        world.lazy = false;
        world.look_up(&mut out);
        assert_eq!((out, world.scheduler.queued()), (vec![], 4));
        let out = world.step(Input::Finished { request: RequestId(9) });
        assert_eq!(out.iter().filter_map(Output::request).collect::<Vec<_>>(), [RequestId(1)]);
    }

    #[test]
    fn requests_that_wait_for_a_half_open_probe_are_kept_when_a_retry_is_the_probe() {
        let breaker = breaker::Config { failure_threshold: 1, ..breaker::Config::default() };
        let mut world = World::new(Config { max_requests_per_endpoint: 3, breaker, ..patient(0) }, 1);
        (0..5).for_each(|id| _ = world.arrive(id, 100, &[]));
        world.step(Input::Failed { request: RequestId(0) });
        world.now = Nanos::from_secs(2);
        world.lazy = true;
        (0..2).for_each(|id| _ = world.step(Input::Finished { request: RequestId(id) }));
        assert_eq!(world.unknown, [RequestId(3)], "half-open admits one");
        let again = SchedulingRequest { attempt: 1, ..SchedulingRequest::new(RequestId(9), 10) };
        assert!(placed(&ask(&mut world, again, &[])).is_some(), "the probe is this retry");
        assert_eq!(world.unknown, [RequestId(3), RequestId(4)], "no endpoint is worth waiting for");
    }

    #[test]
    fn so_many_are_tried_again_and_no_more() {
        let retries = budget::Config { share: Share::of(0.5), per_second: PerSecond::of(0.0) };
        let mut world = World::new(Config { retries, ..patient(0) }, 1);
        (0..10).for_each(|id| _ = world.arrive(id, 10, &[]));
        let mut again = (10..30).map(|id| {
            let request = SchedulingRequest { attempt: 1, ..SchedulingRequest::new(RequestId(id), 10) };
            ask(&mut world, request, &[])
        });
        assert_eq!(again.by_ref().take_while(|out| placed(out).is_some()).count(), 5);
        assert_eq!(again.next().and_then(|out| refused(&out)).map(|r| r.why), Some(Rejection::BudgetSpent));
        drop(again);
        let nowhere = SchedulingRequest {
            attempt: 1,
            excluded: [endpoint(0)].into(),
            ..SchedulingRequest::new(RequestId(40), 10)
        };
        let why = refused(&ask(&mut world, nowhere, &[])).map(|refused| refused.why);
        assert_eq!(why, Some(Rejection::NoEndpoint), "the reason does not depend on the budget");
    }

    #[test]
    fn a_hedge_goes_where_its_first_token_is_soonest_once_the_first_copy_has_waited_as_long() {
        let hedges = budget::Config { share: Share::of(0.5), per_second: PerSecond::of(0.0) };
        let mut world = World::new(Config { hedges, ..patient(20) }, 3);
        (0..6).for_each(|id| _ = world.arrive(id, 100, &[]));
        let mut next = 100;
        let mut hedge = |world: &mut World, waited_ms: u64, overlap: &[(EndpointId, Prediction)]| {
            next += 1;
            let (hedge, excluded) = (Some(Nanos::from_millis(waited_ms)), [endpoint(0)].into());
            let request =
                SchedulingRequest { hedge, excluded, ..SchedulingRequest::new(RequestId(next), 20_000) };
            let out = ask(world, request, overlap);
            placed(&out).ok_or_else(|| refused(&out).expect("dispatched or rejected"))
        };
        let early = hedge(&mut world, 100, &[]).expect_err("elsewhere takes 0.5 s of prefill or more");
        assert_eq!(early.why, Rejection::NoEndpoint);
        let wait = early.retry_after.as_secs_f64();
        assert!((0.5..0.8).contains(&wait), "wait {wait} s");
        let all =
            hedge(&mut world, 100, &[holds(0, 20_000)]).expect_err("the cached endpoint runs the first copy");
        assert_eq!(all.retry_after, early.retry_after);
        assert_eq!(
            hedge(&mut world, 100, &[holds(2, 19_900)]),
            Ok(endpoint(2)),
            "endpoint 2 holds the prefix"
        );
        assert_eq!(hedge(&mut world, 800, &[]), Ok(endpoint(1)), "the first copy has waited long enough");
        assert_eq!(hedge(&mut world, 800, &[holds(2, 19_900)]), Ok(endpoint(2)));
        let spent = hedge(&mut world, 2000, &[holds(2, 19_900)]).map_err(|refused| refused.why);
        assert_eq!(spent, Err(Rejection::BudgetSpent));
        let generous = budget::Config { share: Share::of(0.0), per_second: PerSecond::of(100.0) };
        let config = Config { hedges: generous, ..patient(9) };
        world.now = Nanos::from_secs(10);
        world.step(Input::Configured { config: Box::new(config) });
        let full = hedge(&mut world, 2000, &[holds(2, 19_900)]).expect_err("the pool is full");
        assert_eq!((full.why, full.retry_after), (Rejection::NoEndpoint, Nanos::ZERO));
        assert_eq!(world.scheduler.queued(), 0, "a hedge is not queued");
    }

    #[test]
    fn a_rejected_request_gets_the_expected_wait_of_the_queue() {
        let mut world = World::new(Config { queue_size: 19, ..patient(10) }, 1);
        let mut id = 0;
        // Two finish per second, for a minute, while 19 wait.
        for over in 0..120 {
            world.now += Nanos::from_millis(500);
            while world.scheduler.queued() < 19 {
                world.arrive(id, 10, &[]);
                id += 1;
            }
            world.step(Input::Finished { request: RequestId(over) });
        }
        world.arrive(id, 10, &[]);
        let out = world.arrive(id + 1, 10, &[]);
        let retry_after = refused(&out).expect("the queue is full").retry_after.as_secs_f64();
        assert!((9.0..11.5).contains(&retry_after), "{retry_after} s for twenty requests at two a second");
        let mut fresh = World::new(Config { queue_size: 0, ..patient(1) }, 1);
        fresh.arrive(0, 10, &[]);
        let refused = refused(&fresh.arrive(1, 10, &[])).expect("there is no queue");
        assert_eq!(refused.retry_after, RETRY_AFTER_UNKNOWN, "no rate is known");
    }
}
