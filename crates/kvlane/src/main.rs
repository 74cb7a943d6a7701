//! `kvlane`: one address in front of a fleet of OpenAI-compatible LLM servers.

mod commands;
mod config;
mod timing_file;
mod yaml;

use std::io::{IsTerminal as _, Write as _};

use clap::{Parser, Subcommand, ValueEnum};
use kvlane_live::config::{Log, LogFormat};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Requests allocate and free on one relay thread; this allocator is made for that.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// One address in front of a fleet of OpenAI-compatible LLM servers. Each request goes where it costs the fleet
/// least: where its prefix is already in the KV cache, weighed against the work that is queued there.
#[derive(Parser)]
#[command(name = "kvlane", version, max_term_width = 110)]
struct Cli {
    /// What is logged to stderr: error, warn, info, debug, trace, or a filter like `kvlane_live=debug` [default: info;
    /// the demo, the doctor and replays: warn].
    #[arg(long, global = true, env = "KVLANE_LOG")]
    log_level: Option<String>,
    /// How a line of the log is written: `text` for people, or `json` for programs [default: text].
    #[arg(long, global = true, env = "KVLANE_LOG_FORMAT", value_enum)]
    log_format: Option<Format>,
    #[command(subcommand)]
    command: Command,
}

/// Ways to write a line of the log.
#[derive(Clone, Copy, ValueEnum)]
enum Format {
    Text,
    Json,
}

#[derive(Subcommand)]
enum Command {
    /// Run the gateway.
    Serve(Box<config::ConfigArgs>),
    /// See the gateway work: a trace through four mock engines, under three policies.
    Demo(Box<commands::demo::DemoArgs>),
    /// Run a vLLM-shaped server that computes nothing but takes its time, as a GPU would.
    MockEngine(commands::mock_engine::MockEngineArgs),
    /// Ask what another policy, fleet or load would do, in virtual time.
    Simulate(commands::simulate::SimulateArgs),
    /// Send a trace or real prompts to a server at their times, and say how it answered.
    Replay(Box<commands::replay::ReplayArgs>),
    /// Say why a recorded request went where it went, and what other policies would have done.
    Explain(commands::explain::ExplainArgs),
    /// Import or make traces.
    Trace(commands::trace::TraceArgs),
    /// Make a page of recorded runs, and say what changed between them.
    Report(commands::report::ReportArgs),
    /// Say what a model computes and reads on a machine, and what bounds prompts and decoding.
    Roofline(commands::roofline::RooflineArgs),
    /// Routers against each other on one fleet: policies, loads and seeds, with intervals.
    Bench(commands::bench::BenchArgs),
    /// Measure a live server and write the timing model that imitates it.
    Calibrate(commands::calibrate::CalibrateArgs),
    /// Examine engines: is all there that it takes to know their caches exactly?
    Doctor(commands::doctor::DoctorArgs),
    /// Make an API key, or hash one.
    #[command(subcommand)]
    Key(commands::key::KeyCommand),
    /// Check the configuration that `serve` would run with, and print it.
    Check(Box<config::ConfigArgs>),
    /// Print a configuration file with every key, its default and what it means.
    Config,
}

fn main() -> std::process::ExitCode {
    let cli = Cli::parse();
    let quiet = matches!(cli.command, Command::Demo(_) | Command::Doctor(_) | Command::Replay(_));
    let said = match &cli.command {
        Command::Serve(args) => args.log(),
        _ => Log::default(),
    };
    let default = if quiet { "warn" } else { "info" };
    let log_level = cli.log_level.as_deref().or(said.level.as_deref()).unwrap_or(default);
    let json = match cli.log_format {
        Some(format) => matches!(format, Format::Json),
        None => said.format == LogFormat::Json,
    };
    // A single word is a level; the filter would take any other word for the name of a module.
    if !log_level.contains(['=', ',']) && log_level.parse::<LevelFilter>().is_err() {
        return fail(&anyhow::anyhow!(
            "--log-level {log_level}: take error, warn, info, debug, trace, or module=level"
        ));
    }
    let filter = match EnvFilter::try_new(log_level) {
        Ok(filter) => filter,
        Err(error) => return fail(&anyhow::anyhow!("--log-level {log_level}: {error}")),
    };
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    if json {
        log.json().flatten_event(true).with_current_span(false).with_span_list(false).init();
    } else {
        log.with_ansi(std::io::stderr().is_terminal()).with_target(false).init();
    }
    let done = match cli.command {
        Command::Serve(args) => commands::serve::run(&args),
        Command::Demo(args) => commands::demo::run(&args),
        Command::MockEngine(args) => commands::mock_engine::run(&args),
        Command::Simulate(args) => commands::simulate::run_command(&args),
        Command::Replay(args) => commands::replay::run(&args),
        Command::Explain(args) => commands::explain::run(&args),
        Command::Trace(args) => commands::trace::run(&args),
        Command::Report(args) => commands::report::run(&args),
        Command::Roofline(args) => commands::roofline::run(&args),
        Command::Bench(args) => commands::bench::run_command(&args),
        Command::Calibrate(args) => commands::calibrate::run(&args),
        Command::Doctor(args) => commands::doctor::run(&args),
        Command::Key(command) => commands::key::run(&command),
        Command::Check(args) => commands::check::run(&args),
        Command::Config => commands::check::print_example(),
    };
    match done {
        Ok(code) => code,
        Err(error) if json => {
            tracing::error!(error = told_once(&error), "kvlane ends");
            std::process::ExitCode::FAILURE
        }
        Err(error) => fail(&error),
    }
}

/// Says why the program ends, whatever is logged.
fn fail(error: &anyhow::Error) -> std::process::ExitCode {
    // Nobody is left to tell if stderr is gone.
    let _ = writeln!(std::io::stderr(), "error: {}", told_once(error));
    std::process::ExitCode::FAILURE
}

/// An error with its causes. Some errors tell their cause themselves: it is not told again.
fn told_once(error: &anyhow::Error) -> String {
    let mut told = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if !told.contains(&cause) {
            if !told.is_empty() {
                told.push_str(": ");
            }
            told.push_str(&cause);
        }
    }
    told
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    #[test]
    fn a_cause_that_is_told_is_not_told_again() {
        let cause = std::io::Error::other("no such file");
        let error = anyhow::Error::new(cause).context("cannot open x: no such file");
        assert_eq!(super::told_once(&error), "cannot open x: no such file");
        let error = Err::<(), _>(std::io::Error::other("no such file")).context("x").unwrap_err();
        assert_eq!(super::told_once(&error), "x: no such file");
    }
}
