//! The report of a simulation, to open in a browser.

use kvlane_sim::scenario::{Row, Scenario};
use kvlane_trace::report::{Axis, Chart, Mark, Page, Part, Section, Series};

use super::{load_of, tables};

/// What is drawn over the load: title and axis, figure, factor.
const CHARTS: [(&str, &str, f64, bool); 8] = [
    ("Time to first token, mean (s)", "ttft_mean_s", 1.0, true),
    ("Time to first token, p90 (s)", "ttft_p90_s", 1.0, true),
    ("Time per output token, mean (ms)", "tpot_mean_ms", 1.0, false),
    ("Time to the end, mean (s)", "e2e_mean_s", 1.0, false),
    ("Output tokens per second", "out_tok_s", 1.0, false),
    ("Prompt tokens from the cache (%)", "cached_share", 100.0, false),
    ("Good answers per second", "goodput_req_s", 1.0, false),
    ("Busiest engine over the mean", "busy_imbalance", 1.0, false),
];

/// The percentiles that a single load is drawn over.
const PERCENTILES: [(f64, &str); 3] = [(50.0, "p50"), (90.0, "p90"), (99.0, "p99")];

/// The report.
pub(super) fn page(scenario: &Scenario, rows: &[Row]) -> Page {
    let mut loads: Vec<f64> = rows.iter().filter_map(|row| load_of(row.cell)).map(|(_, load)| load).collect();
    loads.sort_unstable_by(f64::total_cmp);
    loads.dedup();
    let charts = if loads.len() > 1 { over_load(rows) } else { over_percentiles(rows) };
    let mut sections =
        vec![Section { heading: "At a glance".into(), parts: charts.into_iter().map(Part::Chart).collect() }];
    if rows.iter().any(|row| !row.published.is_empty()) {
        sections.push(Section {
            heading: "Beside what was published".into(),
            parts: vec![Part::Table(tables::comparison(rows))],
        });
    }
    sections.push(Section { heading: "Figures".into(), parts: vec![Part::Table(tables::figures(rows))] });
    sections.push(Section {
        heading: "By the work a request brings".into(),
        parts: vec![Part::Text(tables::classes_intro(scenario)), Part::Table(tables::classes(rows))],
    });
    sections.push(Section {
        heading: "Cost of deciding".into(),
        parts: vec![Part::Text(tables::decisions(rows))],
    });
    Page {
        title: format!("kvlane simulate: {}", scenario.scenario),
        intro: tables::summary(scenario),
        sections,
    }
}

/// What stands in brackets at the end of a title.
fn unit_of(title: &str) -> String {
    title.rsplit_once('(').map_or("", |(_, unit)| unit.trim_end_matches(')')).to_owned()
}

/// The arms in the order of the rows.
fn arms(rows: &[Row]) -> Vec<&str> {
    let mut arms: Vec<&str> = Vec::new();
    for row in rows {
        if !arms.contains(&row.arm.as_str()) {
            arms.push(&row.arm);
        }
    }
    arms
}

/// A line per arm with its confidence band, and dots for what was published.
fn over_load(rows: &[Row]) -> Vec<Chart> {
    let label = rows.iter().find_map(|row| load_of(row.cell)).map_or("load", |(name, _)| name);
    let label = match label {
        "rate" => "Conversations per second",
        "concurrency" => "Clients",
        _ => "Load (factor on the trace's rate)",
    };
    let chart = |&(title, figure, factor, log): &(&str, &str, f64, bool)| {
        let mut series = Vec::new();
        for arm in arms(rows) {
            let of_arm = || rows.iter().filter(|row| row.arm == arm);
            let (mut points, mut band) = (Vec::new(), Vec::new());
            for row in of_arm() {
                let (Some((_, load)), Some(value)) = (load_of(row.cell), row.simulated.get(figure)) else {
                    continue;
                };
                points.push((load, value * factor));
                let interval = row.intervals.get(figure);
                let (low, high) = interval.map_or((*value, *value), |interval| (interval.low, interval.high));
                band.push((low * factor, high * factor));
            }
            series.push(Series { name: arm.to_owned(), points, band, mark: Mark::Line });
            let published: Vec<(f64, f64)> = of_arm()
                .filter_map(|row| Some((load_of(row.cell)?.1, row.published.get(figure)? * factor)))
                .collect();
            if !published.is_empty() {
                let name = format!("{arm}, published");
                series.push(Series { name, points: published, band: Vec::new(), mark: Mark::Dots });
            }
        }
        Chart {
            title: title.to_owned(),
            x: Axis { label: label.to_owned(), log: false },
            y: Axis { label: unit_of(title), log },
            series,
        }
    };
    CHARTS.iter().map(chart).collect()
}

/// A line per arm over the percentiles of its latencies.
fn over_percentiles(rows: &[Row]) -> Vec<Chart> {
    let latencies = [
        ("Time to first token (s)", "ttft", "s"),
        ("Time per output token (ms)", "tpot", "ms"),
        ("Time to the end (s)", "e2e", "s"),
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
