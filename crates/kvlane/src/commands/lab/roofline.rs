//! `kvlane roofline`: operations and bytes of a model for prefill and decode, and their bounds.
//!
//! The arithmetic intensity of a step (operations per byte) decides whether arithmetic or memory bounds it: above the
//! machine's ridge point it is bound by arithmetic, below by memory. Reuse of cached prefixes saves operations but
//! not the reading of weights, so it lowers the intensity of prefill.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use kvlane_core::timing::{Dtype, ModelShape, StepParts, StepShape, StepWork, TimingModel};
use kvlane_lab::report::{Axis, Chart, Mark, Page, Part, Section, Series, Table};
use serde::Serialize;

use super::page::PageArgs;

/// Maximum rows of one table: the flags' lists multiply.
const ROWS_MAX: usize = 10_000;

/// Maximum steps of one prompt.
const STEPS_MAX: u32 = 100_000;

/// Model and machine by a preset, or by the model's file and the GPU.
#[derive(Args, Clone, Debug)]
pub(crate) struct RooflineArgs {
    /// Model and machine, as `model@gpu` or `model@gpuxN`; `model:fp8@gpu` has 8-bit weights.
    #[arg(long, required_unless_present = "config_json", conflicts_with = "config_json")]
    preset: Option<String>,
    /// A model of your own: its Hugging Face `config.json`.
    #[arg(long, value_name = "FILE", requires = "gpu")]
    config_json: Option<PathBuf>,
    /// With `--config-json`: the GPU, as in a preset.
    #[arg(long, conflicts_with = "preset")]
    gpu: Option<String>,
    /// With `--config-json`: number of GPUs.
    #[arg(long, default_value_t = 1, conflicts_with = "preset", value_parser = clap::value_parser!(u32).range(1..=64))]
    tp: u32,
    /// Type of keys and values: bf16 or fp8.
    #[arg(long, default_value = "bf16")]
    kv_dtype: Dtype,
    /// Tokens of context, separated by commas: of a prompt, and of each decoding sequence.
    #[arg(long, value_delimiter = ',', default_value = "1024,8192,32768,131072")]
    context: Vec<u32>,
    /// Shares of a prompt that are cached, from 0 to below 1, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "0,0.5,0.95")]
    reuse: Vec<f64>,
    /// Decoding sequences in a batch, separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "1,32,128")]
    batch: Vec<u32>,
    /// Maximum tokens in a step; longer prompts are computed in chunks.
    #[arg(long, default_value_t = 8192, value_parser = clap::value_parser!(u32).range(1..))]
    max_num_batched_tokens: u32,
    /// Share of the memory that weights, activations and KV cache may use.
    #[arg(long, default_value_t = 0.90)]
    gpu_memory_utilization: f64,
    /// Write the figures as JSON to a file, or to stdout without one.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    json: Option<PathBuf>,
    #[command(flatten)]
    page: PageArgs,
}

/// Results of the command, as in the JSON.
#[derive(Serialize)]
struct Analysis {
    schema: &'static str,
    model: String,
    gpu: String,
    gpus: u32,
    weights: &'static str,
    kv_dtype: &'static str,
    parameters: f64,
    active_parameters: f64,
    weight_bytes: f64,
    kv_bytes_per_token: u64,
    kv_capacity_tokens: u64,
    /// Of all GPUs, from the data sheet, for the type of the weights.
    peak_flops: f64,
    memory_bytes_per_s: f64,
    /// Operations per byte at which arithmetic and memory take equal time: by the data sheet, and at the reached
    /// rates.
    ridge_flops_per_byte: f64,
    reached_ridge_flops_per_byte: f64,
    prefill: Vec<Prefill>,
    decode: Vec<Decode>,
}

/// One prompt.
#[derive(Serialize)]
struct Prefill {
    context: u32,
    reuse: f64,
    cached_tokens: u32,
    new_tokens: u32,
    /// Share of the operations of the uncached prompt that reuse saves.
    flops_saved: f64,
    #[serde(flatten)]
    cost: Cost,
}

