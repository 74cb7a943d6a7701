//! `GET /fleet`: the whole fleet at one moment, for the dashboard.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::request::Parts;
use kvlane_core::disaggregation::Link;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::policy::PolicyConfig;
use kvlane_core::scheduler::Scheduler;
use kvlane_core::time::Nanos;
use kvlane_fleet::Fleet;
use kvlane_fleet::feed::EventFeed;
use kvlane_fleet::pool::ModelPool;
use kvlane_fleet::traffic::Traffic;
use kvlane_fleet::worker::Worker;
use kvlane_proxy::Proxy;
use kvlane_proxy::auth::{self, Role};
use kvlane_proxy::failures::{Cause, Failure};
use serde_json::{Value, json};

use crate::admin::Admin;
use crate::history::rounded;
use crate::known::Known;
use crate::tenants;

/// Most pairs of workers that are listed.
const CLOSED_PAIRS_MAX: usize = 100;

/// The current pools and workers, and what the caller may do with them.
pub(crate) fn describe_fleet(admin: &Admin, parts: &Parts) -> Value {
    let fleet = &*admin.proxy.fleet;
    let now = fleet.clock.now();
    let identity = auth::identity(parts);
    let open = !admin.proxy.auth().operators_need_a_key() && identity.is_none();
    let role = identity.map_or(if open { "admin" } else { "viewer" }, |identity| identity.role.name());
    let pools = fleet.pools();
    let endpoints: HashMap<(usize, EndpointId), Value> = pools
        .iter()
        .flat_map(|pool| {
            endpoints(now, pool).into_iter().map(|(id, told)| ((Arc::as_ptr(pool) as usize, id), told))
        })
        .collect();
    let health = admin.controller.health();
    let workers: Vec<Value> = admin
        .controller
        .workers()
        .iter()
        .map(|worker| self::worker(now, fleet, worker, &endpoints))
        .collect();
    json!({
        "schema": "kvlane.fleet/1",
        "version": env!("CARGO_PKG_VERSION"),
        "now_s": now.as_secs_f64(),
        "you": {
            "name": identity.map(|identity| &*identity.name), "role": role,
            "may_change": open || identity.is_some_and(|identity| identity.role == Role::Admin),
        },
        "stopping": fleet.stopping.load(Ordering::Relaxed),
        "configuration": fleet.reloads.describe(),
        "probes": {"interval_s": health.interval.as_secs_f64(), "failure_threshold": health.failure_threshold},
        "tokenizer_queue": fleet.tokenizers.waiting(),
        "clients": clients(admin),
        "failures": admin.proxy.failures.list().iter().map(failure).collect::<Vec<_>>(),
        "pools": pools.iter().map(|pool| self::pool(&admin.proxy, pool)).collect::<Vec<_>>(),
        "workers": workers,
        "replicas": fleet.describe_replicas(),
    })
}

/// How clients connect: none behind a data plane.
fn clients(admin: &Admin) -> Value {
    let describe = |address: SocketAddr| {
        json!({
            "address": address.to_string(), "tls": admin.proxy.tls().clients().is_some(),
            "need_a_key": admin.proxy.auth().clients_need_a_key(),
        })
    };
    json!(admin.clients.map(describe))
}

fn failure(failure: &Failure) -> Value {
    let Failure { at, request_id, model, status, cause: Cause { endpoint, reason } } = failure;
    json!({
        "at_s": at.as_secs_f64(), "request_id": request_id, "model": model, "status": status,
        "endpoint": endpoint.as_deref(), "reason": reason,
    })
}

