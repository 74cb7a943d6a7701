//! The report about runs: what `simulate`, `replay`, `bench` and `report` show of the records of one run or several.
//!
//! A [`Report`] shows the available data. Runs with records get tables, distributions, time lines and heat maps; two
//! of them get a comparison request by request; [`Loads`] get a chart over load. Parts without data in the records
//! are left out.

mod cache;
mod change;
mod course;
mod distribution;
mod glance;
mod load;
mod traffic;

pub use traffic::workload;

use std::collections::BTreeMap;

use kvlane_trace::record::Record;

use super::{Page, Part, Section};
use crate::statistics::ci::Interval;
use crate::statistics::verdict::{Contrast, with_first};

/// Runs that charts have; further ones are in the tables alone.
const DRAWN_MAX: usize = 8;

/// What a report is made of.
#[derive(Clone, Debug, Default)]
pub struct Report<'a> {
    /// What it is about.
    pub title: String,
    /// What was found, in a sentence. Otherwise the runs are compared with the first.
    pub verdict: Option<String>,
    /// What was sent. Otherwise the runs' requests are described.
    pub trace: Option<String>,
    /// What was measured, on what, and how. Blank lines part paragraphs.
    pub intro: String,
    /// The runs. The others are compared with the first, request by request if both sent the same: those of equal
    /// [`Record::id`].
    pub runs: Vec<Run<'a>>,
    /// Figures at one load or at several.
    pub loads: Option<Loads>,
    /// Additional sections of the command, at the end.
    pub sections: Vec<Section>,
}

/// One run.
#[derive(Clone, Debug, Default)]
pub struct Run<'a> {
    /// What tells it apart from the others, such as its policy.
    pub name: String,
    /// What its requests experienced, in any order.
    pub records: &'a [Record],
}

/// Figures of several runs at several loads.
#[derive(Clone, Debug, Default)]
pub struct Loads {
    /// What is on the axis, as in `Requests per second`.
    pub label: String,
    /// The figures.
    pub points: Vec<Point>,
}

/// The figures of one run at one load, the mean over its seeds.
///
/// Figures go by the names that `kvlane simulate --json` uses: `ttft_mean_s`, `ttft_p50_s`, `ttft_p90_s`, `ttft_p99_s`,
/// `itl_p50_ms`, `itl_p99_ms`, `tpot_mean_ms`, `tpot_p90_ms`, `e2e_mean_s`, `e2e_p90_s`, `out_tok_s`, `cached_share`,
/// `reusable_share`, `goodput_req_s`, `failed_share`, `busy_imbalance`. A name that is missing leaves a gap; others may
/// be there.
#[derive(Clone, Debug, Default)]
pub struct Point {
    /// Which run: a line of the chart.
    pub name: String,
    /// At which load.
    pub load: f64,
    /// The figures.
    pub figures: BTreeMap<String, f64>,
    /// Their confidence intervals, by the same names.
    pub intervals: BTreeMap<String, Interval>,
    /// Published figures of the same run at the same load, by the same names.
    pub published: BTreeMap<String, f64>,
}

// === impl Report ===

impl<'a> Report<'a> {
    /// Maximum runs of [`Report::of`].
    pub const RUNS_MAX: usize = 32;

    /// A report of records alone, by the names of their runs.
    pub fn of(title: Option<&str>, runs: &'a [(String, Vec<Record>)]) -> Self {
        let names: Vec<&str> = runs.iter().map(|(name, _)| name.as_str()).collect();
        let run = |(name, records): &'a (String, Vec<Record>)| Run { name: name.clone(), records };
        Self {
            title: title.map_or_else(|| names.join(" and "), str::to_owned),
            runs: runs.iter().map(run).collect(),
            ..Self::default()
        }
    }

    /// The report as a page.
    pub fn page(&self) -> Page {
        let mut sections = Vec::new();
        let mut add = |heading: &str, parts: Vec<Part>| {
            if !parts.is_empty() {
                sections.push(Section { heading: heading.to_owned(), parts });
            }
        };
        let runs = &self.runs;
        let drawn = &runs[..runs.len().min(DRAWN_MAX)];
        add("Summary", glance::parts(runs));
        if let Some(loads) = &self.loads {
            let (heading, parts) = load::section(loads);
            add(heading, parts);
        }
        add("Changes between runs", change::parts(runs));
        add("Distributions", distribution::parts(drawn));
        add("Caches", cache::shares(runs));
        add("Time by stage", cache::stages(runs));
        add("Over time", course::over_time(drawn));
        add("Endpoints", course::endpoints(drawn));
        sections.extend(self.sections.iter().cloned());
        let mut intro = self.intro.clone();
        if runs.len() > DRAWN_MAX {
            intro
                .push_str(&format!("\n\nTables have all {} runs, charts the first {DRAWN_MAX}.", runs.len()));
        }
        Page {
            title: self.title.clone(),
            verdict: self.verdict(),
            trace: self.trace.clone().or_else(|| traffic::of(runs)),
            command: None,
            intro,
            sections,
        }
    }

