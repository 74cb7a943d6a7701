//! Circuit breaker of one endpoint: whether its recent answers allow to place requests there.
//!
//! Closed, it takes requests. After [`Config::failure_threshold`] failures in a row it opens: none for a cool-down, which
//! doubles each time the endpoint fails again. Then it is half-open: one request is let through, and what becomes of it
//! closes the breaker or opens it again.

use serde::{Deserialize, Serialize};

use crate::time::Nanos;

/// When a breaker opens and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Failed requests in a row that open it; 0 never opens it.
    pub failure_threshold: u32,
    /// First cool-down.
    pub cooldown: Nanos,
    /// Longest cool-down.
    pub cooldown_max: Nanos,
    /// How long an endpoint that comes back is given less than its share.
    pub slow_start: Nanos,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            failure_threshold: 3,
            cooldown: Nanos(1_000_000_000),
            cooldown_max: Nanos(60_000_000_000),
            slow_start: Nanos(10_000_000_000),
        }
    }
}

/// Where a breaker stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Requests are placed.
    #[default]
    Closed,
    /// None are, until its cool-down is over.
    Open,
    /// One is, to see.
    HalfOpen,
}

// === impl State ===

impl State {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half_open",
        }
    }
}
