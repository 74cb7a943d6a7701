//! The gateway's reaction to faults, as simulated by the world.
//!
//! The gateway detects failed endpoints by probes, gives up on attempts that time out, and retries requests, after a
//! growing pause, as long as no part of an answer has arrived. It reports the outcome of each attempt to the router:
//! success, failure, or busy.

use kvlane_core::health::Thresholds;
pub use kvlane_core::retry::Backoff;
use kvlane_core::time::Nanos;

/// The gateway's reaction to faults.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    /// Time from sending a request to an endpoint to its first token, after which the attempt has failed.
    /// [`Nanos::MAX`] is never; an attempt at an endpoint that probes find down has failed in any case.
    pub first_token: Nanos,
    /// Time from the answer of a request's prefill leg to its first token, after which the transfer of its KV blocks has
    /// failed.
    pub transfer: Nanos,
    /// Time without a further token after which an answer has failed.
    pub between_tokens: Nanos,
    /// Pauses before attempts.
    pub backoff: Backoff,
    /// Probe settings.
    pub probes: Probes,
}

/// Probe settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probes {
    /// Time between two probes of one endpoint.
    pub interval: Nanos,
    /// Timeout of a probe.
    pub timeout: Nanos,
    /// Probes in a row that change an endpoint's health.
    pub thresholds: Thresholds,
}

impl Default for Rules {
    /// The gateway's defaults.
    fn default() -> Self {
        Self {
            first_token: Nanos::from_secs(300),
            transfer: Nanos::from_secs(30),
            between_tokens: Nanos::from_secs(300),
            backoff: Backoff::default(),
            probes: Probes {
                interval: Nanos::from_secs(2),
                timeout: Nanos::from_secs(5),
                thresholds: Thresholds { failures: 3, successes: 2 },
            },
        }
    }
}
