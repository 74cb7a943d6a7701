//! Hardware: a GPU's data sheet, the efficiencies that kernels reach, and the host's overhead.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use super::ModelShape;
use super::shape::Dtype;

const GIB: f64 = 1_073_741_824.0;

/// A GPU's data sheet, and the efficiencies that engines reach with one kind of model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hardware {
    /// Short name, as in a preset: `a100`.
    pub name: String,
    /// Dense bf16 peak in FLOP/s.
    pub peak_flops: f64,
    /// Peak in FLOP/s with 8-bit weights, if the GPU supports them.
    #[serde(default)]
    pub fp8_peak_flops: Option<f64>,
    /// Memory bandwidth in bytes/s.
    pub memory_bytes_per_s: f64,
    /// Memory available to an engine, in bytes.
    pub memory_bytes: f64,
    /// Latency of one all-reduce in seconds.
    pub all_reduce_secs: f64,
    /// Bandwidth of an all-reduce in bytes/s.
    pub all_reduce_bytes_per_s: f64,
    /// Fixed seconds per layer: kernel launches and synchronization.
    #[serde(default)]
    pub layer_secs: f64,
    /// Additional fixed seconds per layer with experts: routing and permuting.
    #[serde(default)]
    pub moe_layer_secs: f64,
    /// Shares of the peaks that are reached.
    pub efficiency: Efficiency,
}

/// Shares of a data sheet's peaks that kernels reach, each in (0, 1].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Efficiency {
    /// Arithmetic of large matrix multiplications.
    pub compute: f64,
    /// Reading weights.
    pub weights: f64,
    /// Reading keys and values while decoding.
    pub kv: f64,
    /// Arithmetic of prompt attention.
    pub attention: f64,
}

/// The host's overhead.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    /// Seconds per step.
    pub step_secs: f64,
    /// Seconds per step and decoding sequence.
    pub sequence_secs: f64,
    /// Seconds per request outside of steps before its first token: HTTP, tokenising, detokenising.
    pub request_secs: f64,
}

/// Memory traffic that neither the data sheet nor the model's shape gives. `docs/simulator-constants.md` has what
/// the published figures would be without it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Traffic {
    /// Bytes of norms and residuals per token, layer and unit of the hidden size. Vidur's profiles (microsoft/vidur, MIT,
    /// commit 7d47513, `data/profiling/compute`) give 32.0 for Llama-3-8B on A100 at 32,768 tokens and 31.1 for Llama-2-70B on
    /// H100 at 4,096.
    pub norm_bytes: f64,
    /// Bytes of rotary embedding per token, layer and unit of queries and keys: 9.4 and 8.9 there.
    pub rotary_bytes: f64,
    /// Bytes of the activation per token, layer and unit of the feed-forward part: 12.0 and 10.3 there.
    pub activation_bytes: f64,
    /// Share of the repeated reads of blocks shared by several sequences of a step that the L2 cache serves. Sequences of
    /// one prefix group are spread over the batch, so only those whose kernels run at the same time profit. Fitted
    /// to llm-d's precise-prefix ladder (llm-d/llm-d, commit d73b625), where a step reads up to four times as many tokens as
    /// its cache holds. The other values fitted to that ladder are settings of the scenario `seed-001`.
    pub shared_read_saved: f64,
}

/// A row of `data/gpus.json`.
#[derive(Deserialize)]
struct Gpu {
    bf16_tflops: f64,
    fp8_tflops: Option<f64>,
    memory_tb_per_s: f64,
    memory_gib: f64,
    all_reduce_us: f64,
    all_reduce_gb_per_s: f64,
    layer_us: f64,
    moe_layer_us: f64,
    /// Models without experts, in 16 bit.
    dense: Efficiency,
    /// The same in 8 bit.
    dense_fp8: Option<Efficiency>,
    /// Models with experts, in 16 bit or with 4-bit experts that are multiplied in 16 bit.
    moe: Efficiency,
    /// The same in 8 bit.
    moe_fp8: Option<Efficiency>,
}

static GPUS: LazyLock<BTreeMap<String, Gpu>> = LazyLock::new(|| {
    serde_json::from_str(include_str!("../../data/gpus.json")).expect("a test reads the table")
});

// === impl Hardware ===

impl Hardware {
    /// The GPU of that name with its efficiencies for `model`: they are lower with experts and with 8 bits.
    pub fn of(name: &str, model: &ModelShape) -> Option<Self> {
        let gpu = GPUS.get(name)?;
        let eight_bits = model.main_dtype() == Dtype::Fp8;
        let (plain, fp8) =
            if model.experts.is_some() { (gpu.moe, gpu.moe_fp8) } else { (gpu.dense, gpu.dense_fp8) };
        Some(Self {
            name: name.to_owned(),
            peak_flops: gpu.bf16_tflops * 1e12,
            fp8_peak_flops: gpu.fp8_tflops.map(|tflops| tflops * 1e12),
            memory_bytes_per_s: gpu.memory_tb_per_s * 1e12,
            memory_bytes: gpu.memory_gib * GIB,
            all_reduce_secs: gpu.all_reduce_us / 1e6,
            all_reduce_bytes_per_s: gpu.all_reduce_gb_per_s * 1e9,
            layer_secs: gpu.layer_us / 1e6,
            moe_layer_secs: gpu.moe_layer_us / 1e6,
            efficiency: if eight_bits { fp8.unwrap_or(plain) } else { plain },
        })
    }

    /// The names that [`Hardware::of`] accepts, in order.
    pub fn names() -> Vec<&'static str> {
        GPUS.keys().map(String::as_str).collect()
    }

    /// Peak in FLOP/s with weights of that type. Weights narrower than the GPU's arithmetic are widened first.
    pub fn peak_flops_of(&self, dtype: Dtype) -> f64 {
        match dtype {
            Dtype::Fp8 => self.fp8_peak_flops.unwrap_or(self.peak_flops),
            Dtype::Bf16 | Dtype::Mxfp4 => self.peak_flops,
        }
    }
}

// === impl Host ===

impl Default for Host {
    /// vLLM V1 with asynchronous scheduling, without per-request cost. The step time is the residual of decode steps
    /// measured with Qwen3-8B on one H100 (see docs/simulator.md).
    fn default() -> Self {
        Self { step_secs: 0.7e-3, sequence_secs: 6e-6, request_secs: 0.0 }
    }
}

// === impl Traffic ===

impl Traffic {
    /// Whether it is the default.
    pub(super) fn is_usual(&self) -> bool {
        *self == Self::default()
    }
}

impl Default for Traffic {
    fn default() -> Self {
        Self { norm_bytes: 32.0, rotary_bytes: 9.0, activation_bytes: 11.0, shared_read_saved: 0.20 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_gpu_has_shares_between_none_and_all() {
        assert!(["a100", "h100", "h200"].iter().all(|name| GPUS.contains_key(*name)));
        for (name, gpu) in GPUS.iter() {
            let regimes = [Some(gpu.dense), gpu.dense_fp8, Some(gpu.moe), gpu.moe_fp8];
            for share in regimes.into_iter().flatten() {
                for value in [share.compute, share.weights, share.kv, share.attention] {
                    assert!(value > 0.0 && value <= 1.0, "{name}: {share:?}");
                }
            }
            assert_eq!(gpu.fp8_tflops.is_some(), gpu.dense_fp8.is_some() && gpu.moe_fp8.is_some(), "{name}");
        }
    }
}
