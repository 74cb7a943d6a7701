//! `kvlane report`: a page of the records that `replay`, `bench` and `simulate` write, of one run or several.

use std::fs::File;
use std::io::{BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Args;
use kvlane_lab::report::{Report, Run};
use kvlane_trace::record::{self, Record};

use super::page::PageArgs;

/// Maximum runs of one report.
const RUNS_MAX: usize = 32;

/// Flags of the report.
#[derive(Args, Clone, Debug)]
pub(crate) struct ReportArgs {
    /// Records of a run, one JSON object per line, as --records writes them. Further files are compared with the
    /// first, request by request. NAME=FILE names a run; the default is the file's name.
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
    ensure!(args.files.len() <= RUNS_MAX, "{} files: the maximum is {RUNS_MAX}", args.files.len());
    args.page.check()?;
    let mut runs: Vec<(String, Vec<Record>)> = Vec::new();
    for file in &args.files {
        let (name, path) = named(file);
        let records = read(&path)?;
        let taken = |name: &String| runs.iter().any(|(other, _)| other == name);
        let numbered = (2..).map(|n| format!("{name} ({n})"));
        let name = std::iter::once(name.clone()).chain(numbered).find(|name| !taken(name)).unwrap_or(name);
        runs.push((name, records));
    }
    let names: Vec<&str> = runs.iter().map(|(name, _)| name.as_str()).collect();
    let report = Report {
        title: args.title.clone().unwrap_or_else(|| names.join(" and ")),
        intro: String::new(),
        runs: runs
            .iter()
            .map(|(name, records)| Run { name: name.clone(), records, cached_share_max: None })
            .collect(),
        ..Report::default()
    };
    args.page.write(|| report.page())?;
    for (name, records) in &runs {
        writeln!(std::io::stdout(), "{name}: {} requests", records.len())?;
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

fn read(path: &Path) -> Result<Vec<Record>> {
    let place = || path.display().to_string();
    let file = File::open(path).with_context(place)?;
    let records = record::read(BufReader::new(file)).with_context(place)?;
    ensure!(!records.is_empty(), "{}: contains no records", place());
    Ok(records)
}
