//! `kvlane completions` and `kvlane man`: what a shell and `man` know of the commands.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap_complete::Shell;

use crate::cli::command;

/// Prints a shell's completions.
pub(crate) fn print_completions(shell: Shell) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command(), "kvlane", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes a page for each command.
pub(crate) fn write_pages(dir: &Path) -> Result<ExitCode> {
    let cannot = || format!("cannot write man pages to {}", dir.display());
    fs::create_dir_all(dir).with_context(cannot)?;
    clap_mangen::generate_to(command(), dir).with_context(cannot)?;
    Ok(ExitCode::SUCCESS)
}
