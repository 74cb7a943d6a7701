//! `kvlane trace`: imports, generates, describes and samples traces.

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use kvlane_lab::catalogue;
use kvlane_trace::format::{Format, Jitter, Options, normal};
use kvlane_trace::trace::Trace;

mod generate;
mod import;
mod sample;
mod show;
mod stats;

/// The commands on traces.
#[derive(Args, Clone, Debug)]
pub(crate) struct TraceArgs {
    #[command(subcommand)]
    command: TraceCommand,
}

#[derive(Subcommand, Clone, Debug)]
enum TraceCommand {
    /// Read a trace of any known format and write it in kvlane's own.
    Import(import::ImportArgs),
    /// Generate a trace: chats, shared prefixes, agents and others.
    Generate(generate::GenerateArgs),
    /// Print statistics of a trace: rates, lengths, sessions, and hits of a cache over its size.
    Stats(stats::StatsArgs),
    /// Reduce a trace for a smaller fleet, and report the differences.
    Sample(sample::SampleArgs),
}

/// Flags for reading a trace, shared by all commands that take one.
#[derive(Args, Clone, Debug)]
pub(crate) struct ReadArgs {
    /// The file's format [default: detected from its beginning].
    #[arg(long)]
    format: Option<String>,
    /// Tokens of a block, if neither the file nor its format says.
    #[arg(long, value_name = "TOKENS")]
    block_tokens: Option<u32>,
    /// Spread arrivals that share a tick of a coarse clock: auto or off.
    #[arg(long, default_value = "auto")]
    jitter: String,
    /// Skip invalid lines, and report their number, instead of failing at the first.
    #[arg(long)]
    skip_bad: bool,
    /// Send every request at its time, without waiting for the previous turn.
    #[arg(long)]
    open_loop: bool,
    /// Mean number of sessions that start per second, if the file has no start times.
    #[arg(long, default_value_t = Options::default().session_rate)]
    session_rate: f64,
    /// No shared tools and system prompts between sessions where block ids are local to a session.
    #[arg(long)]
    no_shared_head: bool,
}

/// Runs it.
pub(crate) fn run(args: &TraceArgs) -> Result<ExitCode> {
    match &args.command {
        TraceCommand::Import(args) => import::run(args),
        TraceCommand::Generate(args) => generate::run(args),
        TraceCommand::Stats(args) => stats::run(args),
        TraceCommand::Sample(args) => sample::run(args),
    }
}

// === impl ReadArgs ===

impl ReadArgs {
    /// Reads a trace: a built-in one by its name, any other as a file. `seed` is the random seed.
    pub(crate) fn open(&self, path: &Path, seed: u64) -> Result<Trace> {
        let options = self.options(seed)?;
        catalogue::open_with(path, Path::new(""), &options).with_context(|| path.display().to_string())
    }

    fn options(&self, seed: u64) -> Result<Options> {
        let format = |name: &String| {
            let names = || Format::ALL.iter().map(|format| format.name()).collect::<Vec<_>>().join(", ");
            Format::by_name(name).with_context(|| format!("--format {name}: must be one of {}", names()))
        };
        let jitter = match self.jitter.as_str() {
            "auto" => Jitter::Auto,
            "off" => Jitter::Off,
            other => bail!("--jitter {other}: must be auto or off"),
        };
        if self.block_tokens == Some(0) {
            bail!("--block-tokens 0: must be at least 1");
        }
        if !(self.session_rate.is_finite() && self.session_rate > 0.0) {
            bail!("--session-rate {}: must be above 0", self.session_rate);
        }
        Ok(Options {
            format: self.format.as_ref().map(format).transpose()?,
            block_tokens: self.block_tokens,
            jitter,
            seed,
            skip_bad: self.skip_bad,
            open_loop: self.open_loop,
            session_rate: self.session_rate,
            shared_head: !self.no_shared_head,
        })
    }
}

/// Writes a trace and prints a summary.
fn save(trace: &Trace, path: &Path) -> Result<()> {
    normal::save(trace, path).with_context(|| format!("--out {}", path.display()))?;
    let sessions = trace.requests.iter().map(|request| request.session).max().map_or(0, |last| last + 1);
    let mut out = std::io::stdout();
    writeln!(
        out,
        "{}: {} requests of {sessions} sessions in {:.0} s; {} prompt and {} answer tokens, in blocks of {}",
        path.display(),
        trace.requests.len(),
        trace.span_s(),
        trace.input_tokens(),
        trace.output_tokens(),
        trace.block_tokens
    )?;
    for note in &trace.notes {
        writeln!(out, "note: {note}")?;
    }
    Ok(())
}
