//! A counter that decays over about ten seconds.

use crate::time::Nanos;

/// Time constant of the decay: after that time about a third is left. Finagle keeps a retry budget's deposits for as
/// long (`RetryBudget.scala`, `DefaultTtl`).
const FADES_S: f64 = 10.0;
/// Shortest time step that is computed.
const STEP: Nanos = Nanos::from_millis(10);

/// The decayed amount.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct DecayingCounter {
    amount: f64,
    at: Nanos,
}

// === impl DecayingCounter ===

impl DecayingCounter {
    /// The steady state of an income of `income_s` per second.
    pub(crate) fn of(income_s: f64) -> Self {
        Self { amount: income_s * FADES_S, at: Nanos::ZERO }
    }

    /// The amount at `now`, with an income of `income_s` per second since the last update.
    pub(crate) fn at(&mut self, now: Nanos, income_s: f64) -> f64 {
        let span = now - self.at;
        if span >= STEP {
            // An implicit step towards income * FADES_S. It avoids an exponential function, whose last digits differ
            // between platforms.
            let span_s = span.as_secs_f64();
            self.amount = (self.amount + income_s * span_s) / (1.0 + span_s / FADES_S);
            self.at = now;
        }
        self.amount
    }

    /// Adds an amount, which may be negative.
    pub(crate) fn add(&mut self, amount: f64) {
        self.amount += amount;
    }

    /// Recent rate per second of the amounts passed to [`DecayingCounter::add`].
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
