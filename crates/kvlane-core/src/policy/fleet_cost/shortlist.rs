//! The endpoints that can be the cheapest, found in one pass over the columns of a large fleet.
//!
//! The price of a whole request at an endpoint is, with the factors `a` and `b` of its prefill and decode rates beside the pool's,
//!
//! ```text
//! a queued - min(computing, 9/10 a queued / f) + a p (m0 + md d + mf f) + a l + b (k0 + kr r + kc context) + F met
//! ```
//!
//! where only `queued`, the time `computing` its first prompt, `d`, `f`, `r`, `context`, what new prefixes will have `met` ([`super::future`]), the factors, the loads `l` and, through `p`, the cached tokens differ between
//! endpoints. With other routers it is multiplied by the endpoint's [`preference`]. The weights differ between requests, so no single order of the endpoints serves all: the pass prices each
//! endpoint, in single precision, eight operations at a time.
//!
//! What that loses: all numbers are sums and products of terms that are not negative, but for what is computed, which leaves a tenth
//! or more of what it is taken from. So the relative error of a price is at most [`ERROR`]. Let `c` be the least price in single precision. The endpoint that is the cheapest in truth has
//! at most `c (1 + 2 ERROR)` to the first order, since otherwise that of `c` would be cheaper. All endpoints up to
//! `c (1 + 4 ERROR)` are on the list and are priced exactly, so the pick is the one of a scan. Only if more than [`LISTED_MAX`] endpoints
//! are within that band, such as where many are idle, some of them are left out, and the pick costs at most the share
//! `6 ERROR` more than the cheapest. Which of them are listed is drawn, so that idle endpoints share the requests.
//!
//! `the_shortlist_has_the_row_that_a_scan_picks` holds this formula to that of [`Terms::alone_s`].

use super::future::{PlacedChunk, Prices};
use super::{BEHIND, DECODE_WORTH, FleetCost, Terms, preference};
use crate::columns::{CHUNK, Chunk, Column, Fleet};
use crate::policy::PickContext;
use crate::rates::Rates;
use crate::time::{Nanos, micros_since};

/// Bound of the relative error of a price in the pass: some thirty roundings of 2⁻²⁴ each, those of the queue up to nineteen times.
const ERROR: f32 = 1e-5;
/// Most endpoints that a pass lists.
const LISTED_MAX: usize = 64;
/// Lanes of the minimum.
const LANES: usize = 8;
/// The weights of a price, the same for all endpoints.
struct Weights {
    /// Per uncached token, per pair of them, and their number without any cached.
    token_s: f32,
    pair_s: f32,
    prompt_tokens: f32,
    /// Of a second of prefill: always, per decoding request, per request that prefills.
    always: f32,
    per_decoding: f32,
    per_prefilling: f32,
    /// Seconds of decoding: always, per request, per token of context.
    decode_s: f32,
    per_request_s: f32,
    per_context_token_s: f32,
    /// Per token to load.
    load_token_s: f32,
}

// === impl Weights ===

impl Weights {
    fn of(terms: &Terms<'_>, fleet: &Fleet<'_>) -> Self {
        let Rates { prefill_token_s, prefill_pair_s, load_token_s, .. } = *fleet.rates;
        let Rates { step_s, sequence_s, context_token_s, .. } = *fleet.rates;
        let own_tokens = f64::from(terms.request.prompt_tokens) + (0.5 * terms.output_tokens).floor();
        let own_s = sequence_s + context_token_s * own_tokens;
        Self {
            token_s: prefill_token_s as f32,
            pair_s: prefill_pair_s as f32,
            prompt_tokens: terms.request.prompt_tokens as f32,
            always: (1.0 + terms.again) as f32,
            per_decoding: (terms.stall + DECODE_WORTH * terms.again) as f32,
            per_prefilling: (terms.behind + BEHIND * terms.again) as f32,
            decode_s: (terms.decode * (step_s + own_s)) as f32,
            per_request_s: (terms.decode * sequence_s + terms.slower * own_s) as f32,
            per_context_token_s: (terms.decode * context_token_s) as f32,
            load_token_s: load_token_s as f32,
        }
    }

    fn prefill_s(&self, cached_tokens: f32) -> f32 {
        let tokens = (self.prompt_tokens - cached_tokens).max(0.0);
        self.token_s * tokens + self.pair_s * (tokens * cached_tokens + 0.5 * tokens * (tokens + 1.0))
    }

