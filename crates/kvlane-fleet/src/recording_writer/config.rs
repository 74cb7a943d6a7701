//! The configuration section `recorder`.

use std::path::PathBuf;

use kvlane_core::config::{ConfigError, wrong};
use kvlane_core::section;

section! {
    /// Recording of the schedulers' inputs, for `kvlane explain`.
    pub struct Recorder {
        /// Whether recording is on.
        pub enabled: bool = false;
        /// The directory of the files, not shared with other gateways. It is created if it does not exist.
        pub dir: PathBuf = "recordings".into();
        /// Bytes after which a file is closed and the next one begun.
        pub file_bytes: u64 = 128 << 20, in 1 << 20..=1 << 40;
        /// Maximum bytes of all files; then the oldest is deleted. At least two files.
        pub max_bytes: u64 = 1 << 30;
    }
}

// === impl Recorder ===

impl Recorder {
    /// Checks what bounds cannot.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn validate(&self) -> Result<(), ConfigError> {
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
