//! Availability: which endpoints accept a request, by health, circuit breaker, back-off, in-flight limit and slow
//! start. All policies choose among the same rows.
//!
//! - An endpoint accepts requests if it is healthy and not draining, makes progress, its breaker admits requests, it is
//!   not in back-off, and it is not full. A recovered endpoint gets less than its share at first (slow start).
//! - While endpoints are only busy or full, requests wait for them, if there is a queue.
//! - While every endpoint's breaker is open, the one that closes first is tried: an attempt may succeed where a
//!   rejection certainly fails.

use super::in_flight::InFlightRequest;
use super::{Input, Output, Scheduler};
use crate::breaker::State;
use crate::cache_accuracy::Prediction;
use crate::columns::Accepts;
use crate::endpoint::{Endpoint, EndpointId};
use crate::request::{RequestId, SchedulingRequest};
use crate::time::Nanos;

/// Why a healthy, non-draining endpoint does not accept a request. Ordered from the first to the last to be tried as
/// the least bad endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Availability {
    /// It accepts requests.
    Free,
    /// It has reached its in-flight limit.
    Full,
    /// It answered that it is busy, and is in back-off.
    Busy,
    /// Its breaker is half-open, and a probe request is in flight.
    Probed,
    /// Its breaker is open.
    Open,
    /// It has stopped making progress.
    Stalled,
}

/// Result of collecting the candidates for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// The scheduler's rows hold the candidates.
    Rows,
    /// None until an endpoint is less busy or less full.
    Later,
    /// No endpoint.
    NoEndpoint,
}

/// What to do if no endpoint accepts a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IfNoneAvailable {
    /// Wait if an endpoint is only busy or full; otherwise try the least bad.
    Wait,
    /// Try the least bad.
    TryLeastBad,
    /// Reject the request.
    Refuse,
}

/// Summary over all endpoints, kept so that a decision need not examine each endpoint.
#[derive(Debug)]
pub(super) struct AvailabilitySummary {
    /// Whether any endpoint is not fully available: breaker not closed, in back-off, stalled or in slow start.
    any: bool,
    /// When the earliest of these conditions may end.
    review_at: Nanos,
}

// === impl AvailabilitySummary ===

impl Default for AvailabilitySummary {
    fn default() -> Self {
        Self { any: false, review_at: Nanos::MAX }
    }
}

impl AvailabilitySummary {
    /// When availability changes next without further input.
    pub(super) fn next_deadline(&self) -> Option<Nanos> {
        (self.review_at < Nanos::MAX).then_some(self.review_at)
    }
}

// === impl Scheduler ===

impl Scheduler {
    /// Reviews all endpoints if the time for it has come.
    pub(super) fn review_if_due(&mut self, now: Nanos, out: &mut Vec<Output>) {
        if self.availability.review_at <= now {
            self.review(now, out);
        }
    }

    /// Reviews all endpoints: breaker cool-downs, back-offs and slow starts that have ended.
    pub(super) fn review(&mut self, now: Nanos, out: &mut Vec<Output>) {
        self.queue_blocked = false;
        let (mut any, mut review_at) = (false, Nanos::MAX);
        let slow_start = self.config.breaker.slow_start;
        let mut changed = Vec::new();
        for endpoint in self.pool.endpoints_mut() {
            let was_back = endpoint.back_since.is_some();
            if endpoint.breaker.end_cooldown(now) {
                changed.push(endpoint.id.slot());
                out.push(Output::Breaker { endpoint: endpoint.id, state: endpoint.breaker.state() });
            }
            endpoint.back_since = endpoint.back_since.filter(|since| now < *since + slow_start);
            if was_back && endpoint.back_since.is_none() {
                changed.push(endpoint.id.slot());
            }
            let until = [
                endpoint.breaker.until(),
                endpoint.busy.until(now),
                endpoint.back_since.map(|since| since + slow_start),
            ];
            any |= until.iter().any(Option::is_some)
                || endpoint.breaker.state() != State::Closed
                || endpoint.stalled;
            review_at = until.into_iter().flatten().fold(review_at, Nanos::min);
        }
        changed.into_iter().for_each(|slot| self.pool.note_change(slot));
        self.availability = AvailabilitySummary { any, review_at };
    }

