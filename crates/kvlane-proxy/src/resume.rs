//! Continuation: a stream whose engine dies continues on another endpoint, if the operator has switched it on.
//!
//! Everything that is sent to the client passes through a [`Transcript`]. When the stream breaks, the transcript
//! makes a request for the rest; that request is placed, sent and retried like any retry, within the same budget, and
//! its response is relayed as the rest of the stream. The client sees a pause. If continuation fails, the stream ends
//! as it does without it: with an event that says that it is incomplete.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::request::Parts;
use http::{Response, StatusCode, Uri};
use http_body::{Frame, SizeHint};
use kvlane_core::endpoint::EndpointId;
use kvlane_fleet::metrics::{Continued, FailureKind};
use kvlane_fleet::worker::Worker;
use kvlane_http::connections::{Answer, Connections};
use kvlane_wire::api::Api;
use kvlane_wire::engine;
use kvlane_wire::failure::{Fault, first_error};
use kvlane_wire::models::max_model_len;
use kvlane_wire::resume::{EngineCapabilities, Next, Transcript, Unfit};
use tokio::time::Instant;

use crate::account::Account;
use crate::attempt::{Attempts, Outcome};
use crate::body::Body;
use crate::deadlines::Deadlines;
use crate::engine_request::{Framing, request_head};
use crate::lease::Lease;
use crate::proxy::Proxy;
use crate::relay::{BreakCause, Relay, Watch, is_event_stream};
use crate::routed::Routed;
use crate::whole::WholeEvents;

/// A stream that can continue on another endpoint.
pub(super) struct Continuation {
    transcript: Transcript,
    /// How often it still may.
    left: u32,
    asked: Arc<Asked>,
    /// The request for the rest of the response, while it is running.
    rest: Option<Rest>,
    /// Why it was made.
    broke: Option<(BreakCause, io::Error)>,
    /// The stream has continued on another endpoint.
    joined: bool,
}

/// An answer that continues on another endpoint if its engine dies.
pub(super) struct ContinuedRelay {
    relay: Relay,
    continuation: Box<Continuation>,
}

type Rest = Pin<Box<dyn Future<Output = Option<(Answer, Lease)>> + Send>>;

/// The client's request.
pub(super) struct Asked {
    pub(super) proxy: Arc<Proxy>,
    pub(super) upstreams: Arc<Connections>,
    pub(super) parts: Parts,
    pub(super) account: Arc<Account>,
    pub(super) routed: Routed,
    pub(super) excluded: Arc<[EndpointId]>,
}

// === impl Continuation ===

impl Continuation {
    /// A transcript of the response to `body`, if continuation is on and supports this kind of response.
    pub(super) fn transcript(
        proxy: &Arc<Proxy>,
        account: &Account,
        api: Option<Api>,
        body: &Bytes,
        answer: &Answer,
    ) -> Option<Transcript> {
        let config = &proxy.settings().continuation;
        // A stream with a declared length cannot become longer.
        if !config.enabled || !is_stream(answer) || answer.body.bytes_left().is_some() {
            return None;
        }
        match Transcript::begin(api?, body.clone(), config.buffer_bytes_max) {
            Ok(transcript) => Some(transcript),
            Err(unfit) => {
                let (request_id, trace_id) = (account.timeline.request_id(), account.timeline.trace_id());
                tracing::debug!(request_id, trace_id, reason = %unfit, "response cannot be continued if its engine fails");
                None
            }
        }
    }

    pub(super) fn new(transcript: Transcript, asked: Asked) -> Box<Self> {
        let left = asked.proxy.settings().continuation.max_per_request;
        Box::new(Self { transcript, left, asked: Arc::new(asked), rest: None, broke: None, joined: false })
    }

    pub(super) fn account(&self) -> &Arc<Account> {
        &self.asked.account
    }

