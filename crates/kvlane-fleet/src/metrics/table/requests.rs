//! Metrics of requests.

use super::row::Kind::{Counter, Gauge, Histogram};
use super::row::{Group, Row};

pub(super) const GROUP: Group =
    Group { title: "Requests", intro: "Clients' requests and their outcomes.", rows: ROWS };

const ROWS: &[Row] = &[
    Row {
        name: "requests",
        kind: Counter,
        seconds: false,
        labels: &["model", "api", "code"],
        help: "Requests answered, by model, API and status",
        meaning: "Requests answered; `code` is 499 if the client disconnected first, and the initial status if the response broke later. `model` is the pool's, empty if there was none. `api` is `other` for paths outside the table, including kvlane's own",
        worry: "the share of 5xx grows; many 499 are clients that gave up waiting; many 429 mean that the fleet is too small",
    },
    Row {
        name: "request_duration",
        kind: Histogram,
        seconds: true,
        labels: &["model"],
        help: "Request received to last byte",
        meaning: "From receipt to last byte, for complete responses",
        worry: "its high percentiles grow while `kvlane_output_tokens_total` does not",
    },
    Row {
        name: "ttft",
        kind: Histogram,
        seconds: true,
        labels: &["model"],
        help: "Request received to first token",
        meaning: "From receipt to first token, for event streams",
        worry: "its 90th percentile exceeds your target: see `kvlane_stage_seconds` for the stage that takes the time",
    },
    Row {
        name: "tpot",
        kind: Histogram,
        seconds: true,
        labels: &["model"],
        help: "Mean time per output token after the first",
        meaning: "Mean time per output token after the first, one value per streamed response",
        worry: "it grows: batches are too large, or preemption; compare workers by `kvlane_worker_decode_step_seconds`",
    },
    Row {
        name: "stage",
        kind: Histogram,
        seconds: true,
        labels: &["model", "stage"],
        help: "Time until the head of a response, by stage",
        meaning: "Time until the head of a response, by [stage](observability.md#server-timing)",
        worry: "`queue` grows: the fleet is full; `tokenize` grows: `tokens.threads`; `retry` is present: a worker fails; `read`, `parse` and `place` are more than milliseconds: the gateway has too little CPU",
    },
    Row {
        name: "queue_requests",
        kind: Gauge,
        seconds: false,
        labels: &["model"],
        help: "Requests in the queue",
        meaning: "Requests in the queue",
        worry: "it stays above 0: the fleet is full",
    },
    Row {
        name: "shed",
        kind: Counter,
        seconds: false,
        labels: &["model", "reason"],
        help: "Requests rejected with 429, by reason",
        meaning: "Requests rejected with 429; `reason` is the error's code: `queue_full`, `queue_timeout`, `retry_budget_spent`",
        worry: "it grows: the fleet is too small for the load, or a limit is too low",
    },
    Row {
        name: "shed_ratio",
        kind: Gauge,
        seconds: false,
        labels: &["model"],
        help: "Share of requests rejected with 429, over about the last minute",
        meaning: "Share of requests rejected with 429, over about the last minute",
        worry: "it is above 0.01 for minutes",
    },
    Row {
        name: "retries",
        kind: Counter,
        seconds: false,
        labels: &["model"],
        help: "Attempts after the first",
        meaning: "Attempts after the first",
        worry: "it grows: `kvlane_worker_failures_total` shows which worker fails and how",
    },
    Row {
        name: "hedges",
        kind: Counter,
        seconds: false,
        labels: &["outcome"],
        help: "Second copies of requests whose first was late",
        meaning: "Second copies of requests whose first was [late](operations.md#hedging): `won`, `lost`, or `refused` if no endpoint could take one within the budget",
        worry: "more are `won` than `lost`: a worker is often late",
    },
    Row {
        name: "continuations",
        kind: Counter,
        seconds: false,
        labels: &["outcome"],
        help: "Streams that broke, where they can be continued",
        meaning: "[streams that broke](operations.md#continuation) and might have been continued: `resumed` on another endpoint, `closed` because only the end was missing, `unfit`, `exhausted` (`max_per_request`), `refused` (no worker, no budget, or rejected by the worker), `misfit` (the new stream does not continue the old one)",
        worry: "`unfit`, `refused` or `misfit` grow: clients see streams break",
    },
];
