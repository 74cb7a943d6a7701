//! Metrics of limits: usage of clients, and bounds that no response reports.

use kvlane_core::limit::Kind;

use super::labels::{EntryLabels, LimitedLabels, ReachedLabel};
use super::table::Gateway;

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
pub struct LimitMetrics(pub(super) Gateway);

// === impl LimitMetrics ===

impl LimitMetrics {
    /// Counts that a limit was reached.
    pub fn reached(&self, reached: Reached) {
        self.0.limits_reached.get_or_create(&ReachedLabel { limit: reached.name() }).inc();
    }

    /// Counts a request that was rejected for exceeding the limit `kind` of the entry `key`, `model`.
    pub fn note(&self, key: &str, model: &str, kind: Kind) {
        let labels = LimitedLabels { key: key.into(), model: model.into(), limit: kind.name() };
        self.0.rate_limited.get_or_create(&labels).inc();
    }

    /// Sets the gauges: bytes that request bodies hold, and of each entry its key, model, number of client keys, and requests
    /// in flight. Entries that are not among them are dropped.
    pub fn set(&self, body_bytes: usize, entries: impl IntoIterator<Item = (String, String, usize, u64)>) {
        self.0.body_memory_bytes.set(body_bytes as i64);
        self.0.limit_requests_active.clear();
        self.0.limit_keys.clear();
        for (key, model, keys, in_flight) in entries {
            let labels = EntryLabels { key, model };
            self.0
                .limit_requests_active
                .get_or_create(&labels)
                .set(i64::try_from(in_flight).unwrap_or(i64::MAX));
            self.0.limit_keys.get_or_create(&labels).set(keys as i64);
        }
    }

    /// Drops the metrics of an entry that no longer exists.
    pub fn forget(&self, key: &str, model: &str) {
        for kind in [Kind::Requests, Kind::Tokens, Kind::Concurrency] {
            let labels = LimitedLabels { key: key.into(), model: model.into(), limit: kind.name() };
            self.0.rate_limited.remove(&labels);
        }
    }
}
