//! Tests whether `kvlane replay` keeps its schedule, and whether it is repeatable.
//!
//! Schedule: unshared prompts at 500 a second onto one mock engine; the target for the 99th percentile of lateness is
//! 5 ms. Repeat: a trace through a gateway onto mock engines, twice, with everything restarted; the target for the
//! difference of the medians of TTFT is 3 %. All are separate processes, as for a user. The exit code is 1 if a
//! target was missed.
//!
//! `make replay-schedule`, or `cargo build --release -p kvlane --bin kvlane --example replay_schedule` and
//! `target/release/examples/replay_schedule`.

use std::error::Error;
use std::io::{BufRead, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};

use clap::Parser;
use serde_json::Value;

/// Maximum lateness of requests in seconds, at the 99th percentile.
const LAG_P99_MAX_S: f64 = 0.005;
/// Maximum difference between the medians of two replays.
const APART_MAX: f64 = 0.03;

#[derive(Parser)]
struct Options {
    /// The program; by default the one built beside this example.
    #[arg(long)]
    kvlane: Option<PathBuf>,
    /// Requests per second of the first part.
    #[arg(long, default_value_t = 500.0)]
    rate: f64,
    /// Prompt and answer tokens of its requests.
    #[arg(long, default_value_t = 512)]
    prompt_tokens: u32,
    #[arg(long, default_value_t = 8)]
    output_tokens: u32,
    /// Duration in seconds.
    #[arg(long, default_value_t = 30)]
    seconds: u32,
    /// The trace of the second part.
    #[arg(long, default_value = "mooncake-conversation")]
    trace: String,
    /// Number of its requests.
    #[arg(long, default_value_t = 150)]
    requests: u32,
    /// Factor on the rate at which its conversations begin.
    #[arg(long, default_value_t = 4.0)]
    speed: f64,
    /// Engines of the second part.
    #[arg(long, default_value_t = 4)]
    engines: u32,
}

/// A server that is killed when it is dropped.
struct Server {
    child: Child,
    url: String,
}

type Failure = Box<dyn Error>;

