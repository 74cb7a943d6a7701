//! How long an engine takes for one step: a roofline of the model's shape and the machine's limits.
//!
//! A step computes `n` tokens: chunks of prompts and one token of each decoding sequence. Its time is a sum of
//!
//! - the matrix multiplications, bound by arithmetic or by reading the weights, whichever is slower, with a smooth
//!   corner between the two (the 4-norm);
//! - attention of prompt chunks, bound by arithmetic, in query-key pairs;
//! - attention of decoding sequences, bound by reading their keys and values;
//! - all-reduce, two for each layer, if the model is spread over several GPUs;
//! - element-wise work (norms, rotary embedding, residuals), and a fixed and a per-sequence cost of the host.
//!
//! Each bound is a data-sheet number times an efficiency. The efficiencies for A100 are read off the GEMM and
//! attention profiles that Vidur publishes (microsoft/vidur, MIT, commit 7d47513); those for H100 from the same set
//! and from llm-d's precise-prefix-cache benchmark of Qwen3-32B on 8 x 2 H100. Against llm-d-router's calibration
//! matrix (a cold prompt of 8,192 tokens on Qwen3-32B, two H100, vLLM: 15,928 tokens/s) the model is within 1 %.
//!
//! Dense decoders with grouped-query attention in 16 bit only: mixtures of experts, latent attention and
//! quantisation need terms that are not here.

mod cost;
mod file;
mod hardware;
mod shape;

use serde::{Deserialize, Serialize};

pub use cost::StepCost;
pub use file::{Residual, TimingFile, TimingFileError};
pub use hardware::{Efficiency, Hardware, Host};
pub use shape::ModelShape;

const GIB: f64 = 1_073_741_824.0;

/// Bytes of one weight or one key or value element: bf16.
const ELEMENT_BYTES: f64 = 2.0;

/// Activation memory vLLM sets aside when it sizes its KV cache, in bytes per GPU. It gives the 302 K tokens that
/// Qwen3-32B has on two H100 at a memory share of 0.90.
const ACTIVATION_BYTES: f64 = 3.67 * GIB;

/// What one step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StepShape {
    /// Prompt tokens, over all chunks.
    pub prefill_tokens: u64,
    /// Query-key pairs of those chunks: a chunk of `c` tokens after `p` has `c * p + c * (c + 1) / 2`.
    pub prefill_pairs: u64,
    /// Decoding sequences, one token each.
    pub decode_seqs: u32,
    /// Sum of their context lengths in tokens.
    pub decode_context_tokens: u64,
    /// Chunks that end a prompt and so yield a token.
    pub finished_prefills: u32,
}

/// A model on a number of GPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TimingModel {
    /// The model served.
    pub model: ModelShape,
    /// The kind of GPU.
    pub hardware: Hardware,
    /// What the host adds.
    #[serde(default)]
    pub host: Host,
    /// GPUs the model is spread over (tensor parallelism), at least 1.
    pub gpus: u32,
}

/// Why a preset does not exist.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PresetError {
    /// Not of the form `model@gpu` or `model@gpuxN`.
    #[error("preset `{0}` is not of the form model@gpu or model@gpuxN; known are {list}", list = known())]
    Form(String),
    /// The model or the GPU is not in the tables.
    #[error("preset `{0}` names an unknown model or GPU; known are {list}", list = known())]
    Unknown(String),
    /// The weights leave no room for a KV cache.
    #[error("preset `{0}` does not fit: the weights leave no memory for a KV cache; use more GPUs")]
    DoesNotFit(String),
}

/// layers, hidden, heads, kv heads, head dim, ffn, vocabulary; from the models' `config.json`.
const MODELS: [(&str, [u32; 7]); 5] = [
    ("llama-3.1-8b", [32, 4096, 32, 8, 128, 14336, 128_256]),
    ("llama-3.3-70b", [80, 8192, 64, 8, 128, 28672, 128_256]),
    ("qwen2.5-7b", [28, 3584, 28, 4, 128, 18944, 152_064]),
    ("qwen2.5-14b", [48, 5120, 40, 8, 128, 13824, 152_064]),
    ("qwen3-32b", [64, 5120, 64, 8, 128, 25600, 151_936]),
];

