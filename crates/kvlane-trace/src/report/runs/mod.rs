//! The report about runs: what `simulate`, `replay`, `bench` and `report` show of the records of one run or several.
//!
//! A [`Report`] takes what is there. Runs with records get tables, distributions, time lines and heat maps; two of
//! them get a comparison request by request; [`Loads`] get a chart over load. What a record does not say leaves its
//! part out.

mod distribution;
mod glance;
mod load;

use std::collections::BTreeMap;

use super::{Page, Part, Section};
use crate::ci::Interval;
use crate::record::Record;

/// What a report is made of.
#[derive(Clone, Debug, Default)]
pub struct Report<'a> {
    /// What it is about.
    pub title: String,
    /// What was measured, on what, and how. Blank lines part paragraphs.
    pub intro: String,
    /// The runs. The others are compared with the first, request by request: those of equal [`Record::id`].
    pub runs: Vec<Run<'a>>,
    /// Figures at several loads, if there were several.
    pub loads: Option<Loads>,
    /// What the command has to say besides; it stands at the end.
    pub sections: Vec<Section>,
}

/// One run.
#[derive(Clone, Debug, Default)]
pub struct Run<'a> {
    /// What tells it apart from the others, such as its policy.
    pub name: String,
    /// What its requests experienced, in any order.
    pub records: &'a [Record],
    /// Share of the prompt tokens that a cache which never forgets would have held, if it is known. Otherwise it follows
    /// from [`Record::shared_tokens`], where the records have them.
    pub cached_share_max: Option<f64>,
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
    /// Where they lie, most likely, by the same names.
    pub intervals: BTreeMap<String, Interval>,
    /// What was published of the same run at the same load, by the same names.
    pub published: BTreeMap<String, f64>,
}

// === impl Report ===

impl Report<'_> {
    /// The report as a page.
    pub fn page(&self) -> Page {
        let mut sections = Vec::new();
        let mut add = |heading: &str, parts: Vec<Part>| {
            if !parts.is_empty() {
                sections.push(Section { heading: heading.to_owned(), parts });
            }
        };
        add("At a glance", glance::parts(&self.runs));
        add("Over load", load::parts(self.loads.as_ref()));
        add("Distributions", distribution::parts(&self.runs));
        sections.extend(self.sections.iter().cloned());
        Page { title: self.title.clone(), intro: self.intro.clone(), sections }
    }
}
