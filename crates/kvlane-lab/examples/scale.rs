//! Cost of a simulation: requests, engine steps, seconds, memory.
//!
//! `scale ladder FILE [ARM]` runs each arm of a scenario once on one thread, seed 1. `scale
//! chat|agentic|shared-prefix REQUESTS ENGINES POLICY [exact|faulty]` generates a trace and plays it through a fleet;
//! with `exact` the engines publish KV events, with `faulty` some of these are lost, engines die and are slow, and
//! clients give up. `scale decode BLOCK_TOKENS SEQUENCES` plays a world of one engine in which that many sequences
//! decode. `scale plot ROWS` draws a file of rows as SVG: the cost of the first row's fleet over requests, and of its
//! number of requests over engines.
//!
//! A row is CSV: workload, requests, engines, policy, CPU seconds to generate the trace, CPU and wall-clock seconds
//! to play it, engine steps, millions of them per CPU second, peak memory in MiB, and a digest of all outcomes, which
//! must not change with optimizations. Linux only.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt::Write as _;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use kvlane_core::index::{approx, exact};
use kvlane_core::policy::PolicyConfig;
use kvlane_core::time::Nanos;
use kvlane_core::timing::TimingModel;
use kvlane_core::{router, scheduler};
use kvlane_lab::report::{Axis, Chart, Mark, Series};
use kvlane_lab::scenario::{self, Scenario};
use kvlane_sim::fault::{EventFeed, Fault};
use kvlane_sim::{
    Drive, EngineConfig, GatewaysConfig, Hints, Plan, ReportFeed, Send, TransferConfig, World, WorldConfig,
};
use kvlane_trace::format::TraceError;
use kvlane_trace::generate::{Arrivals, Workload, generate};
use kvlane_trace::trace::{Builder, Trace, TraceRequest};

type Failure = Box<dyn Error>;

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["ladder", file, ref arm @ ..] => ladder(Path::new(file), arm.first().copied()),
        ["plot", rows] => plot(Path::new(rows)),
        ["decode", block_tokens, sequences] => decode(block_tokens.parse()?, sequences.parse()?),
        [workload, requests, engines, policy, ref knows @ ..] => {
            let knows = match knows {
                ["exact"] => Knows::Events,
                ["faulty"] => Knows::Rumours,
                _ => Knows::Dispatches,
            };
            play(workload, requests.parse()?, engines.parse()?, policy, knows)
        }
        _ => Err("scale ladder FILE [ARM] | decode BLOCK_TOKENS SEQUENCES | plot ROWS | \
                  WORKLOAD REQUESTS ENGINES POLICY [exact|faulty]"
            .into()),
    }
}

/// Runs each arm of a scenario once.
fn ladder(file: &Path, arm: Option<&str>) -> Result<(), Failure> {
    let mut scenario: Scenario = serde_saphyr::from_str(&std::fs::read_to_string(file)?)?;
    scenario.seeds = 1;
    scenario.policies.retain(|one| arm.is_none_or(|arm| one.arm == arm));
    scenario.published.clear();
    let no_trace = |path: &Path| {
        let source = std::io::Error::other("only made workloads are measured");
        Err(TraceError::Open { path: path.into(), source })
    };
    let before = cpu_s()?;
    let rows =
        scenario::run(&scenario, Path::new("."), &no_trace, 1, scenario::Aside::default(), &|_, _| ())?;
    let cpu_s = cpu_s()? - before;
    let requests: f64 = rows.iter().filter_map(|row| row.simulated.get("requests")).sum();
    let mut out = std::io::stdout();
    writeln!(
        out,
        "{requests} requests in rows, {cpu_s:.2} CPU s, {} MiB, {:016x}",
        memory_mib()?,
        digest(&rows)
    )?;
    Ok(())
}

/// Plays a generated trace through a fleet.
fn play(workload: &str, requests: usize, engines: usize, policy: &str, knows: Knows) -> Result<(), Failure> {
    let before = cpu_s()?;
    let mut made = Workload::by_kind(workload).ok_or("no such workload")?;
    // Conversations per second that an engine sustains, and approximate requests of each.
    let (rate, turns) = match made {
        Workload::Chat(_) => (0.15, 5),
        Workload::Agentic(_) => (0.02, 60),
        _ => (2.0, 1),
    };
    let count = (requests / turns * 5 / 4 + 1) as u32;
    made.set_arrivals(Arrivals::Poisson { rate: rate * engines as f64, count: Some(count), seconds: None });
    let mut trace = generate(&made, 1)?;
    trace.requests.truncate(requests);
    let make_s = cpu_s()? - before;
    let timing = TimingModel::preset("llama-3.1-8b@h100")?;
    let engine = EngineConfig::vllm(timing, 16, 0.9);
    let policy = PolicyConfig::by_name(policy).ok_or("no such policy")?;
    measure(workload, &trace, fleet(&engine, engines, policy, knows), Drive::Open { load: 1.0 }, make_s)
}

