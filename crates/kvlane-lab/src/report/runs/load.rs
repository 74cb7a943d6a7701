//! Figures over load, a line per run with its confidence band, and dots for what was published.

use super::{Loads, Point};
use crate::report::{Axis, Chart, Mark, Part, Series};

/// What is drawn: title, unit, figure, factor, whether the axis is logarithmic.
const CHARTS: [(&str, &str, &str, f64, bool); 10] = [
    ("Time to first token, mean", "s", "ttft_mean_s", 1.0, true),
    ("Time to first token, p90", "s", "ttft_p90_s", 1.0, true),
    ("Time to first token, p99", "s", "ttft_p99_s", 1.0, true),
    ("Time per output token, mean", "ms", "tpot_mean_ms", 1.0, false),
    ("End-to-end latency, mean", "s", "e2e_mean_s", 1.0, false),
    ("Output tokens per second", "", "out_tok_s", 1.0, false),
    ("Cached prompt tokens", "%", "cached_share", 100.0, false),
    ("Goodput (requests/s)", "", "goodput_req_s", 1.0, false),
    ("Failed requests", "%", "failed_share", 100.0, false),
    ("Busiest engine over the mean", "", "busy_imbalance", 1.0, false),
];

pub(super) fn parts(loads: Option<&Loads>) -> Vec<Part> {
    let Some(loads) = loads else { return Vec::new() };
    let mut names: Vec<&str> = Vec::new();
    for point in &loads.points {
        if !names.contains(&point.name.as_str()) {
            names.push(&point.name);
        }
    }
    let chart = |&(title, unit, figure, factor, log): &(&str, &str, &str, f64, bool)| {
        let mut series = Vec::new();
        for &name in &names {
            let mut of_run: Vec<&Point> = loads.points.iter().filter(|point| point.name == name).collect();
            of_run.sort_by(|a, b| a.load.total_cmp(&b.load));
            let (mut points, mut band) = (Vec::new(), Vec::new());
            for point in &of_run {
                let Some(&value) = point.figures.get(figure) else { continue };
                let interval = point.intervals.get(figure);
                let (low, high) = interval.map_or((value, value), |interval| (interval.low, interval.high));
                points.push((point.load, value * factor));
                band.push((low * factor, high * factor));
            }
            if !points.is_empty() {
                series.push(Series { name: name.to_owned(), points, band, mark: Mark::Line });
            }
            let published = |point: &&Point| Some((point.load, point.published.get(figure)? * factor));
            let points: Vec<(f64, f64)> = of_run.iter().filter_map(published).collect();
            if !points.is_empty() {
                let name = format!("{name}, published");
                series.push(Series { name, points, band: Vec::new(), mark: Mark::Dots });
            }
        }
        (!series.is_empty()).then(|| {
            Part::Chart(Chart {
                title: title.to_owned(),
                x: Axis { label: loads.label.clone(), log: false },
                y: Axis { label: unit.to_owned(), log },
                series,
            })
        })
    };
    CHARTS.iter().filter_map(chart).collect()
}
