//! The configuration section `recorder`.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use kvlane_core::config::{ConfigError, within, wrong};

/// Recording of the schedulers' inputs, for `kvlane explain`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Recorder {
    /// Whether recording is on.
    pub enabled: bool,
    /// The directory of the files, used by this gateway only. It is created if it does not exist.
    pub dir: PathBuf,
    /// Bytes after which a file is closed and the next one begun.
    pub file_bytes: u64,
    /// Bytes of all files in the directory; beyond it the oldest one is deleted.
    pub max_bytes: u64,
}

impl Default for Recorder {
    fn default() -> Self {
        Self { enabled: false, dir: "recordings".into(), file_bytes: 128 << 20, max_bytes: 1 << 30 }
    }
}

// === impl Recorder ===

impl Recorder {
    /// Checks the bounds.
    ///
    /// # Errors
    /// The first field that is out of range.
    pub fn validate(&self) -> Result<(), ConfigError> {
        within("recorder.file_bytes", self.file_bytes, 1 << 20, 1 << 40)?;
        if self.max_bytes < 2 * self.file_bytes {
            let problem = format!("{} is less than twice recorder.file_bytes", self.max_bytes);
            return wrong("recorder.max_bytes", problem);
        }
        if self.dir.as_os_str().is_empty() {
            return wrong("recorder.dir", "it is empty: set a directory".into());
        }
        Ok(())
    }
}
