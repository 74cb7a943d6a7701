//! The operators' API: who serves, how it goes, why requests went where they went.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::request::Parts;
use http::{HeaderValue, Method, Response, StatusCode, header};
use hyper::body::Incoming;
use kvlane_core::decision::{ROWS_MAX, ReceiptRow};
use kvlane_core::scheduler::Scheduler;
use kvlane_core::timing::TimingFile;
use kvlane_core::truth::{Feed, Knowledge};
use serde_json::{Value, json};

use crate::auth;
use crate::canary::Parity;
use crate::config::WorkerSpec;
use crate::fleet::AddError;
use crate::front::http::error::ApiError;
use crate::front::http::{Body, Door, Front, json_response, read_body, text_response};
use crate::gateway::{Gateway, ModelPool};
use crate::worker::{Seat, Worker};

/// Decisions returned at most: they are copied under the lock of the scheduler.
const DECISIONS_MAX: usize = 200;
/// Tokens of a step where a timing file does not tell: vLLM's default on a large GPU.
const CHUNK_TOKENS: u32 = 8192;
/// Decisions returned when the query does not say how many.
const DECISIONS_DEFAULT: usize = 50;

/// The methods of what is only read.
const READ: &str = "GET, HEAD";
/// What this API is, for programs; tests hold it against the code.
const OPENAPI: &str = include_str!("../../../docs/openapi.yaml");

/// Answers what is addressed to operators, and what anybody may know; nothing if the path is somebody else's.
pub(crate) async fn answer(
    front: &Front,
    parts: &Parts,
    body: &mut Incoming,
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
    matches!(path, "/liveness" | "/health" | "/readiness" | "/openapi.yaml")
}

/// Whether a path is the operators'.
pub(crate) fn is_for_operators(path: &str) -> bool {
    path.starts_with("/workers/")
        || matches!(
            path,
            "/workers" | "/add_worker" | "/remove_worker" | "/list_workers" | "/decisions" | "/metrics"
        )
}

