//! Metrics of limits: usage of clients, and bounds that no response reports.

use kvlane_core::limit::Kind;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::table::Registration;

/// One entry of the configuration's limits.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct EntryLabels {
    /// Its key, or `*`.
    key: String,
    /// Its model, or `*`.
    model: String,
}

/// One entry, and which of its limits.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct LimitedLabels {
    key: String,
    model: String,
    /// `requests`, `tokens` or `concurrency`.
    limit: &'static str,
}

/// A bound that no other metric shows.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReachedLabel {
    limit: &'static str,
}

/// Bounds whose violation is not visible in any counted response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reached {
    /// A client took too long for a head.
    HeadTime,
    /// A client's head is too large.
    HeadBytes,
    /// The requests of all clients use all the memory they may.
    BodyMemory,
    /// A relay thread did not keep up with its connections.
    Handover,
    /// A connection could not be accepted: most likely no file descriptor was left.
    Accept,
    /// A pool has no room for another endpoint.
    PoolEndpoints,
    /// The gateway has no room for another worker.
    Workers,
    /// A KV event feed is over its allowance.
    KvEventWork,
}

// === impl Reached ===

impl Reached {
    /// Its label.
    const fn name(self) -> &'static str {
        match self {
            Self::HeadTime => "head_time",
            Self::HeadBytes => "head_bytes",
            Self::BodyMemory => "body_memory",
            Self::Handover => "handover",
            Self::Accept => "accept",
            Self::PoolEndpoints => "pool_endpoints",
            Self::Workers => "workers",
            Self::KvEventWork => "kv_event_work",
        }
    }
}

/// Metrics of requests rejected because of their client's limits.
#[derive(Default)]
pub struct LimitMetrics {
    limited: Family<LimitedLabels, Counter>,
    requests: Family<EntryLabels, Gauge>,
    keys: Family<EntryLabels, Gauge>,
    reached: Family<ReachedLabel, Counter>,
    body_memory: Gauge,
}

// === impl LimitMetrics ===

impl LimitMetrics {
    pub(super) fn register(&self, r: &mut Registration<'_>) {
        r.register("rate_limited", self.limited.clone());
        r.register("limit_requests_active", self.requests.clone());
        r.register("limits_reached", self.reached.clone());
        r.register("limit_keys", self.keys.clone());
        r.register("body_memory_bytes", self.body_memory.clone());
    }

    /// Counts that a limit was reached.
    pub fn reached(&self, reached: Reached) {
        self.reached.get_or_create(&ReachedLabel { limit: reached.name() }).inc();
    }

    /// Counts a request that was rejected for exceeding the limit `kind` of the entry `key`, `model`.
    pub fn note(&self, key: &str, model: &str, kind: Kind) {
        let labels = LimitedLabels { key: key.into(), model: model.into(), limit: kind.name() };
        self.limited.get_or_create(&labels).inc();
    }

    /// Sets the gauges: bytes that request bodies hold, and of each entry its key, model, number of client keys, and requests
    /// in flight. Entries that are not among them are dropped.
    pub fn set(&self, body_bytes: usize, entries: impl IntoIterator<Item = (String, String, usize, u64)>) {
        self.body_memory.set(body_bytes as i64);
        self.requests.clear();
        self.keys.clear();
        for (key, model, keys, in_flight) in entries {
            let labels = EntryLabels { key, model };
            self.requests.get_or_create(&labels).set(i64::try_from(in_flight).unwrap_or(i64::MAX));
            self.keys.get_or_create(&labels).set(keys as i64);
        }
    }

    /// Drops the metrics of an entry that no longer exists.
    pub fn forget(&self, key: &str, model: &str) {
        for kind in [Kind::Requests, Kind::Tokens, Kind::Concurrency] {
            let labels = LimitedLabels { key: key.into(), model: model.into(), limit: kind.name() };
            self.limited.remove(&labels);
        }
    }
}
