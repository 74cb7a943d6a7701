//! Reads timing files for the commands that take one.

use std::path::Path;

use anyhow::{Context, Result};
use kvlane_core::timing::TimingFile;

/// The timing file at `path`; an error names the file and the cause.
pub(crate) fn read(path: &Path) -> Result<TimingFile> {
    let text = std::fs::read_to_string(path).with_context(|| format!("--timing {}", path.display()))?;
    TimingFile::from_json(&text).with_context(|| format!("--timing {}", path.display()))
}
