//! A step's time as coefficients, and the operations and bytes of a step.

use serde::Serialize;

use super::shape::Dtype;
use super::{StepShape, TimingModel};

/// A negligible share of untouched experts.
const NEGLIGIBLE: f64 = 1e-4;

/// A compiled [`TimingModel`]: everything that does not depend on the step is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepCost {
    /// Arithmetic of the layers' matrices, per token.
    matrix_secs: f64,
    /// Arithmetic of the output matrix, per token that yields another.
    head_secs: f64,
    /// Reading the weights that every token uses.
    common_weights_secs: f64,
    /// Reading all routed experts.
    expert_weights_secs: f64,
    /// The share of experts that one token does not use.
    missed: f64,
    /// Number of tokens that together use nearly all experts.
    all_experts_tokens: u64,
    /// Arithmetic of prompt attention, per query-key pair, in layers with full attention.
    pair_secs: f64,
    /// The same in layers with sliding-window attention.
    window_pair_secs: f64,
    /// Reading the keys and values before a chunk, per token.
    prefix_secs: f64,
    /// Expanding them from latent vectors, per token.
    expand_secs: f64,
    /// Decode attention, per context token, in layers with full attention.
    context_secs: f64,
    /// Savings per context token that another sequence reads too.
    shared_secs: f64,
    /// Decode attention in layers with sliding-window attention.
    window_context_secs: f64,
    /// Window size in tokens.
    window_tokens: u64,
    /// Element-wise work, per token.
    elementwise_secs: f64,
    /// All-reduce, per token.
    reduce_token_secs: f64,
    /// All-reduce, fixed cost.
    reduce_secs: f64,
    /// Host time per decoding sequence.
    sequence_secs: f64,
    /// Host time and kernel launches per step.
    step_secs: f64,
}

/// Components of a step's time, in seconds. Arithmetic and memory reads of the matrices overlap, so a step takes less
/// than their sum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepParts {
    /// Arithmetic of matrices and attention.
    pub compute_s: f64,
    /// Reading weights, keys and values, and element-wise work.
    pub memory_s: f64,
    /// All-reduce between GPUs.
    pub link_s: f64,
    /// The host, and kernel launches.
    pub host_s: f64,
}

/// Operations and memory traffic of a step, over all GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct StepWork {
    /// Floating-point operations of the matrices.
    pub matrix_flops: f64,
    /// Floating-point operations of attention.
    pub attention_flops: f64,
    /// Bytes of weights read.
    pub weight_bytes: f64,
    /// Bytes of keys and values read and written.
    pub kv_bytes: f64,
}

// === impl StepWork ===

impl StepWork {
    /// All floating-point operations.
    pub fn flops(&self) -> f64 {
        self.matrix_flops + self.attention_flops
    }

    /// All bytes of weights, keys and values. Activations are excluded: they can stay on the chip.
    pub fn bytes(&self) -> f64 {
        self.weight_bytes + self.kv_bytes
    }

    /// Operations per byte.
    pub fn intensity(&self) -> f64 {
        self.flops() / self.bytes()
    }
}

// === impl StepCost ===

