//! The attempts of one request: what each came to, who is told, and whether there is another.
//!
//! An attempt that came to nothing is repeated only while no byte of an answer has gone to the client. The engine that
//! broke it has failed; the one that says 429 or 503 is busy, which is no fault. Either is told to the scheduler, and
//! another is tried. What the last one said is kept: it is the client's if nobody does better.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use kvlane_core::breaker::State;
use kvlane_core::decision::{Refused, Rejection};
use kvlane_core::endpoint::{Endpoint, EndpointId};
use kvlane_core::poison_prompts::Standing;
use kvlane_core::retry;
use kvlane_core::rng::Rng;
use kvlane_core::scheduler::Input;
use kvlane_core::time::Nanos;
use kvlane_fleet::metrics::{FailureKind, Hedged};
use kvlane_fleet::worker::WorkerId;
use kvlane_http::connections::{Answer, Connections, UpstreamError};
use kvlane_wire::failure::{Fault, fault, first_error};
use kvlane_wire::server_timing::Stage;
use kvlane_wire::sse::SseScanner;
use tokio::sync::SemaphorePermit;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use crate::attempt_error::AttemptError;
use crate::body::Body;
use crate::deadlines::Deadlines;
use crate::error::ApiError;
use crate::faults::Retry;
use crate::lease::Lease;
use crate::proxy::Proxy;
use crate::relay::is_event_stream;
use crate::routed::Routed;

/// When to come again, if an engine that is busy does not say.
const RETRY_AFTER_S: u64 = 1;

/// How often a request at an engine that stands still looks whether another one takes requests.
const STALLED_LOOK_EVERY: Duration = Duration::from_secs(1);
/// What is held of a stream without content; beyond that it is passed on as it comes.
const HELD_BYTES_MAX: usize = 64 << 10;
/// For how long a request that may kill its engine waits for others like it, and for what becomes of the engines before. Then
/// it is tried none the less.
const TURN_WITHIN: Duration = Duration::from_secs(10);
/// How often it looks whether that is known.
const TURN_LOOK_EVERY: Duration = Duration::from_millis(250);
/// Engines that say of a request that they failed, and not whose fault it is, before that is its answer.
const FAULTS_MAX: usize = 2;

/// What an attempt came to.
pub(super) enum Outcome {
    /// An answer for the client, good or bad.
    Answered(Answer),
    /// The engine says that it has too much to do.
    Busy(Answer),
    /// The engine, or what stands before it, says that it cannot answer.
    Unable(Answer),
    /// The engine says 500, or that it failed before any content of a stream: by its own fault, or nobody knows whose.
    Faulty(Answer, Fault),
    /// No answer.
    Broken(AttemptError),
    /// None before the request's own time was over.
    Late(Duration),
}

/// The attempts of one request so far.
pub(super) struct Attempts<'a> {
    proxy: &'a Arc<Proxy>,
    routed: &'a Routed,
    deadlines: Deadlines,
    retry: Retry,
    attempts: retry::Attempts,
    /// Who is not to be tried.
    excluded: Arc<[EndpointId]>,
    /// Who has failed, once for each time.
    failed: Vec<WorkerId>,
    /// Who has said that they failed, and not whose fault it was: if another one answers, it was theirs.
    faulted: Vec<EndpointId>,
    /// Whose connection broke with the last one: its engine may have died.
    broke: Option<Lease>,
    /// What the engines that died under this prompt make of it.
    standing: Standing,
    /// Held while no other request may be tried that may kill its engine.
    turn: Option<SemaphorePermit<'a>>,
    /// What the client gets if no further attempt does better.
    said: Option<Result<Response<Body>, ApiError>>,
}

/// For how long an answer is waited for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Until it begins.
    within: Option<Duration>,
    /// The request's whole time,
    total: Duration,
    /// and when that is over.
    deadline: Instant,
}

// === impl Outcome ===

impl Outcome {
    /// Whether the client gets it.
    pub(super) fn is_answer(&self) -> bool {
        matches!(self, Self::Answered(_))
    }

    pub(super) fn of(answered: Result<(Answer, Option<Fault>), AttemptError>) -> Self {
        match answered {
            Ok((answer, Some(fault @ (Fault::Engine | Fault::Unknown)))) => Self::Faulty(answer, fault),
            Ok((answer, _)) => match answer.status {
                StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Self::Busy(answer),
                StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT => Self::Unable(answer),
                _ => Self::Answered(answer),
            },
            Err(error) => Self::Broken(error),
        }
    }

    /// Whether an engine that ends like this has died, or may have, and which of the two. One that stands still may go on.
    fn death(&self) -> Option<bool> {
        match self {
            Self::Faulty(_, Fault::Engine) => Some(true),
            Self::Broken(AttemptError::Unfit) => Some(false),
            _ => None,
        }
    }
}

