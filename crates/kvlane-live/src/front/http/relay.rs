//! Relays an answer: bytes pass through untouched, a watcher looks at them as they pass.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, StatusCode, header};
use http_body::{Frame, SizeHint};
use kvlane_wire::sse::SseScanner;
use kvlane_wire::sse::{Usage, usage_in_json};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::lease::Lease;
use crate::metrics::FailureKind;
use crate::upstream::AnswerBody;

use super::Account;

/// How much of a JSON answer's end is kept to find its usage in.
const TAIL_BYTES: usize = 4096;

/// An answer on its way. Dropping it before its end cancels the request at the worker.
pub struct Relay {
    body: AnswerBody,
    watch: Watch,
    lease: Option<Lease>,
    account: Arc<Account>,
    /// Whether an answer like this one shows that the engine is well.
    sound: bool,
    limits: Limits,
    last_piece: Instant,
    /// Re-armed only when it fires.
    alarm: Pin<Box<Sleep>>,
}

/// How long an answer may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Between two pieces.
    pub(super) idle: Duration,
    /// As a whole.
    pub(super) deadline: Instant,
}

/// What is looked for in the passing bytes.
enum Watch {
    Events(Box<SseScanner>),
    Json { tail: Vec<u8>, begun: bool },
    Opaque { begun: bool },
}

/// Whose doing it is that an answer has no end.
enum Broke {
    /// The engine's.
    Engine(FailureKind),
    /// The request's time was over, which may be as long as its client asked for.
    Deadline,
}

/// What a piece shows.
enum Seen {
    /// So many tokens of a stream.
    Tokens(u32),
    /// The beginning of an answer that comes all at once: its tokens are there already.
    Beginning,
    /// No more than that it goes on.
    Nothing,
}

// === impl Relay ===

impl Relay {
    /// Without a lease it is the answer of an engine that has no more to do with the request.
    pub(super) fn new(
        status: StatusCode,
        headers: &HeaderMap,
        body: AnswerBody,
        lease: Option<Lease>,
        account: Arc<Account>,
        limits: Limits,
    ) -> Self {
        let last_piece = Instant::now();
        let alarm = Box::pin(sleep_until(limits.deadline.min(last_piece + limits.idle)));
        // An engine says 500 of itself or of a request that it cannot cope with: who knows.
        let sound = !status.is_server_error();
        let watch = Watch::new(headers);
        let mut relay = Self { body, watch, lease, account, sound, limits, last_piece, alarm };
        if relay.body.is_over() {
            relay.complete();
        }
        relay
    }

    fn complete(&mut self) {
        if let Some(mut lease) = self.lease.take() {
            if let Watch::Events(scanner) = &mut self.watch {
                lease.progress(scanner.finish());
            }
            lease.complete(self.watch.usage());
            if self.sound {
                lease.succeeded();
            }
        }
        self.account.settle();
    }

    fn fail(&mut self, broke: Broke, error: &io::Error) {
        if let Some(lease) = self.lease.take() {
            match broke {
                Broke::Engine(kind) => lease.failed(kind),
                Broke::Deadline => {
                    lease.gateway().metrics.note_failure(&lease.worker.url, FailureKind::timeout)
                }
            }
            tracing::debug!(worker = %lease.worker.url, %error, "an answer broke after it had begun");
        }
        self.account.settle();
    }

    /// Whether the answer has been silent for too long, or takes too long as a whole.
    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<(Broke, &'static str)> {
        while self.alarm.as_mut().poll(cx).is_ready() {
            let (now, silent_until) = (Instant::now(), self.last_piece + self.limits.idle);
            if now >= self.limits.deadline {
                return Poll::Ready((Broke::Deadline, "the request took too long"));
            }
            if now >= silent_until {
                let why = "the worker was silent for too long";
                return Poll::Ready((Broke::Engine(FailureKind::timeout), why));
            }
            self.alarm.as_mut().reset(silent_until.min(self.limits.deadline));
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
        match this.body.poll_piece(cx) {
            Poll::Ready(Some(Ok(piece))) => {
                this.last_piece = Instant::now();
                if let Some(lease) = &mut this.lease {
                    match this.watch.see(&piece) {
                        Seen::Tokens(tokens) => lease.progress(tokens),
                        Seen::Beginning => lease.begin(),
                        Seen::Nothing => {}
                    }
                }
                if this.body.is_done() {
                    this.complete();
                }
                Poll::Ready(Some(Ok(Frame::data(piece))))
            }
            Poll::Ready(Some(Err(error))) => {
                this.fail(Broke::Engine(FailureKind::mid_stream), &error);
                Poll::Ready(Some(Err(error)))
            }
            Poll::Ready(None) => {
                this.complete();
                Poll::Ready(None)
            }
            Poll::Pending => match this.poll_late(cx) {
                Poll::Ready((broke, why)) => {
                    let error = io::Error::new(io::ErrorKind::TimedOut, why);
                    this.fail(broke, &error);
                    Poll::Ready(Some(Err(error)))
                }
                Poll::Pending => Poll::Pending,
            },
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_done() && self.lease.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.len().map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

// === impl Watch ===

impl Watch {
    fn new(headers: &HeaderMap) -> Self {
        let is = |kind: &str| {
            let value =
                headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
            value.get(..kind.len()).is_some_and(|start| start.eq_ignore_ascii_case(kind))
        };
        if is("text/event-stream") {
            Self::Events(Box::new(SseScanner::new()))
        } else if is("application/json") {
            Self::Json { tail: Vec::new(), begun: false }
        } else {
            Self::Opaque { begun: false }
        }
    }

    /// Looks at a piece.
    fn see(&mut self, piece: &[u8]) -> Seen {
        let beginning =
            |begun: &mut bool| if std::mem::replace(begun, true) { Seen::Nothing } else { Seen::Beginning };
        match self {
            Self::Events(scanner) => Seen::Tokens(scanner.push(piece)),
            Self::Json { tail, begun } => {
                let keep = TAIL_BYTES.saturating_sub(piece.len()).min(tail.len());
                tail.drain(..tail.len() - keep);
                tail.extend_from_slice(&piece[piece.len().saturating_sub(TAIL_BYTES)..]);
                beginning(begun)
            }
            Self::Opaque { begun } => beginning(begun),
        }
    }

    fn usage(&self) -> Option<Usage> {
        match self {
            Self::Events(scanner) => scanner.usage(),
            Self::Json { tail, .. } => usage_in_json(tail),
            Self::Opaque { .. } => None,
        }
    }
}
