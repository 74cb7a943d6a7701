//! The records of a simulation's rows, by the names of their files.

use kvlane_trace::record::Record;

use crate::scenario::Row;

/// The rows that have records: the name of the file for each, and the records.
pub fn record_files(rows: &[Row]) -> impl Iterator<Item = (String, &[Record])> {
    let recorded = || rows.iter().filter(|row| !row.records.is_empty());
    recorded().map(move |row| {
        let alone = recorded().filter(|other| other.arm == row.arm).count() == 1;
        (name(&row.arm, (!alone).then(|| row.cell.to_string()).as_deref()), &*row.records)
    })
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
