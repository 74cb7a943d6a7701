//! Cached tokens compared with their upper bound, and time by stage.

use std::collections::BTreeMap;

use super::Run;
use crate::report::{Bar, BarChart, Part, Table, number};
use crate::statistics::cached::CachedShares;

/// Stages in the order of a request's way; others follow by name.
const ORDER: [&str; 10] =
    ["read", "parse", "tokenize", "place", "queue", "send", "engine", "prefill", "transfer", "decode"];

pub(super) fn shares(runs: &[Run<'_>]) -> Vec<Part> {
    let shares: Vec<(&Run<'_>, CachedShares)> =
        runs.iter().map(|run| (run, CachedShares::of(run.records))).collect();
    let bar = |(run, shares): &(&Run<'_>, CachedShares)| {
        let bound = shares.most().map(|bound| bound * 100.0);
        Some(Bar { name: run.name.clone(), values: vec![shares.found? * 100.0], bound, ..Bar::default() })
    };
    let bars: Vec<Bar> = shares.iter().filter_map(bar).collect();
    if bars.is_empty() {
        return Vec::new();
    }
    let mut text = match bars.iter().any(|bar| bar.bound.is_some()) {
        true => "The line is the upper bound: an infinite cache that all endpoints share.".to_owned(),
        false => "The upper bound of cached tokens is not known.".to_owned(),
    };
    for (run, shares) in &shares {
        text.extend(shares.excess().map(|why| format!("\n\n{}: {why}", run.name)));
    }
    let chart = BarChart {
        title: "Cached prompt tokens and their upper bound".to_owned(),
        unit: "% of prompt tokens".to_owned(),
        pieces: vec!["from caches".to_owned()],
        bound: "at most".to_owned(),
        bars,
    };
    vec![Part::Text(text), Part::Bars(chart)]
}

/// Mean time in each stage, of the requests that tell.
pub(super) fn stages(runs: &[Run<'_>]) -> Vec<Part> {
    let means: Vec<(&Run<'_>, BTreeMap<&str, f64>)> = runs.iter().map(|run| (run, mean(run))).collect();
    let mut names: Vec<&str> = means.iter().flat_map(|(_, means)| means.keys().copied()).collect();
    names.sort_unstable_by_key(|name| {
        (ORDER.iter().position(|stage| stage == name).unwrap_or(ORDER.len()), *name)
    });
    names.dedup();
    if names.is_empty() {
        return Vec::new();
    }
    let ms = |means: &BTreeMap<&str, f64>, name: &&str| means.get(name).copied().unwrap_or(0.0) * 1e3;
    let bars = |names: &[&str]| {
        let bar = |(run, means): &(&Run<'_>, BTreeMap<&str, f64>)| Bar {
            name: run.name.clone(),
            values: names.iter().map(|name| ms(means, name)).collect(),
            ..Bar::default()
        };
        means.iter().map(bar).collect::<Vec<Bar>>()
    };
    let chart = |title: &str, names: &[&str]| {
        Part::Bars(BarChart {
            title: title.to_owned(),
            unit: "ms, mean".to_owned(),
            pieces: names.iter().map(|name| (*name).to_owned()).collect(),
            bound: String::new(),
            bars: bars(names),
        })
    };
    let of_router: Vec<&str> = names
        .iter()
        .copied()
        .filter(|name| !["queue", "engine", "prefill", "transfer", "decode"].contains(name))
        .collect();
    let columns = std::iter::once("stage, mean ms".to_owned()).chain(runs.iter().map(|run| run.name.clone()));
    let row = |name: &&str| {
        let cells = means.iter().map(|(_, means)| number(ms(means, name)));
        std::iter::once((*name).to_owned()).chain(cells).collect()
    };
    let table = Table { columns: columns.collect(), rows: names.iter().map(row).collect() };
    let mut parts = vec![
        Part::Text(
            "Time until the response began, by the stages of the router's Server-Timing header.".to_owned(),
        ),
        chart("Mean time in each stage", &names),
    ];
    if !of_router.is_empty() && of_router.len() < names.len() {
        parts.push(chart("Of this, in the router", &of_router));
    }
    parts.push(Part::Table(table));
    parts
}

fn mean<'a>(run: &'a Run<'_>) -> BTreeMap<&'a str, f64> {
    let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
    let mut count = 0.0;
    for record in run.records.iter().filter(|record| record.is_ok() && !record.stages_s.is_empty()) {
        count += 1.0;
        for (name, secs) in &record.stages_s {
            *sums.entry(name).or_default() += secs;
        }
    }
    sums.values_mut().for_each(|sum| *sum /= count);
    sums
}

#[cfg(test)]
mod tests {
    use kvlane_trace::record::Record;

    use super::*;

    #[test]
    fn a_stage_that_did_not_happen_took_no_time_and_all_are_in_the_order_of_the_way() {
        let record = |stages: &[(&str, f64)]| Record {
            status: 200,
            stages_s: stages.iter().map(|(name, secs)| ((*name).to_owned(), *secs)).collect(),
            ..Record::default()
        };
        let records = [
            record(&[("engine", 0.3), ("place", 0.002)]),
            record(&[("engine", 0.1), ("queue", 0.5)]),
            record(&[]),
        ];
        let runs = [Run { name: "a".into(), records: &records }];
        let parts = stages(&runs);
        let Part::Bars(chart) = &parts[1] else { panic!("{parts:?}") };
        assert_eq!(chart.pieces, ["place", "queue", "engine"]);
        let expect = [1.0, 250.0, 200.0];
        for (value, expect) in chart.bars[0].values.iter().zip(expect) {
            assert!((value - expect).abs() < 1e-9, "{value} {expect}");
        }
    }
}
