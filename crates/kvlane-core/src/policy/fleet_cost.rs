//! `fleet_cost` (alias `auto`): what a request costs the whole fleet, in seconds, wherever it could go; the least wins.
//!
//! The cost of an endpoint is a sum. With `q` the seconds of computing queued there, `p` those of what this prompt has
//! uncached there, `w` the wait for room in its KV cache, `s` and `s'` the seconds of a decode step before and with this
//! request, `o` the output tokens expected of it, `r` the requests in flight there, of which `f` have no first token yet
//! and `d` decode:
//!
//! | Term | Seconds | Whose time it is |
//! |---|---|---|
//! | first token | `q + p + w` | the request's own, until its first token |
//! | decode | `1/2 o s'` | its own, from there on |
//! | slower | `1/2 (s' - s) r min(o, usual)` | those in flight, whose steps it lengthens |
//! | stall | `3/10 p d` | those that decode, and stand still while it is computed |
//! | behind | `2 p f` | those that come into a queue which is there already |
//! | again | `R/(1-R) p (1 + d/2 + 2 f)` | those whose blocks it evicts, and who do all this again |
//! | new prefix | `F^2 c` | those to come for a prefix that nobody has been sent before |
//!
//! Rates are the endpoint's own, learned from its answers ([`crate::rates`]); lengths of answers are learned too
//! ([`crate::forecast`]). `R`, the share of recent prompt tokens that had been sent before, is the probability that a
//! block is wanted again: what is evicted is computed again with it, which evicts something else, and so on, hence
//! `R/(1-R)`. `F = R/(1-R)` as well is how often a token is used again. A new prefix brings `F` further requests to
//! where it is put, and each of them finds the `F` of every other new prefix that was put there: `c` is the seconds of
//! computing the new prefixes an endpoint was given within the last few turnovers of the fleet's caches.
//!
//! What a workload could set by itself is measured: rates, lengths, shares. Five weights are left. They say what a
//! second is worth to whom, and are the same for all workloads: a second between tokens is worth half of one before the
//! first token, and three tenths where nothing but a stall is concerned. Doubling or halving any one of them changes
//! the geometric mean of the end-to-end times in `make placement` by 3 % at most; a heavier stall gives up the longest
//! waits for better means. docs/placement.md says more, docs/decisions/0010-fleet-cost.md what else was tried.
//!
//! Known limits: a block in a lower tier counts as held. Where a mixed fleet has room, long prompts go to the slower
//! machines too, which is better on average and worse for the longest waits.

use serde::{Deserialize, Serialize};

use super::{Candidate, PickContext, Policy, Reason};
use crate::endpoint::EndpointId;
use crate::load::InFlight;
use crate::request::SchedulingRequest;
use crate::table::ByEndpoint;

/// Nothing to tune. A term can be left out to see what it is worth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// A term to leave out, for measurements.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub without: Option<Term>,
}

/// A term of the cost. See the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Term {
    /// The wait for room in the KV cache.
    Room,
    /// The request's own decoding.
    Decode,
    /// Slower steps of the others.
    Slower,
    /// The stall of those that decode.
    Stall,
    /// The wait of those behind.
    Behind,
    /// Computing again what is evicted.
    Again,
    /// The future of a new prefix.
    NewPrefix,
}

/// What a second between two tokens is worth in seconds before the first token.
const DECODE_WORTH: f64 = 0.5;
/// The same for a second in which those that decode stand still: it is over soon, and somewhere it has to be.
const STALL_WORTH: f64 = 0.3;
/// How many will stand behind a request for each that stands before it.
const BEHIND: f64 = 2.0;

/// Answers in flight grow by so much of a usual answer before they are over.
const GROWTH: f64 = 0.5;

