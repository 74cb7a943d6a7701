//! Metrics of workers.

use super::Kind::{Counter, Gauge};
use super::{Group, Row};

pub(super) const GROUP: Group =
    Group { title: "Workers", intro: "Who is there, what they have to do, how they fare.", rows: ROWS };

const ROWS: &[Row] = &[
    Row {
        name: "worker_health",
        kind: Gauge,
        seconds: false,
        labels: &["worker"],
        help: "1 if requests are placed there",
        meaning: "1 if healthy",
        worry: "0 for longer than a restart takes",
    },
    Row {
        name: "worker_requests_active",
        kind: Gauge,
        seconds: false,
        labels: &["worker", "model"],
        help: "Requests in flight",
        meaning: "Requests in flight",
        worry: "one worker has far more than the others",
    },
    Row {
        name: "worker_prefill_tokens",
        kind: Gauge,
        seconds: false,
        labels: &["worker", "model"],
        help: "Uncached prompt tokens in flight",
        meaning: "Uncached prompt tokens in flight (`P`)",
        worry: "it stays high at one worker: its prompts wait",
    },
    Row {
        name: "worker_context_tokens",
        kind: Gauge,
        seconds: false,
        labels: &["worker", "model"],
        help: "Prompt and output tokens in flight",
        meaning: "Prompt and output tokens in flight (`T`)",
        worry: "it nears what the KV cache holds",
    },
    Row {
        name: "worker_kv_usage_ratio",
        kind: Gauge,
        seconds: false,
        labels: &["worker", "model"],
        help: "KV cache use as the engine reports it",
        meaning: "KV cache use, as the engine reports it",
        worry: "above 0.95: the engine preempts soon",
    },
    Row {
        name: "worker_prefill_tokens_per_second",
        kind: Gauge,
        seconds: false,
        labels: &["worker", "model"],
        help: "Uncached prompt tokens it computes in a second, as learned, for a prompt of 4096",
        meaning: "Uncached prompt tokens it computes in a second, as learned from its answers, for a prompt of 4096 tokens",
        worry: "one worker is at half of its like: a GPU that is throttled or shared",
    },
    Row {
        name: "worker_decode_step",
        kind: Gauge,
        seconds: true,
        labels: &["worker", "model"],
        help: "Time of a decode step with what it decodes at present, as learned",
        meaning: "Time of a decode step, and so between two tokens of an answer, with what it decodes at present, as learned",
        worry: "one worker takes twice as long as its like",
    },
    Row {
        name: "worker_selection",
        kind: Counter,
        seconds: false,
        labels: &["worker", "policy", "reason"],
        help: "Placements by policy and reason",
        meaning: "Placements",
        worry: "one worker gets most placements under a reason that is no prefix: others are down or slow",
    },
    Row {
        name: "worker_failures",
        kind: Counter,
        seconds: false,
        labels: &["worker", "kind"],
        help: "Failed attempts",
        meaning: "Failed attempts; `kind` is `connect`, `connect_timeout`, `broken`, `garbage`, `status`, `mid_stream`, `timeout`, or `unfit` if its probes failed while a request waited",
        worry: "one worker has most of them",
    },
    Row {
        name: "worker_busy",
        kind: Counter,
        seconds: false,
        labels: &["worker"],
        help: "Attempts that were answered 429 or 503",
        meaning: "Attempts that were answered 429 or 503: no failures",
        worry: "it grows everywhere: engines are full before the gateway knows it; lower `routing.max_requests_per_endpoint`",
    },
];
