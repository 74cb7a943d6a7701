//! `kvlane trace generate`: generates a trace from a workload.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use kvlane_core::suggest::suggest;
use kvlane_trace::generate::{Workload, generate};
use serde_json::{Value, json};

use super::save;
use kvlane_wire::mistake::in_words;
use kvlane_wire::yaml;

/// Flags of the generator.
#[derive(Args, Clone, Debug)]
pub(crate) struct GenerateArgs {
    /// Kind of the workload, with its default settings; `kvlane trace generate --kinds` lists them.
    #[arg(conflicts_with = "config")]
    kind: Option<String>,
    /// A workload (YAML), with its kind under the key `kind`.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Set a setting of the workload, as in `--set question_tokens=500`. Repeatable.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Requests per second, or sessions where the workload has them, with exponential gaps.
    #[arg(long)]
    rate: Option<f64>,
    /// Number of requests, or sessions.
    #[arg(long)]
    count: Option<u32>,
    /// Length of the trace in seconds: later turns of sessions are left out.
    #[arg(long, conflicts_with = "count")]
    seconds: Option<f64>,
    /// Random seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Output file; gzip if the name ends in `.gz`.
    #[arg(long, value_name = "FILE", required_unless_present = "kinds")]
    out: Option<PathBuf>,
    /// Print every kind with its default settings, and generate nothing.
    #[arg(long)]
    kinds: bool,
}

/// Runs it.
pub(crate) fn run(args: &GenerateArgs) -> Result<ExitCode> {
    if args.kinds {
        use std::io::Write as _;
        for workload in Workload::KINDS.iter().filter_map(|kind| Workload::by_kind(kind)) {
            writeln!(std::io::stdout(), "{}", serde_json::to_string(&workload)?)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let workload = args.workload()?;
    let trace = generate(&workload, args.seed)?;
    save(&trace, args.out.as_deref().context("--out is missing")?)?;
    Ok(ExitCode::SUCCESS)
}

// === impl GenerateArgs ===

impl GenerateArgs {
    fn workload(&self) -> Result<Workload> {
        let mut tree = match (&self.config, &self.kind) {
            (Some(path), _) => {
                let text = std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read {}", path.display()))?;
                let tree: Value = yaml::read(&text).with_context(|| format!("in {}", path.display()))?;
                self.parse(&tree).with_context(|| format!("in {}", path.display()))?;
                tree
            }
            (None, Some(kind)) => {
                ensure!(
                    Workload::KINDS.contains(&kind.as_str()),
                    "unknown workload '{kind}': {}",
                    suggest(
                        kind,
                        Workload::KINDS.iter().copied(),
                        "`kvlane trace generate --kinds` lists all."
                    )
                );
                json!({"kind": kind})
            }
            (None, None) => bail!("a kind (one of {}) or --config is required", Workload::KINDS.join(", ")),
        };
        for set in &self.set {
            let (key, value) =
                set.split_once('=').with_context(|| format!("--set {set}: write key=value"))?;
            let mut at = &mut tree;
            for name in key.split('.') {
                let Value::Object(section) = at else { bail!("--set {set}: '{name}' is inside a value") };
                at = section.entry(name).or_insert_with(|| json!({}));
            }
            *at = serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
            self.parse(&tree).with_context(|| format!("--set {set}"))?;
        }
        if self.rate.is_some() || self.count.is_some() || self.seconds.is_some() {
            let count = self.count.or((self.seconds.is_none()).then_some(1000));
            tree["arrivals"] = json!({
                "process": "poisson", "rate": self.rate.unwrap_or(1.0), "count": count, "seconds": self.seconds
            });
        }
        self.parse(&tree)
    }

    fn parse(&self, tree: &Value) -> Result<Workload> {
        serde_json::from_value(tree.clone()).map_err(|error| anyhow!("{}", in_words(&error.to_string(), "")))
    }
}
