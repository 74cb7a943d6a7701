//! Learns from a pool's answers: endpoint speed and answer length.

use crate::cache_accuracy::Prediction;
use crate::endpoint::Endpoint;
use crate::forecast::{Claim, Forecast, Kind, Usual};
use crate::load::{InFlight, Load};
use crate::policy::Candidate;
use crate::rates::{FirstTokenWork, Pace, Rates, STEP_TOKENS};
use crate::request::{SchedulingRequest, SessionKey};
use crate::time::Nanos;
use crate::timing::TimingModel;

/// Output tokens timed together: timing single tokens would measure how the network groups them.
const TIMED_TOKENS: u32 = 8;

/// Fewest trailing output tokens that are timed, for the same reason.
const LAST_TOKENS_MIN: u32 = 2;

/// KV cache usage from which a first token may have waited for free blocks; such a time says nothing about speed.
const FULL_RATIO: f32 = 0.85;

/// What one pool has learned.
#[derive(Debug, Default)]
pub(super) struct Learning {
    /// Rates assumed before any measurement.
    base: Rates,
    /// Measured deviation of all endpoints together from `base`.
    pace: Pace,
    pub(super) forecast: Forecast,
}

/// Measurements of a request in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timed {
    /// When it was placed.
    placed: Nanos,
    /// Work to do before its first token; `None` if the request may have waited for free blocks.
    work: Option<FirstTokenWork>,
    /// Category of its answer length.
    kind: Kind,
    session: Option<SessionKey>,
    /// The answer length that its client claims.
    claim: Option<Claim>,
    /// Output tokens so far.
    pub(super) output_tokens: u32,
    /// When tokens were last timed, and how many have arrived since.
    since: Nanos,
    untimed: u32,
    /// What the endpoint had prefilled by then: tokens and pairs.
    prefilled: (u64, u64),
}

// === impl Timed ===

impl Timed {
    /// For a request restored from a checkpoint: its first token is not timed.
    pub(super) fn resumed(
        now: Nanos,
        request: &SchedulingRequest,
        output_tokens: u32,
        endpoint: Option<&Endpoint>,
    ) -> Self {
        let prefilled =
            endpoint.map(|endpoint| (endpoint.pace.prefilled_tokens, endpoint.pace.prefilled_pairs));
        Self {
            placed: now,
            work: None,
            kind: Kind::of(request),
            session: request.session,
            claim: None,
            output_tokens,
            since: now,
            untimed: 0,
            prefilled: prefilled.unwrap_or_default(),
        }
    }

    /// Its first token waits for more than its prompt, which is computed elsewhere or needs an adapter: it is not timed.
    pub(super) fn is_delayed(&mut self) {
        self.work = None;
    }

    pub(super) fn placed(&self) -> Nanos {
        self.placed
    }

    pub(super) fn session(&self) -> Option<SessionKey> {
        self.session
    }
}

// === impl Learning ===

impl Learning {
    /// Starts from a timing model, or from default rates.
    pub(super) fn new(timing: Option<&TimingModel>) -> Self {
        Self { base: timing.map(Rates::of).unwrap_or_default(), ..Self::default() }
    }

    /// Whether any answer has been measured for prefill speed.
    pub(super) fn is_learned(&self) -> bool {
        self.pace.is_learned()
    }

    /// Measured deviation of all endpoints together.
    pub(super) fn pace(&self) -> &Pace {
        &self.pace
    }

    pub(super) fn pace_mut(&mut self) -> &mut Pace {
        &mut self.pace
    }

    /// Restores what was learned before.
    pub(super) fn resume(&mut self, pace: Pace, usual: Usual) {
        self.pace = pace;
        self.forecast.resume(usual);
    }

    /// Replaces the timing model and resets the measured deviation. Answer lengths stay.
    pub(super) fn set_base(&mut self, timing: Option<&TimingModel>) {
        self.base = timing.map(Rates::of).unwrap_or_default();
        self.pace = Pace::default();
    }

    /// Rates assumed before any measurement.
    pub(super) fn base(&self) -> &Rates {
        &self.base
    }

    /// The row of an endpoint with this prediction, which is at most the prompt.
    pub(super) fn row(&self, endpoint: &Endpoint, prediction: Prediction) -> Candidate {
        Candidate {
            endpoint: endpoint.id,
            overlap_tokens: endpoint.cache_accuracy.counting(prediction),
            knowledge: endpoint.cache_accuracy.knowledge(),
            prediction,
            part: endpoint.part,
            load: endpoint.load_of_all(),
            rates: self.rates(endpoint),
        }
    }

