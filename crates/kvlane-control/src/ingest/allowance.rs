//! Limits the work that one feed may give the thread that applies all feeds.
//!
//! An engine changes some thousand blocks per second, and a replay covers all of its cache, a million blocks and
//! more. A feed that sends more, by mistake or with intent, has to wait: the other feeds have their turns, and
//! messages for which its queue has no room are dropped and requested again.

use kvlane_core::time::Nanos;

/// Work of one feed per second: events, and block hashes.
pub(super) const WORK_PER_S_MAX: u64 = 1_000_000;
/// Work that may be done at once after a pause.
pub(super) const WORK_AT_ONCE_MAX: u64 = 1 << 20;
/// Bytes of a message that count as one block hash: reading them takes time, too.
const BYTES_PER_WORK: usize = 64;

/// The remaining allowance of one feed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allowance {
    /// Below 0 when a message took more than was left.
    left: i64,
    /// When it was refilled last.
    at: Nanos,
    /// Work done so far.
    done: u64,
}

// === impl Allowance ===

impl Default for Allowance {
    fn default() -> Self {
        Self { left: WORK_AT_ONCE_MAX as i64, at: Nanos::ZERO, done: 0 }
    }
}

impl Allowance {
    /// Adds the allowance for the time since the last call; returns whether any is left.
    pub(super) fn refill(&mut self, now: Nanos) -> bool {
        let millis = (now - self.at).0 / 1_000_000;
        if millis > 0 {
            let more = i64::try_from(millis.saturating_mul(WORK_PER_S_MAX / 1000)).unwrap_or(i64::MAX);
            self.left = self.left.saturating_add(more).min(WORK_AT_ONCE_MAX as i64);
            self.at = now;
        }
        self.left > 0
    }

    /// Charges a message with this many bytes, events and block hashes.
    pub(super) fn take(&mut self, events_and_names: usize, bytes: usize) {
        let work = events_and_names.max(bytes / BYTES_PER_WORK).max(1) as u64;
        self.done = self.done.saturating_add(work);
        self.left = self.left.saturating_sub(i64::try_from(work).unwrap_or(i64::MAX));
    }

    /// Work done so far.
    pub(super) fn done(&self) -> u64 {
        self.done
    }

    /// When there will be allowance again, if there is none.
    pub(super) fn next(&self) -> Nanos {
        let owed = u64::try_from(self.left.saturating_neg()).unwrap_or(0);
        self.at + Nanos::from_millis(owed / (WORK_PER_S_MAX / 1000) + 1)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// In any order of messages, no more work is done than allowed, except for the last message; and a feed that
        /// waits continues at the announced time.
        #[test]
        fn no_more_is_done_than_is_allowed(
            steps in prop::collection::vec((0u64..3_000, 0usize..2_000_000, 0usize..1 << 24), 1..100),
        ) {
            let (mut allowance, mut now) = (Allowance::default(), Nanos::ZERO);
            let mut largest = 0;
            for (millis, names, bytes) in steps {
                now += Nanos::from_millis(millis);
                if !allowance.refill(now) {
                    now = now.max(allowance.next());
                    prop_assert!(allowance.refill(now));
                }
                let before = allowance.done();
                allowance.take(names, bytes);
                largest = largest.max(allowance.done() - before);
                let most = WORK_AT_ONCE_MAX as f64 + now.as_secs_f64() * WORK_PER_S_MAX as f64 + largest as f64;
                prop_assert!(allowance.done() as f64 <= most, "{} of {}", allowance.done(), most);
            }
        }
    }
}
