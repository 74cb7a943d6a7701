//! Tests a fleet of real processes under open-loop load and faults. `chaos script` plays a seeded script of faults
//! against mock engines behind a gateway, including deaths recorded from vLLM and SGLang, and judges the outcome of
//! every request: a complete answer, or one clear error that is caused by an engine while no other could have
//! answered. `chaos soak` runs for hours with few faults and checks memory and descriptors. `chaos crowd` opens very
//! many streams with slow clients, and measures the latency of other clients meanwhile. All write logs and samples to
//! `--dir`, and print the seed for a repetition; [`run`] says whether a promise was broken.
//!
//! Gateway and engines are processes of the `kvlane` program, which is built before. All clients are in one thread, to
//! leave the rest of a small machine to the gateway.

mod client;
mod crowd;
mod fleet;
mod tls;
mod traffic;
mod verdict;

use std::error::Error;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use http::Method;
use kvlane_core::rng::Rng;
use kvlane_core::time::Nanos;
use kvlane_mock::Fault;
use kvlane_sim::chaos::{Action, Config as ScriptConfig, Death, Script, Step};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep_until};

use self::client::{Client, Ending, Reported};
pub use self::crowd::CrowdArgs;
use self::fleet::{Fleet, FleetConfig, MODEL, Usage};
use self::tls::Certificates;
use self::traffic::{Asked, Traffic};
use self::verdict::{FaultHistory, State, Verdicts, slope};

/// Longer than any deadline of the gateway: a request that takes longer is lost.
const PATIENCE: Duration = Duration::from_secs(40);
/// Time after the last request within which all its state must be gone.
const SETTLED_WITHIN: Duration = Duration::from_secs(20);
/// Streams open when the gateway is stopped, and tokens of each.
const FAREWELL_STREAMS: u64 = 40;
const FAREWELL_TOKENS: u32 = 200;
/// Time for the gateway to exit after SIGTERM.
const STOPPED_WITHIN: Duration = Duration::from_secs(15);
/// Time for the gateway to detect that an engine is healthy again.
const SETTLES: Nanos = Nanos::from_secs(6);
/// Time after which an engine that has just been started accepts faults.
const TOLD_WITHIN: Duration = Duration::from_secs(5);
/// Seconds between two deaths of an engine in a soak, and duration of each.
const SOAK_EVERY_S: u64 = 90;
const SOAK_DEAD_S: u64 = 6;
/// Seconds by which slow transfers take longer.
const SLOW_TRANSFER_S: f64 = 20.0;
/// Share of a run after which memory and descriptors are checked.
const WARM_UP: f64 = 0.25;

/// An experiment.
#[derive(Subcommand, Clone, Debug)]
pub enum Experiment {
    /// A script of faults.
    Script(RunArgs),
    /// Hours of mixed traffic.
    Soak(RunArgs),
    /// Very many streams, slow clients, a burst.
    Crowd(CrowdArgs),
}

/// Settings of a script or a soak.
#[derive(Args, Clone, Debug)]
pub struct RunArgs {
    /// The program.
    #[arg(long, default_value = "target/release/kvlane")]
    pub kvlane: PathBuf,
    /// The program for mock engines, if different.
    #[arg(long)]
    pub engine: Option<PathBuf>,
    /// Directory of logs and samples.
    #[arg(long, default_value = "target/chaos")]
    pub dir: PathBuf,
    /// Duration.
    #[arg(long, default_value_t = 600)]
    pub seconds: u64,
    /// Number of engines.
    #[arg(long, default_value_t = 4)]
    pub engines: usize,
    /// Mean requests per second.
    #[arg(long, default_value_t = 30.0)]
    pub rate: f64,
    /// Seed of requests and faults.
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Engine seconds per wall-clock second.
    #[arg(long, default_value_t = 2.0)]
    pub speed: f64,
    /// Whether the configuration is reloaded.
    #[arg(long)]
    pub reloads: bool,
    /// Whether clients use TLS, with certificates that are replaced.
    #[arg(long)]
    pub tls: bool,
    /// Whether continuation is on.
    #[arg(long)]
    pub continuation: bool,
    /// Whether hedging is on.
    #[arg(long)]
    pub hedge: bool,
    /// Whether requests are split between two engines, of whose transfers one in twenty fails and one takes 20 s longer.
    #[arg(long)]
    pub split: bool,
    /// Log level of the gateway.
    #[arg(long, default_value = "info")]
    pub log_level: String,
}

