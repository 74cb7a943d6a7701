//! The runs at a glance: key figures, all runs in one table, and what went wrong.

use std::collections::BTreeMap;

use kvlane_trace::record::Record;

use super::Run;
use crate::report::{Part, Table, Tile, Trend, number, percent};
use crate::statistics::ci::{self, Figure, Interval};
use crate::statistics::summary::{Percentiles, Summary};

/// Changes below this share of a figure are not called better or worse.
const CHANGE_MIN: f64 = 0.01;
/// What intervals are drawn by.
const SEED: u64 = 1;

pub(super) fn parts(runs: &[Run<'_>]) -> Vec<Part> {
    let Some(first) = runs.first() else { return Vec::new() };
    let mut parts = Vec::new();
    if let Some(last) = runs[1..].last() {
        parts.push(Part::Text(format!("{} against {}:", last.name, first.name)));
    }
    parts.extend([Part::Tiles(tiles(first, &runs[1..])), Part::Table(figures(runs))]);
    let intervals = intervals(runs);
    if !intervals.rows.is_empty() {
        parts.push(Part::Text(
            "95 % confidence intervals over the requests of a run; they do not include the variation between runs."
                .to_owned(),
        ));
        parts.push(Part::Table(intervals));
    }
    let errors = errors(runs);
    if !errors.rows.is_empty() {
        parts.push(Part::Text("Failed requests by error:".to_owned()));
        parts.push(Part::Table(errors));
    }
    parts
}

/// The last run's key figures beside those of the first, or those of the only one.
fn tiles(first: &Run<'_>, others: &[Run<'_>]) -> Vec<Tile> {
    let before = Summary::of(first.records, 1.0);
    let after = others.last().map(|run| Summary::of(run.records, 1.0));
    let shown = after.as_ref().unwrap_or(&before);
    let tile = |label: &str, what: &dyn Fn(&Summary) -> Option<f64>, unit: &str, less_is_better: bool| {
        let value = what(shown)?;
        let was = after.as_ref().and_then(|_| what(&before));
        let (mut note, mut trend) = (String::new(), Trend::None);
        if let Some(was) = was {
            note = format!("was {}{unit}", number(was));
            let change = value / was - 1.0;
            if change.is_finite() && change.abs() >= CHANGE_MIN {
                let better = (change < 0.0) == less_is_better;
                trend = if better { Trend::Better } else { Trend::Worse };
                let word = if better { "better" } else { "worse" };
                note = format!("{:+.0} %, {word}; {note}", change * 100.0);
            }
        }
        Some(Tile { label: label.to_owned(), value: format!("{}{unit}", number(value)), note, trend })
    };
    let mut tiles: Vec<Tile> = [
        tile("Time to first token, median", &|all| Some(all.ttft_s?.p50 * 1e3), " ms", true),
        tile("Time to first token, p90", &|all| Some(all.ttft_s?.p90 * 1e3), " ms", true),
        tile("Time per output token, mean", &|all| Some(all.tpot_s?.mean * 1e3), " ms", true),
        tile("End-to-end latency, p90", &|all| Some(all.e2e_s?.p90), " s", true),
        tile("Cached prompt tokens", &|all| Some(all.cached_share? * 100.0), " %", false),
        tile("Failed requests", &|all| Some(all.errors as f64), "", true),
    ]
    .into_iter()
    .flatten()
    .collect();
    let run = others.last().unwrap_or(first);
    for tile in &mut tiles {
        match (tile.label.as_str(), super::bound(run)) {
            ("Cached prompt tokens", Some(bound)) if tile.note.is_empty() => {
                tile.note = format!("of at most {}", percent(bound));
            }
            ("Failed requests", _) if tile.note.is_empty() => {
                tile.note = format!("of {}", number(shown.requests as f64));
            }
            _ => {}
        }
    }
    tiles
}

fn figures(runs: &[Run<'_>]) -> Table {
    let columns = [
        "run",
        "requests",
        "failed",
        "TTFT mean s",
        "p50",
        "p90",
        "p99",
        "TPOT mean ms",
        "p90",
        "ITL p99 ms",
        "E2E mean s",
        "p90",
        "tok/s out",
        "cached",
        "of at most",
    ];
    let of = |percentiles: Option<Percentiles>, what: fn(Percentiles) -> f64, scale: f64| {
        percentiles.map_or("-".to_owned(), |percentiles| number(what(percentiles) * scale))
    };
    let row = |run: &Run<'_>| {
        let summary = Summary::of(run.records, 1.0);
        let answered = run.records.iter().filter(|record| record.is_ok());
        let mut gaps: Vec<f64> = answered.filter_map(|record| Some(record.gaps?.p99_s)).collect();
        vec![
            run.name.clone(),
            number(summary.requests as f64),
            number(summary.errors as f64),
            of(summary.ttft_s, |ttft| ttft.mean, 1.0),
            of(summary.ttft_s, |ttft| ttft.p50, 1.0),
            of(summary.ttft_s, |ttft| ttft.p90, 1.0),
            of(summary.ttft_s, |ttft| ttft.p99, 1.0),
            of(summary.tpot_s, |tpot| tpot.mean, 1e3),
            of(summary.tpot_s, |tpot| tpot.p90, 1e3),
            of(Percentiles::of(&mut gaps), |gaps| gaps.mean, 1e3),
            of(summary.e2e_s, |e2e| e2e.mean, 1.0),
            of(summary.e2e_s, |e2e| e2e.p90, 1.0),
            number(summary.output_tokens_per_s),
            summary.cached_share.map_or("-".to_owned(), percent),
            super::bound(run).map_or("-".to_owned(), percent),
        ]
    };
    let rows = runs.iter().map(row).collect();
    Table { columns: columns.map(str::to_owned).into(), rows }
}

fn intervals(runs: &[Run<'_>]) -> Table {
    const FIGURES: [Figure; 3] = [Figure::Mean, Figure::Percentile(90), Figure::Percentile(99)];
    let columns = ["run", "TTFT mean s", "TTFT p90 s", "TTFT p99 s", "E2E mean s", "E2E p90 s", "E2E p99 s"];
    let row = |run: &Run<'_>| {
        let answered = || run.records.iter().filter(|record| record.is_ok());
        let sets: [Vec<f64>; 2] =
            [answered().filter_map(Record::ttft_s).collect(), answered().map(Record::e2e_s).collect()];
        let found = ci::of_all_requests(&sets, &FIGURES, SEED);
        let cell = |interval: Option<Interval>| match interval {
            Some(Interval { low, high }) => format!("{} to {}", number(low), number(high)),
            None => "-".to_owned(),
        };
        let cells: Vec<String> = found.into_iter().flatten().map(cell).collect();
        let known = cells.iter().any(|cell| cell != "-");
        known.then(|| std::iter::once(run.name.clone()).chain(cells).collect())
    };
    Table { columns: columns.map(str::to_owned).into(), rows: runs.iter().filter_map(row).collect() }
}

fn errors(runs: &[Run<'_>]) -> Table {
    let mut classes: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    for (place, run) in runs.iter().enumerate() {
        for (class, count) in Summary::of(run.records, 1.0).errors_by_class {
            classes.entry(class).or_insert_with(|| vec![0; runs.len()])[place] = count;
        }
    }
    let columns = std::iter::once("class".to_owned()).chain(runs.iter().map(|run| run.name.clone()));
    let row = |(class, counts): (String, Vec<u64>)| {
        std::iter::once(class).chain(counts.into_iter().map(|count| number(count as f64))).collect()
    };
    Table { columns: columns.collect(), rows: classes.into_iter().map(row).collect() }
}
