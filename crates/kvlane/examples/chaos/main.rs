//! A fleet of real processes under open load while things go wrong.
//!
//! `chaos script` plays a seeded script of faults against mock engines behind a gateway and judges how every request
//! ended: with a complete answer, or with one clear error that an engine is to blame for while no other could have
//! answered. `chaos soak` runs for hours with few faults and looks at memory and descriptors. Both leave what they have
//! seen in `--dir`, end with code 1 if a promise was broken, and print the seed to have the same again.
//!
//! Build the gateway first: `cargo build --release -p kvlane`. The clients are one thread, so that the gateway has the
//! rest of a small machine.

mod client;
mod fleet;
mod script;
mod traffic;
mod verdict;

use std::error::Error;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};
use http::Method;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep_until};

use self::client::{Client, Told};
use self::fleet::{Fleet, FleetConfig, Usage};
use self::script::{Action, FAULTS, Pace, State, Step};
use self::traffic::{Asked, Traffic};
use self::verdict::{Truth, Verdicts, slope};

/// Longer than any deadline of the gateway: whoever waits as long was forgotten.
const PATIENCE: Duration = Duration::from_secs(40);
/// Time after the last request within which nothing of it may be left.
const SETTLED_WITHIN: Duration = Duration::from_secs(20);
/// Time that the gateway has to end after SIGTERM.
const STOPPED_WITHIN: Duration = Duration::from_secs(15);
/// Time that the gateway has to find out that an engine is well again.
const SETTLES: Duration = Duration::from_secs(4);
/// Share of a run after which memory and descriptors are looked at.
const WARM_UP: f64 = 0.25;

/// What is run.
#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    mode: Mode,
}

#[derive(Subcommand)]
enum Mode {
    /// A script of faults.
    Script(RunArgs),
    /// Hours of mixed traffic.
    Soak(RunArgs),
}

