//! Compares the ranking of policies by the gateway with the ranking by the simulator.
//!
//! The same pieces of a trace go through a live gateway onto mock engines, and through a simulated world of the same
//! engines, under each policy from empty caches. Trace, engines and the gateway's clock run `--speed` times as fast
//! as real; all times are printed in trace seconds. The differences are effects of real time that the model lacks:
//! HTTP, timers, a busy machine, a client that is late.
//!
//! Intervals are bootstraps over the sessions of all pieces together: a policy is better than another if the
//! difference of their means is on one side of zero in 95 % of the draws, both under the same sessions. The two
//! rankings agree if none contradicts the other about any pair of its best `--top` policies. The result is printed at
//! the end, and the exit code is 1 if they disagree.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use kvlane_core::policy::PolicyConfig;
use kvlane_core::rng::Rng;
use kvlane_core::router;
use kvlane_core::time::Nanos;
use kvlane_core::timing::TimingModel;
use kvlane_fleet::timings::Timings;
use kvlane_gateway::config::{Config, WorkerSpec};
use kvlane_gateway::serve::Serving;
use kvlane_lab::prompt::BYTES_PER_TOKEN;
use kvlane_lab::replay::{ReplayConfig, replay};
use kvlane_lab::statistics::summary::Percentiles;
use kvlane_mock::{MockConfig, MockEngine};
use kvlane_sim::fault::EventFeed;
use kvlane_sim::{
    Drive, EngineConfig, GatewaysConfig, Hints, Plan, ReportFeed, Send, TransferConfig, World, WorldConfig,
};
use kvlane_trace::format::{self, Options};
use kvlane_trace::record::Record;
use kvlane_trace::trace::Trace;
use tokio::net::TcpListener;

type Failure = Box<dyn Error>;

/// The model's name.
const MODEL: &str = "mock";
/// Bootstrap draws of sessions.
const DRAWS: usize = 2000;
/// Share of the draws outside an interval, at each end.
const TAIL: f64 = 0.025;
/// Interval of an engine's load reports, in trace seconds, live and simulated.
const REPORT_EVERY: Duration = Duration::from_secs(2);
/// Timeout for engines and gateway to become ready.
const READY_TIMEOUT: Duration = Duration::from_secs(20);

/// Flags.
#[derive(Parser)]
struct Args {
    /// The trace, of any format that `kvlane trace import` reads.
    #[arg(default_value = "crates/kvlane-lab/assets/mooncake-conversation.trace.jsonl.gz")]
    trace: PathBuf,
    /// Policies.
    #[arg(
        long,
        value_delimiter = ',',
        default_values = [
            "fleet_cost", "lmetric", "cache_aware", "conductor", "session_sticky", "weighted", "least_load", "round_robin",
        ]
    )]
    policies: Vec<String>,
    /// Number of engines.
    #[arg(long, default_value_t = 4)]
    engines: usize,
    /// Model and machine that they imitate.
    #[arg(long, default_value = "llama-3.3-70b@a100x4")]
    preset: String,
    /// Number of pieces of the trace.
    #[arg(long, default_value_t = 3)]
    pieces: u32,
    /// Seconds of each piece.
    #[arg(long, default_value_t = 600.0)]
    seconds: f64,
    /// Share of the sessions, in percent.
    #[arg(long, default_value_t = 30)]
    sessions_percent: u32,
    /// Trace seconds per wall-clock second.
    #[arg(long, default_value_t = 30.0)]
    speed: f64,
    /// Number of best policies to compare.
    #[arg(long, default_value_t = 3)]
    top: usize,
}

/// Sums over one session of one piece under one policy.
#[derive(Clone, Copy, Default)]
struct Sums {
    requests: f64,
    ttft_s: f64,
    e2e_s: f64,
}

/// By piece and session, then by policy.
type Sessions = BTreeMap<(u32, u32), Vec<Sums>>;

/// One policy's run of one piece.
struct Lived {
    records: Vec<Record>,
    /// 99th percentile of the client's lateness, in trace seconds.
    lag_s: f64,
    failed: usize,
}

