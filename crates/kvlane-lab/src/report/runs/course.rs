//! How a run went over time, as a whole and on each endpoint, and what load does to latency within it.

use std::collections::BTreeMap;

use kvlane_trace::record::Record;

use super::Run;
use crate::report::{Axis, Chart, HeatMap, Mark, Part, Series, heat};
use crate::statistics::ci::{self, Figure};
use crate::statistics::summary::Percentiles;

/// Stretches of time at most.
const STRETCHES_MAX: f64 = 96.0;
/// Endpoints with a row of their own at most: those with the most requests. The others have one row together.
const ENDPOINTS_MAX: usize = 63;
/// Runs with heat maps of their own.
const MAPS_MAX: usize = 4;
/// Groups of requests by load, and how many a group has at least.
const GROUPS: usize = 12;
const GROUP_MIN: usize = 30;

/// The time line that runs share.
#[derive(Clone, Copy, Debug)]
struct Stretches {
    from: f64,
    step: f64,
    count: usize,
}

pub(super) fn over_time(runs: &[Run<'_>]) -> Vec<Part> {
    let Some(stretches) = Stretches::of(runs) else { return Vec::new() };
    let chart = |title: &str, unit: &str, series: Vec<Series>| {
        let drawn = series.iter().any(|series| series.points.iter().any(|point| point.1.is_finite()));
        drawn.then(|| {
            Part::Chart(Chart {
                title: title.to_owned(),
                x: Axis::linear("Time (s)"),
                y: Axis::linear(unit),
                series,
            })
        })
    };
    let of_runs = |series: &dyn Fn(&Run<'_>) -> Series| runs.iter().map(series).collect::<Vec<_>>();
    let mut parts: Vec<Part> = [
        chart(
            "Time to first token over time: median, with the middle 80 %",
            "TTFT (s)",
            of_runs(&|run| latency(run, stretches)),
        ),
        chart("Requests in flight over time", "Requests", of_runs(&|run| in_flight(run, stretches))),
        chart("Cached prompt tokens over time", "%", of_runs(&|run| cached(run, stretches))),
    ]
    .into_iter()
    .flatten()
    .collect();
    let by_load: Vec<Series> = runs.iter().filter_map(by_load).collect();
    if !by_load.is_empty() {
        parts.push(Part::Chart(Chart {
            title: "Time to first token against load: mean, with its interval".to_owned(),
            x: Axis::linear("Requests in flight at its start"),
            y: Axis::linear("TTFT (s)"),
            series: by_load,
        }));
    }
    parts
}

pub(super) fn endpoints(runs: &[Run<'_>]) -> Vec<Part> {
    let Some(stretches) = Stretches::of(runs) else { return Vec::new() };
    let runs = &runs[..runs.len().min(MAPS_MAX)];
    let places: Vec<Places<'_>> = runs.iter().map(|run| places(run.records)).collect();
    let in_flight: Vec<Vec<Vec<f64>>> =
        runs.iter().zip(&places).map(|(run, places)| places.in_flight(run.records, stretches)).collect();
    // One end of the shades for all runs, so that they can be compared.
    let mut all: Vec<f64> = in_flight.iter().flatten().flatten().copied().collect();
    all.sort_unstable_by(f64::total_cmp);
    let most = heat::high(&all);
    let mut parts = Vec::new();
    for ((run, places), in_flight) in runs.iter().zip(&places).zip(in_flight) {
        if places.names.is_empty() {
            continue;
        }
        let map = |what: &str, unit: &str, most: Option<f64>, rows: Vec<Vec<f64>>| {
            Part::Heat(HeatMap {
                title: format!("{what}, by endpoint and time: {}", run.name),
                x: "Time (s)".to_owned(),
                from: stretches.from,
                step: stretches.step,
                unit: unit.to_owned(),
                most,
                rows: places.names.iter().cloned().zip(rows).collect(),
            })
        };
        parts.push(map("Requests in flight", "Requests", most, in_flight));
        if run.records.iter().any(|record| record.cached_tokens.is_some()) {
            let rows = places.cached(run.records, stretches);
            parts.push(map("Cached prompt tokens", "%", Some(100.0), rows));
        }
    }
    parts
}

// === impl Stretches ===

impl Stretches {
    fn of(runs: &[Run<'_>]) -> Option<Self> {
        let records = || runs.iter().flat_map(|run| run.records);
        let from = records().map(|record| record.scheduled_s).fold(f64::INFINITY, f64::min);
        let to = records().map(|record| record.end_s).fold(f64::NEG_INFINITY, f64::max);
        let span = to - from;
        if !(span > 0.0 && span.is_finite()) {
            return None;
        }
        let step = crate::report::chart::round_step(span / STRETCHES_MAX);
        let from = (from / step).floor() * step;
        let count = ((to - from) / step).ceil().clamp(1.0, STRETCHES_MAX + 2.0) as usize;
        Some(Self { from, step, count })
    }

    fn at(&self, time_s: f64) -> usize {
        (((time_s - self.from) / self.step).max(0.0) as usize).min(self.count - 1)
    }

    fn middle(&self, place: usize) -> f64 {
        self.from + (place as f64 + 0.5) * self.step
    }

    /// Adds to every stretch the share of it that lies between two times.
    fn spread(&self, from_s: f64, to_s: f64, sums: &mut [f64]) {
        let first = self.at(from_s);
        for (place, sum) in sums.iter_mut().enumerate().take(self.at(to_s) + 1).skip(first) {
            let begin = self.from + place as f64 * self.step;
            let inside = to_s.min(begin + self.step) - from_s.max(begin);
            *sum += (inside / self.step).max(0.0);
        }
    }
}

fn latency(run: &Run<'_>, stretches: Stretches) -> Series {
    let mut samples = vec![Vec::new(); stretches.count];
    for record in run.records.iter().filter(|record| record.is_ok()) {
        if let Some(ttft) = record.ttft_s() {
            samples[stretches.at(record.scheduled_s)].push(ttft);
        }
    }
    let (mut points, mut band) = (Vec::new(), Vec::new());
    for (place, samples) in samples.iter_mut().enumerate() {
        samples.sort_unstable_by(f64::total_cmp);
        let rank =
            |share: f64| samples.get((samples.len() as f64 * share) as usize).copied().unwrap_or(f64::NAN);
        points.push((stretches.middle(place), rank(0.5)));
        band.push((rank(0.1), rank(0.9)));
    }
    Series { name: run.name.clone(), points, band, mark: Mark::Line }
}

fn in_flight(run: &Run<'_>, stretches: Stretches) -> Series {
    let mut sums = vec![0.0; stretches.count];
    for record in run.records {
        stretches.spread(record.sent_s, record.end_s, &mut sums);
    }
    let points = sums.iter().enumerate().map(|(place, sum)| (stretches.middle(place), *sum)).collect();
    Series { name: run.name.clone(), points, ..Series::default() }
}

fn cached(run: &Run<'_>, stretches: Stretches) -> Series {
    let mut sums = vec![(0.0, 0.0); stretches.count];
    run.records.iter().for_each(|record| add_cached(record, &mut sums[stretches.at(record.sent_s)]));
    let points =
        sums.iter().enumerate().map(|(place, (cached, all))| (stretches.middle(place), cached / all * 100.0));
    Series { name: run.name.clone(), points: points.collect(), ..Series::default() }
}

/// Cached tokens and prompt tokens, of answers that tell of them.
fn add_cached(record: &Record, sums: &mut (f64, f64)) {
    if let Some(cached) = record.cached_tokens.filter(|_| record.is_ok()) {
        *sums = (sums.0 + f64::from(cached), sums.1 + f64::from(record.prompt_tokens));
    }
}

/// Requests in groups of one size by how many others were in flight when they were sent.
fn by_load(run: &Run<'_>) -> Option<Series> {
    let mut sent: Vec<f64> = run.records.iter().map(|record| record.sent_s).collect();
    let mut ends: Vec<f64> = run.records.iter().map(|record| record.end_s).collect();
    sent.sort_unstable_by(f64::total_cmp);
    ends.sort_unstable_by(f64::total_cmp);
    let mut samples: Vec<(usize, f64)> = run
        .records
        .iter()
        .filter(|record| record.is_ok())
        .filter_map(|record| {
            let at = record.sent_s;
            let begun = sent.partition_point(|&time| time < at);
            Some((begun.saturating_sub(ends.partition_point(|&time| time <= at)), record.ttft_s()?))
        })
        .collect();
    samples.sort_unstable_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let groups = (samples.len() / GROUP_MIN).min(GROUPS);
    if groups < 2 || samples.first()?.0 == samples.last()?.0 {
        return None;
    }
    let mut points: Vec<(f64, f64)> = Vec::new();
    let mut band = Vec::new();
    for group in 0..groups {
        let of_group = &samples[samples.len() * group / groups..samples.len() * (group + 1) / groups];
        let load = of_group.iter().map(|(load, _)| *load as f64).sum::<f64>() / of_group.len() as f64;
        let mut ttfts: Vec<f64> = of_group.iter().map(|(_, ttft)| *ttft).collect();
        let mean = Percentiles::of(&mut ttfts)?.mean;
        let interval = ci::of_requests(&ttfts, Figure::Mean, 1)?;
        points.push((load, mean));
        band.push((interval.low, interval.high));
    }
    Some(Series { name: run.name.clone(), points, band, mark: Mark::Line })
}

/// The rows of a run's heat maps.
struct Places<'a> {
    names: Vec<String>,
    row_of: BTreeMap<&'a str, usize>,
    /// Endpoints in the last row, if they share it.
    folded: usize,
}

fn places(records: &[Record]) -> Places<'_> {
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    for endpoint in records.iter().filter_map(|record| record.endpoint.as_deref()) {
        *counts.entry(endpoint).or_default() += 1;
    }
    let mut by_count: Vec<(&str, u64)> = counts.into_iter().collect();
    by_count.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(b.0)));
    let own = if by_count.len() > ENDPOINTS_MAX + 1 { ENDPOINTS_MAX } else { by_count.len() };
    let (shown, others) = by_count.split_at(own);
    let mut shown: Vec<&str> = shown.iter().map(|(name, _)| *name).collect();
    // Shorter names first, so that the tenth stands behind the ninth.
    shown.sort_by(|a, b| a.len().cmp(&b.len()).then(a.cmp(b)));
    let mut row_of: BTreeMap<&str, usize> =
        shown.iter().enumerate().map(|(row, name)| (*name, row)).collect();
    row_of.extend(others.iter().map(|(name, _)| (*name, own)));
    let mut names: Vec<String> = shown.into_iter().map(str::to_owned).collect();
    if !others.is_empty() {
        names.push(format!("{} others, mean", others.len()));
    }
    Places { names, row_of, folded: others.len() }
}

