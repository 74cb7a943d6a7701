//! Effect of session admission: conversations of a coding agent at a rate, on four engines, with and without it.
//!
//! `admission TRACE [key=value ...]` plays the first conversations of a trace (any format; intended for Weka's
//! agents), up to the first request whose context is too long and with limited think times, started as a Poisson
//! process, under each policy with session admission off and on, and prints a row of Markdown for each. With
//! `sessions=0` the trace is played at its own times, `load` times as fast; instead of a trace, a kind of generated
//! workload can be given. Keys and their defaults: `sessions=200`, `skip=0`, `rate=0.12`, `context=128000`,
//! `think_max_s=600`, `engines=4`, `preset=qwen3-30b-a3b@h200`, `policies=fleet_cost`, `arms=off,on`, `seed=1`,
//! `load=1`, `knowledge=approximate` (or `exact`).

use std::collections::BTreeMap;
use std::error::Error;
use std::io::Write;
use std::path::Path;

use kvlane_core::index::{approx, exact};
use kvlane_core::policy::PolicyConfig;
use kvlane_core::rng::Rng;
use kvlane_core::time::Nanos;
use kvlane_core::timing::TimingModel;
use kvlane_core::{router, scheduler};
use kvlane_lab::figures::{Judgement, figures};
use kvlane_sim::fault::EventFeed;
use kvlane_sim::{
    Drive, EngineConfig, GatewaysConfig, Hints, Plan, ReportFeed, Send, TransferConfig, World, WorldConfig,
};
use kvlane_trace::format::{self, Options};
use kvlane_trace::generate::{Arrivals, Workload, generate};
use kvlane_trace::trace::Trace;

type Failure = Box<dyn Error>;

const KEYS: [(&str, &str); 12] = [
    ("sessions", "200"),
    ("skip", "0"),
    ("rate", "0.12"),
    ("context", "128000"),
    ("think_max_s", "600"),
    ("engines", "4"),
    ("preset", "qwen3-30b-a3b@h200"),
    ("policies", "fleet_cost"),
    ("arms", "off,on"),
    ("seed", "1"),
    ("knowledge", "approximate"),
    ("load", "1"),
];

fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("admission TRACE [key=value ...]")?;
    let mut keys: BTreeMap<String, String> =
        KEYS.iter().map(|(key, value)| ((*key).into(), (*value).into())).collect();
    for arg in args {
        let (key, value) = arg.split_once('=').ok_or("key=value")?;
        *keys.get_mut(key).ok_or_else(|| format!("no key `{key}`"))? = value.into();
    }
    let trace = match Workload::by_kind(&path) {
        Some(mut workload) => {
            let (rate, count) = (keys["rate"].parse()?, keys["sessions"].parse()?);
            workload.set_arrivals(Arrivals::Poisson { rate, count: Some(count), seconds: None });
            generate(&workload, keys["seed"].parse()?)?
        }
        None if keys["sessions"] == "0" => format::open(Path::new(&path), &Options::default())?,
        None => conversations(&format::open(Path::new(&path), &Options::default())?, &keys)?,
    };
    let plan = Plan::new(&trace);
    let mut out = std::io::stdout();
    writeln!(
        out,
        "# {path}: {} requests, {} conversations, {keys:?}",
        trace.requests.len(),
        plan.roots.len()
    )?;
    writeln!(
        out,
        "| policy | admission | cached | TTFT mean, p50, p90 | TPOT mean | session mean, p50, p90 | busy | span |"
    )?;
    writeln!(out, "|---|---|---|---|---|---|---|---|")?;
    for policy in keys["policies"].split(',') {
        for arm in keys["arms"].split(',') {
            let mut world = world(policy, arm, &keys)?;
            let load = keys["load"].parse()?;
            let send = Send {
                trace: &trace,
                plan: &plan,
                requests: 0..trace.requests.len() as u32,
                origin_s: 0.0,
                drive: Drive::Open { load },
            };
            let before = world.engine_stats();
            let run = world.run(&send, |_| ());
            let found = figures(&run, &Judgement::default(), &before, &world.engine_stats());
            let of = |name: &str| found.get(name).copied().unwrap_or(f64::NAN);
            writeln!(
                out,
                "| {policy} | {arm} | {:.3} of {:.3} | {:.2}, {:.2}, {:.2} s | {:.1} ms | {:.0}, {:.0}, {:.0} s | {:.2} | {:.0} s |",
                of("cached_share"),
                of("reusable_share"),
                of("ttft_mean_s"),
                of("ttft_p50_s"),
                of("ttft_p90_s"),
                of("tpot_mean_ms"),
                of("session_mean_s"),
                of("session_p50_s"),
                of("session_p90_s"),
                of("busy_share"),
                (run.end - run.start).as_secs_f64(),
            )?;
        }
    }
    Ok(())
}

