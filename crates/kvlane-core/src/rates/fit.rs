//! Fits the terms of [`Rates`] to measured times, for a pool and for each of its endpoints.
//!
//! A time is measured of some [`Work`]: until a first token, between output tokens, or of a whole answer. It is the sum of
//! the work's terms, each times its rate, and each rate is that of the base times factors:
//!
//! | factors | of |
//! |---|---|
//! | of the pool ([`Fit`]) | a prompt token; a pair beside it; a step; sequences and contexts beside it; a request's way; its wait for steps; a loaded token beside a prompt token |
//! | of an endpoint ([`Pace`]) | its prefill; its decoding |
//!
//! Their logarithms are the states of two filters (Kalman, Journal of Basic Engineering 82 (1960), p. 35; [`Filter`]).
//! So a time of which a tenth is prefill says a little about prefill, and one of nothing else says much: nothing has to
//! be long enough, or free of other work, to count. The pool's filter takes every time as of one machine, the
//! endpoint's those of this endpoint.
//!
//! An endpoint is *like its pool* until there is evidence that it is not: its deviation counts by the posterior
//! probability that it has one (the Bayes factor of two normal distributions; Kass and Raftery, Journal of the American
//! Statistical Association 90 (1995), p. 773). Otherwise requests would follow the noise, and prompts would be computed
//! again without gain.

use libm::{exp, log};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};

use super::filter::{Expected, Filter, KINDS, Observed};
use super::model::{Part, Rates, Work, fourth_norm};
use crate::evidence::Evidence;
use crate::time::Nanos;

/// Factors of a pool.
const TERMS: usize = 7;
/// Those that an endpoint has of its own ([`Part::ALL`]): of a prompt token; of a step.
const TOKEN: usize = 0;
const STEP: usize = 1;
const PARTS: [usize; 2] = [TOKEN, STEP];
/// Of a pair, beside a token; of a sequence and a token of context, beside a step; of a request's way; of the steps that it waits.
const PAIR: usize = 2;
const LOAD: usize = 3;
const WAY: usize = 4;
const WAIT: usize = 5;
/// Of a token that is loaded from below the GPU, beside a prompt token.
const LOADED: usize = 6;

/// Standard deviations of logarithms of factors before any measurement: of the machine as a whole, of its prefill and
/// its decoding beside that, of the ratios within each, of a request's way and wait. A typical machine is assumed where none is
/// named, and engines on a CPU are a hundred times slower.
const MACHINE: f64 = 1.3;
const PART: f64 = 0.7;
const PAIR_RATIO: f64 = 0.5;
const LOAD_RATIO: f64 = 0.5;
const REQUEST_WAY: f64 = 0.5;
const WAIT_STEPS: f64 = 0.5;
/// Of a loaded token beside a prompt token. Wide: from 450 GB/s between the chips of a GH200 down to 3 GB/s of a disk, and a
/// model with compressed KV blocks has a quarter of the bytes for the same arithmetic.
const LOADED_RATIO: f64 = 1.2;
/// Of what an endpoint that is not like its pool deviates from it.
const OWN: f64 = 0.5;
/// And the most that is believed.
const OWN_MAX: f64 = 2.0;

/// Odds that an endpoint is like its pool.
const ALIKE_ODDS: f64 = 4.0;

/// Noise of each kind of time before any measurement, as a share of the time.
const NOISE: [f64; KINDS] = [0.3, 0.15, 0.3];
/// Part of a step that a time is off by: when it began within a step is not known, and the network groups tokens.
const STEP_NOISE: f64 = 0.3;
/// Part of the prefill beside output tokens that a time of those is off by: some of it was done before or after.
const PREFILL_NOISE: f64 = 0.3;

/// What arrives sooner was not computed.
const TAKEN_MIN_S: f64 = 1e-4;

/// Largest factor that is taken over from others; its inverse is the smallest.
const FACTOR_MAX: f64 = 1000.0;

/// Most observations that a factor counts as beside those of other routers.
pub(crate) const SAMPLES_MAX: u32 = 200;

