//! The configuration section `upstream`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::secret::Secret;

/// Connections to workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ConnectionsConfig {
    /// Time to connect.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
    /// Time after which an idle connection is not used again. Below the 5 s after which uvicorn, and so vLLM and
    /// SGLang, close it.
    #[serde(with = "humantime_serde")]
    pub idle_timeout: Duration,
    /// Idle connections kept per worker and relay thread.
    pub idle_max: usize,
    /// The key that the workers of the configuration are shown which name none.
    pub api_key: Option<Secret>,
}

impl Default for ConnectionsConfig {
    fn default() -> Self {
        let (connect_timeout, idle_timeout) = (Duration::from_secs(5), Duration::from_secs(4));
        Self { connect_timeout, idle_timeout, idle_max: 256, api_key: None }
    }
}
