//! How far the policies are from the limit, as a table in Markdown.

use std::io::Write as _;
use std::path::Path;

use kvlane_lab::matrix::policies::{Bench, CellId, Limit, Matrix, Pace, Selection};
use kvlane_trace::format;

use super::{Failure, Options};

/// How thorough a search is.
#[derive(Clone, Copy)]
pub(super) struct Effort {
    /// Runs are shorter by this factor: each is simulated very often.
    pub(super) shorter: f64,
    /// Assignments that are simulated for each cell.
    pub(super) tries: u32,
}

impl Default for Effort {
    fn default() -> Self {
        Self { shorter: 5.0, tries: 4000 }
    }
}

/// Searches every cell, under the first seed, and prints a row for each: mean E2E latencies in seconds.
pub(super) fn print(
    mut matrix: Matrix,
    directory: &Path,
    selection: &Selection,
    options: &Options,
) -> Result<(), Failure> {
    let Effort { shorter: factor, tries } = options.effort;
    for workload in &mut matrix.workloads {
        workload.send = shorter(workload.send, factor);
    }
    let selection = Selection { ages_s: Some(vec![matrix.age_s]), full: true, ..selection.clone() };
    let cells = matrix.cells(&selection)?;
    let arms = matrix.arms(&selection)?;
    let bench = Bench::new(&matrix, &cells, directory, &|path| {
        format::open(&directory.join(path), &Default::default())
    })?;
    let found = bench.limits(&cells, &arms, tries, options.threads, &|place| {
        _ = writeln!(std::io::stderr(), "{} at {} is searched", cells[place].workload, cells[place].load);
    })?;
    let mut out = std::io::stdout();
    writeln!(
        out,
        "| Cell | requests | {} | best other | search | to the search | alone | work |",
        matrix.ours
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|---|")?;
    let mut logs = Vec::new();
    for (cell, limit) in cells.iter().zip(&found) {
        let Some(ours_s) = limit.placed.iter().find(|one| one.arm == matrix.ours).map(|one| one.mean_s)
        else {
            return Err(format!("--limit needs {} among the policies", matrix.ours).into());
        };
        logs.push((ours_s / limit.found.mean_s).ln());
        writeln!(out, "{}", row(cell, limit, &matrix.ours, ours_s))?;
    }
    let mean = (logs.iter().sum::<f64>() / logs.len().max(1) as f64).exp();
    writeln!(out, "| **geometric mean** | | | | | **{mean:.3}** | | |")?;
    Ok(())
}

fn row(cell: &CellId, limit: &Limit, ours: &str, ours_s: f64) -> String {
    let CellId { workload, fleet, load, .. } = cell;
    let others = limit.placed.iter().filter(|one| one.arm != ours);
    let best = others.min_by(|a, b| a.mean_s.total_cmp(&b.mean_s));
    let best = best.map_or("–".to_owned(), |one| format!("{:.3} `{}`", one.mean_s, one.arm));
    let work = limit.bounds.work_s.map_or("–".to_owned(), |work_s| format!("{work_s:.3}"));
    let (requests, found_s, alone_s) = (limit.requests, limit.found.mean_s, limit.bounds.alone_s);
    let ratio = ours_s / found_s;
    format!(
        "| {workload}@{fleet} {load} | {requests} | {ours_s:.3} | {best} | {found_s:.3} | {ratio:.3} | {alone_s:.3} | {work} |"
    )
}

fn shorter(send: Pace, factor: f64) -> Pace {
    match send {
        Pace::WindowS(seconds) => Pace::WindowS(seconds / factor),
        Pace::Seconds(seconds) => Pace::Seconds(seconds / factor),
        Pace::Conversations(count) => Pace::Conversations((f64::from(count) / factor).ceil() as u32),
    }
}
