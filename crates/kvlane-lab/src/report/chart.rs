//! A chart as inline SVG: round ticks, thin grid, one colour per series, the value of a point when the pointer is on
//! it.
//!
//! Sizes are pixels of a drawing of 560 by 300 that the page scales to its column. Colours and line widths are the
//! page's, by class.

use std::fmt::Write as _;

use super::html::escape;
use super::plot::{Plot, colour};
use super::{Axis, Chart, Mark, Series, Table, number, setting};

/// The drawing, and its margins around the plot: above it the label of the vertical axis, below it ticks and label of
/// the horizontal one.
const WIDTH: f64 = 560.0;
const HEIGHT: f64 = 300.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = 44.0;
const RIGHT: f64 = 14.0;
/// Width of a digit of the tick labels, generously.
const DIGIT: f64 = 6.8;
/// Spaces between ticks that are aimed at, horizontally and vertically.
const SPACES_X: f64 = 7.0;
const SPACES_Y: f64 = 5.0;
/// Groups of bars that stand side by side whatever their distance in x. More are a histogram, drawn to scale.
const GROUPS_MAX: usize = 24;
/// Points of a line that are drawn. A longer one is drawn by the extremes of this many pieces, so no peak is lost.
const POINTS_MAX: usize = 1200;
/// Points of a line that tell their value under the pointer.
const HOVERS_MAX: usize = 120;
/// Lines of no more points than this show them as dots.
const DOTS_MAX: usize = 24;
/// Numbers further from or closer to zero than this cannot be divided without care; they are not drawn.
const LARGEST: f64 = 1e300;
const SMALLEST: f64 = 1e-300;

/// From values to pixels.
struct Scale {
    /// Whether `low` and `high` are decimal logarithms.
    log: bool,
    low: f64,
    high: f64,
    /// Pixel of `low` and of `high`.
    from: f64,
    to: f64,
    /// Values with a tick, and what it says.
    ticks: Vec<(f64, String)>,
    /// The places of a bar chart, if `x` only tells groups apart.
    groups: Vec<f64>,
}

/// Rows of the figures beside a chart, of each series and of all.
const FIGURES_MAX: usize = 25;
const FIGURES_ALL_MAX: usize = 250;
/// Dots that tell their values under the pointer. More are drawn as one path.
const DOTS_APART_MAX: usize = 200;

/// The chart as a drawing.
pub(super) fn plot(chart: &Chart) -> Plot {
    let mut marks = String::new();
    drawing(chart, &mut marks);
    Plot {
        title: chart.title.clone(),
        legend: chart.series.iter().map(|series| series.name.clone()).collect(),
        width: WIDTH,
        height: HEIGHT,
        marks,
        about: about(chart),
        figures: figures(chart),
        ..Plot::default()
    }
}

/// What is on it, in a sentence.
fn about(chart: &Chart) -> String {
    let range = |value: fn(&(f64, f64)) -> f64| {
        let values = || chart.series.iter().flat_map(|series| &series.points).map(value);
        let finite = || values().filter(|value| value.is_finite());
        let (low, high) = (finite().fold(f64::NAN, f64::min), finite().fold(f64::NAN, f64::max));
        format!("{} to {}", number(low), number(high))
    };
    let names: Vec<&str> = chart.series.iter().map(|series| series.name.as_str()).collect();
    format!(
        "{} from {}, over {} from {}. Shown: {}",
        chart.y.label,
        range(|point| point.1),
        chart.x.label,
        range(|point| point.0),
        names.join(", ")
    )
}

/// Its points as a table: all of them where they are few, else as many evenly chosen ones.
fn figures(chart: &Chart) -> Table {
    let banded = chart.series.iter().any(|series| !series.band.is_empty());
    let mut columns = vec!["series".to_owned(), chart.x.label.clone(), chart.y.label.clone()];
    if banded {
        columns.push("interval".to_owned());
    }
    let mut rows = Vec::new();
    for series in &chart.series {
        let count = series.points.len();
        let shown = count.min(FIGURES_MAX);
        for place in 0..shown {
            let index = if shown > 1 { place * (count - 1) / (shown - 1) } else { 0 };
            let (x, y) = series.points[index];
            let mut row = vec![series.name.clone(), number(x), number(y)];
            let interval = |&(low, high): &(f64, f64)| format!("{} to {}", number(low), number(high));
            if banded {
                row.push(series.band.get(index).map_or(String::new(), interval));
            }
            rows.push(row);
        }
    }
    rows.truncate(FIGURES_ALL_MAX);
    Table { columns, rows }
}