fn pool(proxy: &Proxy, pool: &ModelPool) -> Value {
    let fleet = &*proxy.fleet;
    let (given_bytes, given_blocks) = pool.router.index_size();
    let exact = pool.router.exact().map(|index| {
        json!({"bytes": index.bytes(), "blocks": index.blocks_held(), "bytes_max": fleet.settings().kv_events.index_memory})
    });
    let shed: Value = pool
        .metrics
        .shed
        .by_reason()
        .into_iter()
        .map(|(why, count)| (why.to_owned(), json!(count)))
        .collect();
    let (policies, in_flight, queued, in_flight_max, queue_max, receipts) = pool.router.read(|scheduler| {
        let config = scheduler.config();
        let (in_flight_max, queue_max) = (config.max_concurrent_requests, config.queue_size);
        let policies = (config.policy.name(), config.shadow_policy.as_ref().map(PolicyConfig::name));
        (policies, scheduler.in_flight(), scheduler.queued(), in_flight_max, queue_max, config.receipts)
    });
    let (policy, shadow_policy) = policies;
    let metrics = &pool.metrics;
    json!({
        "closed_pairs": closed_pairs(fleet.clock.now(), pool),
        "model": pool.model, "policy": policy, "shadow_policy": shadow_policy, "block_tokens": pool.router.block_tokens(),
        "tokens": pool.counting.describe(), "decisions_kept": receipts,
        "in_flight": in_flight, "in_flight_max": in_flight_max, "queued": queued, "queue_max": queue_max,
        "tenants": tenants::describe(proxy, pool),
        "shed": shed, "shed_ratio": rounded(metrics.shed.share() as f32).unwrap_or(0.0),
        "index": {
            "events": exact,
            "dispatches": {
                "bytes": given_bytes, "blocks": given_blocks, "bytes_max": pool.router.index_bytes_max(),
            },
        },
        "totals": {
            "input_tokens": metrics.input_tokens.get(), "cached_tokens": metrics.cached_tokens.get(),
            "predicted_cached_tokens": metrics.predicted_tokens.get(), "prompt_tokens": metrics.prompt_tokens.get(),
            "engine_queried_tokens": metrics.engine_reuse.queried_tokens.get(),
            "engine_hit_tokens": metrics.engine_reuse.hit_tokens.get(),
            "engine_external_hit_tokens": metrics.engine_reuse.external_hit_tokens.get(),
            "splits": metrics.splits.get(), "transferred_tokens": metrics.transferred_tokens.get(),
            "output_tokens": metrics.output_tokens.get(),
            "retries": metrics.retries.get(),
        },
    })
}

/// The pairs of workers that get no requests because the warm-up of their transfers has failed or is due.
fn closed_pairs(now: Nanos, pool: &ModelPool) -> Vec<Value> {
    let closed: Vec<Link> = pool.router.read(|scheduler: &Scheduler| {
        let links = scheduler.transfers().links(now).filter(|link| link.closed);
        links.take(CLOSED_PAIRS_MAX).collect()
    });
    let name = |id| pool.endpoint(id).map(|endpoint| Arc::clone(&endpoint.name));
    let pair = |link: &Link| {
        Some(json!({"prefill": *name(link.from)?, "decode": *name(link.to)?, "failed": link.failed}))
    };
    closed.iter().filter_map(pair).collect()
}

/// The pool's state of each of its endpoints. The scheduler's lock is held only while the figures are copied.
fn endpoints(now: Nanos, pool: &ModelPool) -> Vec<(EndpointId, Value)> {
    let known = pool.router.read(Known::all);
    let ids: Vec<EndpointId> = known.iter().map(|known| known.endpoint.id).collect();
    let given = pool.router.blocks_given(&ids);
    let block_tokens = u64::from(pool.router.block_tokens());
    let told = known.iter().zip(given).map(|(known, given)| {
        let id = known.endpoint.id;
        let events = pool.router.exact().map(|index| index.blocks_of(id));
        (id, endpoint(now, known, events, given, block_tokens))
    });
    told.collect()
}

fn endpoint(
    now: Nanos,
    Known { endpoint, rates, rate_errors }: &Known,
    events: Option<u64>,
    given: u64,
    block_tokens: u64,
) -> Value {
    let [prefill_error, decode_error] = rate_errors.map(|error| rounded(error as f32));
    let (load, accuracy, breaker) = (endpoint.load.in_flight, &endpoint.cache_accuracy, &endpoint.breaker);
    let reported = endpoint.load.reported.map(|(reported, at)| {
        json!({
            "running": reported.running, "waiting": reported.waiting,
            "kv_usage_ratio": rounded(reported.kv_usage_ratio), "kv_capacity_tokens": reported.kv_capacity_tokens,
            "age_s": rounded((now - at).as_secs_f64() as f32),
        })
    });
    let until_s = |until: Option<Nanos>| until.map(|until| (until - now).as_secs_f64());
    json!({
        "requests": load.requests, "prefilling": load.prefilling,
        "prefill_tokens": load.prefill_tokens, "context_tokens": load.context_tokens,
        "reported": reported,
        "rates": {
            "prefill_tokens_per_second": rounded(rates.shown_prefill_rate() as f32), "prefill_error": prefill_error,
            "decode_step_s": rounded(rates.shown_step_s(&load) as f32), "decode_error": decode_error,
        },
        "knowledge": accuracy.knowledge().name(),
        "precision": rounded(accuracy.precision()), "recall": rounded(accuracy.recall()),
        "answers": accuracy.totals().answers, "answers_mispredicted": accuracy.totals().wrong,
        "breaker": {
            "state": breaker.state().name(), "failures": breaker.failures(), "opens_for_s": until_s(breaker.until()),
        },
        "busy_for_s": until_s(endpoint.busy.until(now)),
        "holds": {
            "events_tokens": events.map(|blocks| blocks * block_tokens), "dispatches_tokens": given * block_tokens,
        },
    })
}

