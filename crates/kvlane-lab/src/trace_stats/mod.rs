//! Statistics of a trace: arrivals, lengths, hits of a prefix cache and the capacity needed for them.
//!
//! One pass, in memory that grows with the requests and not with their blocks. Blocks are full ones, hits are leading
//! ones, and the last token of a prompt is always computed: the hits of an engine's prefix cache, as in
//! [`Trace::reusable_blocks`].

pub mod fidelity;
mod recency;
mod show;

use std::collections::HashMap;

use kvlane_trace::trace::{Trace, TraceRequest};
use serde::{Deserialize, Serialize};

use recency::{Piece, Recency};

use crate::statistics::histogram::Histogram;
use crate::statistics::spread::Spread;

/// Bins of the curve of arrivals, at most.
const RATE_BINS_MAX: usize = 400;
/// The largest capacity of an LRU curve over its smallest.
const LRU_RANGE: u64 = 2000;
/// The bin in which [`Rate::met`] counts, in seconds, at most.
const MET_BIN_S: f64 = 60.0;
/// Prefixes of other sessions that a session remembers, so that a later turn finds the one that it continues. One or
/// two are usual: a system prompt, a document.
const PREFIXES_MAX: usize = 8;

/// All statistics of a trace. JSON of schema `kvlane.trace-stats/1`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TraceStats {
    /// `kvlane.trace-stats/1`.
    pub schema: String,
    /// Requests.
    pub requests: u64,
    /// Seconds from the first arrival to the last.
    pub span_s: f64,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Prompt tokens of all requests.
    pub input_tokens: u64,
    /// Answer tokens of all requests.
    pub output_tokens: u64,
    /// Prompt tokens per answer token; `None` without answers.
    pub input_per_output: Option<f64>,
    /// How requests arrive.
    pub rate: Rate,
    /// Lengths in tokens.
    pub lengths: Lengths,
    /// Hits of a cache.
    pub cache: Cache,
    /// Conversations.
    pub sessions: Sessions,
    /// Changes made while reading the trace.
    pub notes: Vec<String>,
}

/// How requests arrive.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rate {
    /// Requests per second over the span.
    pub mean: f64,
    /// Requests per second that a request meets: the mean over requests of the other arrivals in its minute. Periods
    /// without requests have no weight, so a trace whose rate declines at the end has the rate of its main part.
    pub met: f64,
    /// Standard deviation of the time between arrivals over its mean: 1 for independent arrivals (Poisson), more for
    /// bursts. `None` below three requests.
    pub interarrival_cv: Option<f64>,
    /// Most requests in ten seconds (bins from the first arrival on), per second.
    pub peak_10_s: f64,
    /// Most requests in a minute, per second.
    pub peak_60_s: f64,
    /// Seconds of a bin of `curve`.
    pub bin_s: f64,
    /// Requests per second in each bin, from the first arrival on. The last bin may be cut short by the trace's end.
    pub curve: Vec<f64>,
}

/// Lengths in tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lengths {
    /// Prompts.
    pub input: Option<Spread>,
    /// Answers.
    pub output: Option<Spread>,
    /// Prompts without the hits of an infinite cache.
    pub uncached: Option<Spread>,
}

/// Hits of one cache for the whole trace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Cache {
    /// Started blocks of all prompts.
    pub blocks: u64,
    /// Number of different full blocks.
    pub distinct_blocks: u64,
    /// Share of those that a single request uses.
    pub used_once_share: f64,
    /// Blocks that an infinite cache would find.
    pub hit_blocks: u64,
    /// Those as a share of all blocks.
    pub hit_block_share: f64,
    /// Their tokens as a share of all prompt tokens.
    pub hit_token_share: f64,
    /// Share of the found blocks that the session itself has used before: the hits of session affinity. The rest was
    /// introduced by other sessions. `None` without hits.
    pub intra_session_share: Option<f64>,
    /// Seconds since the last use of a block that is found, one sample per found block.
    pub reuse_s: Option<Spread>,
    /// Hits over capacity, least recently used evicted first, the tail of a prompt before its head.
    pub lru: Vec<LruPoint>,
}

