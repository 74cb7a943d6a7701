//! `preble`: exploit a prefix or explore (Preble's E2, ICLR 2025, arXiv 2407.00023, section 4.2; WukLab/preble).
//!
//! With `m` the longest match at any endpoint and `L` the prompt: if `m > L - m`, the least loaded of the endpoints
//! that hold `m`, by `L_i`. Else `argmin (L_i + M_i + P_i)`, in seconds:
//!
//! - `L_i`: prefill and decode time of all requests placed there in the last three minutes;
//! - `M_i`: time to recompute what the request evicts there, times the hit rate of the evicted blocks;
//! - `P_i`: prefill time of this prompt's uncached tokens.
//!
//! Times come from the endpoint's rates: a decode takes the forecast answer length times a sequence's share of a step.
//! Preble's regressions give that per request, independent of the batch; here it is that of a batch of the pool's mean
//! size, `decode_step_s(B + 1, T + L) / (B + 1)` with the means of `B` and `T`. With each endpoint's own batch size,
//! the endpoint with the largest batch would look cheapest and attract ever more requests. Windows are kept in 60 parts
//! of 3 s. Ties are random.
//!
//! Preble keeps the engines' trees and so knows what would be evicted. kvlane has no such list and estimates: a full
//! cache evicts as many tokens as the request adds, and their hit rate is that of the prompts placed on that endpoint
//! in the window. A cache counts as full once more new tokens have been placed there than its capacity, or if the
//! endpoint reports no capacity.
//!
//! Known limits: the exploiting branch ignores load differences, so a hot prefix stays on its endpoint. Preble's
//! remedies, moving and replicating hot prefixes, are not implemented: they need control of the engines' trees.

use serde::{Deserialize, Serialize};

use crate::bounded::AtLeastOne;
use crate::policy::{Candidate, CostUnit, PickContext, Policy, Reason};
use crate::request::SchedulingRequest;
use crate::table::ByEndpoint;
use crate::time::Nanos;

/// Window length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Seconds for which a placement counts as load.
    pub window_s: AtLeastOne,
}

impl Default for Config {
    fn default() -> Self {
        Self { window_s: AtLeastOne::of(180.0) }
    }
}

/// Parts of the window, dropped one by one.
const PARTS: usize = 60;

/// Work placed on an endpoint in a span of time. Integers, so that subtraction is exact.
#[derive(Clone, Copy, Default)]
struct Given {
    work: Nanos,
    prompt_tokens: u64,
    hit_tokens: u64,
}

/// Work placed on an endpoint in a sliding window, and new tokens since it joined.
struct Window {
    parts: [Given; PARTS],
    /// Sum over all parts.
    sum: Given,
    /// Number of the current part, counted from the driver's origin.
    part: u64,
    /// New tokens since the endpoint joined.
    new_tokens: u64,
}

/// The policy, with the work it placed in the window.
pub struct Preble {
    part_s: f64,
    windows: ByEndpoint<Box<Window>>,
}

// === impl Given ===

impl Given {
    fn plus(self, other: Self) -> Self {
        Self {
            work: self.work + other.work,
            prompt_tokens: self.prompt_tokens.saturating_add(other.prompt_tokens),
            hit_tokens: self.hit_tokens.saturating_add(other.hit_tokens),
        }
    }

    fn minus(self, other: Self) -> Self {
        Self {
            work: self.work - other.work,
            prompt_tokens: self.prompt_tokens.saturating_sub(other.prompt_tokens),
            hit_tokens: self.hit_tokens.saturating_sub(other.hit_tokens),
        }
    }
}

// === impl Window ===

impl Window {
    fn new(part: u64) -> Box<Self> {
        Box::new(Self { parts: [Given::default(); PARTS], sum: Given::default(), part, new_tokens: 0 })
    }

    /// Indices of the parts that have left the window at `part`.
    fn gone(&self, part: u64) -> impl Iterator<Item = usize> + use<> {
        let passed = part.saturating_sub(self.part).min(PARTS as u64);
        (self.part + 1..=self.part + passed).map(|part| part as usize % PARTS)
    }

