//! Results of a command for people: tables and charts, as an HTML page or as text.
//!
//! A [`Page`] becomes one self-contained HTML file with styles, charts (SVG) and a small script; it follows the
//! reader's light or dark mode, and everything is readable without the script. The same [`Table`] is aligned text in
//! a terminal. The same page gives the same bytes, so reports can be compared.

mod bars;
mod chart;
mod heat;
mod html;
mod plot;
mod runs;

pub use runs::{Loads, Point, Report, Run, workload};

use crate::statistics::ci::Interval;

/// A report.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Page {
    /// Its title.
    pub title: String,
    /// What was found, in a sentence with its interval; if there is something to compare.
    pub verdict: Option<String>,
    /// The command that made it, if one did.
    pub command: Option<String>,
    /// What was sent, if anything was.
    pub trace: Option<String>,
    /// Description of the measurement. Blank lines separate paragraphs.
    pub intro: String,
    /// The parts under their headings.
    pub sections: Vec<Section>,
}

/// A heading and what is under it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Section {
    /// The heading.
    pub heading: String,
    /// Text, tables and charts in order. Charts that follow one another stand side by side where there is room.
    pub parts: Vec<Part>,
}

/// A piece of a section.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Plain text. Blank lines part paragraphs.
    Text(String),
    /// A table.
    Table(Table),
    /// A chart.
    Chart(Chart),
    /// Bars, one below the other.
    Bars(BarChart),
    /// A heat map, as broad as the page.
    Heat(HeatMap),
    /// Key figures side by side.
    Tiles(Vec<Tile>),
}

/// A key figure.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tile {
    /// What it is.
    pub label: String,
    /// The figure with its unit.
    pub value: String,
    /// What to read it against.
    pub note: String,
    /// Whether the note reports an improvement or a regression.
    pub trend: Trend,
}

/// Whether a figure improved. It is also given as text, for readers that do not see the colour.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trend {
    /// Neither, or nothing to compare with.
    #[default]
    None,
    /// Better.
    Better,
    /// Worse.
    Worse,
}

/// Horizontal bars, each of one piece or of several.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BarChart {
    /// What it shows.
    pub title: String,
    /// Quantity and unit of the axis.
    pub unit: String,
    /// What the pieces are, in the order of the legend.
    pub pieces: Vec<String>,
    /// What [`Bar::bound`] is.
    pub bound: String,
    /// The bars from above.
    pub bars: Vec<Bar>,
}

/// One bar.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Bar {
    /// What it stands for.
    pub name: String,
    /// The lengths of its pieces.
    pub values: Vec<f64>,
    /// What its whole length may be: its confidence interval.
    pub interval: Option<Interval>,
    /// What it could at most be, drawn as a line across.
    pub bound: Option<f64>,
}

/// A shade for every name and every stretch of an axis.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeatMap {
    /// What it shows.
    pub title: String,
    /// Quantity and unit of the horizontal axis.
    pub x: String,
    /// Where its first stretch begins.
    pub from: f64,
    /// How long a stretch is.
    pub step: f64,
    /// Quantity and unit of the shades.
    pub unit: String,
    /// What the darkest shade stands for, such as the same for maps that are to be compared; if `None`, a value that all
    /// but a few cells stay below.
    pub most: Option<f64>,
    /// Name and values of each row. What is no finite number is left blank.
    pub rows: Vec<(String, Vec<f64>)>,
}

/// Rows of cells. The first column names the row and is aligned left, the others right.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// The head of each column.
    pub columns: Vec<String>,
    /// The cells; a row may be shorter than the head.
    pub rows: Vec<Vec<String>>,
}

/// Series over a common pair of axes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Chart {
    /// What it shows.
    pub title: String,
    /// The horizontal axis.
    pub x: Axis,
    /// The vertical axis.
    pub y: Axis,
    /// What is drawn, in the order of the legend.
    pub series: Vec<Series>,
}

