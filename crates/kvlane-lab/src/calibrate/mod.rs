//! Calibration: measures a live server and fits the engine timing model's constants to it.
//!
//! [`Plan`] defines the measurements: cold prompts of growing length, and decoding at growing batch and context.
//! [`measure`] executes it over HTTP. The result is a [`Timeline`] per request, and [`Probe::observe`] reduces these
//! to a duration and the engine's [`Work`] in it. [`Work::secs`] is the model's duration of the same work, step by
//! step as in a continuous-batching engine, and [`fit`](fn@fit::fit) fits one to the other.
//!
//! A prompt is measured with nothing else in the engine: its time to first token is the request's own cost and the
//! steps of its chunks. Decoding is measured from the moment the last sequence of a batch has its first token until the
//! first one ends: every step in between is one token of each.

pub mod fit;
pub mod measure;
pub mod report;
pub mod server;

use kvlane_core::timing::{StepShape, TimingModel};
use serde::Serialize;

/// Lengths of the cold prompts, in tokens. The short ones show the limit where reading the weights dominates.
const PREFILL_TOKENS: [u32; 10] = [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768];
const PREFILL_TOKENS_QUICK: [u32; 5] = [64, 256, 1024, 4096, 8192];

/// Lengths that are measured but not fitted: between the fitted ones.
const HELD_OUT_TOKENS: [u32; 3] = [768, 3000, 6000];

/// Sequences that decode together.
const DECODE_SEQS: [u32; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];
const DECODE_SEQS_QUICK: [u32; 4] = [1, 8, 32, 128];

/// Sequences that decode together with long contexts, up to the cache's capacity.
const DECODE_SEQS_LONG: [u32; 4] = [1, 4, 16, 64];
const DECODE_SEQS_LONG_QUICK: [u32; 2] = [1, 8];

/// Prompt length of a decode probe with short contexts.
const DECODE_SHORT_TOKENS: u32 = 32;

/// Prompt length of a decode probe with long contexts, unless the server's maximum is smaller.
const DECODE_LONG_TOKENS: u32 = 4096;

/// Target number of decode steps with all sequences decoding.
const WINDOW_STEPS: u32 = 64;

/// Decode steps that pass while requests reach a busy server.
const ARRIVAL_STEPS: u32 = 32;

/// Minimum decode steps of a valid window.
const WINDOW_STEPS_MIN: u32 = 16;

/// Arrivals closer together than this count as one.
const SAME_MOMENT_SECS: f64 = 2e-4;

/// Maximum share of a window's tokens that may arrive at once; more indicates a pause of the server or client.
const BURST_SHARE_MAX: f64 = 0.25;

/// Maximum share of the KV cache that a probe fills, so that nothing is preempted.
const CAPACITY_SHARE_MAX: f64 = 0.9;

/// KV cache assumed if a server does not report its size.
const CAPACITY_TOKENS_ASSUMED: u64 = 32_768;

/// Context length assumed if a server does not report it.
const MODEL_LEN_ASSUMED: u32 = 8192;

/// Maximum cached share of a cold prompt.
const CACHED_SHARE_MAX: f64 = 0.02;

/// Sizes reported by a server; `None` if not reported.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Limits {
    /// Maximum tokens of prompt and answer together.
    pub max_model_len: Option<u32>,
    /// Tokens in its KV cache.
    pub kv_capacity_tokens: Option<u64>,
    /// Tokens in a KV block.
    pub block_tokens: Option<u32>,
    /// Maximum sequences in a step.
    pub max_num_seqs: Option<u32>,
    /// Maximum tokens in a step, which is the longest chunk of a prompt.
    pub max_num_batched_tokens: Option<u32>,
}

/// One measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Probe {
    /// A cold prompt on an idle engine: its time to first token.
    Prefill {
        /// Its length.
        prompt_tokens: u32,
    },
    /// Cold prompts at once, then decoding: the time of a step in which all decode.
    Decode {
        /// Number of sequences.
        seqs: u32,
        /// Length of each prompt.
        prompt_tokens: u32,
        /// Length of each answer.
        output_tokens: u32,
    },
}

/// A probe and the use of its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Planned {
    /// The probe.
    pub probe: Probe,
    /// Measured to check the fit's prediction, not fitted.
    pub held_out: bool,
}