/// Standard deviation from which on prefill counts as learned, and the observations of other routers that do as well.
const LEARNED: f64 = 0.3;
const LEARNED_SAMPLES: f64 = 8.0;

/// What a time is measured of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Measured {
    /// From a placement to the first token.
    FirstToken,
    /// Between output tokens.
    Tokens,
    /// From a placement to the end of an answer that comes at once.
    WholeAnswer,
}

/// Factors on a pool's base rates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Fit {
    #[serde(deserialize_with = "filter_of_terms")]
    filter: Filter<TERMS>,
    /// Observations of prefill and of decoding: the shares that they have in times.
    observations: [f64; 2],
    /// Factors on the base rates that other routers have learned.
    heard: [Evidence; 2],
}

/// Factors of an endpoint, and what it has prefilled.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pace {
    /// Factors on the base rates, of prefill and of decoding, from the first measurement on.
    filter: Option<Filter<2>>,
    observations: [f64; 2],
    /// Factors beside the pool's, as of the last measurement, and those that other routers have learned.
    own: [f64; 2],
    heard: [Evidence; 2],
    /// The factors beside the pool's that result.
    factors: [f64; 2],
    prefilled: Prefilled,
    /// Until when its steps have been timed.
    #[serde(skip)]
    timed_until: Nanos,
}

/// Prompts that an endpoint has computed, their uncached tokens and the query-key pairs of those.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Prefilled {
    pub(crate) prompts: u64,
    pub(crate) tokens: u64,
    pub(crate) pairs: u64,
}

/// Work by the terms that have a factor.
struct Terms {
    /// Seconds by the base rates: of prompts in a step that computes some; of a step; of a request's way; of loads. Steps of
    /// waits.
    secs: [f64; TERMS],
    /// Steps, and those that compute prompts.
    steps: f64,
    chunks: f64,
}

// === impl Part ===

impl Part {
    const ALL: [Self; 2] = [Self::Prefill, Self::Decode];
}

// === impl Rates ===

impl Rates {
    /// Seconds of some work, by the terms that have a factor.
    fn terms(&self, work: &Work) -> Terms {
        let per_step =
            self.sequence_s * f64::from(work.sequences) + self.context_token_s * work.context_tokens as f64;
        let (steps, chunks) = work.steps();
        let mut secs = [0.0; TERMS];
        secs[TOKEN] = self.prefill_token_s * work.tokens as f64 / chunks;
        secs[PAIR] = self.prefill_pair_s * work.pairs as f64 / chunks;
        secs[STEP] = self.step_s;
        secs[LOAD] = per_step;
        secs[WAY] = self.request_s * f64::from(work.requests);
        secs[WAIT] = self.wait_steps * f64::from(work.waits);
        secs[LOADED] = self.load_token_s * work.loaded_tokens as f64;
        Terms { secs, steps, chunks }
    }
}

// === impl Fit ===

impl Default for Fit {
    fn default() -> Self {
        let (observations, heard) = Default::default();
        Self { filter: Self::unsure(), observations, heard }
    }
}

impl Fit {
    /// What is known before any measurement.
    fn unsure() -> Filter<TERMS> {
        let mut covariance = [[0.0; TERMS]; TERMS];
        let machine = MACHINE * MACHINE;
        for part in [TOKEN, STEP] {
            (covariance[part][TOKEN], covariance[part][STEP]) = (machine, machine);
            covariance[part][part] += PART * PART;
        }
        covariance[PAIR][PAIR] = PAIR_RATIO * PAIR_RATIO;
        covariance[LOAD][LOAD] = LOAD_RATIO * LOAD_RATIO;
        covariance[WAY][WAY] = REQUEST_WAY * REQUEST_WAY;
        covariance[WAIT][WAIT] = WAIT_STEPS * WAIT_STEPS;
        covariance[LOADED][LOADED] = LOADED_RATIO * LOADED_RATIO;
        Filter::new(covariance, NOISE)
    }

