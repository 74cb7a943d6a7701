//! The configuration section `log`.

use serde::{Deserialize, Serialize};

/// What is logged, and how it is written. Flags come before.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// As `--log-level`: a level, or a filter. None: info.
    pub level: Option<String>,
    /// How a line is written.
    pub format: LogFormat,
}

/// Ways to write a line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// For programs: an object on each line.
    Json,
}
