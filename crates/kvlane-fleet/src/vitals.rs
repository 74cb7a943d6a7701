//! Signs of progress of one endpoint: when its engine last made progress on its requests, and whether it is stalled.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use kvlane_core::time::Nanos;
use tokio::sync::Notify;

/// Of one endpoint. Relay threads write, the watch of [`kvlane_control::stall`] reads.
#[derive(Debug, Default)]
pub struct Vitals {
    /// When its engine last showed progress; or since when it has work, if that is later.
    heard: AtomicU64,
    in_flight: AtomicU32,
    stalled: AtomicBool,
    found_stalled: Notify,
}

// === impl Vitals ===

impl Vitals {
    /// A request is placed at the endpoint.
    pub fn arrive(&self, now: Nanos) {
        if self.in_flight.fetch_add(1, Ordering::Relaxed) == 0 {
            self.hear(now);
        }
    }

    /// A request has ended at the endpoint.
    pub fn leave(&self) {
        self.in_flight.fetch_sub(1, Ordering::Relaxed);
    }

    /// Its engine has made progress.
    pub fn hear(&self, now: Nanos) {
        self.heard.fetch_max(now.0, Ordering::Relaxed);
    }

    /// The last sign of progress.
    pub fn heard(&self) -> Nanos {
        Nanos(self.heard.load(Ordering::Relaxed))
    }

    /// Whether it has no requests.
    pub fn is_idle(&self) -> bool {
        self.in_flight.load(Ordering::Relaxed) == 0
    }

    /// Whether its engine is stalled.
    pub fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::Acquire)
    }

    /// Sets whether its engine is stalled.
    pub fn set_stalled(&self, stalled: bool) {
        self.stalled.store(stalled, Ordering::Release);
        if stalled {
            self.found_stalled.notify_waiters();
        }
    }

    /// Waits until its engine is stalled.
    pub async fn stalled(&self) {
        let mut told = std::pin::pin!(self.found_stalled.notified());
        // From here on no change is missed.
        told.as_mut().enable();
        if !self.is_stalled() {
            told.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_counts_from_the_last_sign_or_from_the_start_of_work() {
        let vitals = Vitals::default();
        assert!(vitals.is_idle());
        vitals.arrive(Nanos(10));
        vitals.arrive(Nanos(20));
        assert_eq!((vitals.heard(), vitals.is_idle()), (Nanos(10), false));
        vitals.hear(Nanos(30));
        vitals.hear(Nanos(25));
        assert_eq!(vitals.heard(), Nanos(30), "an earlier reading of another thread is ignored");
        vitals.leave();
        vitals.leave();
        assert!(vitals.is_idle());
        vitals.arrive(Nanos(90));
        assert_eq!(vitals.heard(), Nanos(90));
    }

    #[tokio::test]
    async fn a_waiting_task_is_notified_of_a_stall_before_or_after_it_waits() {
        let vitals = std::sync::Arc::new(Vitals::default());
        let waiting = tokio::spawn({
            let vitals = std::sync::Arc::clone(&vitals);
            async move { vitals.stalled().await }
        });
        tokio::task::yield_now().await;
        vitals.set_stalled(true);
        waiting.await.expect("it was notified");
        vitals.stalled().await;
    }
}