    /// The rates by this router's own measurements.
    fn own_rates(&self, base: &Rates) -> Rates {
        let [token, step, pair, load, way, wait, loaded] = *self.filter.logs();
        Rates {
            prefill_token_s: base.prefill_token_s * exp(token),
            prefill_pair_s: base.prefill_pair_s * exp(token + pair),
            load_token_s: base.load_token_s * exp(token + loaded),
            step_s: base.step_s * exp(step),
            sequence_s: base.sequence_s * exp(step + load),
            context_token_s: base.context_token_s * exp(step + load),
            request_s: base.request_s * exp(way),
            wait_steps: base.wait_steps * exp(wait),
        }
    }

    /// The rates of the pool, whose rates before any measurement are `base`.
    pub(crate) fn rates(&self, base: &Rates) -> Rates {
        let own = self.own_rates(base);
        if self.heard.iter().all(Evidence::is_none) {
            return own;
        }
        let correction = |part: Part| {
            let factor = own.seconds(part) / base.seconds(part);
            filled(factor, self.observations[part as usize], self.heard[part as usize]) / factor
        };
        own.times(correction(Part::Prefill), correction(Part::Decode))
    }

    /// Seconds of a part by this router's own measurements, and the number of those.
    pub(crate) fn told(&self, base: &Rates, part: Part) -> (f64, u32) {
        (self.own_rates(base).seconds(part), self.observations[part as usize] as u32)
    }

    /// What other routers have learned, as a factor on the base rates.
    pub(crate) fn hear(&mut self, part: Part, heard: Evidence) {
        self.heard[part as usize] = sane(heard);
    }

    /// Whether prefill speed is known well enough to judge an engine by.
    pub(crate) fn is_learned(&self) -> bool {
        let [heard, _] = self.heard;
        self.filter.variance_of(TOKEN) < LEARNED * LEARNED || heard.weight >= LEARNED_SAMPLES
    }

    /// Some work at an endpoint took so long.
    pub(crate) fn observe(
        &mut self,
        at: &mut Pace,
        base: &Rates,
        measured: Measured,
        taken_s: f64,
        work: &Work,
    ) {
        let terms = base.terms(work);
        if !((TAKEN_MIN_S..f64::INFINITY).contains(&taken_s) && work.steps > 0.0) {
            return;
        }
        let before = expected(&terms, self.filter.logs());
        let observed = Observed {
            kind: measured as usize,
            log: log(taken_s),
            more: noise(&before, measured, work.steps),
            may_wait: measured != Measured::Tokens,
            is_of_many: true,
            own: expected(&terms, &at.logs(&self.filter)).log - before.log,
        };
        let mut own = at.filter_in(&self.filter);
        // What the endpoint takes over from the pool is not sure, either (Schmidt's consider filter).
        let share_of =
            |term: usize| before.shares[term] * before.shares[term] * self.filter.variance_of(term);
        let taken_over = [PAIR, LOAD, WAY, WAIT, LOADED].map(share_of).iter().sum::<f64>();
        self.filter.observe(&observed, &Self::unsure(), |logs| expected(&terms, logs));
        let unsure = Self::unsure().part(PARTS, OWN * OWN);
        let [_, _, pair, load, way, wait, loaded] = *self.filter.logs();
        let observed = Observed { more: observed.more + taken_over, is_of_many: false, own: 0.0, ..observed };
        own.observe(&observed, &unsure, |&[token, step]| {
            let Expected { log, shares } = expected(&terms, &[token, step, pair, load, way, wait, loaded]);
            Expected { log, shares: PARTS.map(|part| shares[part]) }
        });
        at.filter = Some(own);
        for (part, term) in Part::ALL.into_iter().zip(PARTS) {
            self.observations[part as usize] += before.shares[term];
            at.observations[part as usize] += before.shares[term];
            let deviation = (own.logs()[part as usize] - self.filter.logs()[term]).clamp(-OWN_MAX, OWN_MAX);
            // The pool has seen at least as much.
            at.own[part as usize] = exp(believed(deviation, 2.0 * own.variance_of(part as usize)));
        }
        at.settle();
    }
}

