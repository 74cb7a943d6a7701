//! `kvlane trace stats`: statistics of a trace, as a table, JSON and a page.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;
use kvlane_lab::trace_stats::TraceStats;

use super::ReadArgs;
use super::show::{Show, name};

/// Flags of the statistics.
#[derive(Args, Clone, Debug)]
pub(crate) struct StatsArgs {
    /// The trace, of any known format, plain or gzip, or one that comes with kvlane: `mooncake-conversation`,
    /// `weka-agentic` or `azure-conversation`.
    file: PathBuf,
    /// Random seed, for values that the file lacks: jitter, and the starts of sessions.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    show: Show,
    #[command(flatten)]
    read: ReadArgs,
}

/// Runs it.
pub(crate) fn run(args: &StatsArgs) -> Result<ExitCode> {
    let mut files = args.show.open()?;
    let stats = TraceStats::of(&args.read.open(&args.file, args.seed)?);
    files.tell(&stats.to_text())?;
    files.json(&stats)?;
    files.page(|| stats.to_page(&name(&args.file)))?;
    Ok(ExitCode::SUCCESS)
}