    /// Work in the parts that are still in the window at `part`.
    fn given(&self, part: u64) -> Given {
        self.gone(part).fold(self.sum, |sum, gone| sum.minus(self.parts[gone]))
    }

    fn add(&mut self, part: u64, given: Given, new_tokens: u64) {
        self.sum = self.given(part);
        for gone in self.gone(part) {
            self.parts[gone] = Given::default();
        }
        self.part = self.part.max(part);
        let now = &mut self.parts[self.part as usize % PARTS];
        *now = now.plus(given);
        self.sum = self.sum.plus(given);
        self.new_tokens = self.new_tokens.saturating_add(new_tokens);
    }
}

// === impl Preble ===

impl Preble {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self { part_s: (config.window_s.get() / PARTS as f64).max(1e-3), windows: ByEndpoint::default() }
    }

    fn part(&self, now: Nanos) -> u64 {
        (now.as_secs_f64() / self.part_s) as u64
    }
}

/// Prefill time of the prompt's uncached tokens, in seconds.
fn prefill_s(request: &SchedulingRequest, row: &Candidate) -> f64 {
    row.rates.prefill_s(u64::from(row.uncached_tokens(request)), row.uncached_pairs(request))
}

/// Endpoint time that the answer takes in a batch of the mean size, in seconds.
fn decode_s(
    request: &SchedulingRequest,
    output_tokens: u32,
    row: &Candidate,
    candidates: &[Candidate],
) -> f64 {
    let mean = |of: fn(&Candidate) -> u64| {
        candidates.iter().map(|row| of(row) as f64).sum::<f64>() / candidates.len() as f64
    };
    let requests = mean(|row| u64::from(row.load.in_flight.requests));
    let context_tokens = mean(|row| row.load.in_flight.context_tokens);
    let context_tokens = (context_tokens + f64::from(request.prompt_tokens)) as u64;
    let step_s = row.rates.decode_step_s((requests as u32).saturating_add(1), context_tokens);
    f64::from(output_tokens) * step_s / (requests + 1.0)
}

