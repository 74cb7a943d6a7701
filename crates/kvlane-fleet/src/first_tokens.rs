//! How long first tokens have taken of late. One that takes longer than nineteen of twenty did is late.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kvlane_core::time::Nanos;

/// First tokens that are remembered.
const KEPT_MAX: usize = 512;
/// First tokens that must have been seen before anything counts as late.
const KNOWN_MIN: usize = 64;
/// First tokens between two looks at all of them.
const EVERY: usize = 32;
/// The share of them that are in time.
const IN_TIME: f64 = 0.95;

/// The times of the last first tokens.
#[derive(Debug, Default)]
pub struct FirstTokens {
    recent: Mutex<Recent>,
    /// 0 while it is not known.
    late_nanos: AtomicU64,
}

#[derive(Debug, Default)]
struct Recent {
    spans: Vec<u64>,
    next: usize,
}

// === impl FirstTokens ===

impl FirstTokens {
    /// One came after so long.
    pub fn note(&self, span: Nanos) {
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let at = recent.next % KEPT_MAX;
        recent.next += 1;
        if at < recent.spans.len() {
            recent.spans[at] = span.0;
        } else {
            recent.spans.push(span.0);
        }
        if recent.spans.len() >= KNOWN_MIN && recent.next.is_multiple_of(EVERY) {
            let mut spans = recent.spans.clone();
            drop(recent);
            let at = (spans.len() as f64 * IN_TIME) as usize;
            let (_, late, _) = spans.select_nth_unstable(at);
            self.late_nanos.store((*late).max(1), Ordering::Relaxed);
        }
    }

    /// After how long one is late, once that is known.
    pub fn late(&self) -> Option<Duration> {
        let nanos = self.late_nanos.load(Ordering::Relaxed);
        (nanos > 0).then(|| Duration::from_nanos(nanos))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_is_what_one_in_twenty_takes_and_follows_the_times() {
        let first_tokens = FirstTokens::default();
        for span in 1..KNOWN_MIN as u64 {
            first_tokens.note(Nanos(span));
        }
        assert_eq!(first_tokens.late(), None, "too few are known");
        for span in 0..2 * KEPT_MAX as u64 {
            first_tokens.note(Nanos(1_000 + span % 100));
        }
        let late = first_tokens.late().expect("known").as_nanos();
        assert!((1_093..=1_096).contains(&late), "{late}");
        for _ in 0..2 * KEPT_MAX {
            first_tokens.note(Nanos(50));
        }
        assert_eq!(first_tokens.late(), Some(Duration::from_nanos(50)));
    }
}
