//! Metrics of requests.

use super::row::Kind::{Counter, Gauge, Histogram};
use super::row::{Group, Row};

pub(super) const GROUP: Group =
    Group { title: "Requests", intro: "What clients ask and how it ends.", rows: ROWS };

const ROWS: &[Row] = &[
    Row {
        name: "requests",
        kind: Counter,
        seconds: false,
        labels: &["model", "api", "code"],
        help: "Requests answered, by model, API and status",
        meaning: "Requests answered; `code` is 499 if the client left first, and the status it began with if the answer broke later. `model` is the pool's, empty if there was none. `api` is `other` for paths outside the table, kvlane's own among them",
        worry: "the share of 5xx grows; many 499 are clients that gave up waiting; many 429 are a fleet that is too small",
    },
    Row {
        name: "request_duration",
        kind: Histogram,
        seconds: true,
        labels: &["model"],
        help: "Request received to last byte",
        meaning: "Received to last byte, of answers that came to their end",
        worry: "its tail grows while `kvlane_output_tokens_total` does not",
    },
    Row {
        name: "ttft",
        kind: Histogram,
        seconds: true,
        labels: &["model"],
        help: "Request received to first token",
        meaning: "Received to first token, of answers that are streams of events",
        worry: "its 90th percentile leaves what you promised: look at `kvlane_stage_seconds` for where the time goes",
    },
    Row {
        name: "tpot",
        kind: Histogram,
        seconds: true,
        labels: &["model"],
        help: "Mean time per output token after the first",
        meaning: "Mean time per output token after the first, one per streamed answer",
        worry: "it grows: batches are too large, or preemption; compare workers by `kvlane_worker_decode_step_seconds`",
    },
    Row {
        name: "stage",
        kind: Histogram,
        seconds: true,
        labels: &["model", "stage"],
        help: "Where the time until the head of an answer went, by stage",
        meaning: "Where the time until the heads of answers went, by [stage](observability.md#server-timing)",
        worry: "`queue` grows: the fleet is full; `tokenize` grows: `tokens.threads`; `retry` is there at all: a worker fails; `read`, `parse` and `place` are more than milliseconds: the gateway has too little CPU",
    },
    Row {
        name: "queue_requests",
        kind: Gauge,
        seconds: false,
        labels: &["model"],
        help: "Requests waiting for a place",
        meaning: "Requests that wait for a place",
        worry: "it stays above 0: the fleet is full",
    },
    Row {
        name: "shed",
        kind: Counter,
        seconds: false,
        labels: &["model", "reason"],
        help: "Requests refused with 429, by reason",
        meaning: "Requests refused with 429; `reason` is the error's code: `queue_full`, `queue_timeout`, `retry_budget_spent`",
        worry: "it grows: the fleet is too small for what comes, or a limit too low",
    },
    Row {
        name: "shed_ratio",
        kind: Gauge,
        seconds: false,
        labels: &["model"],
        help: "Share of the requests of the last minute or so that were shed",
        meaning: "Share of the requests of the last minute or so that were refused with 429",
        worry: "it is above 0.01 for minutes",
    },
    Row {
        name: "retries",
        kind: Counter,
        seconds: false,
        labels: &["model"],
        help: "Attempts after the first",
        meaning: "Attempts after the first",
        worry: "it grows: `kvlane_worker_failures_total` says who fails and how",
    },
    Row {
        name: "hedges",
        kind: Counter,
        seconds: false,
        labels: &["outcome"],
        help: "Second copies of requests whose first was late",
        meaning: "Second copies of requests whose first was [late](operations.md#hedging): `won`, `lost`, or `refused` if nobody was to take one",
        worry: "more are `won` than `lost`: a worker is often late",
    },
    Row {
        name: "continuations",
        kind: Counter,
        seconds: false,
        labels: &["outcome"],
        help: "Streams that broke, where they can be continued",
        meaning: "[streams that broke](operations.md#continuation) and might have gone on: `resumed` elsewhere, `closed` because only the end was missing, `unfit`, `exhausted` (`max_per_request`), `refused` (no worker, no budget, or its refusal), `misfit` (what came back does not continue it)",
        worry: "`unfit`, `refused` or `misfit` grow: clients see streams break",
    },
];