/// Carries out an experiment; returns whether a promise was broken.
///
/// # Errors
/// If gateway or engines cannot be started, or end by themselves.
pub fn run(experiment: &Experiment) -> Result<bool, Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match experiment {
            Experiment::Script(args) => play(args, faults(args), Duration::from_secs(1)).await,
            Experiment::Soak(args) => play(args, deaths(args), Duration::from_secs(10)).await,
            Experiment::Crowd(args) => crowd::run(args).await,
        }
    })
}

/// All kinds of faults, two blackouts, and an end without faults.
fn faults(args: &RunArgs) -> Script {
    let config = ScriptConfig {
        engines: args.engines,
        length: Nanos::from_secs(args.seconds),
        calm: Nanos::from_secs((args.seconds / 6).min(30)),
        settle: SETTLES,
        ..ScriptConfig::default()
    };
    Script::new(args.seed, &config)
}

/// One engine at a time dies now and then and restarts.
fn deaths(args: &RunArgs) -> Script {
    let mut rng = Rng::new(args.seed);
    let mut steps = Vec::new();
    for n in 1..(args.seconds / SOAK_EVERY_S) {
        let engine = rng.below(args.engines);
        let at = Nanos::from_secs(n * SOAK_EVERY_S);
        steps.push(Step { at, action: Action::Kill { engine } });
        steps.push(Step { at: at + Nanos::from_secs(SOAK_DEAD_S), action: Action::Restart { engine } });
    }
    let config = ScriptConfig {
        engines: args.engines,
        length: Nanos::from_secs(args.seconds),
        settle: SETTLES,
        ..ScriptConfig::default()
    };
    Script { seed: args.seed, config, steps, blackouts: Vec::new() }
}

/// The gateway's configuration. Deadlines are short, because long operations here never end.
fn settings() -> Value {
    json!({
        "server": {
            "request_timeout": "20s", "stream_idle_timeout": "4s", "header_timeout": "60s", "shutdown_grace": "10s",
            "relay_threads": 2,
        },
        "metrics": {},
        "routing": {
            "index_memory": 8 << 20, "index_ttl": "2m", "max_concurrent_requests": 400, "queue_size": 2000,
            "queue_timeout": "15s",
        },
        "health": {"interval": "500ms", "timeout": "2s", "failure_threshold": 2},
        "upstream": {"connect_timeout": "500ms"},
        "kv_events": {"index_memory": 32 << 20},
    })
}