fn drawing(chart: &Chart, out: &mut String) {
    let y = Scale::vertical(chart);
    let digits = y.ticks.iter().map(|(_, label)| label.chars().count()).max().unwrap_or(1);
    let x = Scale::horizontal(chart, digits as f64 * DIGIT + 10.0);
    frame(chart, &x, &y, out);
    for (place, series) in chart.series.iter().enumerate() {
        let _ = writeln!(out, "<g style=\"{}\">", colour(place));
        match series.mark {
            Mark::Line | Mark::Steps => line(chart, series, &x, &y, out),
            Mark::Dots => dots(chart, series, &x, &y, out),
            Mark::Bars => bars(chart, place, &x, &y, out),
        }
        out.push_str("</g>\n");
    }
}

// === impl Scale ===

impl Scale {
    fn vertical(chart: &Chart) -> Self {
        let ends =
            |series: &Series| series.band.iter().flat_map(|&(low, high)| [low, high]).collect::<Vec<_>>();
        let values = chart
            .series
            .iter()
            .flat_map(|series| series.points.iter().map(|&(_, y)| y).chain(ends(series)).collect::<Vec<_>>());
        let bars = chart.series.iter().any(|series| series.mark == Mark::Bars);
        let mut scale = Self::over(values, &chart.y, bars, 0.6, SPACES_Y);
        (scale.from, scale.to) = (HEIGHT - BOTTOM, TOP);
        // The outermost ticks are the ends, so the eye finds the range.
        if !scale.log
            && let [(first, _), (second, _), ..] = scale.ticks[..]
        {
            let step = second - first;
            scale.low = (scale.low / step).floor() * step;
            scale.high = (scale.high / step - 1e-9).ceil() * step;
            scale.ticks = linear_ticks(scale.low, scale.high, step);
        }
        scale
    }

    fn horizontal(chart: &Chart, left: f64) -> Self {
        let values = || chart.series.iter().flat_map(|series| series.points.iter().map(|&(x, _)| x));
        let mut scale = Self::over(values(), &chart.x, false, 0.1, SPACES_X);
        (scale.from, scale.to) = (left, WIDTH - RIGHT);
        let only_bars = chart.series.iter().all(|series| series.mark == Mark::Bars);
        let mut distinct: Vec<f64> = values().filter(|&x| plain(x)).collect();
        distinct.sort_unstable_by(f64::total_cmp);
        distinct.dedup();
        if only_bars && distinct.len() <= GROUPS_MAX {
            scale.ticks = distinct.iter().map(|&x| (x, setting(x))).collect();
            scale.groups = distinct;
        } else if chart.series.iter().any(|series| series.mark == Mark::Bars) && !scale.log {
            let margin = 0.5 * gap(&distinct);
            (scale.low, scale.high) = (scale.low.min(distinct[0] - margin), scale.high + margin);
        }
        if scale.groups.is_empty() && !chart.x.ticks.is_empty() {
            scale.ticks = scale.ticks_at(&chart.x.ticks);
        }
        scale
    }

    /// Ticks at these values, in order. A label that would touch the one before it is left out.
    fn ticks_at(&self, values: &[f64]) -> Vec<(f64, String)> {
        let mut free = f64::NEG_INFINITY;
        let tick = |&value: &f64| {
            let (at, label) = (self.at(value)?, setting(value));
            let half = label.chars().count() as f64 * DIGIT / 2.0;
            let fits = at - half >= free;
            if fits {
                free = at + half + DIGIT;
            }
            Some((value, if fits { label } else { String::new() }))
        };
        values.iter().filter_map(tick).collect()
    }