fn main() -> Result<ExitCode, Failure> {
    let options = Options::parse();
    let beside = || Ok::<_, std::io::Error>(std::env::current_exe()?.with_file_name("../kvlane"));
    let kvlane = options.kvlane.clone().map_or_else(beside, Ok)?;
    let mut out = std::io::stdout();
    let directory = std::env::temp_dir().join(format!("replay-schedule-{}", std::process::id()));
    std::fs::create_dir_all(&directory)?;

    let lag = schedule(&kvlane, &directory, &options)?;
    let punctual = lag["p99"].as_f64().is_some_and(|p99| p99 < LAG_P99_MAX_S);
    writeln!(
        out,
        "schedule  {} requests/s for {} s: left {} late (p50), {} (p99), {} (max); target p99 < {:.0} ms: {}",
        options.rate,
        options.seconds,
        millis(&lag["p50"]),
        millis(&lag["p99"]),
        millis(&lag["max"]),
        LAG_P99_MAX_S * 1e3,
        verdict(punctual)
    )?;

    let [first, second] = [repeat(&kvlane, &options)?, repeat(&kvlane, &options)?];
    let median = |figures: &Value| figures["summary"]["ttft_s"]["p50"].as_f64().unwrap_or(f64::NAN);
    let apart = (median(&second) / median(&first) - 1.0).abs();
    let alike = apart <= APART_MAX;
    writeln!(
        out,
        "repeat    TTFT p50 {} and {}: {:.2} % apart; target 3 %: {}",
        millis(&first["summary"]["ttft_s"]["p50"]),
        millis(&second["summary"]["ttft_s"]["p50"]),
        apart * 100.0,
        verdict(alike)
    )?;
    std::fs::remove_dir_all(&directory)?;
    Ok(if punctual && alike { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Lateness of requests at a steady rate.
fn schedule(kvlane: &Path, directory: &Path, options: &Options) -> Result<Value, Failure> {
    let trace = directory.join("steady.jsonl").display().to_string();
    let [rate, seconds] = [options.rate.to_string(), options.seconds.to_string()];
    let input = format!("input_tokens={}", options.prompt_tokens);
    let output = format!("output_tokens={}", options.output_tokens);
    let make = ["trace", "generate", "unshared", "--rate", &rate, "--seconds", &seconds, "--out", &trace];
    run(Command::new(kvlane).args(make).args(["--set", &input, "--set", &output]))?;
    // The engine is fast enough not to be the bottleneck.
    let engine = Server::start(kvlane, &["mock-engine", "--port", "0", "--speed", "100"], 0)?;
    let figures = replay(kvlane, &[&engine.url, "--trace", &trace])?;
    Ok(figures["client"]["lag_s"].clone())
}

/// A replay of the trace through a gateway, all restarted.
fn repeat(kvlane: &Path, options: &Options) -> Result<Value, Failure> {
    let engine = || Server::start(kvlane, &["mock-engine", "--port", "0"], 0);
    let engines = (0..options.engines).map(|_| engine()).collect::<Result<Vec<_>, _>>()?;
    let mut serve = vec!["serve", "--port", "0", "--prometheus-port", "0", "--worker-urls"];
    serve.extend(engines.iter().map(|engine| engine.url.as_str()));
    let gateway = Server::start(kvlane, &serve, engines.len())?;
    let [requests, speed] = [options.requests.to_string(), options.speed.to_string()];
    let args = [&gateway.url, "--trace", &options.trace, "--requests", &requests, "--speed", &speed];
    replay(kvlane, &args)
}

/// The figures of a replay; lateness is judged here.
fn replay(kvlane: &Path, args: &[&str]) -> Result<Value, Failure> {
    let figures = run(Command::new(kvlane)
        .arg("replay")
        .args(args)
        .args(["--despite-client", "--json", "-"])
        .stderr(Stdio::inherit()))?;
    let figures: Value = serde_json::from_slice(&figures)?;
    match &figures["summary"]["errors"] {
        errors if *errors == 0 => Ok(figures),
        errors => Err(format!("{errors} requests failed: {}", figures["first_errors"]).into()),
    }
}

/// The output of a program, which must succeed.
fn run(command: &mut Command) -> Result<Vec<u8>, Failure> {
    let output = command.output()?;
    if !output.status.success() {
        return Err(format!("{command:?} ended with {}", output.status).into());
    }
    Ok(output.stdout)
}

fn millis(seconds: &Value) -> String {
    seconds.as_f64().map_or("-".into(), |seconds| format!("{:.3} ms", seconds * 1e3))
}

fn verdict(held: bool) -> &'static str {
    if held { "held" } else { "MISSED" }
}

// === impl Server ===

impl Server {
    /// Starts it and waits until it prints its address, and this many workers are healthy.
    fn start(kvlane: &Path, args: &[&str], mut workers: usize) -> Result<Self, Failure> {
        let mut child =
            Command::new(kvlane).args(args).stdin(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let mut log = BufReader::new(child.stderr.take().ok_or("its log is piped")?);
        let (mut line, mut address) = (String::new(), None);
        while address.is_none() || workers > 0 {
            line.clear();
            if log.read_line(&mut line)? == 0 {
                return Err(format!("{args:?} ended before it served").into());
            }
            workers -= usize::from(workers > 0 && line.contains("worker healthy"));
            if line.contains(" serving ") {
                let place = [" address=", " clients="].iter().find_map(|key| line.split(key).nth(1));
                address = place.and_then(|rest| rest.split_whitespace().next()).map(str::to_owned);
            }
        }
        // Its log is read to its end, so that it never blocks on a reader.
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        Ok(Self { child, url: format!("http://{}", address.unwrap_or_default()) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have exited by itself.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
