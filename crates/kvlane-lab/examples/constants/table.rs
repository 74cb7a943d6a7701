//! The fitted constants of the engine model, and what the published figures would be without each.
//!
//! `docs/simulator-constants.md` has the table; `cargo run -p kvlane-lab --example constants` writes it. A constant is removed by
//! its neutral value: an efficiency of 1, a cost of 0.

use std::fmt::Write as _;

use kvlane_core::timing::TimingModel;

use kvlane_lab::measured::{MEMORY_SHARE, Measured, MeasuredSet, Quantity};

/// Bandwidth of a link that costs nothing, in bytes/s.
const NO_LINK_COST: f64 = 1e18;
/// Bytes in a GiB.
const GIB: f64 = 1_073_741_824.0;
/// What [`TimingModel::kv_capacity_tokens`] sets aside of each GPU, in GiB: activations without experts and with them.
pub(crate) const RESERVED_GIB: [f64; 2] = [3.67, 4.8];
/// Change of a set's mean error from which the table shows it, in points.
const SHOWN_POINTS: f64 = 0.1;

/// A fitted constant.
pub(crate) struct Constant {
    /// Its name in a timing file, `gpus.json` or the code.
    pub(crate) name: &'static str,
    /// Its value on H100, or on all GPUs.
    pub(crate) value: &'static str,
    /// What it was fitted on.
    pub(crate) fitted_on: &'static str,
    /// Its neutral value, in words.
    pub(crate) neutral: &'static str,
    /// Removes it from a model.
    pub(crate) remove: fn(&mut TimingModel),
    /// Whether it is the server's time in the set `prefill-length`.
    is_request: bool,
}

/// How much of a published table went into the constants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// Nothing: a prediction.
    None,
    /// A part of its rows or of its figures.
    Part,
    /// All of it, or its inputs were invented: it illustrates, and validates nothing.
    All,
}

const fn constant(
    name: &'static str,
    value: &'static str,
    fitted_on: &'static str,
    neutral: &'static str,
    remove: fn(&mut TimingModel),
) -> Constant {
    Constant { name, value, fitted_on, neutral, remove, is_request: false }
}

/// All of them.
pub(crate) const CONSTANTS: &[Constant] = &[
    constant(
        "efficiency.compute",
        "0.73; 0.55 fp8; 0.43 experts",
        "Vidur's kernels (16 bits); chosen of five values by the closed loops of Qwen3-8B fp8 (silybench) and of NVIDIA (8 bits); two prompts of gpt-oss-120b (experts); 8-bit experts are a guess",
        "1",
        |timing| timing.hardware.efficiency.compute = 1.0,
    ),
    constant(
        "efficiency.weights",
        "0.85; 0.78 fp8; 0.82 experts",
        "Vidur's kernels, single sequences of Qwen3-8B, llm-d's ladder (seed-001)",
        "1",
        |timing| timing.hardware.efficiency.weights = 1.0,
    ),
    constant("efficiency.kv", "0.90; 0.85 experts", "llm-d's ladder (seed-001)", "1", |timing| {
        timing.hardware.efficiency.kv = 1.0
    }),
    constant(
        "efficiency.attention",
        "0.55; 0.50 experts",
        "prompts of Qwen3-32B and of gpt-oss-120b over their length (llm-d); A100's is a guess",
        "1",
        |timing| timing.hardware.efficiency.attention = 1.0,
    ),
    constant("traffic: norm, rotary, activation", "32, 9, 11 bytes", "Vidur's kernels", "0", |timing| {
        let traffic = &mut timing.traffic;
        (traffic.norm_bytes, traffic.rotary_bytes, traffic.activation_bytes) = (0.0, 0.0, 0.0);
    }),
    constant("traffic.shared_read_saved", "0.20", "llm-d's ladder (seed-001), precise arm", "0", |timing| {
        timing.traffic.shared_read_saved = 0.0
    }),
    constant("layer_secs", "22 µs", "single sequences of Qwen3-8B (silybench)", "0", |timing| {
        timing.hardware.layer_secs = 0.0
    }),
    constant("moe_layer_secs", "40 µs", "decode steps of Qwen3-30B-A3B (ML.ENERGY)", "0", |timing| {
        timing.hardware.moe_layer_secs = 0.0
    }),
    constant("host.step_secs", "0.7 ms", "single sequences of Qwen3-8B (silybench)", "0", |timing| {
        timing.host.step_secs = 0.0
    }),
    constant(
        "host.sequence_secs",
        "6 µs",
        "llm-d's ladder (seed-001), before the steps of Qwen3-8B were known",
        "0",
        |timing| timing.host.sequence_secs = 0.0,
    ),
    constant("all_reduce_secs", "9 µs", "Vidur's all-reduce on H100", "0", |timing| {
        timing.hardware.all_reduce_secs = 0.0
    }),
    constant("all_reduce_bytes_per_s", "275 GB/s", "Vidur's all-reduce on H100", "no limit", |timing| {
        timing.hardware.all_reduce_bytes_per_s = NO_LINK_COST
    }),
    constant(
        "activations in memory",
        "3.67 GiB; 4.8 GiB experts",
        "302 K tokens of Qwen3-32B on two H100; DeepSeek's 650 K on eight H200",
        "0",
        |timing| {
            let reserved = RESERVED_GIB[usize::from(timing.model.experts.is_some())];
            timing.hardware.memory_bytes += reserved * GIB / MEMORY_SHARE;
        },
    ),
    Constant {
        is_request: true,
        ..constant(
            "`request_ms` of the set",
            "25 ms",
            "prompts of gpt-oss-120b over their length: the constant of a quadratic fit",
            "0",
            |_| (),
        )
    },
];

