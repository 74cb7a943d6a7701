//! `fleet_cost` (alias `auto`): the lowest marginal cost of the request to the whole fleet, in seconds.
//!
//! The cost of an endpoint is a sum. `q` is the prefill time that is left of the prompts queued there
//! ([`Candidate::queued_s`]), `p` the prefill time of this prompt's uncached tokens, `l` the time to load its cached tokens that
//! are only below the GPU, with the loads before it ([`Candidate::load_s`]; 0 if it needs none), `s` and `s'` the time of a decode step before and with this request, `o` the forecast output
//! tokens, `r` the requests in flight there, of which `f` have no first token yet and `d` decode:
//!
//! | Term | Seconds | Whose time it is |
//! |---|---|---|
//! | first token | `q + l + p` | this request, until its first token |
//! | decode | `1/2 o s'` | this request, after its first token |
//! | slower | `1/2 (s' - s) r min(o, usual)` | requests in flight, whose decode steps get longer |
//! | stall | `3/10 p d` | decoding requests, which stall during this prefill |
//! | behind | `2 p f` | future requests that queue behind the existing queue |
//! | again | `R/(1-R) p (1 + d/2 + 2 f)` | requests whose blocks are evicted and that repeat all of this |
//! | new prefix | `F a` | future requests with a prefix that was not sent before |
//!
//! Rates are the endpoint's own, learned from its answers ([`crate::rates`]); answer lengths are learned too
//! ([`crate::forecast`]). `R`, the share of recent prompt tokens that had been sent before, serves as the probability
//! that a block is needed again: with it evicted blocks are recomputed, which evicts further blocks, and so on, hence
//! `R/(1-R)`. `F`, the same share with a prior for the time before enough was seen, is the probability that a prefix is
//! reused: a prefix that was not sent before will bring that many requests to its endpoint, and each of them finds the
//! usual work there: `a` is what prefixes have brought to the endpoint within about a minute, and by their number should have
//! (`fleet_cost/future.rs`). So a new prefix goes to an endpoint with capacity for its future requests, not to one that is
//! idle only at this moment.
//!
//! A load stalls no answers and delays no prompt that needs none, so it has no terms "stall" and "behind". Loaded blocks take
//! room on the GPU as computed ones do, but an engine with a lower tier keeps there what it evicts, so a load makes nothing be
//! computed again. That what it evicts may be loaded again, `R/(1-R) l`, is left out: with it, chats in front of a tier of 3 GB/s
//! find 1 % fewer of their tokens cached, and no figure is better beyond the noise.
//!
//! All workload properties are measured: rates, lengths, shares. Four weights remain, the same for all workloads,
//! which compare seconds: one between output tokens counts half as much as one before the first token, one of stall
//! three tenths, each queued request stands for two that will queue behind this one, and a second that a prefix should
//! bring counts twice. docs/placement.md quantifies each term, docs/decisions/0010-fleet-cost.md lists the alternatives tried.
//!
//! Where a request may be split between two endpoints, each way to serve it has a price. Of a split, the endpoint that
//! computes the prompt has the terms before the first token, the one that answers has the others, and in addition there
//! are
//!
//! | Term | Seconds | Whose time it is |
//! |---|---|---|
//! | transfer | its learned mean | this request, until its first token |
//! | second step | `3/2 s'` | this request, which waits for a step of the other endpoint too |
//! | its step | see [`Terms::step_s`] | this request, which waits for a prompt that is computed where it is decoded |
//! | copy | `R/(1-R) p (1 + d/2 + 2 f)` | requests whose blocks the copy evicts, as "again" |
//! | room | see [`Terms::room_s`] | this request and those behind it, until an endpoint has room |
//! | interrupted | `s' o i/(1-i) s/s0` | this request, whose decoding stalls during later prefills |
//!
//! and the sum has to be 2 % less than that of a whole request.
//!
//! "Room" and "interrupted" apply to whole requests there, too, and "room" to the endpoint that computes the prompt: blocks
//! that have two copies fill caches sooner. `i` is the share of the last seconds that an endpoint's prompts have kept it
//! from decoding. And the stall is `(p - s) d`: a prompt stalls answers for as long as its arithmetic exceeds the time in
//! which a step reads the weights anyway. Stall and "interrupted" are multiplied by `s/s0`, where `s0` is a step without
//! requests: answers that stay longer lengthen the steps of all. In a fleet where every endpoint does everything, these are
//! the same everywhere and would not change a choice between endpoints; here they are what a split saves. Endpoints that
//! have happened to compute prompts get fewer answers and so more prompts: a fleet divides itself as far as that pays.
//!
//! A request that names an adapter (LoRA) has further terms, of the load that it may cause: see `fleet_cost/adapters.rs`.
//!
//! Known limits: what a computed prompt evicts counts as computed again, although an engine with a lower tier may load it.
//! In a mixed fleet with free capacity, long prompts go to the slower machines too, which improves the mean and worsens the
//! longest waits.