    /// A scale over `values`. It begins at zero if they all are above it and the smallest is less than `near` of the
    /// largest.
    fn over(values: impl Iterator<Item = f64>, axis: &Axis, zero: bool, near: f64, spaces: f64) -> Self {
        let values = values.filter(|&value| plain(value) && !(axis.log && value <= 0.0));
        let (mut low, mut high) =
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(v), high.max(v)));
        if low > high {
            (low, high) = if axis.log { (1.0, 10.0) } else { (0.0, 1.0) };
        }
        let ticks;
        if axis.log {
            if low * 1.05 > high {
                (low, high) = (low / 2.0, high * 2.0);
            }
            let margin = 0.02 * (high.log10() - low.log10());
            (low, high) = (low.log10() - margin, high.log10() + margin);
            ticks = log_ticks(low, high, spaces);
        } else {
            if zero || (low > 0.0 && low <= near * high) {
                (low, high) = (low.min(0.0), high.max(0.0));
            }
            let size = low.abs().max(high.abs());
            if high - low <= size * 1e-9 {
                let margin = if size == 0.0 { 1.0 } else { size * 0.1 };
                // What is never negative, such as a number of failures, has no axis below zero.
                let least = if low >= 0.0 { 0.0 } else { f64::NEG_INFINITY };
                (low, high) = ((low - margin).max(least), high + margin);
            }
            ticks = linear_ticks(low, high, round_step((high - low) / spaces));
        }
        Self { log: axis.log, low, high, from: 0.0, to: 0.0, ticks, groups: Vec::new() }
    }

    /// The pixel of a value; `None` if it has none.
    fn at(&self, value: f64) -> Option<f64> {
        if !plain(value) || (self.log && self.groups.is_empty() && value <= 0.0) {
            return None;
        }
        let share = if self.groups.is_empty() {
            let value = if self.log { value.log10() } else { value };
            (value - self.low) / (self.high - self.low)
        } else {
            let place = self.groups.iter().position(|&group| group == value)?;
            (place as f64 + 0.5) / self.groups.len() as f64
        };
        Some(self.from + share.clamp(-0.01, 1.01) * (self.to - self.from))
    }
}

/// Whether a number can be drawn.
fn plain(value: f64) -> bool {
    value == 0.0 || (SMALLEST..LARGEST).contains(&value.abs())
}

/// The smallest distance between neighbours.
fn gap(sorted: &[f64]) -> f64 {
    let least = sorted.windows(2).map(|pair| pair[1] - pair[0]).fold(f64::INFINITY, f64::min);
    if least.is_finite() { least } else { 1.0 }
}

/// 1, 2 or 5 times a power of ten: the one closest above `about`.
pub(super) fn round_step(about: f64) -> f64 {
    let power = 10f64.powf(about.log10().floor());
    let factor = [1.0, 2.0, 5.0, 10.0].into_iter().find(|factor| factor * power >= about * (1.0 - 1e-9));
    factor.unwrap_or(10.0) * power
}

fn linear_ticks(low: f64, high: f64, step: f64) -> Vec<(f64, String)> {
    let first = (low / step - 1e-9).ceil();
    let count = ((high / step + 1e-9).floor() - first).clamp(0.0, 50.0) as u32;
    let (unit, sign) = unit(low.abs().max(high.abs()), 1e4);
    let decimals = (-(step / unit).log10().floor()).clamp(0.0, 9.0) as usize;
    let label = |value: f64| match value / unit {
        0.0 => "0".to_owned(),
        _ if sign == "e" => format!("{value:.2e}"),
        scaled => format!("{scaled:.decimals$}{sign}"),
    };
    (0..=count)
        .map(|place| (first + f64::from(place)) * step)
        .map(|value| if value.abs() < step * 1e-6 { 0.0 } else { value })
        .map(|value| (value, label(value)))
        .collect()
}

