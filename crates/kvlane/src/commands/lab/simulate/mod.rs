//! `kvlane simulate`: compares policies, fleets and loads in virtual time, with the router that runs in production
//! and a calibrated engine model.

mod records;

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Error, Result, anyhow, bail, ensure};
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvlane_lab::catalogue::{self, ScenarioError};
use kvlane_lab::part::Experiment;
use kvlane_lab::scenario::{
    Aside, CacheKnowledge, ClosedStart, Group, Plain, PlainError, Scenario, Simulation, Stage, show,
    wall_clock,
};

use super::page::PageArgs;
use super::part::PartArgs;

/// Flags of the simulation.
#[derive(Args, Clone, Debug)]
pub(crate) struct SimulateArgs {
    /// Run a scenario: a built-in one by name (`--list` shows them), or a file. Fleet, workload and policies are then
    /// the scenario's.
    #[arg(long, value_name = "NAME|FILE", conflicts_with_all = ["trace", "workload", "policy", "engines", "preset", "model",
        "gpu", "tp", "timing", "kv_dtype", "block_tokens", "load", "rate", "concurrency", "cache_knowledge", "hints"])]
    scenario: Option<String>,
    /// List the scenarios that come with kvlane.
    #[arg(long)]
    list: bool,
    /// A trace file, in any format that `kvlane trace` reads, or one that comes with kvlane: `mooncake-conversation`,
    /// `weka-agentic` or `azure-conversation`.
    #[arg(long, value_name = "FILE", conflicts_with = "workload")]
    trace: Option<PathBuf>,
    /// A generated workload by its kind (see `kvlane trace generate`), with its default settings.
    #[arg(long, value_name = "KIND")]
    workload: Option<String>,
    /// Policies to compare, separated by commas.
    #[arg(long, value_delimiter = ',', default_values = Plain::POLICIES)]
    policy: Vec<String>,
    /// Number of engines.
    #[arg(long, default_value_t = Plain::ENGINES)]
    engines: u32,
    /// Model and machine of an engine, as in `llama-3.3-70b@h100x4`. Instead: --model, --gpu and --tp, or --timing.
    #[arg(long, conflicts_with_all = ["model", "gpu", "tp", "timing"])]
    preset: Option<String>,
    /// The model of an engine.
    #[arg(long, requires = "gpu", conflicts_with = "timing")]
    model: Option<String>,
    /// Its GPU.
    #[arg(long, requires = "model")]
    gpu: Option<String>,
    /// GPUs per engine.
    #[arg(long, requires = "model", default_value_t = 1)]
    tp: u32,
    /// A timing file that `kvlane calibrate` wrote.
    #[arg(long, value_name = "FILE")]
    timing: Option<PathBuf>,
    /// Type of keys and values: bf16 or fp8.
    #[arg(long, value_name = "TYPE")]
    kv_dtype: Option<String>,
    /// Tokens in a KV block [default: the timing file's, or 16].
    #[arg(long, value_name = "N")]
    block_tokens: Option<u32>,
    /// Factors on the rate at which the trace's conversations begin, separated by commas. The pace within a
    /// conversation does not change [default: 1].
    #[arg(long, value_delimiter = ',', conflicts_with_all = ["rate", "concurrency"])]
    load: Vec<f64>,
    /// Conversations per second x seconds, as in `5x60,10x60`, instead of the workload's own times.
    #[arg(long, value_delimiter = ',', value_parser = stage, value_name = "RATExSECONDS", conflicts_with = "concurrency")]
    rate: Vec<Stage>,
    /// Numbers of closed-loop clients, separated by commas; each has ten conversations that count, after those of --warm-up.
    #[arg(long, value_delimiter = ',', value_name = "N")]
    concurrency: Vec<u32>,
    /// With --concurrency: conversations of each client before those that count [default: 1].
    #[arg(long, value_name = "N", requires = "concurrency")]
    warm_up: Option<u32>,
    /// With --concurrency: clients begin at random times within so many seconds [default: 5].
    #[arg(long, value_name = "SECONDS", requires = "concurrency")]
    stagger_s: Option<f64>,
    /// With --concurrency: answers are longer or shorter by up to this share, uniformly [default: 0].
    #[arg(long, value_name = "SHARE", requires = "concurrency")]
    length_spread: Option<f64>,
    /// Cache knowledge of the router: `approximate` (its own dispatches) or `exact` (the engines' KV events).
    #[arg(long, value_parser = knowledge, default_value = "approximate")]
    cache_knowledge: CacheKnowledge,
    /// Compare sets of hints, separated by commas, each under session admission: `none`, `output` (true answer lengths),
    /// `conversation`, `return` (conversations, and how each answer ended: an agent returns from its tools), `last`
    /// (conversations, and their last requests) or `all`.
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    hints: Vec<String>,
    /// Number of runs of each, with different seeds [default: 1, or the scenario's].
    #[arg(long)]
    seeds: Option<u32>,
    /// Threads [default: one for each core].
    #[arg(long)]
    jobs: Option<usize>,
    /// Goodput: maximum seconds to the first token [default: 2, or the scenario's].
    #[arg(long, value_name = "SECONDS")]
    slo_ttft_s: Option<f64>,
    /// Goodput: maximum milliseconds between tokens [default: 50, or the scenario's].
    #[arg(long, value_name = "MILLISECONDS")]
    slo_tpot_ms: Option<f64>,
    /// Write the figures as JSON (schema kvlane.simulate/1) to a file, or to stdout without one.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// Write the records of each request under the first seed, in the format of a replay's: a file for each row,
    /// named by policy and load, into this directory, created if necessary.
    #[arg(long, value_name = "DIR")]
    records: Option<PathBuf>,
    #[command(flatten)]
    page: PageArgs,
    #[command(flatten)]
    part: PartArgs,
}