/// TFLOP/s bf16 dense, memory TB/s, memory GiB, all-reduce microseconds and GB/s; then the efficiencies for compute,
/// weights, kv and attention. Peaks and memory are the SXM data sheets'; all-reduce is what Vidur measured on an H100
/// DGX. H200 efficiencies are H100's with less of the faster memory reached, not measured.
const GPUS: [(&str, [f64; 5], [f64; 4]); 3] = [
    ("a100", [312.0, 2.039, 79.25, 12.0, 220.0], [0.72, 0.72, 0.75, 0.50]),
    ("h100", [989.5, 3.35, 79.6, 9.0, 275.0], [0.72, 0.87, 0.90, 0.55]),
    ("h200", [989.5, 4.8, 139.8, 9.0, 275.0], [0.72, 0.80, 0.85, 0.55]),
];

// === impl StepShape ===

impl StepShape {
    /// Adds a chunk of `tokens` prompt tokens that follows `position` computed or cached ones.
    pub fn add_prefill(&mut self, position: u32, tokens: u32) {
        let (position, tokens) = (u64::from(position), u64::from(tokens));
        self.prefill_tokens += tokens;
        self.prefill_pairs += tokens * position + tokens * (tokens + 1) / 2;
    }

    /// Adds a sequence that decodes its next token with `context` tokens before it.
    pub fn add_decode(&mut self, context: u32) {
        self.decode_seqs += 1;
        self.decode_context_tokens += u64::from(context);
    }
}

// === impl TimingModel ===

impl TimingModel {
    /// The model and machine a name such as `qwen3-32b@h100x2` stands for: any model and GPU of the tables.
    pub fn preset(name: &str) -> Result<Self, PresetError> {
        let form = || PresetError::Form(name.to_owned());
        let (model_name, machine) = name.split_once('@').ok_or_else(form)?;
        let (gpu_name, gpus) = match machine.split_once('x') {
            Some((gpu, count)) => {
                (gpu, count.parse().ok().filter(|n| (1..=64).contains(n)).ok_or_else(form)?)
            }
            None => (machine, 1),
        };
        let unknown = || PresetError::Unknown(name.to_owned());
        let (_, dimensions) = MODELS.iter().find(|(known, _)| *known == model_name).ok_or_else(unknown)?;
        let (_, peaks, shares) = GPUS.iter().find(|(known, ..)| *known == gpu_name).ok_or_else(unknown)?;
        let [layers, hidden, heads, kv_heads, head_dim, ffn, vocab] = *dimensions;
        let [compute, weights, kv, attention] = *shares;
        let timing = Self {
            model: ModelShape {
                name: model_name.into(),
                layers,
                hidden,
                heads,
                kv_heads,
                head_dim,
                ffn,
                vocab,
            },
            hardware: Hardware {
                name: gpu_name.into(),
                peak_flops: peaks[0] * 1e12,
                memory_bytes_per_s: peaks[1] * 1e12,
                memory_bytes: peaks[2] * GIB,
                all_reduce_secs: peaks[3] * 1e-6,
                all_reduce_bytes_per_s: peaks[4] * 1e9,
                efficiency: Efficiency { compute, weights, kv, attention },
            },
            host: Host::default(),
            gpus,
        };
        if timing.kv_capacity_tokens(0.90) == 0 {
            return Err(PresetError::DoesNotFit(name.to_owned()));
        }
        Ok(timing)
    }

    /// Name of the model and the machine, in the form of a preset.
    pub fn name(&self) -> String {
        let base = format!("{}@{}", self.model.name, self.hardware.name);
        if self.gpus == 1 { base } else { format!("{base}x{}", self.gpus) }
    }

