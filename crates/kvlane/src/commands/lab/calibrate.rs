//! `kvlane calibrate`: measures a live server and writes the timing model that imitates it.

use std::fs::File;
use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use kvlane_core::suggest::suggest;
use kvlane_core::timing::{Dtype, Efficiency, Hardware, Host, ModelShape, TimingModel, Traffic};
use kvlane_lab::calibrate::fit::fit;
use kvlane_lab::calibrate::measure::{MeasureConfig, Measured, measure};
use kvlane_lab::calibrate::report::Report;
use kvlane_lab::calibrate::server::Server;
use kvlane_lab::calibrate::{Pick, Plan, PlanOptions};

use super::page::PageArgs;

/// Name of an unknown machine.
const GENERIC: &str = "generic";

/// Flags of the calibration.
#[derive(Args, Clone, Debug)]
pub(crate) struct CalibrateArgs {
    /// The server, as http://host:port. It must be idle otherwise.
    url: String,
    /// The model's name in requests; optional if the server has only one.
    #[arg(long)]
    model: Option<String>,
    /// API key, sent as a bearer token.
    #[arg(long)]
    api_key: Option<String>,
    /// Model and machine, as `model@gpu` or `model@gpuxN`: the prior of the fit.
    #[arg(long, conflicts_with_all = ["config_json", "gpu", "tp"])]
    preset: Option<String>,
    /// The model's Hugging Face config.json, for models without a preset.
    #[arg(long, value_name = "FILE")]
    config_json: Option<PathBuf>,
    /// With --config-json: the GPU, one of the presets' or `generic` for any other.
    #[arg(long, default_value = GENERIC)]
    gpu: String,
    /// With --config-json: number of GPUs.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    tp: u32,
    /// Type of the server's keys and values: bf16 or fp8.
    #[arg(long, default_value = "bf16")]
    kv_dtype: Dtype,
    /// Maximum tokens of the server's steps, if it does not report them (vLLM does with VLLM_SERVER_DEV_MODE=1); 2048
    /// otherwise.
    #[arg(long)]
    max_num_batched_tokens: Option<u32>,
    /// Maximum sequences of the server's steps, if it does not report them.
    #[arg(long)]
    max_num_seqs: Option<u32>,
    /// Longest prompt to send [default: 32768, or the server's maximum].
    #[arg(long)]
    max_prompt_tokens: Option<u32>,
    /// Number of rounds [default: 5, or 3 with --quick].
    #[arg(long)]
    repeats: Option<u32>,
    /// Use the fastest round of each measurement, not the median: for a shared machine.
    #[arg(long)]
    fastest: bool,
    /// Fewer lengths and batches, for a quick look.
    #[arg(long)]
    quick: bool,
    /// Seed of the prompts; the server must not have cached the prompts of this seed [default: the time].
    #[arg(long)]
    seed: Option<u64>,
    /// Timeout of a measurement, in seconds.
    #[arg(long, default_value_t = 600)]
    timeout_secs: u64,
    /// Write the timing file (schema kvlane.timing/1) here.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write the figures as JSON (schema kvlane.calibrate/1) to a file, or to stdout without one.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    #[command(flatten)]
    page: PageArgs,
}