fn main() -> Result<ExitCode, Failure> {
    let args = Args::parse();
    let policies: Vec<PolicyConfig> = args
        .policies
        .iter()
        .map(|name| PolicyConfig::by_name(name).ok_or_else(|| format!("unknown policy '{name}'")))
        .collect::<Result<_, _>>()?;
    let whole = format::open(&args.trace, &Options::default())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let mut out = std::io::stdout();
    writeln!(
        out,
        "{} engines like {}, {} pieces of {} s with {} % of the sessions of {}, at {} times real speed",
        args.engines,
        args.preset,
        args.pieces,
        args.seconds,
        args.sessions_percent,
        args.trace.display(),
        args.speed
    )?;
    let (mut lived, mut simulated) = (Sessions::new(), Sessions::new());
    let (mut lag_s, mut failed, mut requests) = (0.0_f64, 0, 0);
    for piece in 0..args.pieces {
        let sent = Arc::new(piece_of(&whole, &args, piece));
        requests += sent.requests.len();
        for (n, policy) in policies.iter().enumerate() {
            let begun = Instant::now();
            let run = runtime.block_on(live(&args, &sent, policy, piece))?;
            // The engines count their chat template, too, equally under every policy.
            let mut trace = Trace::clone(&sent);
            for (request, record) in trace.requests.iter_mut().zip(&run.records) {
                request.input_tokens = request.input_tokens.max(record.prompt_tokens);
            }
            let of_records = run.records.iter().map(|record| (record.ttft_s(), record.e2e_s()));
            let of_records =
                of_records.map(|(ttft_s, e2e_s)| (ttft_s.map(|s| s * args.speed), e2e_s * args.speed));
            add(&mut lived, (piece, n, policies.len()), &trace, of_records);
            let outcomes = simulate(&args, &trace, policy, piece)?;
            add(&mut simulated, (piece, n, policies.len()), &trace, outcomes.into_iter());
            (lag_s, failed) = (lag_s.max(run.lag_s), failed + run.failed);
            writeln!(
                std::io::stderr(),
                "piece {piece}, {}: {} requests, {} failed, client late by {:.2} s (p99), {:.0} s of real time",
                policy.name(),
                run.records.len(),
                run.failed,
                run.lag_s,
                begun.elapsed().as_secs_f64()
            )?;
        }
    }
    writeln!(
        out,
        "{requests} requests of {} sessions under each policy; {failed} failed; the client was late by at most {lag_s:.2} s \
         of the trace (99th percentile of a run)\n",
        lived.len()
    )?;
    let names: Vec<&str> = policies.iter().map(PolicyConfig::name).collect();
    let mut agree = true;
    for (what, of) in [("E2E", (|sums| sums.e2e_s) as fn(&Sums) -> f64), ("TTFT", |sums| sums.ttft_s)] {
        let (live, sim) = (Means::draw(&lived, of, names.len()), Means::draw(&simulated, of, names.len()));
        agree &= compare(&mut out, what, &names, &live, &sim, args.top)?;
    }
    Ok(if agree && failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The requests of a window of the trace and some of its sessions, from time zero, without dependencies.
fn piece_of(whole: &Trace, args: &Args, piece: u32) -> Trace {
    let from_s = f64::from(piece) * args.seconds;
    let taken = |index: &u32| {
        let request = &whole.requests[*index as usize];
        // Neighbouring sessions differ, so any rule that does not depend on lengths works.
        let lot = request.session.wrapping_mul(2_654_435_761) >> 16;
        (from_s..from_s + args.seconds).contains(&request.arrival_s) && lot % 100 < args.sessions_percent
    };
    let mut trace = whole.select((0..whole.requests.len() as u32).filter(taken));
    let first_s = trace.requests.first().map_or(0.0, |request| request.arrival_s);
    for request in &mut trace.requests {
        request.arrival_s -= first_s;
        (request.after, request.think_s) = (None, None);
        request.output_tokens = request.output_tokens.max(1);
    }
    trace
}

/// Adds up TTFT and E2E latency by session. A request that failed counts with its time until then.
fn add(
    sessions: &mut Sessions,
    (piece, policy, policies): (u32, usize, usize),
    trace: &Trace,
    times: impl Iterator<Item = (Option<f64>, f64)>,
) {
    for (request, (ttft_s, e2e_s)) in trace.requests.iter().zip(times) {
        let of_session = sessions.entry((piece, request.session)).or_default();
        of_session.resize(policies, Sums::default());
        let sums = &mut of_session[policy];
        sums.requests += 1.0;
        sums.ttft_s += ttft_s.unwrap_or(e2e_s);
        sums.e2e_s += e2e_s;
    }
}

/// A mock engine's configuration.
fn mock(args: &Args, n: usize) -> MockConfig {
    MockConfig {
        model: MODEL.into(),
        preset: args.preset.clone(),
        speed: args.speed,
        seed: n as u64,
        ..MockConfig::default()
    }
}

/// The gateway's configuration, from which the simulated router is made, too.
fn gateway_config(policy: &PolicyConfig, piece: u32) -> Config {
    let mut config = Config::default();
    config.routing.policy = policy.clone();
    config.routing.block_bytes = MockConfig::default().block_size * BYTES_PER_TOKEN as u32;
    config.routing.seed = piece.into();
    config
}

/// Through a gateway as in `kvlane serve`, onto engines, all in this process.
async fn live(args: &Args, trace: &Arc<Trace>, policy: &PolicyConfig, piece: u32) -> Result<Lived, Failure> {
    let mut engines = Vec::new();
    for n in 0..args.engines {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        engines.push(MockEngine::start(mock(args, n), listener)?);
    }
    let workers = engines.iter().map(|engine| WorkerSpec::new(format!("http://{}", engine.addr()))).collect();
    let mut config = Config { workers, ..gateway_config(policy, piece) };
    config.health.interval = REPORT_EVERY.div_f64(args.speed);
    (config.server.port, config.metrics.port) = (0, 0);
    let serving = Serving::start_at_speed(config, args.speed)?;
    let ready = async {
        let eligible = || -> usize {
            let pools = serving.fleet.pools();
            pools.iter().map(|pool| pool.router.read(|scheduler| scheduler.pool().eligible().count())).sum()
        };
        while eligible() < args.engines {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(READY_TIMEOUT, ready).await.map_err(|_| "the engines were not ready in time")?;
    let config = ReplayConfig {
        base_url: format!("http://{}", serving.address),
        model: MODEL.into(),
        trace: Arc::clone(trace),
        speed: args.speed,
        seed: piece.into(),
        // The simulator's router does not get it either.
        tell_lengths: false,
        ..ReplayConfig::default()
    };
    let report = replay(config, |_, _| ()).await?;
    serving.shut_down().await;
    drop(engines);
    for error in &report.first_errors {
        writeln!(std::io::stderr(), "{error}")?;
    }
    let failed = report.records.iter().filter(|record| !record.is_ok()).count();
    let lag_s = report.client_lag_s.map_or(0.0, |lag: Percentiles| lag.p99 * args.speed);
    Ok(Lived { records: report.records, lag_s, failed })
}

/// Through a world of the same engines: TTFT and E2E latency.
fn simulate(
    args: &Args,
    trace: &Trace,
    policy: &PolicyConfig,
    piece: u32,
) -> Result<Vec<(Option<f64>, f64)>, Failure> {
    let mock = mock(args, 0);
    let engine = EngineConfig {
        max_num_seqs: mock.max_num_seqs,
        max_num_batched_tokens: mock.max_num_batched_tokens,
        ..EngineConfig::vllm(TimingModel::preset(&args.preset)?, mock.block_size, mock.gpu_memory_utilization)
    };
    let settings = gateway_config(policy, piece).fleet_settings(Timings::default());
    let mut world = World::new(WorldConfig {
        // The engines publish no KV events.
        router: router::Config { exact: None, ..settings.router(MODEL) },
        engines: vec![engine; args.engines],
        parts: Vec::new(),
        gateways: GatewaysConfig::default(),
        fetch_tokens_min: None,
        link: TransferConfig::default(),
        routing_delay: Nanos::ZERO,
        reports: Some(ReportFeed { interval: REPORT_EVERY.into(), age: Nanos::ZERO }),
        events: EventFeed::default(),
        faults: Vec::new(),
        health_delay: Nanos::ZERO,
        attempts_max: 1,
        rules: None,
        reloaded: None,
        hints: Hints::default(),
        client_timeout: None,
        seed: piece.into(),
        stopwatch: None,
    });
    // There are no dependencies here, but turns still belong to their conversations.
    let mut plan = Plan::new(trace);
    let mut first = BTreeMap::new();
    for (index, request) in trace.requests.iter().enumerate() {
        plan.root[index] = *first.entry(request.session).or_insert(index as u32);
    }
    let requests = 0..trace.requests.len() as u32;
    let run = world
        .run(&Send { trace, plan: &plan, requests, origin_s: 0.0, drive: Drive::Open { load: 1.0 } }, |_| ());
    Ok(run.outcomes.iter().map(|outcome| (outcome.ttft_s(), outcome.e2e_s())).collect())
}

/// A figure's mean for each policy, and in each draw.
struct Means {
    all: Vec<f64>,
    draws: Vec<Vec<f64>>,
}

// === impl Means ===

impl Means {
    fn draw(sessions: &Sessions, of: fn(&Sums) -> f64, policies: usize) -> Self {
        let sessions: Vec<&Vec<Sums>> = sessions.values().collect();
        let mean = |chosen: &mut dyn Iterator<Item = usize>| {
            let (mut sums, mut requests) = (vec![0.0; policies], vec![0.0; policies]);
            for session in chosen {
                for (policy, of_policy) in sessions[session].iter().enumerate() {
                    sums[policy] += of(of_policy);
                    requests[policy] += of_policy.requests;
                }
            }
            sums.iter().zip(requests).map(|(sum, requests)| sum / f64::max(requests, 1.0)).collect::<Vec<_>>()
        };
        let mut rng = Rng::new(1);
        let all = mean(&mut (0..sessions.len()));
        let count = sessions.len();
        let draws = (0..DRAWS).map(|_| mean(&mut (0..count).map(|_| rng.below(count)))).collect();
        Self { all, draws }
    }

    /// The middle 95 % of a figure's draws.
    fn interval(&self, of: impl Fn(&[f64]) -> f64) -> (f64, f64) {
        let mut figures: Vec<f64> = self.draws.iter().map(|draw| of(draw)).collect();
        figures.sort_unstable_by(f64::total_cmp);
        let at = |share: f64| figures[((DRAWS as f64 * share) as usize).min(DRAWS - 1)];
        (at(TAIL), at(1.0 - TAIL))
    }

    /// Whether policy `a` is better than `b` (-1), worse (1), or not significantly different (0).
    fn sign(&self, a: usize, b: usize) -> i32 {
        match self.interval(|draw| draw[a] - draw[b]) {
            (_, high) if high < 0.0 => -1,
            (low, _) if low > 0.0 => 1,
            _ => 0,
        }
    }

    /// Policies from best to worst.
    fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.all.len()).collect();
        order.sort_by(|&a, &b| self.all[a].total_cmp(&self.all[b]));
        order
    }
}

/// Prints both rankings of one figure and whether the best policies agree.
fn compare(
    out: &mut impl std::io::Write,
    what: &str,
    names: &[&str],
    live: &Means,
    sim: &Means,
    top: usize,
) -> Result<bool, Failure> {
    let (live_order, sim_order) = (live.order(), sim.order());
    let place =
        |order: &[usize], policy: usize| order.iter().position(|&other| other == policy).unwrap_or(0) + 1;
    writeln!(
        out,
        "{what}, mean, s        live  95 %              simulated  95 %              difference  place live, sim"
    )?;
    for &policy in &live_order {
        let (low, high) = live.interval(|draw| draw[policy]);
        let (sim_low, sim_high) = sim.interval(|draw| draw[policy]);
        let (mean, sim_mean) = (live.all[policy], sim.all[policy]);
        writeln!(
            out,
            "{:16} {mean:9.3}  {low:7.3} to {high:7.3}  {sim_mean:9.3}  {sim_low:7.3} to {sim_high:7.3}  {:+8.1} %  {:>10}, {}",
            names[policy],
            (mean / sim_mean - 1.0) * 100.0,
            place(&live_order, policy),
            place(&sim_order, policy)
        )?;
    }
    let best: Vec<usize> = {
        let mut best: Vec<usize> = live_order.iter().take(top).copied().collect();
        best.extend(
            sim_order.iter().take(top).filter(|policy| !live_order[..top.min(names.len())].contains(policy)),
        );
        best
    };
    let mut against = Vec::new();
    for (n, &a) in best.iter().enumerate() {
        for &b in &best[..n] {
            let (live, sim) = (live.sign(a, b), sim.sign(a, b));
            if live * sim < 0 {
                against.push(format!("{} and {}", names[a], names[b]));
            }
        }
    }
    let first =
        |order: &[usize]| order.iter().take(top).map(|&policy| names[policy]).collect::<Vec<_>>().join(", ");
    writeln!(out, "best {top} live: {}; simulated: {}", first(&live_order), first(&sim_order))?;
    match against.is_empty() {
        true => writeln!(out, "the two agree within their intervals\n")?,
        false => writeln!(out, "they do NOT agree about {}\n", against.join("; "))?,
    }
    Ok(against.is_empty())
}
