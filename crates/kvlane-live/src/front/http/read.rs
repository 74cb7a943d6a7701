//! Reads a request body whole, within its limits of size and time.

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::timeout;

use super::error::ApiError;
use crate::config;

/// How much of a body that is too large is read and thrown away, so that its sender gets to see why.
const REFUSED_BYTES_MAX: u64 = 256 << 20;

/// The body, in one piece.
pub(super) async fn body(config: &config::Server, headers: &HeaderMap, body: &mut Incoming) -> Result<Bytes, ApiError> {
    match timeout(config.body_timeout, collect(config.max_payload_size, headers, body)).await {
        Ok(read) => read,
        Err(_) => Err(ApiError::BodyTimeout(config.body_timeout)),
    }
}

async fn collect(limit: usize, headers: &HeaderMap, body: &mut Incoming) -> Result<Bytes, ApiError> {
    let broken = |error: hyper::Error| ApiError::BodyBroken(error.to_string());
    let announced = body.size_hint().exact().or_else(|| headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse().ok());
    if announced.is_some_and(|len| len > limit as u64) {
        return Err(refuse(limit, body).await);
    }
    let mut first = Bytes::new();
    while first.is_empty() {
        match body.frame().await {
            None => return Ok(first),
            Some(frame) => first = frame.map_err(broken)?.into_data().unwrap_or_default(),
        }
    }
    if body.is_end_stream() || announced == Some(first.len() as u64) {
        return Ok(first);
    }
    let mut whole = BytesMut::with_capacity(announced.map_or(first.len() * 2, |len| len as usize).min(limit));
    whole.extend_from_slice(&first);
    drop(first);
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(broken)?.into_data() else { continue };
        if whole.len() + data.len() > limit {
            return Err(refuse(limit, body).await);
        }
        whole.extend_from_slice(&data);
    }
    Ok(whole.freeze())
}

/// A client that is still sending would not read an answer, and would lose it when the connection closes.
async fn refuse(limit: usize, body: &mut Incoming) -> ApiError {
    let mut thrown_away = 0;
    while let Some(Ok(frame)) = body.frame().await {
        thrown_away += frame.data_ref().map_or(0, |data| data.len() as u64);
        if thrown_away > REFUSED_BYTES_MAX {
            break;
        }
    }
    ApiError::TooLarge { limit }
}