/// One decode step.
#[derive(Serialize)]
struct Decode {
    batch: u32,
    context: u32,
    tokens_per_s: f64,
    /// Whether the KV cache holds that many contexts.
    fits: bool,
    #[serde(flatten)]
    cost: Cost,
}

#[derive(Serialize)]
struct Cost {
    flops: f64,
    bytes: f64,
    flops_per_byte: f64,
    #[serde(flatten)]
    work: StepWork,
    time_s: f64,
    #[serde(flatten)]
    parts: StepParts,
    bound: &'static str,
}

/// Runs it.
pub(crate) fn run(args: &RooflineArgs) -> Result<ExitCode> {
    let timing = args.timing()?;
    args.check()?;
    args.page.check()?;
    let analysis = Analysis::of(&timing, args);
    let only_json = args.json.as_deref() == Some(Path::new("-"));
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&analysis)? + "\n";
        if only_json {
            std::io::stdout().write_all(text.as_bytes())?;
        } else {
            fs::write(path, text).with_context(|| format!("--json {}", path.display()))?;
        }
    }
    args.page.write(|| analysis.page(&timing))?;
    if !only_json {
        write!(std::io::stdout(), "{}", analysis.text())?;
    }
    Ok(ExitCode::SUCCESS)
}

// === impl RooflineArgs ===

impl RooflineArgs {
    fn timing(&self) -> Result<TimingModel> {
        let mut timing = match (&self.preset, &self.config_json) {
            (Some(preset), _) => TimingModel::preset(preset).context("--preset")?,
            (None, Some(path)) => {
                let shown = path.display();
                let text = fs::read_to_string(path).with_context(|| format!("--config-json {shown}"))?;
                let name = path.parent().and_then(Path::file_name).or(path.file_stem());
                let name = name.map_or("model".into(), |name| name.to_string_lossy());
                let model = ModelShape::from_config_json(&name, &text)
                    .with_context(|| format!("--config-json {shown}"))?;
                let gpu = self.gpu.as_deref().unwrap_or_default();
                TimingModel::new(model, gpu, self.tp).context("--gpu, --tp")?
            }
            (None, None) => bail!("--preset, or --config-json with --gpu, is required"),
        };
        ensure!(self.kv_dtype != Dtype::Mxfp4, "--kv-dtype mxfp4: must be bf16 or fp8");
        timing.kv_dtype = self.kv_dtype;
        Ok(timing)
    }

    fn check(&self) -> Result<()> {
        let share = self.gpu_memory_utilization;
        ensure!(
            share > 0.0 && share <= 1.0,
            "--gpu-memory-utilization {share}: must be above 0 and at most 1"
        );
        for reuse in &self.reuse {
            ensure!((0.0..1.0).contains(reuse), "--reuse {reuse}: must be at least 0 and below 1");
        }
        ensure!(!self.context.contains(&0), "--context 0: must be at least 1");
        ensure!(
            self.context.iter().all(|n| *n <= 100_000_000),
            "--context: must be at most 100 million tokens"
        );
        ensure!(!self.batch.contains(&0), "--batch 0: must be at least 1");
        let steps = self.context.iter().map(|n| n / self.max_num_batched_tokens).max().unwrap_or(0);
        ensure!(
            steps <= STEPS_MAX,
            "--max-num-batched-tokens {}: the longest context makes {steps} steps, the maximum is {STEPS_MAX}",
            self.max_num_batched_tokens
        );
        let rows = self.context.len() * self.reuse.len().max(self.batch.len());
        ensure!(rows <= ROWS_MAX, "the lists make {rows} rows, the maximum is {ROWS_MAX}");
        Ok(())
    }
}

// === impl Analysis ===