#[derive(Args, Clone)]
struct RunArgs {
    /// The program.
    #[arg(long, default_value = "target/release/kvlane")]
    kvlane: PathBuf,
    /// Where logs and samples go.
    #[arg(long, default_value = "target/chaos")]
    dir: PathBuf,
    /// How long it takes.
    #[arg(long, default_value_t = 600)]
    seconds: u64,
    /// Engines.
    #[arg(long, default_value_t = 4)]
    engines: usize,
    /// Requests in a second, on average.
    #[arg(long, default_value_t = 30.0)]
    rate: f64,
    /// Another seed draws other requests and other faults.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds of engines in one of real time.
    #[arg(long, default_value_t = 2.0)]
    speed: f64,
    /// Whether the configuration is read again.
    #[arg(long)]
    reloads: bool,
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let options = Options::parse();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (args, pace, sampled) = match &options.mode {
        Mode::Script(args) => {
            let pace =
                Pace { every_s: 5.0, lasts_s: 5.0, settles_s: 4.0, faults: &FAULTS, reloads: args.reloads };
            (args, pace, Duration::from_secs(1))
        }
        Mode::Soak(args) => {
            let pace = Pace {
                every_s: 90.0,
                lasts_s: 6.0,
                settles_s: 4.0,
                faults: &FAULTS[..1],
                reloads: args.reloads,
            };
            (args, pace, Duration::from_secs(10))
        }
    };
    let broken = runtime.block_on(run(args, pace, sampled))?;
    Ok(if broken { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// What a gateway is told. Deadlines are short, since what takes long here takes for ever.
fn settings() -> Value {
    json!({
        "server": {
            "request_timeout": "20s", "stream_idle_timeout": "3s", "header_timeout": "60s", "shutdown_grace": "10s",
            "relay_threads": 2,
        },
        "metrics": {},
        "routing": {
            "index_memory": 8 << 20, "index_ttl": "2m", "max_concurrent_requests": 400, "queue_size": 2000,
            "queue_timeout": "15s",
        },
        "health": {"interval": "500ms", "timeout": "1s", "failure_threshold": 2},
        "upstream": {"connect_timeout": "500ms"},
        "kv_events": {"index_memory": 32 << 20},
    })
}

/// One run, from a start to an end of everything: whether a promise was broken.
async fn run(args: &RunArgs, pace: Pace, sampled: Duration) -> Result<bool, Box<dyn Error>> {
    let lasts = Duration::from_secs(args.seconds);
    let steps = script::draw(args.seed, args.engines, lasts, pace);
    let config = FleetConfig {
        kvlane: args.kvlane.clone(),
        dir: args.dir.clone(),
        engines: args.engines,
        engine_flags: ["--speed", &args.speed.to_string(), "--kv-cache-size", "4000"]
            .map(String::from)
            .into(),
        feeds: true,
        gateway: settings(),
    };
    let mut fleet = Fleet::start(config).await?;
    let urls = fleet.engines.iter().map(fleet::Engine::url).collect();
    let mut verdicts = Verdicts::new(Truth::new(urls, SETTLES));
    let (mut say, mut samples) = (io::stdout(), File::create(args.dir.join("samples.csv"))?);
    writeln!(samples, "s,rss_kib,fds,threads,cpu_ms,asked,violations,in_flight")?;
    let idle = fleet.usage()?;
    writeln!(
        say,
        "seed {}: {} engines, {} requests a second, {} steps in {} s; gateway {} with {} KiB, {} descriptors; see {}",
        args.seed,
        args.engines,
        args.rate,
        steps.len(),
        args.seconds,
        fleet.address,
        idle.rss_kib,
        idle.fds,
        args.dir.display()
    )?;
    let client = Arc::new(Client::new(fleet.address, PATIENCE));
    let mut traffic = Traffic::new(args.seed);
    let mut in_flight: JoinSet<(Asked, Told, Instant)> = JoinSet::new();
    let mut samplings = interval(sampled);
    samplings.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let start = Instant::now();
    let (mut due, mut next, mut seen) = (start, 0, Vec::<(f64, Usage)>::new());
    while start.elapsed() < lasts {
        let step = steps.get(next).map_or(lasts, |step| step.at);
        tokio::select! {
            Some(ended) = in_flight.join_next() => {
                let (asked, told, from) = ended?;
                verdicts.judge(&asked, &told, from);
            }
            () = sleep_until(due.into()) => {
                due += traffic.gap(args.rate);
                let (asked, client) = (traffic.next(), Arc::clone(&client));
                in_flight.spawn(async move {
                    let from = Instant::now();
                    let told = client.ask(&asked.order).await;
                    (asked, told, from)
                });
            }
            () = sleep_until((start + step).into()), if next < steps.len() => {
                apply(&mut fleet, &mut verdicts, steps[next]).await?;
                next += 1;
            }
            _ = samplings.tick() => {
                if let Some(how) = fleet.died()? {
                    return Err(format!("the gateway ended: {how}; see its log in {}", args.dir.display()).into());
                }
                let (s, usage) = (start.elapsed().as_secs_f64(), fleet.usage()?);
                let Usage { rss_kib, fds, threads, cpu_ms } = usage;
                let (asked, violations) = (verdicts.asked, verdicts.violations);
                writeln!(
                    samples,
                    "{s:.0},{rss_kib},{fds},{threads},{cpu_ms},{asked},{violations},{}",
                    in_flight.len()
                )?;
                seen.push((s, usage));
            }
        }
    }
    while let Some(ended) = in_flight.join_next().await {
        let (asked, told, from) = ended?;
        verdicts.judge(&asked, &told, from);
    }
    drop(client);
    for left in settled(&fleet, idle).await? {
        verdicts.violated(left);
    }
    let log = fleet.log()?;
    if let Some(line) = log.lines().find(|line| line.contains("panicked")) {
        verdicts.violated(format!("the gateway's log says: {line}"));
    }
    let metrics = client::get(fleet.admin, "/metrics").await?;
    match fleet.stop(STOPPED_WITHIN).await? {
        Some(0) => {}
        code => verdicts.violated(format!("after SIGTERM the gateway ended with {code:?}, not with 0")),
    }
    report(&mut say, &verdicts, &metrics, &seen)?;
    writeln!(
        say,
        "seed {}: {}",
        args.seed,
        if verdicts.violations == 0 { "every promise kept" } else { "BROKEN" }
    )?;
    Ok(verdicts.violations > 0)
}

/// Does one step of the script.
async fn apply(fleet: &mut Fleet, verdicts: &mut Verdicts, step: Step) -> io::Result<()> {
    let Step { at, engine, action } = step;
    writeln!(
        io::stdout(),
        "{:7.1} s  {action:?} {}",
        at.as_secs_f64(),
        engine.map_or(String::new(), |n| n.to_string())
    )?;
    let state = engine.zip(action.makes());
    // It is broken from before the fault on, and good from after the cure.
    if let Some((engine, state)) = state.filter(|(_, state)| *state != State::Good) {
        verdicts.note(engine, state);
    }
    let n = engine.unwrap_or(0);
    match action {
        Action::Kill => fleet.kill(n)?,
        Action::Restart => fleet.restart(n)?,
        Action::Pause => fleet.signal(n, "STOP")?,
        Action::Resume => fleet.signal(n, "CONT")?,
        Action::Drain | Action::Undrain => {
            let body = json!({"draining": action == Action::Drain}).to_string();
            let path = format!("/workers/{}", fleet.engines[n].url().replace(':', "%3A").replace('/', "%2F"));
            client::send(fleet.admin, Method::PUT, &path, &body).await?;
        }
        Action::Reload => {
            let mut settings = fleet.settings().clone();
            let policy = if at.as_secs().is_multiple_of(2) { "cache_aware" } else { "fleet_cost" };
            settings["routing"]["policy"] = policy.into();
            fleet.reload(&settings)?;
        }
    }
    if let Some((engine, state)) = state.filter(|(_, state)| *state == State::Good) {
        verdicts.note(engine, state);
    }
    Ok(())
}

/// What is left once nobody asks for anything any more.
async fn settled(fleet: &Fleet, idle: Usage) -> io::Result<Vec<String>> {
    let until = Instant::now() + SETTLED_WITHIN;
    loop {
        let left = left(fleet, idle).await?;
        if left.is_empty() || Instant::now() > until {
            return Ok(left);
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

async fn left(fleet: &Fleet, idle: Usage) -> io::Result<Vec<String>> {
    let mut left = Vec::new();
    let workers: Value = serde_json::from_str(&client::get(fleet.admin, "/workers").await?)?;
    for worker in workers["workers"].as_array().into_iter().flatten() {
        for seat in worker["pools"].as_array().into_iter().flatten() {
            for ledger in ["requests", "prefill_tokens", "context_tokens"] {
                if seat[ledger] != 0 {
                    left.push(format!("{} {ledger} of {} are left", seat[ledger], worker["url"]));
                }
            }
        }
    }
    let metrics = client::get(fleet.admin, "/metrics").await?;
    for line in metrics.lines().filter(|line| line.starts_with("kvlane_queue_requests")) {
        if !line.ends_with(" 0") {
            left.push(format!("{line} in the queue"));
        }
    }
    for engine in &fleet.engines {
        let page = client::get(engine.address, "/metrics").await?;
        let busy = ["vllm:num_requests_running", "vllm:num_requests_waiting"];
        for line in page.lines().filter(|line| busy.iter().any(|name| line.starts_with(name))) {
            if line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok()) != Some(0.0) {
                left.push(format!("{} still has {line}", engine.url()));
            }
        }
    }
    // Each engine may have a connection more that is idle: those of probes.
    let fds = fleet.usage()?.fds;
    if fds > idle.fds + 2 * fleet.engines.len() as u64 {
        left.push(format!("{fds} descriptors, where there were {} before", idle.fds));
    }
    Ok(left)
}

fn report(
    say: &mut impl io::Write,
    verdicts: &Verdicts,
    metrics: &str,
    seen: &[(f64, Usage)],
) -> io::Result<()> {
    writeln!(say, "{} requests", verdicts.asked)?;
    for (name, count) in &verdicts.counts {
        writeln!(say, "{count:>9}  {name}")?;
    }
    for name in ["kvlane_retries_total", "kvlane_shed_total", "kvlane_worker_failures_total"] {
        for line in metrics.lines().filter(|line| line.starts_with(name)) {
            writeln!(say, "  {line}")?;
        }
    }
    let lasted = seen.last().map_or(0.0, |(s, _)| *s);
    let warm: Vec<_> = seen.iter().filter(|(s, _)| *s >= lasted * WARM_UP).collect();
    if let (Some((_, first)), Some((_, last))) = (warm.first(), warm.last()) {
        let by = |of: fn(&Usage) -> u64| {
            slope(&warm.iter().map(|(s, usage)| (s / 3600.0, of(usage) as f64)).collect::<Vec<_>>())
        };
        writeln!(
            say,
            "memory {:.1} MiB when warm, {:.1} at the end, {:+.2} MiB/h; descriptors {} and {}, {:+.1} an hour; \
             gateway {:.1} % of a core",
            first.rss_kib as f64 / 1024.0,
            last.rss_kib as f64 / 1024.0,
            by(|usage| usage.rss_kib) / 1024.0,
            first.fds,
            last.fds,
            by(|usage| usage.fds),
            (last.cpu_ms - first.cpu_ms) as f64 / 10.0 / (lasted * (1.0 - WARM_UP)).max(1.0)
        )?;
    }
    for told in &verdicts.told {
        writeln!(say, "BROKEN: {told}")?;
    }
    if verdicts.violations > verdicts.told.len() as u64 {
        writeln!(say, "BROKEN: and {} more", verdicts.violations - verdicts.told.len() as u64)?;
    }
    Ok(())
}
