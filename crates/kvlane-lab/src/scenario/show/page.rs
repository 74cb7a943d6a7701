//! The HTML report of a simulation.

use super::{load_of, tables, verdict};
use crate::report::{Axis, Chart, Loads, Mark, Page, Part, Point, Report, Section, Series};
use crate::scenario::{Row, Scenario};

/// Percentiles that are drawn for a single load.
const PERCENTILES: [(f64, &str); 3] = [(50.0, "p50"), (90.0, "p90"), (99.0, "p99")];

/// The HTML report.
pub fn page(scenario: &Scenario, rows: &[Row]) -> Page {
    let mut loads: Vec<f64> = rows.iter().filter_map(|row| load_of(row.cell)).map(|(_, load)| load).collect();
    loads.sort_unstable_by(f64::total_cmp);
    loads.dedup();
    let several = loads.len() > 1;
    let mut sections = Vec::new();
    let remarks = tables::remarks(scenario, rows);
    if !remarks.is_empty() {
        let parts = remarks.into_iter().map(Part::Text).collect();
        sections.push(Section { heading: "Remarks".into(), parts });
    }
    if !several {
        let charts = over_percentiles(rows).into_iter().map(Part::Chart);
        sections.push(Section { heading: "Summary".into(), parts: charts.collect() });
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
        intro: match verdict(rows) {
            Some(verdict) => format!("{verdict}\n\n{}", tables::summary(scenario)),
            None => tables::summary(scenario),
        },
        loads: several.then(|| over_load(rows)),
        sections,
        ..Report::default()
    };
    report.page()
}

/// The text in brackets at the end of a title.
fn unit_of(title: &str) -> String {
    title.rsplit_once('(').map_or("", |(_, unit)| unit.trim_end_matches(')')).to_owned()
}

/// Charts over the load.
fn over_load(rows: &[Row]) -> Loads {
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

/// A line per arm over the percentiles of its latencies.
fn over_percentiles(rows: &[Row]) -> Vec<Chart> {
    let latencies = [
        ("Time to first token (s)", "ttft", "s"),
        ("Time per output token (ms)", "tpot", "ms"),
        ("End-to-end latency (s)", "e2e", "s"),
    ];
    let chart = |(title, latency, unit): (&str, &str, &str)| {
        let series = |row: &Row| {
            let name = |what: &str| format!("{latency}_{what}_{unit}");
            let point = |&(x, what): &(f64, &str)| Some((x, *row.simulated.get(&name(what))?));
            let band = |&(_, what): &(f64, &str)| {
                let value = *row.simulated.get(&name(what))?;
                Some(
                    row.intervals
                        .get(&name(what))
                        .map_or((value, value), |interval| (interval.low, interval.high)),
                )
            };
            Series {
                name: row.arm.clone(),
                points: PERCENTILES.iter().filter_map(point).collect(),
                band: PERCENTILES.iter().filter_map(band).collect(),
                mark: Mark::Line,
            }
        };
        Chart {
            title: title.to_owned(),
            x: Axis { label: "Percentile of the requests".to_owned(), log: false },
            y: Axis { label: unit_of(title), log: true },
            series: rows.iter().map(series).collect(),
        }
    };
    latencies.into_iter().map(chart).collect()
}