/// Powers of ten, with twice and five times them where there are few.
fn log_ticks(low: f64, high: f64, spaces: f64) -> Vec<(f64, String)> {
    let factors: &[f64] = if high - low < 2.5 { &[1.0, 2.0, 5.0] } else { &[1.0] };
    let stride = ((high - low) / spaces).ceil().max(1.0) as i32;
    let (first, last) = (low.floor() as i32, high.ceil() as i32);
    let powers = (first..=last).filter(|power| power.rem_euclid(stride) == 0);
    let values = powers.flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)));
    let label = |value: f64| {
        let (unit, sign) = unit(value, 1e3);
        match value / unit {
            _ if sign == "e" => format!("{value:e}"),
            scaled => format!("{}{sign}", (scaled * 1e6).round() / 1e6),
        }
    };
    let ticks: Vec<(f64, String)> = values
        .filter(|value| (low - 1e-9..=high + 1e-9).contains(&value.log10()))
        .map(|value| (value, label(value)))
        .collect();
    // Within one step of a power round numbers of the values themselves tell more.
    let (from, to) = (10f64.powf(low), 10f64.powf(high));
    if ticks.len() < 2 && to > from && plain(to) {
        return linear_ticks(from, to, round_step((to - from) / spaces));
    }
    ticks
}

/// What figures up to `size` are counted in, and its sign; `e` stands for a power of ten. Below `least`, in ones.
fn unit(size: f64, least: f64) -> (f64, &'static str) {
    match size {
        _ if size > 0.0 && size < 1e-4 => (1.0, "e"),
        _ if size >= 1e15 => (1.0, "e"),
        _ if size >= 1e12 => (1e12, "T"),
        _ if size >= 1e9 => (1e9, "G"),
        _ if size >= 1e6 => (1e6, "M"),
        _ if size >= least => (1e3, "k"),
        _ => (1.0, ""),
    }
}

/// Grid, axis, ticks and labels.
fn frame(chart: &Chart, x: &Scale, y: &Scale, out: &mut String) {
    let bottom = HEIGHT - BOTTOM;
    for (value, label) in &y.ticks {
        let Some(at) = y.at(*value) else { continue };
        let _ = writeln!(
            out,
            "<line class=\"grid\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{at:.1}\" y2=\"{at:.1}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            x.from,
            x.to,
            x.from - 6.0,
            at + 4.0
        );
    }
    for (value, label) in &x.ticks {
        let Some(at) = x.at(*value) else { continue };
        if x.groups.is_empty() {
            let _ = write!(
                out,
                "<line class=\"grid\" x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{TOP}\" y2=\"{bottom}\"/>"
            );
        }
        let _ = writeln!(
            out,
            "<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{label}</text>",
            bottom + 16.0
        );
    }
    let zero = y.at(0.0).filter(|_| !y.log && y.low < 0.0 && y.high > 0.0).unwrap_or(bottom);
    let _ = writeln!(
        out,
        "<line class=\"axis\" x1=\"{:.1}\" x2=\"{:.1}\" y1=\"{zero:.1}\" y2=\"{zero:.1}\"/>\n\
         <text x=\"0\" y=\"11\">{}</text>\n<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>",
        x.from,
        x.to,
        escape(&told(&chart.y.label, y)),
        (x.from + x.to) / 2.0,
        HEIGHT - 6.0,
        escape(&told(&chart.x.label, x))
    );
}

/// What an axis is called: its label, and that it is logarithmic.
fn told(label: &str, scale: &Scale) -> String {
    match (scale.log && scale.groups.is_empty(), label.is_empty()) {
        (false, _) => label.to_owned(),
        (true, true) => "log scale".to_owned(),
        (true, false) => format!("{label}, log scale"),
    }
}

/// Which points of a line to draw: all, or the extremes of its pieces.
fn outline(points: &[(f64, f64)]) -> Vec<usize> {
    if points.len() <= POINTS_MAX {
        return (0..points.len()).collect();
    }
    let pieces = POINTS_MAX / 2;
    let mut kept = vec![0];
    for piece in 0..pieces {
        let range = points.len() * piece / pieces..points.len() * (piece + 1) / pieces;
        let by_height = |a: &usize, b: &usize| points[*a].1.total_cmp(&points[*b].1);
        let (low, high) = (range.clone().min_by(by_height), range.max_by(by_height));
        if let (Some(low), Some(high)) = (low, high) {
            kept.extend([low.min(high), low.max(high)]);
        }
    }
    kept.push(points.len() - 1);
    kept.dedup();
    kept
}

