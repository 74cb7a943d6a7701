//! `kvlane bench`: routers against each other on one fleet, as a file says.

use std::fs::File;
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvlane_bench::matrix::judge::{Recorded, Report};
use kvlane_bench::matrix::run::{Place, Progress, run};
use kvlane_bench::matrix::store::Store;
use kvlane_bench::matrix::workload::Source;
use kvlane_bench::matrix::{Job, Matrix, ready};
use tokio::signal::unix::{SignalKind, signal};

use super::page::PageArgs;
use super::simulate::catalogue;
use crate::yaml;

/// A matrix with every key, for `--example`.
const EXAMPLE: &str = include_str!("../../../../config/bench.yaml");

/// What a bench can be told.
#[derive(Args, Clone, Debug)]
pub(crate) struct BenchArgs {
    /// What is compared with what, on which engines, under which load. `--example` prints one.
    #[arg(required_unless_present_any = ["example", "list"])]
    file: Option<PathBuf>,
    /// Print a file with every key and what it means.
    #[arg(long, exclusive = true)]
    example: bool,
    /// List the routers that need only be named, with the commands that start them.
    #[arg(long, exclusive = true)]
    list: bool,
    /// Print the runs in their order and what each sends, and run nothing.
    #[arg(long)]
    plan: bool,
    /// Only these routers of the file, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    routers: Vec<String>,
    /// Keep each run's records in this directory, and go on from those that are there: a bench that was interrupted, or
    /// has got another seed, router or load, does not run again what it has.
    #[arg(long, value_name = "DIR")]
    records: Option<PathBuf>,
    /// Write the figures as JSON (schema kvlane.bench/1) to a file, `-` for stdout.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    page: PageArgs,
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
    let Some(file) = &args.file else { bail!("give a file; `kvlane bench --example` prints one") };
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
    // A file that cannot be written is better known before the runs than after them.
    let json = args.json.as_deref().filter(|path| *path != Path::new("-"));
    if let Some(path) = json {
        let opened = File::options().create(true).append(true).open(path);
        opened.with_context(|| format!("--json {}", path.display()))?;
    }
    args.page.check()?;
    let store = match &args.records {
        Some(path) => Some(Store::open(path).with_context(|| format!("--records {}", path.display()))?),
        None => None,
    };
    let scratch = match &args.records {
        Some(path) => std::path::absolute(path)?.join("logs"),
        None => std::env::temp_dir().join(format!("kvlane-bench-{}", std::process::id())),
    };
    let place =
        Place { directory, scratch, kvlane: std::env::current_exe().context("this program's own path")? };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let done = runtime.block_on(async {
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        // Whatever was started ends when this future is dropped.
        tokio::select! {
            done = carry_out(&matrix, &place, source, store.as_ref()) => done,
            _ = terminate.recv() => bail!("stopped by a signal; with --records, what is over is kept"),
            _ = interrupt.recv() => bail!("stopped; with --records, what is over is kept"),
        }
    });
    // Gone unless a log of a run that failed is in it.
    let _ = std::fs::remove_dir(&place.scratch);
    let (report, recorded) = done?;
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

/// The matrix, and the directory that its paths are relative to.
fn read(file: &Path) -> Result<(Matrix, PathBuf)> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let matrix = yaml::read(&text).with_context(|| format!("in {}", file.display()))?;
    let directory = std::path::absolute(file)?.parent().map(Path::to_owned).unwrap_or_default();
    Ok((matrix, directory))
}

/// Leaves out the routers that are not asked for.
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

/// Every run in its order, with what it sends.
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

/// The ready-made routers.
fn list() -> String {
    let one = |name: &&str| {
        let router = ready::by_name(name).unwrap_or_default();
        format!("{name}\n    {}\n", router.command.unwrap_or_default())
    };
    ready::NAMES.iter().map(one).collect()
}

/// Runs and judges, telling how far it is.
async fn carry_out(
    matrix: &Matrix,
    place: &Place,
    source: Source,
    store: Option<&Store>,
) -> Result<(Report, Vec<Recorded>)> {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template("{prefix:32} {bar:40} {pos}/{len} answered  {elapsed}")?);
    let tell = |line: &str| {
        // Nobody is left to tell if stderr is gone.
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
    let done = run(matrix, place, source, kept, progress).await;
    bar.finish_and_clear();
    if let Some(error) = unkept {
        tell(&format!("a run could not be kept in --records: {error}"));
    }
    Ok(done?)
}

/// A run in a line.
fn ended(one: &Recorded) -> String {
    let run = &one.run;
    let which = format!("{} {} load {} seed {}", run.place + 1, run.job.router, run.job.load, run.job.seed);
    if let Some(failure) = &run.failure {
        return format!("{which}: does not count: {failure}");
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
