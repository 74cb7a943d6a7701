//! The body of a request: whole, or piece by piece.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::request::Parts;
use kvlane_http::connections::chunked::Chunked;
use kvlane_http::connections::upload::{PIECE_BYTES, Unwanted};
use tokio::io::AsyncWrite as _;
use tokio::time::timeout;
use tokio_util::io::poll_read_buf;

use super::client::Client;
use crate::error::ApiError;
use crate::form::{Beginning, Limits};
use crate::head::{Framing, compact};
use crate::memory::Held;
use crate::read::{Begun, Source, make_room, room};
use crate::streamed::{Intake, Next};

/// How often a client is looked at while its body is not read.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The body of the current request.
pub(super) struct Incoming<'a> {
    pub(super) client: &'a mut Client,
    pub(super) framing: Framing,
    pub(super) left: &'a mut Left,
    pub(super) coming: &'a mut PendingInput,
}

/// What is still to come of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum PendingInput {
    Nothing,
    /// The client waits for `100 Continue`.
    Waits,
    Body,
}

/// What is left of a body that is read piece by piece.
#[derive(Clone, Copy)]
pub(super) enum Left {
    Length(u64),
    Chunks(Chunked),
}

// === impl Client ===

impl Client {
    /// The whole body of a request with this length.
    async fn body(
        &mut self,
        length: u64,
        parts: &mut Parts,
        limit: usize,
        held: &mut Held,
        coming: &mut PendingInput,
    ) -> Result<Bytes, ApiError> {
        let Some(length) = usize::try_from(length).ok().filter(|length| *length <= limit) else {
            return Err(ApiError::TooLarge { limit });
        };
        if self.buffer.len() >= length || self.buffer.capacity() >= length {
            while self.buffer.len() < length {
                room(held, self.buffer.len())?;
                self.go_ahead(coming).await?;
                come(poll_fn(|cx| self.poll_fill(cx)).await)?;
            }
            room(held, length)?;
            return Ok(self.buffer.split_to(length).freeze());
        }
        compact(parts);
        let begun = std::mem::take(&mut self.buffer);
        let mut whole = BytesMut::new();
        make_room(&mut whole, begun.len(), length, held)?;
        whole.extend_from_slice(&begun);
        drop(begun);
        while whole.len() < length {
            self.go_ahead(coming).await?;
            make_room(&mut whole, 1, length, held)?;
            let left = length - whole.len();
            let mut rest = (&mut whole).limit(left);
            come(poll_fn(|cx| poll_read_buf(Pin::new(&mut self.socket), cx, &mut rest)).await)?;
        }
        Ok(whole.freeze())
    }

    /// The whole body of a chunked request.
    async fn chunks(
        &mut self,
        parts: &mut Parts,
        limit: usize,
        held: &mut Held,
        coming: &mut PendingInput,
    ) -> Result<Bytes, ApiError> {
        compact(parts);
        let (mut chunked, mut whole) = (Chunked::start(), BytesMut::new());
        loop {
            let decoded = chunked.decode(&mut self.buffer);
            let (read, data) = decoded.map_err(|error| ApiError::BodyBroken(error.to_string()))?;
            if whole.len() + data > limit {
                return Err(ApiError::TooLarge { limit });
            }
            make_room(&mut whole, data, limit, held)?;
            whole.extend_from_slice(&self.buffer[..data]);
            self.buffer.advance(read);
            if chunked.is_done() {
                return Ok(whole.freeze());
            }
            self.buffer = BytesMut::new();
            self.go_ahead(coming).await?;
            come(poll_fn(|cx| self.poll_fill(cx)).await)?;
        }
    }

