//! Metrics of the gateway itself.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::row::rows;
use crate::metrics::labels::{
    AuthLabels, EntryLabels, HandshakeLabel, LimitedLabels, OutcomeLabel, PanicLabel, ReachedLabel,
    ReloadLabel,
};

rows! {
    Gateway, "The gateway itself", "Keys, limits, configuration, tasks.";

    pub(crate) auth_requests: Family<AuthLabels, Counter> {
        seconds: false,
        labels: &["outcome", "name"],
        help: "Requests by the result of authentication",
        meaning: "Requests by the result of authentication: `accepted`, `forbidden` (the key's role does not allow the request), `missing` (no key where one is needed) or `invalid` (unknown key); `name` is that of the key: the first 1,000 names, then `other`",
        worry: "`invalid` or `forbidden` grow: a client tries keys, or uses an old one",
    },

    pub(crate) tls_handshakes: Family<HandshakeLabel, Counter> {
        seconds: false,
        labels: &["outcome"],
        help: "TLS handshakes with clients",
        meaning: "TLS handshakes with clients, `done` or `failed`",
        worry: "`failed` grows: a certificate has expired, or a client does not trust it",
    },

    pub(crate) rate_limited: Family<LimitedLabels, Counter> {
        seconds: false,
        labels: &["key", "model", "limit"],
        help: "Requests rejected because of their client's limits",
        meaning: "Requests rejected because of their client's limits, by the `key` and `model` of the entry in [limits](guide.md#limits), not of the client; `limit` is `requests`, `tokens` or `concurrency`",
        worry: "a client complains, or an unknown client is in a loop",
    },

    pub(crate) limit_requests_active: Family<EntryLabels, Gauge> {
        seconds: false,
        labels: &["key", "model"],
        help: "Requests in flight that a limit counts",
        meaning: "Requests in flight that the entry counts",
        worry: "it stays at the limit",
    },

    pub(crate) limit_keys: Family<EntryLabels, Gauge> {
        seconds: false,
        labels: &["key", "model"],
        help: "Clients whose usage is tracked",
        meaning: "Clients whose usage of the entry is tracked",
        worry: "it nears 100,000: a client invents names",
    },

    pub body_memory_bytes: Gauge {
        seconds: false,
        labels: &[],
        help: "Bytes of requests held in memory",
        meaning: "Memory of the requests of all clients: bodies that arrive, wait or may be sent again",
        worry: "it nears `server.body_memory`: beyond it requests get 503",
    },

    pub(crate) limits_reached: Family<ReachedLabel, Counter> {
        seconds: false,
        labels: &["limit"],
        help: "Bounds reached that no response reports",
        meaning: "Times that a bound was reached that no response reports: `head_time`, `head_bytes`, `body_memory`, `handover`, `accept`, `pool_endpoints`, `workers`, `kv_event_work`, see [limits](operations.md#limits)",
        worry: "it grows at all: the label is the bound",
    },

    pub(crate) panics: Family<PanicLabel, Counter> {
        seconds: false,
        labels: &["thread"],
        help: "Panics, by kind of thread",
        meaning: "Panics by kind of thread: in `relay` a client's connection is lost, in `tokens` one prompt's count, in `ingest` and `apply` the KV event state of one engine, in `recorder` a part of a recording. The log has the place in the program",
        worry: "it grows at all: report the log line",
    },

    pub config_reloads: Family<ReloadLabel, Counter> {
        seconds: false,
        labels: &["result"],
        help: "Configuration reloads by result",
        meaning: "Configuration reloads: `applied`, `unchanged` or `refused`, see [reload](operations.md#reload)",
        worry: "`refused` grows: the file is invalid, and the previous configuration stays in effect",
    },

    pub(crate) trace_spans: Family<OutcomeLabel, Counter> {
        seconds: false,
        labels: &["outcome"],
        help: "Spans of traces by outcome",
        meaning: "Spans of [traces](observability.md#traces): `sent`, `dropped` (no room in the queue), `failed` (the collector could not be reached, or rejected the batch), `rejected` (the collector accepted only others of the batch)",
        worry: "anything but `sent` grows: the collector is down or too slow",
    },

    pub recorder_bytes: Counter {
        seconds: false,
        labels: &[],
        help: "Bytes of recordings written",
        meaning: "Bytes of [recordings](explain.md) written",
        worry: "",
    },

    pub recorder_segments_lost: Counter {
        seconds: false,
        labels: &[],
        help: "Parts of recordings that were lost",
        meaning: "Parts of recordings, two seconds each or half a megabyte, that were lost",
        worry: "it grows: the disk is slow, full or gone",
    },

    pub tasks: Gauge {
        seconds: false,
        labels: &[],
        help: "Tasks of all threads: connections, probes, feeds",
        meaning: "Tasks of all threads: one or two for each connection, and those of probes and feeds; it returns to its earlier value when clients disconnect",
        worry: "it only grows",
    },
}
