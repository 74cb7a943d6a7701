//! Health, readiness and the model list, for health checks and for clients.

use std::sync::Arc;

use http::{Response, StatusCode};
use kvlane_core::cache_accuracy::{Feed, Knowledge};
use kvlane_fleet::Fleet;
use kvlane_fleet::catalogue::ModelSpec;
use kvlane_fleet::parity::Parity;
use kvlane_fleet::snapshot::Snapshot;
use kvlane_proxy::body::{Body, json_response};
use kvlane_proxy::error::ApiError;
use serde_json::{Value, json};

use crate::discovery;
use crate::query::percent_decoded;

/// Whether new requests should be sent here; workers and their problems are listed only if the caller may see them
/// (`whole`).
pub(super) fn readiness(fleet: &Fleet, whole: bool) -> Response<Body> {
    let verdict = fleet.readiness();
    let (ready, stopping) = (verdict.ready, verdict.stopping);
    let status = if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    if !whole {
        return json_response(status, &json!({"ready": ready, "stopping": stopping}));
    }
    let pools: Vec<Value> = fleet
        .pools()
        .iter()
        .map(|pool| {
            let (all, eligible, knowledge) = pool.router.read(|scheduler| {
                let endpoints = scheduler.pool().endpoints();
                let knowledge: Vec<Knowledge> =
                    endpoints.map(|endpoint| endpoint.cache_accuracy.knowledge()).collect();
                (knowledge.len(), scheduler.pool().eligible().count(), knowledge)
            });
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
                "disaggregation": pool.decoders().map(|decoders| decoders.describe()),
            })
        })
        .collect();
    let down: Vec<Value> = fleet
        .workers()
        .values()
        .filter(|worker| !worker.state().healthy)
        .map(|worker| json!({"url": *worker.url, "problem": worker.state().problem}))
        .collect();
    let table = fleet.snapshot();
    let feeds: Vec<Value> = table
        .endpoints()
        .filter_map(|(_, endpoint)| endpoint.feed.clone())
        .map(|feed| (Arc::clone(&feed), feed.seen()))
        .filter(|(_, seen)| matches!(seen.state, Feed::Refused | Feed::Syncing))
        .map(
            |(feed, seen)| json!({"worker": *feed.name, "state": seen.state.name(), "problem": seen.problem}),
        )
        .collect();
    let mismatched: Vec<Value> = fleet
        .workers()
        .values()
        .filter_map(|worker| match worker.parity() {
            Parity::Mismatch(why) => Some(json!({"url": *worker.url, "problem": why})),
            _ => None,
        })
        .collect();
    json_response(
        status,
        &json!({
            "ready": ready, "stopping": stopping, "waits_for": verdict.describe_waits(),
            "given_up": verdict.describe_given_up(), "pools": pools, "down": down, "kv_events": feeds,
            "mismatched": mismatched, "discovery": discovery::describe(fleet),
            "replicas": fleet.describe_replicas(),
            "configuration": fleet.reloads.describe(),
        }),
    )
}

pub(super) fn models(fleet: &Fleet) -> Value {
    let (table, settings) = (fleet.snapshot(), fleet.settings());
    let of_workers = table.cards.iter().filter(|(name, _)| !settings.models.contains_key(*name));
    let mut cards: Vec<Value> = of_workers.map(|(_, card)| card.clone()).collect();
    cards.extend(settings.models.iter().filter_map(|(name, spec)| of_catalogue(&table, name, spec)));
    json!({"object": "list", "data": cards})
}

/// The card of a name of the catalogue: that of the first of its models that is served, under this name.
fn of_catalogue(table: &Snapshot, name: &str, spec: &ModelSpec) -> Option<Value> {
    let models = spec.targets.iter().map(|target| &target.model);
    let models = models.chain(spec.fallbacks.iter().map(|fallback| &fallback.model));
    let mut card = models.filter_map(|model| table.cards.get(model)).next()?.clone();
    card["id"] = name.into();
    Some(card)
}

pub(super) fn model(fleet: &Fleet, name: &str) -> Result<Response<Body>, ApiError> {
    let name = percent_decoded(name);
    let (table, settings) = (fleet.snapshot(), fleet.settings());
    let card = match settings.models.get(&name) {
        Some(spec) => of_catalogue(&table, &name, spec),
        None => table.cards.get(&name).cloned(),
    };
    match card {
        Some(card) => Ok(json_response(StatusCode::OK, &card)),
        None => Err(ApiError::UnknownModel(name)),
    }
}