// === impl Pace ===

impl Default for Pace {
    fn default() -> Self {
        Self {
            filter: None,
            observations: [0.0; 2],
            own: [1.0; 2],
            heard: Default::default(),
            factors: [1.0; 2],
            prefilled: Prefilled::default(),
            timed_until: Nanos::default(),
        }
    }
}

impl Pace {
    /// The rates of an endpoint with this pace, in a pool with these.
    pub(crate) fn rates(&self, pool: &Rates) -> Rates {
        let [prefill, decode] = self.factors;
        pool.times(prefill, decode)
    }

    /// Its factors for prefill and decoding beside its pool's, in single precision.
    pub(crate) fn factors(&self) -> [f32; 2] {
        self.factors.map(|factor| factor as f32)
    }

    /// Seconds of a part by this router's own measurements, and the number of those.
    pub(crate) fn told(&self, fit: &Fit, base: &Rates, part: Part) -> (f64, u32) {
        let (seconds, _) = fit.told(base, part);
        (seconds * self.own[part as usize], self.observations[part as usize] as u32)
    }

    /// Standard errors of its rates for prefill and decoding, as shares of the rates, in a pool with this fit.
    pub(crate) fn errors(&self, fit: &Fit) -> [f64; 2] {
        let filter = self.filter_in(&fit.filter);
        [0, 1].map(|part| filter.variance_of(part).sqrt())
    }

    /// What it has prefilled so far.
    pub(crate) fn prefilled(&self) -> Prefilled {
        self.prefilled
    }

    /// It has prefilled some more.
    pub(crate) fn has_prefilled(&mut self, more: Prefilled) {
        let Prefilled { prompts, tokens, pairs } = &mut self.prefilled;
        (*prompts, *tokens, *pairs) = (*prompts + more.prompts, *tokens + more.tokens, *pairs + more.pairs);
    }

    /// Whether its steps are timed from here until now for the first time: answers of one batch have the same steps, and
    /// those that were timed once say nothing new.
    pub(crate) fn times(&mut self, since: Nanos, now: Nanos) -> bool {
        let first = since >= self.timed_until;
        if first {
            self.timed_until = now;
        }
        first
    }

    /// Whether none of its answers were timed since then.
    pub(crate) fn is_untimed_since(&self, then: Nanos) -> bool {
        self.timed_until <= then
    }

    /// What other routers have learned, as a factor beside the pool's.
    pub(crate) fn hear(&mut self, part: Part, heard: Evidence) {
        self.heard[part as usize] = sane(heard);
        self.settle();
    }

    /// Its filter, which begins as its pool's.
    fn filter_in(&self, pool: &Filter<TERMS>) -> Filter<2> {
        self.filter.unwrap_or_else(|| pool.part(PARTS, OWN * OWN))
    }

    /// Logarithms of its factors on the base rates by its own measurements, in a pool with this filter.
    fn logs(&self, pool: &Filter<TERMS>) -> [f64; TERMS] {
        let mut logs = *pool.logs();
        for (term, own) in PARTS.into_iter().zip(self.own) {
            logs[term] += log(own);
        }
        logs
    }

    fn settle(&mut self) {
        for part in Part::ALL {
            let observations = self.observations[part as usize];
            self.factors[part as usize] =
                filled(self.own[part as usize], observations, self.heard[part as usize]);
        }
    }
}

/// What there is reason to believe of a deviation that was measured with this variance.
fn believed(deviation: f64, variance: f64) -> f64 {
    let wide = variance + OWN * OWN;
    let square = deviation * deviation;
    let alike = ALIKE_ODDS * (wide / variance).sqrt() * exp(-0.5 * square * (1.0 / variance - 1.0 / wide));
    deviation * OWN * OWN / wide / (1.0 + alike)
}

