//! gRPC calls of clients: relayed like other requests, with another way to say how a call ended.
//!
//! A call is a POST over HTTP/2 whose answer has status 200, whatever happened. How it ended is in its trailers, or in its
//! head if there is no message.

use std::io;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Response, StatusCode, Version, header};
use http_body::Frame;
use kvlane_http::address::Protocol;
use kvlane_http::connections::Answer;
use kvlane_wire::engine::calls::SERVICE_PATH;
use kvlane_wire::failure::{Fault, fault};
use kvlane_wire::grpc::{CONTENT_TYPE, MESSAGE_FIELD, STATUS_FIELD, Status, encode_message};

use crate::body::Body;

/// What the requests of a path are sent in.
pub(super) fn protocol_of(path: &str) -> Protocol {
    if path.starts_with(SERVICE_PATH) { Protocol::Grpc } else { Protocol::Http }
}

/// Whether a request is a gRPC call.
pub(super) fn is_call(parts: &Parts) -> bool {
    let is_grpc = |kind: &HeaderValue| {
        let rest = kind.as_bytes().strip_prefix(CONTENT_TYPE.as_bytes());
        rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')))
    };
    parts.version == Version::HTTP_2 && parts.headers.get(header::CONTENT_TYPE).is_some_and(is_grpc)
}

/// How a call ended by the head or the trailers of its answer; none if they do not say.
pub(super) fn status_in(fields: &HeaderMap) -> Option<Status> {
    fields.get(STATUS_FIELD).map(|value| Status::read(value.as_bytes()))
}

/// Whose fault it is that a call ended as these fields say; none if it ended well.
pub(super) fn fault_in(fields: &HeaderMap) -> Option<Fault> {
    let said = fields.get(MESSAGE_FIELD).map_or(&[][..], HeaderValue::as_bytes);
    match status_in(fields)? {
        Status::Ok => None,
        Status::Unknown | Status::Internal | Status::DataLoss => Some(fault(said)),
        Status::Unavailable | Status::ResourceExhausted => Some(Fault::Unknown),
        _ => Some(Fault::Client),
    }
}

/// Whether an answer with this head is one to a call.
pub(super) fn is_answer(head: &HeaderMap) -> bool {
    head.get(header::CONTENT_TYPE).is_some_and(|kind| kind.as_bytes().starts_with(CONTENT_TYPE.as_bytes()))
}

/// Waits for the first message of an answer. If it ends without one, its head says how, as if it had come so. Returns whose
/// fault that is; none if it is well, or if its engine is only busy.
pub(super) async fn begin(answer: &mut Answer) -> io::Result<Option<Fault>> {
    if status_in(&answer.headers).is_none() && answer.body.wait_for_more().await?.is_none() {
        answer.headers.extend(answer.body.take_trailers().unwrap_or_default());
    }
    Ok(match status_in(&answer.headers) {
        Some(Status::Unavailable | Status::ResourceExhausted) => None,
        _ => fault_in(&answer.headers),
    })
}

/// The status of HTTP that stands for an answer with this status and these fields of its head.
pub(super) fn status_of(status: StatusCode, head: &HeaderMap) -> StatusCode {
    let ended = status_in(head);
    ended.and_then(|ended| StatusCode::from_u16(ended.as_http()).ok()).unwrap_or(status)
}

/// Says how a call ended.
fn put_end(fields: &mut HeaderMap, status: Status, message: &str) {
    fields.insert(STATUS_FIELD, (status as u16).into());
    if let Ok(message) = HeaderValue::try_from(encode_message(message)) {
        fields.insert(MESSAGE_FIELD, message);
    }
}

/// The end of an answer that breaks off.
pub(super) fn broken_off(message: &str) -> Frame<Bytes> {
    let mut trailers = HeaderMap::with_capacity(2);
    put_end(&mut trailers, Status::Unavailable, message);
    Frame::trailers(trailers)
}

/// The answer to a call that fails with this status of HTTP.
pub(super) fn failed(status: StatusCode, message: &str) -> Response<Body> {
    let mut response = Response::new(Body::Whole(None));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE));
    put_end(response.headers_mut(), Status::of_http(status.as_u16()), message);
    response
}
