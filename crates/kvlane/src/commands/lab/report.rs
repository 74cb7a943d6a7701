//! `kvlane report`: a page of the records that `replay`, `bench` and `simulate` write, of one run or several.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Args;
use kvlane_lab::catalogue;
use kvlane_lab::report::Report;
use kvlane_trace::record::{self, Record};

use super::page::PageArgs;

/// Flags of the report.
#[derive(Args, Clone, Debug)]
pub(crate) struct ReportArgs {
    /// Records of a run, one JSON object per line, as --records writes them. Further files are compared with the
    /// first: request by request if both runs sent the same. NAME=FILE names a run; the default is the file's name.
    #[arg(required = true, value_name = "RECORDS")]
    files: Vec<String>,
    /// Title of the page.
    #[arg(long)]
    title: Option<String>,
    #[command(flatten)]
    page: PageArgs,
}

/// Runs it.
pub(crate) fn run(args: &ReportArgs) -> Result<ExitCode> {
    ensure!(args.page.wanted(), "no output: use --html FILE, --plots DIR or both");
    let max = Report::RUNS_MAX;
    ensure!(args.files.len() <= max, "{} files: the maximum is {max}", args.files.len());
    args.page.check()?;
    let mut runs: Vec<(String, Vec<Record>)> = Vec::new();
    for file in &args.files {
        let (name, path) = named(file);
        ensure!(
            !catalogue::is_trace(&path),
            "{0}: is a trace, not the records of a run; write these with `kvlane replay URL --trace {0} --records FILE`",
            path.display()
        );
        let records = record::open(&path)?;
        let taken = |name: &String| runs.iter().any(|(other, _)| other == name);
        let numbered = (2..).map(|n| format!("{name} ({n})"));
        let name = std::iter::once(name.clone()).chain(numbered).find(|name| !taken(name)).unwrap_or(name);
        runs.push((name, records));
    }
    let report = Report::of(args.title.as_deref(), &runs);
    args.page.write(|| report.page())?;
    let mut out = std::io::stdout();
    for (name, records) in &runs {
        writeln!(out, "{name}: {} requests", records.len())?;
    }
    if let Some(verdict) = report.verdict() {
        writeln!(out, "{verdict}")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A run's name and file. If the whole argument names an existing file, it is taken as one, even with `=` in its
/// name.
fn named(text: &str) -> (String, PathBuf) {
    if let Some((name, path)) = text.split_once('=')
        && !name.is_empty()
        && !Path::new(text).exists()
    {
        return (name.to_owned(), PathBuf::from(path));
    }
    let path = PathBuf::from(text);
    (path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned(), path)
}