impl StepCost {
    pub(super) fn new(timing: &TimingModel) -> Self {
        let (model, hardware, share) = (&timing.model, &timing.hardware, &timing.hardware.efficiency);
        let gpus = f64::from(timing.gpus.max(1));
        let (layers, hidden) = (f64::from(model.layers), f64::from(model.hidden));
        let full_layers = f64::from(model.full_layers());
        let window_layers = layers - full_layers;

        let flops_per_s = |dtype: Dtype| gpus * hardware.peak_flops_of(dtype) * share.compute;
        let active_experts = model.expert_share() * model.expert_parameters();
        let matrix_secs = 2.0 * model.common_parameters() / flops_per_s(model.weights)
            + 2.0 * active_experts / flops_per_s(model.main_dtype());
        let weights_bytes_per_s = gpus * hardware.memory_bytes_per_s * share.weights;
        let head_bytes = model.head_parameters() * Dtype::Bf16.bytes();
        let common_bytes = model.common_parameters() * model.weights.bytes() + head_bytes;

        // Attention is computed in 16 bits, whatever the types of cache and weights.
        let attention_flops_per_s = gpus * hardware.peak_flops * share.attention;
        let pair_secs = model.pair_flops() / attention_flops_per_s;
        let token_bytes = model.kv_elements_per_layer() as f64 * timing.kv_dtype.bytes()
            / f64::from(model.kv_split(timing.gpus));
        let kv_read_secs = token_bytes / (hardware.memory_bytes_per_s * share.kv);
        // Each GPU has a token's whole latent vector but only its share of the heads: with many heads, arithmetic
        // dominates.
        let context_flops_secs = model.context_flops() / attention_flops_per_s;
        let context_secs = kv_read_secs.max(context_flops_secs);
        // Only reads can be shared by several sequences.
        let traffic = &timing.traffic;
        let shared_secs = (traffic.shared_read_saved * kv_read_secs).min(context_secs - context_flops_secs);

        let elementwise_bytes = traffic.norm_bytes * hidden
            + (traffic.rotary_bytes * model.rotary_width() + traffic.activation_bytes * model.active_ffn())
                / gpus;
        let reduces = if timing.gpus > 1 { 2.0 * layers } else { 0.0 };
        let missed = 1.0 - model.expert_share();
        Self {
            matrix_secs,
            head_secs: 2.0 * model.head_parameters() / flops_per_s(Dtype::Bf16),
            common_weights_secs: common_bytes / weights_bytes_per_s,
            expert_weights_secs: model.expert_bytes() / weights_bytes_per_s,
            missed,
            all_experts_tokens: tokens_for_all_experts(missed),
            pair_secs: full_layers * pair_secs,
            window_pair_secs: window_layers * pair_secs,
            prefix_secs: full_layers * kv_read_secs,
            expand_secs: layers * model.expand_flops() / flops_per_s(Dtype::Bf16),
            context_secs: full_layers * context_secs,
            shared_secs: full_layers * shared_secs,
            window_context_secs: window_layers * context_secs,
            window_tokens: model.window.map_or(0, |window| u64::from(window.tokens)),
            elementwise_secs: layers * elementwise_bytes / hardware.memory_bytes_per_s,
            reduce_token_secs: reduces * hidden * Dtype::Bf16.bytes() / hardware.all_reduce_bytes_per_s,
            reduce_secs: reduces * hardware.all_reduce_secs,
            sequence_secs: timing.host.sequence_secs,
            step_secs: timing.host.step_secs
                + layers * hardware.layer_secs
                + model.moe_layers() * hardware.moe_layer_secs,
        }
    }

    /// Seconds for one step.
    pub fn secs(&self, step: &StepShape) -> f64 {
        let tokens = step.tokens() as f64;
        fourth_norm(self.matrices_compute_secs(step), self.weights_secs(step.tokens()))
            + self.prompt_attention_secs(step)
            + self.decode_attention_secs(step)
            + (self.elementwise_secs + self.reduce_token_secs) * tokens
            + self.sequence_secs * f64::from(step.decode_seqs)
            + self.reduce_secs
            + self.step_secs
    }

    /// Components of a step's time.
    pub fn parts(&self, step: &StepShape) -> StepParts {
        let tokens = step.tokens() as f64;
        StepParts {
            compute_s: self.matrices_compute_secs(step) + self.prompt_attention_secs(step),
            memory_s: self.weights_secs(step.tokens())
                + self.decode_attention_secs(step)
                + self.elementwise_secs * tokens,
            link_s: self.reduce_token_secs * tokens + self.reduce_secs,
            host_s: self.sequence_secs * f64::from(step.decode_seqs) + self.step_secs,
        }
    }

    /// The least that this work adds to the duration of steps, however it is divided among them and whatever else they
    /// compute: arithmetic, and reads of keys and values as if all sequences shared them. Weights and what a step takes
    /// anyway are left out.
    pub fn work_secs_min(&self, work: &StepShape) -> f64 {
        let all_shared = StepShape { decode_shared_tokens: work.decode_context_tokens, ..*work };
        self.matrices_compute_secs(work)
            + self.prompt_attention_secs(work)
            + self.decode_attention_secs(&all_shared)
            + (self.elementwise_secs + self.reduce_token_secs) * work.tokens() as f64
            + self.sequence_secs * f64::from(work.decode_seqs)
    }

    fn matrices_compute_secs(&self, step: &StepShape) -> f64 {
        let rows = f64::from(step.decode_seqs) + f64::from(step.finished_prefills);
        self.matrix_secs * step.tokens() as f64 + self.head_secs * rows
    }

    fn weights_secs(&self, tokens: u64) -> f64 {
        self.common_weights_secs + self.expert_weights_secs * self.touched_experts(tokens)
    }

