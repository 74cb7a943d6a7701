//! A page as one HTML file. Colours are CSS variables, so that charts turn dark with the page.

use super::chart;
use super::{Chart, Page, Part, Section, Table};

/// Light colours first, dark ones where the reader asks for them. The series' colours keep apart for people who see
/// red and green as one: they differ in lightness, too.
const STYLE: &str = "\
:root{color-scheme:light dark;--page:#fff;--text:#1c2430;--quiet:#5d6878;--rule:#d9dee5;--grid:#e8ebef;--stripe:#f6f8fa;\
--s0:#2563ab;--s1:#d97706;--s2:#15803d;--s3:#b4234a;--s4:#7c4dbd;--s5:#0e8c9b;--s6:#8a6a3a;--s7:#525c69}
@media(prefers-color-scheme:dark){:root{--page:#12161c;--text:#dfe5ec;--quiet:#98a4b3;--rule:#323b47;--grid:#262d37;\
--stripe:#181d25;--s0:#6ea8e6;--s1:#f2a541;--s2:#5cbf7e;--s3:#ee7a96;--s4:#b79be8;--s5:#4fc4d0;--s6:#c9a876;--s7:#a9b3bf}}
body{margin:0;background:var(--page);color:var(--text);font:15px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:36px 24px 48px}
h1{font-size:26px;line-height:1.25;margin:0 0 8px;font-weight:650;letter-spacing:-.01em}
h2{font-size:18px;margin:40px 0 12px;padding-bottom:6px;border-bottom:1px solid var(--rule);font-weight:600}
p{margin:0 0 10px;max-width:80ch}.intro p{color:var(--quiet)}
.wide{overflow-x:auto;margin:0 0 18px}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}
th,td{padding:5px 14px;text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left;padding-left:8px}
th{font-weight:600;border-bottom:1.5px solid var(--rule);color:var(--quiet);vertical-align:bottom}
tbody tr:nth-child(even){background:var(--stripe)}tbody tr:last-child td{border-bottom:1px solid var(--rule)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,500px),1fr));gap:24px 32px;margin:4px 0 18px}
figure{margin:0;min-width:0}figcaption{font-weight:600;font-size:14px}
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;margin:2px 0 0;padding:0;list-style:none;font-size:12.5px;color:var(--quiet)}
.legend li::before{content:'';display:inline-block;width:14px;height:3px;border-radius:2px;background:var(--c);\
margin-right:6px;vertical-align:middle}
svg{display:block;width:100%;height:auto;margin-top:4px;overflow:visible}
svg text{fill:var(--quiet);font-size:11.5px;font-variant-numeric:tabular-nums}
.grid{stroke:var(--grid);stroke-width:1}.axis{stroke:var(--quiet);stroke-width:1}
.line{fill:none;stroke:var(--c);stroke-width:1.8;stroke-linejoin:round}.band{fill:var(--c);opacity:.16}
.whisker{stroke:var(--c);stroke-width:1.3}.bar{fill:var(--c);opacity:.85}.bar+.whisker{stroke:var(--text)}
.dot{fill:var(--c)}.hover{fill:transparent}.hover:hover{fill:var(--c);opacity:.5}
footer{margin-top:48px;color:var(--quiet);font-size:12.5px}
@media print{main{padding:0}figure,table{break-inside:avoid}}
";

/// A chart as an SVG file.
pub(super) fn svg(chart: &Chart) -> String {
    chart::file(chart, STYLE)
}

