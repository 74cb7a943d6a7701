//! Steps measured on one H100 beside the timing model, and what they say of its constants.

use std::fmt::Write as _;

use kvlane_core::timing::{Dtype, TimingModel};
use kvlane_lab::measured::steps::{Parts, Regime, Step, Steps};

use crate::table::percent;

/// Engines by kind: models without experts in 16 and in 8 bits, and with experts.
const DENSE: [&str; 2] = ["llama-3.1-8b@h100", "qwen3-32b@h100"];
const DENSE_FP8: [&str; 2] = ["llama-3.1-8b:fp8@h100", "qwen3-32b:fp8@h100"];
const EXPERTS: [&str; 1] = ["qwen3-30b-a3b@h100"];

/// A constant, and how a step tells it.
struct Told {
    name: &'static str,
    /// Which steps tell it.
    of: &'static str,
    /// Its value in use.
    in_use: fn(&TimingModel) -> f64,
    /// Its value by a step, if the step tells it.
    by: fn(&TimingModel, &Step) -> Option<f64>,
    /// Decimals, and the unit.
    digits: usize,
    unit: &'static str,
}

/// All that a step can tell, of dense models and of experts.
const TOLD: &[Told] = &[
    Told {
        name: "efficiency.compute",
        of: "prompts of 2,048 tokens or more, layers' matrices; with experts 8,192",
        in_use: |timing| timing.hardware.efficiency.compute,
        by: compute,
        digits: 2,
        unit: "",
    },
    Told {
        name: "efficiency.weights",
        of: "decode steps of 1 to 8 sequences, all matrices; with experts 8 to 64",
        in_use: |timing| timing.hardware.efficiency.weights,
        by: weights,
        digits: 2,
        unit: "",
    },
    Told {
        name: "efficiency.kv",
        of: "decode steps with 65,536 tokens of context or more in all",
        in_use: |timing| timing.hardware.efficiency.kv,
        by: keys_and_values,
        digits: 2,
        unit: "",
    },
    Told {
        name: "efficiency.attention",
        of: "prompts with 16 million query-key pairs or more",
        in_use: |timing| timing.hardware.efficiency.attention,
        by: attention,
        digits: 2,
        unit: "",
    },
    Told {
        name: "traffic, as a share of the bytes in use",
        of: "prompts of 8,192 tokens, without the starts of kernels",
        in_use: |_| 1.0,
        by: |timing, step| traffic(timing, step, 8192..=8192),
        digits: 2,
        unit: "",
    },
    Told {
        name: "the same",
        of: "prompts of 512 to 2,048 tokens",
        in_use: |_| 1.0,
        by: |timing, step| traffic(timing, step, 512..=2048),
        digits: 2,
        unit: "",
    },
    Told {
        name: "starts of kernels a layer (layer_secs, and with experts moe_layer_secs)",
        of: "one sequence: element-wise work and choice of experts alone",
        in_use: starts_us,
        by: |timing, step| single(step).then(|| step.rest_ms * 1e3 / f64::from(timing.model.layers)),
        digits: 0,
        unit: " µs",
    },
    Told {
        name: "the same",
        of: "one sequence: all that weights, keys and values do not take by the efficiencies in use",
        in_use: starts_us,
        by: starts_left,
        digits: 0,
        unit: " µs",
    },
];

fn starts_us(timing: &TimingModel) -> f64 {
    let experts = if timing.model.experts.is_some() { timing.hardware.moe_layer_secs } else { 0.0 };
    (timing.hardware.layer_secs + experts) * 1e6
}

fn compute(timing: &TimingModel, step: &Step) -> Option<f64> {
    let experts = timing.model.experts.is_some();
    let tells = step.seqs == 0 && step.new_tokens >= if experts { 8192 } else { 2048 };
    let flops = 2.0 * timing.model.active_parameters() * f64::from(step.new_tokens);
    let peak = timing.hardware.peak_flops_of(timing.model.main_dtype());
    tells.then(|| flops / (step.matrices_ms / 1e3) / peak)
}

