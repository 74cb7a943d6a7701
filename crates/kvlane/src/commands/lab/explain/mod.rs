//! `kvlane explain`: explains the placement of recorded requests, and compares it with other policies.
//!
//! The recording is replayed through the scheduler that runs in production, so the rows of a decision are those that
//! the policy saw; the output states how many replayed placements equal the recorded ones.

mod decision;
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

/// Flags of explain.
#[derive(Args, Clone, Debug)]
pub(crate) struct ExplainArgs {
    /// Recordings: files, or directories of them.
    #[arg(required = true, value_name = "RECORDING")]
    recordings: Vec<PathBuf>,
    /// The model, if there are recordings of several.
    #[arg(long)]
    model: Option<String>,
    /// Explain this request: its id in the answer's x-request-id, or its number in GET /decisions.
    #[arg(long, value_name = "ID", conflicts_with_all = ["session", "worst"])]
    request: Option<String>,
    /// Explain all requests of a conversation: its name at the client (if no tenant is named), or its key in GET
    /// /decisions.
    #[arg(long, value_name = "NAME", conflicts_with = "worst")]
    session: Option<String>,
    /// Explain this many requests with the longest times to first token.
    #[arg(long, value_name = "N")]
    worst: Option<usize>,
    /// Policies to compare, separated by commas.
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    policies: Vec<String>,
    /// Model and machine of an engine for --policies, as in `llama-3.3-70b@h100x4` [default: the gateway's
    /// routing.timing, else llama-3.1-8b@h100]. The engines' speed is learned from the recording.
    #[arg(long)]
    preset: Option<String>,
    /// Number of simulations of each policy, with different seeds.
    #[arg(long, default_value_t = 3)]
    seeds: u32,
    /// Write the results as JSON (schema kvlane.explain/1) to a file, or to stdout without one.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
}

/// Maximum decisions shown.
const SHOWN_MAX: usize = 1000;

/// Runs it.
pub(crate) fn run(args: &ExplainArgs) -> Result<ExitCode> {
    let others: Vec<PolicyConfig> = args
        .policies
        .iter()
        .map(|name| {
            PolicyConfig::by_name(name)
                .with_context(|| format!("--policies: {}", PolicyConfig::unknown(name)))
        })
        .collect::<Result<_>>()?;
    ensure!(args.seeds > 0, "--seeds 0: must be at least 1");
    ensure!(
        args.worst.is_none_or(|worst| (1..=SHOWN_MAX).contains(&worst)),
        "--worst: must be 1 to {SHOWN_MAX}"
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
            "{}: no such request in the recording of {}; {}",
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
    /// The flag that selects the decisions.
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
