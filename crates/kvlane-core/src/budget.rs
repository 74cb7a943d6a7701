//! How many requests may be sent more than once: a share of all, so that a failing fleet is not given more work for it.

use serde::{Deserialize, Serialize};

/// A share of the requests, and what is always allowed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Share of the requests that arrive, 0 to 1.
    pub share: f64,
    /// So many per second in any case.
    pub per_second: f64,
}
