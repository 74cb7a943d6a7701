//! Finds an object that this gateway has not seen being made, by asking the engines for it.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Method, header};
use kvlane_fleet::objects::{Maker, ObjectKey, Origin};
use kvlane_fleet::worker::Worker;
use kvlane_http::address::Protocol;
use kvlane_http::client::{AskError, ask_with};
use kvlane_http::connections::Connections;
use kvlane_wire::api::object_ids::ID_BYTES_MAX;
use kvlane_wire::api::{EnginePath, Keeps};

use crate::error::ApiError;
use crate::objects::short;
use crate::passed;
use crate::proxy::Proxy;

/// Most workers that are asked for one object.
const ASKED_MAX: usize = 16;
/// Time that one worker may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);
/// Most bytes of an answer; one with more is of an object, too.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// Asks the workers in turn for the object that a request names, if it is not known here, and stores the origin of what is
/// found. With one worker there is nothing to find out.
///
/// # Errors
/// No worker that was asked has it.
pub(super) async fn seek(
    proxy: &Proxy,
    upstreams: &Arc<Connections>,
    row: Option<&EnginePath>,
    parts: &Parts,
    body: &[u8],
) -> Result<(), ApiError> {
    let Some(row) = row.filter(|row| row.keeps == Keeps::Object) else { return Ok(()) };
    let Some(id) = passed::object_of(row, parts, body) else { return Ok(()) };
    // Where tenants are isolated, an object of an unknown maker is nobody's.
    if proxy.settings().auth.isolate_tenants || proxy.fleet.objects.origin(&id).is_some() {
        return Ok(());
    }
    let mut workers = fit_workers(proxy);
    if workers.len() <= 1 {
        return Ok(());
    }
    let path = path_of(row, parts, &id).filter(|_| id.len() <= ID_BYTES_MAX);
    let mut unasked = workers.len().saturating_sub(ASKED_MAX);
    workers.truncate(ASKED_MAX);
    for worker in workers.iter().filter(|_| path.is_some()) {
        match has(proxy, upstreams, worker, parts, path.as_deref().unwrap_or_default()).await {
            Some(true) => {
                let origin = Origin::new(worker, Maker::Unknown);
                proxy.fleet.objects.note(ObjectKey::of(&id), origin);
                return Ok(());
            }
            Some(false) => {}
            None => unasked += 1,
        }
    }
    Err(ApiError::NotFoundAnywhere { id: short(&id), unasked })
}

/// The workers that have endpoints, each once, in the order of their ids.
pub(super) fn fit_workers(proxy: &Proxy) -> Vec<Arc<Worker>> {
    let mut workers: Vec<_> =
        proxy.fleet.snapshot().endpoints().map(|(_, endpoint)| Arc::clone(&endpoint.worker)).collect();
    workers.retain(|worker| worker.upstream.address.protocol == Protocol::Http);
    workers.sort_by_key(|worker| worker.id);
    workers.dedup_by_key(|worker| worker.id);
    workers
}

/// Where the object itself is, of whichever request: `/v1/batches/b` of `/v1/batches/b/cancel`, `/v1/files/f` of a batch of it.
fn path_of<'a>(row: &EnginePath, parts: &'a Parts, id: &str) -> Option<Cow<'a, str>> {
    let path = parts.uri.path();
    match row.path.split('/').position(|segment| segment == "{}") {
        Some(at) => {
            let end = path.match_indices('/').nth(at).map_or(path.len(), |(end, _)| end);
            Some(Cow::Borrowed(&path[..end]))
        }
        // An id that is no plain segment could be another path.
        None => id
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'))
            .then(|| Cow::Owned(format!("/v1/files/{id}"))),
    }
}

/// Whether a worker has the object at `path`; none if it does not say.
async fn has(
    proxy: &Proxy,
    upstreams: &Arc<Connections>,
    worker: &Worker,
    parts: &Parts,
    path: &str,
) -> Option<bool> {
    match ask(proxy, upstreams, worker, parts, path, (ANSWER_WITHIN, ANSWER_BYTES_MAX)).await {
        Ok((404 | 405 | 501, _)) => Some(false),
        Ok((500.., _)) => None,
        Ok(_) | Err(AskError::TooLong { .. }) => Some(true),
        Err(_) => None,
    }
}

/// Asks a worker with a GET of `path`, with the client's credentials where those are passed on.
pub(super) async fn ask(
    proxy: &Proxy,
    upstreams: &Arc<Connections>,
    worker: &Worker,
    parts: &Parts,
    path: &str,
    limits: (Duration, usize),
) -> Result<(u16, Bytes), AskError> {
    let mut fields = String::new();
    if worker.upstream.authorization().is_none() && proxy.auth().forwards_credentials() {
        let shown = parts.headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        fields.extend(shown.map(|shown| format!("authorization: {shown}\r\n")));
    }
    let answer = ask_with(upstreams, &worker.upstream, &Method::GET, path, &fields, limits).await?;
    Ok((answer.0.as_u16(), answer.1))
}