/// The measurements, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Each is measured once in every round, in this order: a disturbance then affects one repeat of many probes and
    /// not many repeats of one, and medians ignore it.
    pub probes: Vec<Planned>,
    /// Number of rounds.
    pub repeats: u32,
}

/// Limits of a plan besides the server's own.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanOptions {
    /// Longest prompt; by default 32,768.
    pub prompt_tokens_max: Option<u32>,
    /// Fewer probes and rounds.
    pub quick: bool,
    /// Rounds; by default 5, or 3 if quick.
    pub repeats: Option<u32>,
}

/// Arrival times of the tokens of one request, on a clock shared by all requests of a probe.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// Time of sending, in seconds.
    pub sent_s: f64,
    /// Its prompt's length as the engine counted it.
    pub prompt_tokens: u32,
    /// Prompt tokens from the engine's cache, if reported.
    pub cached_tokens: Option<u32>,
    /// Time in seconds and output tokens so far, at every arrival.
    pub tokens: Vec<(f64, u32)>,
}

/// The engine's work during a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// It computed a prompt and its first token.
    Prefill {
        /// The prompt's length.
        prompt_tokens: u32,
    },
    /// It gave each of some sequences one token.
    Decode {
        /// Number of sequences.
        seqs: u32,
        /// Sum of their contexts, the mean over the steps measured.
        context_tokens: u64,
    },
}

/// The round of a measurement that is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Pick {
    /// The median, the lower of two: typical behaviour.
    #[default]
    Median,
    /// The fastest: closest to an undisturbed server on a shared machine.
    Fastest,
}

/// One measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// The probe.
    #[serde(flatten)]
    pub planned: Planned,
    /// The work in the used round.
    pub work: Work,
    /// Its duration, in seconds.
    pub secs: f64,
    /// All rounds, ascending.
    pub samples_s: Vec<f64>,
}

/// Why a round gave no figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// A request yielded no token.
    #[error("a request returned no token")]
    NoTokens,
    /// Part of a prompt was cached.
    #[error(
        "{0} prompt tokens came from the cache; the server must not have cached the prompts: use another --seed"
    )]
    NotCold(u32),
    /// The first sequence ended before the last one decoded.
    #[error(
        "all sequences were in one decode batch for only {0} steps: the server's batch limit is lower, or it served \
         other requests"
    )]
    NeverTogether(u32),
    /// Tokens were delayed and arrived at once.
    #[error("{0} tokens of one sequence arrived at once: the server or this client was too slow")]
    Burst(u32),
}

// === impl Plan ===

impl Plan {
    /// The measurements that separate a server's constants, within its limits.
    pub fn new(limits: &Limits, options: &PlanOptions) -> Self {
        let capacity = limits.kv_capacity_tokens.unwrap_or(CAPACITY_TOKENS_ASSUMED);
        let fitting = (capacity as f64 * CAPACITY_SHARE_MAX) as u64;
        let model_len = limits.max_model_len.unwrap_or(MODEL_LEN_ASSUMED);
        let prompt_max = options.prompt_tokens_max.unwrap_or(PREFILL_TOKENS[PREFILL_TOKENS.len() - 1]);
        let longest =
            prompt_max.min(model_len.saturating_sub(1)).min(u32::try_from(fitting).unwrap_or(u32::MAX));
        let steps: &[u32] = if options.quick { &PREFILL_TOKENS_QUICK } else { &PREFILL_TOKENS };
        let mut lengths: Vec<u32> = steps.iter().copied().filter(|tokens| *tokens <= longest).collect();
        // The quadratic term shows at the server's maximum.
        if lengths.last().is_some_and(|last| !options.quick && u64::from(longest) * 4 > u64::from(*last) * 5)
        {
            lengths.push(longest);
        }
        let prefill = |prompt_tokens, held_out| Planned { probe: Probe::Prefill { prompt_tokens }, held_out };
        let mut probes: Vec<Planned> = lengths.into_iter().map(|tokens| prefill(tokens, false)).collect();
        probes.extend(
            HELD_OUT_TOKENS.into_iter().filter(|t| *t <= longest).map(|tokens| prefill(tokens, true)),
        );

        let chunk = limits.chunk_tokens();
        let seqs_max = limits.max_num_seqs.unwrap_or(u32::MAX);
        let mut decode = |all: &[u32], prompt_tokens: u32| {
            for seqs in all.iter().copied().filter(|seqs| *seqs <= seqs_max) {
                let output_tokens = output_tokens(seqs, prompt_tokens, chunk);
                let context = prompt_tokens.saturating_add(output_tokens);
                if context <= model_len && u64::from(context) * u64::from(seqs) <= fitting {
                    let probe = Probe::Decode { seqs, prompt_tokens, output_tokens };
                    probes.push(Planned { probe, held_out: false });
                }
            }
        };
        let (short, long): (&[u32], &[u32]) = match options.quick {
            true => (&DECODE_SEQS_QUICK, &DECODE_SEQS_LONG_QUICK),
            false => (&DECODE_SEQS, &DECODE_SEQS_LONG),
        };
        decode(short, DECODE_SHORT_TOKENS);
        decode(long, DECODE_LONG_TOKENS.min(longest / 2));
        Self { probes, repeats: options.repeats.unwrap_or(if options.quick { 3 } else { 5 }).max(1) }
    }
}

