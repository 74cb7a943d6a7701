//! `kvlane check` and `kvlane config`: the effective configuration, and a file with every key.

use std::io::Write as _;
use std::process::ExitCode;

use anyhow::Result;

use crate::config::{ConfigArgs, document};

/// Loads the configuration and the files it names as `serve` would, then prints it.
pub(crate) fn run(args: &ConfigArgs) -> Result<ExitCode> {
    let config = args.load()?;
    args.warn();
    kvlane_gateway::serve::check(&config)?;
    print(&serde_json::to_string_pretty(&config)?)
}

/// Prints a file with every key, or the schema of such a file.
pub(crate) fn print_example(schema: bool) -> Result<ExitCode> {
    print(&if schema { serde_json::to_string_pretty(&document::schema())? } else { document::example() })
}

fn print(text: &str) -> Result<ExitCode> {
    writeln!(std::io::stdout(), "{}", text.trim_end())?;
    Ok(ExitCode::SUCCESS)
}
