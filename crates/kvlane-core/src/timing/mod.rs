//! Timing model: how long an engine's step takes, as a roofline of the model's shape and the machine's limits.
//!
//! A step computes `n` tokens: chunks of prompts and one token of each decoding sequence. Its time is a sum of
//!
//! - the matrix multiplications, bound by arithmetic or by reading the weights, whichever is slower, with a smooth
//!   corner between the two (the 4-norm). Of a mixture of experts, the experts that `n` tokens chosen at random would
//!   use are read;
//! - attention of prompt chunks, bound by arithmetic, in query-key pairs, or by reading the keys before the chunk;
//! - attention of decoding sequences, bound by reading their keys and values, or, for latent attention with many heads,
//!   by arithmetic;
//! - all-reduce, two per layer, if the model is spread over several GPUs;
//! - element-wise work (norms, rotary embedding, activation, residuals), bound by memory traffic;
//! - kernel launches per layer, and a fixed and a per-sequence cost of the host.
//!
//! Each bound is a data-sheet number times an efficiency. There is one set of efficiencies per GPU and kind of model
//! (dense or experts, 16 or 8 bits), in `data/gpus.json` with its sources; none per model or measurement. The laboratory
//! compares published measurements with the model's values, and its tests bound the difference.

mod config;
mod cost;
mod file;
mod hardware;
mod shape;

use serde::{Deserialize, Serialize};

pub use config::ConfigError;
pub use cost::{StepCost, StepParts, StepWork};
pub use file::{Residual, TimingFile, TimingFileError};
pub use hardware::{Efficiency, Hardware, Host, Traffic};
pub use shape::{Dtype, Experts, Latent, ModelShape, Window};

use crate::suggest::suggest;

const GIB: f64 = 1_073_741_824.0;

/// Activation memory that vLLM reserves when it sizes its KV cache, in bytes per GPU. It gives the 302 K tokens that
/// Qwen3-32B has on two H100 at a memory share of 0.90.
const DENSE_ACTIVATION_BYTES: f64 = 3.67 * GIB;

/// The same with experts. It gives the 650 K tokens that llm-d reports for DeepSeek on eight H200, within 1 %.
const MOE_ACTIVATION_BYTES: f64 = 4.8 * GIB;

/// Most GPUs per engine.
const GPUS_MAX: u32 = 64;

/// The work of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepShape {
    /// Prompt tokens, over all chunks.
    pub prefill_tokens: u64,
    /// Query-key pairs of those chunks: a chunk of `c` tokens after `p` has `c * p + c * (c + 1) / 2`.
    pub prefill_pairs: u64,
    /// Tokens before those chunks, cached or computed by earlier steps, over all chunks.
    #[serde(default)]
    pub prefill_context_tokens: u64,
    /// Decoding sequences, one token each.
    pub decode_seqs: u32,
    /// Sum of their context lengths in tokens.
    pub decode_context_tokens: u64,
    /// Those context tokens that another decoding sequence of the step reads too: all reads of each block except one.
    #[serde(default)]
    pub decode_shared_tokens: u64,
    /// Chunks that complete a prompt and so yield a token.
    pub finished_prefills: u32,
}

/// A model on a number of GPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimingModel {
    /// The model served.
    pub model: ModelShape,
    /// The kind of GPU.
    pub hardware: Hardware,
    /// The host's overhead.
    #[serde(default)]
    pub host: Host,
    /// Memory traffic beside weights, keys and values.
    #[serde(default, skip_serializing_if = "Traffic::is_usual")]
    pub traffic: Traffic,
    /// GPUs the model is spread over (tensor parallelism), at least 1.
    pub gpus: u32,
    /// Type of the keys and values (`--kv-cache-dtype`).
    #[serde(default)]
    pub kv_dtype: Dtype,
}

/// Why a preset is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PresetError {
    /// Not of the form `model@gpu` or `model@gpuxN`, optionally with a number type after the model.
    #[error(
        "preset `{0}` is not of the form model@gpu, model@gpuxN or model:fp8@gpuxN: {meant}",
        meant = meant(.0)
    )]
    Form(String),
    /// The tables do not contain the model or the GPU.
    #[error("preset `{0}` names an unknown model or GPU: {meant}", meant = meant(.0))]
    Unknown(String),
    /// The number of GPUs does not divide the model's heads evenly.
    #[error("preset `{name}`: {why}")]
    Split {
        /// The preset.
        name: String,
        /// The heads that cannot be divided, and the valid numbers of GPUs.
        why: String,
    },
    /// The weights leave no memory for a KV cache.
    #[error("preset `{0}` does not fit: the weights leave no memory for a KV cache; use more GPUs")]
    DoesNotFit(String),
}

// === impl StepShape ===