impl Analysis {
    fn of(timing: &TimingModel, args: &RooflineArgs) -> Self {
        let (model, hardware, share) = (&timing.model, &timing.hardware, &timing.hardware.efficiency);
        let gpus = f64::from(timing.gpus);
        let peak_flops = gpus * hardware.peak_flops_of(model.main_dtype());
        let memory_bytes_per_s = gpus * hardware.memory_bytes_per_s;
        let ridge = peak_flops / memory_bytes_per_s;
        let kv_capacity_tokens = timing.kv_capacity_tokens(args.gpu_memory_utilization);
        let pairs = |one: usize| (0..args.context.len()).flat_map(move |i| (0..one).map(move |j| (i, j)));
        Self {
            schema: "kvlane.roofline/1",
            model: model.name.clone(),
            gpu: hardware.name.clone(),
            gpus: timing.gpus,
            weights: model.main_dtype().name(),
            kv_dtype: timing.kv_dtype.name(),
            parameters: model.parameters(),
            active_parameters: model.active_parameters() + model.head_parameters(),
            weight_bytes: model.weight_bytes(),
            kv_bytes_per_token: timing.kv_bytes_per_token(),
            kv_capacity_tokens,
            peak_flops,
            memory_bytes_per_s,
            ridge_flops_per_byte: ridge,
            reached_ridge_flops_per_byte: ridge * share.compute / share.weights,
            prefill: pairs(args.reuse.len())
                .map(|(i, j)| {
                    Prefill::of(timing, args.context[i], args.reuse[j], args.max_num_batched_tokens)
                })
                .collect(),
            decode: pairs(args.batch.len())
                .map(|(i, j)| Decode::of(timing, args.context[i], args.batch[j], kv_capacity_tokens))
                .collect(),
        }
    }

    fn head(&self) -> String {
        let gib = f64::from(1 << 30);
        format!(
            "{} ({:.1} B parameters, {:.1} B for a token, {:.1} GiB in {}) on {} x {}: {:.0} TFLOP/s, {:.2} TB/s, \
             ridge point at {:.0} FLOP/byte by the data sheet, {:.0} as reached.\n\
             Keys and values in {}: {:.1} KiB a token, {} tokens fit.\n",
            self.model,
            self.parameters / 1e9,
            self.active_parameters / 1e9,
            self.weight_bytes / gib,
            self.weights,
            self.gpus,
            self.gpu,
            self.peak_flops / 1e12,
            self.memory_bytes_per_s / 1e12,
            self.ridge_flops_per_byte,
            self.reached_ridge_flops_per_byte,
            self.kv_dtype,
            self.kv_bytes_per_token as f64 / 1024.0,
            self.kv_capacity_tokens,
        )
    }

    fn prefill_table(&self) -> Table {
        let columns =
            ["context", "reuse", "new tokens", "TFLOP", "saved", "GB", "FLOP/byte", "ms", "tok/s", "bound"];
        let row = |row: &Prefill| {
            vec![
                row.context.to_string(),
                format!("{:.0} %", row.reuse * 100.0),
                row.new_tokens.to_string(),
                format!("{:.2}", row.cost.flops / 1e12),
                format!("{:.0} %", row.flops_saved * 100.0),
                format!("{:.1}", row.cost.bytes / 1e9),
                format!("{:.0}", row.cost.flops_per_byte),
                format!("{:.1}", row.cost.time_s * 1e3),
                format!("{:.0}", f64::from(row.new_tokens) / row.cost.time_s),
                row.cost.bound.to_owned(),
            ]
        };
        Table { columns: columns.map(str::to_owned).into(), rows: self.prefill.iter().map(row).collect() }
    }

    fn decode_table(&self) -> Table {
        let columns = ["context", "batch", "GFLOP", "GB", "FLOP/byte", "ms", "tok/s", "bound", "fits"];
        let row = |row: &Decode| {
            vec![
                row.context.to_string(),
                row.batch.to_string(),
                format!("{:.1}", row.cost.flops / 1e9),
                format!("{:.1}", row.cost.bytes / 1e9),
                format!("{:.1}", row.cost.flops_per_byte),
                format!("{:.2}", row.cost.time_s * 1e3),
                format!("{:.0}", row.tokens_per_s),
                row.cost.bound.to_owned(),
                if row.fits { "yes" } else { "no" }.to_owned(),
            ]
        };
        Table { columns: columns.map(str::to_owned).into(), rows: self.decode.iter().map(row).collect() }
    }