/// Hits at one capacity.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LruPoint {
    /// Tokens that the cache holds.
    pub capacity_tokens: u64,
    /// Found tokens as a share of all prompt tokens.
    pub hit_token_share: f64,
    /// Found blocks as a share of all blocks, as much of the literature has it.
    pub hit_block_share: f64,
}

/// Conversations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sessions {
    /// Number of conversations.
    pub count: u64,
    /// Share of requests that are not the first of their session.
    pub later_turn_share: f64,
    /// Requests of a session.
    pub turns: Option<Spread>,
    /// Seconds from the arrival of the turn before to that of a later turn.
    pub gap_s: Option<Spread>,
    /// Prompt tokens that a later turn has more than the turn before; less counts as zero.
    pub growth_tokens: Option<Spread>,
    /// Tokens of the different blocks of a session: what it takes to keep all of it.
    pub working_set_tokens: Option<Spread>,
}

/// Hits at given capacities, added up piece by piece.
#[derive(Debug)]
struct Curve {
    /// In blocks, ascending.
    capacities: Vec<u64>,
    /// Hits of pieces found in full from this capacity on.
    full: Vec<u64>,
    /// Hits of pieces of which this capacity holds a part.
    part: Vec<u64>,
}

/// Usage by session.
#[derive(Debug)]
struct Known {
    /// Turns to come.
    turns_left: Vec<u32>,
    /// The request before.
    before: Vec<Option<u32>>,
    /// Different blocks so far.
    blocks: Vec<u64>,
    /// Ends of what its prompts share with other sessions': `(owner, depth)`, the latest last.
    prefixes: HashMap<u32, Vec<(u32, u32)>>,
}

// === impl TraceStats ===

impl TraceStats {
    /// The schema of its JSON.
    pub const SCHEMA: &str = "kvlane.trace-stats/1";

    /// The figures of a trace, the LRU curve at six capacities per power of ten up to the one that holds all.
    pub fn of(trace: &Trace) -> Self {
        Self::at(trace, &capacities_tokens(trace))
    }

