//! Cumulative distributions of latencies over the requests.

use kvlane_trace::record::Record;

use super::Run;
use crate::report::{Axis, Chart, Mark, Part, Series};

/// Points of a curve: every third of a percent, and the last percent in more detail.
const POINTS: usize = 300;
/// Points of the last percent.
const TAIL: usize = 50;

/// Title, axis, quantity in seconds, factor to the axis.
type Drawn = (&'static str, &'static str, fn(&Record) -> Option<f64>, f64);

/// What is drawn.
const CHARTS: [Drawn; 3] = [
    ("Time to first token", "TTFT (s)", Record::ttft_s, 1.0),
    ("End-to-end latency", "E2E (s)", |record| Some(record.e2e_s()), 1.0),
    ("Time per output token", "TPOT (ms)", Record::tpot_s, 1e3),
];

pub(super) fn parts(runs: &[Run<'_>]) -> Vec<Part> {
    let chart = |&(title, label, quantity, scale): &Drawn| {
        let series: Vec<Series> = runs
            .iter()
            .filter_map(|run| {
                let answered = run.records.iter().filter(|record| record.is_ok());
                let samples: Vec<f64> = answered.filter_map(quantity).map(|secs| secs * scale).collect();
                let points = curve(samples);
                (!points.is_empty()).then(|| Series {
                    name: run.name.clone(),
                    points,
                    mark: Mark::Steps,
                    ..Series::default()
                })
            })
            .collect();
        (!series.is_empty()).then(|| {
            Part::Chart(Chart {
                title: title.to_owned(),
                x: Axis::log(label),
                y: Axis::linear("Cumulative share of requests (%)"),
                series,
            })
        })
    };
    CHARTS.iter().filter_map(chart).collect()
}

/// The curve through nearest ranks, as many as are drawn.
fn curve(mut samples: Vec<f64>) -> Vec<(f64, f64)> {
    samples.sort_unstable_by(f64::total_cmp);
    let count = samples.len();
    let shares = (0..=POINTS).map(|n| n as f64 / POINTS as f64 * 0.99);
    let tail = (1..=TAIL).map(|n| 0.99 + n as f64 / TAIL as f64 * 0.01);
    let mut points: Vec<(f64, f64)> = Vec::new();
    for share in shares.chain(tail) {
        let rank = ((count as f64 * share).ceil() as usize).clamp(1, count.max(1));
        let Some(&value) = samples.get(rank - 1) else { break };
        let point = (value, rank as f64 / count as f64 * 100.0);
        if points.last() != Some(&point) {
            points.push(point);
        }
    }
    points
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_begins_at_the_fastest_and_ends_at_the_slowest_of_any_number() {
        assert!(curve(Vec::new()).is_empty());
        assert_eq!(curve(vec![3.0]), [(3.0, 100.0)]);
        assert_eq!(curve(vec![2.0, 1.0]), [(1.0, 50.0), (2.0, 100.0)]);
        let many = curve((1..=100_000).rev().map(f64::from).collect());
        assert_eq!((many[0].0, many[many.len() - 1]), (1.0, (100_000.0, 100.0)));
        assert!(many.len() <= POINTS + TAIL + 1 && many.is_sorted());
    }
}