// === impl Attempts ===

impl<'a> Attempts<'a> {
    pub(super) fn new(
        proxy: &'a Arc<Proxy>,
        routed: &'a Routed,
        excluded: Arc<[EndpointId]>,
        deadlines: Deadlines,
    ) -> Self {
        let retry = proxy.settings().retry.clone();
        Self {
            proxy,
            routed,
            deadlines,
            retry,
            attempts: retry::Attempts::new(0),
            excluded,
            failed: Vec::new(),
            faulted: Vec::new(),
            broke: None,
            standing: Standing::Clear,
            turn: None,
            said: None,
        }
    }

    /// The attempts to have an answer continued: none of them is a first one.
    pub(super) fn again(mut self) -> Self {
        self.attempts = retry::Attempts::new(1);
        self
    }

    /// Waits for as long as it has to be tried alone and another one is, or it is not known whether engines died under it. Says
    /// if it is not to be placed, since it kills them.
    pub(super) async fn take_turn(&mut self) -> Result<(), ApiError> {
        self.standing = self.proxy.standing(self.routed.prompt);
        if matches!(self.standing, Standing::Alone { .. }) {
            Box::pin(self.wait_for_turn()).await;
        } else {
            self.turn = None;
        }
        match self.standing {
            Standing::Barred(left) => Err(ApiError::KillsEngines { left }),
            Standing::Clear | Standing::Suspect | Standing::Alone { .. } => Ok(()),
        }
    }

    async fn wait_for_turn(&mut self) {
        let until = self.routed.deadline.min(Instant::now() + TURN_WITHIN);
        if self.turn.is_none() {
            self.turn = timeout_at(until, self.proxy.trial()).await.ok().flatten();
        }
        loop {
            self.standing = self.proxy.standing(self.routed.prompt);
            let unknown = matches!(self.standing, Standing::Alone { certain: false });
            if !unknown || Instant::now() >= until {
                return;
            }
            sleep(TURN_LOOK_EVERY).await;
        }
    }

    /// A place for the next one.
    pub(super) async fn place(&mut self) -> Result<Lease, Refused> {
        if self.attempts.made() > 0 {
            self.routed.timeline.enter(Stage::Place);
        }
        let lease = self.proxy.place(self.routed, self.attempts.made(), &self.excluded).await?;
        if self.standing != Standing::Clear {
            lease.suspect();
        }
        if self.attempts.made() > 0 {
            self.routed.served.pool.metrics.retries.inc();
        }
        self.attempts.placed();
        Ok(lease)
    }

    /// Waits for an answer as [`Patience::answer`] does.
    pub(super) async fn answer(
        &mut self,
        lease: &Lease,
        sent: impl Future<Output = Result<Answer, UpstreamError>>,
    ) -> Outcome {
        self.patience().answer(lease, sent).await
    }

    /// For how long an answer is waited for.
    pub(super) fn patience(&self) -> Patience {
        let within = self.deadlines.first_byte(self.routed.facts.streams());
        Patience { within, total: self.deadlines.total, deadline: self.routed.deadline }
    }

    /// After how long a second copy is sent, if one may be.
    pub(super) fn hedge_delay(&self) -> Option<Duration> {
        let config = &self.proxy.settings().hedge;
        // What may kill an engine is not sent to two.
        let may = config.enabled
            && self.attempts.made() == 1
            && self.standing == Standing::Clear
            && self.routed.facts.streams();
        may.then(|| config.delay.or_else(|| self.routed.served.pool.first_tokens.late())).flatten()
    }

    /// A place for a second copy of what `first` is late with, or how long to wait before asking again, if it is too early.
    pub(super) async fn hedge(&mut self, first: &Lease) -> Result<Lease, Option<Duration>> {
        let endpoints = self.routed.served.pool.endpoints_of(&first.worker);
        let excluded = self.excluded.iter().copied().chain(endpoints).collect();
        let waited = self.proxy.fleet.clock.now() - first.placed;
        let placed = self.proxy.place_hedge(self.routed, waited, &excluded).await;
        placed.map_err(|refused| {
            let early = (refused.why == Rejection::NoEndpoint).then_some(refused.retry_after.0);
            early.filter(|&early| early > 0).map(Duration::from_nanos)
        })
    }

    /// There is to be no second copy.
    pub(super) fn is_not_hedged(&self) {
        self.proxy.fleet.metrics.faults.note_hedge(Hedged::refused);
    }

    /// One has answered well: those that failed with the same request did so by their own fault.
    pub(super) fn succeeded(&mut self) {
        let pool = &self.routed.served.pool;
        for endpoint in self.faulted.drain(..) {
            pool.step(Input::Blamed { endpoint });
        }
    }

