//! The HTML report of a simulation.

use super::{load_of, tables, verdict};
use crate::report::{Loads, Page, Part, Point, Report, Section, workload};
use crate::scenario::{Row, Scenario};

/// The HTML report.
pub fn page(scenario: &Scenario, rows: &[Row]) -> Page {
    let mut sections = Vec::new();
    let remarks = tables::remarks(scenario, rows);
    if !remarks.is_empty() {
        let parts = remarks.into_iter().map(Part::Text).collect();
        sections.push(Section { heading: "Remarks".into(), parts });
    }
    if rows.iter().any(|row| !row.published.is_empty()) {
        sections.push(Section {
            heading: "Compared with published figures".into(),
            parts: vec![Part::Table(tables::comparison(rows))],
        });
    }
    sections.push(Section { heading: "Figures".into(), parts: vec![Part::Table(tables::figures(rows))] });
    sections.push(Section {
        heading: "By uncached prompt tokens".into(),
        parts: vec![Part::Text(tables::classes_intro(scenario)), Part::Table(tables::classes(rows))],
    });
    sections.push(Section {
        heading: "Time of a decision".into(),
        parts: vec![Part::Text(tables::decisions(rows))],
    });
    let report = Report {
        title: format!("kvlane simulate: {}", scenario.scenario),
        verdict: verdict(rows),
        trace: workload(scenario.workload.trace.as_deref(), scenario.workload.generate.as_ref()),
        intro: tables::summary(scenario),
        loads: Some(at_loads(rows)),
        sections,
        ..Report::default()
    };
    report.page()
}

/// The figures at each load.
fn at_loads(rows: &[Row]) -> Loads {
    let label = match rows.iter().find_map(|row| load_of(row.cell)).map_or("load", |(name, _)| name) {
        "rate" => "Conversations per second",
        "concurrency" => "Clients",
        _ => "Load (factor on the trace's rate)",
    };
    let point = |row: &Row| {
        Some(Point {
            name: row.arm.clone(),
            load: load_of(row.cell)?.1,
            figures: row.simulated.clone(),
            intervals: row.intervals.clone(),
            published: row.published.clone(),
        })
    };
    Loads { label: label.to_owned(), points: rows.iter().filter_map(point).collect() }
}
