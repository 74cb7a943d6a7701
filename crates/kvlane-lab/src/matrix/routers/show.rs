//! Output of a bench's report: tables for a terminal, sections of a page.

use crate::report::{self, Page, Part, Section, Table, number, percent, workload};
use crate::statistics::ci::Interval;
use crate::statistics::draws::Estimate;
use crate::statistics::paired::Paired;

use super::Job;
use super::judge::{Cell, Recorded, Report};

/// Figures of the main table, with their headings.
const COLUMNS: [(&str, &str); 8] = [
    ("ttft_mean_s", "TTFT mean s"),
    ("ttft_p50_s", "p50"),
    ("ttft_p90_s", "p90"),
    ("ttft_p99_s", "p99"),
    ("e2e_mean_s", "E2E mean s"),
    ("e2e_p90_s", "p90"),
    ("tpot_mean_ms", "TPOT mean ms"),
    ("out_tok_s", "tokens/s"),
];

// === impl Report ===

impl Report {
    /// The tables as text.
    pub fn to_text(&self) -> String {
        let mut out = self.verdict.as_ref().map_or_else(String::new, |verdict| format!("{verdict}\n"));
        for section in self.sections() {
            out.extend(["\n", &section.heading, "\n"]);
            for part in &section.parts {
                match part {
                    Part::Text(text) => out.extend([text.as_str(), "\n"]),
                    Part::Table(table) => out.push_str(&table.to_text()),
                    // Charts are left out of text output.
                    Part::Chart(_) | Part::Bars(_) | Part::Heat(_) | Part::Tiles(_) => {}
                }
            }
        }
        out
    }

    /// The report as a page, with the requests of one run of each router: under the first seed, at the highest load
    /// that all of them have.
    pub fn to_page(&self, recorded: &[Recorded]) -> Page {
        let mut names: Vec<&str> = self.routers.iter().map(|named| named.router.as_str()).collect();
        // The page compares the others with the first.
        names.sort_by_key(|name| *name != self.ours);
        let seed = self.matrix.seeds.first().copied().unwrap_or_default();
        let run = |name: &str, load: f64| {
            let job = Job { router: name.to_owned(), load, seed };
            recorded.iter().find(|one| one.run.job == job && one.run.failure.is_none())
        };
        let mut loads = self.matrix.loads.values();
        loads.sort_by(|a, b| b.total_cmp(a));
        let missing = |load: &f64| names.iter().filter(|name| run(name, *load).is_none()).count();
        let load = loads.iter().copied().min_by_key(missing).unwrap_or_default();
        let of_run = |name: &&str| {
            let one = run(name, load)?;
            let name = format!("{name}, load {}, seed {seed}", number(load));
            Some(report::Run { name, records: &one.records })
        };
        let point = |cell: &Cell| report::Point {
            name: cell.router.clone(),
            load: cell.load,
            figures: cell.figures.iter().map(|(name, estimate)| (name.clone(), estimate.value)).collect(),
            intervals: cell
                .figures
                .iter()
                .filter_map(|(name, estimate)| Some((name.clone(), estimate.interval?)))
                .collect(),
            ..report::Point::default()
        };
        let page = report::Report {
            title: self.title(),
            verdict: self.verdict.clone(),
            trace: workload(self.matrix.workload.trace.as_deref(), self.matrix.workload.generate.as_ref()),
            intro: self.intro(),
            runs: names.iter().filter_map(of_run).collect(),
            loads: Some(report::Loads {
                label: format!("Load ({})", self.load_unit),
                points: self.cells.iter().filter(|cell| cell.runs > 0).map(point).collect(),
            }),
            sections: Vec::new(),
        };
        let mut page = page.page();
        // The tables come first, then single runs.
        page.sections.splice(0..0, self.sections());
        page
    }

    /// Title of the page.
    pub fn title(&self) -> String {
        let about = self.matrix.about.lines().next().unwrap_or_default().trim();
        if about.is_empty() { "Comparison of routers".into() } else { about.trim_end_matches('.').into() }
    }

