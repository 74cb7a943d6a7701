//! `kvlane check` and `kvlane config`: the configuration as `serve` would have it, and as it can be written.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Result;

use crate::config::ConfigArgs;

/// The configuration file with every key.
pub(crate) const EXAMPLE: &str = include_str!("../../../../config/example.yaml");

/// Loads, reads what it names as `serve` would, then prints what `serve` would run with.
pub(crate) fn run(args: &ConfigArgs) -> Result<ExitCode> {
    let config = args.load()?;
    kvlane_live::serve::check(&config)?;
    print(&serde_json::to_string_pretty(&config)?)
}

/// Prints [`EXAMPLE`].
pub(crate) fn print_example() -> Result<ExitCode> {
    print(EXAMPLE.trim_end())
}

fn print(text: &str) -> Result<ExitCode> {
    writeln!(std::io::stdout(), "{text}")?;
    Ok(ExitCode::SUCCESS)
}
