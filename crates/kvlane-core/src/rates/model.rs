//! The seconds of an engine's work, as a sum of terms.

use serde::{Deserialize, Serialize};

use crate::load::InFlight;
use crate::timing::{StepShape, TimingModel};

/// Step time of an engine, in seconds. In a step that computes a prompt, the arithmetic of its tokens hides the reading
/// of the weights, or the other way round: the two take their fourth norm, as in [`crate::timing`]. All else adds up.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Per uncached prompt token.
    pub prefill_token_s: f64,
    /// Per query-key pair of those tokens.
    pub prefill_pair_s: f64,
    /// Per cached prompt token that is only below the GPU: loading its KV blocks.
    pub load_token_s: f64,
    /// Per step: reading the weights, launching kernels.
    pub step_s: f64,
    /// Per decoding sequence.
    pub sequence_s: f64,
    /// Per token of their contexts.
    pub context_token_s: f64,
    /// Per request, outside of steps: its way to the engine and back, HTTP, tokenizing.
    pub request_s: f64,
    /// Decode steps that pass at a busy engine before it begins a prompt.
    pub wait_steps: f64,
}

/// What an engine does in some time, by the terms of [`Rates`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Work {
    /// Prompt tokens to compute, and their query-key pairs.
    pub(crate) tokens: u64,
    pub(crate) pairs: u64,
    /// Prompt tokens whose KV blocks are loaded from below the GPU before that.
    pub(crate) loaded_tokens: u64,
    /// Steps, in so many of which the prompts are computed; each with so many decoding sequences, whose contexts have so
    /// many tokens together.
    pub(crate) steps: f64,
    pub(crate) chunks: f64,
    pub(crate) sequences: u32,
    pub(crate) context_tokens: u64,
    /// Requests whose way is part of the time, and those that found the engine busy.
    pub(crate) requests: u32,
    pub(crate) waits: u32,
}

/// Most prompt tokens per step, to estimate how many steps a prompt takes (vLLM's `max_num_batched_tokens` of its
/// server on large GPUs).
pub(crate) const STEP_TOKENS: u64 = 8192;

/// Largest part of a prompt that counts as computed before its first token arrives.
pub(crate) const COMPUTED_MAX: f64 = 0.9;

/// A part of an engine's speed: of an endpoint, or of all together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Prefill,
    Decode,
}

/// Prompt length, in tokens, for which an endpoint's prefill rate is shown: the longer a prompt, the longer each token takes.
const SHOWN_TOKENS: u64 = 4096;

/// Time to load a token's KV blocks, as a share of the time to compute the token, before any load is measured: Qwen3-32B keeps
/// 256 KiB per token, which take 13 µs from host memory at 20 GB/s (what BLIS assumes for host DRAM; inference-sim, device
/// table) and are computed in 60 µs on two H100; Llama-3.1-8B on one H100: 128 KiB, 6.6 and 25 µs. A larger model has more
/// bytes and more arithmetic per token, and a slower machine an older bus, so the share differs less than the time.
const LOADED_SHARE: f64 = 0.2;

/// Seconds of a request outside of steps before any is measured, if the machine does not say: some milliseconds in front of
/// vLLM, and nothing to speak of in the simulator.
const REQUEST_S: f64 = 1e-3;

/// Steps that a prompt waits at a busy engine before any wait is measured: on average, half of the one in progress is left. An engine that
/// schedules the next step ahead, as vLLM does, takes one more.
const WAIT_STEPS: f64 = 0.5;

// === impl Rates ===

impl Default for Rates {
    /// About an 8-billion-parameter model on one H100 (Llama-3.1-8B by [`crate::timing`]). Machines differ in scale
    /// more than in ratios: the ratio of step time to token time is that of a machine's arithmetic to its memory
    /// bandwidth, whatever the model's size.
    fn default() -> Self {
        Self {
            prefill_token_s: 25e-6,
            prefill_pair_s: 1.0e-9,
            load_token_s: LOADED_SHARE * 25e-6,
            step_s: 6.5e-3,
            sequence_s: 20e-6,
            context_token_s: 45e-9,
            request_s: REQUEST_S,
            wait_steps: WAIT_STEPS,
        }
    }
}

impl Rates {
    /// The rates of a timing model.
    pub fn of(timing: &TimingModel) -> Self {
        let cost = timing.compile();
        let chunk = |position: u32, tokens: u32| {
            let mut step = StepShape::default();
            step.add_prefill(position, tokens);
            (cost.secs(&step), step.prefill_pairs as f64)
        };
        let decode = |sequences: u32, context: u32| {
            let mut step = StepShape::default();
            (0..sequences).for_each(|_| step.add_decode(context));
            cost.secs(&step)
        };
        let ((near_s, near_pairs), (far_s, far_pairs)) = (chunk(0, 4096), chunk(32_768, 4096));
        let prefill_pair_s = (far_s - near_s) / (far_pairs - near_pairs);
        let step_s = decode(1, 0);
        let prefill_token_s = (near_s - prefill_pair_s * near_pairs) / 4096.0;
        Self {
            prefill_token_s,
            prefill_pair_s,
            load_token_s: LOADED_SHARE * prefill_token_s,
            step_s,
            sequence_s: (decode(65, 0) - step_s) / 64.0,
            context_token_s: (decode(32, 8192) - decode(32, 0)) / (32.0 * 8192.0),
            request_s: timing.host.request_secs.max(REQUEST_S),
            wait_steps: WAIT_STEPS,
        }
    }

