//! Learns from a pool's answers: endpoint speed and answer length.

use crate::cache_accuracy::Prediction;
use crate::endpoint::Endpoint;
use crate::evidence::Evidence;
use crate::forecast::{Claim, Forecast, Kind, Usual};
use crate::load::Load;
use crate::policy::Candidate;
use crate::rates::{self, Fit, Measured, OwnMeasures, Part, Prefilled, Rates, Told, Work};
use crate::request::{SchedulingRequest, SessionKey};
use crate::scheduler::predictions::Predictions;
use crate::time::Nanos;
use crate::timing::TimingModel;

/// Output tokens timed together: timing single tokens would measure how the network groups them.
const TIMED_TOKENS: u32 = 8;

/// Fewest trailing output tokens that are timed, for the same reason.
const LAST_TOKENS_MIN: u32 = 2;

/// How long the times of answers count alone, before those that an engine counts itself do as well.
const OWN_COUNT_FOR: Nanos = Nanos::from_secs(60);

/// KV cache usage from which a first token may have waited for free blocks; such a time says nothing about speed. Nor
/// does one at an engine that has requests waiting.
const FULL_RATIO: f32 = 0.85;

/// What one pool has learned.
#[derive(Debug, Default)]
pub(super) struct Learning {
    /// Rates assumed before any measurement.
    base: Rates,
    /// What all endpoints together have shown of the pool's rates, and the rates that result.
    fit: Fit,
    rates: Rates,
    pub(super) forecast: Forecast,
    predictions: Predictions,
}

/// Measurements of a request in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timed {
    /// When it was placed.
    placed: Nanos,
    /// Work to do before its first token; `None` if the request may have waited for something else.
    work: Option<Work>,
    /// Seconds from its placement in which its first token is expected, even so.
    expected_s: Option<f64>,
    /// Category of its answer length.
    kind: Kind,
    session: Option<SessionKey>,
    /// The answer length that its client claims.
    claim: Option<Claim>,
    /// Output tokens so far.
    pub(super) output_tokens: u32,
    /// When tokens were last timed, and how many have arrived since; `None` until they can be.
    since: Option<Nanos>,
    untimed: u32,
    /// Sequences and context tokens that the endpoint decoded by then, and what it had prefilled.
    load: (u32, u64),
    prefilled: Prefilled,
    /// Prompts that the endpoint had prefilled when the latest token arrived, and whether it was between two of them.
    prompts: u64,
    is_between: bool,
}

// === impl Timed ===

impl Timed {
    /// For a request restored from a checkpoint: its first token is not timed.
    pub(super) fn resumed(now: Nanos, request: &SchedulingRequest, output_tokens: u32) -> Self {
        Self { output_tokens, ..Self::begun(now, request) }
    }

    fn begun(now: Nanos, request: &SchedulingRequest) -> Self {
        Self {
            placed: now,
            work: None,
            expected_s: None,
            kind: Kind::of(request),
            session: request.session,
            claim: None,
            output_tokens: 0,
            since: None,
            untimed: 0,
            load: (0, 0),
            prefilled: Prefilled::default(),
            prompts: 0,
            is_between: false,
        }
    }

    /// Its first token waits for more than prompts: its own is computed elsewhere, or it or others need an adapter. It is
    /// not timed.
    pub(super) fn is_delayed(&mut self) {
        (self.work, self.expected_s) = (None, None);
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
        let base = timing.map(Rates::of).unwrap_or_default();
        Self { base, rates: base, ..Self::default() }
    }

    /// Whether the pool's prefill speed is known well enough to judge an engine by.
    pub(super) fn is_learned(&self) -> bool {
        self.fit.is_learned()
    }

    /// What all endpoints together have shown.
    pub(super) fn fit(&self) -> &Fit {
        &self.fit
    }

    /// What other routers have learned of the pool, as a factor on the base rates.
    pub(super) fn hear(&mut self, part: Part, heard: Evidence) {
        self.fit.hear(part, heard);
        self.rates = self.fit.rates(&self.base);
    }

    /// Restores what was learned before.
    pub(super) fn resume(&mut self, fit: Fit, usual: Usual) {
        self.fit = fit;
        self.rates = self.fit.rates(&self.base);
        self.forecast.resume(usual);
    }

