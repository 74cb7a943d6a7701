//! `fleet_cost` (alias `auto`): what a request costs the whole fleet, in seconds, wherever it could go; the least wins.
//!
//! The cost of an endpoint is a sum. With `q` the seconds of computing queued there, `p` those of what this prompt has
//! uncached there, `s` and `s'` the seconds of a decode step before and with this request, `o` the output tokens
//! expected of it, `r` the requests in flight there, of which `f` have no first token yet and `d` decode:
//!
//! | Term | Seconds | Whose time it is |
//! |---|---|---|
//! | first token | `q + p` | the request's own, until its first token |
//! | decode | `1/2 o s'` | its own, from there on |
//! | slower | `1/2 (s' - s) r min(o, usual)` | those in flight, whose steps it lengthens |
//! | stall | `3/10 p d` | those that decode, and stand still while it is computed |
//! | behind | `2 p f` | those that come into a queue which is there already |
//! | again | `R/(1-R) p (1 + d/2 + 2 f)` | those whose blocks it evicts, and who do all this again |
//! | new prefix | `F a` | those to come for a prefix that nobody has been sent before |
//!
//! Rates are the endpoint's own, learned from its answers ([`crate::rates`]); lengths of answers are learned too
//! ([`crate::forecast`]). `R`, the share of recent prompt tokens that had been sent before, is taken for the
//! probability that a block is wanted again: what is evicted is computed again with it, which evicts something else, and
//! so on, hence `R/(1-R)`. `F`, the same with a prior for the time before much was seen, is how often a prefix is used
//! again: a prefix that nobody has been sent before will bring that many requests to wherever it is put, and each of them finds
//! the work that is usual there: `a` is the seconds of work that the endpoint was given within about a minute. So a new
//! prefix goes where its future fits, not where it is quiet this millisecond.
//!
//! What a workload could set by itself is measured: rates, lengths, shares. What is left are three weights that say what
//! a second is worth to whom, the same for all workloads: one between tokens is worth half of one before the first
//! token, one of stall three tenths of it, and behind one that waits there will be two. docs/placement.md says what each
//! term is worth, docs/decisions/0010-fleet-cost.md what else was tried.
//!
//! Known limits: a block in a lower tier counts as held. In a mixed fleet with room, long prompts go to the slower
//! machines too, which is better on average and worse for the longest waits.

use serde::{Deserialize, Serialize};

use super::{Candidate, PickContext, Policy, Reason};
use crate::endpoint::EndpointId;
use crate::load::InFlight;
use crate::request::SchedulingRequest;
use crate::table::ByEndpoint;
use crate::time::Nanos;

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

/// The most that is believed of how often prompt tokens come again.
const AGAIN_SHARE_MAX: f64 = 0.95;
/// Requests after which the shares of prompt tokens follow rather than gather.
const MEMORY_REQUESTS: f64 = 256.0;
/// What is believed of how often a new prefix comes again before so many prompt tokens have been seen: half of it.
const PRIOR_SHARE: f64 = 0.5;
const PRIOR_TOKENS: f64 = 100_000.0;
/// How long work counts as what is usual at an endpoint: it fades to less than a half in so many seconds.
const WORK_MEMORY_S: f64 = 60.0;

/// The policy: it remembers how often prompts come again, and who was given how much work.
pub struct FleetCost {
    without: Option<Term>,
    again: Again,
    work: ByEndpoint<Work>,
}

/// How much of the prompts had been sent before: sums that forget.
#[derive(Debug, Default)]
struct Again {
    seen_tokens: f64,
    prompt_tokens: f64,
}

/// Seconds of work that an endpoint was given, as of a time.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    secs: f64,
    at: Nanos,
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

// === impl Work ===

