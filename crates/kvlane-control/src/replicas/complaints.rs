//! What goes wrong on the port of replicas, logged at most once in a while: every host that can connect can cause it.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Shortest time between two lines about the same kind of failure.
const EVERY: Duration = Duration::from_secs(10);

/// Failures of one kind.
#[derive(Debug, Default)]
pub(super) struct Complaints(Mutex<Logged>);

#[derive(Debug, Default)]
struct Logged {
    at: Option<Instant>,
    since: u64,
}

// === impl Complaints ===

impl Complaints {
    /// A failure occurred. Returns how many were not logged since the last one that was, if this one should be.
    pub(super) fn due(&self, now: Instant) -> Option<u64> {
        let mut logged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.at.is_some_and(|at| now < at + EVERY) {
            logged.since += 1;
            return None;
        }
        logged.at = Some(now);
        Some(std::mem::take(&mut logged.since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_many_failures_the_first_is_logged_and_the_others_are_counted() {
        let (complaints, start) = (Complaints::default(), Instant::now());
        assert_eq!(complaints.due(start), Some(0));
        for n in 1..=500 {
            assert_eq!(complaints.due(start + EVERY.mul_f64(f64::from(n) / 501.0)), None);
        }
        assert_eq!(complaints.due(start + EVERY), Some(500));
        assert_eq!(complaints.due(start + EVERY), None);
        assert_eq!(complaints.due(start + 3 * EVERY), Some(1));
    }
}