    /// The figures of a trace, the LRU curve at these capacities, in tokens. A cache holds whole blocks.
    pub fn at(trace: &Trace, capacities_tokens: &[u64]) -> Self {
        let block_tokens = u64::from(trace.block_tokens);
        let mut capacities = capacities_tokens.to_vec();
        capacities.sort_unstable();
        let mut curve = Curve::new(capacities.iter().map(|tokens| tokens / block_tokens).collect());
        let mut recency = Recency::new(trace);
        let mut known = Known::new(trace);
        let (mut reuse, mut gaps) = (Histogram::default(), Histogram::default());
        let mut growth = Vec::new();
        let mut uncached = Vec::with_capacity(trace.requests.len());
        let (mut hit_blocks, mut intra_blocks) = (0, 0);
        for (place, request) in trace.requests.iter().enumerate() {
            let index = place as u32;
            let reusable = trace.reusable_blocks(index);
            for &Piece { from, to, last, newer } in recency.access(index) {
                let found = u64::from(to.min(reusable).saturating_sub(from));
                if found > 0 {
                    curve.add(newer, found);
                    let used_s = trace.requests[last as usize].arrival_s;
                    reuse.add(request.arrival_s - used_s, found);
                }
            }
            let (before, depth) = known.turn(trace, &recency, index);
            if let Some(before) = before.map(|before| trace.requests[before as usize]) {
                gaps.add(request.arrival_s - before.arrival_s, 1);
                growth.push(f64::from(request.input_tokens.saturating_sub(before.input_tokens)));
            }
            hit_blocks += u64::from(reusable);
            intra_blocks += u64::from(depth.min(reusable));
            uncached.push(f64::from(request.input_tokens - reusable * trace.block_tokens));
        }
        let input_tokens = trace.input_tokens();
        let output_tokens = trace.output_tokens();
        let token_share = |blocks: u64| share(blocks * block_tokens, input_tokens);
        let blocks = (0..trace.requests.len() as u32).map(|i| u64::from(trace.prompt_blocks(i))).sum();
        let (distinct_blocks, once) = recency.distinct();
        let point = |(&capacity_tokens, hits)| LruPoint {
            capacity_tokens,
            hit_token_share: token_share(hits),
            hit_block_share: share(hits, blocks),
        };
        let cache = Cache {
            blocks,
            distinct_blocks,
            used_once_share: share(once, distinct_blocks),
            hit_blocks,
            hit_block_share: share(hit_blocks, blocks),
            hit_token_share: token_share(hit_blocks),
            intra_session_share: (hit_blocks > 0).then(|| share(intra_blocks, hit_blocks)),
            reuse_s: reuse.spread(),
            lru: capacities.iter().zip(curve.hits()).map(point).collect(),
        };
        drop(recency);
        let spread = |lengths: &mut dyn Iterator<Item = u32>| {
            Spread::of(&mut lengths.map(f64::from).collect::<Vec<f64>>())
        };
        Self {
            schema: Self::SCHEMA.to_owned(),
            requests: trace.requests.len() as u64,
            span_s: span_s(trace),
            block_tokens: trace.block_tokens,
            input_tokens,
            output_tokens,
            input_per_output: (output_tokens > 0).then(|| input_tokens as f64 / output_tokens as f64),
            rate: Rate::of(trace),
            lengths: Lengths {
                uncached: Spread::of(&mut uncached),
                input: spread(&mut trace.requests.iter().map(|request| request.input_tokens)),
                output: spread(&mut trace.requests.iter().map(|request| request.output_tokens)),
            },
            cache,
            sessions: known.sessions(trace, gaps.spread(), Spread::of(&mut growth)),
            notes: trace.notes.clone(),
        }
    }
}

/// Six capacities per power of ten, the last one that which holds all blocks of the trace.
fn capacities_tokens(trace: &Trace) -> Vec<u64> {
    let all = distinct_blocks(trace).max(1) * u64::from(trace.block_tokens);
    let mut capacities: Vec<u64> = (0..18)
        .flat_map(|power| [10, 15, 20, 30, 50, 70].map(|mantissa| mantissa * 10u64.pow(power)))
        .filter(|&tokens| tokens.saturating_mul(LRU_RANGE) >= all && tokens >= u64::from(trace.block_tokens))
        .take_while(|&tokens| tokens < all)
        .collect();
    capacities.push(all);
    capacities
}

/// Different blocks that all requests leave in a cache.
fn distinct_blocks(trace: &Trace) -> u64 {
    let kept = recency::kept_blocks(trace);
    let new = |(request, kept): (&TraceRequest, u32)| u64::from(kept.saturating_sub(request.shared_blocks));
    trace.requests.iter().zip(kept).map(new).sum()
}

fn span_s(trace: &Trace) -> f64 {
    trace.requests.first().map_or(0.0, |first| trace.span_s() - first.arrival_s)
}

fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

// === impl Rate ===

