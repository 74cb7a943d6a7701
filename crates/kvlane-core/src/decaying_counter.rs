//! How much of something there was within the last ten seconds or so: what comes in fades.

use crate::time::Nanos;

/// How long it takes to fade: after that time about a third is left. Finagle keeps what a retry budget earns for as long
/// (`RetryBudget.scala`, `DefaultTtl`).
const FADES_S: f64 = 10.0;
/// Least time that is worth the division.
const STEP: Nanos = Nanos::from_millis(10);

/// The amount that is left.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DecayingCounter {
    amount: f64,
    at: Nanos,
}

// === impl DecayingCounter ===

impl DecayingCounter {
    /// What is left in the long run of `income_s` a second.
    pub(crate) fn of(income_s: f64) -> Self {
        Self { amount: income_s * FADES_S, at: Nanos::ZERO }
    }

    /// What is left at `now`, where `income_s` has come in each second.
    pub(crate) fn at(&mut self, now: Nanos, income_s: f64) -> f64 {
        let span = now - self.at;
        if span >= STEP {
            // An implicit step towards income * FADES_S: no exponential function, whose last digits differ from platform
            // to platform.
            let span_s = span.as_secs_f64();
            self.amount = (self.amount + income_s * span_s) / (1.0 + span_s / FADES_S);
            self.at = now;
        }
        self.amount
    }

    /// More comes in, or goes.
    pub(crate) fn add(&mut self, amount: f64) {
        self.amount += amount;
    }

    /// How much came in each second of late, where it came in by [`DecayingCounter::add`].
    pub(crate) fn rate_s(&mut self, now: Nanos) -> f64 {
        self.at(now, 0.0) / FADES_S
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_tells_how_much_comes_in_and_forgets() {
        for millis in [1, 100, 2000] {
            let mut fading = DecayingCounter::default();
            let mut now = Nanos::from_secs(5);
            while now < Nanos::from_secs(200) {
                now += Nanos::from_millis(millis);
                fading.at(now, 0.0);
                fading.add(millis as f64 * 0.03);
            }
            let rate = fading.rate_s(now);
            assert!((27.0..36.0).contains(&rate), "{rate} a second, in portions of {millis} ms");
            assert!(fading.rate_s(now + Nanos::from_secs(1000)) < rate / 50.0);
        }
    }

    #[test]
    fn what_always_comes_in_is_there_from_the_start_and_bounded() {
        let mut fading = DecayingCounter::of(2.0);
        for secs in [1, 100, 1_000_000] {
            let amount = fading.at(Nanos::from_secs(secs), 2.0);
            assert!((amount - 20.0).abs() < 1e-6, "{amount}");
        }
    }
}