mod adapters;
mod future;
mod shortlist;

use serde::{Deserialize, Serialize};

use self::future::{Brings, Future, Prices};
use super::{Candidate, CostUnit, Pairs, Pick, PickContext, Policy, Reason, SplitTerms};
use crate::columns::{Column, Fleet};
use crate::disaggregation::Part;
use crate::endpoint::EndpointId;
use crate::load::InFlight;
use crate::rates::STEP_TOKENS;
use crate::request::SchedulingRequest;
use crate::table::ByEndpoint;
use crate::time::Nanos;

/// No tuning parameters. A term can be left out to measure its effect.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// A term to leave out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub without: Option<Term>,
}

/// A term of the cost. See the module documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Term {
    /// Decoding of the request itself.
    Decode,
    /// Longer decode steps of other requests.
    Slower,
    /// Stalls of decoding requests.
    Stall,
    /// Waits of later requests.
    Behind,
    /// Recomputation of evicted blocks.
    Again,
    /// Future requests with a new prefix.
    NewPrefix,
}

/// Weight of a second between two tokens, relative to a second before the first token.
const DECODE_WORTH: f64 = 0.5;
/// Weight of a second in which decoding requests stall. Low, since a stall is short and occurs wherever the prompt
/// goes.
const STALL_WORTH: f64 = 0.3;
/// Expected later requests that queue behind this one, per request queued before it.
const BEHIND: f64 = 2.0;

/// Upper bound of the reuse share.
const AGAIN_SHARE_MAX: f64 = 0.95;
/// Time constant of the reuse share, in requests.
const MEMORY_REQUESTS: f64 = 256.0;
/// Prior of the reuse share, and its weight in prompt tokens.
const PRIOR_SHARE: f64 = 0.5;
const PRIOR_TOKENS: f64 = 100_000.0;
/// Endpoints of each leg whose pairs are priced.
const PRICED_MAX: usize = 8;

/// Weight of a second in which decoding requests stall, where that can be avoided by computing the prompt elsewhere. With
/// 1/2, no fleet divides itself, and workloads with long prompts take 15 % longer (E2E, questions about documents).
const SPLIT_STALL_WORTH: f64 = 1.0;
/// Time constant of the share of time in which an endpoint's prompts keep it from decoding. With 90 s the division of a
/// fleet forms too slowly.
const STALL_MEMORY_S: f64 = 15.0;
/// Largest such share.
const STALL_SHARE_MAX: f64 = 0.9;
/// Share of its price by which a split has to be cheaper than a whole request: what is less is within the error of the
/// forecast, while the second step that the first token waits for is certain. With 0, requests with long answers are
/// split to save a thousandth of their price, and their time to first token doubles.
const SPLIT_MARGIN: f64 = 0.02;
/// Largest share of its price by which a router with peers disfavours an endpoint for a new prompt. 8 gateways in front of 240 engines
/// (scenario `replicas-240`): a mean time to first token of 74 ms and 34.5 % cached without, 63 ms and 34.8 % with it. For all prompts it is 62 ms
/// and 33.5 %, and fewer follow-ups go to the endpoint that holds their prefix.
const PREFERENCE: f64 = 0.1;
/// Decode steps for which a request waits at the endpoint that its blocks come to: half of the one in progress, and its
/// own.
const STEPS_AFTER_TRANSFER: f64 = 1.5;