impl Rate {
    /// How the requests of a trace arrive.
    fn of(trace: &Trace) -> Self {
        let span_s = span_s(trace);
        let count = trace.requests.len();
        let mean = if span_s > 0.0 { count as f64 / span_s } else { 0.0 };
        let gaps = || trace.requests.windows(2).map(|pair| pair[1].arrival_s - pair[0].arrival_s);
        let mean_gap = span_s / (count.max(2) - 1) as f64;
        let variance =
            gaps().map(|gap| (gap - mean_gap) * (gap - mean_gap)).sum::<f64>() / (count.max(2) - 1) as f64;
        let peak = |bin_s: f64| bins(trace, bin_s, u64::MAX).max().unwrap_or(0) as f64 / bin_s;
        // Bins of equal length, so that the last one is not short. One request of a bin meets the others.
        let met_bins = (span_s / MET_BIN_S).ceil().max(1.0);
        let met_bin_s = span_s / met_bins;
        let meetings =
            bins(trace, met_bin_s, met_bins as u64 - 1).map(|n| n as f64 * n.saturating_sub(1) as f64);
        let met = if span_s > 0.0 { meetings.sum::<f64>() / count as f64 / met_bin_s } else { 0.0 };
        let round = [1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0];
        let fits = |bin_s: &f64| span_s / bin_s <= RATE_BINS_MAX as f64;
        let bin_s =
            round.into_iter().find(fits).unwrap_or((span_s / RATE_BINS_MAX as f64 / 3600.0).ceil() * 3600.0);
        let curve = bins(trace, bin_s, u64::MAX).map(|count| count as f64 / bin_s).collect();
        Self {
            mean,
            met,
            interarrival_cv: (count > 2 && mean_gap > 0.0).then(|| variance.sqrt() / mean_gap),
            peak_10_s: peak(10.0),
            peak_60_s: peak(60.0),
            bin_s,
            curve,
        }
    }
}

/// Requests in each bin from the first arrival on, including empty bins. Arrivals after the bin `last` count in it.
fn bins(trace: &Trace, bin_s: f64, last: u64) -> impl Iterator<Item = u64> + '_ {
    let start_s = trace.requests.first().map_or(0.0, |first| first.arrival_s);
    let bin_of = move |request: &TraceRequest| (((request.arrival_s - start_s) / bin_s) as u64).min(last);
    let mut requests = trace.requests.iter().map(bin_of).peekable();
    let mut bin = 0;
    std::iter::from_fn(move || {
        requests.peek()?;
        let mut count = 0;
        while requests.next_if(|&of| of <= bin).is_some() {
            count += 1;
        }
        bin += 1;
        Some(count)
    })
}

// === impl Curve ===

impl Curve {
    fn new(capacities: Vec<u64>) -> Self {
        let zeros = vec![0; capacities.len()];
        Self { capacities, full: zeros.clone(), part: zeros }
    }

    /// Adds `count` blocks, of which the first is found by caches of more than `newer` blocks, the next by caches of
    /// one block more, and so on.
    fn add(&mut self, newer: u64, count: u64) {
        let first = self.capacities.partition_point(|&capacity| capacity <= newer);
        for place in first..self.capacities.len() {
            let found = self.capacities[place] - newer;
            if found >= count {
                self.full[place] += count;
                return;
            }
            self.part[place] += found;
        }
    }

    /// Found blocks at each capacity.
    fn hits(&self) -> Vec<u64> {
        let mut full = 0;
        let at = |(more, part): (&u64, &u64)| {
            full += more;
            full + part
        };
        self.full.iter().zip(&self.part).map(at).collect()
    }
}

// === impl Known ===

impl Known {
    fn new(trace: &Trace) -> Self {
        let count = trace.requests.iter().map(|request| request.session as usize + 1).max().unwrap_or(0);
        let mut turns_left = vec![0; count];
        for request in &trace.requests {
            turns_left[request.session as usize] += 1;
        }
        Self { turns_left, before: vec![None; count], blocks: vec![0; count], prefixes: HashMap::new() }
    }

    /// Takes a request that `recency` has just seen into account. Returns the turn before, and how many of its blocks
    /// the session has used before.
    fn turn(&mut self, trace: &Trace, recency: &Recency<'_>, index: u32) -> (Option<u32>, u32) {
        let TraceRequest { session, after, .. } = trace.requests[index as usize];
        let place = session as usize;
        let owns = |owner: u32| owner != index && trace.requests[owner as usize].session == session;
        let path = recency.path();
        let own = path.iter().find(|&&(owner, ..)| owns(owner)).map_or(0, |&(_, _, to)| to);
        let foreign = path
            .iter()
            .find(|&&(owner, ..)| owner != index && !owns(owner))
            .map(|&(owner, _, to)| (owner, to));
        let mut depth = own;
        if let Some(end) = foreign {
            if end.1 > own
                && let Some(prefixes) = self.prefixes.get(&session)
            {
                let shared = prefixes.iter().map(|&prefix| common(trace, path, prefix)).max();
                depth = depth.max(shared.unwrap_or(0));
            }
            self.turns_left[place] -= 1;
            if self.turns_left[place] > 0 {
                let prefixes = self.prefixes.entry(session).or_default();
                prefixes.retain(|&prefix| prefix != end);
                prefixes.push(end);
                if prefixes.len() > PREFIXES_MAX {
                    prefixes.remove(0);
                }
            } else {
                self.prefixes.remove(&session);
            }
        } else {
            self.turns_left[place] -= 1;
        }
        self.blocks[place] += u64::from(recency.kept(index).saturating_sub(depth));
        (after.or(self.before[place].replace(index)), depth)
    }

