//! Relays a response: its bytes pass through unchanged while they are inspected.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use http_body::{Frame, SizeHint};
use kvlane_core::request::AnswerEnd;
use kvlane_fleet::metrics::FailureKind;
use kvlane_http::connections::AnswerBody;
use kvlane_wire::answer_end::end_in_json;
use kvlane_wire::api::Api;
use kvlane_wire::engine::calls::AnswerScanner;
use kvlane_wire::failure::{Fault, fault, first_error};
use kvlane_wire::sse::SseScanner;
use kvlane_wire::sse::{Usage, usage_in_json};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::account::Account;
use crate::grpc;
use crate::lease::Lease;
use crate::objects::Named;
use crate::whole::WholeEvents;

/// Bytes of a JSON response's end that are kept to find its usage.
const TAIL_BYTES: usize = 4096;

/// How often the engine of a silent response is checked.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Silence after which a response ends if its engine is known to be gone: a response that is about to end may still
/// have data in flight.
const SILENT_AT_A_DEAD_ENGINE: Duration = Duration::from_secs(4);
/// The same for a stalled engine, where the response cannot continue on another endpoint: longer, because the engine
/// may recover, and short enough for a client that could retry.
const SILENT_AT_A_STALLED_ENGINE: Duration = Duration::from_secs(6);

/// A response in transit. Dropping it before its end cancels the request at the worker.
pub struct Relay {
    pub(super) body: AnswerBody,
    pub(super) watch: Watch,
    pub(super) whole: WholeEvents,
    /// Whether it can be continued at another engine.
    pub(super) continues: bool,
    /// Whose fault it is, if the engine reported an error within the response.
    pub(super) fault: Option<Fault>,
    /// The response has ended.
    pub(super) ended: bool,
    /// It answers a gRPC call.
    is_call: bool,
    /// What is left to pass on of an answer that has ended.
    trailers: Option<HeaderMap>,
    pub(super) lease: Option<Lease>,
    pub(super) account: Arc<Account>,
    /// Stores the objects that the response names at its beginning.
    pub(super) named: Option<Box<Named>>,
    /// Whether such a response shows that the engine is healthy.
    sound: bool,
    limits: Limits,
    pub(super) last_piece: Instant,
    /// Re-armed only when it fires.
    alarm: Pin<Box<Sleep>>,
}

/// Time limits of a response.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Between two pieces.
    pub(super) idle: Duration,
    /// Of the whole response.
    pub(super) deadline: Instant,
}

/// What is read from the relayed bytes.
pub(super) enum Watch {
    Events(Box<SseScanner>),
    Json { tail: Vec<u8>, begun: bool, reads_end: bool },
    Grpc { scanner: Box<AnswerScanner>, begun: bool },
    Opaque { begun: bool },
}

/// Why a response has no proper end.
#[derive(Clone, Copy, Debug)]
pub(super) enum BreakCause {
    /// The engine's connection broke.
    Cut,
    /// The engine sent nothing for too long.
    Silent,
    /// The request's deadline passed, which the client may have set.
    Deadline,
}

/// What a piece contains.
pub(super) enum PieceKind {
    /// This many tokens of a stream.
    Tokens(u32),
    /// The beginning of a response that is not a stream: its tokens are complete.
    Beginning,
    /// Nothing to report.
    Nothing,
}

// === impl Relay ===

