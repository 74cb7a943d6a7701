//! `kvlane trace sample`: a trace for a smaller fleet, and its distance to the original.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, ensure};
use clap::Args;
use kvlane_lab::report::number;
use kvlane_lab::trace_stats::fidelity::closest;
use kvlane_trace::format::normal;
use kvlane_trace::sample::Method;

use super::ReadArgs;
use super::show::{Show, name};

/// Flags of the sampler.
#[derive(Args, Clone, Debug)]
pub(crate) struct SampleArgs {
    /// The trace, of any known format, plain or gzip, or one that comes with kvlane: `mooncake-conversation`,
    /// `weka-agentic` or `azure-conversation`.
    file: PathBuf,
    /// Sampling method: sessions, window, window+thin or session-closed-window; auto tries all of them and takes the
    /// closest to the original.
    #[arg(long, default_value = "auto")]
    method: String,
    /// Share of the requests to keep, above 0 and at most 1.
    #[arg(long, value_name = "SHARE", required_unless_present = "target_requests")]
    sample_ratio: Option<f64>,
    /// Approximate number of requests to keep.
    #[arg(long, value_name = "REQUESTS", conflicts_with = "sample_ratio")]
    target_requests: Option<u64>,
    /// Random seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Output file; gzip if the name ends in `.gz`.
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    #[command(flatten)]
    show: Show,
    #[command(flatten)]
    read: ReadArgs,
}

/// Runs it.
pub(crate) fn run(args: &SampleArgs) -> Result<ExitCode> {
    let methods = args.methods()?;
    if let Some(ratio) = args.sample_ratio {
        ensure!(ratio > 0.0 && ratio <= 1.0, "--sample-ratio {ratio}: must be above 0 and at most 1");
    }
    ensure!(args.target_requests != Some(0), "--target-requests 0: must be at least 1");
    let mut files = args.show.open()?;
    let trace = args.read.open(&args.file, args.seed)?;
    let count = trace.requests.len() as f64;
    let share = args.target_requests.map_or(args.sample_ratio, |target| Some(target as f64 / count));
    let share = share.context("--sample-ratio or --target-requests is required")?.min(1.0);
    let (sample, fidelity) =
        closest(&trace, &methods, share, args.seed).context("there is no method to try")?;
    normal::save(&sample, &args.out).with_context(|| format!("--out {}", args.out.display()))?;
    files.tell(&fidelity.to_text())?;
    files.tell(&format!(
        "{}: {} of {} requests by {}, at distance {} of the original; replay it against {} % of the fleet",
        args.out.display(),
        sample.requests.len(),
        trace.requests.len(),
        fidelity.method,
        number(fidelity.distance()),
        number(fidelity.closeness().rate_ratio * 100.0)
    ))?;
    files.json(&fidelity)?;
    files.page(|| fidelity.to_page(&name(&args.file)))?;
    Ok(ExitCode::SUCCESS)
}

// === impl SampleArgs ===

impl SampleArgs {
    fn methods(&self) -> Result<Vec<Method>> {
        if self.method == "auto" {
            return Ok(Method::ALL.to_vec());
        }
        let names = || Method::ALL.map(Method::name).join(", ");
        let method = Method::by_name(&self.method);
        Ok(vec![
            method
                .with_context(|| format!("--method {}: must be auto or one of {}", self.method, names()))?,
        ])
    }
}
