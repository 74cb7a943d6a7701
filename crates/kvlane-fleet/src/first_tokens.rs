//! Recent times to first token. A first token counts as late when it takes longer than 95% of them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use kvlane_core::time::Nanos;

/// Times that are kept.
const KEPT_MAX: usize = 512;
/// Times needed before any first token counts as late.
const KNOWN_MIN: usize = 64;
/// First tokens between two computations of the quantile.
const EVERY: usize = 32;
/// The share of them that is in time.
const IN_TIME: f64 = 0.95;

/// The times of the last first tokens.
#[derive(Debug, Default)]
pub struct FirstTokens {
    recent: Mutex<Recent>,
    /// 0 while unknown.
    late_nanos: AtomicU64,
}

#[derive(Debug, Default)]
struct Recent {
    spans: Vec<u64>,
    next: usize,
}

// === impl FirstTokens ===

impl FirstTokens {
    /// Records one time to first token.
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

    /// The time after which a first token is late, once known.
    pub fn late(&self) -> Option<Duration> {
        let nanos = self.late_nanos.load(Ordering::Relaxed);
        (nanos > 0).then(|| Duration::from_nanos(nanos))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_token_is_late_beyond_the_recent_95th_percentile() {
        let first_tokens = FirstTokens::default();
        for span in 1..KNOWN_MIN as u64 {
            first_tokens.note(Nanos(span));
        }
        assert_eq!(first_tokens.late(), None, "too few times are known");
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
