//! gRPC calls that abort requests, which any engine may have.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, header};
use http_body_util::{BodyExt, Full};
use kvlane_fleet::worker::Worker;
use kvlane_http::address::Protocol;
use kvlane_http::client::ask_http2;
use kvlane_http::connections::Connections;
use kvlane_wire::engine::calls::ABORT_PATH;
use kvlane_wire::grpc::{CONTENT_TYPE, MESSAGE_FIELD, STATUS_FIELD, Status};
use tokio::task::JoinSet;

use crate::account::Account;
use crate::admission::no_endpoint;
use crate::body::Body;
use crate::error::ApiError;
use crate::grpc::status_in;
use crate::proxy::Proxy;

/// Most engines that are told to abort requests.
const ABORTS_MAX: usize = 256;
/// Largest answer to that.
const ABORT_BYTES_MAX: usize = 64 << 10;

/// Tells every engine to abort the requests that a call names: an engine ignores ids that it does not know.
///
/// # Errors
/// No engine speaks gRPC, or none answered.
pub(super) async fn abort(
    proxy: &Arc<Proxy>,
    upstreams: &Arc<Connections>,
    body: &Bytes,
    account: &Account,
) -> Result<Response<Body>, ApiError> {
    if proxy.settings().auth.isolate_tenants {
        return Err(ApiError::NotIsolated(ABORT_PATH));
    }
    let mut asked = JoinSet::new();
    let speaks =
        |worker: &&Arc<Worker>| worker.upstream.address.protocol == Protocol::Grpc && !worker.is_down();
    let workers: Vec<_> = proxy.fleet.workers().values().filter(speaks).take(ABORTS_MAX).cloned().collect();
    for worker in workers {
        let (upstreams, body) = (Arc::clone(upstreams), body.clone());
        let limits = (proxy.settings().probe_interval, ABORT_BYTES_MAX);
        asked.spawn(async move { ask_http2(&upstreams, &worker.upstream, ABORT_PATH, &body, limits).await });
    }
    let mut last = None;
    while let Some(answered) = asked.join_next().await {
        let Ok(Ok((fields, message))) = answered else { continue };
        let is_good = status_in(&fields) == Some(Status::Ok);
        if is_good || last.is_none() {
            last = Some((fields, message));
        }
    }
    let (fields, message) = last.ok_or_else(|| no_endpoint(proxy, String::new()))?;
    account.settle();
    Ok(whole(&fields, message))
}

/// An answer whose messages have all come.
fn whole(fields: &HeaderMap, messages: Bytes) -> Response<Body> {
    let mut trailers = HeaderMap::with_capacity(2);
    for name in [STATUS_FIELD, MESSAGE_FIELD] {
        trailers.extend(fields.get(name).map(|value| (header::HeaderName::from_static(name), value.clone())));
    }
    let body = Full::new(messages).with_trailers(async { Some(Ok(trailers)) });
    let mut response = Response::new(Body::Relay(Box::pin(body.map_err(|never| match never {}))));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(CONTENT_TYPE));
    response
}
