//! The operators' API: who serves, how it goes, why requests went where they went.

mod decisions;
mod fleet;
mod page;
mod readiness;
mod whatif;
mod workers;

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderValue, Method, Response, StatusCode, header};
use kvlane_core::time::Nanos;
use serde_json::{Value, json};

use self::decisions::decisions;
use self::fleet::fleet;
use self::readiness::{model, models, readiness};
use self::whatif::whatif;
use self::workers::{Change, add, describe, find, url_in_query};
use crate::auth;
use crate::exposition;
use crate::front::http::error::ApiError;
use crate::front::http::{Body, Door, Front, json_response, text_response};
use crate::worker::config::WorkerSpec;

/// The methods of what is only read.
const READ: &str = "GET, HEAD";
/// What this API is, for programs; tests hold it against the code.
const OPENAPI: &str = include_str!("../../../../docs/openapi.yaml");

/// Answers what is addressed to operators, and what anybody may know; nothing if the path is somebody else's.
pub(crate) async fn answer(
    front: &Front,
    parts: &Parts,
    body: &Bytes,
) -> Result<Option<Response<Body>>, ApiError> {
    let path = parts.uri.path();
    let get = parts.method == Method::GET || parts.method == Method::HEAD;
    let gateway = &front.gateway;
    let open = match path {
        "/liveness" | "/health" if get => text_response(StatusCode::OK, "text/plain", "ok\n".into()),
        "/readiness" if get => readiness(gateway, front.shows_workers(parts)),
        "/openapi.yaml" if get => text_response(StatusCode::OK, "application/yaml", OPENAPI.into()),
        "/v1/models" if get => json_response(StatusCode::OK, &models(gateway)),
        _ if get && path.starts_with("/v1/models/") => model(gateway, &path["/v1/models/".len()..])?,
        // On the operators' port, and nowhere else.
        "/dashboard" | "/dashboard.js" | "/dashboard.css" if matches!(front.door, Door::Operators { .. }) => {
            match page::file(path) {
                Some(file) if get => file,
                _ => return Err(wrong_method(parts, READ)),
            }
        }
        "/liveness" | "/health" | "/readiness" | "/openapi.yaml" => return Err(wrong_method(parts, READ)),
        // Elsewhere a worker is asked.
        _ if matches!(front.door, Door::Operators { .. })
            && (path == "/v1/models" || path.starts_with("/v1/models/")) =>
        {
            return Err(wrong_method(parts, READ));
        }
        _ => return operate(front, parts, body).await,
    };
    Ok(Some(open))
}

/// Whether anybody may know what is at this path, whoever they are: those who watch over the gateway have no key.
pub(crate) fn is_open(path: &str) -> bool {
    matches!(
        path,
        "/liveness"
            | "/health"
            | "/readiness"
            | "/openapi.yaml"
            | "/dashboard"
            | "/dashboard.js"
            | "/dashboard.css"
    )
}

/// Whether what follows in a path is the name of something of the gateway's own, which may be encoded: a model, a worker.
pub(crate) fn names_something(path: &str) -> bool {
    path.starts_with("/workers/") || path.starts_with("/v1/models/")
}

/// Whether what is asked for has a body that is looked at.
pub(crate) fn takes_body(parts: &Parts) -> bool {
    is_for_operators(parts.uri.path()) && matches!(parts.method, Method::POST | Method::PUT | Method::PATCH)
}

/// Whether a path is the operators'.
pub(crate) fn is_for_operators(path: &str) -> bool {
    path.starts_with("/workers/")
        || matches!(
            path,
            "/workers"
                | "/add_worker"
                | "/remove_worker"
                | "/list_workers"
                | "/decisions"
                | "/whatif"
                | "/fleet"
                | "/history"
                | "/metrics"
        )
}

