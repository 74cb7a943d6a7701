//! Reads a request body whole, within its limits of size and time; or its beginning, if it is a large form.

use bytes::{Bytes, BytesMut};
use http::request::Parts;
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::timeout;

use crate::deadlines::Deadlines;
use crate::error::ApiError;
use crate::form::{Beginning, Limits};
use crate::memory::Held;
use crate::proxy::Proxy;

/// Smallest buffer for a body that does not arrive at once.
const ROOM_MIN: usize = 1 << 10;
/// Bytes of a rejected body that are read and discarded, so that its sender receives the response.
pub(super) const REFUSED_BYTES_MAX: u64 = 256 << 20;

/// A source of a body.
pub(super) trait Source: Send {
    /// The whole body, in one piece. `held` accounts for its memory; `parts` is compacted where it would keep more
    /// memory alive.
    fn whole(
        self,
        parts: &mut Parts,
        limit: usize,
        held: &mut Held,
    ) -> impl Future<Output = Result<Bytes, ApiError>> + Send;

    /// The beginning of a form, which ends once `begun` says that it is enough; or all of it, as here.
    fn begin(
        self,
        parts: &mut Parts,
        begun: &mut Beginning,
        limits: &Limits,
        held: &mut Held,
    ) -> impl Future<Output = Result<Begun, ApiError>> + Send
    where
        Self: Sized,
    {
        let _ = begun;
        async { self.whole(parts, limits.payload_bytes, held).await.map(Begun::Whole) }
    }
}

/// A form that has begun to arrive.
pub(super) enum Begun {
    /// All of it.
    Whole(Bytes),
    /// Its beginning, and the length of the whole if it is known.
    Part(Bytes, Option<u64>),
}

/// The body of a request, in one piece.
pub(super) async fn body(proxy: &Proxy, parts: &mut Parts, body: impl Source) -> Result<Bytes, ApiError> {
    let (within, bytes_max) = {
        let config = proxy.settings();
        (Deadlines::of(&config, parts.uri.path()).body, config.server.max_payload_size)
    };
    let mut held = proxy.memory.share();
    let read = timeout(within, body.whole(parts, bytes_max, &mut held)).await;
    read.unwrap_or(Err(ApiError::BodyTimeout(within))).map(|body| held.with(body))
}

/// Accounts for this many bytes of a body.
pub(super) fn room(held: &mut Held, bytes: usize) -> Result<(), ApiError> {
    if held.grow_to(bytes) { Ok(()) } else { Err(ApiError::NoMemory) }
}

/// Makes room for `more` bytes after those received, of a body of at most `most` bytes.
pub(super) fn make_room(
    whole: &mut BytesMut,
    more: usize,
    most: usize,
    held: &mut Held,
) -> Result<(), ApiError> {
    let come = whole.len() + more;
    if whole.capacity() < come {
        let bytes = room_for(come, most);
        room(held, bytes)?;
        whole.reserve(bytes - whole.len());
    }
    Ok(())
}

/// Buffer size for a body of which `come` bytes have arrived, of at most `most`: four times `come`, so that announced
/// bytes take no memory before they arrive, and few bytes are moved.
fn room_for(come: usize, most: usize) -> usize {
    come.saturating_mul(4).max(ROOM_MIN).min(most).max(come)
}

/// The body of an HTTP/2 stream.
impl Source for &mut Incoming {
    async fn whole(self, _: &mut Parts, limit: usize, held: &mut Held) -> Result<Bytes, ApiError> {
        let read = collect(limit, held, self).await;
        if matches!(read, Err(ApiError::TooLarge { .. } | ApiError::NoMemory)) {
            // A client that is still sending might not read the response.
            throw_away(self).await;
        }
        read
    }

    async fn begin(
        self,
        _: &mut Parts,
        begun: &mut Beginning,
        limits: &Limits,
        held: &mut Held,
    ) -> Result<Begun, ApiError> {
        let length = self.size_hint().exact();
        if length.is_some_and(|length| length > limits.upload_bytes) {
            throw_away(self).await;
            return Err(ApiError::UploadTooLarge { limit: limits.upload_bytes });
        }
        let (most, mut first) = (limits.most_held(length), BytesMut::new());
        while !self.is_end_stream() {
            if begun.is_enough(first.len(), length, limits) {
                return Ok(Begun::Part(first.freeze(), length));
            }
            let Some(piece) = piece(self).await? else { break };
            // A frame is not cut: it may exceed what is held by its own length.
            make_room(&mut first, piece.len(), most, held)?;
            begun.push(&piece);
            first.extend_from_slice(&piece);
        }
        Ok(Begun::Whole(first.freeze()))
    }
}

/// The next data of the body of an HTTP/2 stream; none at its end.
pub(super) async fn piece(body: &mut Incoming) -> Result<Option<Bytes>, ApiError> {
    let Some(frame) = body.frame().await else { return Ok(None) };
    let frame = frame.map_err(|error| ApiError::BodyBroken(error.to_string()))?;
    Ok(Some(frame.into_data().unwrap_or_default()))
}

async fn collect(limit: usize, held: &mut Held, body: &mut Incoming) -> Result<Bytes, ApiError> {
    let announced = body.size_hint().exact();
    if announced.is_some_and(|len| len > limit as u64) {
        return Err(ApiError::TooLarge { limit });
    }
    let most = announced.map_or(limit, |len| len as usize);
    let mut whole = BytesMut::new();
    while let Some(piece) = piece(body).await? {
        if whole.len() + piece.len() > limit {
            return Err(ApiError::TooLarge { limit });
        }
        if whole.is_empty() && body.is_end_stream() {
            room(held, piece.len())?;
            return Ok(piece);
        }
        make_room(&mut whole, piece.len(), most, held)?;
        whole.extend_from_slice(&piece);
    }
    Ok(whole.freeze())
}

async fn throw_away(body: &mut Incoming) {
    let mut thrown_away = 0;
    while let Some(Ok(frame)) = body.frame().await {
        thrown_away += frame.data_ref().map_or(0, |data| data.len() as u64);
        if thrown_away > REFUSED_BYTES_MAX {
            break;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn announced_bytes_take_no_memory_before_they_arrive() {
        assert_eq!(room_for(1, 64 << 20), ROOM_MIN);
        assert_eq!(room_for(1, 10), 10, "no more than announced");
        assert_eq!(room_for(1 << 20, 64 << 20), 4 << 20);
        assert_eq!(room_for(20 << 20, 64 << 20), 64 << 20);
        assert_eq!(room_for(7, 3), 7, "received bytes have room");
    }
}