    fn sessions(&self, trace: &Trace, gap_s: Option<Spread>, growth_tokens: Option<Spread>) -> Sessions {
        let mut turns = vec![0.0; self.blocks.len()];
        for request in &trace.requests {
            turns[request.session as usize] += 1.0;
        }
        let tokens = |&blocks: &u64| (blocks * u64::from(trace.block_tokens)) as f64;
        let mut working_sets: Vec<f64> = self
            .blocks
            .iter()
            .zip(&turns)
            .filter(|(_, turns)| **turns > 0.0)
            .map(|(blocks, _)| tokens(blocks))
            .collect();
        turns.retain(|&turns| turns > 0.0);
        let count = turns.len() as u64;
        let requests = trace.requests.len() as u64;
        Sessions {
            count,
            later_turn_share: share(requests - count, requests),
            turns: Spread::of(&mut turns),
            gap_s,
            growth_tokens,
            working_set_tokens: Spread::of(&mut working_sets),
        }
    }
}

/// Blocks from its beginning that the branch `path` has in common with the one that ends in block `end.1` of `end.0`.
fn common(trace: &Trace, path: &[(u32, u32, u32)], end: (u32, u32)) -> u32 {
    let mut next = Some(end);
    while let Some((owner, depth)) = next {
        if let Some(&(_, _, to)) = path.iter().find(|&&(of, ..)| of == owner) {
            return depth.min(to);
        }
        let TraceRequest { base, shared_blocks, .. } = trace.requests[owner as usize];
        next = base.map(|base| (base, depth.min(shared_blocks)));
    }
    0
}

#[cfg(test)]
mod tests {
    use kvlane_trace::trace::Builder;
    use proptest::prelude::*;

    use super::recency::tests::{kept_ids, traces};
    use super::*;

