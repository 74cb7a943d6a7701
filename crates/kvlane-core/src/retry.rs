//! Whether a failed attempt is repeated, and after which pause.
//!
//! The gateway and the simulator both drive this. Where the next attempt goes is the scheduler's decision, and the
//! pool's retry [budget](crate::budget) may still refuse it.

use crate::time::Nanos;

/// Pauses before retries: exponential, with jitter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    /// The first pause.
    pub initial: Nanos,
    /// The longest pause, jitter included.
    pub max: Nanos,
    /// Factor from each pause to the next.
    pub multiplier: f64,
    /// Share by which a pause may be shorter or longer, drawn uniformly.
    pub jitter: f64,
}

/// The attempts of one request so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempts {
    made: u32,
    /// The last one cost its engine no work: it was busy, or not reached.
    last_was_free: bool,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { initial: Nanos::from_millis(50), max: Nanos::from_secs(30), multiplier: 1.5, jitter: 0.2 }
    }
}

// === impl Backoff ===

impl Backoff {
    /// The pause before the next retry after `retries` others. `unit`, from 0 to 1, chooses within the jitter.
    pub fn pause(&self, retries: u32, unit: f64) -> Nanos {
        let max = self.max.0 as f64;
        // After a few dozen it is the longest anyway, or the multiplier is one.
        let mean = (self.initial.0 as f64 * self.multiplier.powi(retries.min(64) as i32)).min(max);
        let jittered = mean * (1.0 + self.jitter * (2.0 * unit - 1.0));
        Nanos(jittered.min(max) as u64)
    }
}

// === impl Attempts ===

impl Attempts {
    /// After `made` attempts.
    pub fn new(made: u32) -> Self {
        Self { made, last_was_free: true }
    }

    /// Attempts so far.
    pub fn made(&self) -> u32 {
        self.made
    }

    /// An attempt was placed.
    pub fn placed(&mut self) {
        self.made += 1;
    }

    /// The last one failed; `free` if it cost its engine no work.
    pub fn failed(&mut self, free: bool) {
        self.last_was_free = free;
    }

    /// Whether the last one cost its engine no work: it was busy, or not reached.
    pub fn last_was_free(&self) -> bool {
        self.last_was_free
    }

    /// Whether another one may follow, of `retries_max` besides the first.
    pub fn may_retry(&self, retries_max: u32) -> bool {
        self.made.saturating_sub(1) < retries_max
    }

    /// The pause before the next one. The first retry follows at once if the attempt before it was free. `unit` draws from
    /// 0 to 1.
    pub fn pause(&self, backoff: &Backoff, unit: impl FnOnce() -> f64) -> Nanos {
        match self.made.saturating_sub(1) {
            0 if self.last_was_free => Nanos::ZERO,
            retries => backoff.pause(retries, unit()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert, proptest};

    use super::*;

    proptest! {
        #[test]
        fn a_pause_stays_within_its_jitter_and_below_the_longest(
            retries in any::<u32>(), unit in 0.0..1.0f64, jitter in 0.0..=1.0f64,
        ) {
            let backoff = Backoff { jitter, ..Backoff::default() };
            let pause = backoff.pause(retries, unit);
            let mean = Backoff { jitter: 0.0, ..backoff }.pause(retries, unit).as_secs_f64();
            prop_assert!(pause <= backoff.max);
            let (least, most) = (mean * (1.0 - jitter), mean * (1.0 + jitter));
            prop_assert!((least - 1e-6..=most + 1e-6).contains(&pause.as_secs_f64()), "{pause:?} about {mean}");
        }
    }

    #[test]
    fn pauses_grow_to_the_longest() {
        let backoff = Backoff { jitter: 0.0, ..Backoff::default() };
        let pauses = [0, 1, 2, 99].map(|retries| backoff.pause(retries, 0.5).0 / 1_000);
        assert_eq!(pauses, [50_000, 75_000, 112_500, 30_000_000]);
    }

    #[test]
    fn only_the_first_retry_after_a_free_attempt_follows_at_once() {
        let backoff = Backoff { jitter: 0.0, ..Backoff::default() };
        let mut attempts = Attempts::new(0);
        attempts.placed();
        attempts.failed(true);
        assert_eq!(attempts.pause(&backoff, || 0.5), Nanos::ZERO);
        attempts.failed(false);
        assert_eq!(attempts.pause(&backoff, || 0.5), backoff.initial);
        attempts.placed();
        attempts.failed(true);
        assert_eq!(attempts.pause(&backoff, || 0.5), Nanos::from_millis(75));
    }

    #[test]
    fn retries_are_limited() {
        let mut attempts = Attempts::new(0);
        let may = [0, 1, 2, 3].map(|_| {
            attempts.placed();
            attempts.may_retry(2)
        });
        assert_eq!(may, [true, true, false, false]);
        assert!(!Attempts::new(1).may_retry(0));
    }
}
