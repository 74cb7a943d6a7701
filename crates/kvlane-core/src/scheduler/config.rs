//! How one pool schedules.

use serde::{Deserialize, Serialize};

use crate::breaker;
use crate::budget;
use crate::policy::PolicyConfig;
use crate::time::Nanos;
use crate::timing::TimingModel;

/// How one pool schedules.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Config {
    /// The placement policy.
    pub policy: PolicyConfig,
    /// Requests in flight in the whole pool beyond which others wait; 0 is no limit.
    pub in_flight_max: u32,
    /// Requests in flight at one endpoint beyond which it takes none; 0 is no limit. While none takes any, they wait.
    #[serde(default)]
    pub endpoint_in_flight_max: u32,
    /// Requests that may wait; beyond that they are shed.
    pub queue_len_max: u32,
    /// How long a request may wait.
    pub queue_timeout: Nanos,
    /// What the endpoints are, where that is known: rates are learned from there. From a usual machine otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timing: Option<Box<TimingModel>>,
    /// Whether new conversations wait while those that go on fill the fleet's caches.
    #[serde(default)]
    pub session_admission: bool,
    /// When an endpoint that fails is given no more requests, and for how long.
    #[serde(default)]
    pub breaker: breaker::Config,
    /// How many requests may be tried again.
    #[serde(default = "Config::usual_retries")]
    pub retries: budget::Config,
    /// How many requests may be sent to a second endpoint because the first is late.
    #[serde(default = "Config::usual_hedges")]
    pub hedges: budget::Config,
    /// Decisions kept for people to read.
    pub receipts_max: u32,
    /// Seed of all randomness.
    pub seed: u64,
}

// === impl Config ===

impl Config {
    /// A pool with this policy and without limits, that nobody looks into.
    pub fn new(policy: PolicyConfig) -> Self {
        Self {
            policy,
            in_flight_max: 0,
            endpoint_in_flight_max: 0,
            queue_len_max: 0,
            queue_timeout: Nanos::ZERO,
            timing: None,
            session_admission: false,
            breaker: breaker::Config::default(),
            retries: Self::usual_retries(),
            hedges: Self::usual_hedges(),
            receipts_max: 0,
            seed: 0,
        }
    }

    /// A fifth of the requests, as Finagle and Envoy have it, and ten a second.
    fn usual_retries() -> budget::Config {
        budget::Config { share: 0.2, per_second: 10.0 }
    }

    /// One in twenty.
    fn usual_hedges() -> budget::Config {
        budget::Config { share: 0.05, per_second: 0.0 }
    }
}
