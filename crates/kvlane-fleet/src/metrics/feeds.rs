//! Metrics of the KV event feeds of endpoints.

use std::sync::atomic::{AtomicU64, Ordering};

use kvlane_core::cache_accuracy::Feed;
use kvlane_core::time::Nanos;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::labels::{WorkerLabel, WorkerLabels};
use super::table::Registration;
use crate::feed::EventFeed;

/// A kind of event, message or incident of a feed.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KindLabels {
    worker: String,
    kind: &'static str,
}

/// One state of a feed.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StateLabels {
    worker: String,
    state: &'static str,
}

/// Counters and gauges of [`kvlane_control::ingest`].
#[derive(Debug, Default)]
pub struct FeedMetrics {
    events: Family<KindLabels, Counter>,
    messages: Family<KindLabels, Counter>,
    incidents: Family<KindLabels, Counter>,
    state: Family<StateLabels, Gauge>,
    waiting: Family<WorkerLabel, Gauge>,
    lag: Family<WorkerLabel, Gauge<f64, AtomicU64>>,
    age: Family<WorkerLabel, Gauge<f64, AtomicU64>>,
    blocks: Family<WorkerLabels, Gauge>,
}

const STATES: [Feed; 4] = [Feed::Absent, Feed::Refused, Feed::Syncing, Feed::Live];

// === impl FeedMetrics ===

impl FeedMetrics {
    pub(super) fn register(&self, r: &mut Registration<'_>) {
        r.register("kv_events", self.events.clone());
        r.register("kv_messages", self.messages.clone());
        r.register("kv_incidents", self.incidents.clone());
        r.register("kv_feed_state", self.state.clone());
        r.register("kv_queue_messages", self.waiting.clone());
        r.register("kv_event_lag", self.lag.clone());
        r.register("kv_event_age", self.age.clone());
        r.register("kv_blocks", self.blocks.clone());
    }

    /// Called before the endpoints are read, so that endpoints that have left disappear.
    pub fn clear(&self) {
        [&self.events, &self.messages, &self.incidents].into_iter().for_each(Family::clear);
        self.state.clear();
        self.waiting.clear();
        [&self.lag, &self.age].into_iter().for_each(Family::clear);
        self.blocks.clear();
    }

    /// Sets the gauges of the feed of an endpoint of `model`; the index holds `blocks` blocks of it.
    pub fn set(&self, now: Nanos, model: &str, feed: &EventFeed, blocks: Option<u64>) {
        let seen = feed.seen();
        let (waiting, dropped) = feed.waiting();
        let worker = feed.name.to_string();
        let label = WorkerLabel { worker: worker.clone() };
        let count = |family: &Family<KindLabels, Counter>, counts: &[(&'static str, u64)]| {
            for &(kind, total) in counts {
                let labels = KindLabels { worker: worker.clone(), kind };
                family.get_or_create(&labels).inner().store(total, Ordering::Relaxed);
            }
        };
        count(&self.events, &seen.events.by_kind());
        count(&self.messages, &seen.messages(dropped));
        count(&self.incidents, &seen.incidents());
        for state in STATES {
            let labels = StateLabels { worker: worker.clone(), state: state.name() };
            self.state.get_or_create(&labels).set((state == seen.state).into());
        }
        self.waiting.get_or_create(&label).set(waiting as i64);
        if let Some(at) = seen.applied_at {
            self.lag.get_or_create(&label).set(seen.lag_s);
            self.age.get_or_create(&label).set((now - at).as_secs_f64());
        }
        if let Some(blocks) = blocks {
            let labels = WorkerLabels { worker, model: model.into() };
            self.blocks.get_or_create(&labels).set(blocks as i64);
        }
    }
}
