//! Cost of a decision at 256 endpoints with a prompt of 128 blocks, each policy's share of it, and memory per block of
//! the approximate index.
//!
//! `cargo bench -p kvlane-core --bench decision`

use std::hint::black_box;
use std::io::Write as _;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use kvlane_core::block::{BlockHash, ChainSeed};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::index::approx::{self, ApproxIndex};
use kvlane_core::load::{InFlight, Load, LoadReport};
use kvlane_core::policy::{Candidate, PickContext, PolicyConfig, Reason};
use kvlane_core::request::{RequestId, SchedulingRequest, SessionKey};
use kvlane_core::rng::Rng;
use kvlane_core::router::{self, Router, Scratch};
use kvlane_core::scheduler::{self, Input};
use kvlane_core::time::Nanos;

const ENDPOINTS: usize = 256;
const BLOCKS: usize = 128;
const BLOCK_BYTES: usize = 256;
const PROMPT_TOKENS: u32 = (BLOCKS * 64) as u32;
/// Blocks of the common prefix.
const SYSTEM_BLOCKS: usize = 24;

/// A prompt with the common prefix and its own end.
fn prompt(n: u64) -> Vec<u8> {
    let mut text = vec![b's'; SYSTEM_BLOCKS * BLOCK_BYTES];
    let mut rng = Rng::new(n);
    while text.len() < BLOCKS * BLOCK_BYTES {
        text.extend_from_slice(&rng.next_u64().to_le_bytes());
    }
    text
}

fn chain(text: &[u8]) -> Vec<BlockHash> {
    let mut chain = Vec::new();
    ChainSeed::new("m", None, None).chain(text, BLOCK_BYTES, &mut chain);
    chain
}

/// 256 endpoints that all hold the common prefix and eight prompts each, with some load.
fn world(policy: &str, shares: bool) -> (Router, Vec<Vec<BlockHash>>) {
    let router = Router::new(router::Config {
        scheduler: scheduler::Config {
            receipts: 1024,
            seed: 1,
            ..scheduler::Config::new(PolicyConfig::by_name(policy).expect("a policy"))
        },
        index: approx::Config { memory_bytes_max: 1 << 30, ttl: Nanos::MAX },
        exact: None,
        block_tokens: 64,
    });
    if shares {
        router.share(kvlane_core::replica::ReplicaId(1));
    }
    let mut out = Vec::new();
    let endpoints: Vec<EndpointId> = (0..ENDPOINTS)
        .map(|n| router.join(Nanos(1), format!("http://e{n}").into(), true, false, &mut out).expect("room"))
        .collect();
    let chains: Vec<Vec<BlockHash>> = (0..ENDPOINTS as u64 * 8).map(|n| chain(&prompt(n))).collect();
    for (n, chain) in chains.iter().enumerate() {
        router.learn(Nanos(2), RequestId(n as u64), chain, endpoints[n % ENDPOINTS]);
        let request = SchedulingRequest::new(RequestId(n as u64), PROMPT_TOKENS);
        router.arrive(Nanos(3), request, chain, &mut Scratch::default(), &mut out);
    }
    (router, chains)
}

fn decide(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("decision, 256 endpoints, 128 blocks");
    let alone =
        ["cache_aware", "lmetric", "prefix_aware", "least_tokens", "fleet_cost"].map(|name| (name, false));
    for (policy, shares) in alone.into_iter().chain([("fleet_cost", true)]) {
        let (router, chains) = world(policy, shares);
        let told = if shares { ", with replicas" } else { "" };
        let (mut n, mut scratch, mut out) = (1_000_000, Scratch::default(), Vec::new());
        group.bench_function(
            format!("{policy}: look up, pick, reserve, learn, explain, settle{told}"),
            |bencher| {
                bencher.iter(|| {
                    n += 1;
                    out.clear();
                    let request = SchedulingRequest::new(RequestId(n), PROMPT_TOKENS);
                    let chain = &chains[(n % chains.len() as u64) as usize];
                    router.arrive(Nanos(n), request, chain, &mut scratch, &mut out);
                    router.step(Nanos(n), Input::Finished { request: RequestId(n) }, &mut out);
                    black_box(&out);
                });
            },
        );
    }
    group.finish();
    let text = prompt(7);
    criterion.bench_function("hash a prompt of 128 blocks of 256 bytes", |bencher| {
        bencher.iter_batched_ref(
            || Vec::with_capacity(BLOCKS),
            |out| ChainSeed::new("m", None, None).chain(black_box(&text), BLOCK_BYTES, out),
            BatchSize::SmallInput,
        );
    });
}

