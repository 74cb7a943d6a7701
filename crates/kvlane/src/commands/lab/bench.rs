//! `kvlane bench`: compares routers on one fleet, as described in a file.

use std::fs::File;
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvlane_lab::catalogue;
use kvlane_lab::matrix::routers::judge::Recorded;
use kvlane_lab::matrix::routers::run::{Measured, Place, Progress, configuration, judge, run, units};
use kvlane_lab::matrix::routers::store::Store;
use kvlane_lab::matrix::routers::workload::Source;
use kvlane_lab::matrix::routers::{Job, Matrix, ready};
use kvlane_lab::part::{Experiment, Part};
use tokio::signal::unix::{SignalKind, signal};

use super::page::PageArgs;
use super::part::PartArgs;
use kvlane_wire::yaml;

/// A file with every key, for `--example`.
const EXAMPLE: &str = include_str!("../../../assets/bench.yaml");

/// Flags of the bench.
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    /// The bench file: routers, engines and loads. `--example` prints one.
    #[arg(required_unless_present_any = ["example", "list"])]
    file: Option<PathBuf>,
    /// Print a file with every key and its meaning.
    #[arg(long, exclusive = true)]
    example: bool,
    /// List the built-in routers with their commands.
    #[arg(long, exclusive = true)]
    list: bool,
    /// Print the runs in their order and the requests of each, and run nothing.
    #[arg(long)]
    plan: bool,
    /// Run only these routers of the file, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    routers: Vec<String>,
    /// Store each run's records in this directory, and skip runs that are stored there: after an interruption, or
    /// with another seed, router or load, only the missing runs are made.
    #[arg(long, value_name = "DIR")]
    records: Option<PathBuf>,
    /// Write the figures as JSON (schema kvlane.bench/1) to a file, or to stdout without one.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    #[command(flatten)]
    page: PageArgs,
    #[command(flatten)]
    part: PartArgs,
}