/// Plays a world of one engine that only decodes.
fn decode(block_tokens: u32, sequences: u32) -> Result<(), Failure> {
    let mut builder = Builder::new(block_tokens);
    for session in 0..sequences * 20 {
        builder.branch(TraceRequest {
            input_tokens: 500 + session % 97 * 7,
            output_tokens: 3000,
            session,
            ..TraceRequest::default()
        });
    }
    let timing = TimingModel::preset("qwen3-32b@h200x8")?;
    let engine =
        EngineConfig { blocks: 1_048_576 / block_tokens, ..EngineConfig::vllm(timing, block_tokens, 0.9) };
    let policy = PolicyConfig::by_name("cache_aware").ok_or("no such policy")?;
    let drive = Drive::Closed { clients: sequences };
    measure("decode", &builder.finish(), fleet(&engine, 1, policy, Knows::Dispatches), drive, 0.0)
}

/// Draws CPU seconds over requests and over engines: a line for each number of engines or requests that has three rows.
fn plot(rows: &Path) -> Result<(), Failure> {
    let text = std::fs::read_to_string(rows)?;
    let mut points = Vec::new();
    for row in text.lines().filter(|row| !row.starts_with('#')) {
        let field = |n| row.split(',').nth(n).unwrap_or_default().parse::<f64>();
        points.push((field(1)?, field(2)?, field(5)?));
    }
    let series = |name: String, mut points: Vec<(f64, f64)>| {
        points.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        Series { name, points, band: Vec::new(), mark: Mark::Line }
    };
    let mut lines: Vec<Series> = Vec::new();
    let engines: BTreeSet<u64> = points.iter().map(|point| point.1 as u64).collect();
    for count in engines {
        let of_fleet = points.iter().filter(|point| point.1 as u64 == count);
        let line: Vec<(f64, f64)> = of_fleet.map(|&(requests, _, cpu_s)| (requests, cpu_s)).collect();
        if line.len() > 2 {
            lines.push(series(format!("over requests, {count} engines"), line));
        }
    }
    let requests: BTreeSet<u64> = points.iter().map(|point| point.0 as u64).collect();
    for count in requests {
        let of_trace = points.iter().filter(|point| point.0 as u64 == count);
        let line: Vec<(f64, f64)> = of_trace.map(|&(_, engines, cpu_s)| (engines, cpu_s)).collect();
        if line.len() > 2 {
            lines.push(series(format!("over engines, {count} requests"), line));
        }
    }
    let axis = |label: &str| Axis::log(label);
    let title = "What a simulation costs".to_owned();
    let chart = Chart { title, x: axis("requests, or engines"), y: axis("CPU seconds"), series: lines };
    std::io::stdout().write_all(chart.to_svg().as_bytes())?;
    Ok(())
}

/// Cache knowledge of the router.
#[derive(Clone, Copy, PartialEq)]
enum Knows {
    Dispatches,
    Events,
    /// Events, some of which are lost, while engines die and clients give up.
    Rumours,
}

