//! A map of the cells: E2E latency of each policy relative to the best one there, as colours and numbers.

use std::fmt::Write as _;

use kvlane_lab::matrix::policies::{CellResult, E2E, Judged};

use crate::text::label;

/// A field of the map, and the room for names at its edges.
const WIDE: usize = 42;
const HIGH: usize = 15;
const LEFT: usize = 190;
const TOP: usize = 100;
/// The ratio that is drawn darkest.
const DARKEST: f64 = 3.0;

/// Cells with reports of this age as rows, policies as columns: ours first, then from the best on the geometric mean.
pub(super) fn svg(judged: &Judged, age_s: f64) -> String {
    let mut arms = judged.others.clone();
    let rank = |arm: &String| judged.relative(arm, E2E).unwrap_or(f64::INFINITY);
    arms.sort_by(|a, b| rank(a).total_cmp(&rank(b)));
    arms.insert(0, judged.ours.clone());
    let cells: Vec<&CellResult> = judged.cells.iter().filter(|cell| cell.cell.age_s == age_s).collect();
    let (width, height) = (LEFT + WIDE * arms.len() + 70, TOP + HIGH * cells.len() + 8);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\" \
         aria-label=\"Mean time to the end over the best policy's\" font-family=\"system-ui,sans-serif\" font-size=\"10\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
    );
    for (column, arm) in arms.iter().enumerate() {
        let (x, y) = (LEFT + WIDE * column + WIDE / 2, TOP - 6);
        let weight = if column == 0 { " font-weight=\"bold\"" } else { "" };
        _ = writeln!(out, "<text transform=\"translate({x} {y}) rotate(-50)\"{weight}>{arm}</text>");
    }
    for (row, cell) in cells.iter().enumerate() {
        let y = TOP + HIGH * row;
        let name = label(&cell.cell);
        let name = name.rsplit_once(' ').map_or(name.as_str(), |(name, _)| name);
        _ = writeln!(out, "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{name}</text>", LEFT - 6, y + 11);
        let value = |arm: &String| cell.arms.get(arm).and_then(|arm| arm.mean.get(E2E)).copied();
        let best = arms.iter().filter_map(value).fold(f64::INFINITY, f64::min);
        for (column, ratio) in arms.iter().map(|arm| value(arm).map(|value| value / best)).enumerate() {
            let Some(ratio) = ratio else { continue };
            // From white at the best to a dark red.
            let shade = (ratio.ln() / DARKEST.ln()).clamp(0.0, 1.0);
            let part = |light: f64, dark: f64| (light + (dark - light) * shade).round() as u8;
            let colour = (part(255.0, 150.0), part(255.0, 20.0), part(255.0, 30.0));
            let ink = if shade > 0.6 { "#fff" } else { "#222" };
            let weight = if ratio == 1.0 { " font-weight=\"bold\"" } else { "" };
            let (x, (red, green, blue)) = (LEFT + WIDE * column, colour);
            _ = writeln!(
                out,
                "<rect x=\"{x}\" y=\"{y}\" width=\"{WIDE}\" height=\"{HIGH}\" fill=\"#{red:02x}{green:02x}{blue:02x}\"/>\
                 <text x=\"{}\" y=\"{}\" text-anchor=\"middle\" fill=\"{ink}\"{weight}>{ratio:.2}</text>",
                x + WIDE / 2,
                y + 11
            );
        }
    }
    out.push_str("</svg>\n");
    out
}
