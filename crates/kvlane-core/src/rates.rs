//! Endpoint speed: a linear model of a step's time, and its factors learned per endpoint.
//!
//! [`Rates`] start as those of the configured machine, or of typical hardware. Each answer then corrects two factors of
//! its endpoint, one for prefill and one for decoding: [`Pace`]. What is learned about one endpoint also applies to
//! endpoints without own measurements. So mixed GPUs, slow nodes and throttled nodes get their own rates, and an
//! unconfigured machine is known after a few dozen answers.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::evidence::Evidence;
use crate::load::InFlight;
use crate::time::Nanos;
use crate::timing::{StepShape, TimingModel};

/// Step time of an engine, in seconds. A step with both prefill and decoding takes the sum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// Per uncached prompt token.
    pub prefill_token_s: f64,
    /// Per query-key pair of those tokens.
    pub prefill_pair_s: f64,
    /// Per step: reading the weights, launching kernels.
    pub step_s: f64,
    /// Per decoding sequence.
    pub sequence_s: f64,
    /// Per token of their contexts.
    pub context_token_s: f64,
}

/// Most prompt tokens per step, to estimate how many steps a prompt takes (vLLM's `max_num_batched_tokens` of its
/// server on large GPUs).
pub(crate) const STEP_TOKENS: u64 = 8192;

/// Number of first tokens from which a pace counts as learned: by then it can have moved up to thirtyfold.
const LEARNED_SAMPLES: u32 = 8;

/// Two factors on an endpoint's [`Rates`], learned from its answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Pace {
    prefill: Factor,
    decode: Factor,
    /// Total prompt tokens it has prefilled, and their query-key pairs.
    pub(crate) prefilled_tokens: u64,
    pub(crate) prefilled_pairs: u64,
}

/// Tracks the median of its samples. An outlier, from a full engine or a network stall, moves it no more than any other
/// sample.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Factor {
    value: f64,
    /// All samples so far; beyond [`SAMPLES_MAX`] more of them make it no surer.
    samples: u32,
    /// What other routers have learned.
    #[serde(default, skip_serializing_if = "Evidence::is_none")]
    heard: Evidence,
}

/// A factor of an endpoint, or of all together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Prefill,
    Decode,
}

/// Most samples that a factor counts as.
pub(crate) const SAMPLES_MAX: u32 = 200;

/// Largest factor; its inverse is the smallest.
const FACTOR_MAX: f64 = 50.0;

/// Ratio within which an endpoint uses the pool's factor: otherwise requests would follow measurement noise, and
/// prompts would be recomputed without gain.
const ALIKE: f64 = 1.25;

/// Fewest prompt tokens from which a time to first token measures prefill rather than step overhead.
const PREFILL_TOKENS_MIN: u64 = 1024;

/// Largest share of prefill in an interval from which decoding is measured.
const PREFILL_SHARE_MAX: f64 = 0.25;

/// Prompt length, in tokens, for which an endpoint's prefill rate is shown: the longer a prompt, the longer each token takes.
const SHOWN_TOKENS: u64 = 4096;

// === impl Rates ===

