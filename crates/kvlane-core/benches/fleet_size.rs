//! Cost of a decision of `fleet_cost` by fleet size and by how many endpoints hold the first half of the prompt: 4,000
//! tokens in 250 blocks of 16. Microseconds, the median of the rounds.
//!
//! `cargo bench -p kvlane-core --bench fleet_size -- [ENDPOINTS [HOLDERS]]`
//!
//! - `look up`: the prefix lookup in the index of dispatches.
//! - `decide`: the scheduler's step for a request whose prompt was looked up, and the step that ends the request.
//! - `arrive`: both, and the entry of the decision in the index.
//! - `split`: as `decide`, where any two endpoints can share the request.

use std::hint::black_box;
use std::io::Write as _;
use std::time::Instant;

use kvlane_core::block::BlockHash;
use kvlane_core::cache_accuracy::Prediction;
use kvlane_core::disaggregation::Part;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::index::Overlap;
use kvlane_core::index::approx::{self, ApproxIndex};
use kvlane_core::policy::PolicyConfig;
use kvlane_core::request::{RequestId, SchedulingRequest};
use kvlane_core::rng::Rng;
use kvlane_core::router::{self, Router, Scratch};
use kvlane_core::scheduler::{self, Input, Output, Scheduler};
use kvlane_core::time::Nanos;

const BLOCK_TOKENS: u32 = 16;
const BLOCKS: usize = 250;
/// Blocks of a prompt that its holders have.
const HELD: usize = BLOCKS / 2;
const PROMPT_TOKENS: u32 = BLOCKS as u32 * BLOCK_TOKENS;
/// Different beginnings of prompts, so that few decisions of a run add holders to one of them.
const PREFIXES: usize = 1000;
/// Requests in flight per endpoint.
const LOAD: usize = 3;
const ROUNDS: usize = 7;
const DECISIONS: u64 = 200;
/// Ids of measured requests begin here.
const FIRST_ID: u64 = 1 << 40;

fn index_config() -> approx::Config {
    approx::Config { memory_bytes_max: 1 << 30, ttl: Nanos::MAX }
}

fn scheduler_config() -> scheduler::Config {
    let policy = PolicyConfig::by_name("fleet_cost").expect("a policy");
    scheduler::Config { receipts: 1024, seed: 1, ..scheduler::Config::new(policy) }
}

/// A prompt that begins with one of the prefixes and ends as no other does.
fn chain(prefix: usize, own: u64) -> Vec<BlockHash> {
    let hash = |stream: u64, at: usize| BlockHash(Rng::new((stream << 10) + at as u64).next_u64());
    let first = (0..HELD).map(|at| hash(1 + prefix as u64, at));
    first.chain((HELD..BLOCKS).map(|at| hash((1 << 30) + own, at))).collect()
}

/// The inputs of a fleet that has work of many sizes, half of it decoding.
fn load(endpoints: usize, splits: bool) -> impl Iterator<Item = (Nanos, Input)> {
    let mut rng = Rng::new(7);
    let joined = (0..endpoints).map(|slot| {
        let name = format!("http://e{slot}").into();
        Input::Joined { endpoint: EndpointId::new(slot as u16, 0), name, healthy: true, draining: false }
    });
    let assigned = (0..endpoints).filter(move |_| splits).map(|slot| {
        let part = Part { network: Some(1), ..Part::default() };
        Input::Assigned { endpoint: EndpointId::new(slot as u16, 0), part }
    });
    let requests = (0..(endpoints * LOAD) as u64).flat_map(move |id| {
        let request = SchedulingRequest::new(RequestId(id), 200 + rng.below(12_000) as u32);
        let arrived = Input::Arrived { request, overlap: Vec::new(), block_tokens: BLOCK_TOKENS };
        let begun = (rng.below(2) == 0).then_some(Input::Begun { request: RequestId(id) });
        std::iter::once(arrived).chain(begun)
    });
    (1..).map(|n| Nanos::from_millis(n / 10)).zip(joined.chain(assigned).chain(requests))
}

/// The endpoints that hold a prefix.
fn holders(endpoints: usize, count: usize, prefix: usize) -> impl Iterator<Item = EndpointId> {
    let count = count.min(endpoints);
    let stride = endpoints / count.max(1);
    (0..count).map(move |n| EndpointId::new(((n * stride + prefix) % endpoints) as u16, 0))
}