/// The band, the line and what answers the pointer.
fn line(chart: &Chart, series: &Series, x: &Scale, y: &Scale, out: &mut String) {
    let steps = series.mark == Mark::Steps;
    let kept = outline(&series.points);
    let place = |index: usize, value: f64| Some((x.at(series.points[index].0)?, y.at(value)?));
    let at: Vec<Option<(f64, f64)>> =
        kept.iter().map(|&index| place(index, series.points[index].1)).collect();
    if series.band.len() == series.points.len() {
        let ends = |&index: &usize| {
            let (low, high) = series.band[index];
            Some((place(index, low)?, place(index, high)?))
        };
        let ends: Vec<_> = kept.iter().map(ends).collect();
        for piece in ends.split(Option::is_none) {
            let (low, high): (Vec<_>, Vec<_>) = piece.iter().flatten().copied().unzip();
            let mut path = trail(&high, steps);
            let back: Vec<_> = low.iter().rev().copied().collect();
            if !back.is_empty() {
                path.push_str(&trail(&back, false).replacen('M', "L", 1));
                let _ = writeln!(out, "<path class=\"band\" d=\"{path}Z\"/>");
            }
        }
    }
    for piece in at.split(Option::is_none) {
        let piece: Vec<_> = piece.iter().flatten().copied().collect();
        if piece.len() > 1 {
            let _ = writeln!(out, "<path class=\"line\" d=\"{}\"/>", trail(&piece, steps));
        }
    }
    let visible = kept.len() <= DOTS_MAX && !steps;
    let stride = kept.len().div_ceil(HOVERS_MAX).max(1);
    for (index, at) in kept.iter().zip(&at) {
        let Some((px, py)) = at else { continue };
        if visible || kept.len() == 1 {
            let _ = write!(out, "<circle class=\"dot\" cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"2.6\"/>");
        }
        if index % stride == 0 {
            let title = title(chart, series, *index);
            let _ = writeln!(
                out,
                "<circle class=\"hover\" cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"6\"><title>{title}</title></circle>"
            );
        }
    }
}

/// A path through pixels.
fn trail(points: &[(f64, f64)], steps: bool) -> String {
    let mut path = String::new();
    for (place, (px, py)) in points.iter().enumerate() {
        let _ = match (place, steps) {
            (0, _) => write!(path, "M{px:.1} {py:.1}"),
            (_, true) => write!(path, "H{px:.1}V{py:.1}"),
            (_, false) => write!(path, "L{px:.1} {py:.1}"),
        };
    }
    path
}

fn dots(chart: &Chart, series: &Series, x: &Scale, y: &Scale, out: &mut String) {
    if series.points.len() > DOTS_APART_MAX {
        let mut path = String::new();
        for &(px, py) in &series.points {
            if let (Some(px), Some(py)) = (x.at(px), y.at(py)) {
                let _ = write!(path, "M{px:.1} {py:.1}h0");
            }
        }
        let _ = writeln!(out, "<path class=\"dots\" d=\"{path}\"/>");
        return;
    }
    for (index, &(px, py)) in series.points.iter().enumerate() {
        let (Some(px), Some(py)) = (x.at(px), y.at(py)) else { continue };
        whisker(series, index, px, y, out);
        let title = title(chart, series, index);
        let _ = writeln!(
            out,
            "<circle class=\"dot\" cx=\"{px:.1}\" cy=\"{py:.1}\" r=\"3.4\"><title>{title}</title></circle>"
        );
    }
}

