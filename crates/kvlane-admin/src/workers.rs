//! The `/workers` endpoints of the admin API: list, find, add, change and remove workers.

use std::sync::Arc;

use http::StatusCode;
use http::request::Parts;
use kvlane_control::controller::AddError;
use kvlane_core::scheduler::Scheduler;
use kvlane_fleet::Fleet;
use kvlane_fleet::worker::Worker;
use kvlane_fleet::worker::config::WorkerSpec;
use kvlane_proxy::error::ApiError;
use serde_json::{Value, json};

use crate::admin::Admin;
use crate::query::{percent_decoded, query, refused};

/// The body of `PUT /workers/{id}`.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Change {
    pub(super) draining: bool,
}

pub(super) async fn add(admin: &Admin, spec: &WorkerSpec) -> Result<Arc<Worker>, ApiError> {
    admin.controller.add_where_allowed(spec).await.map_err(|error| {
        let status = match error {
            AddError::BadUrl(_) => StatusCode::BAD_REQUEST,
            AddError::Refused(_) => StatusCode::FORBIDDEN,
            AddError::Duplicate(_) => StatusCode::CONFLICT,
            AddError::TooMany => StatusCode::INSUFFICIENT_STORAGE,
        };
        refused(status, &error.to_string())
    })
}

pub(super) fn find(admin: &Admin, name: &str) -> Result<Arc<Worker>, ApiError> {
    let name = percent_decoded(name);
    admin.controller.find(&name).ok_or_else(|| {
        refused(
            StatusCode::NOT_FOUND,
            &format!("worker '{name}' does not exist: GET /workers lists all workers"),
        )
    })
}

pub(super) fn url_in_query(parts: &Parts) -> Result<String, ApiError> {
    query(parts, "url")
        .ok_or_else(|| refused(StatusCode::BAD_REQUEST, "the query has no url: write ?url=http://host:port"))
}

pub(super) fn describe(fleet: &Fleet, worker: &Worker) -> Value {
    let now = fleet.clock.now();
    let state = worker.state().clone();
    let endpoints: Vec<Value> = fleet
        .snapshot()
        .endpoints_of(worker.id)
        .iter()
        .map(|(pool, endpoint)| {
            let of_it = |scheduler: &Scheduler| {
                scheduler
                    .pool()
                    .get(endpoint.id)
                    .map(|endpoint| {
                        let rates = (scheduler.rates(endpoint), scheduler.rate_errors(endpoint));
                        (endpoint.load, endpoint.cache_accuracy.knowledge(), rates)
                    })
            };
            let blocks = pool.router.exact().map_or(0, |index| index.blocks_of(endpoint.id));
            let (load, knowledge, (rates, [prefill_error, decode_error])) = pool.router.read(of_it).unwrap_or_default();
            let reported = load.reported.map(|(reported, at)| {
                json!({
                    "running": reported.running, "waiting": reported.waiting,
                    "kv_usage_ratio": reported.kv_usage_ratio,
                    "kv_capacity_tokens": reported.kv_capacity_tokens, "at_s": at.as_secs_f64(),
                })
            });
            json!({
                "model": pool.model,
                "requests": load.in_flight.requests,
                "prefill_tokens": load.in_flight.prefill_tokens,
                "context_tokens": load.in_flight.context_tokens,
                "rates": {
                    "prefill_token_s": rates.prefill_token_s, "prefill_pair_s": rates.prefill_pair_s,
                    "step_s": rates.step_s, "sequence_s": rates.sequence_s, "context_token_s": rates.context_token_s,
                    "request_s": rates.request_s, "prefill_error": prefill_error, "decode_error": decode_error,
                },
                "reported": reported,
                "worker": *endpoint.name,
                "rank": endpoint.number,
                "knowledge": knowledge.name(),
                "kv_events": endpoint.feed.as_ref().map(|feed| feed.describe(now, blocks)),
            })
        })
        .collect();
    json!({
        "id": worker.id.0.to_string(), "url": *worker.url, "healthy": state.healthy, "draining": state.draining,
        "leaving": state.leaving, "problem": state.problem, "pools": endpoints,
        "role": worker.spec.role.name(), "source": worker.origin.name(), "also_named_by": state.also_named_by,
        "parity": {"state": state.parity.name(), "why": state.parity.why()},
    })
}
