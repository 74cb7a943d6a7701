//! How failing workers are found, and what is done about what they failed.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How failing workers are found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Health {
    /// Path of the probe.
    pub path: String,
    /// Time between two probes of one worker. A worker that is down is probed as often.
    #[serde(with = "humantime_serde")]
    pub interval: Duration,
    /// Time a probe may take.
    #[serde(with = "humantime_serde")]
    pub timeout: Duration,
    /// Failures in a row, of probes or of requests, that make a worker unhealthy.
    pub failure_threshold: u32,
    /// Good probes in a row that make it healthy again.
    pub success_threshold: u32,
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

/// How failed attempts are repeated. Only before the first byte of an answer has gone to the client.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Retry {
    /// Attempts of one request on one worker before it is sent to another.
    pub max_worker_retries: u32,
    /// Attempts of one request beside the first.
    pub max_total_retries: u32,
}

impl Default for Retry {
    fn default() -> Self {
        Self { max_worker_retries: 1, max_total_retries: 5 }
    }
}

/// Connections to workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Upstream {
    /// Time to connect.
    #[serde(with = "humantime_serde")]
    pub connect_timeout: Duration,
    /// Time after which an idle connection is not used again. Below the 5 s after which uvicorn, and so vLLM and
    /// SGLang, close it.
    #[serde(with = "humantime_serde")]
    pub idle_timeout: Duration,
    /// Idle connections kept per worker and relay thread.
    pub idle_max: usize,
}

impl Default for Upstream {
    fn default() -> Self {
        Self { connect_timeout: Duration::from_secs(5), idle_timeout: Duration::from_secs(4), idle_max: 256 }
    }
}