    /// The stream of `lease` has broken. Starts the request for the rest, or returns the last bytes for the client if
    /// only those are missing; none if the stream ends here.
    fn go_on(&mut self, lease: Lease) -> Option<Bytes> {
        let asked = &self.asked;
        let note = |outcome| asked.proxy.fleet.metrics.faults.note_continued(outcome);
        match self.transcript.resume(asked.means()) {
            Err(unfit) => {
                let timeline = &asked.account.timeline;
                let (request_id, trace_id) = (timeline.request_id(), timeline.trace_id());
                tracing::debug!(request_id, trace_id, reason = %unfit, "broken response cannot be continued");
                note(Continued::unfit);
                None
            }
            Ok(Next::Close(bytes)) => {
                note(Continued::closed);
                Some(bytes)
            }
            Ok(Next::Ask { .. }) if self.left == 0 => {
                note(Continued::exhausted);
                None
            }
            Ok(Next::Ask { api, body }) => {
                self.left -= 1;
                let worker = Arc::clone(&lease.worker);
                let written = lease.hand_on();
                let asked = Arc::clone(asked);
                self.rest = Some(Box::pin(async move {
                    let rest = asked.ask(api, &body, &worker, written).await;
                    let outcome = if rest.is_some() { Continued::resumed } else { Continued::refused };
                    asked.proxy.fleet.metrics.faults.note_continued(outcome);
                    rest
                }));
                Some(Bytes::new())
            }
        }
    }
}

// === impl Asked ===

impl Asked {
    /// Requests the rest until an endpoint begins to answer; `dead` is excluded.
    async fn ask(
        &self,
        api: Api,
        body: &Bytes,
        dead: &Worker,
        written: Option<u64>,
    ) -> Option<(Answer, Lease)> {
        let Self { proxy, upstreams, routed, .. } = self;
        let mut parts = self.parts.clone();
        if Api::from_path(parts.uri.path()) != Some(api) {
            // A chat can continue as a completion, but not the reverse.
            parts.uri = Uri::from_static("/v1/completions");
        }
        let dead = routed.served.pool.endpoints_of(dead.id);
        let excluded = self.excluded.iter().copied().chain(dead).collect();
        let deadlines = Deadlines::of(&proxy.settings(), self.parts.uri.path());
        let mut attempts = Attempts::new(proxy, routed, excluded, deadlines).again();
        attempts.take_turn().await.ok()?;
        loop {
            let mut lease = attempts.place().await.ok()?;
            lease.continues(written);
            let head = request_head(&parts, &lease, Framing::Length(body.len() as u64), &self.account, &[]);
            let sent = upstreams.send(&lease.worker.upstream, &parts.method, &head, body, || lease.sent());
            match attempts.answer(&lease, sent).await {
                Outcome::Answered(answer) if is_stream(&answer) => {
                    attempts.succeeded();
                    return Some((answer, lease));
                }
                Outcome::Answered(answer) => {
                    let (request_id, trace_id) = (routed.timeline.request_id(), routed.timeline.trace_id());
                    let worker = &*lease.worker.url;
                    tracing::debug!(request_id, trace_id, worker, status = %answer.status, "continuation failed");
                    return None;
                }
                outcome => attempts.failed(lease, outcome, |_, _| Response::new(Body::Whole(None))),
            }
            if !attempts.go_on(upstreams).await {
                return None;
            }
        }
    }

    /// What the pool's engines support, by their model lists.
    fn means(&self) -> EngineCapabilities {
        let table = self.proxy.fleet.snapshot();
        let Some(card) = table.cards.get(&self.routed.served.pool.model) else {
            return EngineCapabilities::default();
        };
        let context_tokens = max_model_len(card).and_then(|tokens| tokens.try_into().ok());
        let continues_messages = engine::of_card(card).is_some_and(|engine| engine.continues_messages);
        EngineCapabilities { continues_messages, context_tokens }
    }
}

// === impl ContinuedRelay ===

impl ContinuedRelay {
    /// `relay` with its continuation.
    pub(super) fn new(mut relay: Relay, continuation: Box<Continuation>) -> Self {
        relay.continues = true;
        Self { relay, continuation }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        loop {
            let continuation = &mut *self.continuation;
            if self.relay.ended {
                return Poll::Ready(None);
            }
            if let Some(rest) = &mut continuation.rest {
                let rest = ready!(rest.as_mut().poll(cx));
                continuation.rest = None;
                let broke = continuation.broke.take();
                if let Some((answer, lease)) = rest {
                    continuation.joined = true;
                    self.join(answer, lease);
                    continue;
                }
                // The first error says more than the reason why continuation failed.
                return Poll::Ready(broke.and_then(|(broke, error)| self.relay.last_words(broke, error)));
            }
            let passed = match self.relay.body.poll_piece(cx) {
                Poll::Ready(Some(Ok(piece))) => {
                    let piece = self.relay.see(piece);
                    if self.relay.goes_on_elsewhere() {
                        self.break_at_error(&piece)
                    } else {
                        self.pass(piece)
                    }
                }
                Poll::Ready(None) => {
                    let held = self.relay.end();
                    self.pass(held)
                }
                Poll::Ready(Some(Err(error))) => self.break_off(BreakCause::Cut, error),
                Poll::Pending => {
                    let (broke, error) = ready!(self.relay.poll_late(cx));
                    self.break_off(broke, error)
                }
            };
            match passed {
                Ok(bytes) if bytes.is_empty() => {}
                Ok(bytes) => return Poll::Ready(Some(Ok(Frame::data(bytes)))),
                Err(last) => return Poll::Ready(last),
            }
        }
    }

