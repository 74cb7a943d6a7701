//! The figures of a trace for people: tables for a terminal, a page with charts.

use super::{LruPoint, TraceStats};
use crate::report::{Axis, Chart, Mark, Page, Part, Section, Series, Table, number, percent};
use crate::statistics::spread::Spread;

// === impl TraceStats ===

impl TraceStats {
    /// The figures as text for a terminal.
    pub fn to_text(&self) -> String {
        let mut out = String::new();
        for (heading, table) in self.tables() {
            out.extend([heading, "\n\n", &table.to_text(), "\n"]);
        }
        for note in &self.notes {
            out.extend(["note: ", note, "\n"]);
        }
        out
    }

    /// The figures as a page. `name` says which trace it is.
    pub fn to_page(&self, name: &str) -> Page {
        let mut sections = Vec::new();
        for (heading, table) in self.tables() {
            let mut parts = vec![Part::Table(table)];
            parts.extend(self.charts(heading).into_iter().map(Part::Chart));
            sections.push(Section { heading: heading.to_owned(), parts });
        }
        let mut intro = format!(
            "{} requests over {} s. Blocks have {} tokens; hits are full leading blocks, and the last token of a prompt \
             is always computed.",
            number(self.requests as f64),
            number(self.span_s),
            self.block_tokens
        );
        for note in &self.notes {
            intro.extend(["\n\n", note]);
        }
        Page {
            title: format!("Trace {name}"),
            trace: Some(name.to_owned()),
            intro,
            sections,
            ..Page::default()
        }
    }

    fn tables(&self) -> Vec<(&'static str, Table)> {
        let mut tables = vec![
            ("Arrivals", self.arrivals()),
            ("Lengths", self.lengths_table()),
            ("Prefix cache", self.cache_table()),
        ];
        if !self.cache.lru.is_empty() && self.cache.hit_blocks > 0 {
            tables.push(("Cache size", self.lru_table()));
        }
        tables.push(("Sessions", self.sessions_table()));
        tables
    }

    fn arrivals(&self) -> Table {
        let rate = &self.rate;
        let over_span =
            |tokens: u64| number(if self.span_s > 0.0 { tokens as f64 / self.span_s } else { 0.0 });
        let rows = [
            ("requests", number(self.requests as f64)),
            ("span (s)", number(self.span_s)),
            ("mean rate (requests/s)", number(rate.mean)),
            ("rate seen by a request (requests/s)", number(rate.met)),
            ("peak over 10 s (requests/s)", number(rate.peak_10_s)),
            ("peak over 60 s (requests/s)", number(rate.peak_60_s)),
            (
                "coefficient of variation (CV) of inter-arrival times",
                rate.interarrival_cv.map_or("-".into(), number),
            ),
            ("input (tokens/s)", over_span(self.input_tokens)),
            ("output (tokens/s)", over_span(self.output_tokens)),
        ];
        facts(rows)
    }

    fn lengths_table(&self) -> Table {
        let lengths = &self.lengths;
        let mut table = spreads([
            ("input", &lengths.input),
            ("uncached input (infinite cache)", &lengths.uncached),
            ("output", &lengths.output),
        ]);
        if let Some(ratio) = self.input_per_output {
            table.rows.push(vec!["input / output tokens".into(), number(ratio)]);
        }
        table
    }

    fn cache_table(&self) -> Table {
        let cache = &self.cache;
        let intra = |share: f64| format!("{} / {}", percent(share), percent(1.0 - share));
        let reuse = cache.reuse_s.as_ref();
        let reuse =
            |percentile: fn(&Spread) -> f64| reuse.map_or("-".into(), |spread| number(percentile(spread)));
        facts([
            ("token hit rate (infinite cache)", percent(cache.hit_token_share)),
            ("block hit rate (infinite cache)", percent(cache.hit_block_share)),
            (
                "hits from the same session / other sessions",
                cache.intra_session_share.map_or("-".into(), intra),
            ),
            ("distinct blocks", number(cache.distinct_blocks as f64)),
            ("tokens of these blocks", number((cache.distinct_blocks * u64::from(self.block_tokens)) as f64)),
            ("used by one request only", percent(cache.used_once_share)),
            ("seconds to the next use, p50", reuse(|spread| spread.p50)),
            ("p90", reuse(|spread| spread.p90)),
            ("p99", reuse(|spread| spread.p99)),
        ])
    }

    /// The capacities 1, 2 and 5 times a power of ten, and the last.
    fn lru_table(&self) -> Table {
        let columns = ["capacity (tokens)", "token hit rate", "of the infinite cache's"].map(String::from);
        let round = |tokens: u64| {
            let digits = tokens.to_string();
            matches!(digits.trim_end_matches('0'), "1" | "2" | "5")
        };
        let all = self.cache.lru.last();
        let points =
            self.cache.lru.iter().filter(|point| round(point.capacity_tokens) || Some(*point) == all);
        let row = |point: &LruPoint| {
            vec![
                number(point.capacity_tokens as f64),
                percent(point.hit_token_share),
                percent(point.hit_token_share / self.cache.hit_token_share),
            ]
        };
        Table { columns: columns.into(), rows: points.map(row).collect() }
    }

    fn sessions_table(&self) -> Table {
        let sessions = &self.sessions;
        let mut table = spreads([
            ("requests of a session", &sessions.turns),
            ("seconds between turns (arrivals)", &sessions.gap_s),
            ("growth per turn (tokens)", &sessions.growth_tokens),
            ("working set of a session (tokens)", &sessions.working_set_tokens),
        ]);
        table.rows.push(vec!["sessions".into(), number(sessions.count as f64)]);
        table.rows.push(vec!["requests after the first turn".into(), percent(sessions.later_turn_share)]);
        table
    }