impl StepShape {
    /// Adds a chunk of `tokens` prompt tokens that follows `position` computed or cached ones.
    pub fn add_prefill(&mut self, position: u32, tokens: u32) {
        let (position, tokens) = (u64::from(position), u64::from(tokens));
        self.prefill_tokens += tokens;
        self.prefill_pairs += tokens * position + tokens * (tokens + 1) / 2;
        self.prefill_context_tokens += position;
    }

    /// Adds a sequence that decodes its next token with `context` tokens before it.
    pub fn add_decode(&mut self, context: u32) {
        self.decode_seqs += 1;
        self.decode_context_tokens += u64::from(context);
    }

    /// Tokens that the step computes.
    pub fn tokens(&self) -> u64 {
        self.prefill_tokens + u64::from(self.decode_seqs)
    }
}

// === impl TimingModel ===

impl TimingModel {
    /// `model` on `gpus` GPUs of that name.
    ///
    /// # Errors
    ///
    /// If the GPU is unknown, the number of GPUs does not divide the model's heads evenly, or the weights leave no
    /// memory.
    pub fn new(model: ModelShape, gpu: &str, gpus: u32) -> Result<Self, PresetError> {
        let name = || {
            if gpus == 1 { format!("{}@{gpu}", model.name) } else { format!("{}@{gpu}x{gpus}", model.name) }
        };
        let timing = Self::unchecked(model.clone(), gpu, gpus).ok_or_else(|| PresetError::Unknown(name()))?;
        model.check_split(gpus).map_err(|why| PresetError::Split { name: name(), why })?;
        if timing.kv_capacity_tokens(0.90) == 0 {
            return Err(PresetError::DoesNotFit(name()));
        }
        Ok(timing)
    }

    /// `model` on `gpus` GPUs of that name, without checking whether it fits; `None` if the GPU is unknown.
    fn unchecked(model: ModelShape, gpu: &str, gpus: u32) -> Option<Self> {
        let hardware = Hardware::of(gpu, &model)?;
        Some(Self {
            model,
            hardware,
            host: Host::default(),
            traffic: Traffic::default(),
            gpus,
            kv_dtype: Dtype::Bf16,
        })
    }

    /// The model and machine of a preset name such as `qwen3-32b@h100x2`: any model and GPU of the tables. A number
    /// type after the model, as in `qwen3-32b:fp8@h100`, is that of its weights.
    ///
    /// # Errors
    ///
    /// If the name has another form, the model or GPU is unknown, the number of GPUs does not divide the model's heads
    /// evenly, or the weights leave no memory.
    pub fn preset(name: &str) -> Result<Self, PresetError> {
        let form = || PresetError::Form(name.to_owned());
        let unknown = || PresetError::Unknown(name.to_owned());
        let (model_name, machine) = name.split_once('@').ok_or_else(form)?;
        let (base, dtype) = match model_name.split_once(':') {
            Some((base, dtype)) => (base, Some(dtype.parse::<Dtype>().map_err(|_| form())?)),
            None => (model_name, None),
        };
        // A GPU's name may itself end in an x.
        let (gpu, gpus) = match machine.rsplit_once('x') {
            Some((gpu, count)) if !Hardware::names().contains(&machine) => {
                (gpu, count.parse().ok().filter(|n| (1..=GPUS_MAX).contains(n)).ok_or_else(form)?)
            }
            _ => (machine, 1),
        };
        let mut model = ModelShape::of(base).ok_or_else(unknown)?;
        if let Some(dtype) = dtype {
            model = model.with_weights(dtype);
            model.name = model_name.to_owned();
        }
        Self::new(model, gpu, gpus).map_err(|error| match error {
            PresetError::Unknown(_) => unknown(),
            PresetError::DoesNotFit(_) => PresetError::DoesNotFit(name.to_owned()),
            PresetError::Split { why, .. } => PresetError::Split { name: name.to_owned(), why },
            PresetError::Form(_) => form(),
        })
    }

    /// Name of the model and the machine, in the form of a preset.
    pub fn name(&self) -> String {
        let base = format!("{}@{}", self.model.name, self.hardware.name);
        if self.gpus == 1 { base } else { format!("{base}x{}", self.gpus) }
    }

    /// The model as coefficients, for repeated use.
    pub fn compile(&self) -> StepCost {
        StepCost::new(self)
    }

    /// Seconds for one step.
    pub fn step_secs(&self, step: &StepShape) -> f64 {
        self.compile().secs(step)
    }

    /// Seconds to compute `tokens` prompt tokens after `cached` ones on an idle engine, in chunks of `chunk_tokens`.
    pub fn prefill_secs(&self, cached: u32, tokens: u32, chunk_tokens: u32) -> f64 {
        let cost = self.compile();
        let mut secs = 0.0;
        let mut done = 0;
        while done < tokens {
            let chunk = (tokens - done).min(chunk_tokens.max(1));
            let mut step = StepShape::default();
            step.add_prefill(cached.saturating_add(done), chunk);
            done += chunk;
            step.finished_prefills = u32::from(done == tokens);
            secs += cost.secs(&step);
        }
        secs
    }