/// The pick alone, for each policy, among 256 rows: a quarter hold some of the prompt, all have some load.
fn pick(criterion: &mut Criterion) {
    let mut rng = Rng::new(3);
    let rows: Vec<Candidate> = (0..ENDPOINTS)
        .map(|slot| {
            let requests = rng.below(40) as u32;
            let in_flight = InFlight {
                requests,
                prefilling: requests / 8,
                prefill_tokens: rng.below(20_000) as u64,
                prefill_pairs: rng.below(100_000_000) as u64,
                context_tokens: u64::from(requests) * 8000,
                ..InFlight::default()
            };
            let reported = LoadReport {
                running: requests,
                waiting: rng.below(4) as u32,
                kv_usage_ratio: rng.unit() as f32,
                kv_capacity_tokens: Some(300_000),
            };
            let overlap_tokens = if rng.below(4) == 0 { 64 * rng.below(128) as u32 } else { 0 };
            let load = Load { in_flight, reported: Some((reported, Nanos(1))) };
            Candidate::approximate(EndpointId::new(slot as u16, 0), overlap_tokens, load)
        })
        .collect();
    let mut cold = rows.clone();
    cold.iter_mut().for_each(|row| row.overlap_tokens = 0);
    let mut group = criterion.benchmark_group("pick among 256");
    for name in PolicyConfig::NAMES {
        let mut policy = PolicyConfig::by_name(name).expect("a policy").build();
        let mut n = 0;
        group.bench_function(*name, |bencher| {
            bencher.iter(|| {
                n += 1;
                let mut request = SchedulingRequest::new(RequestId(n), PROMPT_TOKENS);
                request.head = Some(BlockHash(n));
                request.session = Some(SessionKey(n % 1000));
                let mut cx = PickContext {
                    request: &request,
                    now: Nanos::from_millis(n),
                    output_tokens: 200,
                    usual_output_tokens: 200.0,
                    peers: None,
                    adapter: None,
                    rng: &mut rng,
                    reason: Reason::default(),
                    work: [None; 2],
                    costs: None,
                    pairs: None,
                };
                policy.pick(&mut cx, black_box(if n % 4 == 0 { &cold } else { &rows }))
            });
        });
    }
}

/// Memory per block and holder, by the index's own count, for favourable and unfavourable shapes.
fn memory(_: &mut Criterion) {
    let say = |what: &str, index: &ApproxIndex| {
        let per_block = index.bytes() as f64 / index.blocks_held() as f64;
        let _ =
            writeln!(std::io::stdout(), "index memory, {what}: {per_block:.1} bytes per block and holder");
    };
    let roomy = approx::Config { memory_bytes_max: usize::MAX, ttl: Nanos::MAX };
    let endpoint = |n: u64| EndpointId::new((n % 8) as u16, 0);
    let mut index = ApproxIndex::new(roomy);
    (0..2000).for_each(|n| index.insert(Nanos(n), &chain(&prompt(n)), endpoint(n)));
    say("128-block prompts with a common beginning", &index);
    let mut index = ApproxIndex::new(roomy);
    (0..2000).for_each(|n| {
        index.insert(Nanos(n), &chain(&prompt(n)[SYSTEM_BLOCKS * BLOCK_BYTES..][..6144]), endpoint(n))
    });
    say("6 KB prompts with nothing in common", &index);
    let mut index = ApproxIndex::new(roomy);
    for n in 0..2000 {
        (1..17).for_each(|turn| {
            index.insert(Nanos(n), &chain(&prompt(n)[..turn * 8 * BLOCK_BYTES]), endpoint(n))
        });
    }
    say("conversations of 16 turns, 8 blocks a turn", &index);
    let mut index = ApproxIndex::new(roomy);
    (0..2000).for_each(|n| index.insert(Nanos(n), &chain(&n.to_le_bytes().repeat(32)), endpoint(n)));
    say("prompts of a single block", &index);
}

criterion_group!(benches, decide, pick, memory);
criterion_main!(benches);