    fn charts(&self, heading: &str) -> Vec<Chart> {
        let axis = |label: &str, log| Axis { log, ..Axis::linear(label) };
        let series = |name: &str, points, mark| Series { name: name.into(), points, band: Vec::new(), mark };
        let distribution = |title: &str, x: &str, spreads: &[(&str, &Option<Spread>)]| {
            let drawn = spreads.iter().filter_map(|(name, spread)| Some((name, spread.as_ref()?)));
            let series: Vec<Series> =
                drawn.map(|(name, spread)| series(name, spread.points(), Mark::Steps)).collect();
            let y = axis("cumulative share", false);
            (!series.is_empty()).then(|| Chart { title: title.into(), x: axis(x, true), y, series })
        };
        match heading {
            "Arrivals" => {
                let rate = &self.rate;
                let points =
                    rate.curve.iter().enumerate().map(|(bin, &rate)| (bin as f64 * self.rate.bin_s, rate));
                let y = axis(&format!("requests/s in bins of {} s", rate.bin_s), false);
                let rate = vec![series("requests", points.collect(), Mark::Steps)];
                vec![Chart { title: "Rate over time".into(), x: axis("time (s)", false), y, series: rate }]
            }
            "Lengths" => {
                let lengths = &self.lengths;
                let spreads = [
                    ("input", &lengths.input),
                    ("uncached input (infinite cache)", &lengths.uncached),
                    ("output", &lengths.output),
                ];
                distribution("Lengths", "tokens", &spreads).into_iter().collect()
            }
            "Cache size" => {
                let all = self.cache.hit_token_share;
                let ends = [self.cache.lru.first(), self.cache.lru.last()];
                let bound = ends.into_iter().flatten().map(|end| (end.capacity_tokens as f64, all)).collect();
                let points = self.cache.lru.iter();
                let points =
                    points.map(|point| (point.capacity_tokens as f64, point.hit_token_share)).collect();
                let lru = Chart {
                    title: "Hit rate of an LRU cache".into(),
                    x: axis("capacity (tokens)", true),
                    y: axis("share of input tokens", false),
                    series: vec![
                        series("LRU", points, Mark::Line),
                        series("infinite cache", bound, Mark::Steps),
                    ],
                };
                let reuse = [("reuses", &self.cache.reuse_s)];
                let reuse = distribution("Time to a block's next use", "seconds", &reuse);
                std::iter::once(lru).chain(reuse).collect()
            }
            "Sessions" => {
                let sessions = &self.sessions;
                let gaps = distribution("Gaps between turns", "seconds", &[("gaps", &sessions.gap_s)]);
                let sets = [("sessions", &sessions.working_set_tokens)];
                let sets = distribution("Working set of a session", "tokens", &sets);
                gaps.into_iter().chain(sets).collect()
            }
            _ => Vec::new(),
        }
    }
}

/// Names and values.
fn facts<const N: usize>(rows: [(&str, String); N]) -> Table {
    let rows = rows.map(|(name, value)| vec![name.to_owned(), value]).into();
    Table { columns: vec!["figure".into(), "value".into()], rows }
}

/// One row of percentiles per quantity that there is.
fn spreads<const N: usize>(rows: [(&str, &Option<Spread>); N]) -> Table {
    let columns = ["", "mean", "p10", "p50", "p90", "p99", "max"].map(String::from).into();
    let rows = rows.into_iter().filter_map(|(name, spread)| {
        let spread = spread.as_ref()?;
        let figures = [spread.mean, spread.p10, spread.p50, spread.p90, spread.p99, spread.max];
        Some(std::iter::once(name.to_owned()).chain(figures.map(number)).collect())
    });
    Table { columns, rows: rows.collect() }
}

#[cfg(test)]
mod tests {
    use kvlane_trace::trace::{Builder, Trace, TraceRequest};

    use super::*;

    #[test]
    fn a_trace_without_sharing_has_no_curve_and_an_empty_one_still_shows() {
        let mut builder = Builder::new(16);
        for arrival_s in [0.0, 1.5] {
            let request = TraceRequest { arrival_s, input_tokens: 100, ..TraceRequest::default() };
            builder.push(request, &[]);
        }
        let text = TraceStats::of(&builder.finish()).to_text();
        assert!(text.contains("mean rate (requests/s)") && !text.contains("Cache size"), "{text}");
        let empty = TraceStats::of(&Trace { block_tokens: 16, ..Trace::default() });
        assert!(empty.to_text().contains("requests"));
        assert!(empty.to_page("of nothing").to_html().contains("Trace of nothing"));
    }

    #[test]
    fn the_page_has_what_the_text_has_and_charts() {
        let mut builder = Builder::new(16);
        for turn in 0..4 {
            let request = TraceRequest {
                arrival_s: f64::from(turn) * 10.0,
                input_tokens: 64,
                output_tokens: 9,
                ..TraceRequest::default()
            };
            builder.push(request, &[1, 2, 3]);
        }
        builder.note("times are spread".into());
        let stats = TraceStats::of(&builder.finish());
        let page = stats.to_page("t");
        let headings: Vec<_> = page.sections.iter().map(|section| section.heading.as_str()).collect();
        assert_eq!(headings, ["Arrivals", "Lengths", "Prefix cache", "Cache size", "Sessions"]);
        let is_chart = |part: &&Part| matches!(part, Part::Chart(_));
        let charts: Vec<_> =
            page.sections.iter().map(|section| section.parts.iter().filter(is_chart).count()).collect();
        assert_eq!(charts, [1, 1, 0, 2, 2]);
        assert!(stats.to_text().contains("note: times are spread"));
    }
}
