//! The body of a response, as it arrives.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;

use super::head::Framing;
use super::http2::Http2Body;
use super::idle::IdleConnections;
use crate::tls::Stream;
use crate::upstream::UpstreamId;

/// Buffer of one read. An engine's event has about 200 bytes, an answer a few kilobytes.
pub(super) const READ_BYTES: usize = 16 << 10;
/// A connection that the upstream has switched to another protocol.
pub struct Switched {
    /// The connection.
    pub stream: Stream,
    /// Bytes of that protocol that arrived with the response's head.
    pub ahead: Bytes,
}

/// The body of a response, as it arrives.
pub struct AnswerBody {
    /// A piece that was read ahead and is returned first.
    first: Option<Bytes>,
    source: Source,
}

/// Where a body comes from.
pub(super) enum Source {
    /// A connection of its own.
    Http1(Http1Body),
    /// A stream of a shared connection.
    Http2(Box<Http2Body>),
}

/// The body of an HTTP/1.1 response.
pub(super) struct Http1Body {
    /// None once the connection is back in the pool.
    pub(super) stream: Option<Stream>,
    pub(super) buffer: BytesMut,
    pub(super) framing: Framing,
    pub(super) reusable: bool,
    pub(super) home: Arc<IdleConnections>,
    pub(super) upstream: UpstreamId,
}

// === impl AnswerBody ===

impl AnswerBody {
    pub(super) fn of(source: Source) -> Self {
        Self { first: None, source }
    }

    /// Closes the connection, or the stream of a shared one, so that the upstream stops sending.
    pub fn close(&mut self) {
        match &mut self.source {
            Source::Http1(body) => body.stream = None,
            Source::Http2(body) => body.close(),
        }
    }

    /// The connection of a 101 response.
    pub fn switch(self) -> Option<Switched> {
        match self.source {
            Source::Http1(body) => Some(Switched { stream: body.stream?, ahead: body.buffer.freeze() }),
            Source::Http2(_) => None,
        }
    }

    /// Whether the whole body has been returned.
    pub fn is_done(&self) -> bool {
        let is_done = match &self.source {
            Source::Http1(body) => body.is_done(),
            Source::Http2(body) => body.is_done(),
        };
        is_done && self.first.is_none()
    }

    /// Whether the body is empty or complete; if so, returns the connection to the pool.
    pub fn is_over(&mut self) -> bool {
        if let Source::Http1(body) = &mut self.source
            && body.is_done()
            && self.first.is_none()
        {
            body.give_back();
        }
        self.is_done()
    }

    /// Bytes still to come, if known.
    pub fn bytes_left(&self) -> Option<u64> {
        let first = self.first.as_ref().map_or(0, Bytes::len) as u64;
        match &self.source {
            Source::Http1(body) => body.bytes_left().map(|left| first + left),
            Source::Http2(body) => body.is_done().then_some(first),
        }
    }

    /// Takes the trailers of a body that has ended, if it has any.
    pub fn take_trailers(&mut self) -> Option<HeaderMap> {
        match &mut self.source {
            Source::Http1(_) => None,
            Source::Http2(body) => body.take_trailers(),
        }
    }

    /// Waits for a piece and appends it to the pieces read ahead: returns all of them, or nothing at the body's end. They
    /// remain the next piece of the body.
    ///
    /// # Errors
    /// The connection broke.
    pub async fn wait_for_more(&mut self) -> io::Result<Option<&Bytes>> {
        let before = self.first.take();
        let more = poll_fn(|cx| self.poll_piece(cx)).await.transpose();
        let ended = matches!(more, Ok(None));
        self.first = match (before, more?) {
            (Some(before), Some(more)) => Some([before, more].concat().into()),
            (before, more) => before.or(more),
        };
        Ok(self.first.as_ref().filter(|_| !ended))
    }

    /// The next piece of the body; `None` at its end.
    pub fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(first)));
        }
        match &mut self.source {
            Source::Http1(body) => body.poll_piece(cx),
            Source::Http2(body) => body.poll_piece(cx),
        }
    }
}

// === impl Http1Body ===

impl Http1Body {
    pub(super) fn is_done(&self) -> bool {
        self.framing == Framing::Done
    }

    fn bytes_left(&self) -> Option<u64> {
        match self.framing {
            Framing::Length { left } => Some(left),
            Framing::Done => Some(0),
            Framing::Chunked(_) | Framing::UntilClose => None,
        }
    }

    fn poll_piece(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        loop {
            if !self.buffer.is_empty()
                && let Some(piece) = self.take_piece().transpose()
            {
                if self.is_done() {
                    self.give_back();
                }
                return Poll::Ready(Some(piece));
            }
            if self.is_done() {
                self.give_back();
                return Poll::Ready(None);
            }
            match ready!(self.poll_read(cx)) {
                Ok(0) if self.framing == Framing::UntilClose => self.framing = Framing::Done,
                Ok(0) => {
                    let cut = io::Error::new(
                        io::ErrorKind::UnexpectedEof,
                        "the upstream closed the connection before the end of the body",
                    );
                    return Poll::Ready(Some(Err(cut)));
                }
                Ok(_) => {}
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
    }

    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let Some(stream) = &mut self.stream else { return Poll::Ready(Ok(0)) };
        self.buffer.reserve(READ_BYTES);
        tokio_util::io::poll_read_buf(Pin::new(stream), cx, &mut self.buffer)
    }

    /// The part of the body that is in the buffer.
    pub(super) fn take_piece(&mut self) -> io::Result<Option<Bytes>> {
        let piece = match &mut self.framing {
            Framing::Length { left } => {
                let take = usize::try_from(*left).unwrap_or(usize::MAX).min(self.buffer.len());
                *left -= take as u64;
                if *left == 0 {
                    self.framing = Framing::Done;
                }
                self.buffer.split_to(take)
            }
            Framing::Chunked(chunked) => {
                let (read, data) = chunked.decode(&mut self.buffer).map_err(io::Error::other)?;
                if chunked.is_done() {
                    self.framing = Framing::Done;
                }
                let mut piece = self.buffer.split_to(read);
                piece.truncate(data);
                piece
            }
            Framing::UntilClose => self.buffer.split(),
            Framing::Done => {
                self.buffer.clear();
                return Ok(None);
            }
        };
        Ok((!piece.is_empty()).then(|| piece.freeze()))
    }

    /// The response is complete: returns the connection to the pool, unless more bytes arrived than were announced.
    fn give_back(&mut self) {
        if let Some(stream) = self.stream.take()
            && self.reusable
            && self.buffer.is_empty()
        {
            self.home.put(self.upstream, stream);
        }
    }
}