/// The time of terms with these factors, and its derivatives by their logarithms.
fn expected(terms: &Terms, [token, step, pair, load, way, wait, loaded]: &[f64; TERMS]) -> Expected<TERMS> {
    let &Terms { mut secs, steps, chunks } = terms;
    let logs = [*token, *step, token + pair, step + load, *way, *wait, token + loaded];
    secs.iter_mut().zip(logs).for_each(|(secs, log)| *secs *= exp(log));
    let [tokens_s, step_s, pairs_s, load_s, way_s, waited, loaded_s] = secs;
    let chunk_s = fourth_norm(tokens_s, step_s);
    let wait_s = waited * (step_s + load_s);
    let all_s =
        chunks * (chunk_s + pairs_s) + (steps - chunks) * step_s + steps * load_s + way_s + wait_s + loaded_s;
    // Derivatives of the second norm by the logarithms of its two terms. Those of the fourth all but vanish for the
    // smaller one, which would never be found to be the larger.
    let hidden = |secs: f64| chunks * chunk_s * secs * secs / (tokens_s * tokens_s + step_s * step_s);
    let shares = [
        hidden(tokens_s) + chunks * pairs_s + loaded_s,
        hidden(step_s) + (steps - chunks) * step_s + steps * load_s + wait_s,
        chunks * pairs_s,
        (steps + waited) * load_s,
        way_s,
        wait_s,
        loaded_s,
    ];
    let shares = shares.map(|secs| secs / all_s);
    Expected { log: log(all_s), shares }
}

/// Reads a filter; one of fewer factors, which an earlier version has written, has the first ones.
fn filter_of_terms<'de, D: Deserializer<'de>>(from: D) -> Result<Filter<TERMS>, D::Error> {
    Filter::read(Vec::deserialize(from)?, &Fit::unsure()).map_err(D::Error::custom)
}

/// Variance of a time of so many steps beside that of its kind.
fn noise(time: &Expected<TERMS>, measured: Measured, steps: f64) -> f64 {
    let [prefill, decode] = PARTS.map(|part| time.shares[part]);
    let step = if steps > 0.0 { STEP_NOISE * decode / steps } else { 0.0 };
    let prefill = if measured == Measured::Tokens { PREFILL_NOISE * prefill } else { 0.0 };
    step * step + prefill * prefill
}

/// A factor of so many observations of this router, which those of others fill up.
fn filled(factor: f64, observations: f64, heard: Evidence) -> f64 {
    Evidence { mean: factor, weight: observations.min(SAMPLES_MAX.into()) }.filled_by(heard).mean
}