/// Bars of one series, beside those of the others.
fn bars(chart: &Chart, place: usize, x: &Scale, y: &Scale, out: &mut String) {
    let series = &chart.series[place];
    let is_bars = |series: &&Series| series.mark == Mark::Bars;
    let (before, all) =
        (chart.series[..place].iter().filter(is_bars).count(), chart.series.iter().filter(is_bars).count());
    let slot = if x.groups.is_empty() {
        let mut values: Vec<f64> = series.points.iter().map(|&(x, _)| x).filter(|&x| plain(x)).collect();
        values.sort_unstable_by(f64::total_cmp);
        values.dedup();
        let share = if x.log { 1.0 / 64.0 } else { (gap(&values) / (x.high - x.low)).min(1.0) };
        share * (x.to - x.from)
    } else {
        ((x.to - x.from) / x.groups.len() as f64).min(160.0)
    };
    let group = slot * if x.groups.is_empty() { 0.92 } else { 0.76 };
    let wide = (group / all as f64).max(0.5);
    let base = if y.log { y.from } else { y.at(0.0).unwrap_or(y.from) };
    for (index, &(px, py)) in series.points.iter().enumerate() {
        let (Some(px), Some(py)) = (x.at(px), y.at(py)) else { continue };
        let left = px - group / 2.0 + wide * before as f64;
        let (top, tall) = (py.min(base), (py - base).abs());
        let inner = if wide > 4.0 { wide - 1.5 } else { wide };
        let title = title(chart, series, index);
        let _ = writeln!(
            out,
            "<rect class=\"bar\" x=\"{left:.1}\" y=\"{top:.1}\" width=\"{inner:.1}\" height=\"{tall:.1}\">\
             <title>{title}</title></rect>"
        );
        whisker(series, index, left + inner / 2.0, y, out);
    }
}

/// The interval of a point, as a vertical line.
fn whisker(series: &Series, index: usize, at: f64, y: &Scale, out: &mut String) {
    let Some(&(low, high)) = series.band.get(index) else { return };
    let (Some(low), Some(high)) = (y.at(low), y.at(high)) else { return };
    let _ = writeln!(
        out,
        "<path class=\"whisker\" d=\"M{at:.1} {low:.1}V{high:.1}M{:.1} {low:.1}h6M{:.1} {high:.1}h6\"/>",
        at - 3.0,
        at - 3.0
    );
}