    /// Adds the loads of a chunk to its prices.
    fn add_loads(&self, chunk: &Chunk, costs: &mut Column) {
        for (at, cost) in costs.iter_mut().enumerate() {
            let own = chunk.lower_tokens[at];
            let tokens = if own > 0.0 { own + chunk.queued_lower_tokens[at] } else { 0.0 };
            *cost += chunk.prefill_pace[at] * self.load_token_s * tokens;
        }
    }

    /// Prices a chunk.
    fn price(&self, chunk: &Chunk, now: Nanos, has_cached: bool, costs: &mut Column) {
        let mut prefill_s = [self.prefill_s(0.0); CHUNK];
        if has_cached {
            for (prefill_s, &cached_tokens) in prefill_s.iter_mut().zip(&chunk.cached_tokens) {
                *prefill_s = self.prefill_s(cached_tokens);
            }
        }
        for (at, cost) in costs.iter_mut().enumerate() {
            let (requests, prefilling) = (chunk.requests[at], chunk.prefilling[at]);
            let decoding = (requests - prefilling).max(0.0);
            let weight = self.always + self.per_decoding * decoding + self.per_prefilling * prefilling;
            let pace = chunk.prefill_pace[at];
            let waiting_s = pace * (self.token_s * chunk.prefill_tokens[at] + self.pair_s * chunk.prefill_pairs[at]);
            let computing_s = micros_since(chunk.computing_since[at], now) as f32 * 1e-6;
            let most_s = waiting_s * chunk.computed_max[at];
            let queued_s = waiting_s - if most_s < computing_s { most_s } else { computing_s };
            *cost = queued_s + pace * prefill_s[at] * weight
                + chunk.decode_pace[at]
                    * (self.decode_s
                        + self.per_request_s * requests
                        + self.per_context_token_s * chunk.context_tokens[at]);
        }
    }
}

/// Adds what later requests with a new prefix will meet.
fn add_met(placed: &PlacedChunk, prices: &Prices, costs: &mut Column) {
    let [new, again, new_token] = [prices.new, prices.again, prices.new_token].map(|price| price as f32);
    for (at, cost) in costs.iter_mut().enumerate() {
        *cost += new * placed.new_s[at] + again * placed.again_s[at] + new_token * placed.new_tokens[at];
    }
}

/// The least price of a chunk.
fn least_of(costs: &Column) -> f32 {
    let mut least = [f32::INFINITY; LANES];
    for lanes in costs.chunks_exact(LANES) {
        for (least, &cost) in least.iter_mut().zip(lanes) {
            *least = if cost < *least { cost } else { *least };
        }
    }
    least.into_iter().fold(f32::INFINITY, f32::min)
}

// === impl FleetCost ===

impl FleetCost {
    /// Appends the slots of the endpoints that can be the cheapest. See the module documentation.
    pub(super) fn list(&mut self, cx: &mut PickContext<'_>, fleet: &Fleet<'_>, listed: &mut Vec<u16>) {
        let terms = &self.terms(cx, fleet.seen_tokens);
        let weights = Weights::of(terms, fleet);
        let chunks = fleet.columns.chunks();
        self.costs.resize(chunks.len(), ([0.0; CHUNK], 0.0));
        let mut least = f32::INFINITY;
        for (at, chunk) in chunks.iter().enumerate() {
            let (costs, chunk_least) = &mut self.costs[at];
            weights.price(chunk, terms.now, fleet.has_cached, costs);
            if fleet.has_lower {
                weights.add_loads(chunk, costs);
            }
            if let (Some(placed), Some(prices)) = (self.future.chunk(at), &terms.new_prefix) {
                add_met(placed, prices, costs);
            }
            if terms.peers.is_some() {
                let slots = at * CHUNK..;
                costs.iter_mut().zip(slots).for_each(|(cost, slot)| *cost *= preference(terms.peers, slot) as f32);
            }
            *chunk_least = least_of(costs);
            least = least.min(*chunk_least);
        }
        if least == f32::INFINITY {
            return;
        }
        let most = least * (1.0 + 4.0 * ERROR);
        let first = cx.rng.below(chunks.len());
        let room = listed.len() + LISTED_MAX;
        for at in (first..chunks.len()).chain(0..first) {
            let (costs, chunk_least) = &self.costs[at];
            if *chunk_least > most {
                continue;
            }
            let cheap =
                (0..CHUNK).filter(|&place| costs[place] <= most).map(|place| (at * CHUNK + place) as u16);
            listed.extend(cheap.take(room - listed.len()));
            if listed.len() == room {
                return;
            }
        }
    }
}