/// Tokens that each sequence of a decode probe must yield so that all decode together for [`WINDOW_STEPS`]: the first
/// yields some while the others' prompts are computed, and some more while their requests arrive.
fn output_tokens(seqs: u32, prompt_tokens: u32, chunk_tokens: u32) -> u32 {
    let prompts = u64::from(seqs) * u64::from(prompt_tokens);
    let room = chunk_tokens.saturating_sub(seqs).max(chunk_tokens / 4).max(1);
    let prefill_steps = u32::try_from(prompts / u64::from(room)).unwrap_or(u32::MAX);
    prefill_steps.saturating_add(seqs).saturating_add(ARRIVAL_STEPS + WINDOW_STEPS)
}

// === impl Limits ===

impl Limits {
    /// Longest chunk of a prompt in one step. Where it is not known: vLLM's default for its API server on GPUs below
    /// 70 GiB, on A100 and on CPU (`vllm/engine/arg_utils.py`, `get_batch_defaults`).
    pub fn chunk_tokens(&self) -> u32 {
        self.max_num_batched_tokens.unwrap_or(2048).max(1)
    }
}

// === impl Probe ===

impl Probe {
    /// `prefill 8192`, `decode 32 x 4096`.
    pub fn name(&self) -> String {
        match *self {
            Self::Prefill { prompt_tokens } => format!("prefill {prompt_tokens}"),
            Self::Decode { seqs, prompt_tokens, .. } => format!("decode {seqs} x {prompt_tokens}"),
        }
    }

    /// Requests, prompt tokens and output tokens of each.
    pub fn requests(&self) -> (u32, u32, u32) {
        match *self {
            Self::Prefill { prompt_tokens } => (1, prompt_tokens, 1),
            Self::Decode { seqs, prompt_tokens, output_tokens } => (seqs, prompt_tokens, output_tokens),
        }
    }

    /// The result of the requests' timelines: the work, and its duration in seconds.
    ///
    /// # Errors
    ///
    /// Why there is no result.
    pub fn observe(&self, timelines: &[Timeline]) -> Result<(Work, f64), Unusable> {
        for line in timelines {
            let cached = line.cached_tokens.unwrap_or(0);
            if f64::from(cached) > f64::from(line.prompt_tokens) * CACHED_SHARE_MAX {
                return Err(Unusable::NotCold(cached));
            }
        }
        match self {
            Self::Prefill { .. } => {
                let line = timelines.first().ok_or(Unusable::NoTokens)?;
                let (at, _) = *line.tokens.first().ok_or(Unusable::NoTokens)?;
                Ok((Work::Prefill { prompt_tokens: line.prompt_tokens }, at - line.sent_s))
            }
            Self::Decode { .. } => decoding(timelines),
        }
    }
}

