//! Metrics of requests.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::row::rows;
use crate::metrics::histogram::Histogram;
use crate::metrics::labels::{
    ContinuedLabel, HedgeLabel, HistogramFamily, MirrorLabels, ModelLabel, PredictionLabels, RequestLabels,
    ShedLabel, SloLabels, StageLabels, TargetLabels,
};

/// Upper bounds in seconds for times to first token and whole requests.
const LATENCY_BUCKETS: [f64; 18] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 25.0, 50.0, 100.0, 300.0,
    1000.0,
];

/// Upper bounds in seconds for the time per output token.
const TPOT_BUCKETS: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0];

/// Upper bounds in seconds: from the time of parsing to that of a long prompt in a long queue.
const STAGE_BUCKETS: [f64; 17] = [
    0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0,
    10.0, 60.0, 300.0,
];

rows! {
    Requests, "Requests", "Clients' requests and their outcomes.";

    pub requests: Family<RequestLabels, Counter> {
        seconds: false,
        labels: &["model", "api", "code"],
        help: "Requests answered, by model, API and status",
        meaning: "Requests answered; `code` is 499 if the client disconnected first, and the initial status if the response broke later. `model` is the name of `models` that the client used, else the pool's, empty if there was none. `api` is `other` for paths outside the table, including kvlane's own",
        worry: "the share of 5xx grows; many 499 are clients that gave up waiting; many 429 mean that the fleet is too small",
    },

    pub request_duration: HistogramFamily<ModelLabel> {
        seconds: true,
        labels: &["model"],
        help: "Request received to last byte",
        meaning: "From receipt to last byte, for complete responses",
        worry: "its high percentiles grow while `kvlane_output_tokens_total` does not",
    } = Family::new_with_constructor(|| Histogram::fine(LATENCY_BUCKETS)),

    pub ttft: HistogramFamily<ModelLabel> {
        seconds: true,
        labels: &["model"],
        help: "Request received to first token",
        meaning: "From receipt to first token, for event streams",
        worry: "its 90th percentile exceeds your target: see `kvlane_stage_seconds` for the stage that takes the time",
    } = Family::new_with_constructor(|| Histogram::fine(LATENCY_BUCKETS)),

    pub tpot: HistogramFamily<ModelLabel> {
        seconds: true,
        labels: &["model"],
        help: "Mean time per output token after the first",
        meaning: "Mean time per output token after the first, one value per streamed response",
        worry: "it grows: batches are too large, or preemption; compare workers by `kvlane_worker_decode_step_seconds`",
    } = Family::new_with_constructor(|| Histogram::fine(TPOT_BUCKETS)),

    pub splits: Family<ModelLabel, Counter> {
        seconds: false,
        labels: &["model"],
        help: "Attempts that were split between two workers",
        meaning: "Attempts that were [split](disaggregation.md): one worker computes the prompt, another decodes",
        worry: "it stands still in a fleet with prefill workers: transfers take longer than they save, or no pair of workers is connected",
    },

    pub kv_transfer: HistogramFamily<ModelLabel> {
        seconds: true,
        labels: &["model"],
        help: "Prefill answered to first token at another worker",
        meaning: "From the answer of a prefill worker to the first token of the [worker that decodes](disaggregation.md), for event streams",
        worry: "it grows: the network between the engines, or the room in the caches of those that decode; requests that are split have learned it",
    } = Family::new_with_constructor(|| Histogram::fine(LATENCY_BUCKETS)),

    pub(crate) stage: HistogramFamily<StageLabels> {
        seconds: true,
        labels: &["model", "stage"],
        help: "Time until the head of a response, by stage",
        meaning: "Time until the head of a response, by [stage](observability.md#server-timing)",
        worry: "`queue` grows: the fleet is full; `tokenize` grows: `tokens.threads`; `retry` is present: a worker fails; `read`, `parse` and `place` are more than milliseconds: the gateway has too little CPU",
    } = Family::new_with_constructor(|| Histogram::new(STAGE_BUCKETS)),

    pub queue_requests: Family<ModelLabel, Gauge> {
        seconds: false,
        labels: &["model"],
        help: "Requests in the queue",
        meaning: "Requests in the queue",
        worry: "it stays above 0: the fleet is full",
    },

    pub queue: Family<ModelLabel, Gauge<f64, AtomicU64>> {
        seconds: true,
        labels: &["model"],
        help: "Prefill work before a new request, at the endpoint with the soonest first token",
        meaning: "Prefill work that a new request finds before it, at the endpoint with the soonest first token, by learned rates: what is in flight there, and its share of the queue ([autoscaling](autoscaling.md))",
        worry: "it stays above your target for the time to first token: every endpoint is too busy",
    },

    pub queue_mean: Family<ModelLabel, Gauge<f64, AtomicU64>> {
        seconds: true,
        labels: &["model"],
        help: "The same, as the mean of the endpoints that take requests",
        meaning: "The same, as the mean of the endpoints that take requests",
        worry: "it is far above `kvlane_queue_seconds`: one endpoint has most of the work",
    },

    pub predicted_ttft: Family<ModelLabel, Gauge<f64, AtomicU64>> {
        seconds: true,
        labels: &["model"],
        help: "Predicted time to first token of a request of usual size, placed now",
        meaning: "Predicted time to first token of a request like the mean of the last 128, placed now at the endpoint with the soonest first token: `kvlane_queue_seconds`, its own prefill, and a step; absent with `routing.receipts: 0` ([autoscaling](autoscaling.md))",
        worry: "it nears your target: add endpoints",
    },

    pub ttft_predictions: Family<PredictionLabels, Counter> {
        seconds: false,
        labels: &["model", "error"],
        help: "First tokens, by the error of their predicted time, in percent of the measured time",
        meaning: "First tokens of streams, by how far the time predicted at placement was off, as a range of percent of the measured time: `0-15%`, `15-35%`, `35-100%`, `100%+`",
        worry: "less than half are `0-15%` under steady load: latency objectives and admission by predicted time are unreliable",
    },

    pub(crate) slo_requests: Family<SloLabels, Counter> {
        seconds: false,
        labels: &["model", "outcome"],
        help: "Requests with latency objectives, by outcome",
        meaning: "Requests with [latency objectives](operations.md#latency-objectives): streams that `met` or `missed` them, and requests that were `refused`, for whatever reason",
        worry: "the share of `met` falls: add endpoints, or see by `kvlane_ttft_predictions_total` whether predictions are off",
    },

    pub waiting_for_endpoints: Family<ModelLabel, Gauge> {
        seconds: false,
        labels: &["model"],
        help: "Requests that wait for the first endpoint of an empty pool",
        meaning: "Requests that wait for the first endpoint of a pool that has none ([scale to zero](autoscaling.md#scale-to-zero)); `other` for models that are not known",
        worry: "it stays above 0: nothing starts an engine",
    },

    pub requests_without_endpoint: Family<ModelLabel, Counter> {
        seconds: false,
        labels: &["model"],
        help: "Requests that found no endpoint for their model, whether they waited or were rejected",
        meaning: "Requests that found no endpoint for their model, whether they waited for one or got 503 at once; `other` for models that are not known",
        worry: "it grows: no engine serves the model",
    },

    pub(crate) shed: Family<ShedLabel, Counter> {
        seconds: false,
        labels: &["model", "reason"],
        help: "Requests rejected with 429, by reason",
        meaning: "Requests rejected with 429; `reason` is the error's code: `queue_full`, `queue_timeout`, `retry_budget_spent`, `slo_missed`",
        worry: "it grows: the fleet is too small for the load, or a limit is too low",
    },

    pub shed_ratio: Family<ModelLabel, Gauge<f64, AtomicU64>> {
        seconds: false,
        labels: &["model"],
        help: "Share of requests rejected with 429, over about the last minute",
        meaning: "Share of requests rejected with 429, over about the last minute",
        worry: "it is above 0.01 for minutes",
    },

    pub targets: Family<TargetLabels, Counter> {
        seconds: false,
        labels: &["model", "target", "why"],
        help: "Requests for names of the catalogue, by the model that answered",
        meaning: "Answers to requests for a name of `models`, by the model that answered; `why` is `target`, or why it is a fallback: `not_served`, `no_endpoint`, `queue_full`, `failed`",
        worry: "fallbacks serve a large share: see why their target cannot",
    },

    pub mirrored: Family<MirrorLabels, Counter> {
        seconds: false,
        labels: &["model", "outcome"],
        help: "Copies of requests for another model",
        meaning: "Copies of requests (`models.*.mirror`), by the model that gets them; `outcome` is `dropped` where 64 copies are in flight",
        worry: "many are dropped: that model is slower than the share that it gets",
    },

    pub retries: Family<ModelLabel, Counter> {
        seconds: false,
        labels: &["model"],
        help: "Attempts after the first",
        meaning: "Attempts after the first",
        worry: "it grows: `kvlane_worker_failures_total` shows which worker fails and how",
    },

    pub(crate) hedges: Family<HedgeLabel, Counter> {
        seconds: false,
        labels: &["outcome"],
        help: "Second copies of requests whose first was late",
        meaning: "Second copies of requests whose first was [late](operations.md#hedging): `won`, `lost`, or `refused` if no endpoint could take one within the budget",
        worry: "more are `won` than `lost`: a worker is often late",
    },

    pub(crate) continuations: Family<ContinuedLabel, Counter> {
        seconds: false,
        labels: &["outcome"],
        help: "Streams that broke, where they can be continued",
        meaning: "[streams that broke](operations.md#continuation) and might have been continued: `resumed` on another endpoint, `closed` because only the end was missing, `unfit`, `exhausted` (`max_per_request`), `refused` (no worker, no budget, or rejected by the worker), `misfit` (the new stream does not continue the old one)",
        worry: "`unfit`, `refused` or `misfit` grow: clients see streams break",
    },
}
