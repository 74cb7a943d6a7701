//! `kvlane explain`: why did a recorded request go where it went, and what would other policies have done?
//!
//! The recording is lived through by the scheduler that runs in production, so what is shown of a decision is what the
//! policy saw, and how far the replay met what was recorded is said each time.

mod decisions;
mod files;
mod policies;
mod summary;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Args;
use kvlane_core::policy::PolicyConfig;
use serde_json::{Value, json};

use decisions::Wanted;
use files::Files;

/// What to explain.
#[derive(Args, Clone, Debug)]
pub(crate) struct ExplainArgs {
    /// Recordings: files, or directories of them.
    #[arg(required = true, value_name = "RECORDING")]
    recordings: Vec<PathBuf>,
    /// The model, where there are recordings of several.
    #[arg(long)]
    model: Option<String>,
    /// Why this request went where it went: its id as the answer's x-request-id says, or its number as in GET /decisions.
    #[arg(long, value_name = "ID", conflicts_with_all = ["session", "worst"])]
    request: Option<String>,
    /// The same of all requests of a conversation: what its client calls it (where no tenant is named), or its key as in
    /// GET /decisions.
    #[arg(long, value_name = "NAME", conflicts_with = "worst")]
    session: Option<String>,
    /// The same of so many requests with the longest times to first token.
    #[arg(long, value_name = "N")]
    worst: Option<usize>,
    /// What these policies would have done, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    policies: Vec<String>,
    /// Model and machine of an engine for --policies, as in `llama-3.3-70b@h100x4` [default: what the gateway was told, else
    /// llama-3.1-8b@h100]. How fast engines were is learned from the recording.
    #[arg(long)]
    preset: Option<String>,
    /// How often each policy is simulated, under different seeds.
    #[arg(long, default_value_t = 3)]
    seeds: u32,
    /// Write what is found as JSON (schema kvlane.explain/1) to a file, or to stdout without one.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
}

/// Decisions that are shown at most.
const SHOWN_MAX: usize = 1000;

/// Runs it.
pub(crate) fn run(args: &ExplainArgs) -> Result<ExitCode> {
    let others: Vec<PolicyConfig> = args
        .policies
        .iter()
        .map(|name| {
            PolicyConfig::by_name(name).with_context(|| {
                format!(
                    "--policies {name}: there is no such policy, take some of {}",
                    PolicyConfig::NAMES.join(", ")
                )
            })
        })
        .collect::<Result<_>>()?;
    ensure!(args.seeds > 0, "--seeds 0: take at least 1");
    ensure!(
        args.worst.is_none_or(|worst| (1..=SHOWN_MAX).contains(&worst)),
        "--worst: take 1 to {SHOWN_MAX}"
    );
    let files = Files::find(&args.recordings, args.model.as_deref())?;
    let mut text = String::new();
    let mut found = json!({"schema": "kvlane.explain/1", "model": files.model});
    let wanted = match (&args.request, &args.session, args.worst) {
        (Some(request), ..) => Some(Wanted::request(request)),
        (_, Some(session), _) => Some(Wanted::session(session)),
        (.., Some(worst)) => Some(Wanted::Worst(worst)),
        _ => None,
    };
    if let Some(wanted) = &wanted {
        let decisions = decisions::explain(&files, wanted, SHOWN_MAX)?;
        ensure!(
            !decisions.is_empty(),
            "{}: there is no such request in the recording of {}; {}",
            args.wanted(),
            files.model,
            decisions.replayed()
        );
        found["decisions"] = decisions.json();
        text += &decisions.text();
    }
    if wanted.is_none() || !others.is_empty() {
        let summary = summary::read(&files)?;
        if wanted.is_none() {
            found["summary"] = summary.json();
            text += &summary.text();
        }
        if !others.is_empty() {
            let compared = policies::compare(&files, &summary, &others, args.preset.as_deref(), args.seeds)?;
            found["policies"] = compared.json();
            text += &compared.text();
        }
    }
    write_out(args.json.as_deref(), &found, &text)?;
    Ok(ExitCode::SUCCESS)
}

// === impl ExplainArgs ===

impl ExplainArgs {
    /// The flag that says which decisions are wanted.
    fn wanted(&self) -> String {
        match (&self.request, &self.session, self.worst) {
            (Some(request), ..) => format!("--request {request}"),
            (_, Some(session), _) => format!("--session {session}"),
            (.., Some(worst)) => format!("--worst {worst}"),
            _ => String::new(),
        }
    }
}

fn write_out(json: Option<&Path>, found: &Value, text: &str) -> Result<()> {
    let mut out = std::io::stdout();
    match json {
        None => write!(out, "{text}")?,
        Some(path) if path == Path::new("-") => {
            writeln!(out, "{}", serde_json::to_string_pretty(found)?)?;
            write!(std::io::stderr(), "{text}")?;
        }
        Some(path) => {
            let written = std::fs::write(path, serde_json::to_string_pretty(found)? + "\n");
            written.with_context(|| format!("--json {}", path.display()))?;
            write!(out, "{text}")?;
        }
    }
    Ok(())
}