impl Policy for Preble {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        let part = self.part(cx.now);
        let given =
            |row: &Candidate| self.windows.get(row.endpoint).map_or(Given::default(), |w| w.given(part));
        let longest = candidates.iter().map(|row| row.overlap_tokens).max().unwrap_or(0);
        let row = if longest > cx.request.prompt_tokens.saturating_sub(longest) {
            cx.reason = Reason::PrefixHit;
            let holds = |row: &Candidate| row.overlap_tokens == longest;
            cx.cheapest_of(candidates, holds, |row| given(row).work.as_secs_f64()).unwrap_or(0)
        } else {
            cx.reason = Reason::LowestCost;
            let (request, output_tokens) = (cx.request, u64::from(cx.output_tokens));
            cx.cheapest(candidates, |row| {
                let given = given(row);
                let new_tokens = u64::from(row.uncached_tokens(request)) + output_tokens;
                let before = self.windows.get(row.endpoint).map_or(0, |window| window.new_tokens);
                let capacity = row.load.reported.and_then(|(reported, _)| reported.kv_capacity_tokens);
                let evicted = capacity
                    .map_or(new_tokens, |capacity| before.saturating_add(new_tokens).saturating_sub(capacity))
                    .min(new_tokens);
                let hit_share = given.hit_tokens as f64 / given.prompt_tokens.max(1) as f64;
                given.work.as_secs_f64()
                    + row.rates.prefill_s(evicted, 0) * hit_share
                    + prefill_s(request, row)
            })
        };
        let (request, candidate) = (cx.request, &candidates[row]);
        let given = Given {
            work: Nanos::from_secs_f64(
                prefill_s(request, candidate) + decode_s(request, cx.output_tokens, candidate, candidates),
            ),
            prompt_tokens: u64::from(request.prompt_tokens),
            hit_tokens: u64::from(candidate.overlap_tokens.min(request.prompt_tokens)),
        };
        let new_tokens = u64::from(candidate.uncached_tokens(request)) + u64::from(cx.output_tokens);
        self.windows.get_or_insert(candidate.endpoint, || Window::new(part)).add(part, given, new_tokens);
        row
    }

    fn cost_unit(&self) -> CostUnit {
        CostUnit::Seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::LoadReport;
    use crate::policy::testing::{Case, near};

    /// Prefill takes 1 ms a token; a decode step takes 10 ms for any batch.
    fn case(prompt_tokens: u32, rows: &[(u32, u32, u64, u64)]) -> Case {
        let mut case = Case::new("preble", prompt_tokens, rows);
        for row in &mut case.rows {
            row.rates.prefill_token_s = 1e-3;
            row.rates.prefill_pair_s = 0.0;
            row.rates.step_s = 10e-3;
            row.rates.sequence_s = 0.0;
            row.rates.context_token_s = 0.0;
        }
        case.output_tokens = 100;
        case
    }

    #[test]
    fn more_than_half_of_the_prompt_is_exploited() {
        let mut exploits = case(100, &[(51, 9, 900, 900), (0, 0, 0, 0)]);
        assert_eq!([exploits.pick(), exploits.pick()], [(0, Reason::PrefixHit); 2]);
        assert_eq!(
            case(100, &[(50, 0, 0, 0), (0, 0, 0, 0)]).pick(),
            (0, Reason::LowestCost),
            "0.05 to 0.1 s"
        );
    }

    #[test]
    fn of_the_holders_the_least_given_wins() {
        let mut case = case(100, &[(60, 0, 0, 0), (60, 0, 0, 0), (0, 0, 0, 0)]);
        let (first, second) = (case.pick().0, case.pick().0);
        assert_eq!(first + second, 1, "each endpoint once");
        // 40 tokens, and 100 steps of 10 ms alone in the batch.
        near(&case.costs[first..=first], &[0.04 + 1.0]);
    }

    #[test]
    fn what_was_given_counts_for_three_minutes() {
        let mut case = case(100, &[(0, 0, 0, 0), (0, 1, 0, 0)]);
        case.rows[1].rates.prefill_token_s = 2e-3;
        case.now = Nanos::from_secs(10);
        assert_eq!(case.pick().0, 0, "0.1 to 0.2 s");
        near(&case.costs, &[0.1, 0.2]);
        assert_eq!(case.pick().0, 1);
        // 100 steps of 10 ms, shared by the mean batch of half a request and this one.
        let decode_s = 1.0 / 1.5;
        near(&case.costs, &[0.1 + decode_s + 0.1, 0.2]);
        assert_eq!(case.pick().0, 0);
        near(&case.costs, &[0.2 + decode_s, 0.2 + decode_s + 0.2]);
        // Parts are 3 s long: 10 s is in the fourth part, which leaves the window when the sixty-fourth begins at 189
        // s.
        case.now = Nanos::from_secs(188);
        assert_eq!(case.pick().0, 1);
        near(&case.costs, &[2.0 * (0.1 + decode_s) + 0.1, 0.4 + decode_s]);
        case.now = Nanos::from_secs(189);
        assert_eq!(case.pick().0, 0);
        near(&case.costs, &[0.1, 0.4 + decode_s]);
    }

    #[test]
    fn an_endpoint_with_a_large_batch_does_not_look_cheap_for_it() {
        let mut case = case(100, &[(0, 50, 0, 0), (0, 0, 0, 0)]);
        let mut given = [0; 2];
        (0..20).for_each(|_| given[case.pick().0] += 1);
        assert_eq!(given, [10, 10]);
    }

    #[test]
    fn what_a_full_cache_evicts_costs_as_often_as_it_is_hit() {
        let mut case = case(100, &[(40, 0, 0, 0), (0, 0, 0, 0)]);
        assert_eq!(case.pick().0, 0);
        near(&case.costs, &[0.06, 0.1]);
        // Placed work is 1.06 s; 160 new tokens evict as many, of which 40 % are hit.
        case.pick();
        near(&case.costs, &[1.06 + 0.16 * 0.4 + 0.06, 0.1]);
        // 320 new tokens in a cache of 250 evict 70.
        let reported =
            LoadReport { running: 0, waiting: 0, kv_usage_ratio: 0.0, kv_capacity_tokens: Some(250) };
        case.rows[0].load.reported = Some((reported, Nanos::ZERO));
        case.pick();
        near(&case.costs[..1], &[1.06 + 0.07 * 0.4 + 0.06]);
    }
}