fn worker(now: Nanos, fleet: &Fleet, worker: &Worker, known: &HashMap<(usize, EndpointId), Value>) -> Value {
    let state = worker.state().clone();
    let endpoints: Vec<Value> = fleet
        .snapshot()
        .endpoints_of(worker.id)
        .iter()
        .map(|(pool, endpoint)| {
            // An endpoint that joined a moment ago is in the next response.
            let of_pool = known.get(&(Arc::as_ptr(pool) as usize, endpoint.id));
            let mut told = of_pool.cloned().unwrap_or_else(|| json!({}));
            told["model"] = json!(pool.model);
            told["endpoint"] = json!(*endpoint.name);
            told["rank"] = json!(endpoint.number);
            told["traffic"] = traffic(&endpoint.traffic);
            if !state.healthy {
                // What a worker held and reported says nothing of one that is down.
                (told["reported"], told["holds"]) = (Value::Null, Value::Null);
            }
            told["engine_cache"] = json!(pool.metrics.engine_reuse.of(endpoint.id).map(|cache| {
                json!({
                    "queried_tokens": cache.queried_tokens, "hit_tokens": cache.hit_tokens,
                    "external_hit_tokens": cache.external_hit_tokens,
                })
            }));
            told["feed"] = json!(endpoint.feed.as_ref().map(|feed| self::feed(now, feed)));
            told
        })
        .collect();
    json!({
        "id": worker.id.0.to_string(), "url": *worker.url, "configured": worker.is_configured(),
        "role": worker.spec.role.name(), "source": worker.origin.name(),
        "state": name_of_state(&state, !endpoints.is_empty()), "problem": state.problem, "failed_probes": state.probes.failures(),
        "parity": {"state": state.parity.name(), "why": state.parity.why()},
        "endpoints": endpoints,
    })
}

/// Requests at an endpoint since it joined.
fn traffic(traffic: &Traffic) -> Value {
    let failed: Value =
        traffic.failed().map(|(kind, count)| (kind.name().to_owned(), json!(count))).collect();
    let ttft_s = traffic.ttft_s().map(|percentiles| percentiles.map(|seconds| rounded(seconds as f32)));
    json!({
        "requests": traffic.placed(), "failed": failed, "rejected": traffic.rejected(),
        "ttft_p50_s": ttft_s.map(|[p50, _]| p50), "ttft_p90_s": ttft_s.map(|[_, p90]| p90),
    })
}

/// The main figures of a feed; `GET /workers` has all of them.
fn feed(now: Nanos, feed: &EventFeed) -> Value {
    let seen = feed.seen();
    let (waiting, dropped) = feed.waiting();
    json!({
        "state": seen.state.name(), "problem": seen.problem, "connected": seen.connected,
        "lag_s": seen.applied_at.and_then(|_| rounded(seen.lag_s as f32)),
        "last_event_age_s": seen.applied_at.and_then(|at| rounded((now - at).as_secs_f64() as f32)),
        "waiting": waiting, "lost": seen.messages(dropped).iter().filter(|(what, _)| *what == "lost").map(|(_, n)| n).sum::<u64>(),
    })
}

/// One word for a worker's state: the worst that applies.
fn name_of_state(state: &kvlane_fleet::worker::State, is_registered: bool) -> &'static str {
    match state {
        state if state.leaving => "leaving",
        state if !state.healthy && state.problem.is_none() && !is_registered => "joining",
        state if !state.healthy => "down",
        state if state.probes.failures() > 0 => "failing",
        state if state.draining => "draining",
        _ => "serving",
    }
}
