//! The configuration section `log`.

use kvlane_core::config::{Kind, Setting};
use kvlane_core::section;
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

impl Setting for LogFormat {
    const KIND: Kind = Kind::Text;
}