/// The whole file.
pub(super) fn page(page: &Page) -> String {
    let mut out = String::from("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    out.push_str("<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n");
    out.extend([
        "<title>",
        &escape(&page.title),
        "</title>\n<style>\n",
        STYLE,
        "</style>\n</head>\n<body><main>\n",
    ]);
    out.extend(["<h1>", &escape(&page.title), "</h1>\n<div class=\"intro\">\n"]);
    paragraphs(&page.intro, &mut out);
    out.push_str("</div>\n");
    for part in &page.sections {
        section(part, &mut out);
    }
    let version = env!("CARGO_PKG_VERSION");
    out.extend(["<footer>Written by kvlane ", version, ".</footer>\n</main></body>\n</html>\n"]);
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

fn section(section: &Section, out: &mut String) {
    out.extend(["<section>\n<h2>", &escape(&section.heading), "</h2>\n"]);
    // Neighbouring charts share a grid.
    let is_chart = |part: &Part| matches!(part, Part::Chart(_));
    for parts in section.parts.chunk_by(|a, b| is_chart(a) && is_chart(b)) {
        if is_chart(&parts[0]) {
            out.push_str("<div class=\"charts\">\n");
        }
        for part in parts {
            match part {
                Part::Text(text) => paragraphs(text, out),
                Part::Table(rows) => table(rows, out),
                Part::Chart(series) => chart::figure(series, out),
            }
        }
        if is_chart(&parts[0]) {
            out.push_str("</div>\n");
        }
    }
    out.push_str("</section>\n");
}

fn paragraphs(text: &str, out: &mut String) {
    for paragraph in text.split("\n\n").map(str::trim).filter(|paragraph| !paragraph.is_empty()) {
        out.extend(["<p>", &escape(paragraph), "</p>\n"]);
    }
}

fn table(table: &Table, out: &mut String) {
    out.push_str("<div class=\"wide\"><table>\n<thead>");
    let wide = table.rows.iter().map(Vec::len).max().unwrap_or(0).max(table.columns.len());
    cells(&table.columns, wide, "th", out);
    out.push_str("</thead>\n<tbody>\n");
    for line in &table.rows {
        cells(line, wide, "td", out);
    }
    out.push_str("</tbody>\n</table></div>\n");
}

/// A row; one that is too short ends in empty cells.
fn cells(cells: &[String], wide: usize, tag: &str, out: &mut String) {
    out.push_str("<tr>");
    for cell in cells.iter().map(String::as_str).chain(std::iter::repeat("")).take(wide) {
        out.extend(["<", tag, ">", &escape(cell), "</", tag, ">"]);
    }
    out.push_str("</tr>\n");
}

#[cfg(test)]
mod tests {
    use super::super::{Axis, Chart, Mark, Series};
    use super::*;

    #[test]
    fn text_cannot_become_markup() {
        let evil = "<b a='1' c=\"2\">&".to_string();
        let series = Series { name: evil.clone(), points: vec![(1.0, 2.0)], band: vec![], mark: Mark::Dots };
        let axis = Axis { label: evil.clone(), log: false };
        let chart =
            Chart { title: evil.clone(), x: axis.clone(), y: axis, series: vec![series.clone(), series] };
        let table = Table { columns: vec![evil.clone()], rows: vec![vec![evil.clone()]] };
        let parts = vec![Part::Text(evil.clone()), Part::Table(table), Part::Chart(chart)];
        let sections = vec![Section { heading: evil.clone(), parts }];
        let html = page(&Page { title: evil.clone(), intro: evil, sections });
        assert!(!html.contains("<b "), "{html}");
        assert!(html.matches("&lt;b a=&#39;1&#39; c=&quot;2&quot;&gt;&amp;").count() >= 11);
    }

    #[test]
    fn neighbouring_charts_share_a_grid_and_text_parts_them() {
        let chart = || Part::Chart(Chart::default());
        let parts = vec![chart(), chart(), Part::Text("one\n\ntwo".into()), chart()];
        let html = page(&Page { sections: vec![Section { heading: "h".into(), parts }], ..Page::default() });
        assert_eq!(html.matches("<div class=\"charts\">").count(), 2);
        assert_eq!(html.matches("<figure>").count(), 3);
        assert!(html.contains("<p>one</p>\n<p>two</p>"));
    }
}
