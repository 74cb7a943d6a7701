//! The last requests of clients that failed, for operators. A request that succeeds takes no lock here.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvlane_core::time::Nanos;

/// Most failures that are kept; the oldest is dropped.
pub const FAILURES_MAX: usize = 50;
/// Most characters of a reason.
const REASON_CHARS_MAX: usize = 400;

/// The last failures.
#[derive(Debug, Default)]
pub struct Failures(Mutex<VecDeque<Failure>>);

/// A request that failed: its client got a 5xx, or its answer broke off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// When it ended.
    pub at: Nanos,
    /// Its id.
    pub request_id: String,
    /// Its pool's model; empty if the request has reached no pool.
    pub model: String,
    /// The status that its client got: below 500 for an answer that broke off.
    pub status: u16,
    /// Where and why it failed.
    pub cause: Cause,
}

/// Where and why a request failed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cause {
    /// The endpoint that failed it last; none if it was placed nowhere.
    pub endpoint: Option<Arc<str>>,
    /// Why.
    pub reason: String,
}

// === impl Failures ===

impl Failures {
    /// Keeps a failure.
    pub(crate) fn note(&self, mut failure: Failure) {
        if let Some((end, _)) = failure.cause.reason.char_indices().nth(REASON_CHARS_MAX) {
            failure.cause.reason.truncate(end);
        }
        let mut kept = self.kept();
        kept.truncate(FAILURES_MAX - 1);
        kept.push_front(failure);
    }

    /// The failures, newest first.
    pub fn list(&self) -> Vec<Failure> {
        self.kept().iter().cloned().collect()
    }

    fn kept(&self) -> MutexGuard<'_, VecDeque<Failure>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_failures_are_kept_with_short_reasons() {
        let failures = Failures::default();
        for n in 0..2 * FAILURES_MAX as u64 {
            let cause = Cause { endpoint: None, reason: "ü".repeat(2 * REASON_CHARS_MAX) };
            failures.note(Failure {
                at: Nanos(n),
                request_id: "r".into(),
                model: "m".into(),
                status: 502,
                cause,
            });
        }
        let kept = failures.list();
        assert_eq!((kept.len(), kept[0].at), (FAILURES_MAX, Nanos(2 * FAILURES_MAX as u64 - 1)));
        assert_eq!(kept[0].cause.reason.chars().count(), REASON_CHARS_MAX);
    }
}