/// Runs it.
pub(crate) fn run_command(args: &SimulateArgs) -> Result<ExitCode> {
    let mut out = std::io::stdout();
    if args.list {
        write!(out, "{}", catalogue::list())?;
        return Ok(ExitCode::SUCCESS);
    }
    let (mut scenario, directory) = scenario(args)?;
    if let Some(seeds) = args.seeds {
        ensure!(seeds > 0, "--seeds 0: must be at least 1");
        scenario.seeds = seeds;
    }
    scenario.judgement.slo_ttft_s = args.slo_ttft_s.unwrap_or(scenario.judgement.slo_ttft_s);
    scenario.judgement.slo_tpot_ms = args.slo_tpot_ms.unwrap_or(scenario.judgement.slo_tpot_ms);
    let jobs = match args.jobs {
        Some(0) => bail!("--jobs 0: must be at least 1"),
        Some(jobs) => jobs,
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    // Detect a file that cannot be written before the run, not after it.
    let mut json = None;
    if args.part.shows() {
        json = args.json.as_deref().filter(|path| *path != Path::new("-")).map(create).transpose()?;
        args.page.check()?;
        if let Some(directory) = &args.records {
            std::fs::create_dir_all(directory)
                .with_context(|| format!("--records {}", directory.display()))?;
        }
    }

    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template("{bar:48} {pos}/{len} requests  {elapsed}")?);
    let progress = |over: usize, total: usize| {
        // A redraw costs more than a request.
        if over == total || over.is_multiple_of(1024) {
            bar.set_length(total as u64);
            bar.set_position(over as u64);
        }
    };
    let open = |path: &Path| catalogue::open(path, &directory);
    let aside = Aside { stopwatch: Some(wall_clock), records: args.records.is_some() };
    let simulation = Simulation::new(&scenario, &directory, &open, aside)?;
    let experiment = || Experiment::new("simulate", simulation.configuration(), simulation.jobs());
    let run = |part| anyhow::Ok(simulation.run(part, jobs, &progress)?);
    let found = args.part.share().results(experiment, run)?;
    bar.finish_and_clear();
    let Some(found) = found else { return Ok(ExitCode::SUCCESS) };
    let rows = simulation.rows(found);

    let figures = serde_json::to_string_pretty(&show::to_json(&scenario, &rows))?;
    let tables = show::text(&scenario, &rows);
    match &mut json {
        Some(file) => {
            writeln!(file, "{figures}")?;
            write!(out, "{tables}")?;
        }
        None if args.json.is_some() => {
            writeln!(out, "{figures}")?;
            write!(std::io::stderr(), "{tables}")?;
        }
        None => write!(out, "{tables}")?,
    }
    if let Some(directory) = &args.records {
        records::write(&rows, directory)?;
    }
    args.page.write(|| show::page(&scenario, &rows))?;
    Ok(ExitCode::SUCCESS)
}

fn create(path: &Path) -> Result<File> {
    File::create(path).with_context(|| path.display().to_string())
}

/// The scenario from a file, the built-in ones, or the flags, and the directory for its relative paths.
fn scenario(args: &SimulateArgs) -> Result<(Scenario, PathBuf)> {
    match &args.scenario {
        Some(name) => catalogue::scenario(name).map_err(|error| {
            let text = format!("--{error}");
            match error {
                ScenarioError::Absent { source, .. } => Error::new(source).context(text),
                ScenarioError::Invalid { .. } => error.into(),
            }
        }),
        None => Ok((from_flags(args)?, PathBuf::new())),
    }
}

fn from_flags(args: &SimulateArgs) -> Result<Scenario> {
    let closed = ClosedStart::default();
    let plain = Plain {
        fleet: Group {
            engines: args.engines,
            preset: args.preset.clone(),
            model: args.model.clone(),
            gpu: args.gpu.clone(),
            tp: args.tp,
            timing: args.timing.clone(),
            kv_dtype: args.kv_dtype.clone(),
            block_tokens: args.block_tokens,
            ..Group::default()
        },
        trace: args.trace.clone(),
        workload: args.workload.clone(),
        load: args.load.clone(),
        rate: args.rate.clone(),
        concurrency: args.concurrency.clone(),
        closed: ClosedStart {
            warm_up: args.warm_up.unwrap_or(closed.warm_up),
            stagger_s: args.stagger_s.unwrap_or(closed.stagger_s),
            length_spread: args.length_spread.unwrap_or(closed.length_spread),
        },
        policies: args.policy.clone(),
        cache_knowledge: args.cache_knowledge,
        hints: args.hints.clone(),
    };
    plain.scenario().map_err(|error| match error {
        PlainError::NoRequests => anyhow!(
            "nothing to simulate: --trace FILE, --workload KIND or --scenario NAME is required (--list shows scenarios)"
        ),
        error => anyhow!("--{error}"),
    })
}

/// `5x60`: five conversations per second for sixty seconds.
fn stage(text: &str) -> Result<Stage, String> {
    let parts = text.split_once('x').and_then(|(rate, secs)| Some((rate.parse().ok()?, secs.parse().ok()?)));
    let (rate, seconds) = parts.ok_or("must be a rate and seconds, as in 5x60")?;
    Ok(Stage { rate, seconds })
}

fn knowledge(text: &str) -> Result<CacheKnowledge, String> {
    match text {
        "approximate" => Ok(CacheKnowledge::Approximate),
        "exact" => Ok(CacheKnowledge::Exact),
        _ => Err("must be approximate or exact".to_owned()),
    }
}