/// The median over the rounds of the microseconds of one `act`, which gets numbers that increase.
fn median_us(mut act: impl FnMut(u64)) -> f64 {
    let mut n = 0;
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let begun = Instant::now();
            (0..DECISIONS).for_each(|_| {
                n += 1;
                act(n);
            });
            begun.elapsed().as_secs_f64() * 1e6 / DECISIONS as f64
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

fn look_up_us(endpoints: usize, count: usize) -> f64 {
    let mut index = ApproxIndex::new(index_config());
    for prefix in 0..PREFIXES.min(if count < endpoints { PREFIXES } else { 1 }) {
        let held = &chain(prefix, 0)[..HELD];
        holders(endpoints, count, prefix).for_each(|id| index.insert(Nanos(1), held, id));
    }
    let chains: Vec<_> =
        (0..PREFIXES).map(|n| chain(if count < endpoints { n } else { 0 }, n as u64)).collect();
    let mut overlap = Overlap::default();
    median_us(|n| index.lookup(Nanos(2), black_box(&chains[n as usize % PREFIXES]), &mut overlap))
}

fn decide_us(endpoints: usize, count: usize, splits: bool) -> f64 {
    let (mut scheduler, mut out) = (Scheduler::new(scheduler_config()), Vec::new());
    for (at, input) in load(endpoints, splits) {
        out.clear();
        scheduler.step(at, input, &mut out);
    }
    let predicted = Prediction { exact: 0, approximate: HELD as u32 * BLOCK_TOKENS, lower: 0 };
    let overlaps: Vec<Vec<_>> =
        (0..8).map(|prefix| holders(endpoints, count, prefix).map(|id| (id, predicted)).collect()).collect();
    median_us(|n| {
        out.clear();
        let (id, leg) = (RequestId(FIRST_ID + 2 * n), RequestId(FIRST_ID + 2 * n + 1));
        let request =
            SchedulingRequest { leg: splits.then_some(leg), ..SchedulingRequest::new(id, PROMPT_TOKENS) };
        let (at, overlap) = (Nanos::from_secs(60) + Nanos(n), overlaps[n as usize % 8].clone());
        scheduler.step(at, Input::Arrived { request, overlap, block_tokens: BLOCK_TOKENS }, &mut out);
        assert!(matches!(out[..], [Output::Dispatch { .. }]));
        scheduler.step(at, Input::Finished { request: id }, &mut out);
    })
}

fn arrive_us(endpoints: usize, count: usize) -> f64 {
    let router = Router::new(router::Config {
        scheduler: scheduler_config(),
        index: index_config(),
        exact: None,
        block_tokens: BLOCK_TOKENS,
    });
    let mut out = Vec::new();
    for (at, input) in load(endpoints, false) {
        out.clear();
        router.step(at, input, &mut out);
    }
    let kinds = if count < endpoints { PREFIXES } else { 1 };
    for prefix in 0..kinds {
        let held = &chain(prefix, 0)[..HELD];
        holders(endpoints, count, prefix).for_each(|id| router.learn(Nanos(1), RequestId(0), held, id));
    }
    let mut chains: Vec<_> =
        (0..).map(|n| chain(n as usize % kinds, n)).take(ROUNDS * DECISIONS as usize).collect();
    let mut scratch = Scratch::default();
    median_us(|n| {
        out.clear();
        let (id, at) = (RequestId(FIRST_ID + n), Nanos::from_secs(60) + Nanos(n));
        let chain = std::mem::take(&mut chains[n as usize - 1]);
        router.arrive(at, SchedulingRequest::new(id, PROMPT_TOKENS), &chain, &mut scratch, &mut out);
        assert!(matches!(out[..], [Output::Dispatch { .. }]));
        router.step(at, Input::Finished { request: id }, &mut out);
    })
}

/// Memory of the index of dispatches per block and holder, by its own count, where each endpoint holds ten prompts of its
/// own behind a prefix of all.
fn memory(endpoints: usize) -> f64 {
    let mut index = ApproxIndex::new(approx::Config { memory_bytes_max: usize::MAX, ..index_config() });
    for slot in 0..endpoints {
        (0..10).for_each(|n| {
            index.insert(Nanos(1), &chain(0, (slot * 10 + n) as u64), EndpointId::new(slot as u16, 0));
        });
    }
    index.bytes() as f64 / index.blocks_held() as f64
}

fn main() {
    let mut only = std::env::args().skip(1).filter_map(|arg| arg.parse::<usize>().ok());
    let (size, held) = (only.next(), only.next());
    let say = |row: String| _ = writeln!(std::io::stdout(), "{row}");
    say("endpoints,holders,look up,decide,arrive,split".into());
    for endpoints in [8, 256, 1000, 10_000].into_iter().filter(|&n| size.is_none_or(|only| only == n)) {
        for count in [0, 3, 50, endpoints].into_iter().filter(|&n| held.is_none_or(|only| only == n)) {
            if count > endpoints {
                continue;
            }
            let (look_up, decide) = (look_up_us(endpoints, count), decide_us(endpoints, count, false));
            let (arrive, split) = (arrive_us(endpoints, count), decide_us(endpoints, count, true));
            say(format!("{endpoints},{count},{look_up:.2},{decide:.2},{arrive:.2},{split:.2}"));
        }
        if held.is_none() {
            say(format!("{endpoints}: {:.1} bytes per block and holder", memory(endpoints)));
        }
    }
}
