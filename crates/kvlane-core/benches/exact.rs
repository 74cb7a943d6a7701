//! Cost of an event and of a lookup in the exact index: 256 endpoints, prompts of 8,192 blocks of which 16 share their
//! first 512. `bench/index` compares it with other indexes.
//!
//! `cargo bench -p kvlane-core --bench exact`

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvlane_core::block::{BlockHash, ChainSeed, ContentHash};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::event::{EngineHash, Tier};
use kvlane_core::index::Overlap;
use kvlane_core::index::exact::{Config, ExactIndex};
use kvlane_core::rng::Rng;

const ENDPOINTS: u16 = 256;
const BLOCKS: usize = 8192;
const SHARED: usize = 512;
const BATCH: usize = 16;

type Blocks = Vec<(EngineHash, ContentHash)>;

fn seed() -> ChainSeed {
    ChainSeed::new("m", None, None)
}

fn prompt(n: u64) -> Blocks {
    let mut common = Rng::new(n / 16);
    let mut own = Rng::new(n + 1000);
    let mut block = |at| {
        let rng = if at < SHARED { &mut common } else { &mut own };
        (EngineHash(rng.next_u64()), ContentHash(rng.next_u64()))
    };
    (0..BLOCKS).map(&mut block).collect()
}

fn store(index: &ExactIndex, endpoint: EndpointId, prompt: &Blocks) {
    let mut parent = None;
    for blocks in prompt.chunks(BATCH) {
        black_box(index.store_contents(endpoint, seed(), parent, blocks, Tier::Gpu));
        parent = blocks.last().map(|block| block.0);
    }
}

fn exact(criterion: &mut Criterion) {
    let index = ExactIndex::new(Config { memory_bytes_max: usize::MAX });
    let prompts: Vec<Blocks> = (0..u64::from(ENDPOINTS)).map(prompt).collect();
    for (slot, prompt) in (0..ENDPOINTS).zip(&prompts) {
        store(&index, EndpointId::new(slot, 0), prompt);
        store(&index, EndpointId::new((slot + 101) % ENDPOINTS, 0), prompt);
    }
    let mut group = criterion.benchmark_group("exact index, prompts of 8,192 blocks");
    group.throughput(Throughput::Elements(BLOCKS as u64));
    let guest = EndpointId::new(ENDPOINTS, 0);
    let mut n = 0;
    group.bench_function("a prompt in batches of 16, chained, stored and let go", |bencher| {
        bencher.iter(|| {
            n = (n + 1) % prompts.len();
            store(&index, guest, &prompts[n]);
            index.remove_endpoint(guest);
        });
    });
    let chains: Vec<Vec<BlockHash>> = prompts
        .iter()
        .map(|prompt| {
            let mut before = None;
            let chain = prompt.iter().map(|&(_, content)| *before.insert(seed().next(before, content)));
            chain.collect()
        })
        .collect();
    let mut overlap = Overlap::default();
    group.bench_function("lookup", |bencher| {
        bencher.iter(|| {
            n = (n + 1) % chains.len();
            index.lookup(black_box(&chains[n]), &mut overlap);
            black_box(&overlap);
        });
    });
    group.finish();
}

criterion_group!(benches, exact);
criterion_main!(benches);