impl Default for Rates {
    /// About an 8-billion-parameter model on one H100 (Llama-3.1-8B by [`crate::timing`]). Machines differ in scale
    /// more than in ratios: the ratio of step time to token time is that of a machine's arithmetic to its memory
    /// bandwidth, whatever the model's size.
    fn default() -> Self {
        Self {
            prefill_token_s: 25e-6,
            prefill_pair_s: 1.0e-9,
            step_s: 6.5e-3,
            sequence_s: 20e-6,
            context_token_s: 45e-9,
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
        Self {
            prefill_token_s: (near_s - prefill_pair_s * near_pairs) / 4096.0,
            prefill_pair_s,
            step_s,
            sequence_s: (decode(65, 0) - step_s) / 64.0,
            context_token_s: (decode(32, 8192) - decode(32, 0)) / (32.0 * 8192.0),
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

// === impl Factor ===

impl Default for Factor {
    fn default() -> Self {
        Self { value: 1.0, samples: 0, heard: Evidence::default() }
    }
}

impl Factor {
    pub(crate) fn see(&mut self, sample: f64) {
        if !(sample > 0.0 && sample.is_finite()) {
            return;
        }
        let sample = sample.clamp(1.0 / FACTOR_MAX, FACTOR_MAX);
        let stride = 1.0 + 0.5 / (1.0 + f64::from(self.samples.min(SAMPLES_MAX)) / 8.0) + 0.02;
        self.samples = self.samples.saturating_add(1);
        // Limited to the sample, to avoid oscillation around it.
        self.value = if sample > self.value {
            (self.value * stride).min(sample)
        } else {
            (self.value / stride).max(sample)
        };
    }

    /// The factor; the pool's if there are no samples or the difference is within noise.
    pub(crate) fn or(&self, pool: &Self) -> f64 {
        let alike = pool.alike();
        match self.own() {
            own if own < alike.start || own >= alike.end => self.value(),
            _ => pool.value(),
        }
    }

    /// The factor, to which the samples of this router and those of others contribute by their numbers.
    fn value(&self) -> f64 {
        self.evidence().filled_by(self.heard).mean
    }

    fn evidence(&self) -> Evidence {
        Evidence { mean: self.value, weight: self.samples.min(SAMPLES_MAX).into() }
    }

    /// The factor in single precision, NaN without samples.
    fn own(&self) -> f32 {
        if self.samples == 0 && self.heard.is_none() { f32::NAN } else { self.value() as f32 }
    }

    /// The factors of endpoints that use this one, their pool's.
    fn alike(&self) -> Range<f32> {
        let value = self.value();
        (value / ALIKE) as f32..(value * ALIKE) as f32
    }
}

// === impl Pace ===

impl Pace {
    /// Whether enough answers have been measured for prefill speed.
    pub(crate) fn is_learned(&self) -> bool {
        let Evidence { weight, .. } = self.prefill.evidence().filled_by(self.prefill.heard);
        weight >= f64::from(LEARNED_SAMPLES)
    }

    /// A factor by this router's own samples, and their number.
    pub(crate) fn told(&self, part: Part) -> (f64, u32) {
        let factor = match part {
            Part::Prefill => &self.prefill,
            Part::Decode => &self.decode,
        };
        (factor.value, factor.samples)
    }

    /// What other routers have learned about a factor.
    pub(crate) fn hear(&mut self, part: Part, heard: Evidence) {
        let factor = match part {
            Part::Prefill => &mut self.prefill,
            Part::Decode => &mut self.decode,
        };
        // Rates of 0 have no factor.
        let is_factor = heard.mean.is_finite();
        let mean = heard.mean.clamp(1.0 / FACTOR_MAX, FACTOR_MAX);
        factor.heard = if is_factor { Evidence { mean, ..heard } } else { Evidence::default() };
    }

    /// Its factors for prefill and decoding in single precision, NaN without samples.
    pub(crate) fn own(&self) -> (f32, f32) {
        (self.prefill.own(), self.decode.own())
    }

    /// As the pace of a pool: its factors for prefill and decoding, and the range of those that count as the same.
    pub(crate) fn alike(&self) -> [(f64, Range<f32>); 2] {
        [&self.prefill, &self.decode].map(|factor| (factor.value(), factor.alike()))
    }

    /// The rates of an endpoint with this pace, in a pool with pace `pool` and base rates `rates`.
    pub fn rates(&self, pool: &Self, rates: &Rates) -> Rates {
        let (prefill, decode) = (self.prefill.or(&pool.prefill), self.decode.or(&pool.decode));
        Rates {
            prefill_token_s: rates.prefill_token_s * prefill,
            prefill_pair_s: rates.prefill_pair_s * prefill,
            step_s: rates.step_s * decode,
            sequence_s: rates.sequence_s * decode,
            context_token_s: rates.context_token_s * decode,
        }
    }

    /// A first token arrived `taken` after placement; `work` gives the expected prefill and decoding times by the base
    /// rates.
    pub(crate) fn first_token(&mut self, pool: &mut Self, taken: Nanos, work: FirstTokenWork) {
        if work.tokens < PREFILL_TOKENS_MIN {
            return;
        }
        if self.prefill.samples == 0 {
            self.prefill.value = pool.prefill.value;
        }
        let steps_s = work.steps_s * self.decode.or(&pool.decode);
        let sample = (taken.as_secs_f64() - steps_s) / work.prefill_s;
        self.prefill.see(sample);
        pool.prefill.see(sample);
    }

    /// `count` tokens arrived within `taken`. By the base rates, a decode step takes `step_s`, and the prefill done
    /// meanwhile `prefill_s`.
    pub(crate) fn tokens(&mut self, pool: &mut Self, taken: Nanos, count: u32, step_s: f64, prefill_s: f64) {
        let prefill_s = prefill_s * self.prefill.or(&pool.prefill);
        if prefill_s > PREFILL_SHARE_MAX * taken.as_secs_f64() {
            return;
        }
        if self.decode.samples == 0 {
            self.decode.value = pool.decode.value;
        }
        let sample = (taken.as_secs_f64() - prefill_s) / (f64::from(count) * step_s);
        self.decode.see(sample);
        pool.decode.see(sample);
    }
}

/// The work before a first token, by the base rates.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FirstTokenWork {
    /// Prompt tokens: its own and those queued before it.
    pub(crate) tokens: u64,
    /// Seconds to prefill them.
    pub(crate) prefill_s: f64,
    /// Seconds of decoding in the steps meanwhile.
    pub(crate) steps_s: f64,
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

    #[test]
    fn a_factor_finds_the_median_and_an_outlier_hardly_moves_it() {
        let mut factor = Factor::default();
        for n in 0..200 {
            factor.see([3.8, 4.0, 4.2][n % 3]);
        }
        assert!((3.8..=4.2).contains(&factor.value), "{factor:?}");
        let before = factor.value;
        for sample in [1e9, f64::NAN, -1.0, 0.0, f64::INFINITY] {
            factor.see(sample);
        }
        assert!(factor.value / before < 1.1, "{factor:?}");
    }

    /// Invariant: An endpoint's learned rates begin with its pool's and then follow its own measurements; noise does
    /// not separate machines of one kind.
    ///
    /// Also held by `a_factor_finds_the_median_and_an_outlier_hardly_moves_it`.
    #[test]
    fn an_endpoint_begins_at_the_pace_of_its_pool_and_then_goes_its_own() {
        let (mut pool, mut slow, fresh) = (Pace::default(), Pace::default(), Pace::default());
        let base = Rates::default();
        for _ in 0..100 {
            let work = FirstTokenWork { tokens: 4096, prefill_s: 0.1, steps_s: 0.01 };
            slow.first_token(&mut pool, Nanos::from_millis(420), work);
            slow.tokens(&mut pool, Nanos::from_millis(160), 10, 0.008, 0.0);
        }
        let (slow, fresh) = (slow.rates(&pool, &base), fresh.rates(&pool, &base));
        assert!((slow.prefill_token_s / base.prefill_token_s - 4.0).abs() < 0.3);
        assert!((slow.step_s / base.step_s - 2.0).abs() < 0.1);
        assert_eq!(fresh, slow, "an endpoint without samples uses its pool's pace");
    }
}
