//! A page as one HTML file. Colours are CSS variables, so that charts turn dark with the page.

use std::fmt::Write as _;

use super::plot::{COLOURS, DRAWING};
use super::{Page, Part, Section, Table, Tile, Trend};

const STYLE: &str = include_str!("assets/page.css");
/// Light or dark, files of charts, what a point says, order of a table's rows. All there is to read is there without it.
const SCRIPT: &str = include_str!("assets/page.js");

/// Nothing may be fetched from anywhere; images are what the script draws.
const POLICY: &str =
    "default-src 'none';style-src 'unsafe-inline';script-src 'unsafe-inline';img-src blob: data:";

/// The whole file.
pub(super) fn page(page: &Page) -> String {
    let title = escape(&page.title);
    let mut out = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
         <link rel=\"icon\" href=\"data:,\">\n<title>{title}</title>\n\
         <style id=\"drawing-style\">\n{COLOURS}{DRAWING}</style>\n<style>\n{STYLE}</style>\n</head>\n<body>\n\
         <a class=\"skip\" href=\"#main\">To the report</a>\n<div class=\"top\"><div><nav aria-label=\"Sections\">"
    );
    for (place, section) in page.sections.iter().enumerate() {
        let _ = write!(out, "<a href=\"#s{place}\">{}</a>", escape(&section.heading));
    }
    let _ = write!(out, "</nav></div></div>\n<main id=\"main\">\n<h1>{title}</h1>\n");
    opening(page, &mut out);
    out.push_str("<div class=\"intro\">\n");
    paragraphs(&page.intro, &mut out);
    out.push_str("</div>\n");
    let mut taken = Vec::new();
    for (place, part) in page.sections.iter().enumerate() {
        section(part, place, &mut taken, &mut out);
    }
    let version = env!("CARGO_PKG_VERSION");
    let _ = write!(
        out,
        "<footer>Written by kvlane {version}. This file needs no network.</footer>\n</main>\n\
         <script>\n{SCRIPT}</script>\n</body>\n</html>\n"
    );
    out
}

/// Text that means itself inside and outside of attributes.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            other => out.push(other),
        }
    }
    out
}

/// What a file about `title` is called: its letters and digits in small, hyphens between words.
pub(super) fn file_name(title: &str) -> String {
    let plain: String = title
        .chars()
        .map(|letter| if letter.is_ascii_alphanumeric() { letter.to_ascii_lowercase() } else { ' ' })
        .collect();
    let name = plain.split_whitespace().collect::<Vec<_>>().join("-");
    if name.is_empty() { "plot".into() } else { name }
}

/// What was found, by which command, and of which trace.
fn opening(page: &Page, out: &mut String) {
    if let Some(verdict) = &page.verdict {
        out.extend(["<p class=\"verdict\">", &escape(verdict), "</p>\n"]);
    }
    let facts = [("Command", &page.command, "code"), ("Trace", &page.trace, "span")];
    let mut known = facts.iter().filter_map(|(name, fact, tag)| Some((name, fact.as_ref()?, tag))).peekable();
    if known.peek().is_none() {
        return;
    }
    out.push_str("<dl class=\"facts\">\n");
    for (name, fact, tag) in known {
        let _ = writeln!(out, "<dt>{name}</dt><dd><{tag}>{}</{tag}></dd>", escape(fact));
    }
    out.push_str("</dl>\n");
}

fn section(section: &Section, place: usize, taken: &mut Vec<String>, out: &mut String) {
    let _ = writeln!(
        out,
        "<section aria-labelledby=\"s{place}\">\n<h2 id=\"s{place}\">{}</h2>",
        escape(&section.heading)
    );
    // Neighbouring charts share a grid.
    let narrow = |part: &Part| matches!(part, Part::Chart(_) | Part::Bars(_));
    for parts in section.parts.chunk_by(|a, b| narrow(a) && narrow(b)) {
        if narrow(&parts[0]) {
            out.push_str("<div class=\"charts\">\n");
        }
        for part in parts {
            match part {
                Part::Text(text) => paragraphs(text, out),
                Part::Table(rows) => table(rows, out),
                Part::Tiles(row) => tiles(row, out),
                Part::Chart(_) | Part::Bars(_) | Part::Heat(_) => {
                    if let Some(plot) = part.plot() {
                        plot.figure(&plot.name(taken), out);
                    }
                }
            }
        }
        if narrow(&parts[0]) {
            out.push_str("</div>\n");
        }
    }
    out.push_str("</section>\n");
}

