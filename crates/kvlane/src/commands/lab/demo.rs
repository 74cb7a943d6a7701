//! `kvlane demo`: a slice of a real trace through the gateway onto four mock engines, once per policy.
//!
//! Every run starts with empty caches: new engines, a new gateway. Trace and engines are sped up by the same factor,
//! so that the later turns of a conversation are within the run; all times are printed in trace seconds.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{IsTerminal as _, Write as _};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvlane_core::policy::PolicyConfig;
use kvlane_core::timing::TimingModel;
use kvlane_gateway::config::{Config, WorkerSpec};
use kvlane_gateway::serve::Serving;
use kvlane_lab::catalogue;
use kvlane_lab::statistics::summary::{Percentiles, Summary};
use kvlane_lab::{ReplayConfig, ReplayReport, replay};
use kvlane_mock::{MockConfig, MockEngine};
use kvlane_trace::format::{self, Options};
use kvlane_trace::trace::Trace;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

use super::timing_file;

/// 600 s of the conversation trace published with Mooncake (FAST'25), Apache-2.0; see its README beside it.
const SLICE: &[u8] = include_bytes!("../../../assets/mooncake-conversation-slice.jsonl.gz");
/// The model's name in the demo.
const MODEL: &str = "demo";
/// The engines' timers have a resolution of 1 ms: a tenth of a trace second at this speed. Above it they would
/// dominate.
const SPEED_MAX: f64 = 100.0;
/// Lateness of the client, in trace seconds, above which its figures are in doubt.
const LAG_MAX_S: f64 = 0.5;
/// Maximum engines that one process runs without falling behind.
const ENGINES_MAX: usize = 64;
/// Timeout for engines and gateway to become ready.
const READY_TIMEOUT: Duration = Duration::from_secs(20);

/// Flags of the demo.
#[derive(Args, Clone, Debug)]
pub(crate) struct DemoArgs {
    /// Policies to run, one after the other.
    #[arg(long, num_args = 1.., default_values = ["round_robin", "cache_aware", "lmetric", "fleet_cost"])]
    policies: Vec<String>,
    /// Factor by which trace and engines are sped up.
    #[arg(long, default_value_t = 40.0)]
    speed: f64,
    /// A trace instead of the demo's own: a file, in any format that `kvlane trace` reads, or one that comes with kvlane:
    /// `mooncake-conversation`, `weka-agentic` or `azure-conversation`.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Number of engines.
    #[arg(long, default_value_t = 4)]
    engines: usize,
    /// Model and machine that the engines imitate.
    #[arg(long, default_value = "llama-3.3-70b@a100x4")]
    preset: String,
    /// A timing file, as `calibrate` writes it, for the engines to imitate instead of a preset.
    #[arg(long, value_name = "FILE", conflicts_with = "preset")]
    timing: Option<PathBuf>,
    /// Write the figures as JSON (schema kvlane.demo/1) to a file, or to stdout without one.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    /// Instead of comparing policies, run a fleet in real time with traffic that goes on, and a dashboard, until Ctrl-C.
    #[arg(long, conflicts_with_all = ["policies", "json", "speed"])]
    keep: bool,
    /// The configuration of every engine, from the flags above.
    #[arg(skip)]
    engine: MockConfig,
}

/// The figures, schema `kvlane.demo/1`.
#[derive(Debug, Serialize)]
struct Report {
    schema: &'static str,
    trace: TraceFacts,
    engines: usize,
    preset: String,
    speed: f64,
    /// One entry per policy, in the order of the runs. Times in trace seconds.
    runs: Vec<Run>,
}

#[derive(Debug, Serialize)]
struct TraceFacts {
    source: String,
    requests: usize,
    span_s: f64,
    input_tokens: u64,
    output_tokens: u64,
}

#[derive(Debug, Serialize)]
struct Run {
    policy: String,
    wall_s: f64,
    /// 99th percentile of the client's lateness.
    client_lag_p99_s: Option<f64>,
    summary: Summary,
}

/// Engines and the gateway in front of them, in this process.
struct Stage {
    engines: Vec<MockEngine>,
    serving: Serving,
}