/// Runs it.
pub(crate) fn run_command(args: &BenchArgs) -> Result<ExitCode> {
    let mut out = std::io::stdout();
    if args.example {
        write!(out, "{EXAMPLE}")?;
        return Ok(ExitCode::SUCCESS);
    }
    if args.list {
        write!(out, "{}", list())?;
        return Ok(ExitCode::SUCCESS);
    }
    let Some(file) = &args.file else { bail!("no bench file given; `kvlane bench --example` prints one") };
    let (mut matrix, directory) = read(file)?;
    only(&mut matrix, &args.routers)?;
    let place = |what| format!("{}: {what}", file.display());
    matrix.check().map_err(|error| anyhow!(place(error.to_string())))?;
    let open = |path: &Path| catalogue::open(path, &directory);
    let source = Source::read(&matrix.workload, open).map_err(|error| anyhow!(place(error.to_string())))?;
    if args.plan {
        write!(out, "{}", plan(&matrix, &source)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    // Detect a file that cannot be written before the runs, not after them.
    let json = args.json.as_deref().filter(|path| *path != Path::new("-"));
    if let Some(path) = json.filter(|_| args.part.shows()) {
        let opened = File::options().create(true).append(true).open(path);
        opened.with_context(|| format!("--json {}", path.display()))?;
    }
    if args.part.shows() {
        args.page.check()?;
    }
    let store = match &args.records {
        Some(path) => Some(Store::open(path).with_context(|| format!("--records {}", path.display()))?),
        None => None,
    };
    let scratch = match &args.records {
        Some(path) => std::path::absolute(path)?.join("logs"),
        None => std::env::temp_dir().join(format!("kvlane-bench-{}", std::process::id())),
    };
    let place = Place {
        directory,
        scratch,
        kvlane: std::env::current_exe().context("cannot find the path of this program")?,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let measure = |part| {
        let done = runtime.block_on(async {
            let mut terminate = signal(SignalKind::terminate())?;
            let mut interrupt = signal(SignalKind::interrupt())?;
            // All started processes end when this future is dropped.
            tokio::select! {
                done = carry_out(&matrix, &place, &source, part, store.as_ref()) => done,
                _ = terminate.recv() => bail!("stopped by a signal; with --records, completed runs are kept"),
                _ = interrupt.recv() => bail!("stopped; with --records, completed runs are kept"),
            }
        });
        // Removed, unless it contains the log of a failed run.
        let _ = std::fs::remove_dir(&place.scratch);
        done
    };
    let experiment = || Experiment::new("bench", configuration(&matrix, &source), units(&matrix));
    let Some(measured) = args.part.share().results(experiment, measure)? else {
        return Ok(ExitCode::SUCCESS);
    };
    let (report, recorded) = judge(&matrix, &source, measured)?;
    let figures = serde_json::to_string_pretty(&report)?;
    match (json, args.json.is_some()) {
        (Some(path), _) => {
            std::fs::write(path, figures + "\n").with_context(|| format!("--json {}", path.display()))?;
            writeln!(out, "{}", report.to_text())?;
        }
        (None, true) => {
            writeln!(out, "{figures}")?;
            writeln!(std::io::stderr(), "{}", report.to_text())?;
        }
        (None, false) => writeln!(out, "{}", report.to_text())?,
    }
    args.page.write(|| report.to_page(&recorded))?;
    Ok(if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The matrix, and the directory for its relative paths.
fn read(file: &Path) -> Result<(Matrix, PathBuf)> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let matrix = yaml::read(&text).with_context(|| format!("in {}", file.display()))?;
    let directory = std::path::absolute(file)?.parent().map(Path::to_owned).unwrap_or_default();
    Ok((matrix, directory))
}

/// Keeps only the selected routers.
fn only(matrix: &mut Matrix, names: &[String]) -> Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    let known: Vec<&str> = matrix.routers.iter().map(|router| router.router.as_str()).collect();
    for name in names {
        ensure!(known.contains(&name.as_str()), "--routers {name}: the file has {}", known.join(", "));
    }
    matrix.routers.retain(|router| names.contains(&router.router));
    let left = matrix.arms()?;
    matrix.ours = matrix.ours.take().filter(|ours| left.iter().any(|arm| arm.name == *ours));
    Ok(())
}

/// Every run in its order, with its requests.
fn plan(matrix: &Matrix, source: &Source) -> Result<String> {
    let mut text = String::new();
    for (n, Job { router, load, seed }) in matrix.order()?.iter().enumerate() {
        let requests = source.requests(&matrix.workload, &matrix.loads, *load, *seed)?;
        let span_s = requests.span_s();
        let count = requests.requests.len();
        text.push_str(&format!(
            "{:3}  {router:20} load {load}, seed {seed}: {count} requests, the last due after {span_s:.0} s\n",
            n + 1
        ));
    }
    Ok(text)
}

/// The built-in routers.
fn list() -> String {
    let one = |name: &&str| {
        let router = ready::by_name(name).unwrap_or_default();
        format!("{name}\n    {}\n", router.command.unwrap_or_default())
    };
    ready::NAMES.iter().map(one).collect()
}

/// Makes the runs of a part, with progress on stderr.
async fn carry_out(
    matrix: &Matrix,
    place: &Place,
    source: &Source,
    part: Part,
    store: Option<&Store>,
) -> Result<Vec<Measured>> {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template("{prefix:32} {bar:40} {pos}/{len} answered  {elapsed}")?);
    let tell = |line: &str| {
        // If stderr is closed, progress cannot be reported.
        if std::io::stderr().is_terminal() {
            bar.println(line);
        } else {
            let _ = writeln!(std::io::stderr(), "{line}");
        }
    };
    let mut unkept = None;
    let kept = |job: &Job| store.and_then(|store| store.find(matrix, job));
    let progress = |progress: Progress<'_>| match progress {
        Progress::Begins { place, of, job, requests } => {
            bar.reset();
            bar.set_length(requests as u64);
            bar.set_prefix(format!("{}/{of} {} {} {}", place + 1, job.router, job.load, job.seed));
        }
        Progress::Sent(ended) => bar.set_position(ended as u64),
        Progress::Ended(one) => {
            tell(&ended(one));
            if let Some(Err(error)) = store.map(|store| store.keep(matrix, one)) {
                unkept = Some(error);
            }
        }
    };
    let done = run(matrix, place, source, part, kept, progress).await;
    bar.finish_and_clear();
    if let Some(error) = unkept {
        tell(&format!("--records: cannot store a run: {error}"));
    }
    Ok(done?)
}

/// A run as one line of text.
fn ended(one: &Recorded) -> String {
    let run = &one.run;
    let which = format!("{} {} load {} seed {}", run.place + 1, run.job.router, run.job.load, run.job.seed);
    if let Some(failure) = &run.failure {
        return format!("{which}: discarded: {failure}");
    }
    let answered: Vec<f64> =
        one.records.iter().filter(|record| record.is_ok()).filter_map(|record| record.ttft_s()).collect();
    let mean_s = answered.iter().sum::<f64>() / answered.len() as f64;
    let failed: u64 = run.errors_by_class.values().sum();
    format!(
        "{which}: {} requests, {failed} failed, mean time to first token {mean_s:.3} s, client late by {:.1} ms (p99), {:.0} s",
        run.requests,
        run.client_lag_p99_s.unwrap_or_default() * 1e3,
        run.wall_s
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_is_a_matrix_that_makes_sense() {
        let matrix: Matrix = serde_saphyr::from_str(EXAMPLE).expect("YAML");
        assert_eq!(matrix.check(), Ok(()));
    }
}