async fn operate(front: &Front, parts: &Parts, body: &Bytes) -> Result<Option<Response<Body>>, ApiError> {
    // The front leaves out what a HEAD does not want.
    let (path, method) = match parts.method.as_str() {
        "HEAD" => (parts.uri.path(), "GET"),
        method => (parts.uri.path(), method),
    };
    let worker_name = path.strip_prefix("/workers/");
    if !is_for_operators(path) || (path == "/metrics" && matches!(front.door, Door::Clients { .. })) {
        return Ok(None);
    }
    if front.door == (Door::Clients { loopback: false }) {
        return Err(refused(
            StatusCode::FORBIDDEN,
            "the admin API is open on the clients' port only while that listens on loopback: use the metrics port",
        ));
    }
    if method != "GET" {
        let by = auth::identity(parts).map_or(auth::ANYBODY, |identity| &*identity.name);
        tracing::info!(method, path, by, "an operator's request");
    }
    let gateway = &front.gateway;
    let answer = match (method, path, worker_name) {
        ("GET", "/metrics", _) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            text_response(StatusCode::OK, kind, exposition::render(gateway))
        }
        ("GET", "/decisions", _) => json_response(StatusCode::OK, &decisions(gateway, parts)?),
        ("GET", "/whatif", _) => json_response(StatusCode::OK, &whatif(gateway)?),
        ("GET", "/fleet", _) => json_response(StatusCode::OK, &fleet(front, parts)),
        ("GET", "/history", _) => {
            json_response(StatusCode::OK, &gateway.history.describe(gateway.clock.now(), since(parts)?))
        }
        ("GET", "/workers", _) => {
            let workers: Vec<Value> =
                front.fleet.workers().iter().map(|worker| describe(gateway, worker)).collect();
            json_response(StatusCode::OK, &json!({"workers": workers, "total": workers.len()}))
        }
        ("POST", "/workers", _) => {
            let spec = serde_json::from_slice(body).map_err(|error| {
                let what = format!(
                    r#"the body is not {{"url": "http://host:port", "model": "name or absent"}}: {error}"#
                );
                refused(StatusCode::BAD_REQUEST, &what)
            })?;
            let worker = add(front, &spec).await?;
            let mut response = json_response(StatusCode::ACCEPTED, &describe(gateway, &worker));
            if let Ok(location) = HeaderValue::try_from(format!("/workers/{}", worker.id.0)) {
                response.headers_mut().insert(header::LOCATION, location);
            }
            response
        }
        ("GET", _, Some(name)) => json_response(StatusCode::OK, &describe(gateway, &*find(front, name)?)),
        ("PUT" | "PATCH", _, Some(name)) => {
            let worker = find(front, name)?;
            let change: Change = serde_json::from_slice(body).map_err(|error| {
                refused(
                    StatusCode::BAD_REQUEST,
                    &format!(r#"the body is not {{"draining": true or false}}: {error}"#),
                )
            })?;
            front.fleet.set_draining(&worker, change.draining);
            json_response(StatusCode::OK, &describe(gateway, &worker))
        }
        ("DELETE", _, Some(name)) => {
            let worker = find(front, name)?;
            front.fleet.remove(&worker);
            json_response(StatusCode::ACCEPTED, &describe(gateway, &worker))
        }
        ("POST", "/add_worker", _) => {
            let worker = add(front, &WorkerSpec::new(url_in_query(parts)?)).await?;
            text_response(
                StatusCode::OK,
                "text/plain",
                format!("Successfully added worker: {}\n", worker.url),
            )
        }
        ("POST", "/remove_worker", _) => {
            let worker = find(front, &url_in_query(parts)?)?;
            front.fleet.remove(&worker);
            text_response(
                StatusCode::OK,
                "text/plain",
                format!("Successfully removed worker: {}\n", worker.url),
            )
        }
        ("GET", "/list_workers", _) => {
            let urls: Vec<String> =
                front.fleet.workers().iter().map(|worker| worker.url.to_string()).collect();
            json_response(StatusCode::OK, &json!({"urls": urls}))
        }
        _ => return Err(wrong_method(parts, methods_of(path))),
    };
    Ok(Some(answer))
}

/// The methods that one of the operators' paths takes.
fn methods_of(path: &str) -> &'static str {
    match path {
        "/workers" => "GET, HEAD, POST",
        "/add_worker" | "/remove_worker" => "POST",
        path if path.starts_with("/workers/") => "GET, HEAD, PUT, PATCH, DELETE",
        _ => READ,
    }
}

fn wrong_method(parts: &Parts, allow: &'static str) -> ApiError {
    ApiError::WrongMethod { method: parts.method.to_string(), path: parts.uri.path().into(), allow }
}

fn refused(status: StatusCode, message: &str) -> ApiError {
    ApiError::Admin { status, message: message.into() }
}

/// The time after which things are asked for: all of them where the query does not say.
fn since(parts: &Parts) -> Result<Option<Nanos>, ApiError> {
    let Some(text) = query(parts, "since_s") else { return Ok(None) };
    match text.parse::<f64>() {
        Ok(secs) if secs >= 0.0 && secs.is_finite() => Ok(Some(Nanos::from_secs_f64(secs))),
        _ => Err(refused(StatusCode::BAD_REQUEST, &format!("since_s={text}: take seconds, 0 or more"))),
    }
}

fn query(parts: &Parts, key: &str) -> Option<String> {
    in_query(&parts.uri, key)
}

pub(crate) fn in_query(target: &http::Uri, key: &str) -> Option<String> {
    let pairs = target.query()?.split('&').filter_map(|pair| pair.split_once('='));
    pairs.filter(|(name, _)| *name == key).map(|(_, value)| percent_decoded(value)).next()
}

/// Undoes percent encoding; what is not valid stays as it is.
pub(crate) fn percent_decoded(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        let mut ahead = bytes.clone();
        let digits = (ahead.next(), ahead.next());
        let digit = |byte: Option<u8>| (byte? as char).to_digit(16);
        match (byte, digit(digits.0), digit(digits.1)) {
            (b'%', Some(high), Some(low)) => {
                out.push((high * 16 + low) as u8);
                bytes = ahead;
            }
            _ => out.push(byte),
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::percent_decoded;

    #[test]
    fn percent_encoding_is_undone_where_it_is_valid() {
        for (text, expect) in [
            ("http%3A%2F%2Fh:1", "http://h:1"),
            ("a%2", "a%2"),
            ("%zz%41", "%zzA"),
            ("%", "%"),
            ("%%41", "%A"),
            ("%+1", "%+1"),
        ] {
            assert_eq!(percent_decoded(text), expect);
        }
    }
}
