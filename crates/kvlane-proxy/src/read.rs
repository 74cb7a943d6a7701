//! Reads a request body whole, within its limits of size and time.

use bytes::{Bytes, BytesMut};
use http::request::Parts;
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::timeout;

use crate::deadlines::Deadlines;
use crate::error::ApiError;
use crate::memory::Held;
use crate::proxy::Proxy;

/// The least room for a body that does not come at once.
const ROOM_MIN: usize = 1 << 10;
/// How much of a body that is refused is read and thrown away, so that its sender gets to see why.
pub(super) const REFUSED_BYTES_MAX: u64 = 256 << 20;

/// Where a body comes from.
pub(super) trait Source: Send {
    /// All of it, in one piece. `held` holds the memory that it takes; `parts` is made to take little, where it would keep more.
    fn whole(
        self,
        parts: &mut Parts,
        limit: usize,
        held: &mut Held,
    ) -> impl Future<Output = Result<Bytes, ApiError>> + Send;
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

/// Has a body hold so many bytes.
pub(super) fn room(held: &mut Held, bytes: usize) -> Result<(), ApiError> {
    if held.grow_to(bytes) { Ok(()) } else { Err(ApiError::NoMemory) }
}

/// Makes room for `more` bytes behind those that have come, of a body that may have `most`.
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

/// Room for a body of which `come` bytes have come and which may have `most`: four times that, so that what is announced takes no
/// memory before it comes, and few bytes are moved.
fn room_for(come: usize, most: usize) -> usize {
    come.saturating_mul(4).max(ROOM_MIN).min(most).max(come)
}

/// Of a stream of HTTP/2.
impl Source for &mut Incoming {
    async fn whole(self, _: &mut Parts, limit: usize, held: &mut Held) -> Result<Bytes, ApiError> {
        let read = collect(limit, held, self).await;
        if matches!(read, Err(ApiError::TooLarge { .. } | ApiError::NoMemory)) {
            // A client that is still sending might not read an answer.
            throw_away(self).await;
        }
        read
    }
}

async fn collect(limit: usize, held: &mut Held, body: &mut Incoming) -> Result<Bytes, ApiError> {
    let announced = body.size_hint().exact();
    if announced.is_some_and(|len| len > limit as u64) {
        return Err(ApiError::TooLarge { limit });
    }
    let most = announced.map_or(limit, |len| len as usize);
    let mut whole = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| ApiError::BodyBroken(error.to_string()))?;
        let piece = frame.into_data().unwrap_or_default();
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
    fn what_is_announced_takes_no_memory_before_it_comes() {
        assert_eq!(room_for(1, 64 << 20), ROOM_MIN);
        assert_eq!(room_for(1, 10), 10, "no more than is announced");
        assert_eq!(room_for(1 << 20, 64 << 20), 4 << 20);
        assert_eq!(room_for(20 << 20, 64 << 20), 64 << 20);
        assert_eq!(room_for(7, 3), 7, "what has come has room");
    }
}