/// One run; returns whether a promise was broken.
async fn play(args: &RunArgs, script: Script, sampled: Duration) -> Result<bool, Box<dyn Error>> {
    let (lasts, steps) = (Duration::from_secs(args.seconds), script.steps.clone());
    std::fs::create_dir_all(&args.dir)?;
    let mut certificates = args.tls.then(|| Certificates::new(&args.dir.canonicalize()?)).transpose()?;
    let mut gateway = settings();
    if let Some(certificates) = &certificates {
        gateway["tls"] = certificates.settings();
    }
    if args.continuation {
        gateway["continuation"] = json!({"enabled": true});
    }
    if args.hedge {
        gateway["hedge"] = json!({"enabled": true});
    }
    let speed = args.speed.to_string();
    let mut engine_flags: Vec<String> =
        ["--speed", &speed, "--kv-cache-size", "4000"].map(String::from).into();
    if args.split {
        gateway["disaggregation"] =
            json!({"connector": "nixl", "split_tokens_min": 1, "transfer_timeout": "2s"});
        // Whether the blocks of a whole answer are late is not seen, so it waits for them.
        gateway["server"]["request_timeout"] = json!("35s");
        let faults = format!("fail=0.05,slow=0.05,slow_s={}", SLOW_TRANSFER_S * args.speed);
        engine_flags.extend(["--kv-connector", "nixl", "--kv-transfer-faults", &faults].map(String::from));
    }
    let config = FleetConfig {
        kvlane: args.kvlane.clone(),
        engine: args.engine.clone().unwrap_or_else(|| args.kvlane.clone()),
        dir: args.dir.clone(),
        engines: vec![MODEL; args.engines],
        engine_flags,
        feeds: true,
        faults: script
            .steps
            .iter()
            .any(|step| !matches!(step.action, Action::Kill { .. } | Action::Restart { .. })),
        gateway,
        log_level: args.log_level.clone(),
    };
    let mut fleet = Fleet::start(config).await?;
    let urls = fleet.engines.iter().map(fleet::Engine::url).collect();
    let (mut say, mut samples) = (io::stdout(), File::create(args.dir.join("samples.csv"))?);
    writeln!(samples, "s,rss_kib,fds,threads,cpu_ms,asked,violations,in_flight")?;
    let idle = Idle { fds: fleet.usage()?.fds, tasks: tasks(&client::get(fleet.admin, "/metrics").await?) };
    writeln!(
        say,
        "seed {}: {} engines, {} requests a second, {} steps in {} s; gateway {} with {} KiB, {} descriptors; see {}",
        args.seed,
        args.engines,
        args.rate,
        steps.len(),
        args.seconds,
        fleet.address,
        fleet.usage()?.rss_kib,
        idle.fds,
        args.dir.display()
    )?;
    let address = fleet.address;
    let new_client = |certificates: Option<&Certificates>| {
        Arc::new(Client::new(address, PATIENCE, certificates.map(Certificates::clients)))
    };
    let client = new_client(certificates.as_ref());
    let mut traffic = Traffic::new(args.seed);
    let mut in_flight: JoinSet<(Asked, Reported, Instant)> = JoinSet::new();
    let mut samplings = interval(sampled);
    samplings.set_missed_tick_behavior(MissedTickBehavior::Skip);
    let start = Instant::now();
    let mut verdicts =
        Verdicts::new(FaultHistory::new(urls, script, start), File::create(args.dir.join("violations.txt"))?);
    verdicts.may_continue = args.continuation;
    let mut doing: JoinSet<io::Result<Option<(usize, State)>>> = JoinSet::new();
    let (mut due, mut next, mut seen) = (start, 0, Vec::<(f64, Usage)>::new());
    while start.elapsed() < lasts {
        let step = steps.get(next).map_or(lasts, |step| Duration::from_nanos(step.at.0));
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
                writeln!(say, "{}", steps[next])?;
                if let (Action::RotateCertificates, Some(certificates)) = (steps[next].action, &mut certificates) {
                    certificates.rotate()?;
                    fleet.reload(fleet.settings())?;
                }
                apply(&mut fleet, &mut verdicts, &mut doing, steps[next].action, args.reloads)?;
                next += 1;
            }
            Some(done) = doing.join_next() => {
                if let Some((engine, state)) = done?? {
                    verdicts.note(engine, state);
                }
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
    if let Some(certificates) = &certificates
        && !certificates.are_shown(fleet.address).await?
    {
        verdicts.violated("new connections are not shown the certificate that was written last".into());
    }
    let log = fleet.log()?;
    if let Some(line) = log.lines().find(|line| line.contains("panicked")) {
        verdicts.violated(format!("the gateway's log says: {line}"));
    }
    let metrics = client::get(fleet.admin, "/metrics").await?;
    let mut splits = metrics.lines().filter(|line| line.starts_with("kvlane_splits_total"));
    if args.split && splits.all(|line| line.ends_with(" 0")) {
        verdicts.violated("no request was split".into());
    }
    farewell(&mut fleet, &new_client(certificates.as_ref()), &mut verdicts).await?;
    report(&mut say, &verdicts, &metrics, &seen)?;
    writeln!(
        say,
        "seed {}: {}",
        args.seed,
        if verdicts.violations == 0 { "every promise kept" } else { "BROKEN" }
    )?;
    Ok(verdicts.violations > 0)
}

/// Stops the gateway while streams are open: all of them must complete.
async fn farewell(
    fleet: &mut Fleet,
    client: &Arc<Client>,
    verdicts: &mut Verdicts,
) -> Result<(), Box<dyn Error>> {
    let mut open: JoinSet<(Asked, Reported, Instant)> = JoinSet::new();
    for number in 0..FAREWELL_STREAMS {
        let (asked, client) = (Asked::stream(number, FAREWELL_TOKENS), Arc::clone(client));
        open.spawn(async move {
            let from = Instant::now();
            let told = client.ask(&asked.order).await;
            (asked, told, from)
        });
    }
    let until = Instant::now() + SETTLED_WITHIN;
    while placed(fleet.admin).await? < FAREWELL_STREAMS {
        if Instant::now() > until {
            return Err(format!("of {FAREWELL_STREAMS} streams not all were open at once").into());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let judged = async {
        while let Some(ended) = open.join_next().await {
            let (asked, told, from) = ended?;
            if !matches!(told.ending, Ending::Complete(_)) {
                verdicts.violated(format!("a stream that was open at SIGTERM: {:?}", told.ending));
            }
            verdicts.judge(&asked, &told, from);
        }
        Ok::<(), Box<dyn Error>>(())
    };
    let (judged, code) = tokio::join!(judged, fleet.stop(STOPPED_WITHIN));
    judged?;
    match code? {
        Some(0) => {}
        code => verdicts.violated(format!("after SIGTERM the gateway ended with {code:?}, not with 0")),
    }
    Ok(())
}

/// Requests that have a place at an engine; one that is split has two, and counts once.
async fn placed(admin: std::net::SocketAddr) -> Result<u64, Box<dyn Error>> {
    let fleet: Value = serde_json::from_str(&client::get(admin, "/fleet").await?)?;
    let pools = fleet["pools"].as_array().into_iter().flatten();
    Ok(pools.filter_map(|pool| pool["in_flight"].as_u64()).sum())
}

/// Executes one step of the script, or starts it: messages to engines and the gateway take time, and set the engine's
/// state when they complete.
fn apply(
    fleet: &mut Fleet,
    verdicts: &mut Verdicts,
    doing: &mut JoinSet<io::Result<Option<(usize, State)>>>,
    action: Action,
    reloads: bool,
) -> io::Result<()> {
    let mut cause = |engine: usize, fault: Fault, then: Option<State>| {
        let control = fleet.engines[engine].control;
        doing.spawn(async move { tell(control, fault).await.map(|()| then.map(|state| (engine, state))) });
    };
    // An engine is broken from before the fault on, and healthy from after the repair.
    match action {
        Action::Kill { engine } => {
            verdicts.note(engine, State::Broken);
            fleet.kill(engine)?;
        }
        Action::Die { engine, death } => {
            verdicts.note(engine, State::Broken);
            let fault = match death {
                Death::CoreKilled => Fault::CoreKilled,
                Death::CoreStopped => Fault::CoreStopped,
                Death::ServerKilled => Fault::ServerKilled,
                Death::Terminated => Fault::Terminated,
                Death::OutOfMemory => Fault::OutOfMemory,
            };
            cause(engine, fault, None);
        }
        Action::Restart { engine } => {
            // A process that has exited by itself may still be registered.
            fleet.kill(engine)?;
            fleet.restart(engine)?;
            verdicts.note(engine, State::Sound);
        }
        Action::Pause { engine } => {
            verdicts.note(engine, State::Broken);
            fleet.signal(engine, "STOP")?;
        }
        Action::Resume { engine } => {
            fleet.signal(engine, "CONT")?;
            verdicts.note(engine, State::Sound);
        }
        Action::Slow { engine, factor } => cause(engine, Fault::Slow { factor: factor.into() }, None),
        Action::Reset { engine } => {
            verdicts.note(engine, State::Broken);
            cause(engine, Fault::Reset, Some(State::Sound));
        }
        Action::BlackHole { engine } => {
            verdicts.note(engine, State::Broken);
            cause(engine, Fault::BlackHole, None);
        }
        Action::Heal { engine } => cause(engine, Fault::Heal, Some(State::Sound)),
        // A feed does not affect whether requests are answered.
        Action::CutFeed { engine } => cause(engine, Fault::CutFeed, None),
        Action::FloodFeed { engine } => cause(engine, Fault::FloodFeed, None),
        Action::RestoreFeed { engine } => cause(engine, Fault::RestoreFeed, None),
        Action::Drain { engine } | Action::Undrain { engine } => {
            let body = json!({"draining": matches!(action, Action::Drain { .. })}).to_string();
            let path =
                format!("/workers/{}", fleet.engines[engine].url().replace(':', "%3A").replace('/', "%2F"));
            let admin = fleet.admin;
            doing.spawn(async move { client::send(admin, Method::PUT, &path, &body).await.map(|_| None) });
        }
        Action::Reload if reloads => {
            let mut settings = fleet.settings().clone();
            let policy = if verdicts.asked.is_multiple_of(2) { "cache_aware" } else { "fleet_cost" };
            settings["routing"]["policy"] = policy.into();
            fleet.reload(&settings)?;
        }
        Action::Reload | Action::RotateCertificates => {}
    }
    Ok(())
}

/// Sends a fault to an engine, which may have been started just before.
async fn tell(control: std::net::SocketAddr, fault: Fault) -> io::Result<()> {
    let body = serde_json::to_string(&fault)?;
    let until = Instant::now() + TOLD_WITHIN;
    loop {
        match client::send(control, Method::POST, "/fault", &body).await {
            Ok(_) => return Ok(()),
            Err(error) if Instant::now() > until => return Err(error),
            Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// State of the idle gateway.
#[derive(Clone, Copy, Debug)]
struct Idle {
    fds: u64,
    tasks: u64,
}

fn tasks(metrics: &str) -> u64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix("kvlane_tasks "));
    line.and_then(|value| value.parse().ok()).unwrap_or(0)
}

/// State that is left after all requests.
async fn settled(fleet: &Fleet, idle: Idle) -> io::Result<Vec<String>> {
    let until = Instant::now() + SETTLED_WITHIN;
    loop {
        let left = left(fleet, idle).await?;
        if left.is_empty() || Instant::now() > until {
            return Ok(left);
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

async fn left(fleet: &Fleet, idle: Idle) -> io::Result<Vec<String>> {
    let mut left = Vec::new();
    let workers: Value = serde_json::from_str(&client::get(fleet.admin, "/workers").await?)?;
    for worker in workers["workers"].as_array().into_iter().flatten() {
        for endpoint in worker["pools"].as_array().into_iter().flatten() {
            for ledger in ["requests", "prefill_tokens", "context_tokens"] {
                if endpoint[ledger] != 0 {
                    left.push(format!("{} {ledger} of {} are left", endpoint[ledger], worker["url"]));
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
    let tasks = tasks(&metrics);
    // A feed with a problem has one more task, a probe in progress another.
    if tasks > idle.tasks + 2 * fleet.engines.len() as u64 {
        left.push(format!("{tasks} tasks, where there were {} before", idle.tasks));
    }
    // Each engine may have one more idle connection: that of probes.
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
    for name in [
        "kvlane_retries_total",
        "kvlane_hedges_total",
        "kvlane_continuations_total",
        "kvlane_splits_total",
        "kvlane_shed_total",
        "kvlane_worker_failures_total",
    ] {
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