    /// Bytes of keys and values per token, over all GPUs: the size of a cache transfer. Layers with a window keep so
    /// little of a long context that they are excluded, unless there are no others.
    pub fn kv_bytes_per_token(&self) -> u64 {
        let full_layers = self.model.full_layers();
        let layers = if full_layers > 0 { full_layers } else { self.model.layers };
        let elements = u64::from(layers) * self.model.kv_elements_per_layer();
        (elements as f64 * self.kv_dtype.bytes()) as u64
    }

    /// KV cache capacity in tokens if the engine may use `memory_share` of each GPU (`--gpu-memory-utilization`).
    pub fn kv_capacity_tokens(&self, memory_share: f64) -> u64 {
        let runtime_bytes = if self.gpus > 1 { 0.6 * GIB } else { 0.15 * GIB };
        let activation_bytes =
            if self.model.experts.is_some() { MOE_ACTIVATION_BYTES } else { DENSE_ACTIVATION_BYTES };
        let weights = self.model.weight_bytes() / f64::from(self.gpus.max(1));
        let room = memory_share * self.hardware.memory_bytes - weights - activation_bytes - runtime_bytes;
        let token_bytes = self.kv_bytes_per_token() as f64 / f64::from(self.model.kv_split(self.gpus));
        (room / token_bytes) as u64
    }
}

