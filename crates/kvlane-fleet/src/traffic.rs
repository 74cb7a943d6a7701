//! Requests at one endpoint: how many, which failed, and their times to first token. Counted without a lock.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use kvlane_core::time::Nanos;

use crate::metrics::FailureKind;

/// Times to first token that are kept: enough for a median, and soon replaced when an endpoint slows down.
pub const FIRST_TOKENS_KEPT: usize = 64;

/// Of one endpoint, since it joined its pool. Relay threads write, the admin API reads.
#[derive(Debug)]
pub struct Traffic {
    placed: AtomicU64,
    rejected: AtomicU64,
    failed: [AtomicU64; FailureKind::ALL.len()],
    /// The last times to first token in microseconds, in no order; 0 where there is none.
    first_tokens: [AtomicU32; FIRST_TOKENS_KEPT],
    /// First tokens so far.
    begun: AtomicU64,
}

// === impl Traffic ===

impl Default for Traffic {
    fn default() -> Self {
        Self {
            placed: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            failed: std::array::from_fn(|_| AtomicU64::new(0)),
            first_tokens: std::array::from_fn(|_| AtomicU32::new(0)),
            begun: AtomicU64::new(0),
        }
    }
}

impl Traffic {
    /// A request is placed at the endpoint: a first attempt, a retry, or a leg of a split request.
    pub fn place(&self) {
        self.placed.fetch_add(1, Ordering::Relaxed);
    }

    /// Its engine has answered that it is busy.
    pub fn reject(&self) {
        self.rejected.fetch_add(1, Ordering::Relaxed);
    }

    /// A request has failed there.
    pub fn fail(&self, kind: FailureKind) {
        self.failed[kind as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// The first token of a stream has arrived, this long after the request was placed there.
    pub fn begin(&self, span: Nanos) {
        let micros = u32::try_from(span.0 / 1000).unwrap_or(u32::MAX).max(1);
        // The position is within the array, so the cast loses nothing.
        let at = self.begun.fetch_add(1, Ordering::Relaxed) as usize % FIRST_TOKENS_KEPT;
        self.first_tokens[at].store(micros, Ordering::Relaxed);
    }

    /// Requests placed there.
    pub fn placed(&self) -> u64 {
        self.placed.load(Ordering::Relaxed)
    }

    /// Requests that its engine answered with 429 or 503.
    pub fn rejected(&self) -> u64 {
        self.rejected.load(Ordering::Relaxed)
    }

    /// Requests that failed there, by kind; only kinds of which there are some.
    pub fn failed(&self) -> impl Iterator<Item = (FailureKind, u64)> {
        let counts = FailureKind::ALL.into_iter().zip(&self.failed);
        let counts = counts.map(|(kind, count)| (kind, count.load(Ordering::Relaxed)));
        counts.filter(|(_, count)| *count > 0)
    }

    /// The median and the 90th percentile of the last [`FIRST_TOKENS_KEPT`] times to first token in seconds, if there is
    /// one.
    pub fn ttft_s(&self) -> Option<[f64; 2]> {
        let micros = self.first_tokens.iter().map(|micros| micros.load(Ordering::Relaxed));
        let mut micros: Vec<u32> = micros.filter(|micros| *micros > 0).collect();
        micros.sort_unstable();
        let nearest_rank = |share: f64| (micros.len() as f64 * share).ceil() as usize - 1;
        (!micros.is_empty()).then(|| [0.5, 0.9].map(|share| f64::from(micros[nearest_rank(share)]) / 1e6))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_last_first_tokens() {
        let traffic = Traffic::default();
        assert_eq!(traffic.ttft_s(), None);
        traffic.begin(Nanos::from_secs(7200));
        assert_eq!(traffic.ttft_s(), Some([f64::from(u32::MAX) / 1e6; 2]), "longer than is distinguished");
        for ms in 1..=FIRST_TOKENS_KEPT as u64 {
            traffic.begin(Nanos(ms * 1_000_000));
        }
        assert_eq!(traffic.ttft_s(), Some([0.032, 0.058]));
    }

    #[test]
    fn failures_are_counted_by_kind() {
        let traffic = Traffic::default();
        for kind in [FailureKind::broken, FailureKind::timeout, FailureKind::broken] {
            traffic.fail(kind);
        }
        let failed: Vec<_> = traffic.failed().map(|(kind, count)| (kind.name(), count)).collect();
        assert_eq!(failed, [("broken", 2), ("timeout", 1)]);
    }

    #[test]
    fn every_kind_has_its_own_place() {
        for (n, kind) in FailureKind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, n, "{}", kind.name());
        }
    }
}
