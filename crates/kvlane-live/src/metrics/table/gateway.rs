//! Metrics of the gateway itself.

use super::Kind::{Counter, Gauge};
use super::{Group, Row};

pub(super) const GROUP: Group =
    Group { title: "The gateway itself", intro: "Keys, limits, configuration, tasks.", rows: ROWS };

const ROWS: &[Row] = &[
    Row {
        name: "auth_requests",
        kind: Counter,
        seconds: false,
        labels: &["outcome", "name"],
        help: "Requests by whose key they showed",
        meaning: "Requests by whose key they showed (`accepted`, `forbidden`), or none where one was needed (`missing`), or one nobody has (`invalid`); the first 1,000 names, then `other`",
        worry: "`invalid` or `forbidden` grow: somebody tries keys, or a client has an old one",
    },
    Row {
        name: "tls_handshakes",
        kind: Counter,
        seconds: false,
        labels: &["outcome"],
        help: "Connections under TLS that began, or did not",
        meaning: "Clients with whom TLS began (`done`) or did not (`failed`)",
        worry: "`failed` grows: a certificate ran out, or a client does not trust it",
    },
    Row {
        name: "rate_limited",
        kind: Counter,
        seconds: false,
        labels: &["key", "model", "limit"],
        help: "Requests beyond what their client may use",
        meaning: "Requests beyond what their client may use, by the `key` and `model` of the entry in [limits](guide.md#limits), not of the client; `limit` is `requests`, `tokens` or `concurrency`",
        worry: "a client complains, or one you do not know is in a loop",
    },
    Row {
        name: "limit_requests_active",
        kind: Gauge,
        seconds: false,
        labels: &["key", "model"],
        help: "Requests in flight that a limit counts",
        meaning: "Requests in flight that the entry counts",
        worry: "it stays at the limit",
    },
    Row {
        name: "limit_keys",
        kind: Gauge,
        seconds: false,
        labels: &["key", "model"],
        help: "Keys whose use is remembered",
        meaning: "Clients whose use of it is remembered",
        worry: "it nears 100,000: somebody makes up names",
    },
    Row {
        name: "limits_reached",
        kind: Counter,
        seconds: false,
        labels: &["limit"],
        help: "Bounds that no answer tells of",
        meaning: "Times that a bound was met which no answer tells of: `head_time`, `head_bytes`, `handover`, `accept`, `pool_endpoints`, `workers`, see [limits](operations.md#limits)",
        worry: "it grows at all: the label names the bound",
    },
    Row {
        name: "config_reloads",
        kind: Counter,
        seconds: false,
        labels: &["result"],
        help: "Configurations taken over or refused",
        meaning: "Configurations that were `applied` while running, were `unchanged`, or were `refused`: see [reload](operations.md#reload)",
        worry: "`refused` grows: the file is wrong, and the one before still holds",
    },
    Row {
        name: "trace_spans",
        kind: Counter,
        seconds: false,
        labels: &["outcome"],
        help: "Spans of traces by what became of them",
        meaning: "Spans of [traces](observability.md#traces): `sent`, `dropped` (no room in the queue), `failed` (the collector could not be reached, or refused them), `rejected` (the collector took others of the same batch)",
        worry: "anything but `sent` grows: the collector is down or too slow",
    },
    Row {
        name: "recorder_bytes",
        kind: Counter,
        seconds: false,
        labels: &[],
        help: "Bytes of recordings written",
        meaning: "Bytes of [recordings](explain.md) written",
        worry: "",
    },
    Row {
        name: "recorder_segments_lost",
        kind: Counter,
        seconds: false,
        labels: &[],
        help: "Parts of recordings that were lost",
        meaning: "Parts of recordings, two seconds each or half a megabyte, that were lost",
        worry: "it grows: the disk is slow, full or gone",
    },
    Row {
        name: "tasks",
        kind: Gauge,
        seconds: false,
        labels: &[],
        help: "Tasks of all threads: connections, probes, feeds",
        meaning: "Tasks of all threads: one or two for each connection, and those of probes and feeds; it falls back to where it was when clients have left",
        worry: "it only grows",
    },
];