    /// Seconds to prefill `tokens` with `pairs` query-key pairs.
    pub fn prefill_s(&self, tokens: u64, pairs: u64) -> f64 {
        self.prefill_token_s * tokens as f64 + self.prefill_pair_s * pairs as f64
    }

    /// Seconds of a step in which `sequences` decode, with `context_tokens` in total.
    pub fn decode_step_s(&self, sequences: u32, context_tokens: u64) -> f64 {
        self.step_s + self.sequence_s * f64::from(sequences) + self.context_token_s * context_tokens as f64
    }

    /// The rates of a machine whose prefill and decoding take so many times longer.
    pub(crate) fn times(&self, prefill: f64, decode: f64) -> Self {
        Self {
            prefill_token_s: self.prefill_token_s * prefill,
            prefill_pair_s: self.prefill_pair_s * prefill,
            load_token_s: self.load_token_s * prefill,
            step_s: self.step_s * decode,
            sequence_s: self.sequence_s * decode,
            context_token_s: self.context_token_s * decode,
            ..*self
        }
    }

    /// Seconds of some work.
    pub(crate) fn seconds_of(&self, work: &Work) -> f64 {
        let (steps, chunks) = work.steps();
        let load_s = self.decode_step_s(work.sequences, work.context_tokens) - self.step_s;
        chunks * fourth_norm(self.prefill_token_s * work.tokens as f64 / chunks, self.step_s)
            + self.prefill_pair_s * work.pairs as f64
            + self.load_token_s * work.loaded_tokens as f64
            + (steps - chunks) * self.step_s
            + steps * load_s
            + self.request_s * f64::from(work.requests)
            + self.wait_steps * (self.step_s + load_s) * f64::from(work.waits)
    }

    /// Prompt tokens per second of a prefill of [`SHOWN_TOKENS`].
    pub fn shown_prefill_rate(&self) -> f64 {
        SHOWN_TOKENS as f64 / self.prefill_s(SHOWN_TOKENS, SHOWN_TOKENS * (SHOWN_TOKENS + 1) / 2)
    }

    /// The seconds that a factor is of: of a prefill of [`SHOWN_TOKENS`], of a decode step without sequences.
    pub(crate) fn seconds(&self, part: Part) -> f64 {
        match part {
            Part::Prefill => SHOWN_TOKENS as f64 / self.shown_prefill_rate(),
            Part::Decode => self.step_s,
        }
    }

    /// Seconds of a decode step with the work that is in flight now.
    pub fn shown_step_s(&self, in_flight: &InFlight) -> f64 {
        self.decode_step_s(in_flight.decoding(), in_flight.context_tokens)
    }
}

// === impl Work ===

impl Work {
    /// Until the first token of a request that is sent to an endpoint with these requests in flight, and of whose
    /// prompt so many tokens and pairs are to be computed: the prompts that wait there, and its own. Nothing is loaded.
    pub(crate) fn until_first_token(in_flight: &InFlight, uncached_tokens: u32, uncached_pairs: u64) -> Self {
        let tokens = in_flight.prefill_tokens + u64::from(uncached_tokens);
        let chunks = chunks(tokens, 1);
        Self {
            tokens,
            pairs: in_flight.prefill_pairs + uncached_pairs,
            loaded_tokens: 0,
            steps: chunks,
            chunks,
            sequences: in_flight.decoding(),
            context_tokens: in_flight.context_tokens,
            requests: 1,
            waits: u32::from(in_flight.requests > 0),
        }
    }

    /// Steps, and how many of them compute prompts: at most all of them.
    pub(super) fn steps(&self) -> (f64, f64) {
        let steps = self.steps.max(1.0);
        (steps, self.chunks.clamp(1.0, steps))
    }
}

/// Steps in which so many prompts with so many uncached tokens together are computed, each in a step of its own if it
/// fits into one.
pub(crate) fn chunks(tokens: u64, prompts: u64) -> f64 {
    prompts.max(1 + tokens / STEP_TOKENS) as f64
}

/// `(a⁴ + b⁴)^¼`: the larger one where they differ much.
pub(super) fn fourth_norm(a: f64, b: f64) -> f64 {
    let (a, b) = (a * a, b * b);
    (a * a + b * b).sqrt().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_was_named_has_the_rates_of_its_steps() {
        let timing = TimingModel::preset("qwen3-32b@h100x2").expect("known");
        let rates = Rates::of(&timing);
        let predicted = rates.prefill_s(8192, 8192 * 8193 / 2);
        let exact = timing.prefill_secs(0, 8192, 8192);
        assert!((predicted / exact - 1.0).abs() < 0.05, "{predicted} {exact}");
        let mut step = StepShape::default();
        (0..40).for_each(|_| step.add_decode(3000));
        let (predicted, exact) = (rates.decode_step_s(40, 120_000), timing.step_secs(&step));
        assert!((predicted / exact - 1.0).abs() < 0.05, "{predicted} {exact}");
    }
}