    /// Replaces the timing model and forgets what was measured. Answer lengths stay.
    pub(super) fn set_base(&mut self, timing: Option<&TimingModel>) {
        self.base = timing.map(Rates::of).unwrap_or_default();
        self.fit = Fit::default();
        self.rates = self.base;
    }

    /// Rates assumed before any measurement.
    pub(super) fn base(&self) -> &Rates {
        &self.base
    }

    /// Rates of the pool.
    pub(super) fn pool_rates(&self) -> &Rates {
        &self.rates
    }

    /// The row of an endpoint with this prediction, which is at most the prompt.
    pub(super) fn row(&self, now: Nanos, endpoint: &Endpoint, prediction: Prediction) -> Candidate {
        Candidate {
            endpoint: endpoint.id,
            overlap_tokens: endpoint.cache_accuracy.counting(prediction),
            lower_tokens: endpoint.cache_accuracy.counting_lower(prediction),
            knowledge: endpoint.cache_accuracy.knowledge(),
            prediction,
            part: endpoint.part,
            load: endpoint.load_of_all(),
            computing_s: endpoint.computing_s(now),
            rates: self.rates(endpoint),
        }
    }

    /// Estimated speed of an endpoint.
    pub(super) fn rates(&self, endpoint: &Endpoint) -> Rates {
        endpoint.pace.rates(&self.rates)
    }

    /// Standard errors of an endpoint's rates for prefill and decoding, as shares of the rates.
    pub(super) fn rate_errors(&self, endpoint: &Endpoint) -> [f64; 2] {
        endpoint.pace.errors(&self.fit)
    }

    /// Starts timing a request that is about to be placed on this row, whose endpoint has `prefilled` so much.
    pub(super) fn placed(
        &self,
        now: Nanos,
        request: &SchedulingRequest,
        row: &Candidate,
        prefilled: Prefilled,
    ) -> Timed {
        let work = row.work_until_first_token(request);
        let waits = may_wait(&row.load, request.prompt_tokens.into());
        Timed {
            work: (!waits).then_some(work),
            expected_s: Some(row.rates.seconds_of(&work)),
            claim: self.forecast.claim(request),
            prefilled,
            ..Timed::begun(now, request)
        }
    }

    /// A request's first token arrived, after its prompt was counted as prefilled.
    pub(super) fn first_token(&mut self, now: Nanos, timed: &mut Timed, endpoint: Option<&mut Endpoint>) {
        timed.output_tokens = 1;
        let Some(endpoint) = endpoint else { return };
        timed.prefilled = endpoint.pace.prefilled();
        timed.load = decoding(endpoint);
        (timed.since, timed.prompts, timed.is_between) = (Some(now), timed.prefilled.prompts, true);
        if let Some(work) = timed.work {
            self.observe(endpoint, Measured::FirstToken, now - timed.placed, &work);
        }
    }

    /// A request's first token was seen: checks when it was expected.
    pub(super) fn check(&mut self, now: Nanos, timed: &Timed) {
        if let Some(expected_s) = timed.expected_s {
            self.predictions.check(expected_s, (now - timed.placed).as_secs_f64());
        }
    }

    pub(super) fn predictions(&self) -> Predictions {
        self.predictions
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
        let Some(endpoint) = endpoint else { return };
        // Part of a prompt is no known work: a time begins and ends where no prompt is computed, or one is just done.
        let before = std::mem::replace(&mut timed.prompts, endpoint.pace.prefilled().prompts);
        timed.is_between = endpoint.in_flight().prefill_tokens == 0 || timed.prompts > before;
        if timed.untimed >= TIMED_TOKENS || timed.since.is_none() {
            self.time(now, timed, endpoint);
        }
    }

    /// The last token arrived: times the remaining tokens, so that short answers are measured, too.
    pub(super) fn last_token(&mut self, now: Nanos, timed: &mut Timed, endpoint: Option<&mut Endpoint>) {
        if let Some(endpoint) = endpoint
            && timed.untimed >= LAST_TOKENS_MIN
        {
            self.time(now, timed, endpoint);
        }
    }

