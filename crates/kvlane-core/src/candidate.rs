//! The rows that a policy picks from.

use crate::cache_accuracy::{Knowledge, Prediction};
use crate::disaggregation::Part;
use crate::endpoint::EndpointId;
use crate::load::{InFlight, Load};
use crate::rates::{COMPUTED_MAX, Rates, Work};
use crate::request::SchedulingRequest;

/// One eligible endpoint as a row.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// The endpoint.
    pub endpoint: EndpointId,
    /// Leading prompt tokens that it is expected to hold in its cache.
    pub overlap_tokens: u32,
    /// Of these, the tokens that it holds only below the GPU, and loads before it computes the others.
    pub lower_tokens: u32,
    /// How the overlap is known.
    pub knowledge: Knowledge,
    /// The prediction of each source, for receipts.
    pub prediction: Prediction,
    /// Its part in disaggregated serving.
    pub part: Part,
    /// Its load before this request.
    pub load: Load,
    /// Seconds for which it has computed the first of the prompts that wait there.
    pub computing_s: f64,
    /// Its estimated speed.
    pub rates: Rates,
}

// === impl Candidate ===

impl Candidate {
    /// A row known from dispatches only.
    pub fn approximate(endpoint: EndpointId, overlap_tokens: u32, load: Load) -> Self {
        Self {
            endpoint,
            overlap_tokens,
            lower_tokens: 0,
            knowledge: Knowledge::Approximate,
            prediction: Prediction { approximate: overlap_tokens, ..Prediction::default() },
            part: Part::default(),
            load,
            computing_s: 0.0,
            rates: Rates::default(),
        }
    }

    /// Leading prompt tokens that it was sent before.
    pub(crate) fn sent_tokens(&self) -> u32 {
        self.prediction.approximate.max(self.overlap_tokens)
    }

    /// Prompt tokens that it would have to compute for `request`.
    pub fn uncached_tokens(&self, request: &SchedulingRequest) -> u32 {
        request.prompt_tokens.saturating_sub(self.overlap_tokens)
    }

    /// Whether it can compute a prompt for `decode` to answer.
    pub fn can_prefill_for(&self, decode: &Self) -> bool {
        self.endpoint != decode.endpoint && self.part.can_prefill_for(&decode.part)
    }

    /// Query-key pairs of the uncached tokens: each pairs with itself and every token before it.
    pub fn uncached_pairs(&self, request: &SchedulingRequest) -> u64 {
        let (cached, tokens) = (u64::from(self.overlap_tokens), u64::from(self.uncached_tokens(request)));
        tokens * cached + tokens * (tokens + 1) / 2
    }

    /// Seconds of prefill that are left of the prompts that wait here. The first of them is taken to be as long as their
    /// mean; what is done of it is subtracted, up to [`COMPUTED_MAX`] of it.
    pub fn queued_s(&self) -> f64 {
        let InFlight { prefilling, prefill_tokens, prefill_pairs, .. } = self.load.in_flight;
        let all_s = self.rates.prefill_s(prefill_tokens, prefill_pairs);
        all_s - self.computing_s.min(COMPUTED_MAX * all_s / f64::from(prefilling.max(1)))
    }

    /// Tokens that are loaded from below the GPU before the first token of a request that is placed here now: its own,
    /// and those of the prompts that wait here, since an engine has one way on which blocks come. A request that needs none
    /// waits for none: others are computed while blocks are loaded.
    pub fn tokens_to_load(&self) -> u64 {
        let own = u64::from(self.lower_tokens);
        if own > 0 { own + self.load.in_flight.lower_tokens } else { 0 }
    }

    /// Seconds for which a request that is placed here now waits for loads from below the GPU.
    pub fn load_s(&self) -> f64 {
        self.rates.load_token_s * self.tokens_to_load() as f64
    }

    /// What is computed and loaded until the first token of a request that is placed here now.
    pub(crate) fn work_until_first_token(&self, request: &SchedulingRequest) -> Work {
        let InFlight { prefill_tokens, prefill_pairs, .. } = self.load.in_flight;
        let all_s = self.rates.prefill_s(prefill_tokens, prefill_pairs);
        let left = if all_s > 0.0 { self.queued_s() / all_s } else { 1.0 };
        let of = |all: u64| (all as f64 * left) as u64;
        let waiting = InFlight {
            prefill_tokens: of(prefill_tokens),
            prefill_pairs: of(prefill_pairs),
            ..self.load.in_flight
        };
        let (tokens, pairs) = (self.uncached_tokens(request), self.uncached_pairs(request));
        let work = Work::until_first_token(&waiting, tokens, pairs);
        Work { loaded_tokens: self.tokens_to_load(), ..work }
    }

    /// Expected time to first token of a request placed here now, in seconds.
    pub fn first_token_s(&self, request: &SchedulingRequest) -> f64 {
        self.rates.seconds_of(&self.work_until_first_token(request))
    }

    /// KV cache usage that the engine reports, 0 to 1; 0 if it reports none or an invalid value.
    pub(crate) fn kv_usage(&self) -> f64 {
        let ratio = self.load.reported.map_or(0.0, |(reported, _)| f64::from(reported.kv_usage_ratio));
        if ratio >= 0.0 { ratio.min(1.0) } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::RequestId;

    /// An endpoint that has computed the first of so many prompts for so long; together they take four seconds.
    fn row(prefilling: u32, computing_s: f64) -> Candidate {
        let in_flight =
            InFlight { requests: prefilling, prefilling, prefill_tokens: 4000, ..InFlight::default() };
        let rates = Rates { prefill_token_s: 1e-3, ..Rates::default() };
        let load = Load { in_flight, reported: None };
        Candidate { computing_s, rates, ..Candidate::approximate(EndpointId::new(0, 0), 0, load) }
    }

    #[test]
    fn what_is_computed_of_the_first_prompt_is_not_waited_for() {
        let near = |seconds: f64, expected_s: f64| assert!((seconds - expected_s).abs() < 1e-9, "{seconds}");
        near(row(1, 0.0).queued_s(), 4.0);
        near(row(1, 1.5).queued_s(), 2.5);
        near(row(2, 1.5).queued_s(), 2.5);
        // No more than nine tenths of a prompt of mean length, however long its first token takes.
        near(row(1, 60.0).queued_s(), 0.4);
        near(row(4, 60.0).queued_s(), 3.1);

        let request = SchedulingRequest::new(RequestId(1), 100);
        let [soon, late] = [row(2, 1.5), row(2, 0.0)].map(|row| row.first_token_s(&request));
        assert!((late - soon - 1.5).abs() < 0.01, "{soon} {late}");
        assert_eq!(row(2, 1.5).work_until_first_token(&request).tokens, 2600);
    }
}