impl Work {
    /// What is left of it. The series of the exponential to its second term: the same on every machine.
    fn secs(&self, now: Nanos) -> f64 {
        let spans = (now - self.at).as_secs_f64() / WORK_MEMORY_S;
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

/// What placing a request at an endpoint costs the fleet, in seconds, as far as the row tells: the terms first token,
/// decode, slower, stall and behind. What depends on what the policy remembers is left out, so it measures any policy.
pub fn seconds(request: &SchedulingRequest, output_tokens: u32, usual_output_tokens: f64, row: &Candidate) -> f64 {
    let output_tokens = f64::from(output_tokens);
    let InFlight { requests, prefilling, prefill_tokens, prefill_pairs, .. } = row.load.in_flight;
    let Effect { prefill_s, before_s, with_s } = Effect::of(request, output_tokens, row);
    let decoding = f64::from(requests.saturating_sub(prefilling));
    row.rates.prefill_s(prefill_tokens, prefill_pairs)
        + prefill_s * (1.0 + STALL_WORTH * decoding + BEHIND * f64::from(prefilling))
        + DECODE_WORTH * output_tokens * with_s
        + DECODE_WORTH * output_tokens.min(usual_output_tokens) * (with_s - before_s) * f64::from(requests)
}

// === impl FleetCost ===

impl FleetCost {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self { without: config.without, again: Again::default(), work: ByEndpoint::default() }
    }

    fn work_s(&self, id: EndpointId, now: Nanos) -> f64 {
        self.work.get(id).map_or(0.0, |work| work.secs(now))
    }

    /// One, or zero for a term that is left out.
    fn weight(&self, term: Term) -> f64 {
        f64::from(u8::from(self.without != Some(term)))
    }
}

impl Policy for FleetCost {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        cx.reason = Reason::LowestCost;
        let (request, now) = (cx.request, cx.now);
        let (output_tokens, usual) = (f64::from(cx.output_tokens), cx.usual_output_tokens);
        let sent = candidates.iter().map(|row| row.prediction.approximate.max(row.overlap_tokens));
        let seen_tokens = sent.max().unwrap_or(0);
        let is_new = u64::from(seen_tokens) * 2 < u64::from(request.prompt_tokens);
        let (share, believed) = self.again.shares();
        let again = self.weight(Term::Again) * share / (1.0 - share);
        let uses = believed / (1.0 - believed);
        let new_prefix = if is_new { self.weight(Term::NewPrefix) * uses } else { 0.0 };
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
            let others = 1.0 + DECODE_WORTH * decoding + BEHIND * prefilling;
            queue_s
                + prefill_s * (1.0 + stall * decoding + behind * prefilling + again * others)
                + decode * with_s
                + slower * (with_s - before_s) * f64::from(requests)
                + new_prefix * self.work_s(row.endpoint, now)
        });

        self.again.add(seen_tokens, request.prompt_tokens);
        let Candidate { endpoint, load, .. } = candidates[row];
        let Effect { prefill_s, with_s, .. } = Effect::of(request, output_tokens, &candidates[row]);
        let shared_s = output_tokens * with_s / (f64::from(load.in_flight.requests) + 1.0);
        let secs = self.work_s(endpoint, now) + prefill_s + shared_s;
        *self.work.get_or_insert(endpoint, Work::default) = Work { secs, at: now };
        row
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
    fn each_term_is_as_the_table_says() {
        // Overlap, requests, queued prefill tokens, context tokens.
        let mut case = Case::new("fleet_cost", 1000, &[(400, 5, 300, 9000)]);
        let load = &mut case.rows[0].load.in_flight;
        (load.prefilling, load.prefill_pairs) = (2, 50_000);
        let rates = Rates {
            prefill_token_s: 1e-4,
            prefill_pair_s: 1e-8,
            step_s: 0.01,
            sequence_s: 1e-4,
            context_token_s: 1e-7,
        };
        case.rows[0].rates = rates;
        let (queue_s, prefill_s) = (0.03 + 0.0005, 0.06 + 1e-8 * (600.0 * 400.0 + 600.0 * 601.0 / 2.0));
        let (before_s, with_s) = (0.01 + 5e-4 + 9e-4, 0.01 + 6e-4 + 1e-7 * (9000.0 + 1000.0 + 100.0));
        // Nothing was seen yet, so `R` is 0 and `F` is 1; no work was given, so there is no term for a new prefix.
        let expected = queue_s
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
