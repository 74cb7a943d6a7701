//! Results of a replay, as text and JSON.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use kvlane_lab::engine_caches::EngineCache;
use kvlane_lab::replay::stages::{StageTimes, stages};
use kvlane_lab::replay::{Client, ReplayConfig, ReplayReport};
use kvlane_lab::report::{Page, Part, Report, Run, Section, Table, number, percent};
use kvlane_lab::statistics::cached::CachedShares;
use kvlane_lab::statistics::summary::{Percentiles, Summary};
use kvlane_trace::record::Record;
use serde::Serialize;

/// Maximum endpoints and kinds of error in tables.
const ROWS_MAX: usize = 64;

/// The figures of one replay.
#[derive(Debug, Serialize)]
pub(super) struct Found {
    schema: &'static str,
    url: String,
    model: String,
    /// The file or the name of the trace or prompts.
    sent: String,
    sessions: u64,
    speed: f64,
    seed: u64,
    wall_s: f64,
    requests_per_s: f64,
    summary: Summary,
    /// Requests left out because the replay was interrupted.
    unfinished: usize,
    /// Between two tokens of an answer.
    itl_s: Option<Percentiles>,
    /// Share of the prompt tokens of the answered requests that an infinite cache would have held.
    cached_share_max: Option<f64>,
    #[serde(skip)]
    cached: CachedShares,
    /// Failed requests by class and status.
    errors: BTreeMap<String, u64>,
    stages: Vec<StageTimes>,
    /// The prefix caches of the engines that were named.
    engine_caches: Vec<EngineCache>,
    client: Client,
    /// Reasons why the client was the bottleneck, if it was.
    bottleneck: Vec<String>,
    first_errors: Vec<String>,
}

// === impl Found ===

impl Found {
    pub(super) fn new(
        config: &ReplayConfig,
        report: &ReplayReport,
        sent: Option<&Path>,
        bottleneck: Vec<String>,
        engine_caches: Vec<EngineCache>,
    ) -> Self {
        let records = &report.records;
        let mut errors = BTreeMap::new();
        for record in records.iter().filter(|record| !record.is_ok()) {
            let class = record.error.as_deref().unwrap_or("status");
            let name = if class == "status" { format!("status {}", record.status) } else { class.to_owned() };
            *errors.entry(name).or_default() += 1;
        }
        let cached = CachedShares::of(records);
        let sessions = config.trace.requests.iter().map(|request| request.session).max();
        Self {
            schema: "kvlane.replay/1",
            url: config.base_url.clone(),
            model: config.model.clone(),
            sent: sent.map(|path| path.display().to_string()).unwrap_or_default(),
            sessions: sessions.map_or(0, |last| u64::from(last) + 1),
            speed: config.speed,
            seed: config.seed,
            wall_s: report.wall_s,
            requests_per_s: if report.wall_s > 0.0 { records.len() as f64 / report.wall_s } else { 0.0 },
            summary: Summary::of(records, 1.0),
            unfinished: report.unfinished,
            itl_s: report.itl_s,
            cached_share_max: cached.most(),
            cached,
            errors,
            stages: stages(records),
            engine_caches,
            client: report.client.clone(),
            bottleneck,
            first_errors: report.first_errors.clone(),
        }
    }

