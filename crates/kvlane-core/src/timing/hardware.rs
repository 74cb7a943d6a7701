//! What a machine can do: a GPU's data sheet, the share of it that kernels reach, and the host beside it.

use serde::{Deserialize, Serialize};

/// What a GPU can do, from its data sheet, and how much of it engines get.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Hardware {
    /// Short name, as in a preset: `a100`.
    pub name: String,
    /// Dense bf16 peak in FLOP/s.
    pub peak_flops: f64,
    /// Memory bandwidth in bytes/s.
    pub memory_bytes_per_s: f64,
    /// Memory an engine sees, in bytes.
    pub memory_bytes: f64,
    /// Latency of one all-reduce in seconds.
    pub all_reduce_secs: f64,
    /// Bandwidth of an all-reduce in bytes/s.
    pub all_reduce_bytes_per_s: f64,
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

/// What the host adds to the work of the GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Host {
    /// Seconds of every step.
    pub step_secs: f64,
    /// Seconds of a step for each decoding sequence.
    pub sequence_secs: f64,
    /// Seconds that a request spends outside of steps before its first token: HTTP, tokenising, detokenising.
    pub request_secs: f64,
}

// === impl Host ===

impl Default for Host {
    /// vLLM V1 with asynchronous scheduling, and requests that cost nothing outside of steps.
    fn default() -> Self {
        Self { step_secs: 1e-3, sequence_secs: 6e-6, request_secs: 0.0 }
    }
}
