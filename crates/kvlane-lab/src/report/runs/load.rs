//! Figures at the loads that were run: lines over several loads with their confidence bands, and dots for what was
//! published; bars at a single one.

use super::{Loads, Point};
use crate::report::{Axis, Bar, BarChart, Chart, Mark, Part, Series, setting};
use crate::statistics::ci::Interval;

/// What is drawn of each point.
struct Drawn {
    title: &'static str,
    unit: &'static str,
    figure: &'static str,
    factor: f64,
    /// Whether the axis of a line is logarithmic.
    log: bool,
}

const CHARTS: [Drawn; 10] = [
    drawn("Time to first token, mean", "s", "ttft_mean_s", 1.0, true),
    drawn("Time to first token, p90", "s", "ttft_p90_s", 1.0, true),
    drawn("Time to first token, p99", "s", "ttft_p99_s", 1.0, true),
    drawn("Time per output token, mean", "ms", "tpot_mean_ms", 1.0, false),
    drawn("End-to-end latency, mean", "s", "e2e_mean_s", 1.0, false),
    drawn("Output tokens per second", "", "out_tok_s", 1.0, false),
    drawn("Cached prompt tokens", "%", "cached_share", 100.0, false),
    drawn("Goodput (requests/s)", "", "goodput_req_s", 1.0, false),
    drawn("Failed requests", "%", "failed_share", 100.0, false),
    drawn("Busiest engine over the mean", "", "busy_imbalance", 1.0, false),
];

const fn drawn(
    title: &'static str,
    unit: &'static str,
    figure: &'static str,
    factor: f64,
    log: bool,
) -> Drawn {
    Drawn { title, unit, figure, factor, log }
}

/// The heading, and the charts.
pub(super) fn section(loads: &Loads) -> (&'static str, Vec<Part>) {
    let mut run: Vec<f64> = loads.points.iter().map(|point| point.load).collect();
    run.sort_unstable_by(f64::total_cmp);
    run.dedup();
    match run[..] {
        [load] => ("At one load", at_one(loads, load)),
        _ => ("Over load", CHARTS.iter().filter_map(|chart| chart.lines(loads, &run)).collect()),
    }
}

fn at_one(loads: &Loads, load: f64) -> Vec<Part> {
    let charts: Vec<Part> = CHARTS.iter().filter_map(|chart| chart.bars(loads)).collect();
    match charts.is_empty() {
        true => charts,
        false => [vec![Part::Text(format!("{}: {}.", loads.label, setting(load)))], charts].concat(),
    }
}

// === impl Drawn ===

impl Drawn {
    fn value(&self, point: &Point) -> Option<f64> {
        Some(point.figures.get(self.figure)? * self.factor)
    }

    fn interval(&self, point: &Point) -> Option<Interval> {
        let Interval { low, high } = *point.intervals.get(self.figure)?;
        Some(Interval { low: low * self.factor, high: high * self.factor })
    }

    fn published(&self, point: &Point) -> Option<f64> {
        Some(point.published.get(self.figure)? * self.factor)
    }

    /// A bar for each run.
    fn bars(&self, loads: &Loads) -> Option<Part> {
        let bar = |point: &Point| {
            Some(Bar {
                name: point.name.clone(),
                values: vec![self.value(point)?],
                interval: self.interval(point),
                bound: self.published(point),
            })
        };
        let bars: Vec<Bar> = loads.points.iter().filter_map(bar).collect();
        (!bars.is_empty()).then(|| {
            Part::Bars(BarChart {
                title: self.title.to_owned(),
                unit: self.unit.to_owned(),
                pieces: vec!["measured".to_owned()],
                bound: "published".to_owned(),
                bars,
            })
        })
    }

    /// A line for each run, with ticks at the loads of `ticks`.
    fn lines(&self, loads: &Loads, ticks: &[f64]) -> Option<Part> {
        let mut names: Vec<&str> = Vec::new();
        for point in &loads.points {
            if !names.contains(&point.name.as_str()) {
                names.push(&point.name);
            }
        }
        let series: Vec<Series> = names.iter().flat_map(|name| self.series(loads, name)).collect();
        (!series.is_empty()).then(|| {
            Part::Chart(Chart {
                title: self.title.to_owned(),
                x: Axis { ticks: ticks.to_vec(), ..Axis::linear(&loads.label) },
                y: Axis { log: self.log, ..Axis::linear(self.unit) },
                series,
            })
        })
    }

    /// What was measured of a run, and what was published of it.
    fn series(&self, loads: &Loads, name: &str) -> Vec<Series> {
        let mut of_run: Vec<&Point> = loads.points.iter().filter(|point| point.name == name).collect();
        of_run.sort_by(|a, b| a.load.total_cmp(&b.load));
        let (mut points, mut band) = (Vec::new(), Vec::new());
        for point in &of_run {
            let Some(value) = self.value(point) else { continue };
            points.push((point.load, value));
            let interval = self.interval(point);
            band.push(interval.map_or((value, value), |interval| (interval.low, interval.high)));
        }
        let measured = Series { name: name.to_owned(), points, band, mark: Mark::Line };
        let points = of_run.iter().filter_map(|point| Some((point.load, self.published(point)?))).collect();
        let name = format!("{name}, published");
        let published = Series { name, points, band: Vec::new(), mark: Mark::Dots };
        [measured, published].into_iter().filter(|series| !series.points.is_empty()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loads(at: &[f64]) -> Loads {
        let point = |name: &str, load: f64| Point {
            name: name.into(),
            load,
            figures: [("ttft_mean_s".to_owned(), load), ("failed_share".to_owned(), 0.0)].into(),
            intervals: [("ttft_mean_s".to_owned(), Interval { low: load / 2.0, high: load * 2.0 })].into(),
            ..Point::default()
        };
        let points = at.iter().flat_map(|&load| [point("a", load), point("b", load)]).collect();
        Loads { label: "Requests per second".into(), points }
    }

    #[test]
    fn one_load_is_bars_and_several_are_lines_with_ticks_at_them() {
        let (heading, parts) = section(&loads(&[1.5]));
        assert_eq!(heading, "At one load");
        let [Part::Text(text), Part::Bars(ttft), Part::Bars(failed)] = &parts[..] else {
            panic!("{parts:?}")
        };
        assert_eq!(text, "Requests per second: 1.5.");
        assert_eq!(ttft.bars.iter().map(|bar| bar.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(ttft.bars[0].interval, Some(Interval { low: 0.75, high: 3.0 }));
        assert_eq!(failed.title, "Failed requests");
        let (heading, parts) = section(&loads(&[1.5, 0.7]));
        assert_eq!(heading, "Over load");
        let [Part::Chart(ttft), Part::Chart(_)] = &parts[..] else { panic!("{parts:?}") };
        assert_eq!((&ttft.x.ticks[..], ttft.series.len()), (&[0.7, 1.5][..], 2));
        assert_eq!(ttft.series[0].points, [(0.7, 0.7), (1.5, 1.5)]);
        assert!(section(&Loads::default()).1.is_empty());
    }
}