/// Runs it.
pub(crate) fn run(args: &DemoArgs) -> Result<ExitCode> {
    ensure!(
        args.speed > 0.0 && args.speed <= SPEED_MAX,
        "--speed {}: must be above 0 and at most {SPEED_MAX}",
        args.speed
    );
    ensure!(
        (1..=ENGINES_MAX).contains(&args.engines),
        "--engines {}: must be 1 to {ENGINES_MAX}",
        args.engines
    );
    let args = &DemoArgs { engine: engine(args)?, ..args.clone() };
    let policies: Vec<PolicyConfig> = args.policies.iter().map(|name| policy(name)).collect::<Result<_>>()?;
    // The whole trace is compressed in time, so turns are sent at the trace's times without waiting for answers.
    let options = Options { open_loop: true, ..Options::default() };
    let trace = match &args.trace {
        Some(path) => catalogue::open_with(path, Path::new(""), &options)
            .with_context(|| format!("--trace {}", path.display()))?,
        None => format::read(SLICE, &options)?,
    };
    let trace = Arc::new(trace);
    // Detect a file that cannot be written before the run, not after it.
    let mut json = args.json.as_ref().filter(|path| path.as_os_str() != "-").map(create).transpose()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(async {
        if args.keep {
            keep(args, &trace).await?;
            return Ok(ExitCode::SUCCESS);
        }
        let mut report = Report::new(args, &trace);
        args.tell(&report.opening())?;
        for policy in policies {
            report.runs.push(one(args, &trace, policy).await?);
        }
        args.tell(&report.table())?;
        args.tell(&report.conclusion())?;
        let figures = serde_json::to_string_pretty(&report)?;
        match &mut json {
            Some(file) => writeln!(file, "{figures}")?,
            None if args.json.is_some() => say(&figures)?,
            None => {}
        }
        let failed = report.runs.iter().any(|run| run.summary.errors > 0 || run.summary.requests == 0);
        Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    })
}

/// The configuration shared by all engines.
fn engine(args: &DemoArgs) -> Result<MockConfig> {
    let mut config = MockConfig { model: MODEL.into(), preset: args.preset.clone(), ..MockConfig::default() };
    match &args.timing {
        Some(path) => config.imitate(timing_file::read(path)?),
        None => config.timing = Some(TimingModel::preset(&args.preset).context("--preset")?),
    }
    Ok(config)
}

fn policy(name: &str) -> Result<PolicyConfig> {
    match PolicyConfig::by_name(name) {
        Some(policy) => Ok(policy),
        None => bail!("--policies: {}", PolicyConfig::unknown(name)),
    }
}

// === impl DemoArgs ===

impl DemoArgs {
    /// Prints text to stdout, or to stderr if the JSON goes to stdout.
    fn tell(&self, text: &str) -> Result<()> {
        if self.json.as_ref().is_some_and(|path| path.as_os_str() == "-") {
            writeln!(std::io::stderr(), "{text}")?;
            return Ok(());
        }
        say(text)
    }

    /// Prints text that is not a result to stderr.
    fn note(&self, text: &str) -> Result<()> {
        writeln!(std::io::stderr(), "{text}")?;
        Ok(())
    }
}

/// Prints to stdout.
fn say(text: &str) -> Result<()> {
    writeln!(std::io::stdout(), "{text}")?;
    Ok(())
}

fn create(path: &PathBuf) -> Result<File> {
    File::create(path).with_context(|| format!("--json {}", path.display()))
}

/// Runs one policy, from empty caches to the last answer.
async fn one(args: &DemoArgs, trace: &Arc<Trace>, policy: PolicyConfig) -> Result<Run> {
    let name = policy.name();
    let stage = Stage::set(args, args.speed, policy, Ports::FREE).await?;
    let bar = ProgressBar::with_draw_target(Some(trace.requests.len() as u64), ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template("{prefix:14} {bar:48} {pos}/{len} answered  {elapsed}")?);
    bar.set_prefix(name);
    let replayed = replay(
        ReplayConfig {
            base_url: format!("http://{}", stage.serving.address),
            model: MODEL.into(),
            trace: trace.clone(),
            speed: args.speed,
            ..ReplayConfig::default()
        },
        |done, _| bar.set_position(done as u64),
    );
    let ReplayReport { records, wall_s, client_lag_s, first_errors, .. } = replayed.await?;
    bar.finish();
    if !std::io::stderr().is_terminal() {
        args.note(&format!("{name}: {} requests answered in {wall_s:.1} s", records.len()))?;
    }
    let client_lag_p99_s = client_lag_s.map(|lag| lag.p99);
    if let Some(lag) = client_lag_p99_s.map(|lag| lag * args.speed).filter(|&lag| lag > LAG_MAX_S) {
        args.note(&format!(
            "{name}: the client sent late, by {lag:.1} trace seconds at the 99th percentile: do not trust these figures, \
             lower --speed"
        ))?;
    }
    for error in first_errors {
        args.note(&format!("{name}: {error}"))?;
    }
    let names = stage.engine_names();
    stage.strike().await;
    let mut summary = Summary::of(&records, args.speed);
    // Ports differ from run to run; the index of the engine is what matters.
    let counts = names
        .iter()
        .map(|(url, name)| (name.clone(), summary.per_endpoint.get(url).copied().unwrap_or_default()));
    summary.per_endpoint = counts.collect();
    Ok(Run { policy: name.into(), wall_s, client_lag_p99_s, summary })
}