    /// What was found, in a sentence: [`Report::verdict`](field@Self::verdict), or the time to first token of each run
    /// against the first run's. `None` of one run.
    pub fn verdict(&self) -> Option<String> {
        let compared = || {
            let (first, others) = self.runs.split_first()?;
            let contrasts: Vec<(&str, Contrast)> =
                others.iter().filter_map(|other| other.against(first)).collect();
            with_first(&first.name, &contrasts)
        };
        self.verdict.clone().or_else(compared)
    }
}

// === impl Run ===

impl Run<'_> {
    /// Its name, and its time to first token against that of another run. `None` if one of them answered nothing.
    fn against(&self, other: &Run<'_>) -> Option<(&str, Contrast)> {
        Some((&self.name, Contrast::of(other.records, self.records)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(count: u64, endpoints: u64, slow: f64) -> Vec<Record> {
        let record = |id: u64| {
            let noise = (id * 7919 % 1009) as f64 / 1009.0;
            let at = id as f64 * 0.05;
            Record {
                id,
                scheduled_s: at,
                sent_s: at + 0.001,
                first_token_s: Some(at + 0.05 + noise * slow),
                end_s: at + 1.0 + 4.0 * noise,
                prompt_tokens: 1000,
                cached_tokens: Some((noise * 900.0) as u32),
                reusable_tokens: Some(950),
                output_tokens: 20,
                endpoint: Some(format!("http://10.0.0.{}:8000", id % endpoints)),
                status: if id.is_multiple_of(500) { 503 } else { 200 },
                stages_s: [("place".to_owned(), 1e-4), ("engine".to_owned(), noise)].into(),
                ..Record::default()
            }
        };
        (0..count).map(record).collect()
    }

    fn page(first: &[Record], second: &[Record]) -> Page {
        let run = |name: &str, records| Run { name: name.to_owned(), records };
        Report { title: "t".into(), runs: vec![run("a", first), run("b", second)], ..Report::default() }
            .page()
    }

    #[test]
    fn two_runs_have_everything_that_their_records_tell() {
        let page = page(&records(3000, 8, 1.0), &records(3000, 8, 0.5));
        let headings: Vec<&str> = page.sections.iter().map(|section| section.heading.as_str()).collect();
        assert_eq!(
            headings,
            [
                "Summary",
                "Changes between runs",
                "Distributions",
                "Caches",
                "Time by stage",
                "Over time",
                "Endpoints"
            ]
        );
        let html = page.to_html();
        let plots = page.plots();
        assert_eq!(html.matches("<figure").count(), plots.len());
        for (name, _) in &plots {
            assert!(html.contains(&format!("data-file=\"{}\"", name.trim_end_matches(".svg"))), "{name}");
        }
        assert!(html.contains("of at most") && html.contains("503") | html.contains("status"));
    }

    #[test]
    fn a_page_does_not_grow_with_its_records() {
        let size = |count, endpoints| {
            page(&records(count, endpoints, 1.0), &records(count, endpoints, 0.5)).to_html().len()
        };
        let (few, many) = (size(10_000, 300), size(100_000, 300));
        assert!(many < 1_500_000 && many < few * 3 / 2, "{few} {many}");
    }

    #[test]
    fn records_that_tell_little_leave_parts_out_and_none_leave_all() {
        let bare: Vec<Record> = records(50, 3, 1.0)
            .into_iter()
            .map(|record| Record {
                endpoint: None,
                cached_tokens: None,
                stages_s: BTreeMap::new(),
                first_token_s: None,
                ..record
            })
            .collect();
        let page =
            |records| Report { runs: vec![Run { name: "a".into(), records }], ..Report::default() }.page();
        let headings =
            |page: Page| page.sections.into_iter().map(|section| section.heading).collect::<Vec<_>>();
        assert_eq!(headings(page(&bare)), ["Summary", "Distributions", "Over time"]);
        assert_eq!(headings(page(&[])), ["Summary"]);
        assert!(Report::default().page().sections.is_empty());
    }
}
