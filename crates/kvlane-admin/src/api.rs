//! The admin API: workers, their state, metrics and routing decisions.

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderValue, Method, Response, StatusCode, header};
use kvlane_fleet::Fleet;
use kvlane_fleet::worker::config::WorkerSpec;
use kvlane_proxy::auth;
use kvlane_proxy::body::{Body, json_response, text_response};
use kvlane_proxy::error::ApiError;
use kvlane_proxy::own_api::{OwnAnswer, OwnApi, OwnRequest, Port};
use kvlane_proxy::paths::{Audience, OwnPath};
use serde_json::{Value, json};

use crate::admin::Admin;
use crate::decisions::decisions;
use crate::fleet::describe_fleet;
use crate::query::{refused, since};
use crate::readiness::{model, models, readiness};
use crate::whatif::whatif;
use crate::workers::{Change, add, describe, find, url_in_query};
use crate::{catalogue, exposition, page};

/// The OpenAPI document of this API; tests compare it with the code.
const OPENAPI: &str = include_str!("../assets/openapi.yaml");

// === impl Admin ===

impl OwnApi for Admin {
    fn answer<'a>(&'a self, request: OwnRequest<'a>) -> OwnAnswer<'a> {
        Box::pin(answer(self, request))
    }
}

/// Handles requests to the admin API and to public paths; none if the path is neither.
async fn answer(
    admin: &Admin,
    OwnRequest { parts, body, port, shows_workers }: OwnRequest<'_>,
) -> Result<Option<Response<Body>>, ApiError> {
    let path = parts.uri.path();
    let get = parts.method == Method::GET || parts.method == Method::HEAD;
    let fleet = &*admin.proxy.fleet;
    let is_operators = matches!(port, Port::Operators { .. });
    let open = match path {
        "/liveness" | "/health" | "/v1/health" if get => ok(),
        "/ping" if get || parts.method == Method::POST => ok(),
        "/load" if get => json_response(StatusCode::OK, &json!({"server_load": in_flight(fleet)})),
        "/readiness" | "/health_generate" if get => readiness(fleet, shows_workers),
        "/openapi.yaml" if get => text_response(StatusCode::OK, "application/yaml", OPENAPI.into()),
        "/v1/models" if get => json_response(StatusCode::OK, &models(fleet)),
        _ if get && path.starts_with("/v1/models/") => model(fleet, &path["/v1/models/".len()..])?,
        // On the operators' port only.
        "/" if !is_operators => return Ok(None),
        "/" if get => page::leads_to_dashboard(),
        "/dashboard" | "/dashboard.js" | "/dashboard.css" if !is_operators => return Ok(None),
        "/dashboard" | "/dashboard.js" | "/dashboard.css" if get => match page::file(path) {
            Some(file) => file,
            None => return Ok(None),
        },
        _ => match OwnPath::of(path) {
            Some(own) if own.is_for_operators() => return operate(admin, own, port, parts, body).await,
            // On the clients' port an engine may answer another method.
            Some(own) if own.audience == Audience::Open || is_operators => {
                return Err(wrong_method(parts, own.methods));
            }
            _ => return Ok(None),
        },
    };
    Ok(Some(open))
}

fn ok() -> Response<Body> {
    text_response(StatusCode::OK, "text/plain", "ok\n".into())
}

/// Requests in flight and queued, as vLLM's `/load` counts them.
fn in_flight(fleet: &Fleet) -> usize {
    fleet
        .pools()
        .iter()
        .map(|pool| pool.router.read(|scheduler| scheduler.in_flight() + scheduler.queued()))
        .sum()
}