/// Tooltip of a point.
fn title(chart: &Chart, series: &Series, index: usize) -> String {
    let (x, y) = series.points[index];
    let mut text = String::new();
    if chart.series.len() > 1 {
        let _ = writeln!(text, "{}", series.name);
    }
    let _ = write!(text, "{}: {}\n{}: {}", chart.x.label, number(x), chart.y.label, number(y));
    if let Some(&(low, high)) = series.band.get(index) {
        let _ = write!(text, " ({} to {})", number(low), number(high));
    }
    escape(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(ticks: &[(f64, String)]) -> Vec<&str> {
        ticks.iter().map(|(_, label)| label.as_str()).collect()
    }

    fn scale(values: &[f64], log: bool, spaces: f64) -> Scale {
        Scale::over(values.iter().copied(), &Axis { log, ..Axis::default() }, false, 0.1, spaces)
    }

    #[test]
    fn ticks_are_round_numbers() {
        let expect: [(&[f64], &[&str]); 5] = [
            (&[0.0, 7.3], &["0", "2", "4", "6"]),
            (&[0.0, 0.34], &["0", "0.1", "0.2", "0.3"]),
            (&[0.0, 34_000.0], &["0", "10k", "20k", "30k"]),
            (&[-1.5, 1.5], &["-1", "0", "1"]),
            (&[990.0, 1010.0], &["990", "995", "1000", "1005", "1010"]),
        ];
        for (values, ticks) in expect {
            assert_eq!(labels(&scale(values, false, 5.0).ticks), ticks, "{values:?}");
        }
    }

    #[test]
    fn a_logarithmic_axis_has_powers_of_ten_and_more_where_they_are_few() {
        assert_eq!(
            labels(&scale(&[0.05, 3e7, 0.0, -1.0], true, 10.0).ticks),
            ["0.1", "1", "10", "100", "1k", "10k", "100k", "1M", "10M"]
        );
        assert_eq!(labels(&scale(&[1.5, 60.0], true, 7.0).ticks), ["2", "5", "10", "20", "50"]);
        assert_eq!(labels(&scale(&[12.1, 15.9], true, 4.0).ticks), ["13", "14", "15"]);
        assert!(scale(&[1e-9, 1e9], true, 7.0).ticks.len() <= 8);
    }

    #[test]
    fn one_value_still_has_a_scale() {
        for (value, log) in [(0.0, false), (5.0, false), (-3e8, false), (4.0, true)] {
            let scale = Scale { to: 100.0, ..scale(&[value], log, 5.0) };
            assert!(scale.ticks.len() >= 2, "{value}");
            assert!((0.0..=100.0).contains(&scale.at(value).unwrap()), "{value}");
        }
    }

    #[test]
    fn what_is_never_negative_has_no_axis_below_zero() {
        for values in [&[0.0, 0.0][..], &[0.2], &[0.0, 0.5]] {
            assert!(scale(values, false, 5.0).low >= 0.0, "{values:?}");
            let points = values.iter().enumerate().map(|(x, &y)| (x as f64, y)).collect();
            let series = vec![Series { points, ..Series::default() }];
            assert!(Scale::vertical(&Chart { series, ..Chart::default() }).low >= 0.0, "{values:?}");
        }
    }

    /// A line over loads with these ticks.
    fn over(ticks: &[f64], log: bool) -> Chart {
        let points = ticks.iter().map(|&x| (x, 10.0 * x)).collect();
        Chart {
            x: Axis { ticks: ticks.to_vec(), ..Axis::linear("Load") },
            y: Axis { log, ..Axis::linear("s") },
            series: vec![Series { points, ..Series::default() }],
            ..Chart::default()
        }
    }

    #[test]
    fn ticks_stand_at_the_loads_that_were_run_and_labels_do_not_touch() {
        let scale = Scale::horizontal(&over(&[0.3, 0.5, 1.0, 2.5], false), 40.0);
        assert_eq!(labels(&scale.ticks), ["0.3", "0.5", "1", "2.5"]);
        let scale = Scale::horizontal(&over(&[1.0, 1.01, 9.0], false), 40.0);
        assert_eq!(labels(&scale.ticks), ["1", "", "9"]);
    }

    #[test]
    fn a_logarithmic_axis_is_called_so() {
        for (log, count) in [(true, 1), (false, 0)] {
            let mut out = String::new();
            drawing(&over(&[1.0, 2.0], log), &mut out);
            assert_eq!(out.matches(">s, log scale</text>").count(), count, "{out}");
            assert!(out.contains(">Load</text>"));
        }
    }

    #[test]
    fn a_long_line_keeps_its_peaks() {
        let mut points: Vec<(f64, f64)> = (0..100_000).map(|x| (f64::from(x), 1.0)).collect();
        (points[777].1, points[99_998].1) = (50.0, -3.0);
        let kept = outline(&points);
        assert!(kept.len() <= POINTS_MAX + 2 && kept.is_sorted());
        assert!(kept.contains(&777) && kept.contains(&99_998) && kept.contains(&0));
    }

    #[test]
    fn what_is_no_number_parts_a_line() {
        let points = vec![(0.0, 1.0), (1.0, 2.0), (2.0, f64::NAN), (3.0, 1.0), (4.0, 2.0)];
        let series = vec![Series { name: "a".into(), points, ..Series::default() }];
        let mut out = String::new();
        drawing(&Chart { series, ..Chart::default() }, &mut out);
        assert_eq!(out.matches("class=\"line\"").count(), 2);
        assert_eq!(out.matches("<title>").count(), 4);
    }

    #[test]
    fn bars_of_several_series_stand_side_by_side() {
        let series = |name: &str| Series {
            name: name.into(),
            points: vec![(2.0, 10.0), (40.0, 20.0)],
            band: vec![(8.0, 12.0), (15.0, 25.0)],
            mark: Mark::Bars,
        };
        let mut out = String::new();
        drawing(&Chart { series: vec![series("a"), series("b")], ..Chart::default() }, &mut out);
        let lefts: Vec<f64> = out
            .split("<rect class=\"bar\" x=\"")
            .skip(1)
            .map(|rest| rest.split('"').next().unwrap().parse().unwrap())
            .collect();
        assert!(lefts[0] < lefts[2] && lefts[2] < lefts[1] && lefts[1] < lefts[3], "{lefts:?}");
        assert_eq!(out.matches("class=\"whisker\"").count(), 4);
        assert!(out.contains(">2</text>") && out.contains(">40</text>"));
    }
}
