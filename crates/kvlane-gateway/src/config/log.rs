//! The configuration section `log`.

use kvlane_core::{section, setting};
use serde::{Deserialize, Serialize};

section! {
    /// What is logged, and in which format. Flags take precedence.
    pub struct Log {
        /// A level or a filter, as in `--log-level`; null: info.
        pub level: Option<String> = None;
        /// Format of a line: text or json.
        pub format: LogFormat = LogFormat::Text;
    }
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

setting!(Text: LogFormat);
