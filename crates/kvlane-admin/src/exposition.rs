//! `GET /metrics`: reads the gauges at the moment of the scrape and writes all metrics as OpenMetrics text.

use std::fmt::Write as _;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use kvlane_core::scheduler::Scheduler;
use kvlane_core::time::Nanos;
use prometheus_client::encoding::text::encode;

use kvlane_fleet::decoders::Decoders;
use kvlane_fleet::metrics::{
    DecodeLabels, Metrics, ModelLabel, PredictionLabels, ReplicaLabel, TokensLabel, WorkerLabels,
};
use kvlane_fleet::pool::ModelPool;
use kvlane_fleet::replicas::shown;
use kvlane_proxy::Proxy;

use crate::discovery;
use crate::known::Known;
use crate::signals::{self, UsualRequest};

/// The text exposition, with the gauges read now. Endpoints that have left since the last scrape are dropped.
pub(crate) fn render(proxy: &Proxy) -> String {
    let metrics = &proxy.fleet.metrics;
    // Held while gauges are cleared and set, so that a scrape at the same time does not find them missing.
    let registry = metrics.registry.lock().unwrap_or_else(PoisonError::into_inner);
    read_clients(metrics, proxy);
    let now = proxy.fleet.clock.now();
    read_feeds(metrics, proxy, now);
    read_pools(metrics, &proxy.fleet.pools(), now);
    read_empty_pools(metrics, proxy);
    read_tokenizers(metrics, proxy);
    discovery::read(&proxy.fleet);
    read_replicas(metrics, proxy, now);
    metrics.panics.read();
    let runtimes = proxy.fleet.runtimes();
    let tasks: usize = runtimes.iter().map(|runtime| runtime.metrics().num_alive_tasks()).sum();
    metrics.gateway.tasks.set(tasks as i64);
    let mut text = String::new();
    if encode(&mut text, &registry).is_err() {
        let _ = write!(text, "# the metrics could not be written\n# EOF\n");
    }
    text
}

fn read_clients(metrics: &Metrics, proxy: &Proxy) {
    let figures = proxy.limits.figures();
    let entries = figures
        .into_iter()
        .map(|(spec, keys, in_flight)| (spec.key.clone(), spec.model.clone(), keys, in_flight));
    metrics.limits.set(proxy.memory.held(), entries);
}

fn read_replicas(metrics: &Metrics, proxy: &Proxy, now: Nanos) {
    let replicas = &proxy.fleet.replicas;
    metrics.replicas.replicas.set(replicas.live(now).len() as i64);
    metrics.replicas.replica_problems.set(replicas.problems().len() as i64);
    metrics.replicas.replica_age.clear();
    for (replica, heard) in replicas.heard(now) {
        let label = ReplicaLabel { replica: shown(replica) };
        metrics.replicas.replica_age.get_or_create(&label).set((now - heard.at).as_secs_f64());
    }
}

fn read_empty_pools(metrics: &Metrics, proxy: &Proxy) {
    metrics.requests.waiting_for_endpoints.clear();
    for (model, requests) in proxy.fleet.waiting_for_endpoints() {
        let model = ModelLabel { model: model.to_string() };
        metrics.requests.waiting_for_endpoints.get_or_create(&model).set(requests.into());
        // A counter that is there from the start shows its first increment to `increase()`.
        let _ = metrics.requests.requests_without_endpoint.get_or_create(&model);
    }
}

fn read_feeds(metrics: &Metrics, proxy: &Proxy, now: Nanos) {
    metrics.feeds.clear();
    for (pool, endpoint) in proxy.fleet.snapshot().endpoints() {
        if let Some(feed) = &endpoint.feed {
            let blocks = pool.router.exact().map(|index| index.blocks_of(endpoint.id));
            metrics.feeds.set(now, &pool.model, feed, blocks);
        }
    }
}

