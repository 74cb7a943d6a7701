//! The commands of the laboratory: simulated engines, experiments, traces and reports. The feature `lab` has them.

mod bench;
mod calibrate;
mod demo;
mod explain;
mod mock_engine;
mod page;
mod part;
mod replay;
mod report;
mod roofline;
mod simulate;
mod timing_file;
mod trace;

use std::process::ExitCode;

use anyhow::Result;
use clap::Subcommand;

/// A command of the laboratory.
#[derive(Subcommand)]
pub(crate) enum Command {
    /// Replay a trace through the gateway onto four mock engines, under four policies.
    Demo(Box<demo::DemoArgs>),
    /// Run a mock engine with vLLM's API and the timing of a GPU, but no model.
    MockEngine(mock_engine::MockEngineArgs),
    /// Compare policies, fleets and loads in virtual time.
    Simulate(simulate::SimulateArgs),
    /// Send a trace or real prompts to a server at their arrival times, and measure the answers.
    Replay(Box<replay::ReplayArgs>),
    /// Explain the placement of recorded requests, and compare it with other policies.
    Explain(explain::ExplainArgs),
    /// Import, generate, describe or sample traces.
    Trace(trace::TraceArgs),
    /// Make an HTML report of recorded runs, and of the changes between them.
    Report(report::ReportArgs),
    /// Print operations, bytes and bounds of a model on a machine, for prefill and decode.
    Roofline(roofline::RooflineArgs),
    /// Compare policies and routers on one fleet, over loads and seeds, with confidence intervals.
    Bench(bench::BenchArgs),
    /// Measure a live server and write a timing file that imitates it.
    Calibrate(calibrate::CalibrateArgs),
}

// === impl Command ===

impl Command {
    /// Whether its default log level is `warn`.
    pub(crate) fn is_quiet(&self) -> bool {
        matches!(self, Self::Demo(_) | Self::Replay(_))
    }

    /// Runs it.
    pub(crate) fn run(&self) -> Result<ExitCode> {
        match self {
            Self::Demo(args) => demo::run(args),
            Self::MockEngine(args) => mock_engine::run(args),
            Self::Simulate(args) => simulate::run_command(args),
            Self::Replay(args) => replay::run(args),
            Self::Explain(args) => explain::run(args),
            Self::Trace(args) => trace::run(args),
            Self::Report(args) => report::run(args),
            Self::Roofline(args) => roofline::run(args),
            Self::Bench(args) => bench::run_command(args),
            Self::Calibrate(args) => calibrate::run(args),
        }
    }
}
