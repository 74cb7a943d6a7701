//! Counts how clients' requests have ended.

use std::sync::atomic::{AtomicU64, Ordering};

/// The outcomes that are distinguished.
pub const OUTCOMES: [&str; 5] = ["answered", "refused", "shed", "failed", "left"];

/// How many of the clients' requests have ended in which way.
#[derive(Default)]
pub struct Outcomes([AtomicU64; OUTCOMES.len()]);

// === impl Outcomes ===

impl Outcomes {
    /// Counts a request that ended with this status; 499 if its client left.
    pub fn note(&self, status: u16) {
        let outcome = match status {
            429 => 2,
            499 => 4,
            500.. => 3,
            400.. => 1,
            _ => 0,
        };
        self.0[outcome].fetch_add(1, Ordering::Relaxed);
    }

    /// Requests so far, by [`OUTCOMES`].
    pub fn totals(&self) -> [u64; OUTCOMES.len()] {
        std::array::from_fn(|n| self.0[n].load(Ordering::Relaxed))
    }
}