/// What went into a set of `data/measured.json`.
///
/// # Panics
/// If the set is unknown: a test names all.
pub(crate) fn fit_of(set: &str) -> (Fit, &'static str) {
    match set {
        "prefill-rate" => (
            Fit::All,
            "experts' arithmetic (gpt-oss-120b) and attention (Qwen3-32B); to Qwen3-VL-32B's row nothing",
        ),
        "prefill-length" => (Fit::Part, "the server's 25 ms, and experts' arithmetic and attention"),
        "kernels" => (Fit::All, "arithmetic, weights and element-wise traffic of A100 and H100"),
        "kernels-unfitted" | "decode-mi300x" => (Fit::None, ""),
        "decode" => (Fit::Part, "single sequences; not the growth with batch and context"),
        "decode-others" => (Fit::Part, "only Qwen3-30B-A3B's rows, by the cost of an expert layer"),
        "memory" => (Fit::All, "activations of models with experts"),
        other => panic!("{other}: say in examples/constants/table.rs what is fitted to it"),
    }
}

// === impl Fit ===

impl Fit {
    /// What a table with this fit is called.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "validation",
            Self::Part => "validation in part",
            Self::All => "illustration",
        }
    }
}

// === impl Constant ===

impl Constant {
    /// Mean absolute error of a set in percent, and the error of the row that it is largest in.
    fn errors(&self, measured: &Measured, set: &MeasuredSet) -> Errors {
        let request_ms = if self.is_request { 0.0 } else { set.request_ms };
        Errors::of(measured, set, request_ms, self.remove)
    }
}

/// Errors of a set in percent.
#[derive(Clone, Copy)]
struct Errors {
    mean_absolute: f64,
    mean: f64,
}

// === impl Errors ===

impl Errors {
    fn of(measured: &Measured, set: &MeasuredSet, request_ms: f64, remove: fn(&mut TimingModel)) -> Self {
        let errors: Vec<f64> = set
            .rows
            .iter()
            .map(|row| {
                let modelled = measured.modelled_by(set, row, request_ms, remove);
                100.0 * (modelled / row.measured - 1.0)
            })
            .collect();
        let count = errors.len() as f64;
        Self {
            mean_absolute: errors.iter().map(|error| error.abs()).sum::<f64>() / count,
            mean: errors.iter().sum::<f64>() / count,
        }
    }
}

/// The table of kernels, prompts, steps and memory, as Markdown.
pub(crate) fn table() -> String {
    let measured = Measured::table();
    let mut text = String::from(
        "| Set | Rows | Fitted | Called | Mean error | Mean of absolute errors |\n|---|---|---|---|---|---|\n",
    );
    for set in &measured.sets {
        let Errors { mean_absolute, mean } = Errors::of(&measured, set, set.request_ms, |_| ());
        let (fit, what) = fit_of(&set.name);
        let what = if what.is_empty() { "nothing" } else { what };
        let (name, rows) = (&set.name, set.rows.len());
        // A text takes any line.
        _ = writeln!(
            text,
            "| `{name}` | {rows} | {what} | {} | {} | {mean_absolute:.1} % |",
            fit.name(),
            percent(mean)
        );
    }
    text.push_str("\n| Constant | Value | Fitted on | Neutral | Mean error of sets without it, with it in brackets |\n|---|---|---|---|---|\n");
    for constant in CONSTANTS {
        let Constant { name, value, fitted_on, neutral, .. } = constant;
        let changes: Vec<String> =
            measured.sets.iter().filter_map(|set| change(&measured, set, constant)).collect();
        let changes =
            if changes.is_empty() { "none; of fleets see below".to_owned() } else { changes.join("; ") };
        _ = writeln!(text, "| {name} | {value} | {fitted_on} | {neutral} | {changes} |");
    }
    text
}

/// `kernels −12.3 % (+0.1 %)`, if the constant changes the set.
pub(crate) fn change(measured: &Measured, set: &MeasuredSet, constant: &Constant) -> Option<String> {
    let (with, without) = (Errors::of(measured, set, set.request_ms, |_| ()), constant.errors(measured, set));
    let changed = (with.mean - without.mean).abs().max((with.mean_absolute - without.mean_absolute).abs());
    // A rate falls as a time rises.
    let sign = if set.quantity == Quantity::PrefillTokS { " tokens/s" } else { "" };
    (changed >= SHOWN_POINTS)
        .then(|| format!("`{}`{sign} {} ({})", set.name, percent(without.mean), percent(with.mean)))
}

/// With a sign, the typographic one if negative.
pub(crate) fn percent(value: f64) -> String {
    format!("{value:+.1} %").replace('-', "−")
}