fn tiles(tiles: &[Tile], out: &mut String) {
    out.push_str("<dl class=\"tiles\">\n");
    for Tile { label, value, note, trend } in tiles {
        let class = match trend {
            Trend::None => "note",
            Trend::Better => "note better",
            Trend::Worse => "note worse",
        };
        let _ = writeln!(
            out,
            "<div class=\"tile\"><dt>{}</dt><dd class=\"value\">{}</dd><dd class=\"{class}\">{}</dd></div>",
            escape(label),
            escape(value),
            escape(note)
        );
    }
    out.push_str("</dl>\n");
}

fn paragraphs(text: &str, out: &mut String) {
    for paragraph in text.split("\n\n").map(str::trim).filter(|paragraph| !paragraph.is_empty()) {
        out.extend(["<p>", &escape(paragraph), "</p>\n"]);
    }
}

pub(super) fn table(table: &Table, out: &mut String) {
    out.push_str(
        "<div class=\"wide\" tabindex=\"0\" role=\"group\" aria-label=\"Table\"><table>\n<thead><tr>",
    );
    let wide = table.rows.iter().map(Vec::len).max().unwrap_or(0).max(table.columns.len());
    let padded = |cells: &[String]| {
        let empty = std::iter::repeat(String::new());
        cells.iter().cloned().chain(empty).take(wide).collect::<Vec<String>>()
    };
    for cell in padded(&table.columns) {
        out.extend(["<th scope=\"col\">", &escape(&cell), "</th>"]);
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for line in &table.rows {
        out.push_str("<tr>");
        // The first cell names the row.
        for (place, cell) in padded(line).iter().enumerate() {
            match place {
                0 => out.extend(["<th scope=\"row\">", &escape(cell), "</th>"]),
                _ => out.extend(["<td>", &escape(cell), "</td>"]),
            }
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</tbody>\n</table></div>\n");
}

#[cfg(test)]
mod tests {
    use super::super::{Axis, Chart, Mark, Series};
    use super::*;

    #[test]
    fn text_cannot_become_markup() {
        let evil = "<b a='1' c=\"2\">&".to_string();
        let series = Series { name: evil.clone(), points: vec![(1.0, 2.0)], band: vec![], mark: Mark::Dots };
        let axis = Axis::linear(evil.clone());
        let chart =
            Chart { title: evil.clone(), x: axis.clone(), y: axis, series: vec![series.clone(), series] };
        let table = Table { columns: vec![evil.clone()], rows: vec![vec![evil.clone()]] };
        let parts = vec![Part::Text(evil.clone()), Part::Table(table), Part::Chart(chart)];
        let sections = vec![Section { heading: evil.clone(), parts }];
        let [verdict, command, trace] = [(); 3].map(|()| Some(evil.clone()));
        let html = page(&Page { title: evil.clone(), verdict, command, trace, intro: evil, sections });
        assert!(!html.contains("<b "), "{html}");
        assert!(html.matches("&lt;b a=&#39;1&#39; c=&quot;2&quot;&gt;&amp;").count() >= 14);
    }

    #[test]
    fn a_page_opens_with_its_verdict_its_command_and_its_trace() {
        let [verdict, command, trace] =
            ["b is sooner.", "kvlane report", "t.jsonl"].map(|text| Some(text.into()));
        let html = page(&Page { verdict, command, trace, intro: "Then this.".into(), ..Page::default() });
        let at = |text: &str| html.find(text).unwrap_or_else(|| panic!("no {text}: {html}"));
        assert!(at("b is sooner.") < at("kvlane report</code>") && at("t.jsonl") < at("Then this."));
        assert!(!page(&Page::default()).contains("class=\"facts\""));
    }

    #[test]
    fn neighbouring_charts_share_a_grid_and_text_parts_them() {
        let chart = || Part::Chart(Chart::default());
        let parts = vec![chart(), chart(), Part::Text("one\n\ntwo".into()), chart()];
        let html = page(&Page { sections: vec![Section { heading: "h".into(), parts }], ..Page::default() });
        assert_eq!(html.matches("<div class=\"charts\">").count(), 2);
        assert_eq!(html.matches("<figure data-file=").count(), 3);
        assert!(html.contains("<p>one</p>\n<p>two</p>"));
    }
}