impl Relay {
    /// Without a lease: the response of an engine that has finished with the request.
    pub(super) fn new(
        status: StatusCode,
        headers: &HeaderMap,
        body: AnswerBody,
        lease: Option<Lease>,
        account: Arc<Account>,
        limits: Limits,
    ) -> Self {
        let last_piece = Instant::now();
        let alarm = Box::pin(sleep_until(limits.deadline.min(last_piece + limits.idle.min(LOOK_EVERY))));
        // A 500 may be the engine's fault or the request's.
        let sound = !status.is_server_error();
        let is_call = grpc::is_answer(headers);
        let watch = match account.api() {
            Some(Api::EngineGenerate) if is_call => Watch::Grpc { scanner: Box::default(), begun: false },
            _ => Watch::new(headers, lease.as_ref()),
        };
        let whole = WholeEvents::default();
        let mut relay = Self {
            body,
            watch,
            whole,
            continues: false,
            fault: None,
            ended: false,
            is_call,
            trailers: None,
            lease,
            account,
            named: None,
            sound,
            limits,
            last_piece,
            alarm,
        };
        if relay.body.is_over() {
            relay.end();
        }
        relay
    }

    /// Inspects a piece; returns what is sent to the client.
    pub(super) fn see(&mut self, piece: Bytes) -> Bytes {
        let now = Instant::now();
        self.last_piece = now;
        if let (Some(named), Some(lease)) = (&mut self.named, &self.lease)
            && !named.see(lease.proxy(), &piece)
        {
            self.named = None;
        }
        match (self.watch.see(&piece), &mut self.lease) {
            (PieceKind::Tokens(tokens), Some(lease)) => lease.progress(now, tokens),
            (PieceKind::Beginning, Some(lease)) => lease.begin(),
            _ => {}
        }
        let Watch::Events(scanner) = &self.watch else {
            if self.body.is_done() {
                self.end();
            }
            return piece;
        };
        let (failed, whole) = (scanner.has_failed(), self.whole.pass(piece, scanner.pending()));
        if failed && self.fault.is_none() {
            self.fault = Some(first_error(&whole).map_or(Fault::Unknown, |(_, error)| fault(error)));
        }
        if !self.body.is_done() || self.goes_on_elsewhere() {
            return whole;
        }
        match (whole.is_empty(), self.end()) {
            (true, rest) => rest,
            (false, rest) if rest.is_empty() => whole,
            (false, rest) => [whole, rest].concat().into(),
        }
    }

    /// The response has ended; returns the last bytes for the client.
    pub(super) fn end(&mut self) -> Bytes {
        self.trailers = self.body.take_trailers();
        if let Some(trailers) = &self.trailers {
            self.fault = grpc::fault_in(trailers);
            if let Some(Ok(status)) = grpc::status_in(trailers).map(|end| StatusCode::from_u16(end.as_http()))
            {
                self.account.set_status(status);
            }
        }
        self.complete();
        self.ended = true;
        self.whole.take()
    }

    /// Whether the engine reported an error within the response, and another engine may write the rest.
    pub(super) fn goes_on_elsewhere(&self) -> bool {
        self.continues && matches!(self.fault, Some(Fault::Engine | Fault::Unknown))
    }

    fn complete(&mut self) {
        match self.fault {
            Some(fault @ (Fault::Engine | Fault::Unknown)) => {
                if let Some(lease) = self.lease.take() {
                    self.reported(fault, &lease);
                }
                self.account.broke_off();
            }
            Some(Fault::Client) | None => self.succeeded(),
        }
        self.account.settle();
    }

    /// The engine reported an error within the response.
    fn reported(&self, fault: Fault, lease: &Lease) {
        match fault {
            Fault::Engine => {
                lease.failed(FailureKind::mid_stream);
                lease.died(true);
            }
            Fault::Unknown | Fault::Client => lease.faulted(),
        }
        self.account.failed_at(&lease.endpoint.name, "the engine reported an error in the stream".into());
    }

    /// The response is complete, and the engine is not to blame for anything in it.
    fn succeeded(&mut self) {
        let Some(mut lease) = self.lease.take() else { return };
        if let Watch::Events(scanner) = &mut self.watch {
            lease.progress(self.last_piece, scanner.finish());
        }
        lease.complete(self.watch.usage(), self.watch.end());
        if self.sound {
            lease.succeeded();
        }
    }

