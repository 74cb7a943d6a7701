//! Reads a request body whole, within its limits of size and time.

use bytes::{Bytes, BytesMut};
use http::request::Parts;
use http::{HeaderValue, header};
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::timeout;

use super::deadlines::Deadlines;
use super::error::ApiError;
use crate::gateway::Gateway;
use crate::memory::Held;

/// The least room for a body that does not come at once.
const ROOM_MIN: usize = 1 << 10;
/// How much of a body that is too large is read and thrown away, so that its sender gets to see why.
const REFUSED_BYTES_MAX: u64 = 256 << 20;

/// The body of a request, in one piece. While it comes in, its head takes no more memory than it needs.
pub(crate) async fn body(
    gateway: &Gateway,
    parts: &mut Parts,
    body: &mut Incoming,
) -> Result<Bytes, ApiError> {
    let (within, bytes_max) = {
        let config = gateway.config();
        (Deadlines::of(&config, parts.uri.path()).body, config.server.max_payload_size)
    };
    let mut held = gateway.memory.share();
    let read = timeout(within, collect(bytes_max, &mut held, parts, body)).await;
    let read = read.unwrap_or(Err(ApiError::BodyTimeout(within)));
    let waits = parts.headers.contains_key(header::EXPECT) && body.size_hint().exact().is_some();
    if matches!(read, Err(ApiError::TooLarge { .. } | ApiError::NoMemory)) && !waits {
        // A client that is still sending would not read an answer, and would lose it when the connection closes. One
        // that announced too much and waits for a go-ahead has sent nothing.
        let _ = timeout(within, throw_away(body)).await;
    }
    read.map(|body| held.with(body))
}

/// The whole body; `held` holds the memory that it takes.
async fn collect(
    limit: usize,
    held: &mut Held,
    parts: &mut Parts,
    body: &mut Incoming,
) -> Result<Bytes, ApiError> {
    let broken = |error: hyper::Error| ApiError::BodyBroken(error.to_string());
    let announced = body.size_hint().exact();
    if announced.is_some_and(|len| len > limit as u64) {
        return Err(ApiError::TooLarge { limit });
    }
    let mut first = Bytes::new();
    while first.is_empty() {
        match body.frame().await {
            None => return Ok(first),
            Some(frame) => first = frame.map_err(broken)?.into_data().unwrap_or_default(),
        }
    }
    let room = |held: &mut Held, bytes| if held.grow_to(bytes) { Ok(()) } else { Err(ApiError::NoMemory) };
    if first.len() <= limit && (body.is_end_stream() || announced == Some(first.len() as u64)) {
        room(held, first.len())?;
        return Ok(first);
    }
    compact(parts);
    let mut whole = BytesMut::new();
    let most = announced.map_or(limit, |len| len as usize).min(limit);
    let mut next = first;
    loop {
        if whole.len() + next.len() > limit {
            return Err(ApiError::TooLarge { limit });
        }
        if whole.capacity() < whole.len() + next.len() {
            let bytes = room_for(whole.len() + next.len(), most);
            room(held, bytes)?;
            whole.reserve(bytes - whole.len());
        }
        whole.extend_from_slice(&next);
        // hyper reads into the memory of this piece again, unless somebody has it.
        drop(next);
        next = match body.frame().await {
            None => return Ok(whole.freeze()),
            Some(frame) => frame.map_err(broken)?.into_data().unwrap_or_default(),
        };
    }
}

/// Gives a head memory of its own: as it comes it lies in the buffer of 8 KiB that hyper reads into, and keeps that from being
/// used again.
fn compact(parts: &mut Parts) {
    let mut room = BytesMut::with_capacity(parts.headers.values().map(HeaderValue::len).sum());
    for value in parts.headers.values_mut() {
        room.extend_from_slice(value.as_bytes());
        if let Ok(own) = HeaderValue::from_maybe_shared(room.split().freeze()) {
            *value = own;
        }
    }
    if let Ok(own) = parts.uri.to_string().parse() {
        parts.uri = own;
    }
}

/// Room for a body of which `come` bytes have come and which may have `most`: four times that, so that what is announced takes no
/// memory before it comes, and few bytes are moved.
fn room_for(come: usize, most: usize) -> usize {
    come.saturating_mul(4).max(ROOM_MIN).min(most).max(come)
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