    /// Sets an endpoint's health.
    pub(super) fn set_health(&mut self, now: Nanos, endpoint: EndpointId, healthy: bool) {
        let Some(endpoint) = self.pool.get_mut(endpoint) else { return };
        if healthy && !endpoint.healthy && endpoint.was_healthy {
            endpoint.back_since = Some(now);
        }
        endpoint.healthy = healthy;
        endpoint.was_healthy |= healthy;
    }

    /// Sets whether an endpoint has stopped making progress.
    pub(super) fn stall(&mut self, now: Nanos, endpoint: EndpointId, stalled: bool) {
        let Some(endpoint) = self.pool.get_mut(endpoint) else { return };
        if endpoint.stalled && !stalled {
            endpoint.back_since = Some(now);
        }
        endpoint.stalled = stalled;
    }

    /// Counts an error that was the endpoint's own.
    pub(super) fn count_failure(&mut self, now: Nanos, endpoint: EndpointId, out: &mut Vec<Output>) {
        let Some(endpoint) = self.pool.get_mut(endpoint) else { return };
        let era = endpoint.breaker.era();
        if endpoint.breaker.failed(now, era, &self.config.breaker, &mut self.rng) {
            out.push(Output::Breaker { endpoint: endpoint.id, state: endpoint.breaker.state() });
            self.review(now, out);
        }
    }

    /// Applies a request's outcome to its endpoint's breaker and back-off.
    pub(super) fn apply_outcome(&mut self, now: Nanos, input: &Input, out: &mut Vec<Output>) {
        let (Input::Failed { request } | Input::Busy { request, .. } | Input::Succeeded { request }) = input
        else {
            return;
        };
        let Some(&InFlightRequest { endpoint, era, .. }) = self.flights.get(*request) else { return };
        let Some(endpoint) = self.pool.get_mut(endpoint) else { return };
        let changed = match *input {
            Input::Failed { .. } => endpoint.breaker.failed(now, era, &self.config.breaker, &mut self.rng),
            Input::Busy { retry_after, .. } => {
                endpoint.busy.back_off(now, retry_after, &mut self.rng);
                false
            }
            _ => {
                endpoint.busy.answered();
                let closed = endpoint.breaker.succeeded(now, era);
                endpoint.back_since = if closed { Some(now) } else { endpoint.back_since };
                closed
            }
        };
        if changed {
            out.push(Output::Breaker { endpoint: endpoint.id, state: endpoint.breaker.state() });
        }
        if changed || !matches!(input, Input::Succeeded { .. }) {
            self.review(now, out);
        }
    }

    /// The answer to a request placed in breaker era `era` has begun, which may close its endpoint's breaker.
    pub(super) fn begun(&mut self, now: Nanos, endpoint: EndpointId, era: u32, out: &mut Vec<Output>) {
        let Some(endpoint) = self.pool.get_mut(endpoint) else { return };
        if endpoint.breaker.begun(now, era, &self.config.breaker) {
            endpoint.back_since = Some(now);
            out.push(Output::Breaker { endpoint: endpoint.id, state: endpoint.breaker.state() });
            self.review(now, out);
        }
    }

    /// Registers a placement with its endpoint's breaker, which may be waiting for a probe. Returns the breaker era,
    /// which distinguishes this request from those placed before the breaker opened.
    pub(super) fn register_with_breaker(&mut self, endpoint: EndpointId, request: RequestId) -> u32 {
        let Some(endpoint) = self.pool.get_mut(endpoint) else { return 0 };
        endpoint.breaker.placed(request);
        endpoint.breaker.era()
    }

    /// Whether any endpoint may be unavailable.
    pub(super) fn may_be_unavailable(&self) -> bool {
        self.availability.any || self.config.max_requests_per_endpoint > 0
    }

