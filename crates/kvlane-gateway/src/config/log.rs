//! The configuration section `log`.

use serde::{Deserialize, Serialize};

/// What is logged, and in which format. Flags take precedence.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Log {
    /// As `--log-level`: a level, or a filter. None: info.
    pub level: Option<String>,
    /// The format of a line.
    pub format: LogFormat,
}

/// Log formats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text for terminals.
    #[default]
    Text,
    /// JSON, one object per line.
    Json,
}
