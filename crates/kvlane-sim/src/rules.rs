//! The gateway's reaction to faults, as simulated by the world.
//!
//! The gateway detects failed endpoints by probes, gives up on attempts that time out, and retries requests, after a
//! growing pause, as long as no part of an answer has arrived. It reports the outcome of each attempt to the router:
//! success, failure, or busy.

use kvlane_core::rng::Rng;
use kvlane_core::time::Nanos;

/// The gateway's reaction to faults.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// Time from sending a request to an endpoint to its first token, after which the attempt has failed.
    /// [`Nanos::MAX`] is never; an attempt at an endpoint that probes find down has failed in any case.
    pub first_token: Nanos,
    /// Time without a further token after which an answer has failed.
    pub between_tokens: Nanos,
    /// Pauses before attempts.
    pub backoff: Backoff,
    /// Probe settings.
    pub probes: Probes,
}

/// Pauses before retries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    /// The first one.
    pub initial: Nanos,
    /// The longest one.
    pub max: Nanos,
    /// Factor from each pause to the next.
    pub multiplier: f64,
    /// Share by which each pause may be shorter or longer, drawn uniformly.
    pub jitter: f64,
}

/// Probe settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probes {
    /// Time between two probes of one endpoint.
    pub interval: Nanos,
    /// Timeout of a probe.
    pub timeout: Nanos,
    /// Failed probes in a row after which the endpoint is down.
    pub failure_threshold: u32,
    /// Successful probes in a row after which the endpoint is up again.
    pub success_threshold: u32,
}

impl Default for Rules {
    /// The gateway's defaults.
    fn default() -> Self {
        Self {
            first_token: Nanos::from_secs(300),
            between_tokens: Nanos::from_secs(300),
            backoff: Backoff {
                initial: Nanos::from_millis(50),
                max: Nanos::from_secs(30),
                multiplier: 1.5,
                jitter: 0.2,
            },
            probes: Probes {
                interval: Nanos::from_secs(2),
                timeout: Nanos::from_secs(5),
                failure_threshold: 3,
                success_threshold: 2,
            },
        }
    }
}

// === impl Backoff ===

impl Backoff {
    /// The pause before the `retry`-th retry, counted from 1.
    pub fn pause(&self, retry: u32, rng: &mut Rng) -> Nanos {
        let longer = (1..retry).try_fold(self.initial.0 as f64, |pause, _| {
            let longer = pause * self.multiplier;
            (longer < self.max.0 as f64).then_some(longer)
        });
        let pause = longer.unwrap_or(self.max.0 as f64).min(self.max.0 as f64);
        Nanos((pause * (1.0 + self.jitter * (2.0 * rng.unit() - 1.0))) as u64)
    }
}

/// Result of an endpoint's probes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub healthy: bool,
    /// Whether a connection was refused since the endpoint was last up.
    pub gone: bool,
    failures: u32,
    successes: u32,
}

// === impl Found ===

impl Found {
    /// State of an endpoint before its first probe.
    pub(crate) fn new(healthy: bool) -> Self {
        Self { healthy, gone: false, failures: 0, successes: 0 }
    }

    /// Records a probe; returns whether the state has changed.
    pub(crate) fn note(&mut self, probes: &Probes, good: bool) -> bool {
        if good {
            self.failures = 0;
            self.successes = self.successes.saturating_add(1);
        } else {
            self.successes = 0;
            self.failures = self.failures.saturating_add(1);
        }
        let before = self.healthy;
        self.healthy = match before {
            true => self.failures < probes.failure_threshold.max(1),
            false => self.successes >= probes.success_threshold,
        };
        self.healthy != before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_their_limit() {
        let backoff = Backoff { jitter: 0.0, ..Rules::default().backoff };
        let mut rng = Rng::new(1);
        let pauses: Vec<u64> = [1, 2, 3, 100].map(|n| backoff.pause(n, &mut rng).0 / 1_000).to_vec();
        assert_eq!(pauses, [50_000, 75_000, 112_500, 30_000_000]);
        let jittered = Backoff { jitter: 0.2, ..backoff };
        let span = Nanos::from_millis(40)..=Nanos::from_millis(60);
        assert!((0..100).all(|_| span.contains(&jittered.pause(1, &mut rng))));
    }

    #[test]
    fn it_takes_several_probes_to_change_a_mind() {
        let probes = Rules::default().probes;
        let mut found = Found::new(true);
        let minds = [false, false, true, false, false, false, true, false, true, true]
            .map(|good| (found.note(&probes, good), found.healthy).1);
        assert_eq!(minds, [true, true, true, true, true, false, false, false, false, true]);
    }
}
