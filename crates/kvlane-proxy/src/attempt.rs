//! The attempts of one request: the outcome of each, its report to the scheduler, and whether to retry.
//!
//! A failed attempt is retried only while no byte of a response has been sent to the client. An engine whose
//! connection breaks has failed; an engine that answers 429 or 503 is busy, which is no fault. Either is reported to
//! the scheduler, and another endpoint is tried. The last engine's error response is kept: the client gets it if no
//! later attempt succeeds.

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
use kvlane_wire::api::Repeats;
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
use crate::grpc;
use crate::lease::Lease;
use crate::proxy::Proxy;
use crate::relay::is_event_stream;
use crate::routed::Routed;

/// `Retry-After` where a busy engine sends none.
const RETRY_AFTER_S: u64 = 1;

/// How often a request at a stalled engine checks whether another endpoint takes requests.
const STALLED_LOOK_EVERY: Duration = Duration::from_secs(1);
/// Most bytes held of a stream without content; beyond it the stream is relayed as it comes.
const HELD_BYTES_MAX: usize = 64 << 10;
/// How long a request that may crash its engine waits for its exclusive turn and for the state of the engines before.
/// After that it is tried anyway.
const TURN_WITHIN: Duration = Duration::from_secs(10);
/// How often it checks that state.
const TURN_LOOK_EVERY: Duration = Duration::from_millis(250);
/// Engines that report an error of unknown cause for one request before that error is its response.
const FAULTS_MAX: usize = 2;

/// The outcome of an attempt.
pub(super) enum Outcome {
    /// A response for the client, good or bad.
    Answered(Answer),
    /// The engine answers that it is overloaded.
    Busy(Answer),
    /// The engine, or a proxy before it, answers that it cannot serve the request.
    Unable(Answer),
    /// The engine answers 500, or reports an error before any content of a stream: by its own fault, or the cause is
    /// unknown.
    Faulty(Answer, Fault),
    /// No response.
    Broken(AttemptError),
    /// No response before the request's own deadline.
    Late(Duration),
}

/// The attempts of one request so far.
pub(super) struct Attempts<'a> {
    proxy: &'a Arc<Proxy>,
    routed: &'a Routed,
    deadlines: Deadlines,
    retry: Retry,
    attempts: retry::Attempts,
    /// Endpoints that are not to be tried.
    excluded: Arc<[EndpointId]>,
    /// Workers that have failed, one entry for each failure.
    failed: Vec<WorkerId>,
    /// Endpoints that reported an error of unknown cause: if another endpoint succeeds, the fault was theirs.
    faulted: Vec<EndpointId>,
    /// The lease of the last attempt if its connection broke: the engine may have died.
    broke: Option<Lease>,
    /// The standing of the prompt, by the engines that died while it was in flight.
    standing: Standing,
    /// Held while no other suspect request may be tried.
    turn: Option<SemaphorePermit<'a>>,
    /// The client's response if no further attempt succeeds.
    said: Option<Result<Response<Body>, ApiError>>,
}

/// How long to wait for a response.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Until the response begins.
    within: Option<Duration>,
    /// The request's total time,
    total: Duration,
    /// and when it ends.
    deadline: Instant,
}

/// What happened where an engine answers with an error.
pub(super) fn of_status(status: StatusCode) -> String {
    match status.is_success() {
        // The error is in the first event.
        true => "the engine reported an error before any content".into(),
        false => format!("the engine answered {status}"),
    }
}

// === impl Outcome ===

impl Outcome {
    /// Whether it is the client's response.
    pub(super) fn is_answer(&self) -> bool {
        matches!(self, Self::Answered(_))
    }