fn read_pools(metrics: &Metrics, pools: &[Arc<ModelPool>], now: Nanos) {
    for gauges in [
        &metrics.workers.worker_requests_active,
        &metrics.workers.worker_prefill_tokens,
        &metrics.workers.worker_context_tokens,
    ] {
        gauges.clear();
    }
    for gauges in [
        &metrics.workers.worker_kv_usage_ratio,
        &metrics.workers.worker_prefill_tokens_per_second,
        &metrics.workers.worker_decode_step,
        &metrics.workers.worker_prefill_error_ratio,
        &metrics.workers.worker_decode_error_ratio,
    ] {
        gauges.clear();
    }
    for gauges in
        [&metrics.requests.queue_requests, &metrics.tokens.index_bytes, &metrics.tokens.index_blocks]
    {
        gauges.clear();
    }
    metrics.workers.decode_endpoints.clear();
    metrics.tokens.output_tokens_usual.clear();
    metrics.requests.ttft_predictions.clear();
    metrics.cache_accuracy.clear();
    signals::clear(metrics);
    for pool in pools {
        let model = ModelLabel { model: pool.model.clone() };
        let (bytes, blocks) = pool.router.index_size();
        metrics.tokens.index_bytes.get_or_create(&model).set(bytes as i64);
        metrics.tokens.index_blocks.get_or_create(&model).set(blocks as i64);
        // The scheduler's lock is held for a copy: labels are looked up, and text is written, without it.
        let copied = |scheduler: &Scheduler| {
            let endpoints = Known::all(scheduler);
            let usual = UsualRequest::of(scheduler);
            let learned = (scheduler.usual_output_tokens(), scheduler.predictions().counts());
            (scheduler.queued(), learned, usual, endpoints)
        };
        let (queued, (usual_output_tokens, predictions), usual, endpoints) = pool.router.read(copied);
        signals::read(metrics, &pool.model, &endpoints, usual, queued);
        pool.metrics.shed.read(now);
        metrics.requests.queue_requests.get_or_create(&model).set(queued as i64);
        metrics.tokens.output_tokens_usual.get_or_create(&model).set(usual_output_tokens);
        if let Some(Decoders { known, unknown, .. }) = pool.decoders() {
            for (load, count) in [("known", known), ("unknown", unknown.len())] {
                let labels = DecodeLabels { model: pool.model.clone(), load };
                metrics.workers.decode_endpoints.get_or_create(&labels).set(count as i64);
            }
        }
        for (error, count) in predictions {
            let labels = PredictionLabels { model: pool.model.clone(), error };
            metrics.requests.ttft_predictions.get_or_create(&labels).inner().store(count, Ordering::Relaxed);
        }
        for known in &endpoints {
            read_endpoint(metrics, &pool.model, known);
        }
    }
}

fn read_endpoint(metrics: &Metrics, model: &str, Known { endpoint, rates, rate_errors }: &Known) {
    let labels = WorkerLabels { worker: endpoint.name.to_string(), model: model.into() };
    metrics.cache_accuracy.read(&labels, endpoint);
    let load = endpoint.load.in_flight;
    metrics.workers.worker_requests_active.get_or_create(&labels).set(load.requests.into());
    metrics.workers.worker_prefill_tokens.get_or_create(&labels).set(load.prefill_tokens as i64);
    metrics.workers.worker_context_tokens.get_or_create(&labels).set(load.context_tokens as i64);
    metrics.workers.worker_prefill_tokens_per_second.get_or_create(&labels).set(rates.shown_prefill_rate());
    metrics.workers.worker_decode_step.get_or_create(&labels).set(rates.shown_step_s(&load));
    let [prefill, decode] = *rate_errors;
    metrics.workers.worker_prefill_error_ratio.get_or_create(&labels).set(prefill);
    metrics.workers.worker_decode_error_ratio.get_or_create(&labels).set(decode);
    if let Some((reported, _)) = endpoint.load.reported {
        metrics.workers.worker_kv_usage_ratio.get_or_create(&labels).set(reported.kv_usage_ratio.into());
    }
}

fn read_tokenizers(metrics: &Metrics, proxy: &Proxy) {
    metrics.tokens.tokenizer_queue.set(proxy.fleet.tokenizers.waiting() as i64);
    let (mut bytes, mut reused, mut encoded) = (0, 0, 0);
    for local in proxy.fleet.tokenizers.loaded() {
        let stats = local.tokenizer.stats();
        bytes += stats.cache_bytes;
        reused += stats.tokens_reused;
        encoded += stats.tokens_encoded;
    }
    metrics.tokens.tokenizer_cache_bytes.set(bytes as i64);
    for (from, tokens) in [("cache", reused), ("text", encoded)] {
        let counter = metrics.tokens.tokenizer_tokens.get_or_create(&TokensLabel { from });
        counter.inner().store(tokens, Ordering::Relaxed);
    }
}
