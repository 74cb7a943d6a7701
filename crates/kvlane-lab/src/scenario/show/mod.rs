//! What a simulation shows: figures as JSON, tables for a terminal, an HTML report, and the names of files of records.

mod page;
mod records;
mod tables;
mod verdict;

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

pub use page::page;
pub use records::record_files;
pub use tables::text;
pub use verdict::verdict;

use super::{Cell, Row, Scenario};
use crate::figures::Overload;

/// Name and value of a row's load; nothing for a whole arm.
pub(super) fn load_of(cell: Cell) -> Option<(&'static str, f64)> {
    match cell {
        Cell::Rate(rate) => Some(("rate", rate)),
        Cell::Concurrency(clients) => Some(("concurrency", f64::from(clients))),
        Cell::Load(load) => Some(("load", load)),
        Cell::All => None,
    }
}

/// The figures, schema `kvlane.simulate/1`. They do not depend on the machine.
pub fn to_json(scenario: &Scenario, rows: &[Row]) -> Value {
    let row = |row: &Row| {
        let mut object = Map::new();
        object.insert("arm".into(), json!(row.arm));
        if let Some((name, value)) = load_of(row.cell) {
            object.insert(name.into(), json!(value));
        }
        object.insert("published".into(), json!(row.published));
        object.insert("simulated".into(), json!(row.simulated));
        object.insert("error".into(), json!(errors(row)));
        object.insert("intervals".into(), json!(row.intervals));
        let overload = Overload::of(&row.simulated, &scenario.judgement);
        object.insert("overload".into(), json!(overload.map(Overload::name)));
        Value::Object(object)
    };
    json!({
        "schema": "kvlane.simulate/1",
        "scenario": scenario.scenario,
        "seeds": scenario.seeds,
        "verdict": verdict(rows),
        "rows": rows.iter().map(row).collect::<Vec<_>>(),
    })
}

/// Simulated over published, minus one, of every published figure.
pub(super) fn errors(row: &Row) -> BTreeMap<&str, f64> {
    let error = |(name, published): (&'_ String, &f64)| Some((row.simulated.get(name)? / published) - 1.0);
    row.published.iter().filter_map(|(name, value)| Some((name.as_str(), error((name, value))?))).collect()
}