    /// Description of the measurement.
    pub fn intro(&self) -> String {
        let fleet = &self.matrix.fleet;
        let engines = match fleet.urls.len() {
            0 => format!("{} engines, started anew for every run", fleet.engines),
            count => format!("{count} engines, their caches emptied before every run"),
        };
        let speed = match self.matrix.workload.speed {
            1.0 => String::new(),
            speed => {
                format!(" Engines and requests ran {speed} times as fast as real; times are the trace's.")
            }
        };
        let seeds = self.matrix.seeds.len();
        let machine: Vec<&str> = self.machine.values().map(String::as_str).collect();
        let of_what = match seeds {
            1 => "over its requests; one seed does not show the variation between runs",
            _ => "over seeds and requests",
        };
        format!(
            "{}\n\n{engines}; {} routers, {} loads ({}), {seeds} {}: {} runs, in random order.{speed} Client \
             machine: {}.\n\nIn brackets: 95 % confidence intervals, {of_what}.",
            self.matrix.about.trim(),
            self.routers.len(),
            self.matrix.loads.values().len(),
            self.load_unit,
            if seeds == 1 { "seed" } else { "seeds" },
            self.runs.len(),
            machine.join(", "),
        )
    }

    /// The tables under their headings.
    pub fn sections(&self) -> Vec<Section> {
        let mut sections = vec![Section { heading: "Figures".into(), parts: self.figures() }];
        let mut add = |heading: String, parts: Vec<Part>| {
            if !parts.is_empty() {
                sections.push(Section { heading, parts });
            }
        };
        add(format!("{} against each of the others", self.ours), self.against());
        add("Metrics over load".into(), self.over_load_table());
        add("Loads at which the order changes".into(), self.crossings_text());
        add("CPU and memory of the routers".into(), self.costs());
        add("Discarded runs and failed requests".into(), self.troubles());
        sections
    }

    fn figures(&self) -> Vec<Part> {
        let mut columns = vec!["load, router".to_owned()];
        columns.extend(COLUMNS.iter().map(|(_, head)| (*head).to_owned()));
        columns.extend(["cached".to_owned(), "failed".to_owned(), "runs".to_owned()]);
        let row = |cell: &Cell| {
            let mut row = vec![format!("{} {}", number(cell.load), self.named(&cell.router))];
            row.extend(COLUMNS.iter().map(|(figure, _)| estimate(cell.figures.get(*figure), number)));
            row.push(estimate(cell.figures.get("cached_share"), percent));
            row.push(cell.figures.get("failed_share").map_or("-".into(), |share| percent(share.value)));
            row.push(cell.runs.to_string());
            row
        };
        let loads = self.matrix.loads.values();
        let rows = loads.iter().flat_map(|load| {
            self.routers
                .iter()
                .filter_map(|named| self.cell(&named.router, *load))
                .filter(|cell| cell.runs > 0)
                .map(row)
        });
        vec![Part::Table(Table { columns, rows: rows.collect() })]
    }

    /// A router with its version.
    fn named(&self, router: &str) -> String {
        let version =
            self.routers.iter().find(|named| named.router == router).and_then(|named| named.version.clone());
        version.map_or_else(|| router.to_owned(), |version| format!("{router} ({version})"))
    }

    fn against(&self) -> Vec<Part> {
        let columns = [
            "load, router",
            "requests in both",
            "TTFT difference s",
            "median s",
            "ratio",
            "faster",
            "E2E difference s",
            "ratio",
            "faster",
        ];
        let figures = |paired: &Option<Paired>, median: bool| {
            let Some(paired) = paired else { return vec!["-".to_owned(); if median { 4 } else { 3 }] };
            let mut cells = vec![estimate(Some(&paired.mean_difference), number)];
            if median {
                cells.push(estimate(Some(&paired.median_difference), number));
            }
            cells.push(estimate(Some(&paired.mean_ratio), number));
            cells.push(estimate(Some(&paired.faster_share), percent));
            cells
        };
        let rows: Vec<Vec<String>> = self
            .paired
            .iter()
            .filter(|one| one.ttft_s.is_some() || one.e2e_s.is_some())
            .map(|one| {
                let matched =
                    one.ttft_s.or(one.e2e_s).map_or("0".to_owned(), |paired| paired.matched.to_string());
                let mut row = vec![format!("{} {}", number(one.load), one.router), matched];
                row.extend(figures(&one.ttft_s, true));
                row.extend(figures(&one.e2e_s, false));
                row
            })
            .collect();
        if rows.is_empty() {
            return Vec::new();
        }
        let ours = &self.ours;
        let text = format!(
            "Paired by request: the latency with {ours} minus that with the other router (below 0: {ours} is faster), the ratio \
             of the means, and the share of requests that were faster."
        );
        vec![Part::Text(text), Part::Table(Table { columns: columns.map(str::to_owned).to_vec(), rows })]
    }

