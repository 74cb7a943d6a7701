//! The configuration section `health`.

use std::time::Duration;

use kvlane_core::health::Thresholds;
use serde::{Deserialize, Serialize};

/// How failing workers are detected.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Health {
    /// Path of the probe.
    pub path: String,
    /// Time between two probes of one worker, healthy or not.
    #[serde(with = "humantime_serde")]
    pub interval: Duration,
    /// Time a probe may take.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
    /// Failed probes in a row that make a worker unhealthy.
    pub failure_threshold: u32,
    /// Successful probes in a row that make it healthy again.
    pub success_threshold: u32,
}

// === impl Health ===

impl Health {
    /// The probes in a row that change a worker's health.
    pub fn thresholds(&self) -> Thresholds {
        Thresholds { failures: self.failure_threshold, successes: self.success_threshold }
    }
}

impl Default for Health {
    fn default() -> Self {
        Self {
            path: "/health".into(),
            interval: Duration::from_secs(2),
            timeout: Duration::from_secs(5),
            failure_threshold: 3,
            success_threshold: 2,
        }
    }
}