    fn text(&self) -> String {
        format!(
            "{}\nPrefill of one prompt\n{}\nDecode, one step\n{}",
            self.head(),
            self.prefill_table().to_text(),
            self.decode_table().to_text()
        )
    }

    fn page(&self, timing: &TimingModel) -> Page {
        let intro = format!(
            "{}\nBytes are those of weights, keys and values. A dot is a prompt or a decode step: as high as the \
             operations it gets done in a second, counting everything that takes time, the host too. Above the ridge \
             point arithmetic is what it waits for, below it memory.",
            self.head()
        );
        let plot = Chart {
            title: "Roofline".into(),
            x: Axis::log("arithmetic intensity (FLOP/byte)"),
            y: Axis::log("TFLOP/s"),
            series: self.series(timing),
        };
        Page {
            title: format!("Roofline of {}", timing.name()),
            intro,
            sections: vec![
                Section { heading: "Roofline".into(), parts: vec![Part::Chart(plot)] },
                Section {
                    heading: "Prefill of one prompt".into(),
                    parts: vec![Part::Table(self.prefill_table())],
                },
                Section { heading: "Decode, one step".into(), parts: vec![Part::Table(self.decode_table())] },
            ],
            ..Page::default()
        }
    }

    /// The rooflines, and a dot for each row: prompts grouped by cached share, decode steps by batch.
    fn series(&self, timing: &TimingModel) -> Vec<Series> {
        let dot = |cost: &Cost| (cost.flops_per_byte, cost.flops / cost.time_s / 1e12);
        let costs =
            || self.prefill.iter().map(|row| &row.cost).chain(self.decode.iter().map(|row| &row.cost));
        let right = costs().map(|cost| cost.flops_per_byte).fold(2.0 * self.ridge_flops_per_byte, f64::max);
        let left = costs().map(|cost| cost.flops_per_byte).fold(1.0, f64::min);
        let share = &timing.hardware.efficiency;
        let roof = |name: &str, compute: f64, memory: f64| {
            let (peak, bytes_per_s) =
                (self.peak_flops * compute / 1e12, self.memory_bytes_per_s * memory / 1e12);
            let points = vec![(left, left * bytes_per_s), (peak / bytes_per_s, peak), (right, peak)];
            Series { name: name.into(), points, ..Series::default() }
        };
        let mut series = vec![roof("data sheet", 1.0, 1.0), roof("as reached", share.compute, share.weights)];
        let mut add = |name: String, point: (f64, f64)| match series.iter_mut().find(|one| one.name == name) {
            Some(one) => one.points.push(point),
            None => series.push(Series { name, points: vec![point], mark: Mark::Dots, ..Series::default() }),
        };
        for row in &self.prefill {
            add(format!("prefill, {:.0} % cached", row.reuse * 100.0), dot(&row.cost));
        }
        for row in &self.decode {
            add(format!("decode, batch {}", row.batch), dot(&row.cost));
        }
        for one in &mut series {
            one.points.sort_by(|a, b| a.0.total_cmp(&b.0));
        }
        series
    }
}

// === impl Prefill ===

impl Prefill {
    fn of(timing: &TimingModel, context: u32, reuse: f64, chunk_tokens: u32) -> Self {
        // An engine computes at least the last token, to generate the next.
        let cached_tokens = ((f64::from(context) * reuse) as u32).min(context - 1);
        let cost = Cost::of(timing, &chunks(cached_tokens, context, chunk_tokens));
        let whole = Cost::of(timing, &chunks(0, context, chunk_tokens));
        Self {
            context,
            reuse,
            cached_tokens,
            new_tokens: context - cached_tokens,
            flops_saved: 1.0 - cost.flops / whole.flops,
            cost,
        }
    }
}

