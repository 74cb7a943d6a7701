//! The records of a simulation's rows, as files.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use anyhow::{Context, Result};
use kvlane_lab::scenario::{Row, show};
use kvlane_trace::record;

/// Writes a file for each row that has records.
pub(super) fn write(rows: &[Row], directory: &Path) -> Result<()> {
    for (name, records) in show::record_files(rows) {
        let path = directory.join(name);
        let file = File::create(&path).with_context(|| format!("--records {}", path.display()))?;
        record::write(records, BufWriter::new(file)).with_context(|| path.display().to_string())?;
    }
    Ok(())
}
