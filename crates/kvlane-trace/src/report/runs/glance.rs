//! The runs in one table.

use super::Run;
use crate::report::{Part, Table, number, percent};
use crate::summary::{Percentiles, Summary};

pub(super) fn parts(runs: &[Run<'_>]) -> Vec<Part> {
    if runs.is_empty() {
        return Vec::new();
    }
    let columns = [
        "run",
        "requests",
        "failed",
        "TTFT mean s",
        "p50",
        "p90",
        "p99",
        "TPOT mean ms",
        "p90",
        "E2E mean s",
        "p90",
        "tok/s out",
        "cached",
    ];
    let of = |percentiles: Option<Percentiles>, what: fn(Percentiles) -> f64, scale: f64| {
        percentiles.map_or("-".to_owned(), |percentiles| number(what(percentiles) * scale))
    };
    let row = |run: &Run<'_>| {
        let summary = Summary::of(run.records, 1.0);
        vec![
            run.name.clone(),
            number(summary.requests as f64),
            number(summary.errors as f64),
            of(summary.ttft_s, |ttft| ttft.mean, 1.0),
            of(summary.ttft_s, |ttft| ttft.p50, 1.0),
            of(summary.ttft_s, |ttft| ttft.p90, 1.0),
            of(summary.ttft_s, |ttft| ttft.p99, 1.0),
            of(summary.tpot_s, |tpot| tpot.mean, 1e3),
            of(summary.tpot_s, |tpot| tpot.p90, 1e3),
            of(summary.e2e_s, |e2e| e2e.mean, 1.0),
            of(summary.e2e_s, |e2e| e2e.p90, 1.0),
            number(summary.output_tokens_per_s),
            summary.cached_share.map_or("-".to_owned(), percent),
        ]
    };
    let rows = runs.iter().map(row).collect();
    vec![Part::Table(Table { columns: columns.map(str::to_owned).into(), rows })]
}
