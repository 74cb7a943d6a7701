//! Speed of the engine model.
//!
//! `decode` is an engine that only decodes 200 sequences: elements are steps. `ladder` is one engine of the published
//! shared-prefix benchmark under closed-loop load, 7,200 prompt tokens of which 6,000 are shared by a group and 1,000
//! output tokens: elements are steps as well, of which few only decode. `prompts` admits prompts of 32,768 tokens in
//! blocks of 16, half of them cached: elements are blocks.

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use kvlane_core::time::Nanos;
use kvlane_core::timing::TimingModel;
use kvlane_sim::{Engine, EngineConfig, EngineEvent, EngineRequest, own_block};

fn config(block_tokens: u32) -> EngineConfig {
    let timing = TimingModel::preset("qwen3-32b@h100x2").expect("a preset");
    EngineConfig { token_every: 0, ..EngineConfig::vllm(timing, block_tokens, 0.95) }
}

/// A request whose prompt begins with `shared` blocks that all of a group have.
fn request(id: u64, group: u64, shared: u32, prompt_tokens: u32, output_tokens: u32) -> EngineRequest {
    EngineRequest {
        id,
        prompt_blocks: (0..shared).map(|index| own_block(group << 32, index)).collect(),
        prompt_tokens,
        output_tokens,
        output_seed: id,
        remote: None,
        adapter: None,
    }
}

/// An engine in which 200 sequences decode. Its cache is full, so that every block that is taken evicts one.
fn decoding(block_tokens: u32) -> Engine {
    let mut engine = Engine::new(EngineConfig { blocks: 1_048_576 / block_tokens, ..config(block_tokens) });
    let mut events = Vec::new();
    engine.enqueue(Nanos::ZERO, request(0, 0, 0, 1_048_575, 1));
    engine.advance(Nanos::MAX, &mut events);
    let start = events.last().expect("it ends").0;
    for id in 0..200 {
        engine.enqueue(start, request(1 + id, 0, 0, 500 + id as u32 * 7, 3000));
    }
    engine.advance(start + Nanos::from_secs(20), &mut events);
    assert_eq!(engine.stats().running, 200);
    engine
}

/// Runs one engine of the ladder with 200 requests at a time until `requests` are served; returns its steps.
fn ladder(requests: u64) -> u64 {
    let mut engine = Engine::new(config(64));
    let (mut next, mut events) = (0, Vec::new());
    let mut send = |engine: &mut Engine, at| {
        if next < requests {
            engine.enqueue(at, request(next, next % 40, 93, 7200, 1000));
            next += 1;
        }
    };
    (0..200).for_each(|_| send(&mut engine, Nanos::ZERO));
    while let Some(deadline) = engine.quiet_until() {
        engine.advance(deadline, &mut events);
        for (at, event) in events.drain(..) {
            if matches!(event, EngineEvent::Finished { .. }) {
                send(&mut engine, at);
            }
        }
    }
    engine.stats().steps
}

/// Serves prompts one after the other.
fn prompts(engine: &mut Engine, from: u64) {
    let mut events = Vec::new();
    for id in from..from + 10 {
        engine.enqueue(engine.next_deadline().unwrap_or_default(), request(id, 7, 1024, 32_768, 1));
        engine.advance(Nanos::MAX, &mut events);
    }
}

fn steps(criterion: &mut Criterion) {
    const STEPS: u64 = 1000;
    let mut group = criterion.benchmark_group("decode");
    group.throughput(Throughput::Elements(STEPS)).sample_size(10);
    for block_tokens in [16, 64] {
        let engine = decoding(block_tokens);
        group.bench_function(format!("200 sequences, blocks of {block_tokens}"), |bencher| {
            bencher.iter_batched(
                || engine.clone(),
                |mut engine| {
                    let (last, mut events) = (engine.stats().steps + STEPS, Vec::new());
                    while engine.stats().steps < last {
                        let deadline = engine.next_deadline().expect("it decodes");
                        engine.advance(deadline + Nanos::from_secs(1), &mut events);
                    }
                    engine
                },
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();

    const REQUESTS: u64 = 2000;
    let mut group = criterion.benchmark_group("ladder");
    group.throughput(Throughput::Elements(ladder(REQUESTS))).sample_size(10);
    group.bench_function("2,000 requests of 7,200 and 1,000 tokens", |bencher| {
        bencher.iter(|| ladder(REQUESTS));
    });
    group.finish();

    let mut group = criterion.benchmark_group("prompts");
    group.throughput(Throughput::Elements(10 * 2048)).sample_size(20);
    let mut engine = Engine::new(EngineConfig { blocks: 65_536, ..config(16) });
    prompts(&mut engine, 0);
    let mut from = 0;
    group.bench_function("32,768 tokens, half of it cached", |bencher| {
        bencher.iter(|| {
            from += 10;
            prompts(&mut engine, from);
        });
    });
    group.finish();
}

criterion_group!(benches, steps);
criterion_main!(benches);
