//! A heat map as inline SVG: a row per name, a column per stretch of the axis, nine shades.
//!
//! Cells of one shade are one path, and neighbours in a row are one rectangle of it: a map of 64 rows and 96 columns
//! stays below 150 kB however it is filled. What a cell says under the pointer is in a list of its own.

use std::fmt::Write as _;

use super::html::escape;
use super::plot::Plot;
use super::{HeatMap, Table, number};

/// Drawn across the page.
const WIDTH: f64 = 1112.0;
const TOP: f64 = 6.0;
const RIGHT: f64 = 8.0;
/// Height of a row: few rows are tall.
const ROW: std::ops::RangeInclusive<f64> = 10.0..=26.0;
/// Rows together, about.
const ROWS: f64 = 420.0;
/// Below the rows: ticks and label of the axis, and the scale of shades.
const BOTTOM: f64 = 66.0;
/// Shades of the page.
const SHADES: usize = 9;
/// Longest name of a row that is drawn whole.
const NAME_MAX: usize = 28;
/// Ticks that are aimed at.
const TICKS: f64 = 10.0;
/// The shades end at what this share of the cells do not exceed, so that one of them does not bleach the others.
const CLIP: f64 = 0.995;

pub(super) fn plot(map: &HeatMap) -> Plot {
    let columns = map.rows.iter().map(|(_, values)| values.len()).max().unwrap_or(0);
    let tall = (ROWS / map.rows.len().max(1) as f64).clamp(*ROW.start(), *ROW.end());
    let names: Vec<String> = map.rows.iter().map(|(name, _)| short(name)).collect();
    let left = 6.7 * names.iter().map(|name| name.chars().count()).max().unwrap_or(0) as f64 + 10.0;
    let wide = (WIDTH - RIGHT - left) / columns.max(1) as f64;
    let mut all: Vec<f64> =
        map.rows.iter().flat_map(|(_, values)| values).copied().filter(|v| v.is_finite()).collect();
    all.sort_unstable_by(f64::total_cmp);
    let low = all.first().copied().unwrap_or(0.0).min(0.0);
    let largest = all.last().copied().unwrap_or(0.0);
    let high = map.most.or_else(|| high(&all)).filter(|high| *high > low);
    let high = high.unwrap_or(if largest > low { largest } else { low + 1.0 });
    let shade = |value: f64| {
        let share = ((value - low) / (high - low)).clamp(0.0, 1.0);
        value.is_finite().then(|| ((share * SHADES as f64) as usize).min(SHADES - 1))
    };

    let mut paths = vec![String::new(); SHADES];
    let mut marks = String::new();
    for (row, (_, values)) in map.rows.iter().enumerate() {
        let y = TOP + row as f64 * tall;
        let shades: Vec<Option<usize>> = values.iter().map(|&value| shade(value)).collect();
        let mut column = 0;
        for run in shades.chunk_by(|a, b| a == b) {
            if let Some(shade) = run[0] {
                let (x, width) = (left + column as f64 * wide, run.len() as f64 * wide + 0.3);
                let _ = write!(paths[shade], "M{x:.1} {y:.1}h{width:.1}v{:.1}h-{width:.1}z", tall - 1.0);
            }
            column += run.len();
        }
        let _ = writeln!(
            marks,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
            left - 6.0,
            y + tall / 2.0 + 3.5,
            escape(&names[row])
        );
    }
    for (shade, path) in paths.iter().enumerate().filter(|(_, path)| !path.is_empty()) {
        let _ = writeln!(marks, "<path style=\"fill:var(--h{shade})\" d=\"{path}\"/>");
    }
    let bottom = TOP + map.rows.len() as f64 * tall;
    axis(map, columns, left, wide, bottom, &mut marks);
    scale(map, (low, high, largest), bottom, &mut marks);
    Plot {
        title: map.title.clone(),
        width: WIDTH,
        height: bottom + BOTTOM,
        marks,
        about: format!(
            "Heat map of {} rows over {} {}, from {} to {} {}",
            map.rows.len(),
            number(columns as f64 * map.step),
            map.x,
            number(all.first().copied().unwrap_or(f64::NAN)),
            number(largest),
            map.unit
        ),
        figures: figures(map),
        cells: Some(cells(map, left, wide, tall)),
        broad: true,
        ..Plot::default()
    }
}

/// What all but a few of some sorted values stay below.
pub(super) fn high(sorted: &[f64]) -> Option<f64> {
    sorted.get(((sorted.len() as f64 * CLIP) as usize).min(sorted.len().checked_sub(1)?)).copied()
}

/// The end of a long name distinguishes it better than its beginning.
fn short(name: &str) -> String {
    let count = name.chars().count();
    if count <= NAME_MAX {
        return name.to_owned();
    }
    std::iter::once('…').chain(name.chars().skip(count - NAME_MAX + 1)).collect()
}

