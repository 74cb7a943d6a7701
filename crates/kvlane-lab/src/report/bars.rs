//! Horizontal bars, one for each name, in one colour or in the pieces they consist of.

use std::fmt::Write as _;

use super::html::escape;
use super::plot::{Plot, colour};
use super::{BarChart, Table, number, setting};
use crate::statistics::ci::Interval;

const WIDTH: f64 = 560.0;
const TOP: f64 = 8.0;
const BOTTOM: f64 = 40.0;
const RIGHT: f64 = 56.0;
const ROW: f64 = 30.0;
const THICK: f64 = 18.0;
/// Longest name that is drawn whole.
const NAME_MAX: usize = 24;
const TICKS: f64 = 5.0;

pub(super) fn plot(chart: &BarChart) -> Plot {
    let short = |name: &String| {
        let count = name.chars().count();
        match count <= NAME_MAX {
            true => name.clone(),
            false => std::iter::once('…').chain(name.chars().skip(count - NAME_MAX + 1)).collect::<String>(),
        }
    };
    let names: Vec<String> = chart.bars.iter().map(|bar| short(&bar.name)).collect();
    let left = 6.6 * names.iter().map(|name| name.chars().count()).max().unwrap_or(0) as f64 + 12.0;
    let total = |values: &[f64]| values.iter().filter(|value| value.is_finite()).sum::<f64>();
    let ends = chart
        .bars
        .iter()
        .flat_map(|bar| [Some(total(&bar.values)), bar.bound, bar.interval.map(|interval| interval.high)])
        .flatten();
    let high = ends.filter(|end| end.is_finite()).fold(0.0, f64::max);
    let high = if high > 0.0 { high } else { 1.0 };
    let pixels = (WIDTH - RIGHT - left) / high;
    let bottom = TOP + ROW * chart.bars.len() as f64;
    let mut marks = String::new();
    let step = super::chart::round_step(high / TICKS);
    for tick in 0..=(high / step + 1e-9) as u32 {
        let value = f64::from(tick) * step;
        let x = left + value * pixels;
        let _ = writeln!(
            marks,
            "<line class=\"grid\" x1=\"{x:.1}\" x2=\"{x:.1}\" y1=\"{TOP}\" y2=\"{bottom:.1}\"/>\
             <text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            bottom + 15.0,
            setting(value)
        );
    }
    let _ = writeln!(
        marks,
        "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
        (left + WIDTH - RIGHT) / 2.0,
        bottom + 33.0,
        escape(&chart.unit)
    );
    for (row, bar) in chart.bars.iter().enumerate() {
        let y = TOP + ROW * row as f64 + (ROW - THICK) / 2.0;
        let _ = writeln!(
            marks,
            "<g><text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            left - 8.0,
            y + THICK / 2.0 + 4.0,
            escape(&names[row])
        );
        let mut from = 0.0;
        for (place, value) in bar.values.iter().enumerate().filter(|(_, value)| **value > 0.0) {
            let piece = chart.pieces.get(place).map_or("", String::as_str);
            let title = format!("{}\n{piece}: {} {}", bar.name, number(*value), chart.unit);
            let _ = writeln!(
                marks,
                "<rect class=\"bar\" style=\"{}\" x=\"{:.1}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{THICK}\">\
                 <title>{}</title></rect>",
                colour(place),
                left + from * pixels,
                (value * pixels).min(WIDTH),
                escape(&title)
            );
            from += value;
        }
        let mut end = from;
        if let Some(bound) = bar.bound.filter(|bound| bound.is_finite()) {
            let title = format!("{}\n{}: {} {}", bar.name, chart.bound, number(bound), chart.unit);
            let _ = writeln!(
                marks,
                "<path class=\"bound\" d=\"M{:.1} {:.1}v{:.1}\"><title>{}</title></path>",
                left + bound * pixels,
                y - 3.0,
                THICK + 6.0,
                escape(&title)
            );
            end = end.max(bound);
        }
        if let Some(Interval { low, high }) = bar.interval.filter(|interval| interval.high.is_finite()) {
            let [from, to] = [low, high].map(|value| left + value.max(0.0) * pixels);
            let middle = y + THICK / 2.0;
            let top = middle - 3.0;
            let _ = writeln!(
                marks,
                "<path class=\"whisker\" d=\"M{from:.1} {middle:.1}H{to:.1}M{from:.1} {top:.1}v6M{to:.1} {top:.1}v6\"/>"
            );
            end = end.max(high);
        }
        let _ = writeln!(
            marks,
            "<text x=\"{:.1}\" y=\"{:.1}\">{}</text></g>",
            left + end * pixels + 7.0,
            y + THICK / 2.0 + 4.0,
            number(from)
        );
    }
    let mut columns = vec![String::new()];
    columns.extend(chart.pieces.iter().cloned());
    let bounded = chart.bars.iter().any(|bar| bar.bound.is_some());
    if bounded {
        columns.push(chart.bound.clone());
    }
    if chart.bars.iter().any(|bar| bar.interval.is_some()) {
        columns.push("interval".to_owned());
    }
    let row = |bar: &super::Bar| {
        let mut cells = vec![bar.name.clone()];
        cells.extend(
            chart
                .pieces
                .iter()
                .enumerate()
                .map(|(n, _)| bar.values.get(n).map_or("-".into(), |v| number(*v))),
        );
        if bounded {
            cells.push(bar.bound.map_or_else(String::new, number));
        }
        let interval = |Interval { low, high }: Interval| format!("{} to {}", number(low), number(high));
        cells.extend(bar.interval.map(interval));
        cells
    };
    Plot {
        title: chart.title.clone(),
        legend: chart.pieces.clone(),
        width: WIDTH,
        height: bottom + BOTTOM,
        marks,
        about: format!("Bars of {} in {}", chart.bars.len(), chart.unit),
        figures: Table { columns, rows: chart.bars.iter().map(row).collect() },
        ..Plot::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::Bar;
    use super::*;

    #[test]
    fn pieces_follow_one_another_and_the_bound_is_a_line() {
        let bar =
            |values: &[f64], bound| Bar { name: "a".into(), values: values.to_vec(), bound, interval: None };
        let chart = BarChart {
            title: "t".into(),
            unit: "ms".into(),
            pieces: vec!["read".into(), "place".into()],
            bound: "at most".into(),
            bars: vec![bar(&[1.0, 3.0], Some(8.0)), bar(&[f64::NAN, -1.0], None)],
        };
        let plot = plot(&chart);
        let numbers = |key: &str| -> Vec<f64> {
            let found =
                plot.marks.split("<rect").skip(1).filter_map(|rest| rest.split(&format!(" {key}=\"")).nth(1));
            found.map(|rest| rest.split('"').next().unwrap().parse().unwrap()).collect()
        };
        let (x, width) = (numbers("x"), numbers("width"));
        assert_eq!(x.len(), 2, "what is no length is not drawn");
        assert!((x[0] + width[0] - x[1]).abs() < 0.2 && (width[1] / width[0] - 3.0).abs() < 0.1);
        assert_eq!(plot.marks.matches("class=\"bound\"").count(), 1);
        assert!(!plot.marks.contains("NaN"));
        assert_eq!(plot.figures.rows[0], ["a", "1", "3", "8"]);
    }

    #[test]
    fn an_interval_is_a_line_within_the_drawing() {
        let interval = Some(Interval { low: 1.0, high: 30.0 });
        let bars = vec![Bar { name: "a".into(), values: vec![2.0], interval, ..Bar::default() }];
        let plot = plot(&BarChart { pieces: vec!["s".into()], bars, ..BarChart::default() });
        let path = plot.marks.split("class=\"whisker\" d=\"M").nth(1).expect("an interval");
        let (_, high) = path.split_once('H').expect("a horizontal line");
        let high: f64 = high.split('M').next().expect("its end").parse().expect("a number");
        assert!(high <= WIDTH - RIGHT + 0.1, "{high}");
        assert_eq!(plot.figures.rows[0], ["a", "2", "1 to 30"]);
        assert_eq!(plot.figures.columns, ["", "s", "interval"]);
    }
}