/// An axis; its range follows from the points.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Axis {
    /// Quantity and unit, as in `TTFT (s)`.
    pub label: String,
    /// Logarithmic, which the drawing says. Points at or below zero are then left out.
    pub log: bool,
    /// Where a horizontal axis has its ticks, such as at the loads that were run; at round numbers if empty.
    pub ticks: Vec<f64>,
}

/// One thing over another.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// `(x, y)`, by x. A point that is no finite number leaves a gap.
    pub points: Vec<(f64, f64)>,
    /// The lower and upper end of what each point may be (its confidence interval); empty if unknown.
    pub band: Vec<(f64, f64)>,
    /// How it is drawn.
    pub mark: Mark,
}

/// How a series is drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mark {
    /// A line from point to point, with dots on it where there are few.
    #[default]
    Line,
    /// Dots alone.
    Dots,
    /// Bars from the bottom; those of several series at the same x stand side by side.
    Bars,
    /// A line that keeps a point's height until the next point, as a distribution function does.
    Steps,
}

// === impl Page ===

impl Page {
    /// The page as one HTML file.
    pub fn to_html(&self) -> String {
        html::page(self)
    }

    /// Its charts as SVG files: a name from the chart's title with `.svg` behind it, no two alike, and the text.
    pub fn plots(&self) -> Vec<(String, String)> {
        let mut taken = Vec::new();
        let plots = self.sections.iter().flat_map(|section| &section.parts).filter_map(Part::plot);
        plots.map(|plot| (format!("{}.svg", plot.name(&mut taken)), plot.file())).collect()
    }
}

// === impl Part ===

impl Part {
    /// What is drawn of it, if anything.
    fn plot(&self) -> Option<plot::Plot> {
        match self {
            Self::Chart(chart) => Some(chart::plot(chart)),
            Self::Bars(bars) => Some(bars::plot(bars)),
            Self::Heat(map) => Some(heat::plot(map)),
            Self::Text(_) | Self::Table(_) | Self::Tiles(_) => None,
        }
    }
}

// === impl Axis ===

impl Axis {
    /// A linear axis.
    pub fn linear(label: impl Into<String>) -> Self {
        Self { label: label.into(), ..Self::default() }
    }

    /// A logarithmic one.
    pub fn log(label: impl Into<String>) -> Self {
        Self { log: true, ..Self::linear(label) }
    }
}

// === impl Chart ===

impl Chart {
    /// The chart as one SVG file.
    pub fn to_svg(&self) -> String {
        chart::plot(self).file()
    }
}

// === impl Table ===

impl Table {
    /// The table as text: columns aligned, two spaces apart, a line of the head and one per row.
    pub fn to_text(&self) -> String {
        let width = |text: &String| text.chars().count();
        let lines = || std::iter::once(&self.columns).chain(&self.rows);
        let columns = lines().map(Vec::len).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns)
            .map(|column| lines().filter_map(|line| line.get(column)).map(width).max().unwrap_or(0))
            .collect();
        let mut out = String::new();
        for line in lines() {
            let mut text = String::new();
            for (column, (cell, &wide)) in line.iter().zip(&widths).enumerate() {
                let pad = " ".repeat(wide - width(cell));
                match column {
                    0 => text.extend([cell.as_str(), &pad]),
                    _ => text.extend(["  ", &pad, cell]),
                }
            }
            out.push_str(text.trim_end());
            out.push('\n');
        }
        out
    }
}

/// A figure as a cell of a table: three significant digits, all digits of a number from 100 on, commas between
/// thousands. `-` for what is no number.
pub fn number(value: f64) -> String {
    if !value.is_finite() {
        return "-".into();
    }
    if value == 0.0 {
        return "0".into();
    }
    let magnitude = value.abs().log10().floor() as i32;
    let decimals = if value.fract() == 0.0 { 0 } else { (2 - magnitude).clamp(0, 9) as usize };
    let text = format!("{value:.decimals$}");
    let (whole, rest) = text.split_once('.').map_or((text.as_str(), ""), |(whole, rest)| (whole, rest));
    let (sign, digits) = whole.strip_prefix('-').map_or(("", whole), |digits| ("-", digits));
    let mut out = String::from(sign);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    if !rest.is_empty() {
        out.extend([".", rest]);
    }
    out
}