/// The steps that compute the tokens from `cached` to `context` of one prompt.
fn chunks(cached: u32, context: u32, chunk_tokens: u32) -> Vec<StepShape> {
    let mut steps = Vec::new();
    let mut position = cached;
    while position < context {
        let tokens = chunk_tokens.min(context - position);
        let mut step = StepShape::default();
        step.add_prefill(position, tokens);
        position += tokens;
        step.finished_prefills = u32::from(position == context);
        steps.push(step);
    }
    steps
}

// === impl Decode ===

impl Decode {
    fn of(timing: &TimingModel, context: u32, batch: u32, kv_capacity_tokens: u64) -> Self {
        let tokens = u64::from(batch) * u64::from(context);
        let step = StepShape { decode_seqs: batch, decode_context_tokens: tokens, ..StepShape::default() };
        let cost = Cost::of(timing, &[step]);
        Self {
            batch,
            context,
            tokens_per_s: f64::from(batch) / cost.time_s,
            fits: tokens <= kv_capacity_tokens,
            cost,
        }
    }
}

// === impl Cost ===

impl Cost {
    fn of(timing: &TimingModel, steps: &[StepShape]) -> Self {
        let compiled = timing.compile();
        let mut work = StepWork { matrix_flops: 0.0, attention_flops: 0.0, weight_bytes: 0.0, kv_bytes: 0.0 };
        let mut parts = StepParts { compute_s: 0.0, memory_s: 0.0, link_s: 0.0, host_s: 0.0 };
        let mut seconds = 0.0;
        for step in steps {
            let (more, longer) = (timing.work(step), compiled.parts(step));
            work.matrix_flops += more.matrix_flops;
            work.attention_flops += more.attention_flops;
            work.weight_bytes += more.weight_bytes;
            work.kv_bytes += more.kv_bytes;
            parts.compute_s += longer.compute_s;
            parts.memory_s += longer.memory_s;
            parts.link_s += longer.link_s;
            parts.host_s += longer.host_s;
            seconds += compiled.secs(step);
        }
        let bounds = [
            ("compute", parts.compute_s),
            ("memory", parts.memory_s),
            ("link", parts.link_s),
            ("host", parts.host_s),
        ];
        let (bound, _) =
            bounds.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).expect("there are four bounds");
        Self {
            flops: work.flops(),
            bytes: work.bytes(),
            flops_per_byte: work.intensity(),
            work,
            time_s: seconds,
            parts,
            bound,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: RooflineArgs,
    }

    fn args(line: &[&str]) -> RooflineArgs {
        Line::try_parse_from(["roofline"].iter().chain(line)).unwrap().args
    }

    fn analysis(line: &[&str]) -> Analysis {
        let args = args(line);
        args.check().unwrap();
        Analysis::of(&args.timing().unwrap(), &args)
    }

    #[test]
    fn long_prompts_are_bound_by_arithmetic_even_if_nearly_all_of_them_is_cached() {
        let line = ["--preset", "llama-3.1-8b@h100", "--context", "32768,131072", "--batch", "1"];
        let found = analysis(&line);
        for row in &found.prefill {
            assert_eq!(row.cost.bound, "compute", "{} {}", row.context, row.reuse);
            assert!(row.cost.flops_per_byte > 1000.0, "{}", row.cost.flops_per_byte);
        }
        for row in &found.decode {
            assert_eq!(row.cost.bound, "memory");
            assert!(row.cost.flops_per_byte < 5.0, "{}", row.cost.flops_per_byte);
        }
    }