    pub(super) fn to_json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)?)
    }

    pub(super) fn to_text(&self) -> String {
        let mut text = format!("{}\n\n", self.opening());
        for (heading, table) in self.tables() {
            text.push_str(&format!("{heading}\n{}\n", table.to_text()));
        }
        text.push_str(&self.closing());
        text.push('\n');
        text
    }

    pub(super) fn page(&self, records: &[Record]) -> Page {
        let mut sections: Vec<Section> = self
            .tables()
            .into_iter()
            .map(|(heading, table)| Section { heading: heading.into(), parts: vec![Part::Table(table)] })
            .collect();
        sections.push(Section { heading: "The client".into(), parts: vec![Part::Text(self.closing())] });
        let report = Report {
            title: format!("Replay of {} onto {}", self.sent, self.url),
            intro: self.opening(),
            trace: Some(self.sent.clone()),
            runs: vec![Run { name: self.url.clone(), records }],
            sections,
            ..Report::default()
        };
        report.page()
    }

    fn opening(&self) -> String {
        let Summary { requests, errors, prompt_tokens, output_tokens, output_tokens_per_s, .. } =
            self.summary;
        let mut text = format!(
            "{} requests of {} conversations onto {} ({}) in {:.1} s, {} a second; {} failed.\n{} prompt tokens and {} output \
             tokens, {} output tokens a second.",
            number(requests as f64),
            number(self.sessions as f64),
            self.url,
            if self.model.is_empty() { "models named by the prompts" } else { &self.model },
            self.wall_s,
            number(self.requests_per_s),
            number(errors as f64),
            number(prompt_tokens as f64),
            number(output_tokens as f64),
            number(output_tokens_per_s),
        );
        if self.unfinished > 0 {
            text.push_str(&format!(" Interrupted: {} more had not ended.", self.unfinished));
        }
        if self.speed != 1.0 {
            text.push_str(&format!(" Conversations began {} times as fast as in the trace.", self.speed));
        }
        text.push(' ');
        text.push_str(&match (self.cached.found, self.cached.most(), self.cached.excess()) {
            (_, _, Some(excess)) => excess,
            (Some(share), Some(most), None) => format!(
                "{} of the prompt tokens came from caches; an infinite cache would have had {}.",
                percent(share),
                percent(most)
            ),
            (Some(share), None, None) => format!("{} of the prompt tokens came from caches.", percent(share)),
            (None, ..) => "The server reported no cached tokens.".to_owned(),
        });
        let split: u64 = self.summary.per_prefill_endpoint.values().sum();
        if split > 0 {
            text.push_str(&format!(
                " {} requests ({}) were split between two endpoints.",
                number(split as f64),
                percent(split as f64 / (requests - errors).max(1) as f64)
            ));
        }
        text
    }

    fn tables(&self) -> Vec<(&'static str, Table)> {
        let head = |first: &str| [first, "mean", "p50", "p90", "p99", "max"].map(str::to_owned).to_vec();
        let row = |name: &str, of: Option<Percentiles>| {
            let cells = of.map(|of| [of.mean, of.p50, of.p90, of.p99, of.max].map(|s| number(s * 1e3)));
            std::iter::once(name.to_owned())
                .chain(cells.unwrap_or_else(|| ["-"; 5].map(str::to_owned)))
                .collect()
        };
        let Summary { ttft_s, tpot_s, e2e_s, per_endpoint, per_prefill_endpoint, .. } = &self.summary;
        let latencies: Vec<Vec<String>> = vec![
            row("to the first token (TTFT)", *ttft_s),
            row("between tokens (ITL)", self.itl_s),
            row("per token after the first (TPOT)", *tpot_s),
            row("to the end (E2E)", *e2e_s),
        ];
        let mut tables =
            vec![("Latencies in milliseconds", Table { columns: head("time"), rows: latencies })];
        if !self.stages.is_empty() {
            let rows = self.stages.iter().map(|stage| {
                let mut cells: Vec<String> = row(&stage.stage, Some(stage.seconds));
                cells.insert(1, number(stage.requests as f64));
                cells
            });
            let mut columns = head("stage");
            columns.insert(1, "requests".into());
            tables.push(("Time by stage (ms)", Table { columns, rows: rows.collect() }));
        }
        let counts = |first: &str, counts: &BTreeMap<String, u64>| {
            let all: u64 = counts.values().sum();
            let mut rows: Vec<_> = counts.iter().collect();
            rows.sort_by_key(|&(name, count)| (std::cmp::Reverse(*count), name));
            let rows = rows.into_iter().take(ROWS_MAX).map(|(name, &count)| {
                vec![name.clone(), number(count as f64), percent(count as f64 / all as f64)]
            });
            Table { columns: [first, "requests", "share"].map(str::to_owned).to_vec(), rows: rows.collect() }
        };
        if !per_endpoint.is_empty() {
            tables.push(("Answered by endpoint", counts("endpoint", per_endpoint)));
        }
        if !per_prefill_endpoint.is_empty() {
            tables.push(("Prompts computed for another endpoint", counts("endpoint", per_prefill_endpoint)));
        }
        if !self.engine_caches.is_empty() {
            let rows = self.engine_caches.iter().map(|cache| {
                vec![
                    format!("{} rank {}", cache.engine, cache.rank),
                    number(cache.queried_tokens as f64),
                    percent(cache.hit_share),
                    percent(cache.external_hit_share),
                ]
            });
            let columns =
                ["engine", "prompt tokens", "own cache (APC)", "fetched"].map(str::to_owned).to_vec();
            tables.push(("Prefix caches by the engines' counters", Table { columns, rows: rows.collect() }));
        }
        if !self.errors.is_empty() {
            tables.push(("Failed", counts("error", &self.errors)));
        }
        tables
    }

    /// State of the client.
    fn closing(&self) -> String {
        let late = |of: Option<Percentiles>| {
            of.map_or("-".into(), |of| format!("{} and {} ms", number(of.p50 * 1e3), number(of.p99 * 1e3)))
        };
        let Client { lag_s, stall_s, cpu_share } = &self.client;
        let mut text = format!(
            "The client sent requests {} late (median and 99th percentile), came to other work {} late, and used {} of its \
             CPU time.",
            late(*lag_s),
            late(*stall_s),
            cpu_share.map_or("an unknown share".into(), percent)
        );
        if !self.bottleneck.is_empty() {
            text.push_str(&format!(" It was the bottleneck: {}.", self.bottleneck.join("; ")));
        }
        text
    }
}