    /// The client's bytes of a piece; the last event if the piece does not continue the stream.
    fn pass(&mut self, piece: Bytes) -> Result<Bytes, Last> {
        let ended = self.relay.ended;
        let Continuation { transcript, asked, joined, .. } = &mut *self.continuation;
        let passed = transcript.pass(piece).and_then(|passed| match ended {
            true => Ok([passed, transcript.end()?].concat().into()),
            false => Ok(passed),
        });
        let problem = match passed {
            Ok(_) if ended && *joined && !transcript.is_finished() => Unfit::Chunk,
            Ok(passed) => return Ok(passed),
            Err(problem) => problem,
        };
        asked.proxy.fleet.metrics.faults.note_continued(Continued::misfit);
        // That is no fault of its engine.
        self.relay.lease = None;
        self.relay.body.close();
        let error = io::Error::new(
            io::ErrorKind::InvalidData,
            format!("the stream could not be continued: {problem}"),
        );
        Err(self.relay.last_words(BreakCause::Cut, error))
    }

    /// The engine reported an error within `piece`: returns the client's bytes before the error.
    fn break_at_error(&mut self, piece: &Bytes) -> Result<Bytes, Last> {
        let before = first_error(piece).map_or(piece.len(), |(at, _)| at);
        let passed = self.pass(piece.slice(..before))?;
        let error = io::Error::other("the engine reported an error");
        let more = match self.break_off(BreakCause::Cut, error) {
            Ok(more) => more,
            Err(Some(Ok(last))) => match last.into_data() {
                Ok(last) => last,
                Err(_) => return Err(None),
            },
            Err(last) => return Err(last),
        };
        Ok([passed, more].concat().into())
    }

    /// The stream has broken: returns the bytes that the client gets before the continuation, or the last event.
    fn break_off(&mut self, broke: BreakCause, error: io::Error) -> Result<Bytes, Last> {
        let failure = match broke {
            BreakCause::Cut => FailureKind::mid_stream,
            BreakCause::Silent => FailureKind::timeout,
            BreakCause::Deadline => return Err(self.relay.fail(broke, error)),
        };
        let said_all =
            matches!(&self.relay.watch, Watch::Events(scanner) if scanner.is_done() && !scanner.has_failed());
        if said_all {
            return Err(self.relay.fail(broke, error));
        }
        let continuation = &mut *self.continuation;
        let Some(lease) = self.relay.lease.take() else { return Err(self.relay.fail(broke, error)) };
        lease.failed(failure);
        self.relay.account.failed_at(&lease.endpoint.name, error.to_string());
        if self.relay.fault == Some(Fault::Engine) {
            lease.died(true);
        }
        self.relay.body.close();
        // The transcript holds the incomplete event; the client has received none of it.
        self.relay.whole = WholeEvents::default();
        let Some(bytes) = continuation.go_on(lease) else { return Err(self.relay.last_words(broke, error)) };
        if continuation.rest.is_some() {
            continuation.broke = Some((broke, error));
        } else {
            self.relay.account.settle();
            self.relay.ended = true;
        }
        Ok(bytes)
    }

    /// Continues with another engine's response.
    fn join(&mut self, answer: Answer, lease: Lease) {
        self.relay.watch = Watch::new(&answer.headers, self.relay.lease.as_ref());
        self.relay.fault = None;
        self.relay.body = answer.body;
        self.relay.lease = Some(lease);
        self.relay.last_piece = Instant::now();
    }
}

impl http_body::Body for ContinuedRelay {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        self.poll(cx)
    }

    fn is_end_stream(&self) -> bool {
        http_body::Body::is_end_stream(&self.relay)
    }

    fn size_hint(&self) -> SizeHint {
        http_body::Body::size_hint(&self.relay)
    }
}

/// The last frame of a stream, if there is one.
type Last = Option<io::Result<Frame<Bytes>>>;

/// Whether a response is a stream that may be continued.
fn is_stream(answer: &Answer) -> bool {
    answer.status == StatusCode::OK && is_event_stream(&answer.headers)
}