/// The decode step from the last first token to the first last one.
fn decoding(timelines: &[Timeline]) -> Result<(Work, f64), Unusable> {
    let time = |arrival: Option<&(f64, u32)>| arrival.map(|(at, _)| *at).ok_or(Unusable::NoTokens);
    let (mut begin, mut end) = (f64::NEG_INFINITY, f64::INFINITY);
    for line in timelines {
        begin = begin.max(time(line.tokens.first())?);
        end = end.min(time(line.tokens.last())?);
    }
    let (mut steps_secs, mut context_tokens) = (Vec::new(), 0.0);
    for line in timelines {
        let moments = moments(line.tokens.iter().filter(|(at, _)| (begin..=end).contains(at)));
        let (Some(&(_, from)), Some(&(_, to))) = (moments.first(), moments.last()) else {
            return Err(Unusable::NeverTogether(0));
        };
        if to - from < WINDOW_STEPS_MIN {
            return Err(Unusable::NeverTogether(to - from));
        }
        let at_once = moments.windows(2).map(|pair| pair[1].1 - pair[0].1).max().unwrap_or(0);
        if f64::from(at_once) > f64::from(to - from) * BURST_SHARE_MAX {
            return Err(Unusable::Burst(at_once));
        }
        // The median over stretches of half the window: a pause, and the tokens that arrive at once after it, affect
        // few of them, and a timer's granularity is small compared with such a stretch.
        let half = moments.len() / 2;
        let stretches = moments.iter().zip(&moments[half..]);
        let mut secs: Vec<f64> =
            stretches.map(|((t0, n0), (t1, n1))| (t1 - t0) / f64::from(n1 - n0)).collect();
        steps_secs.push(median(&mut secs));
        // Token n follows the prompt and n - 1 others, the last of which the step itself computes.
        context_tokens += f64::from(line.prompt_tokens) + (f64::from(from) + f64::from(to) - 3.0) / 2.0;
    }
    let seqs = timelines.len() as u32;
    Ok((Work::Decode { seqs, context_tokens: context_tokens.round() as u64 }, median(&mut steps_secs)))
}

/// Arrivals, with simultaneous ones merged: delayed tokens arrive in several pieces.
fn moments<'a>(arrivals: impl Iterator<Item = &'a (f64, u32)>) -> Vec<(f64, u32)> {
    let mut moments: Vec<(f64, u32)> = Vec::new();
    for &(at, tokens) in arrivals {
        match moments.last_mut() {
            Some((before, so_far)) if at - *before < SAME_MOMENT_SECS => *so_far = tokens,
            _ => moments.push((at, tokens)),
        }
    }
    moments
}

/// The median, the lower of two; 0 for none. Leaves the values ascending.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

// === impl Point ===

impl Point {
    /// The figure of some rounds; `None` without any.
    pub fn new(planned: Planned, mut rounds: Vec<(Work, f64)>, pick: Pick) -> Option<Self> {
        rounds.sort_by(|(_, a), (_, b)| a.total_cmp(b));
        let at = match pick {
            Pick::Median => rounds.len().saturating_sub(1) / 2,
            Pick::Fastest => 0,
        };
        let (work, secs) = *rounds.get(at)?;
        Some(Self { planned, work, secs, samples_s: rounds.into_iter().map(|(_, secs)| secs).collect() })
    }

    /// Half the distance between the fastest and the slowest round, as a share of the used one.
    pub fn spread(&self) -> f64 {
        match self.samples_s.as_slice() {
            [least, .., most] => (most - least) / 2.0 / self.secs,
            _ => 0.0,
        }
    }
}

// === impl Work ===

impl Work {
    /// The model's duration in seconds, if a step has at most `chunk_tokens` tokens.
    pub fn secs(&self, timing: &TimingModel, chunk_tokens: u32) -> f64 {
        match *self {
            Self::Prefill { prompt_tokens } => {
                timing.host.request_secs + timing.prefill_secs(0, prompt_tokens, chunk_tokens)
            }
            Self::Decode { seqs, context_tokens } => timing.step_secs(&StepShape {
                decode_seqs: seqs,
                decode_context_tokens: context_tokens,
                ..StepShape::default()
            }),
        }
    }

    /// `prefill 8192`, `decode 32 x 2048`: the latter's contexts are the mean over the sequences.
    pub fn name(&self) -> String {
        match *self {
            Self::Prefill { prompt_tokens } => format!("prefill {prompt_tokens}"),
            Self::Decode { seqs, context_tokens } => {
                format!("decode {seqs} x {}", context_tokens / u64::from(seqs.max(1)))
            }
        }
    }
}