async fn operate(
    front: &Front,
    parts: &Parts,
    body: &mut Incoming,
) -> Result<Option<Response<Body>>, ApiError> {
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
        let by = auth::identity(parts).map_or("anybody", |identity| &*identity.name);
        tracing::info!(method, path, by, "an operator's request");
    }
    let gateway = &front.gateway;
    let answer = match (method, path, worker_name) {
        ("GET", "/metrics", _) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            text_response(StatusCode::OK, kind, gateway.metrics.render(gateway))
        }
        ("GET", "/decisions", _) => json_response(StatusCode::OK, &decisions(gateway, parts)?),
        ("GET", "/workers", _) => {
            let workers: Vec<Value> =
                front.fleet.workers().iter().map(|worker| describe(gateway, worker)).collect();
            json_response(StatusCode::OK, &json!({"workers": workers, "total": workers.len()}))
        }
        ("POST", "/workers", _) => {
            let body = read_body(front, &parts.headers, body).await?;
            let spec = serde_json::from_slice(&body).map_err(|error| {
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
            let body = read_body(front, &parts.headers, body).await?;
            let change: Change = serde_json::from_slice(&body).map_err(|error| {
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

/// The body of `PUT /workers/{id}`.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    draining: bool,
}

fn refused(status: StatusCode, message: &str) -> ApiError {
    ApiError::Admin { status, message: message.into() }
}

async fn add(front: &Front, spec: &WorkerSpec) -> Result<Arc<Worker>, ApiError> {
    front.fleet.add_where_allowed(spec).await.map_err(|error| {
        let status = match error {
            AddError::BadUrl(_) => StatusCode::BAD_REQUEST,
            AddError::Refused(_) => StatusCode::FORBIDDEN,
            AddError::Duplicate(_) => StatusCode::CONFLICT,
            AddError::TooMany => StatusCode::INSUFFICIENT_STORAGE,
        };
        refused(status, &error.to_string())
    })
}

fn find(front: &Front, name: &str) -> Result<Arc<Worker>, ApiError> {
    let name = percent_decoded(name);
    front.fleet.find(&name).ok_or_else(|| {
        refused(StatusCode::NOT_FOUND, &format!("there is no worker '{name}': GET /workers lists them"))
    })
}

fn url_in_query(parts: &Parts) -> Result<String, ApiError> {
    query(parts, "url")
        .ok_or_else(|| refused(StatusCode::BAD_REQUEST, "the query has no url: write ?url=http://host:port"))
}

fn query(parts: &Parts, key: &str) -> Option<String> {
    in_query(&parts.uri, key)
}

pub(crate) fn in_query(target: &http::Uri, key: &str) -> Option<String> {
    let pairs = target.query()?.split('&').filter_map(|pair| pair.split_once('='));
    pairs.filter(|(name, _)| *name == key).map(|(_, value)| percent_decoded(value)).next()
}

/// Undoes percent encoding; what is not valid stays as it is.
fn percent_decoded(text: &str) -> String {
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

fn describe(gateway: &Gateway, worker: &Worker) -> Value {
    let now = gateway.clock.now();
    let state = worker.state().clone();
    let seats: Vec<Value> = state
        .seats
        .iter()
        .map(|seat| {
            let of_it = |scheduler: &Scheduler| {
                scheduler
                    .pool()
                    .get(seat.endpoint)
                    .map(|endpoint| (endpoint.load, endpoint.truth.knowledge(), scheduler.rates(endpoint)))
            };
            let (load, knowledge, rates) = seat.pool.router.read(of_it).unwrap_or_default();
            let reported = load.reported.map(|(reported, at)| {
                json!({
                    "running": reported.running, "waiting": reported.waiting,
                    "kv_usage_ratio": reported.kv_usage_ratio,
                    "kv_capacity_tokens": reported.kv_capacity_tokens, "at_s": at.as_secs_f64(),
                })
            });
            json!({
                "model": seat.pool.model,
                "requests": load.in_flight.requests,
                "prefill_tokens": load.in_flight.prefill_tokens,
                "context_tokens": load.in_flight.context_tokens,
                "rates": {
                    "prefill_token_s": rates.prefill_token_s, "prefill_pair_s": rates.prefill_pair_s,
                    "step_s": rates.step_s, "sequence_s": rates.sequence_s, "context_token_s": rates.context_token_s,
                },
                "reported": reported,
                "worker": *worker.seat_name(seat.number),
                "rank": seat.number,
                "knowledge": knowledge.name(),
                "kv_events": seat.feed.as_ref().map(|feed| feed.describe(now, &seat.pool, seat.endpoint)),
            })
        })
        .collect();
    json!({
        "id": worker.id.0.to_string(), "url": *worker.url, "healthy": state.healthy, "draining": state.draining,
        "leaving": state.leaving, "problem": state.problem, "pools": seats,
        "parity": {"state": state.parity.name(), "why": state.parity.why()},
    })
}

/// Whether there is anybody to serve requests; who and what is wrong with them only to those who may know.
fn readiness(gateway: &Gateway, whole: bool) -> Response<Body> {
    let stopping = gateway.stopping.load(Ordering::Relaxed);
    let mut any = false;
    let pools: Vec<Value> = gateway
        .pools()
        .iter()
        .map(|pool| {
            let (all, eligible, knowledge) = pool.router.read(|scheduler| {
                let endpoints = scheduler.pool().endpoints();
                let knowledge: Vec<Knowledge> =
                    endpoints.map(|endpoint| endpoint.truth.knowledge()).collect();
                (knowledge.len(), scheduler.pool().eligible().count(), knowledge)
            });
            any |= eligible > 0;
            let counts: Value = Knowledge::ALL
                .iter()
                .map(|of| {
                    (of.name().to_owned(), Value::from(knowledge.iter().filter(|other| *other == of).count()))
                })
                .collect();
            let worst = knowledge.iter().max().copied().unwrap_or_default();
            json!({
                "model": pool.model, "endpoints": all, "ready": eligible, "prefix_knowledge": worst.name(),
                "knowledge": counts, "block_tokens": pool.router.block_tokens(),
                "tokens": pool.counting.describe(),
            })
        })
        .collect();
    let down: Vec<Value> = gateway
        .workers()
        .values()
        .filter(|worker| !worker.state().healthy)
        .map(|worker| json!({"url": *worker.url, "problem": worker.state().problem}))
        .collect();
    let workers = gateway.workers();
    let seats: Vec<Seat> = workers.values().flat_map(|worker| worker.state().seats.clone()).collect();
    drop(workers);
    let feeds: Vec<Value> = seats
        .iter()
        .filter_map(|seat| seat.feed.as_ref())
        .map(|feed| (feed, feed.seen()))
        .filter(|(_, seen)| matches!(seen.state, Feed::Refused | Feed::Syncing))
        .map(
            |(feed, seen)| json!({"worker": *feed.name, "state": seen.state.name(), "problem": seen.problem}),
        )
        .collect();
    let mismatched: Vec<Value> = gateway
        .workers()
        .values()
        .filter_map(|worker| match worker.parity() {
            Parity::Mismatch(why) => Some(json!({"url": *worker.url, "problem": why})),
            _ => None,
        })
        .collect();
    let ready = any && !stopping;
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    if !whole {
        return json_response(status, &json!({"ready": ready, "stopping": stopping}));
    }
    json_response(
        status,
        &json!({
            "ready": ready, "stopping": stopping, "pools": pools, "down": down, "kv_events": feeds,
            "mismatched": mismatched, "configuration": gateway.reloads.describe(),
        }),
    )
}

fn models(gateway: &Gateway) -> Value {
    let table = gateway.table();
    let cards: Vec<&Value> = table.cards.values().collect();
    json!({"object": "list", "data": cards})
}

fn model(gateway: &Gateway, name: &str) -> Result<Response<Body>, ApiError> {
    let name = percent_decoded(name);
    match gateway.table().cards.get(&name) {
        Some(card) => Ok(json_response(StatusCode::OK, card)),
        None => Err(ApiError::UnknownModel(name)),
    }
}

/// The last decisions of every pool, newest first.
fn decisions(gateway: &Gateway, parts: &Parts) -> Result<Value, ApiError> {
    let limit = match query(parts, "limit") {
        None => DECISIONS_DEFAULT,
        Some(text) => {
            text.parse().ok().filter(|limit| (1..=DECISIONS_MAX).contains(limit)).ok_or_else(|| {
                refused(StatusCode::BAD_REQUEST, &format!("limit={text}: take 1 to {DECISIONS_MAX}"))
            })?
        }
    };
    let wanted = query(parts, "model");
    let pools = gateway.pools();
    if let Some(model) = &wanted
        && !pools.iter().any(|pool| pool.model == *model)
    {
        return Err(ApiError::UnknownModel(model.chars().take(200).collect()));
    }
    let chosen = pools.iter().filter(|pool| wanted.as_ref().is_none_or(|model| *model == pool.model));
    let timings = gateway.timings.load();
    let pools: Vec<Value> = chosen.map(|pool| pool_decisions(pool, timings.of(&pool.model), limit)).collect();
    Ok(
        json!({"schema": "kvlane.decisions/1", "now_s": gateway.clock.now().as_secs_f64(), "rows_max": ROWS_MAX, "pools": pools}),
    )
}

/// Decisions of one pool. Where it is known how long its engines take, each candidate's first token is predicted: what
/// was queued there and what of this prompt was not cached, computed one after the other.
fn pool_decisions(pool: &ModelPool, timing: Option<&TimingFile>, limit: usize) -> Value {
    let first_token_s = |row: &ReceiptRow, prompt_tokens: u32| {
        let TimingFile { timing, max_num_batched_tokens, .. } = timing?;
        let queued = u32::try_from(row.prefill_tokens).unwrap_or(u32::MAX);
        let uncached = queued.saturating_add(prompt_tokens.saturating_sub(row.overlap_tokens));
        let chunk = max_num_batched_tokens.unwrap_or(CHUNK_TOKENS);
        Some(timing.host.request_secs + timing.prefill_secs(row.overlap_tokens, uncached, chunk))
    };
    let receipts: Vec<_> =
        pool.router.read(|scheduler| scheduler.receipts().iter().rev().take(limit).cloned().collect());
    let name = |endpoint| pool.occupant(endpoint).map(|occupant| occupant.name.to_string());
    let decisions: Vec<Value> = receipts
        .iter()
        .map(|receipt| {
            let rows: Vec<Value> = receipt
                .rows
                .iter()
                .map(|row| {
                    let mut shown = json!({
                        "worker": name(row.endpoint), "overlap_tokens": row.overlap_tokens, "knowledge": row.knowledge.name(),
                        "predicted": {"exact": row.prediction.exact, "approximate": row.prediction.approximate},
                        "requests": row.requests,
                        "prefill_tokens": row.prefill_tokens, "context_tokens": row.context_tokens, "cost": row.cost,
                    });
                    if let Some(secs) = first_token_s(row, receipt.prompt_tokens) {
                        shown["predicted_ttft_s"] = json!(secs);
                    }
                    shown
                })
                .collect();
            json!({
                "at_s": receipt.at.as_secs_f64(), "request": receipt.request.0, "attempt": receipt.attempt,
                "prompt_tokens": receipt.prompt_tokens,
                "session": receipt.session.map(|key| short(key.0)), "tenant": receipt.tenant.map(|key| short(key.0)),
                "priority": receipt.priority, "expected_output_tokens": receipt.output_tokens, "worker": name(receipt.placement.endpoint),
                "overlap_tokens": receipt.placement.overlap_tokens, "reason": receipt.placement.reason.name(),
                "knowledge": receipt.placement.knowledge.name(), "feed": receipt.placement.feed.name(),
                "candidates": rows, "candidates_left_out": receipt.rows_left_out,
            })
        })
        .collect();
    json!({"model": pool.model, "policy": pool.policy(), "decisions": decisions})
}

/// A key as it is shown: enough of it to tell one from another.
fn short(key: u64) -> String {
    format!("{:08x}", key >> 32)
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