// === impl Places ===

impl Places<'_> {
    fn row(&self, record: &Record) -> Option<usize> {
        self.row_of.get(record.endpoint.as_deref()?).copied()
    }

    fn in_flight(&self, records: &[Record], stretches: Stretches) -> Vec<Vec<f64>> {
        let mut rows = vec![vec![0.0; stretches.count]; self.names.len()];
        for record in records {
            if let Some(row) = self.row(record) {
                stretches.spread(record.sent_s, record.end_s, &mut rows[row]);
            }
        }
        if let Some(last) = rows.last_mut().filter(|_| self.folded > 0) {
            last.iter_mut().for_each(|sum| *sum /= self.folded as f64);
        }
        rows
    }

    fn cached(&self, records: &[Record], stretches: Stretches) -> Vec<Vec<f64>> {
        let mut rows = vec![vec![(0.0, 0.0); stretches.count]; self.names.len()];
        for record in records {
            if let Some(row) = self.row(record) {
                add_cached(record, &mut rows[row][stretches.at(record.sent_s)]);
            }
        }
        let shares =
            |row: Vec<(f64, f64)>| row.into_iter().map(|(cached, all)| cached / all * 100.0).collect();
        rows.into_iter().map(shares).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: u64, sent_s: f64, end_s: f64, endpoint: &str) -> Record {
        Record {
            id,
            scheduled_s: sent_s,
            sent_s,
            first_token_s: Some(sent_s + 0.5),
            end_s,
            prompt_tokens: 100,
            cached_tokens: Some(25),
            endpoint: Some(endpoint.to_owned()),
            status: 200,
            ..Record::default()
        }
    }

    #[test]
    fn a_request_is_in_flight_for_as_long_as_it_takes() {
        let records = [record(0, 0.0, 96.0, "a"), record(1, 24.0, 48.0, "b"), record(2, 30.0, 36.0, "a")];
        let run = Run { records: &records, ..Run::default() };
        let stretches = Stretches::of(&[run]).unwrap();
        let places = places(&records);
        let rows = places.in_flight(&records, stretches);
        assert_eq!(places.names, ["a", "b"]);
        let sums: Vec<f64> = rows.iter().map(|row| row.iter().sum::<f64>() * stretches.step).collect();
        assert!((sums[0] - 102.0).abs() < 1e-6 && (sums[1] - 24.0).abs() < 1e-6, "{sums:?}");
        assert_eq!((rows[0][0], rows[1][0]), (1.0, 0.0));
        let cached = places.cached(&records, stretches);
        assert_eq!(cached[0][0], 25.0);
        assert!(cached[1][0].is_nan(), "nothing was sent there");
    }

    #[test]
    fn many_endpoints_share_the_last_row() {
        let records: Vec<Record> =
            (0..200).map(|n| record(n, n as f64, n as f64 + 1.0, &format!("e{}", n % 100))).collect();
        let places = places(&records);
        assert_eq!((places.names.len(), places.folded), (ENDPOINTS_MAX + 1, 100 - ENDPOINTS_MAX));
        assert_eq!(places.names.last().unwrap(), "37 others, mean");
    }

    #[test]
    fn load_is_how_many_others_were_in_flight() {
        // Pairs: one alone, one beside it, which takes longer.
        let mut records = Vec::new();
        for pair in 0..60 {
            let at = f64::from(pair) * 10.0;
            records.push(record(2 * pair as u64, at, at + 5.0, "a"));
            records.push(Record {
                first_token_s: Some(at + 3.0),
                ..record(2 * pair as u64 + 1, at + 1.0, at + 5.0, "a")
            });
        }
        let series = by_load(&Run { records: &records, ..Run::default() }).unwrap();
        assert_eq!((series.points[0], *series.points.last().unwrap()), ((0.0, 0.5), (1.0, 2.0)));
        assert!(by_load(&Run { records: &records[..20], ..Run::default() }).is_none(), "too few to group");
    }
}