    /// The next piece of a body; none at its end.
    async fn piece(&mut self, left: &mut Left, coming: &mut PendingInput) -> Result<Option<Bytes>, ApiError> {
        loop {
            if matches!(left, Left::Length(0)) {
                return Ok(None);
            }
            if self.buffer.is_empty() {
                self.go_ahead(coming).await?;
                // With room of its own: the pieces before are still on their way.
                self.buffer = BytesMut::with_capacity(PIECE_BYTES);
                come(poll_fn(|cx| self.poll_fill(cx)).await)?;
            }
            let there = self.buffer.len().min(PIECE_BYTES);
            match left {
                Left::Length(length) => {
                    let there = usize::try_from(*length).unwrap_or(usize::MAX).min(there);
                    *length -= there as u64;
                    return Ok(Some(self.buffer.split_to(there).freeze()));
                }
                Left::Chunks(chunked) => {
                    let decoded = chunked.decode(&mut self.buffer[..there]);
                    let (read, data) = decoded.map_err(|error| ApiError::BodyBroken(error.to_string()))?;
                    let mut piece = self.buffer.split_to(read);
                    piece.truncate(data);
                    if chunked.is_done() {
                        *left = Left::Length(0);
                    }
                    if data > 0 {
                        return Ok(Some(piece.freeze()));
                    }
                }
            }
        }
    }

    /// Passes a body on while its request is answered; returns when the client has disconnected.
    pub(super) async fn pass_on(&mut self, mut intake: Intake, left: &mut Left, coming: &mut PendingInput) {
        loop {
            match timeout(LOOK_EVERY, intake.room()).await {
                Ok(Ok(())) => {}
                Ok(Err(Unwanted)) => break,
                // What it has sent is not read meanwhile, and so neither is that nothing follows.
                Err(_) if self.socket.has_left() => return,
                Err(_) => continue,
            }
            let piece = timeout(intake.within, self.piece(left, coming)).await;
            match intake.take(piece.unwrap_or(Err(ApiError::BodyTimeout(intake.within)))).await {
                Next::Read => continue,
                Next::Complete => *coming = PendingInput::Nothing,
                Next::Stop => {}
            }
            break;
        }
        poll_fn(|cx| self.poll_gone(cx)).await;
    }

    /// Sends `100 Continue` to a client that waits for it.
    async fn go_ahead(&mut self, coming: &mut PendingInput) -> Result<(), ApiError> {
        if *coming == PendingInput::Waits {
            *coming = PendingInput::Body;
            self.out.flat.extend_from_slice(b"HTTP/1.1 100 Continue\r\n\r\n");
            while !self.out.is_empty() {
                let written = poll_fn(|cx| self.out.poll_write(&mut self.socket, cx)).await;
                written.map_err(|error| ApiError::BodyBroken(error.to_string()))?;
            }
            let _ = poll_fn(|cx| Pin::new(&mut self.socket).poll_flush(cx)).await;
        }
        Ok(())
    }
}

// === impl Incoming ===

impl Source for Incoming<'_> {
    async fn whole(self, parts: &mut Parts, limit: usize, held: &mut Held) -> Result<Bytes, ApiError> {
        let Self { client, framing, coming, .. } = self;
        let whole = match framing {
            Framing::Length(length) => client.body(length, parts, limit, held, coming).await?,
            Framing::Chunked => client.chunks(parts, limit, held, coming).await?,
        };
        *coming = PendingInput::Nothing;
        client.held.release();
        Ok(whole)
    }

    async fn begin(
        self,
        parts: &mut Parts,
        begun: &mut Beginning,
        limits: &Limits,
        held: &mut Held,
    ) -> Result<Begun, ApiError> {
        let Self { client, framing, left, coming } = self;
        let length = match framing {
            Framing::Length(length) => Some(length),
            Framing::Chunked => None,
        };
        if length.is_some_and(|length| length > limits.upload_bytes) {
            return Err(ApiError::UploadTooLarge { limit: limits.upload_bytes });
        }
        compact(parts);
        let (most, mut first) = (limits.most_held(length), BytesMut::new());
        while !begun.is_enough(first.len(), length, limits) {
            let Some(piece) = client.piece(left, coming).await? else {
                *coming = PendingInput::Nothing;
                client.held.release();
                return Ok(Begun::Whole(first.freeze()));
            };
            make_room(&mut first, piece.len(), most, held)?;
            begun.push(&piece);
            first.extend_from_slice(&piece);
        }
        client.held.release();
        Ok(Begun::Part(first.freeze(), length))
    }
}

/// Whether more of a body has arrived.
fn come(read: io::Result<usize>) -> Result<(), ApiError> {
    match read {
        Ok(0) => Err(ApiError::BodyBroken("the client closed the connection".into())),
        Ok(_) => Ok(()),
        Err(error) => Err(ApiError::BodyBroken(error.to_string())),
    }
}