/// The policy, with the reuse share and what was placed on each endpoint.
pub struct FleetCost {
    without: Option<Term>,
    again: Again,
    future: Future,
    /// Seconds for which prompts placed on each endpoint keep it from decoding.
    stalls: ByEndpoint<Stalls>,
    /// For requests with an adapter.
    excess: adapters::Excess,
    /// Prices of [`Policy::shortlist`]: those of a chunk, and the least of them.
    costs: Vec<(Column, f32)>,
}

/// Share of prompt tokens that had been sent before, as decaying sums.
#[derive(Debug, Default)]
struct Again {
    seen_tokens: f64,
    prompt_tokens: f64,
}

/// Seconds for which prompts keep an endpoint from decoding, as of a time.
#[derive(Clone, Copy, Debug, Default)]
struct Stalls {
    secs: f64,
    at: Nanos,
}

/// Effect of placing a request on an endpoint, in seconds.
struct Effect {
    /// Prefill of its uncached tokens.
    prefill_s: f64,
    /// A decode step without the request, and with it.
    before_s: f64,
    with_s: f64,
}

/// The weights of the terms in one decision.
struct Terms<'a> {
    request: &'a SchedulingRequest,
    now: Nanos,
    output_tokens: f64,
    usual: f64,
    decode: f64,
    slower: f64,
    stall: f64,
    /// Whether the request may be split.
    may_split: bool,
    behind: f64,
    again: f64,
    new_prefix: Option<Prices>,
    /// What it brings to its endpoint.
    brings: Brings,
    /// [`PickContext::peers`], for a prompt that no endpoint has seen most of.
    peers: Option<u64>,
}

/// The rows with the lowest costs, the lowest first. Pairs are priced among them only: the price of a pair is the sum of
/// two rows' and of a transfer's, which seldom differs by more than rows do.
#[derive(Default)]
struct Best {
    rows: [(f64, usize); PRICED_MAX],
    len: usize,
}

// === impl Again ===

impl Again {
    /// The measured reuse share, and the share with the prior.
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

// === impl Stalls ===

impl Stalls {
    /// The decayed seconds. A Taylor series of the exponential to second order.
    fn secs(&self, now: Nanos) -> f64 {
        let spans = (now - self.at).as_secs_f64() / STALL_MEMORY_S;
        self.secs / (1.0 + spans + 0.5 * spans * spans)
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

impl Effect {
    /// Seconds for which the prompt keeps others from decoding, beyond the time of a step, which hides arithmetic.
    fn stalled_s(&self) -> f64 {
        (self.prefill_s - self.before_s).max(0.0)
    }

    /// Total delay of answers for each second by which all of an endpoint's answers are delayed. Delayed answers stay in the
    /// batch, which lengthens its steps and delays them further. With a constant stream of answers their number grows with
    /// the time of a step, which is `s0 + c n`: so the sum of it all is `s / s0`.
    fn growth(&self, row: &Candidate) -> f64 {
        if row.rates.step_s > 0.0 { (self.before_s / row.rates.step_s).max(1.0) } else { 1.0 }
    }
}

/// The cost to the fleet of placing a request on an endpoint, in seconds, as far as the row determines it: the terms
/// first token, decode, slower, stall and behind. Excludes the terms that depend on the policy's own state, so it can
/// compare any policies.
pub fn seconds(request: &SchedulingRequest, output_tokens: u32, usual_output_tokens: f64, row: &Candidate) -> f64 {
    let output_tokens = f64::from(output_tokens);
    let in_flight = row.load.in_flight;
    let InFlight { requests, prefilling, .. } = in_flight;
    let Effect { prefill_s, before_s, with_s } = Effect::of(request, output_tokens, row);
    let decoding = f64::from(in_flight.decoding());
    row.queued_s()
        + row.load_s()
        + prefill_s * (1.0 + STALL_WORTH * decoding + BEHIND * f64::from(prefilling))
        + DECODE_WORTH * output_tokens * with_s
        + DECODE_WORTH * output_tokens.min(usual_output_tokens) * (with_s - before_s) * f64::from(requests)
}

/// The most prompt tokens that one of these endpoints was sent before.
fn seen_tokens(candidates: &[Candidate]) -> u32 {
    candidates.iter().map(Candidate::sent_tokens).max().unwrap_or(0)
}

// === impl FleetCost ===

impl FleetCost {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self {
            without: config.without,
            again: Again::default(),
            future: Future::default(),
            stalls: ByEndpoint::default(),
            excess: adapters::Excess::default(),
            costs: Vec::new(),
        }
    }

    /// What later requests with a new prefix will meet at an endpoint, in seconds.
    fn met_s(&self, terms: &Terms<'_>, id: EndpointId) -> f64 {
        terms.new_prefix.map_or(0.0, |prices| self.future.secs(id, &prices))
    }

    /// Seconds by which a second of decoding at an endpoint gets longer because of prompts that are computed there.
    fn interrupted(&self, id: EndpointId, now: Nanos) -> f64 {
        let stalls_s = self.stalls.get(id).map_or(0.0, |stalls| stalls.secs(now));
        let share = (stalls_s / STALL_MEMORY_S).min(STALL_SHARE_MAX);
        share / (1.0 - share)
    }

    /// One, or zero for a term that is left out.
    fn weight(&self, term: Term) -> f64 {
        f64::from(u8::from(self.without != Some(term)))
    }

    /// The weights of a decision. `seen_tokens` are the most prompt tokens that an endpoint was sent before.
    fn terms<'a>(&self, cx: &PickContext<'a>, seen_tokens: u32) -> Terms<'a> {
        let (output_tokens, usual) = (f64::from(cx.output_tokens), cx.usual_output_tokens);
        let is_new = u64::from(seen_tokens) * 2 < u64::from(cx.request.prompt_tokens);
        let (share, believed) = self.again.shares();
        let uses = believed / (1.0 - believed);
        Terms {
            request: cx.request,
            now: cx.now,
            output_tokens,
            usual,
            decode: self.weight(Term::Decode) * DECODE_WORTH * output_tokens,
            slower: self.weight(Term::Slower) * DECODE_WORTH * output_tokens.min(usual),
            stall: self.weight(Term::Stall) * STALL_WORTH,
            may_split: false,
            behind: self.weight(Term::Behind) * BEHIND,
            again: self.weight(Term::Again) * share / (1.0 - share),
            new_prefix: (is_new && cx.adapter.is_none())
                .then(|| self.future.prices(cx.now, self.weight(Term::NewPrefix) * uses)),
            brings: if is_new { Brings::Prefix { tokens: cx.request.prompt_tokens } } else { Brings::Repeat },
            peers: cx.peers.filter(|_| is_new),
        }
    }