    /// The response has no proper end. A stream ends with an error event; any other response is cut.
    pub(super) fn fail(&mut self, broke: BreakCause, error: io::Error) -> Option<io::Result<Frame<Bytes>>> {
        self.body.close();
        if matches!(&self.watch, Watch::Events(scanner) if scanner.is_done()) {
            // Only the connection's end was missing.
            let rest = self.end();
            return (!rest.is_empty()).then(|| Ok(Frame::data(rest)));
        }
        if let Some(lease) = self.lease.take() {
            match broke {
                BreakCause::Cut => {
                    lease.failed(FailureKind::mid_stream);
                    lease.died(false);
                }
                BreakCause::Silent => lease.failed(FailureKind::timeout),
                BreakCause::Deadline => {
                    lease.trace_failure(FailureKind::timeout.name());
                    lease.note_failure(FailureKind::timeout);
                }
            }
            self.account.failed_at(&lease.endpoint.name, error.to_string());
            let timeline = &self.account.timeline;
            let (request_id, trace_id) = (timeline.request_id(), timeline.trace_id());
            let worker = &*lease.worker.url;
            tracing::debug!(request_id, trace_id, worker, %error, "response stream broke");
        }
        self.last_words(broke, error)
    }

    /// Sends the client an event that says that the response is incomplete.
    pub(super) fn last_words(
        &mut self,
        broke: BreakCause,
        error: io::Error,
    ) -> Option<io::Result<Frame<Bytes>>> {
        self.account.broke_off();
        self.account.settle();
        self.ended = true;
        match &self.watch {
            _ if self.is_call => Some(Ok(grpc::broken_off(&format!("the answer is incomplete: {error}")))),
            Watch::Events(scanner) if self.whole.is_between() => {
                let message = format!("the answer is incomplete: {error}");
                let last = self.account.error_format.last_event(scanner.events(), broke.code(), &message);
                Some(Ok(Frame::data(last)))
            }
            _ => Some(Err(error)),
        }
    }

    /// Whether its engine is known to be down or stalled: then a silent response ends, or continues on another
    /// endpoint.
    fn engine_is_gone(&self, silent: Duration) -> Option<(BreakCause, &'static str)> {
        let lease = self.lease.as_ref().filter(|_| silent >= SILENT_AT_A_DEAD_ENGINE)?;
        let is_over = self.continues || silent >= SILENT_AT_A_STALLED_ENGINE;
        if lease.worker.is_down() {
            Some((BreakCause::Cut, "the worker is down"))
        } else if is_over && lease.endpoint.vitals.is_stalled() {
            Some((BreakCause::Silent, "the worker's engine stopped making progress"))
        } else {
            None
        }
    }

    /// Whether the response has been silent for too long, or is past its deadline.
    pub(super) fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<(BreakCause, io::Error)> {
        let late = |broke, why| Poll::Ready((broke, io::Error::new(io::ErrorKind::TimedOut, why)));
        while self.alarm.as_mut().poll(cx).is_ready() {
            let (now, silent_until) = (Instant::now(), self.last_piece + self.limits.idle);
            if now >= self.limits.deadline {
                return late(BreakCause::Deadline, "the request took too long");
            }
            if now >= silent_until {
                return late(BreakCause::Silent, "the worker was silent for too long");
            }
            if let Some((broke, why)) = self.engine_is_gone(now - self.last_piece) {
                return late(broke, why);
            }
            self.alarm.as_mut().reset(silent_until.min(self.limits.deadline).min(now + LOOK_EVERY));
        }
        Poll::Pending
    }
}

