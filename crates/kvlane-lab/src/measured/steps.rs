//! Steps measured on one H100 and the timing model's values for them: the table `data/steps-h100.json`.
//!
//! `bench/gpu/step_times.py` measured them, without the host's part of a step, so the model's is 0 here. Nothing is fitted
//! to them.

use kvlane_core::timing::{StepShape, TimingModel};
use serde::Deserialize;

/// Sequences up to which a batch is called small.
const FEW_SEQS: u32 = 16;
/// Context tokens from which a context is called long.
const LONG_CONTEXT: u32 = 8192;

/// `data/steps-h100.json`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Steps {
    /// What was measured, and how.
    pub about: String,
    /// Day of the measurement.
    pub date: String,
    /// The GPU, as its driver calls it.
    pub gpu: String,
    /// Versions of the libraries.
    pub software: String,
    /// Lowest and highest clock that was read beside a step.
    pub sm_mhz: [u32; 2],
    /// Limit of the GPU's power.
    pub power_limit: String,
    /// Bytes read and written by a copy, in units of 1e12 a second.
    pub copy_tb_per_s: f64,
    /// Operations of a product of two matrices of 8,192 x 8,192 in 16 bits, in units of 1e12 a second.
    pub product_bf16_tflops: f64,
    /// The same in 8 bits.
    pub product_fp8_tflops: f64,
    /// Largest difference between two measurements of one step.
    pub repeat_percent: f64,
    /// Largest difference between a step of all layers and what follows from four of them.
    pub whole_percent: f64,
    /// Steps that were measured and are left out, because one GPU could not hold the weights and their keys and values.
    pub left_out_not_fitting: u32,
    /// The steps.
    pub rows: Vec<Step>,
}

/// A measured step.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// Model and machine, in the form of a preset.
    pub engine: String,
    /// Tokens of a prompt that are computed.
    #[serde(default)]
    pub new_tokens: u32,
    /// Tokens of the prompt before those.
    #[serde(default)]
    pub cached_tokens: u32,
    /// Decoding sequences.
    #[serde(default)]
    pub seqs: u32,
    /// Context of each of them.
    #[serde(default)]
    pub context_tokens: u32,
    /// The step.
    pub step_ms: f64,
    /// The layers' matrices. This and the other parts but the head are the difference that leaving the part out makes.
    pub matrices_ms: f64,
    /// The output matrix and the final norm.
    pub head_ms: f64,
    /// Attention of the prompt.
    #[serde(default)]
    pub prompts_ms: f64,
    /// Attention of the decoding sequences.
    #[serde(default)]
    pub decoding_ms: f64,
    /// Element-wise work, and the choice of experts.
    pub rest_ms: f64,
}

/// A kind of step, for which the model's terms weigh differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Regime {
    /// A prompt of which nothing is cached.
    ColdPrompt,
    /// A prompt after cached tokens.
    CachedPrompt,
    /// Few sequences with contexts below 8,192 tokens.
    FewShort,
    /// Few sequences with contexts of 8,192 tokens.
    FewLong,
    /// Many sequences with contexts below 8,192 tokens.
    ManyShort,
    /// Many sequences with contexts of 8,192 tokens.
    ManyLong,
    /// A prompt and decoding sequences.
    Mixed,
}

/// Times of a step by part, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Parts {
    /// All matrices, the output matrix included.
    pub matrices_ms: f64,
    /// Attention of prompts.
    pub prompts_ms: f64,
    /// Attention of decoding sequences.
    pub decoding_ms: f64,
    /// Element-wise work, starts of kernels, choice of experts.
    pub rest_ms: f64,
}

// === impl Steps ===

impl Steps {
    /// The built-in table.
    ///
    /// # Panics
    ///
    /// Never: a test reads the table.
    pub fn table() -> Self {
        serde_json::from_str(include_str!("../../data/steps-h100.json")).expect("a test reads the table")
    }

    /// The engines, in order.
    pub fn engines(&self) -> Vec<&str> {
        let mut engines: Vec<&str> = self.rows.iter().map(|row| row.engine.as_str()).collect();
        engines.sort_unstable();
        engines.dedup();
        engines
    }
}

// === impl Step ===

impl Step {
    /// The kind of step.
    pub fn regime(&self) -> Regime {
        let long = self.context_tokens >= LONG_CONTEXT;
        match (self.new_tokens, self.seqs) {
            (0, ..=FEW_SEQS) if long => Regime::FewLong,
            (0, ..=FEW_SEQS) => Regime::FewShort,
            (0, _) if long => Regime::ManyLong,
            (0, _) => Regime::ManyShort,
            (_, 0) if self.cached_tokens == 0 => Regime::ColdPrompt,
            (_, 0) => Regime::CachedPrompt,
            _ => Regime::Mixed,
        }
    }

    /// The step in the timing model's terms.
    pub fn shape(&self) -> StepShape {
        let mut shape = StepShape::default();
        if self.new_tokens > 0 {
            shape.add_prefill(self.cached_tokens, self.new_tokens);
            shape.finished_prefills = 1;
        }
        (0..self.seqs).for_each(|_| shape.add_decode(self.context_tokens));
        shape
    }