async fn operate(
    admin: &Admin,
    own: &OwnPath,
    port: Port,
    parts: &Parts,
    body: &Bytes,
) -> Result<Option<Response<Body>>, ApiError> {
    // The HTTP layer removes the body of the response to a HEAD request.
    let (path, method) = match parts.method.as_str() {
        "HEAD" => (parts.uri.path(), "GET"),
        method => (parts.uri.path(), method),
    };
    let worker_name = path.strip_prefix("/workers/");
    if path == "/metrics" && matches!(port, Port::Clients { .. }) {
        return Ok(None);
    }
    if port == (Port::Clients { loopback: false }) {
        return Err(refused(
            StatusCode::FORBIDDEN,
            "the clients' port serves the admin API only while it listens on loopback: use the metrics port",
        ));
    }
    if method != "GET" {
        let by = auth::identity(parts).map_or(auth::ANONYMOUS, |identity| &*identity.name);
        tracing::info!(method, path, by, "admin request");
    }
    let fleet = &*admin.proxy.fleet;
    let answer = match (method, path, worker_name) {
        ("GET", "/metrics", _) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            text_response(StatusCode::OK, kind, exposition::render(&admin.proxy))
        }
        ("GET", "/catalogue", _) => json_response(StatusCode::OK, &catalogue::list(fleet)),
        ("GET", "/decisions", _) => json_response(StatusCode::OK, &decisions(fleet, parts)?),
        ("GET", "/whatif", _) => json_response(StatusCode::OK, &whatif(fleet)?),
        ("GET", "/fleet", _) => json_response(StatusCode::OK, &describe_fleet(admin, parts)),
        ("GET", "/history", _) => {
            json_response(StatusCode::OK, &admin.history.describe(fleet.clock.now(), since(parts)?))
        }
        ("GET", "/workers", _) => {
            let workers: Vec<Value> =
                admin.controller.workers().iter().map(|worker| describe(fleet, worker)).collect();
            json_response(StatusCode::OK, &json!({"workers": workers, "total": workers.len()}))
        }
        ("POST", "/workers", _) => {
            let spec = serde_json::from_slice(body).map_err(|error| {
                let what = format!(
                    r#"the body is not {{"url": "http://host:port", "model": "name or absent"}}: {error}"#
                );
                refused(StatusCode::BAD_REQUEST, &what)
            })?;
            let worker = add(admin, &spec).await?;
            let mut response = json_response(StatusCode::ACCEPTED, &describe(fleet, &worker));
            if let Ok(location) = HeaderValue::try_from(format!("/workers/{}", worker.id.0)) {
                response.headers_mut().insert(header::LOCATION, location);
            }
            response
        }
        (_, _, None) if let Some(name) = path.strip_prefix("/catalogue/") => match method {
            "GET" => json_response(StatusCode::OK, &catalogue::one(fleet, name)?),
            "PUT" => catalogue::set(fleet, name, body)?,
            "DELETE" => catalogue::remove(fleet, name)?,
            _ => return Err(wrong_method(parts, own.methods)),
        },
        ("GET", _, Some(name)) => json_response(StatusCode::OK, &describe(fleet, &*find(admin, name)?)),
        ("PUT" | "PATCH", _, Some(name)) => {
            let worker = find(admin, name)?;
            let change: Change = serde_json::from_slice(body).map_err(|error| {
                refused(
                    StatusCode::BAD_REQUEST,
                    &format!(r#"the body is not {{"draining": true or false}}: {error}"#),
                )
            })?;
            admin.controller.set_draining(&worker, change.draining);
            json_response(StatusCode::OK, &describe(fleet, &worker))
        }
        ("DELETE", _, Some(name)) => {
            let worker = find(admin, name)?;
            admin.controller.dismiss(&worker);
            json_response(StatusCode::ACCEPTED, &describe(fleet, &worker))
        }
        ("POST", "/add_worker", _) => {
            let worker = add(admin, &WorkerSpec::new(url_in_query(parts)?)).await?;
            text_response(
                StatusCode::OK,
                "text/plain",
                format!("Successfully added worker: {}\n", worker.url),
            )
        }
        ("POST", "/remove_worker", _) => {
            let worker = find(admin, &url_in_query(parts)?)?;
            admin.controller.dismiss(&worker);
            text_response(
                StatusCode::OK,
                "text/plain",
                format!("Successfully removed worker: {}\n", worker.url),
            )
        }
        ("GET", "/list_workers", _) => {
            let urls: Vec<String> =
                admin.controller.workers().iter().map(|worker| worker.url.to_string()).collect();
            json_response(StatusCode::OK, &json!({"urls": urls}))
        }
        _ => return Err(wrong_method(parts, own.methods)),
    };
    Ok(Some(answer))
}

fn wrong_method(parts: &Parts, allow: &'static str) -> ApiError {
    ApiError::WrongMethod { method: parts.method.to_string(), path: parts.uri.path().into(), allow }
}
