//! `kvlane check` and `kvlane config`: the effective configuration, and a file with every key.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Result;

use crate::config::ConfigArgs;

/// The configuration file with every key.
pub(crate) const EXAMPLE: &str = include_str!("../../../../config/example.yaml");

/// Loads the configuration and the files it names as `serve` would, then prints it.
pub(crate) fn run(args: &ConfigArgs) -> Result<ExitCode> {
    let config = args.load()?;
    kvlane_gateway::serve::check(&config)?;
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
