//! Output of every drawing: title, legend, marks, and the same as text and figures for accessibility. It becomes a
//! figure of the page or a separate file.

use std::fmt::Write as _;

use super::html::{escape, table};
use super::{Table, html};

/// Colours that follow the reader's choice of light or dark, and what lines and marks look like.
pub(super) const COLOURS: &str = include_str!("assets/colours.css");
pub(super) const DRAWING: &str = include_str!("assets/drawing.css");

/// Colours of series; further ones begin again.
const COUNT: usize = 8;

/// A drawing.
#[derive(Debug, Default)]
pub(super) struct Plot {
    pub(super) title: String,
    /// Names in the order of their colours; a single one is not shown.
    pub(super) legend: Vec<String>,
    /// Its size in pixels of the drawing, which the page scales to its column.
    pub(super) width: f64,
    pub(super) height: f64,
    /// SVG elements.
    pub(super) marks: String,
    /// Its contents, in a sentence.
    pub(super) about: String,
    /// Its figures.
    pub(super) figures: Table,
    /// The cells of a heat map as JSON, for the pointer.
    pub(super) cells: Option<String>,
    /// Whether it takes the page's whole width.
    pub(super) broad: bool,
}

/// The style that gives a group the colour of a series.
pub(super) fn colour(place: usize) -> String {
    format!("--c:var(--s{})", place % COUNT)
}

// === impl Plot ===

impl Plot {
    /// A figure of the page. `name` is what a file of it is called, without ending.
    pub(super) fn figure(&self, name: &str, out: &mut String) {
        let title = escape(&self.title);
        let class = if self.broad { " class=\"broad\"" } else { "" };
        let _ = writeln!(out, "<figure{class} data-file=\"{name}\">\n<figcaption>{title}</figcaption>");
        if self.legend.len() > 1 {
            out.push_str("<ul class=\"legend\">");
            for (place, name) in self.legend.iter().enumerate() {
                let _ = write!(out, "<li style=\"{}\">{}</li>", colour(place), escape(name));
            }
            out.push_str("</ul>\n");
        }
        let _ = writeln!(
            out,
            "<div class=\"drawing\"><svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{title}. {}\">",
            self.width,
            self.height,
            escape(&self.about)
        );
        out.push_str(&self.marks);
        out.push_str("</svg></div>\n");
        if let Some(cells) = &self.cells {
            // Names may contain any text: none of it can end the element.
            let safe = cells.replace('<', "\\u003c");
            let _ = writeln!(out, "<script type=\"application/json\">{safe}</script>");
        }
        if !self.figures.rows.is_empty() {
            out.push_str("<details><summary>Figures</summary>");
            table(&self.figures, out);
            out.push_str("</details>\n");
        }
        out.push_str("</figure>\n");
    }

    /// A file of its own: title and legend above the drawing, the styles inside.
    pub(super) fn file(&self) -> String {
        let title = escape(&self.title);
        let rows = if self.legend.len() > 1 { self.legend.len() } else { 0 };
        let above = 30.0 + 16.0 * rows as f64;
        let (width, height) = (self.width + 24.0, self.height + above + 16.0);
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" \
             height=\"{height}\" role=\"img\" aria-label=\"{title}. {}\">\n<style>{COLOURS}{DRAWING}</style>\n\
             <rect width=\"100%\" height=\"100%\" style=\"fill:var(--card)\"/>\n\
             <text x=\"12\" y=\"22\" class=\"head\">{title}</text>\n",
            escape(&self.about)
        );
        for (place, name) in self.legend.iter().take(rows).enumerate() {
            let _ = writeln!(
                out,
                "<g style=\"{}\" transform=\"translate(12 {})\"><rect class=\"dot\" y=\"6\" width=\"14\" height=\"4\"/>\
                 <text x=\"20\" y=\"12\">{}</text></g>",
                colour(place),
                30 + 16 * place,
                escape(name)
            );
        }
        let _ = write!(out, "<g transform=\"translate(12 {above})\">\n{}</g>\n</svg>\n", self.marks);
        out
    }

    /// What a file of it is called, without ending, where those in `taken` are taken.
    pub(super) fn name(&self, taken: &mut Vec<String>) -> String {
        let plain = html::file_name(&self.title);
        let numbered = (2..).map(|n| format!("{plain}-{n}"));
        let free = std::iter::once(plain.clone()).chain(numbered).find(|name| !taken.contains(name));
        let name = free.unwrap_or(plain);
        taken.push(name.clone());
        name
    }
}