    /// Hits of a straightforward LRU cache of this many blocks.
    fn naive_lru(trace: &Trace, capacity: usize) -> u64 {
        let kept = recency::kept_blocks(trace);
        let mut cache: Vec<(u32, u32)> = Vec::new();
        let mut hits = 0;
        for request in 0..trace.requests.len() as u32 {
            let ids = kept_ids(trace, kept[request as usize], request);
            let held = ids.iter().take_while(|id| cache.contains(id)).count();
            hits += held.min(trace.reusable_blocks(request) as usize);
            cache.retain(|id| !ids.contains(id));
            cache.splice(0..0, ids);
            cache.truncate(capacity);
        }
        hits as u64
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        /// Invariant: The LRU curve of one pass equals a block-by-block cache at every capacity.
        ///
        /// Also held by `a_block_s_place_is_that_in_a_list_by_last_use`.
        #[test]
        fn one_pass_finds_the_hits_of_every_capacity(trace in traces()) {
            let tokens = u64::from(trace.block_tokens);
            let capacities: Vec<u64> = (0..60).map(|blocks| blocks * tokens).collect();
            let stats = TraceStats::at(&trace, &capacities);
            for (blocks, point) in stats.cache.lru.iter().enumerate() {
                let hits = naive_lru(&trace, blocks);
                let share = share(hits * tokens, trace.input_tokens());
                prop_assert_eq!(point.hit_token_share, share, "{} blocks", blocks);
            }
            let whole = TraceStats::of(&trace);
            let last = whole.cache.lru.last().unwrap();
            prop_assert_eq!(last.hit_token_share, whole.cache.hit_token_share);
        }

        #[test]
        fn what_a_session_has_used_is_found_on_its_branches(trace in traces()) {
            let kept = recency::kept_blocks(&trace);
            let mut sets = vec![std::collections::HashSet::new(); 4];
            let (mut intra, mut hits) = (0, 0);
            for (place, request) in trace.requests.iter().enumerate() {
                let index = place as u32;
                let ids = kept_ids(&trace, kept[place], index);
                let set = &mut sets[request.session as usize];
                let reusable = trace.reusable_blocks(index) as usize;
                hits += reusable as u64;
                intra += ids[..reusable].iter().filter(|&id| set.contains(id)).count() as u64;
                set.extend(ids);
            }
            let stats = TraceStats::of(&trace);
            let expect = (hits > 0).then(|| share(intra, hits));
            // A session of more foreign prefixes than are remembered may lose some.
            let turns = stats.sessions.turns.as_ref().map_or(0.0, |turns| turns.max);
            if turns <= PREFIXES_MAX as f64 {
                prop_assert_eq!(stats.cache.intra_session_share, expect);
                let largest = sets.iter().map(|set| set.len() as f64).fold(0.0, f64::max);
                let working_set = stats.sessions.working_set_tokens.as_ref().map_or(0.0, |set| set.max);
                prop_assert_eq!(working_set, largest * f64::from(trace.block_tokens));
            } else {
                prop_assert!(stats.cache.intra_session_share <= expect);
            }
        }
    }

    #[test]
    fn stats_survive_json() {
        let mut builder = Builder::new(16);
        for arrival_s in [0.0, 1.0, 2.0, 4.0] {
            let request =
                TraceRequest { arrival_s, input_tokens: 64, output_tokens: 2, ..TraceRequest::default() };
            builder.push(request, &[1, 2]);
        }
        let stats = TraceStats::at(&builder.finish(), &[16, 1024]);
        let json = serde_json::to_value(&stats).unwrap();
        assert_eq!(
            (&json["schema"], &json["cache"]["hit_token_share"]),
            (&"kvlane.trace-stats/1".into(), &0.375.into())
        );
        assert_eq!(serde_json::from_value::<TraceStats>(json).unwrap(), stats);
    }

    fn arrivals(times_s: &[f64]) -> Rate {
        let mut builder = Builder::new(16);
        for &arrival_s in times_s {
            builder.push(TraceRequest { arrival_s, input_tokens: 1, ..TraceRequest::default() }, &[]);
        }
        Rate::of(&builder.finish())
    }

    #[test]
    fn rates_are_counted_from_the_first_arrival() {
        let rate = arrivals(&[100.0, 101.0, 109.0, 110.0, 220.0]);
        assert_eq!((rate.mean, rate.peak_10_s, rate.peak_60_s), (5.0 / 120.0, 0.3, 4.0 / 60.0));
        assert_eq!((rate.bin_s, rate.curve.len()), (1.0, 121));
        assert_eq!((rate.curve[0], rate.curve[1], rate.curve[5], rate.curve[120]), (1.0, 1.0, 0.0, 1.0));
        // Four meet three others each, one none.
        assert_eq!(rate.met, 12.0 / 5.0 / 60.0);
    }

    #[test]
    fn a_regular_clock_has_no_variation_and_a_burst_much() {
        let regular = arrivals(&(0..100).map(f64::from).collect::<Vec<_>>());
        assert_eq!((regular.interarrival_cv, regular.mean), (Some(0.0), 100.0 / 99.0));
        let burst = arrivals(&[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 60.0]);
        assert!((burst.interarrival_cv.unwrap() - 8f64.sqrt()).abs() < 1e-12, "{:?}", burst.interarrival_cv);
        assert_eq!((arrivals(&[]).interarrival_cv, arrivals(&[1.0]).mean), (None, 0.0));
    }
}
