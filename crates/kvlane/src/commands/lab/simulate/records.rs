//! The records of a simulation's rows, as files.

use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use anyhow::{Context, Result};
use kvlane_lab::scenario::Row;
use kvlane_trace::record;

/// Writes a file for each row that has records.
pub(super) fn write(rows: &[Row], directory: &Path) -> Result<()> {
    for row in rows.iter().filter(|row| !row.records.is_empty()) {
        let alone =
            rows.iter().filter(|other| other.arm == row.arm && !other.records.is_empty()).count() == 1;
        let path = directory.join(name(&row.arm, (!alone).then(|| row.cell.to_string()).as_deref()));
        let file = File::create(&path).with_context(|| format!("--records {}", path.display()))?;
        record::write(&row.records, BufWriter::new(file)).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// A file's name: the policy, and the load if there are several.
fn name(arm: &str, load: Option<&str>) -> String {
    let whole = [Some(arm), load].into_iter().flatten().collect::<Vec<_>>().join("-");
    let plain = |c: char| if c.is_alphanumeric() || ['_', '-', '.'].contains(&c) { c } else { '-' };
    format!("{}.jsonl", whole.chars().map(plain).collect::<String>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_named_by_policy_and_load_whatever_the_policy_is_called() {
        assert_eq!(name("fleet_cost", None), "fleet_cost.jsonl");
        assert_eq!(name("a/b c", Some("load 0.5")), "a-b-c-load-0.5.jsonl");
    }
}