/// The most that is believed of how often prompt tokens come again.
const AGAIN_SHARE_MAX: f64 = 0.95;
/// Requests after which the shares of prompt tokens follow rather than gather.
const MEMORY_REQUESTS: f64 = 256.0;
/// What is believed of how often a new prefix comes again before so many prompt tokens have been seen: half of it.
const PRIOR_SHARE: f64 = 0.5;
const PRIOR_TOKENS: f64 = 100_000.0;
/// Turnovers of the fleet's caches after which a new prefix has been forgotten, about.
const TURNOVERS: f64 = 4.0;
/// Tokens of an endpoint's KV cache if it does not say: Qwen3-32B on two H100 has as many ([`crate::timing`]).
const USUAL_CAPACITY_TOKENS: f64 = 300_000.0;

/// The policy: it remembers how often prompts come again, and where new prefixes went.
pub struct FleetCost {
    without: Option<Term>,
    again: Again,
    prefixes: NewPrefixes,
}

/// How much of the prompts had been sent before: sums that forget.
#[derive(Debug, Default)]
struct Again {
    seen_tokens: f64,
    prompt_tokens: f64,
}

/// Tokens of new prefixes by endpoint. All fade with what the fleet computes: entries are in a unit that grows instead.
#[derive(Debug)]
struct NewPrefixes {
    tokens: ByEndpoint<f64>,
    unit: f64,
}

/// What a request would do to an endpoint, in seconds.
struct Effect {
    /// Computing what is uncached.
    prefill_s: f64,
    /// A decode step without it, and with it.
    before_s: f64,
    with_s: f64,
}

// === impl Again ===

impl Again {
    /// The share of the prompts, and the share that is believed while little has been seen.
    fn shares(&self) -> (f64, f64) {
        let share = if self.prompt_tokens > 0.0 { self.seen_tokens / self.prompt_tokens } else { 0.0 };
        let believed =
            (self.seen_tokens + PRIOR_SHARE * PRIOR_TOKENS) / (self.prompt_tokens + PRIOR_TOKENS);
        (share.min(AGAIN_SHARE_MAX), believed.min(AGAIN_SHARE_MAX))
    }

    fn add(&mut self, seen_tokens: u32, prompt_tokens: u32) {
        let keep = 1.0 - 1.0 / MEMORY_REQUESTS;
        self.seen_tokens = self.seen_tokens * keep + f64::from(seen_tokens.min(prompt_tokens));
        self.prompt_tokens = self.prompt_tokens * keep + f64::from(prompt_tokens);
    }
}

// === impl NewPrefixes ===

impl NewPrefixes {
    fn tokens(&self, id: EndpointId) -> f64 {
        self.tokens.get(id).map_or(0.0, |tokens| tokens / self.unit)
    }

    fn add(&mut self, id: EndpointId, tokens: f64) {
        *self.tokens.get_or_insert(id, || 0.0) += tokens * self.unit;
    }

    /// The fleet computes a share of what its caches hold.
    fn fade(&mut self, share: f64, candidates: &[Candidate]) {
        self.unit /= 1.0 - share.min(0.5);
        if self.unit > 1e12 {
            let unit = std::mem::replace(&mut self.unit, 1.0);
            for row in candidates {
                *self.tokens.get_or_insert(row.endpoint, || 0.0) /= unit;
            }
        }
    }
}

// === impl Effect ===

impl Effect {
    fn of(request: &SchedulingRequest, output_tokens: f64, row: &Candidate) -> Self {
        let InFlight { requests, context_tokens, .. } = row.load.in_flight;
        let (tokens, pairs) = (u64::from(row.uncached_tokens(request)), row.uncached_pairs(request));
        let own_tokens = u64::from(request.prompt_tokens) + (0.5 * output_tokens) as u64;
        Self {
            prefill_s: row.rates.prefill_s(tokens, pairs),
            before_s: row.rates.decode_step_s(requests, context_tokens),
            with_s: row
                .rates
                .decode_step_s(requests.saturating_add(1), context_tokens.saturating_add(own_tokens)),
        }
    }
}

