//! `kvlane trace import`: converts any known format to kvlane's own.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use super::{ReadArgs, save};

/// Flags of the import.
#[derive(Args, Clone, Debug)]
pub(crate) struct ImportArgs {
    /// The trace, plain or gzip; a directory of `.json` files, one for each session; or a trace that comes with kvlane:
    /// `mooncake-conversation`, `weka-agentic` or `azure-conversation`.
    file: PathBuf,
    /// Output file; gzip if the name ends in `.gz`.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// Random seed: jitter, and the starts of sessions.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    read: ReadArgs,
}

/// Runs it.
pub(crate) fn run(args: &ImportArgs) -> Result<ExitCode> {
    let trace = args.read.open(&args.file, args.seed)?;
    save(&trace, &args.out)?;
    Ok(ExitCode::SUCCESS)
}