fn axis(map: &HeatMap, columns: usize, left: f64, wide: f64, bottom: f64, out: &mut String) {
    let span = columns as f64 * map.step;
    if span > 0.0 && span.is_finite() {
        let step = super::chart::round_step(span / TICKS);
        let first = (map.from / step - 1e-9).ceil();
        for tick in 0..=(TICKS as u32 + 2) {
            let value = (first + f64::from(tick)) * step;
            let x = left + (value - map.from) / map.step * wide;
            if value > map.from + span * (1.0 + 1e-9) {
                break;
            }
            let _ = writeln!(
                out,
                "<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
                bottom + 15.0,
                number(value)
            );
        }
    }
    let middle = left + columns as f64 * wide / 2.0;
    let _ = writeln!(
        out,
        "<text x=\"{middle:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
        bottom + 33.0,
        escape(&map.x)
    );
}

/// The shades and what they stand for.
fn scale(map: &HeatMap, (low, high, largest): (f64, f64, f64), bottom: f64, out: &mut String) {
    let (y, wide) = (bottom + 48.0, 30.0);
    let from = WIDTH - RIGHT - wide * SHADES as f64;
    for shade in 0..SHADES {
        let x = from + wide * shade as f64;
        let _ = write!(
            out,
            "<path style=\"fill:var(--h{shade})\" d=\"M{x:.1} {:.1}h{wide}v9h-{wide}z\"/>",
            y - 8.0
        );
    }
    let most = if largest > high { format!("{} and more", number(high)) } else { number(high) };
    let _ = writeln!(
        out,
        "<text x=\"{:.1}\" y=\"{y:.1}\" text-anchor=\"end\">{}: {}</text>\
         <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{most}</text>",
        from - 8.0,
        escape(&map.unit),
        number(low),
        WIDTH - RIGHT,
        y + 15.0
    );
}

/// Mean and extremes of each row.
fn figures(map: &HeatMap) -> Table {
    let row = |(name, values): &(String, Vec<f64>)| {
        let there = || values.iter().copied().filter(|value| value.is_finite());
        let count = there().count() as f64;
        let least = there().fold(f64::NAN, f64::min);
        vec![
            name.clone(),
            number(there().sum::<f64>() / count),
            number(least),
            number(there().fold(f64::NAN, f64::max)),
        ]
    };
    let columns = vec![map.unit.clone(), "mean".into(), "least".into(), "most".into()];
    Table { columns, rows: map.rows.iter().map(row).collect() }
}

fn cells(map: &HeatMap, left: f64, width: f64, height: f64) -> String {
    let rounded = |value: &f64| {
        let text = number(*value).replace(',', "");
        text.parse::<f64>().ok().map_or(serde_json::Value::Null, serde_json::Value::from)
    };
    let values: Vec<Vec<serde_json::Value>> =
        map.rows.iter().map(|(_, values)| values.iter().map(rounded).collect()).collect();
    let rows: Vec<&String> = map.rows.iter().map(|(name, _)| name).collect();
    serde_json::json!({
        "rows": rows, "x": map.x, "unit": map.unit, "from": map.from, "step": map.step, "values": values,
        "left": left, "top": TOP, "width": width, "height": height,
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(rows: Vec<(String, Vec<f64>)>) -> HeatMap {
        HeatMap {
            title: "t".into(),
            x: "Seconds".into(),
            from: 0.0,
            step: 2.0,
            unit: "Requests".into(),
            most: None,
            rows,
        }
    }

    #[test]
    fn one_hot_cell_does_not_bleach_the_others() {
        let mut values = vec![1.0; 600];
        values[300..].fill(4.0);
        values[7] = 1e6;
        let plot = plot(&map(vec![("a".into(), values)]));
        let used = |shade: usize| plot.marks.matches(&format!("var(--h{shade})")).count() > 1;
        assert!(used(SHADES - 1) && used(2), "{}", plot.marks);
        assert!(plot.marks.contains("4 and more"));
    }

    #[test]
    fn maps_with_the_same_end_have_the_same_shades() {
        let most = Some(8.0);
        let low = plot(&HeatMap { most, ..map(vec![("a".into(), vec![1.0, 2.0])]) });
        let high = plot(&HeatMap { most, ..map(vec![("a".into(), vec![1.0, 9.0])]) });
        let first = |plot: &Plot| plot.marks.split("fill:").nth(1).map(|rest| rest[..8].to_owned());
        assert_eq!(first(&low), first(&high));
        assert!(high.marks.contains("8 and more") && !low.marks.contains("and more"));
    }

    #[test]
    fn what_is_unknown_is_left_out() {
        let plot = plot(&map(vec![("a".into(), vec![1.0, f64::NAN, 1.0]), ("b".into(), vec![])]));
        assert!(plot.cells.unwrap().contains("[1.0,null,1.0]"));
        assert_eq!(plot.figures.rows[0], ["a", "1", "1", "1"]);
        assert!(!plot.marks.contains("NaN"));
    }

    #[test]
    fn a_full_map_has_a_bounded_size() {
        let noise = |row: usize, column: usize| ((row * 7919 + column * 104_729) % 1000) as f64 / 7.0;
        let rows = (0..64)
            .map(|row| (format!("http://10.0.0.{row}:8000"), (0..96).map(|c| noise(row, c)).collect()));
        let plot = plot(&map(rows.collect()));
        assert!(plot.marks.len() + plot.cells.unwrap().len() < 250_000);
    }
}
