//! What others measured of real engines, and what the model says of the same: the table `data/measured.json`.
//!
//! `cargo run -p kvlane-core --example kernels` prints it, and the tests in `validation` hold the model to it.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::{ModelShape, StepShape, TimingModel};

/// Most tokens of a prompt that a step computes, in all measurements.
const CHUNK_TOKENS: u32 = 8192;
/// Share of a GPU's memory in use: vLLM's default, which the measurements of memory were made with.
const MEMORY_SHARE: f64 = 0.90;

/// `data/measured.json`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// Models that are no presets: each the keys of a Hugging Face `config.json`.
    models: BTreeMap<String, Value>,
    /// The sets.
    pub sets: Vec<MeasuredSet>,
}

/// Measurements of one kind by the same people.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredSet {
    /// What it is called.
    pub name: String,
    /// What was measured.
    pub about: String,
    /// What the figures are.
    pub quantity: Quantity,
    /// Milliseconds that the server around the engine adds to each request, as the measurements themselves show.
    #[serde(default)]
    pub request_ms: f64,
    /// Who measured it, and where that is published.
    pub source: String,
    /// How far the model may be off, in percent.
    pub percent: f64,
    /// The measurements.
    pub rows: Vec<MeasuredRow>,
}

/// What the figures of a set are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Quantity {
    /// Tokens per second of a cold prompt that is alone.
    PrefillTokS,
    /// Milliseconds for a cold prompt that is alone.
    PrefillMs,
    /// Milliseconds for the matrices and the element-wise work of all layers: no attention, output matrix, links, host.
    LayersMs,
    /// Milliseconds for a step in which all sequences decode.
    DecodeMs,
    /// Tokens whose keys and values have room.
    KvTokens,
}

/// One measurement.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MeasuredRow {
    /// Model and machine, in the form of a preset.
    pub engine: String,
    /// Tokens of the prompt, of the step, or of context of each sequence.
    #[serde(default)]
    pub tokens: u32,
    /// Decoding sequences.
    #[serde(default)]
    pub seqs: u32,
    /// What was measured.
    pub measured: f64,
    /// How far the model may be off, where that is not what the set says.
    #[serde(default)]
    pub percent: Option<f64>,
}

// === impl Measured ===

impl Measured {
    /// The table that comes with kvlane.
    ///
    /// # Panics
    ///
    /// Never: a test reads the table.
    pub fn table() -> Self {
        serde_json::from_str(include_str!("../../data/measured.json")).expect("a test reads the table")
    }

    /// What the model says of a row.
    ///
    /// # Panics
    ///
    /// If the row's engine is unknown; a test asks for every row of the table.
    pub fn modelled(&self, set: &MeasuredSet, row: &MeasuredRow) -> f64 {
        let timing = self.timing(&row.engine).expect("a test asks for every row of the table");
        let prefill_ms = || set.request_ms + timing.prefill_secs(0, row.tokens, CHUNK_TOKENS) * 1e3;
        match set.quantity {
            Quantity::PrefillTokS => f64::from(row.tokens) / prefill_ms() * 1e3,
            Quantity::PrefillMs => prefill_ms(),
            Quantity::LayersMs => layers_ms(timing, row.tokens),
            Quantity::DecodeMs => decode_ms(&timing, row.seqs, row.tokens),
            Quantity::KvTokens => timing.kv_capacity_tokens(MEMORY_SHARE) as f64,
        }
    }

    /// An engine of the table. Single kernels were also measured of models that fill more than the machine's memory.
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
        TimingModel::unchecked(shape, gpu, gpus)
    }
}

fn layers_ms(mut timing: TimingModel, tokens: u32) -> f64 {
    timing.model.vocab = 0;
    timing.host.step_secs = 0.0;
    let step = StepShape { prefill_tokens: tokens.into(), ..StepShape::default() };
    (timing.step_secs(&step) - timing.compile().parts(&step).link_s) * 1e3
}

pub(super) fn decode_ms(timing: &TimingModel, seqs: u32, context: u32) -> f64 {
    let mut step = StepShape::default();
    (0..seqs).for_each(|_| step.add_decode(context));
    timing.step_secs(&step) * 1e3
}