impl http_body::Body for Relay {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = &mut *self;
        loop {
            if this.ended {
                return Poll::Ready(this.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))));
            }
            let piece = match this.body.poll_piece(cx) {
                Poll::Ready(Some(Ok(piece))) => this.see(piece),
                Poll::Ready(Some(Err(error))) => return Poll::Ready(this.fail(BreakCause::Cut, error)),
                Poll::Ready(None) => this.end(),
                Poll::Pending => {
                    let (broke, error) = ready!(this.poll_late(cx));
                    return Poll::Ready(this.fail(broke, error));
                }
            };
            if !piece.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(piece))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match self.watch {
            // An error event may have to be added.
            Watch::Events(_) if !self.ended => SizeHint::default(),
            // Trailers follow.
            _ if self.is_call => SizeHint::default(),
            _ => self.body.bytes_left().map_or_else(SizeHint::default, SizeHint::with_exact),
        }
    }
}

/// The codes of the error event that ends a broken stream.
pub fn stream_error_codes() -> [&'static str; 3] {
    [BreakCause::Cut, BreakCause::Silent, BreakCause::Deadline].map(BreakCause::code)
}

// === impl BreakCause ===

impl BreakCause {
    /// The error code for the client.
    const fn code(self) -> &'static str {
        match self {
            Self::Cut => "stream_broken",
            Self::Silent => "stream_silent",
            Self::Deadline => "request_timeout",
        }
    }
}

/// Whether a response is a stream of events.
pub(super) fn is_event_stream(headers: &HeaderMap) -> bool {
    is_of_kind(headers, "text/event-stream")
}

fn is_of_kind(headers: &HeaderMap, kind: &str) -> bool {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.get(..kind.len()).is_some_and(|start| start.eq_ignore_ascii_case(kind))
}

// === impl Watch ===

impl Watch {
    /// Of a response with these headers. How it ends is read if its lease has a use for that.
    pub(super) fn new(headers: &HeaderMap, lease: Option<&Lease>) -> Self {
        let reads_end = lease.is_some_and(Lease::wants_end);
        if is_event_stream(headers) {
            let scanner = SseScanner::new();
            Self::Events(Box::new(if reads_end { scanner.reading_end() } else { scanner }))
        } else if is_of_kind(headers, "application/json") {
            Self::Json { tail: Vec::new(), begun: false, reads_end }
        } else {
            Self::Opaque { begun: false }
        }
    }

    /// Inspects a piece.
    pub(super) fn see(&mut self, piece: &Bytes) -> PieceKind {
        let beginning = |begun: &mut bool| {
            if std::mem::replace(begun, true) { PieceKind::Nothing } else { PieceKind::Beginning }
        };
        match self {
            Self::Events(scanner) => PieceKind::Tokens(scanner.push(piece)),
            Self::Grpc { scanner, begun } => match scanner.push(piece.clone()) {
                0 if scanner.usage().is_some() => beginning(begun),
                tokens => {
                    *begun |= tokens > 0;
                    PieceKind::Tokens(tokens)
                }
            },
            Self::Json { tail, begun, .. } => {
                let keep = TAIL_BYTES.saturating_sub(piece.len()).min(tail.len());
                tail.drain(..tail.len() - keep);
                tail.extend_from_slice(&piece[piece.len().saturating_sub(TAIL_BYTES)..]);
                beginning(begun)
            }
            Self::Opaque { begun } => beginning(begun),
        }
    }

    /// How the answer ended, as far as it was read.
    pub(super) fn end(&self) -> AnswerEnd {
        match self {
            Self::Events(scanner) => scanner.answer_end(),
            Self::Grpc { scanner, .. } => scanner.end(),
            Self::Json { tail, reads_end: true, .. } => end_in_json(tail),
            Self::Json { .. } | Self::Opaque { .. } => AnswerEnd::Unknown,
        }
    }