    /// The model as coefficients, for who asks often.
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

    /// Bytes of keys and values of one token, over all GPUs: what moves when a cache moves.
    pub fn kv_bytes_per_token(&self) -> u64 {
        self.model.kv_bytes_per_token()
    }

    /// Bytes of keys and values of one token on one GPU. Key-value heads are split until each GPU has one.
    fn kv_bytes_per_gpu(&self) -> f64 {
        self.model.kv_bytes_per_token() as f64 / f64::from(self.gpus.clamp(1, self.model.kv_heads.max(1)))
    }

    /// Tokens the KV cache holds if the engine may use `memory_share` of each GPU (`--gpu-memory-utilization`).
    pub fn kv_capacity_tokens(&self, memory_share: f64) -> u64 {
        let runtime_bytes = if self.gpus > 1 { 0.6 * GIB } else { 0.15 * GIB };
        let weights = self.model.weight_bytes() / f64::from(self.gpus.max(1));
        let room = memory_share * self.hardware.memory_bytes - weights - ACTIVATION_BYTES - runtime_bytes;
        (room / self.kv_bytes_per_gpu()) as u64
    }
}

/// The names a preset may be made of, for error messages.
fn known() -> String {
    let models: Vec<&str> = MODELS.iter().map(|(name, _)| *name).collect();
    let gpus: Vec<&str> = GPUS.iter().map(|(name, ..)| *name).collect();
    format!("{} at {}", models.join(", "), gpus.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `observed` within `percent` of `expected`.
    #[track_caller]
    fn check(what: &str, observed: f64, expected: f64, percent: f64) {
        let off = (observed / expected - 1.0) * 100.0;
        assert!(
            off.abs() <= percent,
            "{what}: {observed:.3}, expected {expected} +- {percent} % ({off:+.1} %)"
        );
    }

    fn prefill_ms(timing: &TimingModel, tokens: u32) -> f64 {
        timing.prefill_secs(0, tokens, tokens) * 1e3
    }

    fn decode_ms(timing: &TimingModel, seqs: u32, context: u32) -> f64 {
        let mut step = StepShape::default();
        (0..seqs).for_each(|_| step.add_decode(context));
        timing.step_secs(&step) * 1e3
    }

    #[test]
    fn a_cold_prompt_on_qwen3_32b_runs_at_the_measured_rate() {
        let timing = TimingModel::preset("qwen3-32b@h100x2").unwrap();
        check("tokens/s", 8192.0 / timing.prefill_secs(0, 8192, 8192), 15_928.0, 2.0);
    }

    #[test]
    fn prefill_and_decode_reproduce_the_reference_table() {
        // Milliseconds: cold prefill of 2,048 and 8,192; decode step of 1, 32 and 128 sequences at 2,048 tokens.
        for (name, prefill, decode) in [
            ("llama-3.1-8b@a100", [140.0, 642.0], [11.4, 17.1, 35.8]),
            ("llama-3.1-8b@h100", [48.0, 213.0], [6.7, 9.9, 19.8]),
            ("qwen2.5-7b@a100", [129.0, 578.0], [10.7, 13.3, 22.5]),
            ("qwen2.5-14b@a100", [264.0, 1212.0], [20.3, 28.8, 57.1]),
            ("qwen3-32b@h100x2", [118.0, 513.0], [14.2, 17.6, 28.4]),
            ("llama-3.3-70b@h100x4", [147.0, 611.0], [15.5, 18.2, 26.6]),
            ("llama-3.3-70b@a100x4", [372.0, 1586.0], [26.7, 31.1, 46.9]),
        ] {
            let timing = TimingModel::preset(name).unwrap();
            for (tokens, expected) in [2048, 8192].into_iter().zip(prefill) {
                check(&format!("{name} prefill {tokens}"), prefill_ms(&timing, tokens), expected, 10.0);
            }
            for (seqs, expected) in [1, 32, 128].into_iter().zip(decode) {
                check(&format!("{name} decode {seqs}"), decode_ms(&timing, seqs, 2048), expected, 10.0);
            }
        }
    }

    #[test]
    fn prompt_attention_grows_with_the_position_of_the_chunk() {
        // Milliseconds for 8,192 tokens after 96 K.
        for (name, expected) in [("llama-3.1-8b@a100", 3350.0), ("qwen3-32b@h100x2", 2070.0)] {
            let timing = TimingModel::preset(name).unwrap();
            check(name, timing.prefill_secs(98_304, 8192, 8192) * 1e3, expected, 10.0);
        }
    }

    #[test]
    fn matrices_and_elementwise_work_follow_vidurs_profiles() {
        // Milliseconds for n tokens through all layers of Llama-3-8B on one A100, without attention and host.
        let timing = TimingModel::preset("llama-3.1-8b@a100").unwrap();
        for (tokens, expected) in [(1, 9.7), (1024, 75.0), (2048, 142.0), (4096, 273.0), (8192, 543.0)] {
            let step = StepShape { prefill_tokens: tokens, ..StepShape::default() };
            check(
                &format!("{tokens} tokens"),
                (timing.step_secs(&step) - timing.host.step_secs) * 1e3,
                expected,
                12.0,
            );
        }
    }

    #[test]
    fn memory_left_for_keys_and_values_matches_the_reference_table() {
        for (name, share, bytes_per_token, tokens) in [
            ("llama-3.1-8b@a100", 0.90, 131_072, 431e3),
            ("llama-3.1-8b@h100", 0.90, 131_072, 433e3),
            ("qwen2.5-7b@a100", 0.90, 57_344, 1e6),
            ("qwen2.5-14b@a100", 0.90, 196_608, 218e3),
            ("qwen3-32b@h100x2", 0.90, 262_144, 302e3),
            ("qwen3-32b@h100x2", 0.95, 262_144, 335e3),
            ("llama-3.3-70b@h100x4", 0.90, 327_680, 445e3),
        ] {
            let timing = TimingModel::preset(name).unwrap();
            assert_eq!(timing.model.kv_bytes_per_token(), bytes_per_token, "{name}");
            check(name, timing.kv_capacity_tokens(share) as f64, tokens, 2.0);
        }
    }

    #[test]
    fn chunks_cost_more_than_the_prompt_at_once_but_not_much() {
        let timing = TimingModel::preset("qwen2.5-7b@a100").unwrap();
        let (whole, chunked) = (timing.prefill_secs(0, 8192, 8192), timing.prefill_secs(0, 8192, 2048));
        assert!(whole < chunked && chunked < 1.05 * whole, "{whole} {chunked}");
        assert_eq!(timing.prefill_secs(100, 0, 2048), 0.0);
    }

    #[test]
    fn a_preset_is_any_model_on_any_gpu_that_holds_it() {
        for name in ["qwen2.5-7b@a100", "qwen3-32b@h100x2", "llama-3.3-70b@h200x8"] {
            assert_eq!(TimingModel::preset(name).unwrap().name(), name);
        }
        let error = |name: &str| TimingModel::preset(name).unwrap_err();
        assert_eq!(error("qwen2.5-7b"), PresetError::Form("qwen2.5-7b".into()));
        assert_eq!(error("qwen2.5-7b@a100x0"), PresetError::Form("qwen2.5-7b@a100x0".into()));
        assert_eq!(error("qwen2.5-7b@tpu"), PresetError::Unknown("qwen2.5-7b@tpu".into()));
        assert_eq!(error("llama-3.3-70b@a100"), PresetError::DoesNotFit("llama-3.3-70b@a100".into()));
        assert!(error("x@y").to_string().contains("qwen3-32b"), "the message lists what is known");
    }
}