fn weights(timing: &TimingModel, step: &Step) -> Option<f64> {
    let seqs = if timing.model.experts.is_some() { 8..=64 } else { 1..=8 };
    let tells = step.new_tokens == 0 && seqs.contains(&step.seqs);
    let bytes = timing.work(&step.shape()).weight_bytes;
    tells.then(|| bytes / (step.measured().matrices_ms / 1e3) / timing.hardware.memory_bytes_per_s)
}

fn keys_and_values(timing: &TimingModel, step: &Step) -> Option<f64> {
    let tokens = step.seqs * step.context_tokens;
    let bytes = f64::from(tokens) * timing.kv_bytes_per_token() as f64;
    let tells = step.new_tokens == 0 && tokens >= 65_536;
    tells.then(|| bytes / (step.decoding_ms / 1e3) / timing.hardware.memory_bytes_per_s)
}

fn attention(timing: &TimingModel, step: &Step) -> Option<f64> {
    let pairs = step.shape().prefill_pairs as f64;
    let flops = timing.model.pair_flops() * f64::from(timing.model.layers) * pairs;
    let tells = step.seqs == 0 && pairs >= 16e6;
    tells.then(|| flops / (step.prompts_ms / 1e3) / timing.hardware.peak_flops)
}

fn traffic(timing: &TimingModel, step: &Step, tokens: std::ops::RangeInclusive<u32>) -> Option<f64> {
    let (model, traffic) = (&timing.model, &timing.traffic);
    let layers = f64::from(model.layers);
    let bytes = traffic.norm_bytes * f64::from(model.hidden)
        + traffic.rotary_bytes * model.rotary_width()
        + traffic.activation_bytes * model.active_ffn();
    let in_use_secs = layers * bytes * f64::from(step.new_tokens) / timing.hardware.memory_bytes_per_s;
    let tells = step.seqs == 0 && tokens.contains(&step.new_tokens);
    tells.then(|| (step.rest_ms / 1e3 - layers * single_layer_secs(timing)) / in_use_secs)
}

/// Element-wise work and choice of experts of one layer and one sequence, measured: the starts of their kernels.
fn single_layer_secs(timing: &TimingModel) -> f64 {
    let steps = Steps::table();
    let of_engine = steps.rows.iter().filter(|row| row.engine == timing.name() && single(row));
    let rests: Vec<f64> = of_engine.map(|row| row.rest_ms / 1e3 / f64::from(timing.model.layers)).collect();
    median(rests)
}

fn single(step: &Step) -> bool {
    step.new_tokens == 0 && step.seqs == 1
}

fn starts_left(timing: &TimingModel, step: &Step) -> Option<f64> {
    let Parts { matrices_ms, decoding_ms, .. } = step.modelled(timing);
    let left_ms = step.step_ms - matrices_ms - decoding_ms;
    single(step).then(|| left_ms * 1e3 / f64::from(timing.model.layers))
}

/// The tables of measured steps, as Markdown.
pub(crate) fn steps_tables() -> String {
    let steps = Steps::table();
    let mut text = header(&steps);
    text.push_str(
        "\n| Engine | Steps | Rows | Mean error | Of it matrices | prompts | reading KV | the rest | Mean of absolute errors | Largest |\n\
         |---|---|---|---|---|---|---|---|---|---|\n",
    );
    for engine in steps.engines() {
        for regime in Regime::ALL {
            let rows = steps.rows.iter().filter(|row| row.engine == engine && row.regime() == regime);
            let rows: Vec<&Step> = rows.collect();
            if !rows.is_empty() {
                write_line(&mut text, engine, regime, &rows);
            }
        }
    }
    text.push_str("\n| Constant | Told by | 16 bits | 8 bits | Experts, 16 bits |\n|---|---|---|---|---|\n");
    for told in TOLD {
        let cells = [&DENSE[..], &DENSE_FP8[..], &EXPERTS[..]].map(|engines| told.cell(&steps, engines));
        // A text takes any line.
        _ = writeln!(text, "| {} | {} | {} |", told.name, told.of, cells.join(" | "));
    }
    text
}