/// Which preset was meant, for error messages.
fn meant(preset: &str) -> String {
    let model = preset.split('@').next().unwrap_or(preset);
    let model = model.split(':').next().unwrap_or(model);
    let models = suggest(model, ModelShape::names(), "The models are in docs/simulator.md.");
    format!("{models} A GPU is one of {}", Hardware::names().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn preset(name: &str) -> TimingModel {
        TimingModel::preset(name).unwrap()
    }

    fn decode(seqs: u32, context: u32) -> StepShape {
        let mut step = StepShape::default();
        (0..seqs).for_each(|_| step.add_decode(context));
        step
    }

    #[test]
    fn chunks_cost_more_than_the_prompt_at_once_but_not_much() {
        let timing = preset("qwen2.5-7b@a100");
        let (whole, chunked) = (timing.prefill_secs(0, 8192, 8192), timing.prefill_secs(0, 8192, 2048));
        assert!(whole < chunked && chunked < 1.05 * whole, "{whole} {chunked}");
        assert_eq!(timing.prefill_secs(100, 0, 2048), 0.0);
    }

    #[test]
    fn a_preset_is_any_model_on_any_gpu_that_holds_it() {
        for name in [
            "qwen2.5-7b@a100",
            "qwen3-32b@h100x2",
            "llama-3.3-70b@h200x8",
            "qwen3-32b:fp8@h100",
            "qwen3-8b@mi300x",
        ] {
            assert_eq!(preset(name).name(), name);
        }
        assert_eq!(preset("glm-4.5@mi300xx8").gpus, 8);
        let error = |name: &str| TimingModel::preset(name).unwrap_err();
        for name in ["qwen2.5-7b", "qwen2.5-7b@a100x0", "qwen2.5-7b:int3@a100"] {
            assert_eq!(error(name), PresetError::Form(name.into()));
        }
        assert_eq!(error("qwen2.5-7b@tpu"), PresetError::Unknown("qwen2.5-7b@tpu".into()));
        let uneven = error("llama-3.3-70b@h100x3").to_string();
        for part in
            ["`llama-3.3-70b@h100x3`", "64 attention heads and 8 key-value heads", "1, 2, 4, 8, 16, 32, 64"]
        {
            assert!(uneven.contains(part), "{uneven}");
        }
        // Three GPUs divide 24 heads, but not 8 key-value heads.
        assert!(error("llama-3.2-3b@h100x3").to_string().contains("use one of 1, 2, 4, 8, 24"));
        assert_eq!(error("llama-3.3-70b@a100"), PresetError::DoesNotFit("llama-3.3-70b@a100".into()));
        let slip = error("qwen3-32@h100").to_string();
        assert!(slip.contains("did you mean") && slip.contains("qwen3-32b"), "the nearest names: {slip}");
    }

    #[test]
    fn eight_bits_halve_what_is_read() {
        let (plain, fp8) = (preset("qwen3-32b@h100x2"), preset("qwen3-32b:fp8@h100x2"));
        let linear = plain.model.active_parameters();
        assert_eq!(plain.model.weight_bytes() - fp8.model.weight_bytes(), linear);
        assert!(fp8.step_secs(&decode(1, 100)) < 0.7 * plain.step_secs(&decode(1, 100)));
        let mut small_cache = plain.clone();
        small_cache.kv_dtype = Dtype::Fp8;
        assert_eq!(2 * small_cache.kv_bytes_per_token(), plain.kv_bytes_per_token());
        let ratio = small_cache.kv_capacity_tokens(0.9) as f64 / plain.kv_capacity_tokens(0.9) as f64;
        assert!((ratio - 2.0).abs() < 1e-4, "{ratio}");
        let grown =
            |timing: &TimingModel| timing.step_secs(&decode(32, 9000)) - timing.step_secs(&decode(32, 1000));
        assert!((grown(&plain) / grown(&small_cache) - 2.0).abs() < 1e-9);
    }

    #[test]
    fn eight_bits_on_a_gpu_without_them_save_memory_alone() {
        let (plain, fp8) = (preset("qwen3-32b@a100x2"), preset("qwen3-32b:fp8@a100x2"));
        let ratio = fp8.prefill_secs(0, 8192, 8192) / plain.prefill_secs(0, 8192, 8192);
        assert!((0.99..=1.0).contains(&ratio), "{ratio}");
    }

    #[test]
    fn a_window_bounds_what_half_of_the_layers_read() {
        let timing = preset("gpt-oss-120b@h100");
        let mut everywhere = timing.clone();
        everywhere.model.window = None;
        let grown = |timing: &TimingModel| {
            timing.step_secs(&decode(8, 60_000)) - timing.step_secs(&decode(8, 30_000))
        };
        assert!((grown(&everywhere) / grown(&timing) - 2.0).abs() < 1e-9);
        let short = decode(8, 100);
        assert_eq!(timing.step_secs(&short), everywhere.step_secs(&short), "no context reaches the window");
        // A chunk of 1,000 tokens at position 10,000 has 128 keys per query in those layers.
        let mut chunk = StepShape::default();
        chunk.add_prefill(10_000, 1000);
        let pairs = |timing: &TimingModel| timing.work(&chunk).attention_flops / timing.model.pair_flops();
        assert_eq!(pairs(&everywhere) - pairs(&timing), 18.0 * (10_500_500.0 - 128_000.0));
    }

    #[test]
    fn more_tokens_touch_more_experts_until_all_are_read() {
        let timing = preset("qwen3-30b-a3b@h100");
        let bytes = |seqs| timing.work(&decode(seqs, 0)).weight_bytes;
        let experts = timing.model.expert_bytes();
        assert!((bytes(2) - bytes(1) - experts * (1.0 / 16.0) * (15.0 / 16.0)).abs() < 1.0);
        assert!((bytes(512) - (bytes(1) + experts * 15.0 / 16.0)).abs() < 1.0, "all experts are read");
        assert!((1..300).all(|n| bytes(n) < bytes(n + 1) || bytes(n + 1) == bytes(512)));
    }

    #[test]
    fn a_latent_cache_is_on_every_gpu_and_many_heads_make_its_attention_arithmetic() {
        let context_secs = |gpus| {
            let mut timing = preset("deepseek-v3@h200x8");
            timing.gpus = gpus;
            timing.step_secs(&decode(1, 40_000)) - timing.step_secs(&decode(1, 0))
        };
        assert_eq!(context_secs(8), context_secs(16), "each GPU reads the whole latent vector");
        assert!(context_secs(1) > 1.5 * context_secs(8), "one GPU computes all heads");
    }

    #[test]
    fn a_short_chunk_after_a_long_prefix_waits_for_the_prefix_to_be_read() {
        let timing = preset("llama-3.1-8b@h100");
        let secs = |position| timing.prefill_secs(position, 16, 16) - timing.prefill_secs(0, 16, 16);
        let read = timing.kv_bytes_per_token() as f64 * 1e5
            / (timing.hardware.memory_bytes_per_s * timing.hardware.efficiency.kv);
        assert!((secs(100_000) / read - 1.0).abs() < 0.01, "{} {read}", secs(100_000));
    }

    #[test]
    fn a_timing_model_written_before_it_knew_experts_is_still_read() {
        let text = r#"{"model": {"name": "m", "layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16,
            "ffn": 128, "vocab": 100}, "hardware": {"name": "g", "peak_flops": 1e12, "memory_bytes_per_s": 1e12,
            "memory_bytes": 1e10, "all_reduce_secs": 0, "all_reduce_bytes_per_s": 1e9, "efficiency":
            {"compute": 0.5, "weights": 0.5, "kv": 0.5, "attention": 0.5}}, "gpus": 1}"#;
        let timing: TimingModel = serde_json::from_str(text).unwrap();
        assert_eq!(
            (timing.kv_dtype, timing.model.experts, timing.host),
            (Dtype::Bf16, None, Host::default())
        );
        assert!(timing.step_secs(&decode(1, 10)) > 0.0);
    }
}
