//! A request's progress as server-sent events.
//!
//! Every part of an event except its token is rendered once per request, so a token costs three copies. All available
//! tokens are sent in one write.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::HttpBody;
use bytes::{Bytes, BytesMut};
use http::StatusCode;
use hyper::body::Frame;

use crate::answer::{Answer, NUMBERED_END, TokenEvent};
use crate::deaths::{ArrivalTime, Ending, Fate};
use crate::driver::{End, Progress, Ticket};
use crate::error::ApiError;
use crate::tokens;

/// Maximum events in one write, which bounds the memory for a slow reader.
const EVENTS_PER_WRITE_MAX: u32 = 256;

/// A streamed answer. Dropping it, as the server does when its client is gone, cancels the request.
pub(crate) struct Stream {
    ticket: Ticket,
    answer: Answer,
    event: TokenEvent,
    sent: u32,
    over: Over,
    buffer: BytesMut,
    fate: Arc<Fate>,
}

/// Whether more data follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    Not,
    /// The body ends here.
    Whole,
    /// No more data, until the connection ends, if it does.
    Silent,
}

// === impl Stream ===

impl Stream {
    /// If the engine dies, `fate` determines the rest of the stream.
    pub(crate) fn new(ticket: Ticket, answer: Answer, fate: Arc<Fate>) -> Self {
        let event = answer.token_event();
        Self { ticket, answer, event, sent: 0, over: Over::Not, buffer: BytesMut::new(), fate }
    }

    /// Renders tokens up to `until`.
    fn render(&mut self, until: u32, wrong: bool) {
        let (event, buffer) = (&self.event, &mut self.buffer);
        let words = self.answer.words(wrong);
        for index in self.sent..until {
            let tail = if index + 1 == self.answer.output_tokens { event.last_tail } else { event.tail };
            buffer.extend_from_slice(event.head.as_bytes());
            buffer.extend_from_slice(tokens::answer_word(words, index));
            buffer.extend_from_slice(tail.as_bytes());
            if let Some(first) = event.first_number {
                buffer.extend_from_slice(first.saturating_add(index).to_string().as_bytes());
                buffer.extend_from_slice(NUMBERED_END.as_bytes());
            }
        }
        self.sent = until;
    }

    /// Renders the data up to `progress`.
    fn advance(&mut self, progress: Progress) {
        if self.sent == 0 && progress.produced > 0 {
            self.buffer.extend_from_slice(self.answer.opening(progress).as_bytes());
        }
        self.render(progress.produced.min(self.sent.saturating_add(EVENTS_PER_WRITE_MAX)), progress.wrong);
        let Some(end) = progress.end else { return };
        if self.sent < progress.produced {
            return;
        }
        self.over = Over::Whole;
        match end {
            End::Finished => self.buffer.extend_from_slice(self.answer.closing(progress).as_bytes()),
            End::Rejected(why) => {
                self.buffer.extend_from_slice(self.answer.broken(&rejected(why)).as_bytes());
            }
            End::Failed => {
                self.buffer.extend_from_slice(self.answer.opening(progress).as_bytes());
                self.buffer.extend_from_slice(self.answer.broken(&not_transferred()).as_bytes());
            }
            End::Died(came) => self.die(came),
        }
    }

    /// Sends the recorded end of a stream of the engine whose death is replayed.
    fn die(&mut self, came: ArrivalTime) {
        let ending = self.fate.get().map(|dying| dying.record.ending(self.answer.shape, true, came));
        self.over = match ending {
            Some(Ending::Events { text, whole }) => {
                self.buffer.extend_from_slice(text.as_bytes());
                if *whole { Over::Whole } else { Over::Silent }
            }
            _ => Over::Silent,
        };
    }
}

impl HttpBody for Stream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = self.get_mut();
        match this.over {
            Over::Not => {}
            Over::Whole => return Poll::Ready(None),
            // Dropped when the client leaves, which the server sees by itself.
            Over::Silent => return Poll::Pending,
        }
        let progress = ready!(this.ticket.poll_progress(cx, this.sent));
        this.advance(progress);
        if this.buffer.is_empty() {
            return Pin::new(this).poll_frame(cx);
        }
        Poll::Ready(Some(Ok(Frame::data(this.buffer.split().freeze()))))
    }

    fn is_end_stream(&self) -> bool {
        self.over == Over::Whole
    }
}

/// vLLM's error for a request whose KV blocks did not arrive. It says no more.
pub(crate) fn not_transferred() -> ApiError {
    ApiError { status: StatusCode::INTERNAL_SERVER_ERROR, message: "Internal server error".into() }
}

/// The client's error for a request that the engine rejected.
pub(crate) fn rejected(why: &str) -> ApiError {
    ApiError {
        status: StatusCode::BAD_REQUEST,
        message: format!("the engine cannot run this request: {why}"),
    }
}