    fn time(&mut self, now: Nanos, timed: &mut Timed, endpoint: &mut Endpoint) {
        if !timed.is_between {
            return;
        }
        if let Some(since) = timed.since {
            let work = work_since(timed.prefilled, endpoint);
            let work = Work {
                steps: timed.untimed.into(),
                sequences: work.sequences.midpoint(timed.load.0),
                context_tokens: work.context_tokens.midpoint(timed.load.1),
                ..work
            };
            if endpoint.pace.times(since, now) {
                self.observe(endpoint, Measured::Tokens, now - since, &work);
            }
        }
        timed.load = decoding(endpoint);
        (timed.since, timed.untimed, timed.prefilled) = (Some(now), 0, endpoint.pace.prefilled());
    }

    /// An answer with so many tokens arrived as a whole.
    pub(super) fn whole_answer(
        &mut self,
        now: Nanos,
        timed: &Timed,
        endpoint: Option<&mut Endpoint>,
        output_tokens: u32,
    ) {
        let (Some(before), Some(endpoint)) = (timed.work, endpoint) else { return };
        let since = work_since(timed.prefilled, endpoint);
        let work = Work {
            steps: before.steps + f64::from(output_tokens.saturating_sub(1)),
            // The request itself decodes as well.
            sequences: before.sequences.midpoint(since.sequences) + 1,
            context_tokens: before.context_tokens.midpoint(since.context_tokens),
            loaded_tokens: before.loaded_tokens,
            requests: 1,
            waits: before.waits,
            ..since
        };
        self.observe(endpoint, Measured::WholeAnswer, now - timed.placed, &work);
    }

    /// An endpoint has measured this itself. It counts where none of its answers were timed for [`OWN_COUNT_FOR`].
    pub(super) fn measured(&mut self, now: Nanos, endpoint: Option<&mut Endpoint>, own: OwnMeasures) {
        let Some(endpoint) = endpoint else { return };
        let Some((reported, _)) = endpoint.load.reported else { return };
        let in_flight = endpoint.in_flight();
        let context_tokens = in_flight.context_tokens / u64::from(in_flight.decoding().max(1));
        let prefilled = endpoint.pace.prefilled();
        let told = Told { at: now, own, running: reported.running, context_tokens, prefilled };
        let Some(before) = endpoint.told.replace(told) else { return };
        if endpoint.pace.is_untimed_since(before.at - OWN_COUNT_FOR)
            && let Some((taken_s, work)) = told.since(&before)
        {
            self.observe(endpoint, Measured::Tokens, Nanos::from_secs_f64(taken_s), &work);
        }
    }

    fn observe(&mut self, endpoint: &mut Endpoint, measured: Measured, taken: Nanos, work: &Work) {
        self.fit.observe(&mut endpoint.pace, &self.base, measured, taken.as_secs_f64(), work);
        self.rates = self.fit.rates(&self.base);
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

/// Sequences and context tokens that an endpoint decodes.
fn decoding(endpoint: &Endpoint) -> (u32, u64) {
    let in_flight = endpoint.in_flight();
    (in_flight.decoding(), in_flight.context_tokens)
}

/// What an endpoint has prefilled since it had prefilled so much, and what it decodes now.
fn work_since(before: Prefilled, endpoint: &Endpoint) -> Work {
    let (in_flight, now) = (endpoint.in_flight(), endpoint.pace.prefilled());
    let tokens = now.tokens - before.tokens;
    Work {
        tokens,
        pairs: now.pairs - before.pairs,
        chunks: rates::chunks(tokens, now.prompts - before.prompts),
        sequences: in_flight.decoding(),
        context_tokens: in_flight.context_tokens,
        ..Work::default()
    }
}

/// Whether a prompt with so many tokens may wait there for KV blocks, or for other prompts that do.
fn may_wait(load: &Load, prompt_tokens: u64) -> bool {
    let Some((reported, _)) = load.reported else { return false };
    let used = |capacity: u64| {
        let waiting = (load.in_flight.prefill_tokens + prompt_tokens) as f64;
        let reported = f64::from(reported.kv_usage_ratio) * capacity as f64 + waiting;
        reported.max((load.in_flight.context_tokens + prompt_tokens) as f64)
    };
    reported.waiting > 0
        || reported.kv_usage_ratio > FULL_RATIO
        || reported.kv_capacity_tokens.is_some_and(|all| used(all) > f64::from(FULL_RATIO) * all as f64)
}