    /// The timing model of the step's engine, without the host.
    ///
    /// # Panics
    ///
    /// If the engine is unknown; a test computes every row of the table.
    pub fn timing(&self) -> TimingModel {
        let mut timing = TimingModel::preset(&self.engine).expect("a test computes every row of the table");
        (timing.host.step_secs, timing.host.sequence_secs) = (0.0, 0.0);
        timing
    }

    /// The measured parts.
    pub fn measured(&self) -> Parts {
        Parts {
            matrices_ms: self.matrices_ms + self.head_ms,
            prompts_ms: self.prompts_ms,
            decoding_ms: self.decoding_ms,
            rest_ms: self.rest_ms,
        }
    }

    /// The model's parts. The model adds them, so each is the difference that its cause makes.
    pub fn modelled(&self, timing: &TimingModel) -> Parts {
        let shape = self.shape();
        let ms = |timing: &TimingModel, shape: &StepShape| timing.step_secs(shape) * 1e3;
        let whole = ms(timing, &shape);
        let no_prompts = StepShape { prefill_pairs: 0, prefill_context_tokens: 0, ..shape };
        let no_decoding = StepShape { decode_context_tokens: 0, ..shape };
        let mut bare = timing.clone();
        let (hardware, traffic) = (&mut bare.hardware, &mut bare.traffic);
        (hardware.layer_secs, hardware.moe_layer_secs) = (0.0, 0.0);
        (traffic.norm_bytes, traffic.rotary_bytes, traffic.activation_bytes) = (0.0, 0.0, 0.0);
        let (prompts_ms, decoding_ms) = (whole - ms(timing, &no_prompts), whole - ms(timing, &no_decoding));
        let rest_ms = whole - ms(&bare, &shape);
        Parts { matrices_ms: whole - prompts_ms - decoding_ms - rest_ms, prompts_ms, decoding_ms, rest_ms }
    }
}

// === impl Regime ===

impl Regime {
    /// All, in order.
    pub const ALL: [Self; 7] = [
        Self::ColdPrompt,
        Self::CachedPrompt,
        Self::FewShort,
        Self::FewLong,
        Self::ManyShort,
        Self::ManyLong,
        Self::Mixed,
    ];

    /// What a table calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::ColdPrompt => "prompt, nothing cached",
            Self::CachedPrompt => "prompt after 4,096 or 16,384 cached",
            Self::FewShort => "decode, 1 to 16 × 512 or 2,048",
            Self::FewLong => "decode, 1 to 16 × 8,192",
            Self::ManyShort => "decode, 32 to 256 × 512 or 2,048",
            Self::ManyLong => "decode, 32 to 256 × 8,192",
            Self::Mixed => "prompt and decode",
        }
    }
}

// === impl Parts ===

impl Parts {
    /// All parts together.
    pub fn total_ms(&self) -> f64 {
        self.matrices_ms + self.prompts_ms + self.decoding_ms + self.rest_ms
    }

    /// The parts, in order.
    pub fn each(&self) -> [f64; 4] {
        [self.matrices_ms, self.prompts_ms, self.decoding_ms, self.rest_ms]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_every_step_add_up_to_it_measured_and_modelled() {
        let steps = Steps::table();
        assert!(steps.rows.len() > 200 && steps.engines().len() == 5);
        for row in &steps.rows {
            let off = row.measured().total_ms() / row.step_ms - 1.0;
            assert!(off.abs() < 2e-3, "{row:?}: {off}");
            let timing = row.timing();
            let (parts, whole) = (row.modelled(&timing), timing.step_secs(&row.shape()) * 1e3);
            assert!((parts.total_ms() / whole - 1.0).abs() < 1e-9, "{row:?}: {parts:?}");
            assert!(parts.each().iter().all(|&part| part >= -1e-9), "{row:?}: {parts:?}");
        }
    }

    #[test]
    fn every_step_of_the_table_is_one_that_an_engine_can_run() {
        for row in &Steps::table().rows {
            let tokens = row.seqs * row.context_tokens + row.new_tokens + row.cached_tokens;
            let room = row.timing().kv_capacity_tokens(0.95);
            assert!(u64::from(tokens) < room, "{row:?}: {room}");
        }
    }

    #[test]
    fn steps_of_16_bits_are_met_within_a_tenth_in_the_mean_of_every_regime() {
        let steps = Steps::table();
        for regime in Regime::ALL {
            let rows = steps.rows.iter().filter(|row| {
                row.regime() == regime
                    && ["llama-3.1-8b@h100", "qwen3-32b@h100"].contains(&row.engine.as_str())
            });
            let errors: Vec<f64> =
                rows.map(|row| row.timing().step_secs(&row.shape()) * 1e3 / row.step_ms - 1.0).collect();
            let mean = errors.iter().sum::<f64>() / errors.len() as f64;
            assert!(mean.abs() < 0.10, "{regime:?}: {mean}");
        }
    }
}
