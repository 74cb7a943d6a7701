//! Published measurements of real engines and the timing model's values for them: the table `data/measured.json`.
//!
//! `cargo run -p kvlane-lab --example kernels` prints it, and the tests in `validation` check the model against it.

use std::collections::BTreeMap;

use kvlane_core::timing::{Dtype, Hardware, Host, ModelShape, StepShape, TimingModel, Traffic};
use serde::Deserialize;
use serde_json::Value;

pub mod offline;
pub mod steps;

/// Most prompt tokens per step, in all measurements.
const CHUNK_TOKENS: u32 = 8192;
/// Share of a GPU's memory in use: vLLM's default, used in the memory measurements.
pub const MEMORY_SHARE: f64 = 0.90;

/// `data/measured.json`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Models without a preset, each with the keys of a Hugging Face `config.json`.
    models: BTreeMap<String, Value>,
    /// The sets of measurements.
    pub sets: Vec<MeasuredSet>,
}

/// Measurements of one kind from one source.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredSet {
    /// Name of the set.
    pub name: String,
    /// What was measured.
    pub about: String,
    /// The quantity and its unit.
    pub quantity: Quantity,
    /// Milliseconds that the server around the engine adds to each request, derived from the measurements.
    #[serde(default)]
    pub request_ms: f64,
    /// Author and place of publication.
    pub source: String,
    /// Tolerance of the model, in percent.
    pub percent: f64,
    /// The measurements.
    pub rows: Vec<MeasuredRow>,
}

/// The quantity of a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Prefill of a single cold prompt, in tokens per second.
    PrefillTokS,
    /// Prefill of a single cold prompt, in milliseconds.
    PrefillMs,
    /// Matrices and element-wise work of all layers, in milliseconds: without attention, output matrix, links and host.
    LayersMs,
    /// A step in which all sequences decode, in milliseconds.
    DecodeMs,
    /// KV cache capacity in tokens.
    KvTokens,
}

/// One measurement.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredRow {
    /// Model and machine, in the form of a preset.
    pub engine: String,
    /// Tokens of the prompt or of the step, or context tokens per sequence.
    #[serde(default)]
    pub tokens: u32,
    /// Decoding sequences.
    #[serde(default)]
    pub seqs: u32,
    /// The measured value.
    pub measured: f64,
    /// Tolerance of the model, if it differs from the set's.
    #[serde(default)]
    pub percent: Option<f64>,
}

// === impl Measured ===

impl Measured {
    /// The built-in table.
    ///
    /// # Panics
    ///
    /// Never: a test reads the table.
    pub fn table() -> Self {
        serde_json::from_str(include_str!("../../data/measured.json")).expect("a test reads the table")
    }

    /// The model's value for a row.
    ///
    /// # Panics
    ///
    /// If the row's engine is unknown; a test computes every row of the table.
    pub fn modelled(&self, set: &MeasuredSet, row: &MeasuredRow) -> f64 {
        self.modelled_by(set, row, set.request_ms, |_| ())
    }

    /// The same by a changed model, and with another time of the server.
    ///
    /// # Panics
    ///
    /// If the row's engine is unknown; a test computes every row of the table.
    pub fn modelled_by(
        &self,
        set: &MeasuredSet,
        row: &MeasuredRow,
        request_ms: f64,
        change: impl Fn(&mut TimingModel),
    ) -> f64 {
        let mut timing = self.timing(&row.engine).expect("a test computes every row of the table");
        change(&mut timing);
        let prefill_ms = || request_ms + timing.prefill_secs(0, row.tokens, CHUNK_TOKENS) * 1e3;
        match set.quantity {
            Quantity::PrefillTokS => f64::from(row.tokens) / prefill_ms() * 1e3,
            Quantity::PrefillMs => prefill_ms(),
            Quantity::LayersMs => layers_ms(timing, row.tokens),
            Quantity::DecodeMs => decode_ms(&timing, row.seqs, row.tokens),
            Quantity::KvTokens => timing.kv_capacity_tokens(MEMORY_SHARE) as f64,
        }
    }

    /// An engine of the table. Single kernels were also measured for models that exceed the machine's memory.
    fn timing(&self, engine: &str) -> Option<TimingModel> {
        if let Ok(preset) = TimingModel::preset(engine) {
            return Some(preset);
        }
        let (model, machine) = engine.split_once('@')?;
        let (gpu, gpus) = match machine.rsplit_once('x') {
            Some((gpu, count)) => (gpu, count.parse().ok()?),
            None => (machine, 1),
        };
        let shape = match self.models.get(model) {
            Some(config) => ModelShape::from_config_json(model, &config.to_string()).ok()?,
            None => ModelShape::of(model)?,
        };
        let hardware = Hardware::of(gpu, &shape)?;
        Some(TimingModel {
            model: shape,
            hardware,
            host: Host::default(),
            traffic: Traffic::default(),
            gpus,
            kv_dtype: Dtype::Bf16,
        })
    }
}

fn layers_ms(mut timing: TimingModel, tokens: u32) -> f64 {
    timing.model.vocab = 0;
    timing.host.step_secs = 0.0;
    let step = StepShape { prefill_tokens: tokens.into(), ..StepShape::default() };
    (timing.step_secs(&step) - timing.compile().parts(&step).link_s) * 1e3
}

fn decode_ms(timing: &TimingModel, seqs: u32, context: u32) -> f64 {
    let mut step = StepShape::default();
    (0..seqs).for_each(|_| step.add_decode(context));
    timing.step_secs(&step) * 1e3
}

#[cfg(test)]
mod validation;
