//! Metrics of busy and failing engines: shed requests, hedging, continuation, stalls.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use kvlane_core::decision::Rejection;
use kvlane_core::time::Nanos;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;

use super::labels::{Continued, ContinuedLabel, HedgeLabel, Hedged, ModelLabel, ShedLabel, WorkerLabel};
use super::table::{Requests, Workers};

/// Time constant of the share of shed requests: a request's weight falls to 1/e in this time.
const SHARE_SPAN_S: f64 = 60.0;

/// Counters of faults and of the gateway's reactions.
#[derive(Default)]
pub struct FaultMetrics {
    pub(super) requests: Requests,
    pub(super) workers: Workers,
}

/// Counters of requests shed by one pool.
pub struct Shed {
    by_reason: [Counter; REASONS.len()],
    share: Gauge<f64, AtomicU64>,
    recent: Arc<Mutex<Recent>>,
}

/// Recent requests, with weights that fall with their age.
#[derive(Debug, Default)]
struct Recent {
    at: Nanos,
    arrived: f64,
    shed: f64,
}

/// Reasons to shed a request; each is the `code` of the client's error.
const REASONS: [(Rejection, &str); 4] = [
    (Rejection::QueueFull, "queue_full"),
    (Rejection::QueueTimeout, "queue_timeout"),
    (Rejection::BudgetSpent, "retry_budget_spent"),
    (Rejection::SloMissed, "slo_missed"),
];

// === impl Shed ===

impl Shed {
    /// Counts a request that has arrived.
    pub fn arrived(&self, now: Nanos) {
        self.note(now, |recent| recent.arrived += 1.0);
    }

    /// Counts a request that was rejected.
    pub fn refused(&self, now: Nanos, why: Rejection) {
        if let Some(n) = REASONS.iter().position(|(reason, _)| *reason == why) {
            self.by_reason[n].inc();
            self.note(now, |recent| recent.shed += 1.0);
        }
    }

    /// The number of rejected requests by error code.
    pub fn by_reason(&self) -> [(&'static str, u64); REASONS.len()] {
        std::array::from_fn(|n| (REASONS[n].1, self.by_reason[n].get()))
    }

    /// Brings the share up to date: 0 if no request has arrived within about the last minute.
    pub fn read(&self, now: Nanos) {
        let recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if now.0.saturating_sub(recent.at.0) as f64 / 1e9 > SHARE_SPAN_S {
            self.share.set(0.0);
        }
    }

    /// The share of recent requests that were rejected.
    pub fn share(&self) -> f64 {
        self.share.get()
    }

    fn note(&self, now: Nanos, note: impl FnOnce(&mut Recent)) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let age_s = now.0.saturating_sub(recent.at.0) as f64 / 1e9;
        let kept = (-age_s / SHARE_SPAN_S).exp();
        recent.at = recent.at.max(now);
        recent.arrived *= kept;
        recent.shed *= kept;
        note(&mut recent);
        // A request may be rejected long after it arrived.
        self.share.set((recent.shed / recent.arrived).min(1.0));
    }
}

// === impl FaultMetrics ===

impl FaultMetrics {
    /// Counts a response of a busy engine.
    pub fn note_busy(&self, worker: &str) {
        self.workers.worker_busy.get_or_create(&WorkerLabel { worker: worker.into() }).inc();
    }

    /// Counts a second copy of a request, or a refusal to send one.
    pub fn note_hedge(&self, outcome: Hedged) {
        self.requests.hedges.get_or_create(&HedgeLabel { outcome }).inc();
    }

    /// The handles of one pool.
    pub(super) fn shed(&self, label: &ModelLabel) -> Shed {
        let counter = |(_, reason)| {
            let label = ShedLabel { model: label.model.clone(), reason };
            self.requests.shed.get_or_create(&label).clone()
        };
        let share = self.requests.shed_ratio.get_or_create(label).clone();
        Shed { by_reason: REASONS.map(counter), share, recent: Arc::default() }
    }

    /// Counts a request that was rejected because too many wait for an endpoint of its model.
    pub fn note_no_room(&self, model: &str) {
        let (_, reason) = REASONS[0];
        self.requests.shed.get_or_create(&ShedLabel { model: model.into(), reason }).inc();
    }

    /// Counts a broken stream that might have been continued.
    pub fn note_continued(&self, outcome: Continued) {
        self.requests.continuations.get_or_create(&ContinuedLabel { outcome }).inc();
    }

    /// An endpoint has stalled, or has recovered.
    pub fn note_stalled(&self, worker: &str, stalled: bool) {
        let label = WorkerLabel { worker: worker.into() };
        self.workers.worker_stalled.get_or_create(&label).set(i64::from(stalled));
        if stalled {
            self.workers.worker_stalls.get_or_create(&label).inc();
        }
    }

    pub(super) fn forget_worker(&self, worker: &str) {
        let label = WorkerLabel { worker: worker.into() };
        self.workers.worker_busy.remove(&label);
        self.workers.worker_stalled.remove(&label);
        self.workers.worker_stalls.remove(&label);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shed_share_follows_recent_requests() {
        let shed = FaultMetrics::default().shed(&ModelLabel { model: "m".into() });
        let at = |seconds: u64| Nanos(seconds * 1_000_000_000);
        for _ in 0..10 {
            shed.arrived(at(1));
        }
        for _ in 0..5 {
            shed.refused(at(1), Rejection::QueueFull);
        }
        assert_eq!(shed.share.get(), 0.5);
        shed.refused(at(1), Rejection::NoEndpoint);
        assert_eq!(shed.share.get(), 0.5, "a success must not change it");
        shed.read(at(60));
        assert_eq!(shed.share.get(), 0.5);
        shed.read(at(62));
        assert_eq!(shed.share.get(), 0.0, "no request in the last minute");
        for second in 2..600 {
            shed.arrived(at(second));
        }
        assert!(shed.share.get() < 0.001, "{}", shed.share.get());
    }
}