/// Runs a fleet in real time, with the trace over and over, until SIGINT or SIGTERM.
async fn keep(args: &DemoArgs, trace: &Arc<Trace>) -> Result<()> {
    let policy = Config::default().routing.policy;
    let named = policy.name();
    let stage = Stage::set(args, 1.0, policy, Ports::KEPT).await?;
    let (clients, operators) = (stage.serving.address, stage.serving.metrics_address);
    args.tell(&format!(
        "Dashboard: http://{operators}/dashboard\n\n\
         {} mock engines under {named}, in real time, with the traffic of a trace. Ctrl-C ends it. Send requests of your own:\n\n\
         curl -N http://{clients}/v1/chat/completions -H 'content-type: application/json' \\\n  \
         -d '{{\"model\": \"{MODEL}\", \"stream\": true, \"max_tokens\": 16, \
         \"messages\": [{{\"role\": \"user\", \"content\": \"hello\"}}]}}'\n\
         curl http://{clients}/v1/models\n\
         curl 'http://{operators}/decisions?limit=3'\n\
         curl http://{operators}/metrics\n",
        args.engines
    ))?;
    let traffic = async {
        loop {
            let round = ReplayConfig {
                base_url: format!("http://{clients}"),
                model: MODEL.into(),
                trace: Arc::clone(trace),
                speed: 1.0,
                ..ReplayConfig::default()
            };
            replay(round, |_, _| ()).await?;
        }
    };
    let mut terminate = signal(SignalKind::terminate())?;
    tokio::select! {
        ended = traffic => {
            let ended: Result<()> = ended;
            ended?;
        }
        interrupted = tokio::signal::ctrl_c() => interrupted?,
        _ = terminate.recv() => {}
    }
    // Requests of the trace are in flight; nothing is to be waited for.
    stage.serving.shut_down_or(std::future::ready(())).await;
    Ok(())
}

/// The gateway's ports.
#[derive(Clone, Copy, Debug)]
struct Ports {
    clients: u16,
    operators: u16,
}

// === impl Ports ===

impl Ports {
    /// Free ones.
    const FREE: Self = Self { clients: 0, operators: 0 };
    /// Those of `kvlane serve`: a page that is open finds the next demo, too.
    const KEPT: Self = Self { clients: 30_000, operators: 29_000 };
}

// === impl Stage ===

impl Stage {
    /// Starts everything and waits until every engine takes requests. A port that is not free is replaced by a free one.
    async fn set(args: &DemoArgs, speed: f64, policy: PolicyConfig, ports: Ports) -> Result<Self> {
        let mut engines = Vec::new();
        for n in 0..args.engines {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
            let config = MockConfig { speed, seed: n as u64, ..args.engine.clone() };
            engines.push(MockEngine::start(config, listener)?);
        }
        let spec = |engine: &MockEngine| WorkerSpec::new(format!("http://{}", engine.addr()));
        let mut config = Config { workers: engines.iter().map(spec).collect(), ..Config::default() };
        config.routing.policy = policy;
        config.health.interval = Duration::from_millis(500);
        let free = |port| match std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            Ok(_) => port,
            Err(_) => 0,
        };
        (config.server.port, config.metrics.port) = (free(ports.clients), free(ports.operators));
        let serving = Serving::start_at_speed(config, speed).context("cannot start the gateway")?;
        let stage = Self { serving, engines };
        tokio::time::timeout(READY_TIMEOUT, stage.ready())
            .await
            .with_context(|| format!("the engines were not ready within {READY_TIMEOUT:?}"))?;
        Ok(stage)
    }

    async fn ready(&self) {
        let eligible = |stage: &Self| -> usize {
            let pools = stage.serving.fleet.pools();
            pools.iter().map(|pool| pool.router.read(|scheduler| scheduler.pool().eligible().count())).sum()
        };
        while eligible(self) < self.engines.len() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// The engines' addresses, and their names in the tables.
    fn engine_names(&self) -> Vec<(String, String)> {
        let named =
            |(n, engine): (usize, &MockEngine)| (format!("http://{}", engine.addr()), format!("engine-{n}"));
        self.engines.iter().enumerate().map(named).collect()
    }

    async fn strike(self) {
        self.serving.shut_down().await;
        drop(self.engines);
    }
}

