//! Metrics of the KV event feeds of endpoints.

use std::sync::atomic::Ordering;

use kvlane_core::cache_accuracy::Feed;
use kvlane_core::time::Nanos;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use super::labels::{KindLabels, StateLabels, WorkerLabel, WorkerLabels};
use super::table::Knowledge;
use crate::feed::EventFeed;

/// Counters and gauges of [`kvlane_control::ingest`].
#[derive(Debug, Default)]
pub struct FeedMetrics(pub(super) Knowledge);

const STATES: [Feed; 4] = [Feed::Absent, Feed::Refused, Feed::Syncing, Feed::Live];

// === impl FeedMetrics ===

impl FeedMetrics {
    /// Called before the endpoints are read, so that endpoints that have left disappear.
    pub fn clear(&self) {
        [&self.0.kv_events, &self.0.kv_messages, &self.0.kv_incidents].into_iter().for_each(Family::clear);
        self.0.kv_feed_state.clear();
        self.0.kv_queue_messages.clear();
        [&self.0.kv_event_lag, &self.0.kv_event_age].into_iter().for_each(Family::clear);
        self.0.kv_blocks.clear();
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
        count(&self.0.kv_events, &seen.events.by_kind());
        count(&self.0.kv_messages, &seen.messages(dropped));
        count(&self.0.kv_incidents, &seen.incidents());
        for state in STATES {
            let labels = StateLabels { worker: worker.clone(), state: state.name() };
            self.0.kv_feed_state.get_or_create(&labels).set((state == seen.state).into());
        }
        self.0.kv_queue_messages.get_or_create(&label).set(waiting as i64);
        if let Some(at) = seen.applied_at {
            self.0.kv_event_lag.get_or_create(&label).set(seen.lag_s);
            self.0.kv_event_age.get_or_create(&label).set((now - at).as_secs_f64());
        }
        if let Some(blocks) = blocks {
            let labels = WorkerLabels { worker, model: model.into() };
            self.0.kv_blocks.get_or_create(&labels).set(blocks as i64);
        }
    }
}