/// Heard evidence of a factor; none if it is no factor, as where rates are 0.
fn sane(heard: Evidence) -> Evidence {
    let mean = heard.mean.clamp(1.0 / FACTOR_MAX, FACTOR_MAX);
    if heard.mean.is_finite() { Evidence { mean, ..heard } } else { Evidence::default() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    /// A machine, and times of it that are off by up to a tenth.
    struct Machine {
        rates: Rates,
        rng: Rng,
    }

    impl Machine {
        fn new(rates: Rates, seed: u64) -> Self {
            Self { rates, rng: Rng::new(seed) }
        }

        fn takes(&mut self, work: &Work) -> f64 {
            self.rates.seconds_of(work) * (0.9 + 0.2 * self.rng.unit())
        }
    }

    const BUSY: Work = Work {
        tokens: 0,
        pairs: 0,
        steps: 0.0,
        chunks: 0.0,
        sequences: 12,
        context_tokens: 20_000,
        loaded_tokens: 0,
        requests: 0,
        waits: 0,
    };

    fn prompt(tokens: u64) -> Work {
        Work {
            tokens,
            pairs: tokens * (tokens + 1) / 2,
            steps: 1.0,
            chunks: 1.0,
            requests: 1,
            waits: 1,
            ..BUSY
        }
    }

    fn answer(tokens: u32) -> Work {
        Work { steps: tokens.into(), ..BUSY }
    }

    fn whole(prompt_tokens: u64, output_tokens: u32) -> Work {
        Work { steps: output_tokens.into(), ..prompt(prompt_tokens) }
    }

    /// What is learned of one endpoint of a machine from this traffic, repeated until so many times are measured: its rates,
    /// and the standard errors of those of prefill and decoding.
    fn learned(machine: &mut Machine, traffic: &[(Measured, Work)], times: usize) -> (Rates, [f64; 2]) {
        let (mut fit, mut pace, base) = (Fit::default(), Pace::default(), Rates::default());
        for (measured, work) in traffic.iter().cycle().take(times) {
            let taken_s = machine.takes(work);
            fit.observe(&mut pace, &base, *measured, taken_s, work);
        }
        (pace.rates(&fit.rates(&base)), pace.errors(&fit))
    }

    /// Invariant: The rates of an engine follow from a hundred answers of any kind: streams or not, short answers, short new
    /// suffixes of prompts, prompts that are computed beside answers. What does not follow is said to be unsure.
    ///
    /// Each answer has two times. The expected time of each kind of work is then off by less than a tenth for 99 in 100 machines, and
    /// never by more than a fifth.
    #[test]
    fn rates_follow_from_a_hundred_answers_of_any_traffic() {
        use Measured::{FirstToken, Tokens, WholeAnswer};
        let beside = Work { tokens: 2000, pairs: 2_000_000, ..answer(8) };
        let kinds: [&[(Measured, Work)]; 5] = [
            &[
                (FirstToken, prompt(4000)),
                (Tokens, answer(8)),
                (FirstToken, prompt(900)),
                (Tokens, answer(8)),
            ],
            // Answers too short for more than one time.
            &[(FirstToken, prompt(150)), (Tokens, answer(3)), (FirstToken, prompt(600)), (Tokens, answer(3))],
            // Prompts of which a few dozen tokens are new.
            &[(FirstToken, prompt(60)), (Tokens, answer(8)), (FirstToken, prompt(30)), (Tokens, answer(8))],
            &[(WholeAnswer, whole(2000, 40)), (WholeAnswer, whole(300, 300)), (WholeAnswer, whole(6000, 4))],
            // Other prompts are computed between all tokens.
            &[(FirstToken, prompt(3000)), (Tokens, beside), (Tokens, Work { tokens: 500, ..beside })],
        ];
        let (mut within, mut all, mut off, mut works) = (0, 0, 0, 0);
        for seed in 0..300 {
            let mut rng = Rng::new(seed);
            // From a fifth of the time of the base rates to sixty and thirty times as much.
            let (prefill, decode) = (0.2 * exp(rng.unit() * 5.7), 0.2 * exp(rng.unit() * 5.0));
            let mut machine = Machine { rates: Rates::default().times(prefill, decode), rng };
            for traffic in kinds {
                let (rates, errors) = learned(&mut machine, traffic, 200);
                let of = |rates: &Rates| [rates.prefill_token_s, rates.step_s];
                for ((learned, known), error) in of(&rates).into_iter().zip(of(&machine.rates)).zip(errors) {
                    (within, all) = (within + i32::from(log(learned / known).abs() < 3.0 * error), all + 1);
                }
                for (_, work) in traffic {
                    let error = rates.seconds_of(work) / machine.rates.seconds_of(work) - 1.0;
                    assert!(error.abs() < 0.2, "seed {seed}: {error} of {work:?}");
                    (off, works) = (off + i32::from(error.abs() > 0.1), works + 1);
                }
            }
        }
        assert!(100 * off <= works, "{off} of {works} times are off by more than a tenth");
        assert!(20 * within >= 19 * all, "{within} of {all} rates are within three standard errors");
    }

    /// The time of a loaded token follows from first tokens of prompts of which a part was loaded, on machines and tiers of
    /// any speed; where nothing is loaded it stays a share of the time of a prompt token.
    #[test]
    fn the_speed_of_a_tier_follows_from_first_tokens_that_loaded_something() {
        use Measured::{FirstToken, Tokens};
        let loading = |tokens, loaded_tokens| Work { loaded_tokens, ..prompt(tokens) };
        let traffic = [
            (FirstToken, loading(500, 6000)),
            (Tokens, answer(8)),
            (FirstToken, prompt(3000)),
            (Tokens, answer(8)),
            (FirstToken, loading(900, 2000)),
        ];
        for seed in 0..100 {
            let mut rng = Rng::new(seed);
            let base = Rates::default().times(0.3 * exp(rng.unit() * 3.0), 0.3 * exp(rng.unit() * 3.0));
            // From as fast as a tenth of the prior to a disk that takes three times as long as computing.
            let load_token_s = base.prefill_token_s * 0.02 * exp(rng.unit() * 5.0);
            let mut machine = Machine { rates: Rates { load_token_s, ..base }, rng };
            let (rates, _) = learned(&mut machine, &traffic, 200);
            for (_, work) in &traffic {
                let error = rates.seconds_of(work) / machine.rates.seconds_of(work) - 1.0;
                assert!(error.abs() < 0.15, "seed {seed}: {error} of {work:?}");
            }
            // Where a load is a tenth of the time of a first token or more, the time of a token is known.
            if load_token_s > 0.1 * base.prefill_token_s {
                let error = rates.load_token_s / load_token_s - 1.0;
                assert!(error.abs() < 0.25, "seed {seed}: {error}");
            }
            let (rates, _) = learned(&mut machine, &traffic[1..4], 200);
            let share = rates.load_token_s / rates.prefill_token_s;
            assert!((share - 0.2).abs() < 1e-9, "seed {seed}: nothing was loaded: {share}");
        }
    }

    #[test]
    fn a_fit_of_an_earlier_version_has_its_factors_and_knows_nothing_of_further_ones() {
        let (mut fit, mut pace, base) = (Fit::default(), Pace::default(), Rates::default());
        let mut machine = Machine::new(Rates::default().times(3.0, 2.0), 1);
        for _ in 0..50 {
            let taken_s = machine.takes(&prompt(4000));
            fit.observe(&mut pace, &base, Measured::FirstToken, taken_s, &prompt(4000));
        }
        let mut kept = serde_json::to_value(fit).expect("a fit");
        let read = |kept: &serde_json::Value| serde_json::from_value::<Fit>(kept.clone());
        assert_eq!(read(&kept).expect("the same"), fit);
        // Six factors: without the last row and column, of which nothing was observed.
        let numbers: Vec<f64> = serde_json::from_value(kept["filter"].clone()).expect("numbers");
        let (logs, rest) = numbers.split_at(TERMS);
        let (covariance, kinds) = rest.split_at(TERMS * TERMS);
        let rows = covariance.chunks(TERMS).take(TERMS - 1).flat_map(|row| &row[..TERMS - 1]);
        let before: Vec<f64> = logs[..TERMS - 1].iter().chain(rows).chain(kinds).copied().collect();
        kept["filter"] = serde_json::json!(before);
        assert_eq!(read(&kept).expect("an earlier one"), fit);
        kept["filter"] = serde_json::json!(&before[1..]);
        let error = read(&kept).expect_err("no filter").to_string();
        assert!(error.contains("a filter of 7 factors has 62 numbers"), "{error}");
    }

    #[test]
    fn an_outlier_hardly_moves_a_rate_and_what_is_no_time_does_not() {
        let mut machine = Machine::new(Rates::default().times(4.0, 2.0), 1);
        let (mut fit, mut pace, base) = (Fit::default(), Pace::default(), Rates::default());
        for _ in 0..100 {
            let taken_s = machine.takes(&prompt(4000));
            fit.observe(&mut pace, &base, Measured::FirstToken, taken_s, &prompt(4000));
        }
        let before = (fit, pace);
        for taken_s in [f64::NAN, -1.0, 0.0, f64::INFINITY] {
            fit.observe(&mut pace, &base, Measured::FirstToken, taken_s, &prompt(4000));
        }
        fit.observe(&mut pace, &base, Measured::FirstToken, 1.0, &Work::default());
        assert_eq!((fit, pace), before);
        fit.observe(&mut pace, &base, Measured::FirstToken, 1e6, &prompt(4000));
        let [rates, rates_before] = [(fit, pace), before].map(|(fit, pace)| pace.rates(&fit.rates(&base)));
        let ratio = rates.prefill_s(4000, 0) / rates_before.prefill_s(4000, 0);
        assert!(ratio > 1.0 && ratio < 1.1, "{ratio}");
    }

    /// The pool, and its endpoints of these machines, after so many prompts and answers at each.
    fn pool(machines: &mut [Machine], rounds: usize) -> (Rates, Vec<Rates>) {
        let (mut fit, base) = (Fit::default(), Rates::default());
        let mut paces = vec![Pace::default(); machines.len()];
        for _ in 0..rounds {
            for (machine, pace) in machines.iter_mut().zip(&mut paces) {
                for (measured, work) in [(Measured::FirstToken, prompt(2000)), (Measured::Tokens, answer(8))]
                {
                    let taken_s = machine.takes(&work);
                    fit.observe(pace, &base, measured, taken_s, &work);
                }
            }
        }
        let rates = fit.rates(&base);
        (rates, paces.iter().map(|pace| pace.rates(&rates)).collect())
    }

    /// Invariant: An endpoint's learned rates begin with its pool's and then follow its own measurements; noise does
    /// not separate machines of one kind.
    ///
    /// Also held by `an_outlier_hardly_moves_a_rate_and_what_is_no_time_does_not`.
    #[test]
    fn machines_of_one_kind_share_their_pools_rates_and_others_have_their_own() {
        let (fast, slow) = (Rates::default().times(4.0, 2.0), Rates::default().times(6.0, 3.0));
        let mut equal: Vec<_> = (0..4).map(|seed| Machine::new(fast, seed)).collect();
        let (rates, own) = pool(&mut equal, 50);
        for own in &own {
            assert!((own.step_s / rates.step_s - 1.0).abs() < 0.02, "{own:?} {rates:?}");
            assert!((own.prefill_token_s / rates.prefill_token_s - 1.0).abs() < 0.02, "{own:?} {rates:?}");
        }
        let mut mixed: Vec<_> =
            (0..4).map(|seed| Machine::new([fast, slow][seed as usize % 2], seed)).collect();
        let (_, own) = pool(&mut mixed, 50);
        for (own, machine) in own.iter().zip(&mixed) {
            let [prefill, decode] =
                [prompt(2000), answer(8)].map(|work| own.seconds_of(&work) / machine.rates.seconds_of(&work));
            assert!((0.9..1.1).contains(&prefill) && (0.9..1.1).contains(&decode), "{prefill} {decode}");
        }
        assert_eq!(Pace::default().rates(&rates), rates, "an endpoint without measurements");
    }

    #[test]
    fn a_machine_that_becomes_slower_is_found_within_a_few_dozen_times() {
        let mut machines: Vec<_> = (0..4).map(|seed| Machine::new(Rates::default(), seed)).collect();
        let (mut fit, base) = (Fit::default(), Rates::default());
        let mut paces = vec![Pace::default(); machines.len()];
        let run = |machines: &mut [Machine], fit: &mut Fit, paces: &mut [Pace], rounds: usize| {
            for _ in 0..rounds {
                for (machine, pace) in machines.iter_mut().zip(paces.iter_mut()) {
                    let taken_s = machine.takes(&answer(8));
                    fit.observe(pace, &base, Measured::Tokens, taken_s, &answer(8));
                }
            }
        };
        run(&mut machines, &mut fit, &mut paces, 300);
        machines[0].rates = base.times(1.0, 2.0);
        run(&mut machines, &mut fit, &mut paces, 30);
        let step_s = |pace: &Pace| pace.rates(&fit.rates(&base)).step_s / base.step_s;
        let (throttled, other) = (step_s(&paces[0]), step_s(&paces[1]));
        assert!((1.8..2.2).contains(&throttled) && (0.9..1.1).contains(&other), "{throttled} {other}");
    }
}