    pub(super) fn usage(&self) -> Option<Usage> {
        match self {
            Self::Events(scanner) => scanner.usage(),
            Self::Json { tail, .. } => usage_in_json(tail),
            Self::Grpc { scanner, .. } => scanner.usage(),
            Self::Opaque { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use kvlane_http::connections::Answer;
    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpStream;

    use super::*;
    use crate::testing::{PROMPT_TOKENS, World, answer};

    const EVENTS: &str =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    const ROLE: &str = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n";
    const WORD: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"hi\"}}]}\n\n";
    /// Longer than any other limit.
    const LONG: Duration = Duration::from_secs(600);

    /// The relay of an answer that begins with `head`, and the engine's side of it.
    async fn relay(world: &World, head: &str, idle: Duration, total: Duration) -> (Relay, TcpStream) {
        let (begun, engine) = answer(head).await;
        let Answer { status, headers, body, .. } = begun.expect("an answer");
        let limits = Limits { idle, deadline: Instant::now() + total };
        let lease = Some(world.lease().await);
        (Relay::new(status, &headers, body, lease, world.account(), limits), engine)
    }

    async fn send(engine: &mut TcpStream, text: &str) {
        let chunk = format!("{:x}\r\n{text}\r\n", text.len());
        engine.write_all(chunk.as_bytes()).await.expect("it is read");
    }

    /// The next bytes for the client, as text; none at the end.
    async fn next(relay: &mut Relay) -> Option<io::Result<String>> {
        let frame = relay.frame().await?;
        Some(frame.map(|frame| String::from_utf8(frame.into_data().expect("data").to_vec()).expect("text")))
    }

    async fn text(relay: &mut Relay) -> String {
        next(relay).await.expect("not the end").expect("no error")
    }

    #[tokio::test]
    async fn bytes_pass_unchanged_and_the_prefill_ends_with_the_first_content() {
        let world = World::new(1);
        let (mut relay, mut engine) = relay(&world, EVENTS, LONG, LONG).await;
        send(&mut engine, ROLE).await;
        assert_eq!(text(&mut relay).await, ROLE);
        assert_eq!(world.load().prefill_tokens, u64::from(PROMPT_TOKENS), "a role is no token");
        send(&mut engine, WORD).await;
        assert_eq!(text(&mut relay).await, WORD);
        assert_eq!((world.load().prefill_tokens, world.load().requests), (0, 1));
        engine.write_all(b"0\r\n\r\n").await.expect("it is read");
        assert!(next(&mut relay).await.is_none());
        assert_eq!(world.load(), Default::default(), "the end of the answer releases the load");
    }

    #[tokio::test]
    async fn a_stream_that_breaks_ends_after_its_last_whole_event_with_an_error_event() {
        let world = World::new(1);
        let (mut relay, mut engine) = relay(&world, EVENTS, LONG, LONG).await;
        send(&mut engine, &format!("{WORD}data: {{\"cho")).await;
        assert_eq!(text(&mut relay).await, WORD, "the half event is held back");
        drop(engine);
        assert!(text(&mut relay).await.contains("\"stream_broken\""));
        assert!(next(&mut relay).await.is_none());
        assert_eq!(world.load(), Default::default());
    }

    #[tokio::test]
    async fn a_body_that_is_no_stream_is_cut_where_it_broke() {
        let world = World::new(1);
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n{\"a\"";
        let (mut relay, engine) = relay(&world, head, LONG, LONG).await;
        assert_eq!(text(&mut relay).await, "{\"a\"");
        assert_eq!(world.load().prefilling, 0, "it begins when its prefill is over");
        drop(engine);
        assert!(next(&mut relay).await.is_some_and(|piece| piece.is_err()));
        assert!(next(&mut relay).await.is_none());
    }

    #[tokio::test]
    async fn a_silent_stream_ends_when_its_time_is_over() {
        for (idle, total, code) in
            [(LONG / 2, LONG, "\"stream_silent\""), (LONG, LONG / 2, "\"request_timeout\"")]
        {
            let world = World::new(1);
            let (mut relay, mut engine) = relay(&world, EVENTS, idle, total).await;
            send(&mut engine, WORD).await;
            assert_eq!(text(&mut relay).await, WORD);
            tokio::time::pause();
            assert!(text(&mut relay).await.contains(code));
            tokio::time::resume();
            assert_eq!(world.load(), Default::default());
        }
    }
}
