//! The step's time as a handful of coefficients.

use super::{ELEMENT_BYTES, StepShape, TimingModel};

/// Element-wise work in seconds for each token, layer and hidden unit: 6 microseconds a token for Qwen3-32B.
const ELEMENTWISE_SECS: f64 = 1.8e-11;

/// A [`TimingModel`] made ready: everything that does not depend on the step is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCost {
    /// Arithmetic of the layers' matrices, for each token.
    matrix_secs: f64,
    /// Arithmetic of the output matrix, for each token that yields another.
    head_secs: f64,
    /// Reading the weights.
    weights_secs: f64,
    /// Arithmetic of prompt attention, for each query-key pair.
    pair_secs: f64,
    /// Reading keys and values, for each token of a decoding sequence's context.
    context_secs: f64,
    /// All-reduce and element-wise work, for each token.
    token_secs: f64,
    /// Host time for each decoding sequence.
    sequence_secs: f64,
    /// Whatever every step costs.
    step_secs: f64,
}

// === impl StepCost ===

impl StepCost {
    pub(super) fn new(timing: &TimingModel) -> Self {
        let (model, hardware, share) = (&timing.model, &timing.hardware, &timing.hardware.efficiency);
        let gpus = f64::from(timing.gpus.max(1));
        let (layers, hidden) = (f64::from(model.layers), f64::from(model.hidden));
        let (linear, head) = (model.linear_parameters(), model.head_parameters());
        let flops_per_s = gpus * hardware.peak_flops * share.compute;
        let pair_flops = 4.0 * f64::from(model.heads) * f64::from(model.head_dim) * layers;
        let (reduce_secs, reduce_token_secs) = if timing.gpus > 1 {
            let bytes = hidden * ELEMENT_BYTES;
            (2.0 * layers * hardware.all_reduce_secs, 2.0 * layers * bytes / hardware.all_reduce_bytes_per_s)
        } else {
            (0.0, 0.0)
        };
        Self {
            matrix_secs: 2.0 * linear / flops_per_s,
            head_secs: 2.0 * head / flops_per_s,
            weights_secs: ELEMENT_BYTES * (linear + head)
                / gpus
                / (hardware.memory_bytes_per_s * share.weights),
            pair_secs: pair_flops / (gpus * hardware.peak_flops * share.attention),
            context_secs: timing.kv_bytes_per_gpu() / (hardware.memory_bytes_per_s * share.kv),
            token_secs: reduce_token_secs + layers * hidden * ELEMENTWISE_SECS,
            sequence_secs: timing.host.sequence_secs,
            step_secs: timing.host.step_secs + reduce_secs,
        }
    }

    /// Seconds for one step.
    pub fn secs(&self, step: &StepShape) -> f64 {
        let decode_seqs = f64::from(step.decode_seqs);
        let tokens = step.prefill_tokens as f64 + decode_seqs;
        let rows = decode_seqs + f64::from(step.finished_prefills);
        let compute = self.matrix_secs * tokens + self.head_secs * rows;
        // Two square roots, which IEEE 754 rounds alike everywhere; `powf(0.25)` differs between platforms.
        let matrices = (compute.powi(4) + self.weights_secs.powi(4)).sqrt().sqrt();
        matrices
            + self.pair_secs * step.prefill_pairs as f64
            + self.context_secs * step.decode_context_tokens as f64
            + self.token_secs * tokens
            + self.sequence_secs * decode_seqs
            + self.step_secs
    }
}
