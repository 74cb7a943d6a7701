//! What clients may use, in figures.

use kvlane_core::limit::Kind;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::limits::{Limited, Limits};

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

/// Requests that were turned away for what their client has used, and what is counted for that.
#[derive(Default)]
pub(crate) struct LimitMetrics {
    limited: Family<LimitedLabels, Counter>,
    requests: Family<EntryLabels, Gauge>,
    keys: Family<EntryLabels, Gauge>,
}

// === impl LimitMetrics ===

impl LimitMetrics {
    pub(super) fn register(&self, r: &mut Registry) {
        r.register("rate_limited", "Requests beyond what their client may use", self.limited.clone());
        r.register("limit_requests_active", "Requests in flight that a limit counts", self.requests.clone());
        r.register("limit_keys", "Keys whose use is remembered", self.keys.clone());
    }

    pub(crate) fn note(&self, limited: &Limited) {
        let Limited { key, model, exceeded } = limited.clone();
        self.limited.get_or_create(&LimitedLabels { key, model, limit: exceeded.kind.name() }).inc();
    }

    /// Takes over what stands now, and forgets entries that are no more.
    pub(super) fn read(&self, limits: &Limits) {
        self.requests.clear();
        self.keys.clear();
        let figures = limits.figures();
        for (spec, keys, in_flight) in &figures {
            let labels = EntryLabels { key: spec.key.clone(), model: spec.model.clone() };
            self.requests.get_or_create(&labels).set(i64::try_from(*in_flight).unwrap_or(i64::MAX));
            self.keys.get_or_create(&labels).set(*keys as i64);
        }
    }

    /// Forgets an entry that is no more.
    pub(crate) fn forget(&self, key: &str, model: &str) {
        for kind in [Kind::Requests, Kind::Tokens, Kind::Concurrency] {
            let labels = LimitedLabels { key: key.into(), model: model.into(), limit: kind.name() };
            self.limited.remove(&labels);
        }
    }
}