    /// The share of routed experts used by at least one token, if each token chooses at random.
    fn touched_experts(&self, tokens: u64) -> f64 {
        if tokens >= self.all_experts_tokens { 1.0 } else { 1.0 - power(self.missed, tokens) }
    }

    /// A chunk's queries are computed with all keys before them, or wait until those are read. In layers with a window
    /// each query has at most that many keys; the sum over the step is capped, which is exact once every query is that
    /// far into its prompt.
    fn prompt_attention_secs(&self, step: &StepShape) -> f64 {
        let pairs = step.prefill_pairs as f64;
        let window_pairs = step.prefill_pairs.min(step.prefill_tokens * self.window_tokens) as f64;
        let prefix = step.prefill_context_tokens as f64;
        let compute = self.pair_secs * pairs + self.window_pair_secs * window_pairs;
        compute.max(self.prefix_secs * prefix) + self.expand_secs * prefix
    }

    /// In layers with a window each sequence has at most that many keys; the sum over the sequences is capped, which is
    /// exact if all contexts are on the same side of the window and too much otherwise. Reads shared by several
    /// sequences are partly saved.
    fn decode_attention_secs(&self, step: &StepShape) -> f64 {
        let context = step.decode_context_tokens;
        let window_context = context.min(u64::from(step.decode_seqs) * self.window_tokens);
        let shared = step.decode_shared_tokens.min(context);
        self.context_secs * context as f64 - self.shared_secs * shared as f64
            + self.window_context_secs * window_context as f64
    }
}

// === impl TimingModel ===

impl TimingModel {
    /// The operations and memory traffic of a step.
    pub fn work(&self, step: &StepShape) -> StepWork {
        let (model, cost) = (&self.model, self.compile());
        let tokens = step.tokens();
        let rows = f64::from(step.decode_seqs) + f64::from(step.finished_prefills);
        let head_bytes = model.head_parameters() * Dtype::Bf16.bytes();
        let (full_layers, layers) = (f64::from(model.full_layers()), f64::from(model.layers));
        let window_layers = layers - full_layers;
        let window_pairs = step.prefill_pairs.min(step.prefill_tokens * cost.window_tokens) as f64;
        let window_context =
            step.decode_context_tokens.min(u64::from(step.decode_seqs) * cost.window_tokens) as f64;
        let pairs = full_layers * step.prefill_pairs as f64 + window_layers * window_pairs;
        let context = full_layers * step.decode_context_tokens as f64 + window_layers * window_context;
        let prefix = step.prefill_context_tokens as f64;
        // Every GPU reads the latent vector.
        let copies = f64::from(self.gpus.max(1)) / f64::from(model.kv_split(self.gpus));
        let copies = if model.latent.is_some() { copies } else { 1.0 };
        let token_bytes = model.kv_elements_per_layer() as f64 * self.kv_dtype.bytes() * copies;
        StepWork {
            matrix_flops: 2.0 * model.active_parameters() * tokens as f64
                + 2.0 * model.head_parameters() * rows,
            attention_flops: model.pair_flops() * pairs
                + model.context_flops() * context
                + model.expand_flops() * layers * prefix,
            weight_bytes: model.common_parameters() * model.weights.bytes()
                + head_bytes
                + model.expert_bytes() * cost.touched_experts(tokens),
            kv_bytes: token_bytes * (full_layers * prefix + context + layers * tokens as f64),
        }
    }
}

/// A smooth maximum, for the transition from compute-bound to memory-bound. Two square roots, which IEEE 754 rounds
/// identically everywhere; `powf(0.25)` differs between platforms.
fn fourth_norm(a: f64, b: f64) -> f64 {
    let (a2, b2) = (a * a, b * b);
    (a2 * a2 + b2 * b2).sqrt().sqrt()
}

/// `base` to the power of `exponent`, by squaring.
fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut product = 1.0;
    while exponent > 0 {
        if exponent & 1 == 1 {
            product *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    product
}

/// The number of tokens after which less than [`NEGLIGIBLE`] of the experts are untouched, within a factor of two.
fn tokens_for_all_experts(missed: f64) -> u64 {
    // A model without experts has a missed share of 1.
    if missed >= 1.0 {
        return 0;
    }
    let (mut tokens, mut untouched) = (1, missed);
    while untouched > NEGLIGIBLE {
        tokens *= 2;
        untouched *= untouched;
    }
    tokens
}