// === impl FleetCost ===

impl FleetCost {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self {
            without: config.without,
            again: Again::default(),
            prefixes: NewPrefixes { tokens: ByEndpoint::default(), unit: 1.0 },
        }
    }

    /// One, or zero for a term that is left out.
    fn weight(&self, term: Term) -> f64 {
        f64::from(u8::from(self.without != Some(term)))
    }
}

/// The share of an endpoint's KV cache that would be in use with this request and those that wait before it. Nothing
/// is known of an endpoint that does not report.
fn kv_usage(request: &SchedulingRequest, usual_output_tokens: f64, row: &Candidate) -> f64 {
    let Some((reported, _)) = row.load.reported else { return 0.0 };
    let Some(capacity) = reported.kv_capacity_tokens else { return 0.0 };
    let InFlight { requests, prefill_tokens, .. } = row.load.in_flight;
    let coming = prefill_tokens as f64
        + f64::from(row.uncached_tokens(request))
        + GROWTH * usual_output_tokens * f64::from(requests);
    f64::from(reported.kv_usage_ratio) + coming / capacity.max(1) as f64
}

impl Policy for FleetCost {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        cx.reason = Reason::LowestCost;
        let request = cx.request;
        let (output_tokens, usual) = (f64::from(cx.output_tokens), cx.usual_output_tokens);
        let sent = candidates.iter().map(|row| row.prediction.approximate.max(row.overlap_tokens));
        let seen_tokens = sent.max().unwrap_or(0);
        let is_new = u64::from(seen_tokens) * 2 < u64::from(request.prompt_tokens);
        let (share, believed) = self.again.shares();
        let again = self.weight(Term::Again) * share / (1.0 - share);
        let uses = believed / (1.0 - believed);
        let new_prefix = if is_new { self.weight(Term::NewPrefix) * uses * uses } else { 0.0 };
        let room = self.weight(Term::Room) * usual;
        let decode = self.weight(Term::Decode) * DECODE_WORTH * output_tokens;
        let slower = self.weight(Term::Slower) * DECODE_WORTH * output_tokens.min(usual);
        let stall = self.weight(Term::Stall) * STALL_WORTH;
        let behind = self.weight(Term::Behind) * BEHIND;

        let row = cx.cheapest(candidates, |row| {
            let InFlight { requests, prefilling, prefill_tokens, prefill_pairs, .. } = row.load.in_flight;
            let Effect { prefill_s, before_s, with_s } = Effect::of(request, output_tokens, row);
            let decoding = f64::from(requests.saturating_sub(prefilling));
            let prefilling = f64::from(prefilling);
            let queue_s = row.rates.prefill_s(prefill_tokens, prefill_pairs);
            // What does not fit waits until as much has been given back: all of it is, in the time of an answer.
            let room_s = room * with_s * (kv_usage(request, usual, row) - 1.0).max(0.0);
            let others = 1.0 + DECODE_WORTH * decoding + BEHIND * prefilling;
            queue_s
                + prefill_s * (1.0 + stall * decoding + behind * prefilling + again * others)
                + room_s
                + decode * with_s
                + slower * (with_s - before_s) * f64::from(requests)
                + new_prefix * row.rates.prefill_token_s * self.prefixes.tokens(row.endpoint)
        });

        let picked = &candidates[row];
        let uncached = f64::from(picked.uncached_tokens(request));
        self.again.add(seen_tokens, request.prompt_tokens);
        let reported = picked.load.reported.and_then(|(reported, _)| reported.kv_capacity_tokens);
        let capacity = reported.map_or(USUAL_CAPACITY_TOKENS, |tokens| tokens.max(1) as f64);
        let fleet_tokens = capacity * candidates.len() as f64;
        self.prefixes.fade(uncached / (TURNOVERS * fleet_tokens), candidates);
        if is_new {
            self.prefixes.add(picked.endpoint, uncached);
        }
        row
    }
}