/// Runs it.
pub(crate) fn run(args: &CalibrateArgs) -> Result<ExitCode> {
    let prior = prior(args)?;
    for (flag, count) in [
        ("--max-num-batched-tokens", args.max_num_batched_tokens),
        ("--max-num-seqs", args.max_num_seqs),
        ("--max-prompt-tokens", args.max_prompt_tokens),
        ("--repeats", args.repeats),
    ] {
        ensure!(count != Some(0), "{flag} 0: must be at least 1");
    }
    let server = Server::new(&args.url, args.api_key.as_deref())?;
    let json = args.json.as_deref().filter(|path| path.as_os_str() != "-");
    let files = [args.out.as_deref(), json];
    args.page.check()?;
    for path in files.into_iter().flatten() {
        // Detect a file that cannot be written before the run, not after it.
        File::options().create(true).append(true).open(path).with_context(|| cannot_write(path))?;
    }
    let seed = args.seed.unwrap_or_else(|| {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
    });
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let (facts, measured) = runtime.block_on(async {
        let mut facts = server.facts(args.model.as_deref()).await?;
        let limits = &mut facts.limits;
        limits.max_num_batched_tokens = args.max_num_batched_tokens.or(limits.max_num_batched_tokens);
        limits.max_num_seqs = args.max_num_seqs.or(limits.max_num_seqs);
        let options = PlanOptions {
            prompt_tokens_max: args.max_prompt_tokens,
            quick: args.quick,
            repeats: args.repeats,
        };
        let plan = Plan::new(limits, &options);
        let config = MeasureConfig {
            model: facts.model.clone(),
            vocab: prior.model.vocab,
            seed,
            pick: if args.fastest { Pick::Fastest } else { Pick::Median },
            timeout: Duration::from_secs(args.timeout_secs),
        };
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        bar.set_style(ProgressStyle::with_template("{bar:40} {pos}/{len}  {msg:24} {elapsed}")?);
        let measured = measure(server, config, &plan, |done, total, probe| {
            bar.set_length(total as u64);
            bar.set_position(done as u64);
            bar.set_message(probe.name());
        });
        let measured: Measured = measured.await?;
        bar.finish_and_clear();
        anyhow::Ok((facts, measured))
    })?;
    let Measured { points, notes } = measured;
    let fit = fit(&prior, facts.limits.chunk_tokens(), &points).with_context(|| notes.join("; "))?;
    let report = Report::new(&args.url, &facts, seed, &points, fit, notes);
    let figures = serde_json::to_string_pretty(&report)?;
    if args.json.is_some() && json.is_none() {
        writeln!(std::io::stdout(), "{figures}")?;
        writeln!(std::io::stderr(), "{}", report.to_text())?;
    } else {
        writeln!(std::io::stdout(), "{}", report.to_text())?;
    }
    let write = |path: Option<&Path>, text: &dyn Fn() -> String| match path {
        Some(path) => std::fs::write(path, text()).with_context(|| cannot_write(path)),
        None => Ok(()),
    };
    let [out, json] = files;
    write(out, &|| report.timing.to_json())?;
    write(json, &|| format!("{figures}\n"))?;
    args.page.write(|| report.to_page())?;
    if let (Some(path), true) = (&args.out, std::io::stderr().is_terminal()) {
        writeln!(std::io::stderr(), "try: kvlane mock-engine --timing {}", path.display())?;
    }
    Ok(ExitCode::SUCCESS)
}

fn cannot_write(path: &Path) -> String {
    format!("cannot write {}", path.display())
}

/// The model whose constants are fitted.
fn prior(args: &CalibrateArgs) -> Result<TimingModel> {
    if let Some(preset) = &args.preset {
        let timing = TimingModel::preset(preset).context("--preset")?;
        return Ok(TimingModel { kv_dtype: args.kv_dtype, ..timing });
    }
    let Some(path) = &args.config_json else { bail!("--preset or --config-json is required") };
    let read = || format!("--config-json {}", path.display());
    let text = std::fs::read_to_string(path).with_context(read)?;
    let name = path.parent().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    let name = name.unwrap_or_else(|| "model".into());
    let model = ModelShape::from_config_json(&name, &text).with_context(read)?;
    model.check_split(args.tp).map_err(|why| anyhow!("--tp {}: {why}", args.tp))?;
    let hardware = match args.gpu.as_str() {
        GENERIC => generic(),
        gpu => match Hardware::of(gpu, &model) {
            Some(hardware) => hardware,
            None => {
                let names = Hardware::names();
                let known = names.iter().copied().chain([GENERIC]);
                bail!("--gpu {gpu}: unknown; {}", suggest(gpu, known, "Others are `generic`."))
            }
        },
    };
    Ok(TimingModel {
        model,
        hardware,
        host: Host::default(),
        traffic: Traffic::default(),
        gpus: args.tp,
        kv_dtype: args.kv_dtype,
    })
}

/// Peaks above those of any machine, so that the part that is not fitted (element-wise work, which follows from the
/// bandwidth) is negligible and is absorbed by the fitted constants.
fn generic() -> Hardware {
    Hardware {
        name: GENERIC.into(),
        peak_flops: 1e15,
        fp8_peak_flops: None,
        memory_bytes_per_s: 1e13,
        memory_bytes: 64.0 * 1_073_741_824.0,
        all_reduce_secs: 1e-5,
        all_reduce_bytes_per_s: 1e11,
        layer_secs: 0.0,
        moe_layer_secs: 0.0,
        efficiency: Efficiency { compute: 0.5, weights: 0.5, kv: 0.5, attention: 0.5 },
    }
}
