//! Retry and hedge budgets: limit how many requests are sent more than once to a share of all requests, so that retries
//! do not overload a failing fleet.
//!
//! Each arriving request adds its share; a constant rate per second is added in any case; each retry takes one. Unused
//! budget decays within about ten seconds, so a quiet hour does not accumulate budget for a failure.

use crate::bounded::{Bounded, Share};
use crate::decaying_counter::DecayingCounter;
use crate::section;
use crate::time::Nanos;

/// A rate per second, from 0 to a million.
pub type PerSecond = Bounded<0, 1_000_000>;

section! {
    /// Share of the requests, and minimum rate. A fifth of the requests is the default of Finagle and Envoy, too.
    #[derive(Copy)]
    pub struct Config {
        /// Share of the requests that arrive.
        pub share: Share = Share::of(0.2);
        /// Number per second in any case.
        pub per_second: PerSecond = PerSecond::of(10.0);
    }
}

/// The remaining budget.
#[derive(Debug)]
pub(crate) struct Budget {
    left: DecayingCounter,
}

// === impl Config ===

impl Config {
    /// The default for hedging: one request in twenty.
    pub const HEDGES: Self = Self { share: Share::of(0.05), per_second: PerSecond::of(0.0) };

    /// [`Config::HEDGES`], for serde.
    pub(crate) fn hedges() -> Self {
        Self::HEDGES
    }
}

// === impl Budget ===

impl Budget {
    pub(crate) fn new(config: &Config) -> Self {
        Self { left: DecayingCounter::of(config.per_second.get()) }
    }

    /// Adds the share of an arriving request.
    pub(crate) fn earn(&mut self, now: Nanos, config: &Config) {
        self.left.at(now, config.per_second.get());
        self.left.add(config.share.get());
    }

    /// Takes one for a retry; false if the budget is spent.
    pub(crate) fn spend(&mut self, now: Nanos, config: &Config) -> bool {
        let enough = self.left.at(now, config.per_second.get()) >= 1.0;
        if enough {
            self.left.add(-1.0);
        }
        enough
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Invariant: Retries stay within what earlier requests earned; a limiter never admits more than it refills.
        ///
        /// Also held by `no_client_uses_more_than_is_restored`.
        ///
        /// At any times, the number of retries is at most the earned share plus the minimum rate.
        #[test]
        fn no_more_retries_are_sent_than_the_budget_allows(
            steps in prop::collection::vec((0u64..3_000, any::<bool>()), 1..400),
            share in 0.0..1.0f64,
            per_second in 0.0..3.0f64,
        ) {
            let config = Config { share: Share::of(share), per_second: PerSecond::of(per_second) };
            let (mut budget, mut now) = (Budget::new(&config), Nanos::ZERO);
            let (mut arrived, mut again) = (0.0, 0.0);
            for (millis, earns) in steps {
                now += Nanos::from_millis(millis);
                if earns {
                    budget.earn(now, &config);
                    arrived += 1.0;
                } else if budget.spend(now, &config) {
                    again += 1.0;
                }
                let allowed = arrived * share + (10.0 + now.as_secs_f64()) * per_second;
                prop_assert!(again <= allowed + 1e-6, "{} of {}", again, allowed);
            }
        }
    }

    #[test]
    fn a_steady_share_may_be_sent_again_for_ever() {
        let config = Config { share: Share::of(0.2), per_second: PerSecond::of(0.0) };
        let (mut budget, mut again) = (Budget::new(&config), 0);
        for n in 0..10_000 {
            let now = Nanos::from_millis(10 * n);
            budget.earn(now, &config);
            again += u32::from(budget.spend(now, &config));
        }
        assert!((1900..=2000).contains(&again), "{again} of 10000");
        let later = Nanos::from_secs(100_000);
        assert!(!budget.spend(later, &config), "unused budget has decayed");
    }
}
