//! The configuration section `upstream`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::secret::Secret;

/// Connections to workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ConnectionsConfig {
    /// Time a connection may take.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
    /// Time after which an idle connection is not reused. Below the 5 s after which uvicorn, and so vLLM and SGLang, close
    /// it.
    #[serde(with = "humantime_serde")]
    pub idle_timeout: Duration,
    /// Idle connections kept per worker and relay thread.
    pub idle_max: usize,
    /// The API key for configured workers without a key of their own.
    pub api_key: Option<Secret>,
}

impl Default for ConnectionsConfig {
    fn default() -> Self {
        let (connect_timeout, idle_timeout) = (Duration::from_secs(5), Duration::from_secs(4));
        Self { connect_timeout, idle_timeout, idle_max: 256, api_key: None }
    }
}