    /// One has come to nothing: tells the scheduler why, and keeps what it said. `relay` makes an answer of an engine's.
    pub(super) fn failed(
        &mut self,
        lease: Lease,
        outcome: Outcome,
        relay: impl FnOnce(Answer, &Lease) -> Response<Body>,
    ) {
        let worker = Arc::clone(&lease.worker);
        self.attempts.failed(match &outcome {
            Outcome::Busy(_) => true,
            Outcome::Broken(error) => error.is_before_sending(),
            Outcome::Answered(_) | Outcome::Unable(_) | Outcome::Faulty(..) | Outcome::Late(_) => false,
        });
        match &outcome {
            Outcome::Busy(answer) => {
                lease.busy(retry_after(&answer.headers));
                self.exclude(&lease);
            }
            Outcome::Late(_) => {
                lease.trace_failure(FailureKind::timeout.name());
                self.proxy.fleet.metrics.note_failure(&worker.url, FailureKind::timeout);
            }
            // Its scheduler knows already. It is not excluded: should all others stand still too, it is as good as they are.
            Outcome::Broken(AttemptError::Stalled) => lease.stalled(),
            Outcome::Faulty(_, Fault::Client | Fault::Unknown) => {
                lease.faulted();
                self.faulted.push(lease.endpoint.id);
                self.exclude(&lease);
            }
            Outcome::Answered(_) | Outcome::Unable(_) | Outcome::Faulty(..) | Outcome::Broken(_) => {
                lease.failed(outcome.kind());
                if let Some(certain) = outcome.death() {
                    lease.died(certain);
                }
                self.failed.push(worker.id);
                let times = self.failed.iter().filter(|&&failed| failed == worker.id).count();
                if times >= self.retry.max_worker_retries as usize {
                    self.exclude(&lease);
                }
            }
        }
        let name = || worker.url.to_string();
        let broke = matches!(&outcome, Outcome::Broken(error) if error.is_broken_connection());
        let said = match outcome {
            Outcome::Answered(answer) | Outcome::Unable(answer) | Outcome::Faulty(answer, _) => {
                Ok(relay(answer, &lease))
            }
            Outcome::Busy(answer) => {
                let mut response = relay(answer, &lease);
                response.headers_mut().entry(header::RETRY_AFTER).or_insert(HeaderValue::from(RETRY_AFTER_S));
                Ok(response)
            }
            Outcome::Broken(error) => {
                Err(ApiError::Upstream { worker: name(), error, attempts: self.attempts.made() })
            }
            Outcome::Late(limit) => Err(ApiError::UpstreamTimeout { worker: name(), limit }),
        };
        let timeline = &self.routed.timeline;
        let (request_id, trace_id) = (timeline.request_id(), timeline.trace_id());
        match &said {
            Ok(response) => {
                tracing::debug!(request_id, trace_id, worker = %worker.url, status = %response.status(), "turned down")
            }
            Err(error) => tracing::debug!(request_id, trace_id, %error, "an attempt failed"),
        }
        self.said = Some(said);
        self.broke = broke.then_some(lease);
    }

    /// Whether there is another attempt; waits until it is due.
    pub(super) async fn go_on(&mut self, upstreams: &Connections) -> bool {
        if let Some(lease) = self.broke.take() {
            let worker = Arc::clone(&lease.worker);
            // Its connection broke: by itself, or because its process ended.
            if upstreams.refuses(&worker.upstream).await {
                lease.died(true);
            }
        }
        if let Standing::Barred(left) = self.proxy.standing(self.routed.prompt) {
            let request_id = self.routed.timeline.request_id();
            tracing::warn!(
                request_id,
                for_s = left.as_secs_f64(),
                "engines died with this prompt in flight; it is not placed again"
            );
            self.said = Some(Err(ApiError::KillsEngines { left }));
            return false;
        }
        if self.faulted.len() >= FAULTS_MAX {
            return false;
        }
        // Its jitter parts it from others that failed at the same time.
        let seed = self.routed.received.0 ^ u64::from(self.attempts.made());
        let pause = self.attempts.pause(&self.retry.backoff(), || Rng::new(seed).unit());
        let due = Instant::now() + Duration::from_nanos(pause.0);
        let may_retry = self.attempts.may_retry(self.retry.max_total_retries);
        if !may_retry || due >= self.routed.deadline || !self.somebody_is_left() {
            return false;
        }
        if pause > Nanos::ZERO {
            sleep_until(due).await;
        }
        match self.take_turn().await {
            Ok(()) => true,
            Err(barred) => {
                self.said = Some(Err(barred));
                false
            }
        }
    }

    /// What the client gets in the end, if anybody has said anything.
    pub(super) fn said(self) -> Option<Result<Response<Body>, ApiError>> {
        self.said
    }