    /// Fills the rows with the endpoints that the policy picks among, or with the least bad one.
    pub(super) fn fill_candidates(
        &mut self,
        now: Nanos,
        request: &SchedulingRequest,
        overlap: &[(EndpointId, Prediction)],
        or: IfNoneAvailable,
    ) -> Choice {
        if self.fill_shortlist(now, request, overlap) {
            return Choice::Rows;
        }
        self.fill_rows(now, request, overlap, or)
    }

    /// Fills the rows with all endpoints that accept the request, or with the least bad one.
    pub(super) fn fill_rows(
        &mut self,
        now: Nanos,
        request: &SchedulingRequest,
        overlap: &[(EndpointId, Prediction)],
        or: IfNoneAvailable,
    ) -> Choice {
        let nothing = (EndpointId::new(0, 0), Prediction::default());
        for &(endpoint, prediction) in overlap {
            if endpoint.slot() >= self.overlap_by_slot.len() {
                self.overlap_by_slot.resize(endpoint.slot() + 1, nothing);
            }
            self.overlap_by_slot[endpoint.slot()] = (endpoint, prediction.within(request.prompt_tokens));
        }
        for &endpoint in &*request.excluded {
            if endpoint.slot() >= self.excluded_by_slot.len() {
                self.excluded_by_slot.resize(endpoint.slot() + 1, None);
            }
            self.excluded_by_slot[endpoint.slot()] = Some(endpoint);
        }
        let excluded = |id: EndpointId| self.excluded_by_slot.get(id.slot()) == Some(&Some(id));
        let predicted = |id: EndpointId| match self.overlap_by_slot.get(id.slot()) {
            Some(&(holder, prediction)) if holder == id => prediction,
            _ => Prediction::default(),
        };
        let row = |endpoint: &Endpoint| self.learning.row(now, endpoint, predicted(endpoint.id));
        let (gated, in_flight_max) = (self.may_be_unavailable(), self.config.max_requests_per_endpoint);
        let candidates = || self.pool.eligible().filter(|endpoint| !excluded(endpoint.id));
        let serving = || candidates().filter(|endpoint| endpoint.part.could_serve_alone());
        self.rows.clear();
        let mut fit = Choice::Rows;
        if gated {
            let free =
                |endpoint: &&Endpoint| availability_of(endpoint, now, in_flight_max) == Availability::Free;
            self.rows.extend(candidates().filter(free).map(row));
        } else {
            self.rows.extend(candidates().map(row));
        }
        self.splits.keep_parts(request, &mut self.rows);
        if self.rows.is_empty() {
            let worth_waiting = |endpoint: &Endpoint| {
                matches!(
                    availability_of(endpoint, now, in_flight_max),
                    Availability::Full | Availability::Busy
                )
            };
            // Only a retry may exceed an endpoint's in-flight limit.
            let least_bad = serving()
                .filter(|endpoint| request.attempt > 0 || !is_full(endpoint, in_flight_max))
                .min_by_key(|endpoint| fallback_order(endpoint, now, in_flight_max));
            fit = match least_bad {
                _ if or == IfNoneAvailable::Refuse => Choice::NoEndpoint,
                _ if or == IfNoneAvailable::Wait && candidates().any(worth_waiting) => Choice::Later,
                Some(endpoint) => {
                    self.rows.push(row(endpoint));
                    Choice::Rows
                }
                None if serving().next().is_some() => Choice::Later,
                None => Choice::NoEndpoint,
            };
        } else if gated {
            let back_since = |id| self.pool.get(id).and_then(|endpoint| endpoint.back_since);
            let settled = self.rows.iter().filter(|row| back_since(row.endpoint).is_none());
            let (count, requests) = settled.fold((0u64, 0u64), |(count, requests), row| {
                (count + 1, requests + u64::from(row.load.in_flight.requests))
            });
            if count < self.rows.len() as u64 {
                self.apply_slow_start(now, request, count, requests);
            }
        }
        for &(endpoint, _) in overlap {
            self.overlap_by_slot[endpoint.slot()] = nothing;
        }
        for &endpoint in &*request.excluded {
            self.excluded_by_slot[endpoint.slot()] = None;
        }
        fit
    }

