//! Reads a request body whole, within its limits of size and time.

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::timeout;

use super::deadlines::Deadlines;
use super::error::ApiError;
use crate::gateway::Gateway;

/// The least room for a body that does not come at once.
const ROOM_MIN: usize = 4 << 10;
/// How much of a body that is too large is read and thrown away, so that its sender gets to see why.
const REFUSED_BYTES_MAX: u64 = 256 << 20;

/// The body of a request to `path`, in one piece.
pub(super) async fn body(
    gateway: &Gateway,
    path: &str,
    headers: &HeaderMap,
    body: &mut Incoming,
) -> Result<Bytes, ApiError> {
    let (within, bytes_max) = {
        let config = gateway.config();
        (Deadlines::of(&config, path).body, config.server.max_payload_size)
    };
    let read = timeout(within, collect(bytes_max, body)).await;
    let read = read.unwrap_or(Err(ApiError::BodyTimeout(within)));
    let waits = headers.contains_key(header::EXPECT) && body.size_hint().exact().is_some();
    if matches!(read, Err(ApiError::TooLarge { .. })) && !waits {
        // A client that is still sending would not read an answer, and would lose it when the connection closes. One
        // that announced too much and waits for a go-ahead has sent nothing.
        let _ = timeout(within, throw_away(body)).await;
    }
    read
}

async fn collect(limit: usize, body: &mut Incoming) -> Result<Bytes, ApiError> {
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
    if first.len() <= limit && (body.is_end_stream() || announced == Some(first.len() as u64)) {
        return Ok(first);
    }
    let mut whole = BytesMut::new();
    let most = announced.map_or(limit, |len| len as usize).min(limit);
    let mut next = first;
    loop {
        if whole.len() + next.len() > limit {
            return Err(ApiError::TooLarge { limit });
        }
        if whole.capacity() < whole.len() + next.len() {
            whole.reserve(room_for(whole.len() + next.len(), most) - whole.len());
        }
        whole.extend_from_slice(&next);
        next = match body.frame().await {
            None => return Ok(whole.freeze()),
            Some(frame) => frame.map_err(broken)?.into_data().unwrap_or_default(),
        };
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