    /// Adds a placed request to the reuse share and to the work of its endpoints, which it returns.
    fn placed(
        &mut self,
        terms: &Terms<'_>,
        seen_tokens: u32,
        row: &Candidate,
        prefill: Option<&Candidate>,
    ) -> [Option<(EndpointId, f64)>; 2] {
        self.again.add(seen_tokens, terms.request.prompt_tokens);
        let Effect { prefill_s, with_s, .. } = terms.effect(row);
        let shared_s = terms.output_tokens * with_s / (f64::from(row.load.in_flight.requests) + 1.0);
        let Some(prefill) = prefill else {
            let work_s = prefill_s + shared_s;
            self.future.add(row.endpoint, terms.now, terms.brings, work_s);
            return [Some((row.endpoint, work_s)), None];
        };
        let prefill_s = terms.effect(prefill).prefill_s;
        self.future.add(prefill.endpoint, terms.now, Brings::Work, prefill_s);
        self.future.add(row.endpoint, terms.now, terms.brings, shared_s);
        [Some((prefill.endpoint, prefill_s)), Some((row.endpoint, shared_s))]
    }

    /// Adds the stall of answers at the endpoint that computes a prompt.
    fn add_stall(&mut self, terms: &Terms<'_>, computes: &Candidate) {
        let stalls = self.stalls.get_or_insert(computes.endpoint, Stalls::default);
        let secs = stalls.secs(terms.now) + terms.effect(computes).stalled_s();
        *stalls = Stalls { secs, at: terms.now };
    }
}

// === impl Terms ===

