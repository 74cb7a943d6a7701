//! Metrics of workers.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::row::rows;
use crate::metrics::labels::{
    AdapterLabel, DecodeLabels, FailureLabels, SelectionLabels, StatLabels, WarmUpLabel, WorkerLabel,
    WorkerLabels,
};

rows! {
    Workers, "Workers", "Health, load and speed of workers.";

    pub worker_health: Family<WorkerLabel, Gauge> {
        seconds: false,
        labels: &["worker"],
        help: "1 if requests are placed there",
        meaning: "1 if healthy",
        worry: "it is 0 for longer than a restart takes",
    },

    pub worker_stalled: Family<WorkerLabel, Gauge> {
        seconds: false,
        labels: &["worker"],
        help: "1 while requests are in flight and the engine makes no progress",
        meaning: "1 while requests are in flight there and its engine makes no progress, though it may answer health checks",
        worry: "1: the engine hangs; look at its log",
    },

    pub worker_stalls: Family<WorkerLabel, Counter> {
        seconds: false,
        labels: &["worker"],
        help: "Times that the engine stopped making progress",
        meaning: "Times that its engine stopped making progress",
        worry: "it grows",
    },

    pub worker_requests_active: Family<WorkerLabels, Gauge> {
        seconds: false,
        labels: &["worker", "model"],
        help: "Requests in flight",
        meaning: "Requests in flight",
        worry: "one worker has far more than the others",
    },

    pub worker_prefill_tokens: Family<WorkerLabels, Gauge> {
        seconds: false,
        labels: &["worker", "model"],
        help: "Uncached prompt tokens in flight",
        meaning: "Uncached prompt tokens in flight (`P`)",
        worry: "it stays high at one worker: prompts queue there",
    },

    pub worker_context_tokens: Family<WorkerLabels, Gauge> {
        seconds: false,
        labels: &["worker", "model"],
        help: "Prompt and output tokens in flight",
        meaning: "Prompt and output tokens in flight (`T`)",
        worry: "it nears the size of the KV cache",
    },

    pub worker_kv_usage_ratio: Family<WorkerLabels, Gauge<f64, AtomicU64>> {
        seconds: false,
        labels: &["worker", "model"],
        help: "KV cache use as the engine reports it",
        meaning: "KV cache use, as the engine reports it",
        worry: "above 0.95: the engine preempts soon",
    },

    pub decode_endpoints: Family<DecodeLabels, Gauge> {
        seconds: false,
        labels: &["model", "load"],
        help: "Endpoints that take requests whose prompts another computes, by whether their load is known",
        meaning: "Endpoints that decode [split requests](disaggregation.md), by whether their `/metrics` report a load; of models whose requests may be split",
        worry: "`unknown` is not 0: splits ignore the room in those caches; both are 0: prefill workers have no worker to decode for them",
    },

    pub kv_usage_ratio: Family<StatLabels, Gauge<f64, AtomicU64>> {
        seconds: false,
        labels: &["model", "stat"],
        help: "KV cache use over the endpoints of a pool, as engines report it",
        meaning: "KV cache use over the endpoints that take requests and report it; `stat` is `mean` or `max` ([autoscaling](autoscaling.md))",
        worry: "`mean` stays above 0.9: add endpoints",
    },

    pub worker_prefill_tokens_per_second: Family<WorkerLabels, Gauge<f64, AtomicU64>> {
        seconds: false,
        labels: &["worker", "model"],
        help: "Learned prefill rate in uncached prompt tokens per second, for a prompt of 4096",
        meaning: "Prefill rate in uncached prompt tokens per second, learned from responses, for a prompt of 4096 tokens",
        worry: "one worker is at half the rate of similar ones: its GPU is throttled or shared",
    },

    pub worker_decode_step: Family<WorkerLabels, Gauge<f64, AtomicU64>> {
        seconds: true,
        labels: &["worker", "model"],
        help: "Learned time of a decode step at the current load",
        meaning: "Learned time of a decode step, and so between two tokens of a response, at the current load",
        worry: "one worker takes twice as long as similar ones",
    },

    pub worker_prefill_error_ratio: Family<WorkerLabels, Gauge<f64, AtomicU64>> {
        seconds: false,
        labels: &["worker", "model"],
        help: "Standard error of the learned prefill rate, as a share of it",
        meaning: "Standard error of the learned prefill rate, as a share of it: 0.05 is known within 5 % in two cases of three",
        worry: "it stays above 0.3 under load: measured times contradict each other",
    },

    pub worker_decode_error_ratio: Family<WorkerLabels, Gauge<f64, AtomicU64>> {
        seconds: false,
        labels: &["worker", "model"],
        help: "Standard error of the learned time of a decode step, as a share of it",
        meaning: "Standard error of the learned time of a decode step, as a share of it",
        worry: "it stays above 0.3 under load: measured times contradict each other",
    },

    pub worker_selection: Family<SelectionLabels, Counter> {
        seconds: false,
        labels: &["worker", "policy", "reason"],
        help: "Placements by policy and reason",
        meaning: "Placements",
        worry: "one worker gets most placements for a reason other than its prefix cache: other workers are down or slow",
    },

    pub worker_failures: Family<FailureLabels, Counter> {
        seconds: false,
        labels: &["worker", "kind"],
        help: "Failed attempts",
        meaning: "Failed attempts; `kind` is `connect`, `connect_timeout`, `broken`, `garbage`, `status`, `mid_stream`, `timeout`, `unfit` if its probes failed while a request waited, `stalled` if its engine made no progress, or `transfer` if the KV blocks of a split request did not arrive",
        worry: "one worker has most of them",
    },

    pub pair_warm_ups: Family<WarmUpLabel, Counter> {
        seconds: false,
        labels: &["outcome"],
        help: "Transfers of KV blocks that were tried before requests were split",
        meaning: "Pairs of workers between which a transfer was [tried](disaggregation.md#the-first-transfer) before requests are split: `ended`, `failed`, or `skipped` if there was no transfer for a reason that is not the pair's",
        worry: "`failed` grows: no request is split between these workers; the log names them, and `kvlane doctor` says what is wrong",
    },

    pub adapter_changes: Family<AdapterLabel, Counter> {
        seconds: false,
        labels: &["outcome"],
        help: "Adapters that workers loaded or unloaded for `adapters`",
        meaning: "[Adapters](models.md#adapters) that workers were asked to load or unload: `loaded`, `unloaded`, or `failed` for a load",
        worry: "`failed` grows: the log says why; or `unloaded` grows as fast as requests for adapters: there are too few slots",
    },

    pub worker_busy: Family<WorkerLabel, Counter> {
        seconds: false,
        labels: &["worker"],
        help: "Attempts that were answered 429 or 503",
        meaning: "Attempts that were answered 429 or 503; they do not count as failures",
        worry: "it grows everywhere: engines are full before the gateway expects it; lower `routing.max_requests_per_endpoint`",
    },
}