/// A value that was set, such as a load, with its digits as they were written, up to four decimals.
pub(crate) fn setting(value: f64) -> String {
    let rounded = (value * 1e4).round() / 1e4;
    if value.fract() == 0.0 || rounded == 0.0 { number(value) } else { rounded.to_string() }
}

/// A share between 0 and 1 as a cell of a table, in percent. `-` for what is no number.
pub fn percent(share: f64) -> String {
    if share.is_finite() { format!("{:.1} %", share * 100.0) } else { "-".into() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn table(columns: &[&str], rows: &[&[&str]]) -> Table {
        let texts = |cells: &[&str]| cells.iter().map(ToString::to_string).collect::<Vec<_>>();
        Table { columns: texts(columns), rows: rows.iter().map(|row| texts(row)).collect() }
    }

    #[test]
    fn text_names_its_rows_on_the_left_and_aligns_figures_on_the_right() {
        let table = table(&["policy", "TTFT"], &[&["lmetric", "1.25 s"], &["größe", "13.5 s"], &["short"]]);
        assert_eq!(table.to_text(), "policy     TTFT\nlmetric  1.25 s\ngröße    13.5 s\nshort\n");
        assert_eq!(Table::default().to_text(), "\n");
    }

    #[test]
    fn figures_keep_three_digits_and_their_thousands_apart() {
        let expect = [
            (0.0, "0"),
            (1234567.0, "1,234,567"),
            (1234.56, "1,235"),
            (-1234.5, "-1,234"),
            (123.4, "123"),
            (12.34, "12.3"),
            (1.0, "1"),
            (0.012345, "0.0123"),
            (f64::NAN, "-"),
        ];
        for (value, text) in expect {
            assert_eq!(number(value), text);
        }
        assert_eq!(
            [setting(0.3), setting(52.16), setting(1000.0), setting(0.1 + 0.2)],
            ["0.3", "52.16", "1,000", "0.3"]
        );
        assert_eq!((percent(0.3659), percent(f64::NAN)), ("36.6 %".into(), "-".into()));
    }

    proptest! {
        #[test]
        fn any_chart_has_only_finite_coordinates(
            points in prop::collection::vec((prop::num::f64::ANY, prop::num::f64::ANY), 0..40),
            mark in prop::sample::select(vec![Mark::Line, Mark::Dots, Mark::Bars, Mark::Steps]),
            (x_log, y_log, banded) in any::<(bool, bool, bool)>(),
        ) {
            let band = if banded { points.iter().map(|&(x, y)| (y.min(x), y.max(x))).collect() } else { vec![] };
            let axis = |log| Axis { log, ..Axis::linear("x") };
            let series = vec![Series { name: "a".into(), points, band, mark }; 2];
            let chart = Chart { title: "t".into(), x: axis(x_log), y: axis(y_log), series };
            let file = chart.to_svg();
            prop_assert!(file.starts_with("<svg xmlns") && file.ends_with("</svg>\n"));
            let part = Part::Chart(chart);
            let page = Page { sections: vec![Section { heading: "h".into(), parts: vec![part] }], ..Page::default() };
            let html = page.to_html();
            let svg = &html[html.find("<svg").unwrap()..html.find("</svg>").unwrap()];
            let drawn: String = svg.split("<title>").map(|s| s.split_once("</title>").map_or(s, |(_, s)| s)).collect();
            prop_assert!(!drawn.contains("NaN") && !drawn.contains("inf"), "{drawn}");
        }
    }
}