impl Terms<'_> {
    fn effect(&self, row: &Candidate) -> Effect {
        Effect::of(self.request, self.output_tokens, row)
    }

    /// Seconds for the recomputation of blocks that this prompt evicts, relative to its prefill.
    fn evicted(&self, in_flight: &InFlight) -> f64 {
        self.again
            * (1.0 + DECODE_WORTH * f64::from(in_flight.decoding()) + BEHIND * f64::from(in_flight.prefilling))
    }

    /// Seconds before the first token, of this request and of others, if the prompt is computed here.
    fn first_token_s(&self, row: &Candidate, effect: &Effect) -> f64 {
        let in_flight = &row.load.in_flight;
        let decoding = f64::from(in_flight.decoding());
        let stalled_s = if self.may_split { effect.stalled_s() * effect.growth(row) } else { effect.prefill_s };
        row.queued_s()
            + row.load_s()
            + effect.prefill_s * (1.0 + self.behind * f64::from(in_flight.prefilling) + self.evicted(in_flight))
            + self.stall * stalled_s * decoding
    }

    /// The cost if one endpoint does both.
    fn alone_s(&self, row: &Candidate, met_s: impl Fn(EndpointId) -> f64) -> f64 {
        let effect = self.effect(row);
        let Effect { before_s, with_s, .. } = effect;
        self.first_token_s(row, &effect)
            + self.decode * with_s
            + self.slower * (with_s - before_s) * f64::from(row.load.in_flight.requests)
            + met_s(row.endpoint)
    }

    /// The cost of a prompt that is decoded elsewhere. Its endpoint holds the blocks until they have arrived there.
    fn prompt_s(&self, row: &Candidate) -> f64 {
        let effect = self.effect(row);
        self.first_token_s(row, &effect) + self.room_s(row, 0.0, effect.with_s)
    }

    /// The cost of an answer whose prompt was computed elsewhere: its blocks are a copy that evicts others, and it waits
    /// until there is room for them. The next turn, with this answer, is for this endpoint.
    fn answer_s(&self, row: &Candidate, met_s: impl Fn(EndpointId) -> f64) -> f64 {
        let effect = self.effect(row);
        let Effect { before_s, with_s, .. } = effect;
        self.second_leg(row, &effect).second_leg_s()
            + self.decode * with_s
            + self.slower * (with_s - before_s) * f64::from(row.load.in_flight.requests)
            + met_s(row.endpoint)
    }

    /// What an answer costs before its decoding, whose prompt was computed elsewhere.
    fn second_leg(&self, row: &Candidate, effect: &Effect) -> SplitTerms {
        SplitTerms {
            second_step_s: self.step_s(row) + STEPS_AFTER_TRANSFER * effect.with_s,
            copy_s: effect.prefill_s * self.evicted(&row.load.in_flight),
            room_s: self.room_s(row, self.output_tokens, effect.with_s),
            ..SplitTerms::default()
        }
    }

    /// Seconds of the prompts in the step that is in progress, if prompts are queued here: blocks that arrive meanwhile wait
    /// for its end.
    fn step_s(&self, row: &Candidate) -> f64 {
        let InFlight { prefill_tokens, prefill_pairs, .. } = row.load.in_flight;
        let share = STEP_TOKENS as f64 / prefill_tokens.max(STEP_TOKENS) as f64;
        share * row.rates.prefill_s(prefill_tokens, prefill_pairs)
    }

    /// Seconds until answers in flight have freed enough of the KV cache for this request with `output_tokens`, by the
    /// capacity that the engine reports: each answer holds its context until it has its usual length, and what exceeds the
    /// capacity holds nothing yet. Engines admit requests in order, so those queued here and behind them wait as long.
    fn room_s(&self, row: &Candidate, output_tokens: f64, step_s: f64) -> f64 {
        let reported = row.load.reported.and_then(|(reported, _)| reported.kv_capacity_tokens);
        let Some(capacity) = reported.filter(|&capacity| capacity > 0) else { return 0.0 };
        let InFlight { context_tokens, prefilling, .. } = row.load.in_flight;
        let own_tokens = f64::from(self.request.prompt_tokens) + output_tokens;
        let missing = context_tokens as f64 + own_tokens - capacity as f64;
        if missing <= 0.0 || context_tokens == 0 {
            return 0.0;
        }
        let wait_s = missing / context_tokens.min(capacity) as f64 * self.usual * step_s;
        wait_s * (1.0 + self.behind * f64::from(prefilling))
    }
}

// === impl Best ===