fn fleet(engine: &EngineConfig, engines: usize, policy: PolicyConfig, knows: Knows) -> WorldConfig {
    let secs = Nanos::from_secs;
    let faulty = knows == Knows::Rumours;
    let mut faults = Vec::new();
    if faulty {
        for (endpoint, at) in (0..engines).zip([100, 300, 350, 500]) {
            faults.push(Fault::Death { at: secs(at), endpoint, back_at: Some(secs(at + 60)) });
            faults.push(Fault::Slow {
                at: secs(at + 120),
                endpoint,
                factor: 3.0,
                until: Some(secs(at + 200)),
            });
        }
    }
    WorldConfig {
        engines: vec![engine.clone(); engines],
        router: router::Config {
            scheduler: scheduler::Config { seed: 1, ..scheduler::Config::new(policy) },
            index: approx::Config {
                memory_bytes_max: 256 << 20,
                ttl: secs(if knows == Knows::Dispatches { 1800 } else { 2 }),
            },
            exact: (knows != Knows::Dispatches).then_some(exact::Config { memory_bytes_max: usize::MAX }),
            block_tokens: engine.block_tokens,
        },
        parts: Vec::new(),
        gateways: GatewaysConfig::default(),
        fetch_tokens_min: faulty.then_some(4000),
        link: TransferConfig::default(),
        routing_delay: Nanos::from_millis(1),
        reports: Some(ReportFeed { interval: secs(1), age: Nanos::ZERO }),
        events: EventFeed {
            delay: Nanos::from_millis(5),
            lost: if faulty { 0.01 } else { 0.0 },
            ..EventFeed::default()
        },
        faults,
        health_delay: Nanos::from_millis(100),
        attempts_max: 5,
        rules: None,
        reloaded: None,
        hints: Hints::default(),
        client_timeout: faulty.then_some(secs(20)),
        seed: 1,
        stopwatch: None,
    }
}

/// Plays a trace and prints the row.
fn measure(
    workload: &str,
    trace: &Trace,
    config: WorldConfig,
    drive: Drive,
    make_s: f64,
) -> Result<(), Failure> {
    let (engines, policy) = (config.engines.len(), config.router.scheduler.policy.name());
    let made_mib = memory_mib()?;
    let (before, start) = (cpu_s()?, Instant::now());
    let plan = Plan::new(trace);
    let mut world = World::new(config);
    let requests = 0..trace.requests.len() as u32;
    let send = Send { trace, plan: &plan, requests, origin_s: 0.0, drive };
    let run = world.run(&send, |_| ());
    let (cpu_s, wall_s) = (cpu_s()? - before, start.elapsed().as_secs_f64());
    let stats = world.engine_stats();
    let steps: u64 = stats.iter().map(|stats| stats.steps).sum();
    let busy_s: f64 = stats.iter().map(|stats| stats.busy.as_secs_f64()).sum();
    let span_s = (run.end - run.start).as_secs_f64();
    let mean = |total: u64| total as f64 / trace.requests.len() as f64;
    let cached: u64 = run.outcomes.iter().map(|outcome| u64::from(outcome.cached_tokens)).sum();
    let mut out = std::io::stdout();
    writeln!(
        out,
        "{workload},{},{engines},{policy},{make_s:.2},{cpu_s:.2},{wall_s:.2},{steps},{:.2},{},{:016x}",
        trace.requests.len(),
        steps as f64 / cpu_s / 1e6,
        memory_mib()?,
        digest(&run.outcomes)
    )?;
    writeln!(
        out,
        "# trace made in {made_mib} MiB; mean prompt {:.0}, cached {:.0}, answer {:.0} tokens; {span_s:.0} s simulated, engines busy {:.0} %; {:.1} sequences a step; router index {} MiB",
        mean(trace.input_tokens()),
        mean(cached),
        mean(trace.output_tokens()),
        busy_s / span_s / engines as f64 * 100.0,
        mean(trace.output_tokens()) * trace.requests.len() as f64 / steps as f64,
        world.router().index_size().0 >> 20,
    )?;
    Ok(())
}

/// CPU seconds all threads of this process have used.
fn cpu_s() -> Result<f64, Failure> {
    let stat = std::fs::read_to_string("/proc/self/stat")?;
    let after_name = stat.rsplit(") ").next().unwrap_or_default();
    let ticks = |field: usize| after_name.split(' ').nth(field).and_then(|ticks| ticks.parse::<f64>().ok());
    // User and system time, fields 14 and 15 of proc(5), in hundredths of a second.
    Ok((ticks(11).ok_or("no utime")? + ticks(12).ok_or("no stime")?) / 100.0)
}

/// Peak memory of this process.
fn memory_mib() -> Result<u64, Failure> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? >> 10)
}

/// FNV-1a (Fowler, Noll and Vo) of a value's debug output.
fn digest(what: &impl std::fmt::Debug) -> u64 {
    struct Fnv(u64);
    impl std::fmt::Write for Fnv {
        fn write_str(&mut self, text: &str) -> std::fmt::Result {
            for byte in text.bytes() {
                self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
            }
            Ok(())
        }
    }
    let mut fnv = Fnv(0xcbf2_9ce4_8422_2325);
    // It never fails.
    let _ = write!(fnv, "{what:?}");
    fnv.0
}
