//! The configuration section `health`.

use std::time::Duration;

use kvlane_core::config::{TIME, TIME_OR_ZERO};
use kvlane_core::health::Thresholds;
use kvlane_core::section;

section! {
    /// How failing workers are detected.
    pub struct Health {
        /// Path of the health probe.
        pub path: String = "/health".into();
        /// Time between two health probes of a worker, healthy or not.
        #[serde(with = "humantime_serde")]
        pub interval: Duration = Duration::from_secs(2), in TIME;
        /// Timeout of a health probe.
        #[serde(with = "humantime_serde")]
        pub timeout: Duration = Duration::from_secs(5), in TIME;
        /// Failed probes in a row after which a worker is unhealthy.
        pub failure_threshold: u32 = 3, in 1..=u32::MAX;
        /// Successful probes in a row after which a worker is healthy again.
        pub success_threshold: u32 = 2, in 1..=u32::MAX;
        /// How long readiness waits at start for the first probe of each worker and for KV events to be replayed.
        #[serde(with = "humantime_serde")]
        pub sync_timeout: Duration = Duration::from_secs(30), in TIME_OR_ZERO;
    }
}

// === impl Health ===

impl Health {
    /// The probes in a row that change a worker's health.
    pub fn thresholds(&self) -> Thresholds {
        Thresholds { failures: self.failure_threshold, successes: self.success_threshold }
    }
}