    /// What happened, for operators.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Answered(answer) | Self::Busy(answer) | Self::Unable(answer) | Self::Faulty(answer, _) => {
                of_status(grpc::status_of(answer.status, &answer.headers))
            }
            Self::Broken(error) => error.to_string(),
            Self::Late(limit) => format!("the engine sent no response within {limit:?}"),
        }
    }

    pub(super) fn of(answered: Result<(Answer, Option<Fault>), AttemptError>) -> Self {
        match answered {
            Ok((answer, Some(fault @ (Fault::Engine | Fault::Unknown)))) => Self::Faulty(answer, fault),
            Ok((answer, _)) => match grpc::status_of(answer.status, &answer.headers) {
                StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Self::Busy(answer),
                // A gRPC server says so of the client's own deadline.
                StatusCode::GATEWAY_TIMEOUT if answer.status.is_success() => Self::Answered(answer),
                StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT => Self::Unable(answer),
                _ => Self::Answered(answer),
            },
            Err(error) => Self::Broken(error),
        }
    }

    /// Whether the engine has died (`true`) or may have died (`false`); none for other outcomes. A stalled engine may
    /// recover.
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

    /// Attempts to continue a broken stream: none of them is a first attempt.
    pub(super) fn again(mut self) -> Self {
        self.attempts = retry::Attempts::new(1);
        self
    }

    /// Waits while the request must be tried alone and another suspect one is being tried, or while it is not known
    /// whether engines died of it. An error if it is not to be placed because it crashes engines.
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

    /// Selects an endpoint for the next attempt.
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

    /// Waits for a response as [`Patience::answer`] does.
    pub(super) async fn answer(
        &mut self,
        lease: &Lease,
        sent: impl Future<Output = Result<Answer, UpstreamError>>,
    ) -> Outcome {
        self.patience().answer(lease, sent).await
    }

    /// How long to wait for a response.
    pub(super) fn patience(&self) -> Patience {
        let within = self.deadlines.first_byte(self.routed.attributes.streams());
        Patience { within, total: self.deadlines.total, deadline: self.routed.deadline }
    }

    /// The delay before a second copy is sent, if hedging is allowed.
    pub(super) fn hedge_delay(&self) -> Option<Duration> {
        let config = &self.proxy.settings().hedge;
        // A request that may crash its engine is not sent to two.
        let may = config.enabled
            && self.attempts.made() == 1
            && self.standing == Standing::Clear
            && self.routed.attributes.streams();
        may.then(|| config.delay.or_else(|| self.routed.served.pool.first_tokens.late())).flatten()
    }

    /// An endpoint for a second copy of the request that `first` is late with, or the time to wait before asking
    /// again, if it is too early.
    pub(super) async fn hedge(&mut self, first: &Lease) -> Result<Lease, Option<Duration>> {
        let endpoints = self.routed.served.pool.endpoints_of(first.worker.id);
        let excluded = self.excluded.iter().copied().chain(endpoints).collect();
        let waited = self.proxy.fleet.clock.now() - first.placed;
        let placed = self.proxy.place_hedge(self.routed, waited, &excluded).await;
        placed.map_err(|refused| {
            let early = (refused.why == Rejection::NoEndpoint).then_some(refused.retry_after.0);
            early.filter(|&early| early > 0).map(Duration::from_nanos)
        })
    }

    /// Records that there is no second copy.
    pub(super) fn is_not_hedged(&self) {
        self.proxy.fleet.metrics.faults.note_hedge(Hedged::refused);
    }

    /// An attempt has succeeded: engines that failed with the same request did so by their own fault.
    pub(super) fn succeeded(&mut self) {
        let pool = &self.routed.served.pool;
        for endpoint in self.faulted.drain(..) {
            pool.step(Input::Blamed { endpoint });
        }
    }

    /// An attempt has failed: reports the reason to the scheduler and keeps the error response. `relay` makes the
    /// client's response of an engine's.
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
                lease.note_failure(FailureKind::timeout);
            }
            // The scheduler already knows. The endpoint is not excluded: if all others stall too, it is
            // eligible again.
            Outcome::Broken(AttemptError::Stalled) => lease.stalled(),
            // An engine answers as to a fault of its own if it cannot fetch the blocks.
            Outcome::Broken(AttemptError::Transfer(_)) => lease.transfer_failed(),
            Outcome::Faulty(_, Fault::Client | Fault::Unknown) if lease.is_split() => lease.transfer_failed(),
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
                tracing::debug!(request_id, trace_id, worker = %worker.url, status = %response.status(), "attempt rejected by the engine")
            }
            Err(error) => tracing::debug!(request_id, trace_id, %error, "attempt failed"),
        }
        self.said = Some(said);
        self.broke = broke.then_some(lease);
    }

    /// Whether there is another attempt; waits until it is due.
    pub(super) async fn go_on(&mut self, upstreams: &Connections) -> bool {
        if let Some(lease) = self.broke.take() {
            let worker = Arc::clone(&lease.worker);
            // The connection broke: by itself, or because the engine's process ended.
            if upstreams.refuses(&worker.upstream).await {
                lease.died(true);
            }
        }
        if let Standing::Barred(left) = self.proxy.standing(self.routed.prompt) {
            let request_id = self.routed.timeline.request_id();
            tracing::warn!(
                request_id,
                for_s = left.as_secs_f64(),
                "several engines failed with this request in flight; it is not retried"
            );
            self.said = Some(Err(ApiError::KillsEngines { left }));
            return false;
        }
        let may_have_reached = self.routed.repeats == Repeats::Unsent && !self.attempts.last_was_free();
        if may_have_reached || self.faulted.len() >= FAULTS_MAX {
            return false;
        }
        // Its jitter parts it from others that failed at the same time.
        let seed = self.routed.received.0 ^ u64::from(self.attempts.made());
        let pause = self.attempts.pause(&self.retry.backoff(), || Rng::new(seed).unit());
        let due = Instant::now() + Duration::from_nanos(pause.0);
        let may_retry = self.attempts.may_retry(self.retry.max_total_retries);
        if !may_retry || due >= self.routed.deadline || !self.an_endpoint_is_left() {
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

    /// The client's response after the last attempt, if there was a response or error.
    pub(super) fn said(self) -> Option<Result<Response<Body>, ApiError>> {
        self.said
    }

    /// The failure is the worker's, so its other ranks are excluded, too.
    fn exclude(&mut self, lease: &Lease) {
        let endpoints = self.routed.served.pool.endpoints_of(lease.worker.id);
        self.excluded = self.excluded.iter().copied().chain(endpoints).collect();
    }

    fn an_endpoint_is_left(&self) -> bool {
        let pool = &self.routed.served.pool;
        let left = |other: EndpointId| !self.excluded.contains(&other);
        pool.router.read(|scheduler| scheduler.pool().eligible().any(|other| left(other.id)))
    }
}

// === impl Patience ===

impl Patience {
    /// Waits for a response, and if it is a stream for its first bytes: until then another engine can serve the
    /// request. Ends at the deadline, or when the engine becomes unhealthy.
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

/// Waits until the engine has stalled while another endpoint takes requests: leaving the only endpoint would not
/// help.
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

/// Waits until a stream has content, or a 500 response its first bytes. Returns whose fault it is if the engine
/// reports an error.
///
/// A 200 head proves nothing: vLLM sends it, and `response.created`, before its engine has seen the request. Until
/// there is content another engine can serve the request, so everything before it is held.
async fn begin(answer: &mut Answer) -> io::Result<Option<Fault>> {
    if answer.status == StatusCode::INTERNAL_SERVER_ERROR {
        let words = answer.body.wait_for_more().await?;
        return Ok(Some(words.map_or(Fault::Unknown, |words| fault(words))));
    }
    if answer.status.is_success() && grpc::is_answer(&answer.headers) {
        return grpc::begin(answer).await;
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

/// The seconds of a `Retry-After`. A date is ignored: engines send none.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{World, answer};

    #[test]
    fn jitter_separates_retries_of_requests_that_failed_together() {
        let backoff = Retry::default().backoff();
        let pauses: std::collections::BTreeSet<_> =
            (0..100u64).map(|seed| backoff.pause(3, Rng::new(seed).unit())).collect();
        assert_eq!(pauses.len(), 100);
    }

    #[test]
    fn retry_after_of_an_engine_is_read_in_seconds() {
        let said = |value: &'static str| {
            let value = HeaderValue::from_static(value);
            retry_after(&HeaderMap::from_iter([(header::RETRY_AFTER, value)]))
        };
        assert_eq!(said("7"), Some(Duration::from_secs(7)));
        for unusable in ["", "-1", "1.5", "soon", "Wed, 21 Oct 2015 07:28:00 GMT", "99999999999999999999"] {
            assert_eq!(said(unusable), None, "{unusable}");
        }
    }

    #[tokio::test]
    async fn an_answer_is_good_busy_bad_or_no_answer_by_its_head_and_its_first_event() {
        let world = World::new(1);
        let lease = world.lease().await;
        let deadline = Instant::now() + Duration::from_secs(600);
        let patience = Patience { within: None, total: Duration::from_secs(600), deadline };
        let died = "{\"error\":{\"message\":\"EngineCore encountered an issue\",\"type\":\"InternalServerError\",\"code\":500}}";
        let whole = |status: &str, body: &str| {
            format!(
                "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            )
        };
        for (said, expect) in [
            (whole("200 OK", "{}"), "answered"),
            (whole("404 Not Found", "{}"), "answered"),
            (whole("429 Busy", "{}"), "busy"),
            (whole("503 Busy", "{}"), "busy"),
            (whole("502 Bad", "{}"), "unable"),
            (whole("500 Error", died), "faulty"),
            (String::new(), "broken"),
            ("garbage\r\n\r\n".into(), "garbage"),
        ] {
            let (sent, _engine) = answer(&said).await;
            let outcome = match patience.answer(&lease, async { sent }).await {
                Outcome::Answered(_) => "answered",
                Outcome::Busy(_) => "busy",
                Outcome::Unable(_) => "unable",
                Outcome::Faulty(..) => "faulty",
                Outcome::Broken(error) => error.kind().name(),
                Outcome::Late(_) => "late",
            };
            assert_eq!(outcome, expect, "{said}");
        }
    }

    #[tokio::test]
    async fn a_stream_has_begun_with_its_first_bytes_and_is_late_without_them() {
        let world = World::new(1);
        let lease = world.lease().await;
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        let (sent, _engine) = answer(head).await;
        tokio::time::pause();
        let within = Duration::from_secs(5);
        let deadline = Instant::now() + 2 * within;
        let patience = Patience { within: Some(within), total: 2 * within, deadline };
        let outcome = patience.answer(&lease, async { sent }).await;
        assert!(
            matches!(outcome, Outcome::Broken(_)) && Instant::now() < deadline,
            "another engine may answer"
        );
        let whole = Patience { within: None, ..patience };
        let outcome = whole.answer(&lease, std::future::pending()).await;
        assert!(matches!(outcome, Outcome::Late(total) if total == 2 * within), "no time is left");
    }
}
