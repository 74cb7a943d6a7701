//! Cost of scanning a body and a stream. Printed, never asserted.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvlane_wire::{api::Api, openai, sse::SseScanner};

/// A chat body of about `bytes` that is mostly one string, with an escaped newline every `line` characters.
fn chat(bytes: usize, line: usize) -> Vec<u8> {
    let mut text = String::with_capacity(bytes + bytes / line.max(1) * 2);
    while text.len() < bytes {
        text.extend(
            "the quick brown fox jumps over the lazy dog ".chars().cycle().take(line.min(bytes - text.len())),
        );
        text.push_str(if text.len() < bytes { "\\n" } else { "" });
    }
    format!(
        r#"{{"model":"m","messages":[{{"role":"system","content":"You are helpful."}},{{"role":"user","content":"{text}"}}],"stream":true,"max_tokens":64}}"#
    )
    .into_bytes()
}

fn bodies(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("parse_chat");
    for (bytes, line) in [(6 << 10, usize::MAX), (128 << 10, usize::MAX), (128 << 10, 80)] {
        let body = chat(bytes, line);
        let mut prompt = Vec::new();
        let name = if line == usize::MAX { "one_string" } else { "escape_every_80" };
        group.throughput(Throughput::Bytes(body.len() as u64));
        group.bench_function(BenchmarkId::new(name, body.len()), |bencher| {
            bencher.iter(|| {
                openai::parse(Api::ChatCompletions, black_box(&body), &mut prompt).map(|r| r.prompts)
            });
        });
    }
    let turns: Vec<String> = (0..200)
        .map(|turn| format!(r#"{{"role":"user","content":"turn {turn}: what about \"this\" then?"}}"#))
        .collect();
    let body = format!(r#"{{"model":"m","messages":[{}]}}"#, turns.join(","));
    let mut prompt = Vec::new();
    group.throughput(Throughput::Bytes(body.len() as u64));
    group.bench_function(BenchmarkId::new("200_short_turns", body.len()), |bencher| {
        bencher.iter(|| {
            openai::parse(Api::ChatCompletions, black_box(body.as_bytes()), &mut prompt).map(|r| r.prompts)
        });
    });
    let ids: Vec<String> = (0..8192_u32).map(|id| (id * 37 % 128_000).to_string()).collect();
    let body = format!(r#"{{"model":"m","prompt":[{}]}}"#, ids.join(","));
    group.throughput(Throughput::Bytes(body.len() as u64));
    group.bench_function(BenchmarkId::new("8192_token_ids", body.len()), |bencher| {
        bencher.iter(|| {
            openai::parse(Api::Completions, black_box(body.as_bytes()), &mut prompt).map(|r| r.prompts)
        });
    });
    group.finish();
}

fn streams(criterion: &mut Criterion) {
    let event = r#"data: {"id":"cmpl-0123456789abcdef","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[{"index":0,"delta":{"content":"Hello"}}]}"#;
    let event = format!("{event}\n\n");
    let stream = event.repeat(32).into_bytes();
    let mut group = criterion.benchmark_group("sse");
    group.throughput(Throughput::Elements(32));
    group.bench_function(BenchmarkId::new("one_push_of_32_events", stream.len()), |bencher| {
        bencher.iter(|| SseScanner::new().push(black_box(&stream)));
    });
    group.bench_function("32_pushes_of_one_event", |bencher| {
        bencher.iter(|| {
            let mut scanner = SseScanner::new();
            stream.chunks(event.len()).map(|piece| scanner.push(black_box(piece))).sum::<u32>()
        });
    });
    group.bench_function("32_pushes_that_split_events", |bencher| {
        bencher.iter(|| {
            let mut scanner = SseScanner::new();
            stream.chunks(event.len() - 1).map(|piece| scanner.push(black_box(piece))).sum::<u32>()
        });
    });
    group.finish();
}

criterion_group!(benches, bodies, streams);
criterion_main!(benches);