/// What was measured, and where.
fn header(steps: &Steps) -> String {
    let [low, high] = steps.sm_mhz.map(f64::from);
    let eight_bits = TimingModel::preset(DENSE_FP8[0]).expect("a preset");
    let peak = eight_bits.hardware.peak_flops_of(Dtype::Fp8);
    let shares = [
        steps.copy_tb_per_s * 1e12 / eight_bits.hardware.memory_bytes_per_s,
        steps.product_bf16_tflops * 1e12 / eight_bits.hardware.peak_flops,
        steps.product_fp8_tflops * 1e12 / peak,
    ]
    .map(|share| format!("{share:.2}"));
    format!(
        "{} steps of {} engines on one {} ({}, {}). A step measured twice differs by at most {:.1} %, one of all layers from one of four \
         by {:.1} %. Clocks were {:.2} to {:.2} GHz: at the limit of power, {}, they fall. On the same card a copy reaches {} of the memory's \
         rate, a product of 8,192 × 8,192 matrices {} of the arithmetic in 16 bits and {} in 8.\n",
        steps.rows.len(),
        steps.engines().len(),
        steps.gpu.trim_start_matches("NVIDIA "),
        steps.software,
        steps.date,
        steps.repeat_percent,
        steps.whole_percent,
        low / 1e3,
        high / 1e3,
        steps.power_limit.replace(".00", ""),
        shares[0],
        shares[1],
        shares[2],
    )
}

fn write_line(text: &mut String, engine: &str, regime: Regime, rows: &[&Step]) {
    let count = rows.len() as f64;
    let mut parts = [0.0; 4];
    let mut errors = Vec::with_capacity(rows.len());
    for row in rows {
        let modelled = row.modelled(&row.timing());
        errors.push(100.0 * (modelled.total_ms() / row.step_ms - 1.0));
        for (sum, (modelled, measured)) in
            parts.iter_mut().zip(modelled.each().into_iter().zip(row.measured().each()))
        {
            *sum += 100.0 * (modelled - measured) / row.step_ms / count;
        }
    }
    let mean = errors.iter().sum::<f64>() / count;
    let absolute = errors.iter().map(|error| error.abs()).sum::<f64>() / count;
    let largest = errors.iter().copied().fold(0.0_f64, |a, b| if b.abs() > a.abs() { b } else { a });
    let parts = parts.map(|part| format!("{part:+.1}").replace('-', "−"));
    // A text takes any line.
    _ = writeln!(
        text,
        "| `{}` | {} | {} | {} | {} | {absolute:.1} % | {} |",
        engine.trim_end_matches("@h100"),
        regime.name(),
        rows.len(),
        percent(mean),
        parts.join(" | "),
        percent(largest)
    );
}

// === impl Told ===

impl Told {
    /// In use → median (range), over the steps of these engines.
    fn cell(&self, steps: &Steps, engines: &[&str]) -> String {
        let (digits, unit) = (self.digits, self.unit);
        let in_use = (self.in_use)(&TimingModel::preset(engines[0]).expect("a preset"));
        let rows = steps.rows.iter().filter(|row| engines.contains(&row.engine.as_str()));
        let mut values: Vec<f64> = rows.filter_map(|row| (self.by)(&row.timing(), row)).collect();
        values.sort_unstable_by(f64::total_cmp);
        let (Some(least), Some(most)) = (values.first().copied(), values.last().copied()) else {
            return String::new();
        };
        let middle = median(values);
        format!("{in_use:.digits$} → {middle:.digits$} ({least:.digits$} to {most:.digits$}){unit}")
            .replace('-', "−")
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let half = values.len() / 2;
    if values.len() % 2 == 1 { values[half] } else { 0.5 * (values[half - 1] + values[half]) }
}