    /// What it did is the worker's doing, so its other ranks are no better.
    fn exclude(&mut self, lease: &Lease) {
        let endpoints = self.routed.served.pool.endpoints_of(&lease.worker);
        self.excluded = self.excluded.iter().copied().chain(endpoints).collect();
    }

    fn somebody_is_left(&self) -> bool {
        let pool = &self.routed.served.pool;
        let left = |other: EndpointId| !self.excluded.contains(&other);
        pool.router.read(|scheduler| scheduler.pool().eligible().any(|other| left(other.id)))
    }
}

// === impl Patience ===

impl Patience {
    /// Waits for an answer, and if it is a stream for its first bytes: until then another engine can give it. For as long
    /// as there is time, and the engine is fit.
    pub(super) async fn answer(
        self,
        lease: &Lease,
        sent: impl Future<Output = Result<Answer, UpstreamError>>,
    ) -> Outcome {
        let begun = async {
            let mut answer = sent.await?;
            let fault = begin(&mut answer).await.map_err(UpstreamError::Broken)?;
            Ok::<_, AttemptError>((answer, fault))
        };
        let silent = self.within.map(|within| (Instant::now() + within, within));
        let silent = silent.filter(|(due, _)| *due < self.deadline);
        tokio::select! {
            biased;
            begun = begun => Outcome::of(begun),
            () = lease.worker.unfit() => Outcome::Broken(AttemptError::Unfit),
            () = stalled(lease) => Outcome::Broken(AttemptError::Stalled),
            () = sleep_until(silent.map_or(self.deadline, |(due, _)| due)) => match silent {
                Some((_, within)) => Outcome::Broken(UpstreamError::Silent(within).into()),
                None => Outcome::Late(self.total),
            },
        }
    }
}

impl Outcome {
    fn kind(&self) -> FailureKind {
        match self {
            Self::Answered(_) | Self::Busy(_) | Self::Unable(_) | Self::Faulty(..) => FailureKind::status,
            Self::Late(_) => FailureKind::timeout,
            Self::Broken(error) => error.kind(),
        }
    }
}

/// Waits until the engine has stopped making progress while another one takes requests: to leave the only one helps nobody.
async fn stalled(lease: &Lease) {
    loop {
        lease.endpoint.vitals.stalled().await;
        let is_elsewhere = |other: &Endpoint| {
            other.id != lease.endpoint.id && !other.stalled && other.breaker.state() != State::Open
        };
        if lease.pool().router.read(|scheduler| scheduler.pool().eligible().any(is_elsewhere)) {
            return;
        }
        sleep(STALLED_LOOK_EVERY).await;
    }
}

/// Waits until a stream has content, or an answer of 500 its first words. Whose fault it is, if it says that it failed.
///
/// A 200 head says nothing: vLLM sends it, and `response.created`, before its engine has seen the request. Until there is
/// content another engine can answer, so all of that is held.
async fn begin(answer: &mut Answer) -> io::Result<Option<Fault>> {
    if answer.status == StatusCode::INTERNAL_SERVER_ERROR {
        let words = answer.body.wait_for_more().await?;
        return Ok(Some(words.map_or(Fault::Unknown, |words| fault(words))));
    }
    if !answer.status.is_success() || !is_event_stream(&answer.headers) {
        return Ok(None);
    }
    let (mut scanner, mut seen) = (SseScanner::new(), 0);
    while let Some(held) = answer.body.wait_for_more().await? {
        scanner.push(&held[seen..]);
        if scanner.has_failed() && scanner.tokens() == 0 {
            return Ok(Some(first_error(held).map_or(Fault::Unknown, |(_, error)| fault(error))));
        }
        seen = held.len();
        if scanner.tokens() > 0 || scanner.is_done() || seen > HELD_BYTES_MAX {
            break;
        }
    }
    Ok(None)
}

/// The seconds of a `Retry-After`. A date counts as not given: engines send none.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_parts_requests_that_failed_together() {
        let backoff = Retry::default().backoff();
        let pauses: std::collections::BTreeSet<_> =
            (0..100u64).map(|seed| backoff.pause(3, Rng::new(seed).unit())).collect();
        assert_eq!(pauses.len(), 100);
    }

    #[test]
    fn an_engine_says_when_to_come_again_in_seconds() {
        let said = |value: &'static str| {
            let value = HeaderValue::from_static(value);
            retry_after(&HeaderMap::from_iter([(header::RETRY_AFTER, value)]))
        };
        assert_eq!(said("7"), Some(Duration::from_secs(7)));
        for unusable in ["", "-1", "1.5", "soon", "Wed, 21 Oct 2015 07:28:00 GMT", "99999999999999999999"] {
            assert_eq!(said(unusable), None, "{unusable}");
        }
    }
}