/// The first conversations, consecutively and up to the maximum context, started as a Poisson process.
fn conversations(trace: &Trace, keys: &BTreeMap<String, String>) -> Result<Trace, Failure> {
    let plan = Plan::new(trace);
    let (sessions, skip): (usize, usize) = (keys["sessions"].parse()?, keys["skip"].parse()?);
    let (rate, context): (f64, u32) = (keys["rate"].parse()?, keys["context"].parse()?);
    let think_max_s: f32 = keys["think_max_s"].parse()?;
    let mut of_root: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (index, &root) in (0u32..).zip(&plan.root) {
        of_root.entry(root).or_default().push(index);
    }
    let fits = |request: &u32| {
        let request = &trace.requests[*request as usize];
        request.input_tokens + request.output_tokens <= context
    };
    let within = |requests: Vec<u32>| requests.into_iter().take_while(fits).collect::<Vec<_>>();
    let chosen: Vec<Vec<u32>> =
        of_root.into_values().map(within).filter(|r| !r.is_empty()).skip(skip).take(sessions).collect();
    if chosen.len() < sessions {
        return Err(format!("the trace has {} such conversations", chosen.len()).into());
    }
    let mut rng = Rng::new(keys["seed"].parse()?);
    let mut picked = trace.select(chosen.iter().flatten().copied());
    let (mut begins_s, mut at) = (0.0, 0);
    for requests in &chosen {
        let of_conversation = &mut picked.requests[at..at + requests.len()];
        let shift_s = begins_s - of_conversation[0].arrival_s;
        for request in of_conversation {
            request.arrival_s += shift_s;
            request.think_s = request.think_s.map(|think_s| think_s.min(think_max_s));
        }
        begins_s -= (1.0 - rng.unit()).ln() / rate;
        at += requests.len();
    }
    Ok(picked)
}

fn world(policy: &str, arm: &str, keys: &BTreeMap<String, String>) -> Result<World, Failure> {
    let engine = EngineConfig::vllm(TimingModel::preset(&keys["preset"])?, 16, 0.9);
    let seed = keys["seed"].parse()?;
    let exact = keys["knowledge"] == "exact";
    Ok(World::new(WorldConfig {
        engines: vec![engine.clone(); keys["engines"].parse()?],
        router: router::Config {
            scheduler: scheduler::Config {
                queue_size: 100_000,
                queue_timeout: Nanos::from_secs(1_000_000),
                session_admission: arm != "off",
                seed,
                ..scheduler::Config::new(PolicyConfig::by_name(policy).ok_or("no such policy")?)
            },
            index: approx::Config { memory_bytes_max: 256 << 20, ttl: Nanos::from_secs(1800) },
            exact: exact.then_some(exact::Config { memory_bytes_max: usize::MAX }),
            block_tokens: engine.block_tokens,
        },
        parts: Vec::new(),
        gateways: GatewaysConfig::default(),
        fetch_tokens_min: None,
        link: TransferConfig::default(),
        routing_delay: Nanos::from_millis(1),
        reports: Some(ReportFeed { interval: Nanos::from_secs(1), age: Nanos::ZERO }),
        events: EventFeed { delay: Nanos::from_millis(5), ..EventFeed::default() },
        faults: Vec::new(),
        health_delay: Nanos::from_millis(100),
        attempts_max: 5,
        rules: None,
        reloaded: None,
        hints: Hints::default(),
        client_timeout: None,
        seed,
        stopwatch: None,
    }))
}
