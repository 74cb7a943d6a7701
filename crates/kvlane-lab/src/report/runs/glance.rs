//! The runs at a glance: key figures, all runs in one table, and what went wrong.

use std::collections::BTreeMap;

use kvlane_trace::record::Record;

use super::Run;
use crate::report::{Part, Table, Tile, Trend, number, percent};
use crate::statistics::cached::CachedShares;
use crate::statistics::ci::{self, Figure, Interval};
use crate::statistics::summary::{Percentiles, Summary};

/// Changes below this share of a figure are not called better or worse.
const CHANGE_MIN: f64 = 0.01;
/// Labels of tiles that say of how much they are.
const CACHED: &str = "Cached prompt tokens";
const FAILED: &str = "Failed requests";
/// What intervals are drawn by.
const SEED: u64 = 1;

pub(super) fn parts(runs: &[Run<'_>]) -> Vec<Part> {
    let Some((first, others)) = runs.split_first() else { return Vec::new() };
    let mut parts = Vec::new();
    if !others.is_empty() {
        parts.push(Part::Text(format!("{}, with which the others are compared:", first.name)));
    }
    parts.push(Part::Tiles(tiles(first, None)));
    for run in others {
        parts.push(Part::Text(format!("{} against {}:", run.name, first.name)));
        parts.push(Part::Tiles(tiles(run, Some(first))));
    }
    parts.push(Part::Table(figures(runs)));
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

/// A run's key figures, beside those of the run that it is compared with.
fn tiles(run: &Run<'_>, first: Option<&Run<'_>>) -> Vec<Tile> {
    let shown = Summary::of(run.records, 1.0);
    let before = first.map(|first| Summary::of(first.records, 1.0));
    let tile = |label: &str, what: &dyn Fn(&Summary) -> Option<f64>, unit: &str, less_is_better: bool| {
        let value = what(&shown)?;
        let (mut note, mut trend) = (String::new(), Trend::None);
        if let Some(was) = before.as_ref().and_then(what) {
            note = format!("against {}{unit}", number(was));
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
        tile(CACHED, &|all| Some(all.cached_share? * 100.0), " %", false),
        tile(FAILED, &|all| Some(all.errors as f64), "", true),
    ]
    .into_iter()
    .flatten()
    .collect();
    let most = CachedShares::of(run.records).most();
    for tile in tiles.iter_mut().filter(|tile| tile.note.is_empty()) {
        match tile.label.as_str() {
            CACHED => {
                tile.note = most.map_or_else(String::new, |most| format!("of at most {}", percent(most)))
            }
            FAILED => tile.note = format!("of {}", number(shown.requests as f64)),
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
            CachedShares::of(run.records).most().map_or("-".to_owned(), percent),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn records(ttft_s: f64, cached: u32) -> Vec<Record> {
        let record = |id| Record {
            id,
            first_token_s: Some(ttft_s),
            end_s: ttft_s + 1.0,
            prompt_tokens: 1000,
            cached_tokens: Some(cached),
            reusable_tokens: Some(41),
            status: 200,
            ..Record::default()
        };
        (0..10).map(record).collect()
    }

    #[test]
    fn every_run_has_its_tiles_and_says_what_it_is_compared_with() {
        let all = [records(1.0, 0), records(0.5, 0), records(2.0, 0)];
        let runs: Vec<Run<'_>> = ["a", "b", "c"]
            .iter()
            .zip(&all)
            .map(|(name, records)| Run { name: (*name).into(), records })
            .collect();
        let parts = parts(&runs);
        let heads: Vec<&str> = parts
            .windows(2)
            .filter_map(|pair| match pair {
                [Part::Text(head), Part::Tiles(tiles)] if tiles.len() == 5 => Some(head.as_str()),
                _ => None,
            })
            .collect();
        assert_eq!(heads, ["a, with which the others are compared:", "b against a:", "c against a:"]);
        let notes = |place: usize| match &parts[place] {
            Part::Tiles(tiles) => tiles[0].note.clone(),
            part => panic!("{part:?}"),
        };
        assert_eq!([notes(1), notes(3)], ["", "-50 %, better; against 1,000 ms"]);
    }

    #[test]
    fn no_run_finds_more_in_caches_than_at_most() {
        let tile = |cached| {
            let records = records(1.0, cached);
            let run = Run { name: "a".into(), records: &records };
            let tiles = tiles(&run, None);
            tiles.into_iter().find(|tile| tile.label == CACHED).map(|tile| (tile.value, tile.note))
        };
        assert_eq!(tile(58), Some(("5.80 %".into(), "of at most 5.8 %".into())));
        assert_eq!(tile(20), Some(("2 %".into(), "of at most 4.1 %".into())));
        assert_eq!(tile(900), Some(("90 %".into(), String::new())), "of warm caches no bound is known");
    }
}