// === impl Report ===

impl Report {
    fn new(args: &DemoArgs, trace: &Trace) -> Self {
        let source = args.trace.as_ref().map_or_else(
            || "Mooncake conversation trace (FAST'25), 30 % of its sessions, seconds 2400 to 3000".to_owned(),
            |path| path.display().to_string(),
        );
        let facts = TraceFacts {
            source,
            requests: trace.requests.len(),
            span_s: trace.span_s(),
            input_tokens: trace.input_tokens(),
            output_tokens: trace.output_tokens(),
        };
        Self {
            schema: "kvlane.demo/1",
            trace: facts,
            engines: args.engines,
            preset: args.engine.timing.as_ref().map_or_else(|| args.preset.clone(), TimingModel::name),
            speed: args.speed,
            runs: Vec::new(),
        }
    }

    fn opening(&self) -> String {
        let TraceFacts { source, requests, span_s, input_tokens, output_tokens } = &self.trace;
        format!(
            "Replaying {source}\n{requests} requests in {span_s:.0} s, {:.1} M prompt and {:.2} M output tokens, open loop \
             at their timestamps,\nonto {} mock engines timed like {}. Trace and engines run {} times as fast as real; \
             times below are the trace's.\n",
            *input_tokens as f64 / 1e6,
            *output_tokens as f64 / 1e6,
            self.engines,
            self.preset,
            self.speed
        )
    }

    fn table(&self) -> String {
        let mut text = format!(
            "\n{:14} {:>30}   {:>15}   {:>7}   {:>6}   requests per engine\n{:14} {:>9}{:>7}{:>7}{:>7}   {:>8}{:>7}\n",
            "policy", "TTFT s", "E2E s", "cached", "errors", "", "mean", "p50", "p90", "p99", "mean", "p99"
        );
        let cell = |percentiles: &Option<Percentiles>, pick: fn(&Percentiles) -> f64| {
            percentiles.as_ref().map_or("-".to_owned(), |all| format!("{:.2}", pick(all)))
        };
        for Run { policy, summary, .. } in &self.runs {
            let Summary { ttft_s, e2e_s, cached_share, errors, per_endpoint, .. } = summary;
            let counts: Vec<String> = per_endpoint.values().map(u64::to_string).collect();
            let _ = writeln!(
                text,
                "{policy:14} {:>9}{:>7}{:>7}{:>7}   {:>8}{:>7}   {:>7}   {errors:>6}   {}",
                cell(ttft_s, |all| all.mean),
                cell(ttft_s, |all| all.p50),
                cell(ttft_s, |all| all.p90),
                cell(ttft_s, |all| all.p99),
                cell(e2e_s, |all| all.mean),
                cell(e2e_s, |all| all.p99),
                cached_share.map_or("-".to_owned(), |share| format!("{:.1} %", share * 100.0)),
                counts.join(" ")
            );
        }
        text
    }

    /// Each run against the first, in a sentence.
    fn conclusion(&self) -> String {
        let Some((first, others)) = self.runs.split_first() else { return String::new() };
        let ttft = |run: &Run| run.summary.ttft_s.as_ref().map(|all| all.mean);
        let mut text = String::new();
        for run in others {
            let (Some(before), Some(after)) = (ttft(first), ttft(run)) else { continue };
            let cached = |run: &Run| run.summary.cached_share.unwrap_or(0.0) * 100.0;
            let _ = writeln!(
                text,
                "{} against {}: mean time to first token {:+.0} %, prompt tokens found in cache {:.1} % instead of {:.1} %",
                run.policy,
                first.policy,
                (after / before - 1.0) * 100.0,
                cached(run),
                cached(first)
            );
        }
        text
    }
}