    /// Slow start: removes rows of recently recovered endpoints that have their share. The share grows from nothing to
    /// the mean of what the other endpoints have in flight, of which there are `count` with `requests`, and is at least
    /// one request. It does not apply if there are no others, and not if the others cannot serve the request.
    pub(super) fn apply_slow_start(
        &mut self,
        now: Nanos,
        request: &SchedulingRequest,
        count: u64,
        requests: u64,
    ) {
        if count == 0 {
            return;
        }
        let mean = requests as f64 / count as f64;
        let slow_start_s = self.config.breaker.slow_start.as_secs_f64();
        let before = if self.splits.any { self.rows.clone() } else { Vec::new() };
        let (pool, rows) = (&self.pool, &mut self.rows);
        rows.retain(|row| {
            let Some(since) = pool.get(row.endpoint).and_then(|endpoint| endpoint.back_since) else {
                return true;
            };
            let share = (now - since).as_secs_f64() / slow_start_s;
            f64::from(row.load.in_flight.requests) < (share * mean).max(1.0)
        });
        self.splits.keep_parts(request, rows);
        if rows.is_empty() {
            *rows = before;
        }
    }

    /// Whether an endpoint accepts a queued request in addition to those already dequeued, or waiting has become
    /// pointless.
    pub(super) fn can_dispatch(&self, now: Nanos, request: &SchedulingRequest) -> bool {
        if !self.may_be_unavailable() {
            return true;
        }
        let in_flight_max = self.config.max_requests_per_endpoint;
        let candidates = || self.pool.eligible().filter(|endpoint| !request.excluded.contains(&endpoint.id));
        let availability = || candidates().map(|endpoint| availability_of(endpoint, now, in_flight_max));
        let serving = || candidates().filter(|endpoint| endpoint.part.could_serve_alone());
        let free = || {
            candidates()
                .filter(|endpoint| availability_of(endpoint, now, in_flight_max) == Availability::Free)
        };
        let has_prefill = |endpoint: &Endpoint| {
            let mut others = free().filter(|other| other.id != endpoint.id);
            request.leg.is_some() && others.any(|other| other.part.can_prefill_for(&endpoint.part))
        };
        let mut room = 0usize;
        for endpoint in free().filter(|free| free.part.could_serve_alone() || has_prefill(free)) {
            room = room.saturating_add(room_at(endpoint, in_flight_max));
            if room > self.dequeued.len() {
                return true;
            }
        }
        room == 0
            && availability().all(|gate| !matches!(gate, Availability::Full | Availability::Busy))
            && (serving().any(|endpoint| !is_full(endpoint, in_flight_max)) || serving().next().is_none())
    }
}

/// How many requests an available endpoint accepts.
fn room_at(endpoint: &Endpoint, in_flight_max: u32) -> usize {
    match (endpoint.breaker.state(), in_flight_max) {
        (State::HalfOpen, _) => 1,
        (_, 0) => usize::MAX,
        (_, max) => max.saturating_sub(endpoint.in_flight().requests) as usize,
    }
}

fn is_full(endpoint: &Endpoint, in_flight_max: u32) -> bool {
    in_flight_max > 0 && endpoint.in_flight().requests >= in_flight_max
}

/// How an endpoint takes requests until its state changes.
pub(super) fn accepts(endpoint: &Endpoint, now: Nanos, in_flight_max: u32) -> Accepts {
    if !endpoint.healthy || endpoint.draining {
        return Accepts::None;
    }
    match availability_of(endpoint, now, in_flight_max) {
        // Some of those with requests that move are decoding, which the columns do not tell.
        Availability::Free if endpoint.back_since.is_none() && endpoint.in_flight().moving == 0 => {
            Accepts::All
        }
        Availability::Free | Availability::Busy => Accepts::Some,
        Availability::Full | Availability::Probed | Availability::Open | Availability::Stalled => {
            Accepts::None
        }
    }
}