impl Best {
    /// Keeps a row if it is among the cheapest.
    fn offer(&mut self, cost: f64, row: usize) {
        let at = self.rows[..self.len].partition_point(|&(other, _)| other <= cost);
        if at == self.rows.len() {
            return;
        }
        self.len = (self.len + 1).min(self.rows.len());
        self.rows[at..self.len].rotate_right(1);
        self.rows[at] = (cost, row);
    }

    fn rows(&self) -> &[(f64, usize)] {
        &self.rows[..self.len]
    }
}

/// The factor on an endpoint's price where other routers place by the same news: each prefers other endpoints, so that not all
/// of them take the cheapest one before they hear of each other.
fn preference(peers: Option<u64>, slot: usize) -> f64 {
    let Some(salt) = peers else { return 1.0 };
    let mixed = (salt ^ slot as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 32)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    1.0 + PREFERENCE * (mixed >> 11) as f64 / (1_u64 << 53) as f64
}

impl Policy for FleetCost {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        cx.reason = Reason::LowestCost;
        let seen_tokens = seen_tokens(candidates);
        let terms = self.terms(cx, seen_tokens);
        let cost = |row: &Candidate| {
            terms.alone_s(row, |id| self.met_s(&terms, id)) * preference(terms.peers, row.endpoint.slot())
        };
        let row = match self.adapter_price(cx.adapter, candidates) {
            None => cx.cheapest(candidates, cost),
            Some(price) => {
                let at = cx.cheapest_at(candidates, |at, row| cost(row) + price.secs(at, row));
                self.excess.add(cx.request, candidates);
                at
            }
        };
        cx.work = self.placed(&terms, seen_tokens, &candidates[row], None);
        row
    }

    fn cost_unit(&self) -> CostUnit {
        CostUnit::Seconds
    }

    fn pick_split(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate], pairs: Pairs<'_>) -> Option<Pick> {
        cx.reason = Reason::LowestCost;
        let seen_tokens = seen_tokens(candidates);
        let terms = self.terms(cx, seen_tokens);
        let terms = Terms { stall: self.weight(Term::Stall) * SPLIT_STALL_WORTH, may_split: true, ..terms };
        let met_s = |id| self.met_s(&terms, id);
        let interrupted_s = |row: &Candidate| {
            let stalls = self.weight(Term::Stall) * self.interrupted(row.endpoint, terms.now);
            let effect = terms.effect(row);
            stalls * effect.growth(row) * terms.output_tokens * effect.with_s
        };
        let price = self.adapter_price(cx.adapter, candidates);
        let load_s = |row: &Candidate| price.as_ref().map_or(0.0, |price| price.secs_of(candidates, row));
        let alone_s = |row: &Candidate| {
            let room_s = terms.room_s(row, terms.output_tokens, terms.effect(row).with_s);
            terms.alone_s(row, met_s) + room_s + interrupted_s(row) + load_s(row)
        };
        let answer_s = |row: &Candidate| terms.answer_s(row, met_s) + interrupted_s(row) + load_s(row);
        let may_serve = |row: &Candidate| row.part.may_serve_alone();
        let alone = cx.cheapest_of(candidates, may_serve, alone_s);
        let mut best = alone.map(|row| (alone_s(&candidates[row]) / (1.0 + SPLIT_MARGIN), Pick::alone(row)));
        let cheapest = |may: fn(&Part) -> bool, cost: &dyn Fn(&Candidate) -> f64| {
            let mut best = Best::default();
            for (row, candidate) in candidates.iter().enumerate().filter(|(_, row)| may(&row.part)) {
                best.offer(cost(candidate), row);
            }
            best
        };
        let prefills = cheapest(Part::may_prefill, &|row| terms.prompt_s(row) + load_s(row));
        let decodes = cheapest(Part::may_decode, &answer_s);
        for &(prompt_s, prefill) in prefills.rows() {
            for &(answer_s, row) in decodes.rows() {
                let (from, to) = (&candidates[prefill], &candidates[row]);
                // Where no endpoint serves alone, a full pair is better than none.
                if !from.can_prefill_for(to) || alone.is_some() && !pairs.has_room(from, to) {
                    continue;
                }
                let transfer_s = pairs.transfer_s(cx.request, from, to);
                let cost_s = prompt_s + answer_s + transfer_s;
                cx.note_pair(prefill, row, cost_s, || {
                    let interrupted_s = interrupted_s(to);
                    let split = SplitTerms { prompt_s, transfer_s, interrupted_s, ..terms.second_leg(to, &terms.effect(to)) };
                    SplitTerms { decode_s: answer_s - split.second_leg_s(), ..split }
                });
                if best.is_none_or(|(least_s, _)| cost_s < least_s) {
                    best = Some((cost_s, Pick { row, prefill: Some(prefill) }));
                }
            }
        }
        let (_, pick) = best?;
        let prefill = pick.prefill.map(|row| &candidates[row]);
        self.add_stall(&terms, prefill.unwrap_or(&candidates[pick.row]));
        cx.work = self.placed(&terms, seen_tokens, &candidates[pick.row], prefill);
        Some(pick)
    }

    fn shortlist(&mut self, cx: &mut PickContext<'_>, fleet: &Fleet<'_>, listed: &mut Vec<u16>) {
        self.list(cx, fleet, listed);
    }

    fn has_shortlist(&self) -> bool {
        true
    }

    fn placed_elsewhere(&mut self, now: Nanos, endpoint: EndpointId, work_s: f64) {
        self.future.add(endpoint, now, Brings::Work, work_s);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Case, picks};
    use super::*;
    use crate::rates::Rates;

    const FLEET_COST: &str = r#"{"name":"fleet_cost"}"#;

    /// The costs of the rows.
    fn costs(case: &mut Case) -> Vec<f64> {
        case.pick();
        case.costs.clone()
    }

    #[test]
    fn routers_with_peers_prefer_other_endpoints_and_one_alone_prefers_none() {
        let favourite = |salt| {
            let factors: Vec<f64> = (0..64).map(|slot| preference(Some(salt), slot)).collect();
            assert!(factors.iter().all(|factor| (1.0..1.0 + PREFERENCE).contains(factor)), "{factors:?}");
            (0..64).min_by(|a, b| factors[*a].total_cmp(&factors[*b]))
        };
        let favourites: std::collections::BTreeSet<_> = (1..=8).map(favourite).collect();
        assert!(favourites.len() > 5, "{favourites:?}");
        assert_eq!(preference(None, 1), 1.0);
    }

    /// Invariant: The cost of `fleet_cost` is the sum of the terms in its table, and each term can be disabled.
    ///
    /// Also held by `a_term_can_be_left_out`.
    #[test]
    fn each_term_is_as_the_table_says() {
        // Overlap, requests, queued prefill tokens, context tokens.
        let mut case = Case::new("fleet_cost", 1000, &[(400, 5, 300, 9000)]);
        let load = &mut case.rows[0].load.in_flight;
        (load.prefilling, load.prefill_pairs, load.lower_tokens) = (2, 50_000, 700);
        case.rows[0].lower_tokens = 100;
        let rates = Rates {
            prefill_token_s: 1e-4,
            prefill_pair_s: 1e-8,
            load_token_s: 2e-5,
            step_s: 0.01,
            sequence_s: 1e-4,
            context_token_s: 1e-7,
            request_s: 0.0,
            wait_steps: 0.0,
        };
        case.rows[0].rates = rates;
        let (queue_s, prefill_s) = (0.03 + 0.0005, 0.06 + 1e-8 * (600.0 * 400.0 + 600.0 * 601.0 / 2.0));
        let (before_s, with_s) = (0.01 + 5e-4 + 9e-4, 0.01 + 6e-4 + 1e-7 * (9000.0 + 1000.0 + 100.0));
        // Before any observation, `R` is 0 and `F` is 1; without placed work there is no new-prefix term.
        let expected = queue_s
            + 2e-5 * (700.0 + 100.0)
            + prefill_s * (1.0 + 0.3 * 3.0 + 2.0 * 2.0)
            + 0.5 * 200.0 * with_s
            + 0.5 * (with_s - before_s) * 5.0 * 200.0;
        let cost = costs(&mut case)[0];
        assert!((cost / expected - 1.0).abs() < 1e-9, "{cost} {expected}");
    }

    #[test]
    fn an_idle_endpoint_that_holds_the_prompt_is_picked() {
        assert_eq!(picks(FLEET_COST, 8000, &[(0, 0, 0, 0), (8000, 0, 0, 0)]), [(1, Reason::LowestCost)]);
        assert_eq!(picks(FLEET_COST, 8000, &[(0, 9, 90_000, 90_000), (0, 0, 0, 0)]), [(1, Reason::LowestCost)]);
    }

    #[test]
    fn a_hit_is_worth_a_queue_but_not_any_queue() {
        let with_queue = |tokens| picks(FLEET_COST, 8000, &[(8000, 1, tokens, 8000), (0, 0, 0, 0)]);
        assert_eq!(with_queue(2000), [(0, Reason::LowestCost)]);
        assert_eq!(with_queue(200_000), [(1, Reason::LowestCost)]);
    }

    #[test]
    fn a_prefix_to_load_costs_more_than_one_on_the_gpu_and_less_than_one_to_compute() {
        let mut case = Case::new("fleet_cost", 8000, &[(6000, 3, 0, 9000), (6000, 3, 0, 9000), (0, 3, 0, 9000)]);
        case.rows[1].lower_tokens = 6000;
        // Without loads in front of it, and with prompts that come again.
        for _ in 0..300 {
            let costs = costs(&mut case);
            assert!(costs[0] < costs[1] && costs[1] < costs[2], "{costs:?}");
        }
        // Loads before its own delay it, and no prompt that needs none.
        let before = costs(&mut case);
        case.rows.iter_mut().for_each(|row| row.load.in_flight.lower_tokens = 50_000);
        let after = costs(&mut case);
        let more: Vec<f64> = before.iter().zip(&after).map(|(before, after)| after - before).collect();
        let load_s = 50_000.0 * Rates::default().load_token_s;
        let rest = [more[0], more[1] - load_s, more[2]];
        assert!(rest.iter().all(|more_s| more_s.abs() < 0.1 * load_s), "{more:?} {load_s}");
        // A tier that is slower than computing is not worth going to.
        case.rows.iter_mut().for_each(|row| row.rates.load_token_s = 10.0 * row.rates.prefill_token_s);
        case.rows[0].lower_tokens = 6000;
        assert_eq!(case.pick().0, 2);
    }

    #[test]
    fn the_more_prompts_come_again_the_more_a_hit_is_worth() {
        let stays = |seen: u32| {
            let mut case = Case::new("fleet_cost", 4000, &[(seen, 0, 0, 0), (0, 0, 0, 0)]);
            (0..500).for_each(|_| _ = case.pick());
            case.rows[0].load.in_flight.requests = 10;
            case.rows[0].load.in_flight.context_tokens = 40_000;
            case.rows[0].overlap_tokens = 3900;
            case.pick().0
        };
        assert_eq!((stays(0), stays(3900)), (1, 0));
    }

    #[test]
    fn new_prefixes_go_in_turn_before_their_load_can_be_seen() {
        let mut case = Case::new("fleet_cost", 4000, &[(0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)]);
        let mut given: Vec<usize> = (0..9).map(|_| case.pick().0).collect();
        given.sort_unstable();
        assert_eq!(given, [0, 0, 0, 1, 1, 1, 2, 2, 2]);
    }

    #[test]
    fn a_slower_machine_gets_fewer_prompts() {
        let mut case = Case::new("fleet_cost", 4000, &[(0, 0, 0, 0), (0, 0, 0, 0)]);
        let rates = &mut case.rows[1].rates;
        rates.prefill_token_s *= 3.0;
        rates.step_s *= 1.6;
        assert_eq!(case.pick().0, 0);
    }

    #[test]
    fn a_term_can_be_left_out() {
        let cost = |without: &str| {
            let config = format!(r#"{{"name":"fleet_cost","without":{without}}}"#);
            let config = serde_json::from_str(&config).expect("a policy");
            let mut case = Case::of(&config, 1000, &[(0, 5, 300, 9000)]);
            case.rows[0].load.in_flight.prefilling = 2;
            (0..300).for_each(|_| _ = case.pick());
            case.rows[0].overlap_tokens = 800;
            (0..300).for_each(|_| _ = case.pick());
            case.rows[0].overlap_tokens = 0;
            costs(&mut case)[0]
        };
        let whole = cost("null");
        for term in ["decode", "slower", "stall", "behind", "again", "new_prefix"] {
            assert!(cost(&format!("\"{term}\"")) < whole, "{term}");
        }
    }
}