    /// Estimated speed of an endpoint.
    pub(super) fn rates(&self, endpoint: &Endpoint) -> Rates {
        endpoint.pace.rates(&self.pace, &self.base)
    }

    /// Starts timing a request that is about to be added to `load`.
    pub(super) fn placed(
        &self,
        now: Nanos,
        request: &SchedulingRequest,
        load: &Load,
        uncached_tokens: u32,
        uncached_pairs: u64,
    ) -> Timed {
        let InFlight { prefill_tokens, prefill_pairs, context_tokens, .. } = load.in_flight;
        let tokens = prefill_tokens + u64::from(uncached_tokens);
        // On average, half a step passes before the request's first step begins.
        let steps = 1.5 + (tokens / STEP_TOKENS) as f64;
        let work = FirstTokenWork {
            tokens,
            prefill_s: self.base.prefill_s(tokens, prefill_pairs + uncached_pairs),
            steps_s: steps * self.base.decode_step_s(load.in_flight.decoding(), context_tokens),
        };
        let full = load.reported.is_some_and(|(reported, _)| {
            reported.kv_usage_ratio > FULL_RATIO
                || reported.kv_capacity_tokens.is_some_and(|capacity| {
                    let wanted = f64::from(reported.kv_usage_ratio) * capacity as f64 + tokens as f64;
                    wanted > f64::from(FULL_RATIO) * capacity as f64
                })
        });
        Timed {
            placed: now,
            work: (!full).then_some(work),
            kind: Kind::of(request),
            session: request.session,
            claim: self.forecast.claim(request),
            output_tokens: 0,
            since: now,
            untimed: 0,
            prefilled: (0, 0),
        }
    }

    /// A request's first token arrived after prefilling this many tokens and pairs.
    pub(super) fn first_token(
        &mut self,
        now: Nanos,
        timed: &mut Timed,
        endpoint: Option<&mut Endpoint>,
        tokens: u64,
        pairs: u64,
    ) {
        timed.output_tokens = 1;
        timed.since = now;
        let Some(endpoint) = endpoint else { return };
        let pace = &mut endpoint.pace;
        (pace.prefilled_tokens, pace.prefilled_pairs) =
            (pace.prefilled_tokens + tokens, pace.prefilled_pairs + pairs);
        timed.prefilled = (pace.prefilled_tokens, pace.prefilled_pairs);
        if let Some(work) = timed.work {
            pace.first_token(&mut self.pace, now - timed.placed, work);
        }
    }

    /// More output tokens arrived.
    pub(super) fn tokens(
        &mut self,
        now: Nanos,
        timed: &mut Timed,
        endpoint: Option<&mut Endpoint>,
        count: u32,
    ) {
        timed.output_tokens = timed.output_tokens.saturating_add(count);
        timed.untimed = timed.untimed.saturating_add(count);
        if timed.untimed >= TIMED_TOKENS {
            self.time(now, timed, endpoint);
        }
    }

    /// The last token arrived: times the remaining tokens, so that short answers are measured, too.
    pub(super) fn last_token(&mut self, now: Nanos, timed: &mut Timed, endpoint: Option<&mut Endpoint>) {
        if timed.untimed >= LAST_TOKENS_MIN {
            self.time(now, timed, endpoint);
        }
    }

    fn time(&mut self, now: Nanos, timed: &mut Timed, endpoint: Option<&mut Endpoint>) {
        let Some(endpoint) = endpoint else { return };
        let in_flight = endpoint.in_flight();
        let pace = &mut endpoint.pace;
        let (tokens, pairs) = (pace.prefilled_tokens, pace.prefilled_pairs);
        let prefill_s = self.base.prefill_s(tokens - timed.prefilled.0, pairs - timed.prefilled.1);
        let step_s = self.base.decode_step_s(in_flight.decoding(), in_flight.context_tokens);
        pace.tokens(&mut self.pace, now - timed.since, timed.untimed, step_s, prefill_s);
        (timed.since, timed.untimed, timed.prefilled) = (now, 0, (tokens, pairs));
    }

    /// A request is over. One without any output is not counted.
    pub(super) fn over(&mut self, timed: &Timed) {
        if timed.output_tokens > 0 {
            self.forecast.answered(timed.kind, timed.session, timed.output_tokens);
            if let Some(claim) = &timed.claim {
                self.forecast.checked(claim, timed.output_tokens);
            }
        }
    }
}