pub(super) fn availability_of(endpoint: &Endpoint, now: Nanos, in_flight_max: u32) -> Availability {
    if endpoint.stalled {
        Availability::Stalled
    } else if endpoint.breaker.state() == State::Open {
        Availability::Open
    } else if !endpoint.breaker.admits() {
        Availability::Probed
    } else if endpoint.busy.until(now).is_some() {
        Availability::Busy
    } else if is_full(endpoint, in_flight_max) {
        Availability::Full
    } else {
        Availability::Free
    }
}

/// Order in which unavailable endpoints are tried: by what blocks them, how soon that ends, how often they failed, and
/// how much they have in flight.
fn fallback_order(endpoint: &Endpoint, now: Nanos, in_flight_max: u32) -> (Availability, Nanos, u32, u32) {
    let gate = availability_of(endpoint, now, in_flight_max);
    let until = match gate {
        Availability::Busy => endpoint.busy.until(now),
        Availability::Open => endpoint.breaker.until(),
        Availability::Free | Availability::Full | Availability::Probed | Availability::Stalled => None,
    };
    let requests = endpoint.in_flight().requests;
    (gate, until.unwrap_or_default(), endpoint.breaker.failures(), requests)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::breaker;
    use crate::decision::Rejection;
    use crate::scheduler::Config;
    use crate::scheduler::tests::{World, config, endpoint, placed};

    const SECOND: Nanos = Nanos::from_secs(1);

    fn breakers(failure_threshold: u32, slow_start: Nanos) -> breaker::Config {
        breaker::Config { failure_threshold, slow_start, ..breaker::Config::default() }
    }

    fn world(endpoints: usize, config: Config) -> World {
        let mut world = World::new(config, endpoints);
        world.now = SECOND;
        world
    }

    fn usual() -> Config {
        Config {
            queue_timeout: Nanos::from_secs(60),
            breaker: breakers(1, Nanos::ZERO),
            ..config("least_load")
        }
    }

    /// Sends a request with excluded endpoints.
    fn arrive(world: &mut World, id: u64, attempt: u32, excluded: &[u16]) -> Vec<Output> {
        let excluded = excluded.iter().map(|&slot| endpoint(slot)).collect();
        let request = SchedulingRequest { attempt, excluded, ..SchedulingRequest::new(RequestId(id), 10) };
        world.step(Input::Arrived { request, overlap: Vec::new(), block_tokens: 16 })
    }

    fn fail(world: &mut World, id: u64) -> Vec<Output> {
        let out = world.step(Input::Failed { request: RequestId(id) });
        world.step(Input::Finished { request: RequestId(id) });
        out
    }

    fn succeed(world: &mut World, id: u64) -> Vec<Output> {
        let out = world.step(Input::Succeeded { request: RequestId(id) });
        world.step(Input::Finished { request: RequestId(id) });
        out
    }

    fn is_busy(world: &mut World, id: u64, retry_after: Option<Nanos>) {
        assert_eq!(world.step(Input::Busy { request: RequestId(id), retry_after }), []);
        world.step(Input::Finished { request: RequestId(id) });
    }

    fn state(slot: u16, state: State) -> Output {
        Output::Breaker { endpoint: endpoint(slot), state }
    }

    fn refused(out: &[Output]) -> Option<Rejection> {
        out.iter().find_map(|output| match output {
            Output::Reject { refused, .. } => Some(refused.why),
            _ => None,
        })
    }

    #[test]
    fn a_stalled_endpoint_gets_no_requests_until_it_recovers_or_all_are_stalled() {
        let mut world = world(2, usual());
        let stall = |world: &mut World, slot, stalled| {
            world.step(Input::Stalled { endpoint: endpoint(slot), stalled })
        };
        assert_eq!(stall(&mut world, 0, true), []);
        for id in 0..3 {
            assert_eq!(
                placed(&arrive(&mut world, id, 0, &[])),
                Some(endpoint(1)),
                "the idle endpoint is stalled"
            );
        }
        stall(&mut world, 1, true);
        assert_eq!(
            placed(&arrive(&mut world, 3, 0, &[])),
            Some(endpoint(0)),
            "the least bad endpoint is tried"
        );
        stall(&mut world, 0, false);
        assert_eq!(placed(&arrive(&mut world, 4, 0, &[])), Some(endpoint(0)));
    }

    #[test]
    fn an_endpoint_that_is_blamed_for_its_errors_opens_as_one_that_fails() {
        let mut world = world(2, Config { breaker: breakers(2, Nanos::ZERO), ..usual() });
        let blame = |world: &mut World| world.step(Input::Blamed { endpoint: endpoint(0) });
        assert_eq!(blame(&mut world), []);
        assert_eq!(blame(&mut world), [state(0, State::Open)]);
        assert_eq!(placed(&arrive(&mut world, 0, 0, &[])), Some(endpoint(1)));
    }

    #[test]
    fn what_an_endpoint_is_expected_to_do_follows_from_what_is_in_flight_there() {
        let mut world = world(1, usual());
        let expected = |world: &World| world.scheduler.expected(endpoint(0));
        assert_eq!(expected(&world), None, "nothing");
        let request =
            SchedulingRequest { whole_answer: true, ..SchedulingRequest::new(RequestId(0), 100_000) };
        world.step(Input::Arrived { request, overlap: Vec::new(), block_tokens: 16 });
        let long = expected(&world).expect("a prompt is in flight");
        assert!(long.token_s > 5.0 && long.step_s < 1.0, "{long:?}");
        assert!(!long.is_seen && !long.is_learned, "{long:?}");
        arrive(&mut world, 1, 0, &[]);
        assert!(expected(&world).is_some_and(|expected| expected.is_seen));
        world.step(Input::Begun { request: RequestId(0) });
        assert!(
            expected(&world).is_some_and(|expected| expected.token_s < 0.1),
            "the long prompt is prefilled"
        );
    }

    #[test]
    fn an_endpoint_that_fails_gets_none_then_one_and_all_when_that_is_answered() {
        let mut world = world(2, usual());
        assert_eq!(placed(&arrive(&mut world, 0, 0, &[1])), Some(endpoint(0)));
        assert_eq!(fail(&mut world, 0), [state(0, State::Open)]);
        for id in 1..4 {
            assert_eq!(
                placed(&arrive(&mut world, id, 0, &[])),
                Some(endpoint(1)),
                "endpoint 1 is idle and its breaker still closed"
            );
        }
        world.now += Nanos::from_secs(2);
        let out = arrive(&mut world, 4, 0, &[]);
        assert_eq!((out[0], placed(&out)), (state(0, State::HalfOpen), Some(endpoint(0))));
        assert_eq!(placed(&arrive(&mut world, 5, 0, &[])), Some(endpoint(1)), "half-open admits one request");
        world.step(Input::Finished { request: RequestId(4) });
        assert_eq!(placed(&arrive(&mut world, 6, 0, &[])), Some(endpoint(0)), "the probe has no outcome yet");
        assert_eq!(succeed(&mut world, 6), [state(0, State::Closed)]);
        for id in 7..10 {
            assert_eq!(placed(&arrive(&mut world, id, 0, &[])), Some(endpoint(0)));
        }
    }

    #[test]
    fn an_endpoint_is_back_when_the_one_answer_begins_and_gone_again_when_that_breaks() {
        for whole in [false, true] {
            let mut world = world(1, usual());
            arrive(&mut world, 0, 0, &[]);
            fail(&mut world, 0);
            world.now += Nanos::from_secs(2);
            let request = RequestId(1);
            assert!(placed(&arrive(&mut world, 1, 0, &[])).is_some());
            let begins = if whole { Input::Begun { request } } else { Input::FirstToken { request } };
            assert_eq!(world.step(begins), [state(0, State::Closed)]);
            assert!(placed(&arrive(&mut world, 2, 0, &[])).is_some());
            assert_eq!(fail(&mut world, 1), [state(0, State::Open)]);
        }
    }

    #[test]
    fn the_one_that_is_let_through_and_fails_makes_the_cool_down_longer() {
        let mut world = world(2, usual());
        arrive(&mut world, 0, 0, &[1]);
        fail(&mut world, 0);
        world.now += Nanos::from_secs(2);
        assert_eq!(placed(&arrive(&mut world, 1, 0, &[1])), Some(endpoint(0)));
        assert_eq!(fail(&mut world, 1), [state(0, State::Open)]);
        world.now += Nanos::from_millis(1500);
        assert_eq!(
            placed(&arrive(&mut world, 2, 0, &[])),
            Some(endpoint(1)),
            "two seconds, at most a fifth less"
        );
    }

    /// Invariant: Circuit breakers never fail a request by themselves; a half-open one admits one request; a busy
    /// endpoint gets no requests for the time it asked for.
    ///
    /// Also held by `an_endpoint_that_fails_gets_none_then_one_and_all_when_that_is_answered`,
    /// `a_busy_endpoint_is_left_alone_as_long_as_it_says_and_nothing_breaks`.
    #[test]
    fn while_all_breakers_are_open_the_one_that_closes_first_is_tried() {
        let mut world = world(2, usual());
        for slot in [1, 0] {
            arrive(&mut world, u64::from(slot), 0, &[1 - slot]);
            fail(&mut world, slot.into());
            world.now += Nanos::from_millis(500);
        }
        for (id, attempt) in [(2, 0), (3, 1)] {
            let out = arrive(&mut world, id, attempt, &[]);
            assert_eq!(placed(&out), Some(endpoint(1)), "attempt {attempt}");
        }
        assert_eq!(succeed(&mut world, 2), [state(1, State::Closed)], "placed after the breaker opened");
        assert_eq!(fail(&mut world, 3), [state(1, State::Open)], "this one too");
    }

    #[test]
    fn a_busy_endpoint_is_left_alone_as_long_as_it_says_and_nothing_breaks() {
        let mut world = world(2, usual());
        arrive(&mut world, 0, 0, &[1]);
        is_busy(&mut world, 0, Some(SECOND));
        assert_eq!(placed(&arrive(&mut world, 1, 0, &[])), Some(endpoint(1)));
        assert_eq!(placed(&arrive(&mut world, 2, 0, &[])), Some(endpoint(1)));
        world.now += SECOND;
        assert_eq!(placed(&arrive(&mut world, 3, 0, &[])), Some(endpoint(0)));
        let breaker = world.scheduler.pool().get(endpoint(0)).expect("here").breaker;
        assert_eq!((breaker.state(), breaker.failures()), (State::Closed, 0));
    }

    #[test]
    fn while_all_are_busy_requests_wait_until_one_is_not() {
        for (attempt, queue_size, waits) in [(0, 2, true), (1, 2, true), (0, 0, false), (1, 0, false)] {
            let mut world = world(2, Config { queue_size, ..usual() });
            for slot in 0..2 {
                arrive(&mut world, slot, 0, &[1 - slot as u16]);
                is_busy(&mut world, slot, Some(Nanos(SECOND.0 * (slot + 1))));
            }
            let out = arrive(&mut world, 2, attempt, &[]);
            if !waits {
                assert_eq!(
                    placed(&out),
                    Some(endpoint(0)),
                    "no queue: the endpoint whose back-off ends first"
                );
                continue;
            }
            assert_eq!((out, world.scheduler.queued()), (vec![], 1));
            world.now = world.scheduler.next_deadline().expect("a back-off ends");
            assert_eq!(placed(&world.step(Input::Tick)), Some(endpoint(0)));
            assert!(world.now < SECOND + SECOND + SECOND);
        }
    }

    #[test]
    fn a_full_endpoint_takes_no_more_and_requests_wait_for_it() {
        let mut world = world(2, Config { max_requests_per_endpoint: 1, queue_size: 1, ..usual() });
        for id in 0..2 {
            assert!(placed(&arrive(&mut world, id, 0, &[])).is_some());
        }
        assert_eq!(arrive(&mut world, 2, 0, &[]), []);
        assert_eq!(refused(&arrive(&mut world, 3, 0, &[])), Some(Rejection::QueueFull));
        assert!(placed(&arrive(&mut world, 4, 1, &[])).is_some(), "a retry may exceed the limit");
        assert_eq!(placed(&world.step(Input::Finished { request: RequestId(1) })), Some(endpoint(1)));
        assert_eq!(world.scheduler.queued(), 0);
    }

    #[test]
    fn a_request_that_waits_for_one_endpoint_does_not_block_others() {
        let mut world = world(2, Config { max_requests_per_endpoint: 2, ..usual() });
        for id in 0..2 {
            assert_eq!(placed(&arrive(&mut world, id, 0, &[1])), Some(endpoint(0)));
        }
        assert_eq!(arrive(&mut world, 2, 0, &[1]), [], "its only endpoint is full");
        assert_eq!(placed(&arrive(&mut world, 3, 0, &[])), Some(endpoint(1)));
        assert_eq!(world.scheduler.queued(), 1);
        assert_eq!(placed(&world.step(Input::Finished { request: RequestId(0) })), Some(endpoint(0)));
    }

    #[test]
    fn queued_requests_are_rejected_when_the_fleet_leaves() {
        let mut world = world(1, Config { max_requests_per_endpoint: 1, ..usual() });
        arrive(&mut world, 0, 0, &[]);
        assert_eq!(arrive(&mut world, 1, 0, &[]), []);
        let out = world.step(Input::Health { endpoint: endpoint(0), healthy: false });
        assert_eq!((refused(&out), world.scheduler.queued()), (Some(Rejection::NoEndpoint), 0));
    }

    #[test]
    fn who_comes_back_has_a_growing_share_of_what_the_others_have() {
        let slow = Config { breaker: breakers(1, Nanos::from_secs(10)), ..usual() };
        for by_health in [true, false] {
            let mut world = world(3, slow.clone());
            for id in 0..40 {
                arrive(&mut world, id, 0, &[0]);
            }
            if by_health {
                for healthy in [false, true] {
                    world.step(Input::Health { endpoint: endpoint(0), healthy });
                }
            } else {
                arrive(&mut world, 40, 0, &[1, 2]);
                fail(&mut world, 40);
                world.now += Nanos::from_secs(2);
                arrive(&mut world, 41, 0, &[1, 2]);
                succeed(&mut world, 41);
            }
            let mut id = 100;
            let back_at = world.now;
            for (millis, share) in [(0, 1..=1), (5000, 12..=13), (9000, 22..=24)] {
                world.now = back_at + Nanos::from_millis(millis);
                for _ in 0..12 {
                    assert!(placed(&arrive(&mut world, id, 0, &[])).is_some());
                    id += 1;
                }
                let requests = world.ledger(0).requests;
                assert!(share.contains(&requests), "{requests} after {millis} ms, health {by_health}");
            }
            assert!(
                placed(&arrive(&mut world, id, 0, &[1, 2])).is_some(),
                "no other endpoint is left for it"
            );
            world.now = back_at + Nanos::from_secs(11);
            assert_eq!(
                placed(&arrive(&mut world, id + 1, 0, &[])),
                Some(endpoint(0)),
                "it has the fewest in flight"
            );
        }
    }

    #[test]
    fn a_fleet_that_is_found_fit_for_the_first_time_does_not_come_back() {
        let mut world = World::new(Config { breaker: breakers(1, Nanos::from_secs(10)), ..usual() }, 0);
        for slot in 0..2 {
            let (name, endpoint) = (format!("e{slot}").into(), endpoint(slot));
            world.step(Input::Joined { endpoint, name, healthy: false, draining: false });
            world.step(Input::Health { endpoint, healthy: true });
        }
        assert!(world.scheduler.pool().endpoints().all(|endpoint| endpoint.back_since.is_none()));
    }
}