    #[test]
    fn reuse_saves_the_cached_tokens_matrices_but_less_of_attention() {
        let found = analysis(&["--preset", "qwen3-32b@h100x2", "--context", "40000", "--reuse", "0,0.71"]);
        let [whole, part] = &found.prefill[..] else { panic!("two rows") };
        assert_eq!((whole.flops_saved, part.cached_tokens, part.new_tokens), (0.0, 28_400, 11_600));
        let saved = |of: fn(&StepWork) -> f64| 1.0 - of(&part.cost.work) / of(&whole.cost.work);
        assert!((saved(|work| work.matrix_flops) - 0.71).abs() < 1e-3);
        assert!((saved(|work| work.attention_flops) - 0.71 * 0.71).abs() < 1e-3);
    }

    #[test]
    fn a_decode_step_of_one_sequence_reads_a_byte_for_each_operation() {
        // Two operations for each weight of two bytes; in 8 bits, two for each byte.
        for (preset, expected) in [("llama-3.3-70b@h100x4", 1.0), ("llama-3.3-70b:fp8@h100x2", 2.0)] {
            let found = analysis(&["--preset", preset, "--context", "1", "--batch", "1"]);
            let intensity = found.decode[0].cost.flops_per_byte;
            assert!((intensity / expected - 1.0).abs() < 0.03, "{preset}: {intensity}");
        }
    }

    #[test]
    fn a_model_of_ones_own_is_read_from_its_config() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        let text = r#"{"architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "intermediate_size": 8192,
            "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "vocab_size": 32000}"#;
        fs::write(&path, text).unwrap();
        let line =
            ["--config-json", path.to_str().unwrap(), "--gpu", "h100", "--tp", "2", "--kv-dtype", "fp8"];
        let found = analysis(&line);
        assert_eq!((found.gpus, found.kv_dtype, found.kv_bytes_per_token), (2, "fp8", 16 * 2 * 8 * 64));
        fs::write(&path, text.replace("\"vocab_size\": 32000", "\"x\": 1")).unwrap();
        let error = format!("{:#}", args(&line).timing().unwrap_err());
        assert!(error.contains("config.json") && error.contains("`vocab_size`"), "{error}");
    }

    #[test]
    fn figures_that_make_no_sense_are_refused() {
        let refused = |more: &[&str], word: &str| {
            let args = args(&[&["--preset", "qwen2.5-7b@a100"], more].concat());
            let error = args.timing().map(|_| ()).and(args.check()).unwrap_err().to_string();
            assert!(error.contains(word), "{error}");
        };
        refused(&["--reuse", "1"], "--reuse 1");
        refused(&["--context", "0"], "--context");
        refused(&["--batch", "4,0"], "--batch");
        refused(&["--context", "1000000", "--max-num-batched-tokens", "1"], "--max-num-batched-tokens");
        refused(&["--kv-dtype", "mxfp4"], "--kv-dtype");
        refused(&["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization");
        assert!(Line::try_parse_from(["roofline"]).is_err(), "no model");
        assert!(Line::try_parse_from(["roofline", "--config-json", "x"]).is_err(), "no machine");
        assert!(
            Line::try_parse_from(["roofline", "--preset", "a@b", "--gpu", "h100"]).is_err(),
            "two machines"
        );
    }

    #[test]
    fn the_page_has_both_roofs_and_all_dots() {
        let args = args(&["--preset", "gpt-oss-120b@h100", "--context", "1024,8192"]);
        let timing = args.timing().unwrap();
        let found = Analysis::of(&timing, &args);
        let series = found.series(&timing);
        assert_eq!(series.len(), 2 + 3 + 3);
        let dots: usize = series[2..].iter().map(|one| one.points.len()).sum();
        assert_eq!(dots, found.prefill.len() + found.decode.len());
        // Nothing gets done faster than the data sheet allows.
        let roof = |x: f64| (x * found.memory_bytes_per_s).min(found.peak_flops) / 1e12;
        assert!(series[2..].iter().flat_map(|one| &one.points).all(|(x, y)| *y <= roof(*x)));
        assert!(found.page(&timing).to_html().contains("Roofline of gpt-oss-120b@h100"));
    }
}
