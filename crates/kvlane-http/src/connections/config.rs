//! The configuration section `upstream`.

use std::time::Duration;

use kvlane_core::config::{TIME, TIME_OR_ZERO};
use kvlane_core::section;

use crate::secret::Secret;

section! {
    /// Connections to workers.
    pub struct ConnectionsConfig {
        /// Timeout of connecting to a worker.
        #[serde(with = "humantime_serde")]
        pub connect_timeout: Duration = Duration::from_secs(5), in TIME;
        /// Time after which an idle connection is not reused. Below the 5 s after which uvicorn, and so vLLM and
        /// SGLang, close it.
        #[serde(with = "humantime_serde")]
        pub idle_timeout: Duration = Duration::from_secs(4), in TIME_OR_ZERO;
        /// Idle connections kept per worker and relay thread.
        pub idle_max: usize = 256;
        /// The key for workers in this file without their own: the key, or its location: `{file: /run/key}`, `{env:
        /// NAME}`. Workers added while running get only their own.
        pub api_key: Option<Secret> = None;
    }
}