    fn over_load_table(&self) -> Vec<Part> {
        let mut columns = vec![
            "figure, router".to_owned(),
            "slope per load".to_owned(),
            "slope per request in flight".to_owned(),
            format!("slope over {}'s", self.ours),
            "knee at load".to_owned(),
        ];
        let bounded = !self.matrix.within.is_empty();
        if bounded {
            columns.push("within the bound up to load".to_owned());
        }
        let rows: Vec<Vec<String>> = self
            .over_load
            .iter()
            .filter(|one| one.slope.is_some())
            .map(|one| {
                let mut row = vec![
                    format!("{} {}", one.figure, one.router),
                    estimate(one.slope.as_ref(), number),
                    estimate(one.slope_in_flight.as_ref(), number),
                    estimate(one.slope_ratio.as_ref(), number),
                    estimate(one.knee.as_ref(), number),
                ];
                if bounded {
                    let within = one.within.map(|within| {
                        let least = if within.passed { "" } else { "at least " };
                        format!("{least}{}", estimate(Some(&within.load), number))
                    });
                    row.push(within.unwrap_or_else(|| "-".into()));
                }
                row
            })
            .collect();
        if rows.is_empty() {
            return Vec::new();
        }
        vec![Part::Table(Table { columns, rows })]
    }

    fn crossings_text(&self) -> Vec<Part> {
        let lines: Vec<String> = self
            .crossings
            .iter()
            .map(|one| {
                let crossing = &one.crossing;
                let (before, after) = match crossing.lower_before {
                    true => (&self.ours, &one.router),
                    false => (&one.router, &self.ours),
                };
                let at = Estimate { value: crossing.at, interval: crossing.interval };
                format!(
                    "{}: {before} is lower up to a load of {}, {after} beyond; this holds in {} of the bootstrap \
                     samples.",
                    one.figure,
                    estimate(Some(&at), number),
                    percent(crossing.share_of_draws)
                )
            })
            .collect();
        if lines.is_empty() { Vec::new() } else { vec![Part::Text(lines.join("\n\n"))] }
    }

    fn costs(&self) -> Vec<Part> {
        let columns = ["load, router", "CPU per request us", "memory MiB"].map(str::to_owned).to_vec();
        let rows: Vec<Vec<String>> = self
            .cells
            .iter()
            .filter(|cell| cell.figures.contains_key("router_cpu_us"))
            .map(|cell| {
                vec![
                    format!("{} {}", number(cell.load), cell.router),
                    estimate(cell.figures.get("router_cpu_us"), number),
                    estimate(cell.figures.get("router_rss_mib"), number),
                ]
            })
            .collect();
        if rows.is_empty() { Vec::new() } else { vec![Part::Table(Table { columns, rows })] }
    }

    fn troubles(&self) -> Vec<Part> {
        let mut lines = Vec::new();
        for run in &self.runs {
            let which =
                format!("{} at load {} under seed {}", run.job.router, number(run.job.load), run.job.seed);
            if let Some(failure) = &run.failure {
                lines.push(format!("{which} was discarded: {failure}"));
            }
            if !run.errors_by_class.is_empty() {
                let classes: Vec<String> =
                    run.errors_by_class.iter().map(|(class, count)| format!("{count} {class}")).collect();
                lines.push(format!(
                    "{which}: failures of {} requests: {}; the first: {}",
                    run.requests,
                    classes.join(", "),
                    run.first_errors.first().map_or("", String::as_str)
                ));
            }
        }
        if lines.is_empty() { Vec::new() } else { vec![Part::Text(lines.join("\n\n"))] }
    }
}

/// A figure with its interval, as `1.23 (1.20 to 1.27)`.
fn estimate(estimate: Option<&Estimate>, format: fn(f64) -> String) -> String {
    match estimate {
        None => "-".to_owned(),
        Some(Estimate { value, interval: None }) => format(*value),
        Some(Estimate { value, interval: Some(Interval { low, high }) }) => {
            format!("{} ({} to {})", format(*value), format(*low), format(*high))
        }
    }
}
