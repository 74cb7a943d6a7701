//! Cost of KV events, from a message's bytes to the index: per block of 16 tokens, on one core.
//!
//! The ids are from a vocabulary of 128,256, as in Llama 3, so about half of them take five bytes and the others three.
//! `prefill` messages store 512 blocks, as a step of 8,192 tokens does; `decode` messages store one block for each of
//! 64 requests. `apply` stores 65,536 blocks into an empty index and removes half of them, one event each, as vLLM
//! does.
//!
//! On Linux the benchmark measures this thread's CPU time, so that other load on the machine matters less.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvlane_core::block::ChainSeed;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::event::EngineHash;
use kvlane_core::index::exact::{Config, ExactIndex};
use kvlane_core::rng::Rng;
use kvlane_wire::kv::version::STORED;
use kvlane_wire::kv::{Batch, Linker, decode};

const ENDPOINT: EndpointId = EndpointId::new(0, 0);
const BLOCK_TOKENS: u32 = 16;
const VOCABULARY: usize = 128_256;

/// CPU time of this thread, as the operating system counts it; wall time where that is not available.
struct CoreTime {
    origin: Instant,
}

impl CoreTime {
    fn now(&self) -> Duration {
        let told = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
        let nanos = told.and_then(|told| told.split(' ').next()?.parse().ok());
        nanos.map_or_else(|| self.origin.elapsed(), Duration::from_nanos)
    }
}

impl Measurement for CoreTime {
    type Intermediate = Duration;
    type Value = Duration;

    fn start(&self) -> Duration {
        self.now()
    }

    fn end(&self, start: Duration) -> Duration {
        self.now().saturating_sub(start)
    }

    fn add(&self, one: &Duration, other: &Duration) -> Duration {
        *one + *other
    }

    fn zero(&self) -> Duration {
        Duration::ZERO
    }

    fn to_f64(&self, value: &Duration) -> f64 {
        value.as_nanos() as f64
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        WallTime.formatter()
    }
}

#[derive(Clone, Copy)]
enum Encoding {
    Arrays,
    Maps,
}

/// Writes msgpack as vLLM does.
struct Writer {
    bytes: Vec<u8>,
    encoding: Encoding,
}

impl Writer {
    fn batch(encoding: Encoding, events: usize) -> Self {
        let mut writer = Self { bytes: vec![0x93, 0xcb], encoding };
        writer.bytes.extend(1_795_162_992.25_f64.to_be_bytes());
        writer.array(events);
        writer
    }

    fn end(mut self) -> Vec<u8> {
        self.bytes.push(0);
        self.bytes
    }

    fn array(&mut self, length: usize) {
        match length {
            0..16 => self.bytes.push(0x90 | length as u8),
            _ => {
                self.bytes.push(0xdc);
                self.bytes.extend((length as u16).to_be_bytes());
            }
        }
    }

    fn int(&mut self, value: u64) {
        match value {
            0..0x80 => self.bytes.push(value as u8),
            0x80..0x100 => self.bytes.extend([0xcc, value as u8]),
            0x100..0x1_0000 => {
                self.bytes.push(0xcd);
                self.bytes.extend((value as u16).to_be_bytes());
            }
            0x1_0000..0x1_0000_0000 => {
                self.bytes.push(0xce);
                self.bytes.extend((value as u32).to_be_bytes());
            }
            _ => {
                self.bytes.push(0xcf);
                self.bytes.extend(value.to_be_bytes());
            }
        }
    }

    fn text(&mut self, text: &str) {
        self.bytes.push(0xa0 | text.len() as u8);
        self.bytes.extend(text.bytes());
    }

    fn field(&mut self, name: &str) {
        if matches!(self.encoding, Encoding::Maps) {
            self.text(name);
        }
    }

    fn open(&mut self, kind: &str, fields: usize) {
        match self.encoding {
            Encoding::Arrays => self.array(1 + fields),
            Encoding::Maps => {
                self.bytes.push(0x80 | (1 + fields) as u8);
                self.text("type");
            }
        }
        self.text(kind);
    }

    fn stored(&mut self, names: &[u64], parent: Option<u64>, rng: &mut Rng) {
        // Up to the kind of the layer group, as vLLM 0.22 to 0.33 write for a model with one group.
        self.open("BlockStored", 10);
        for field in &STORED[..10] {
            self.field(field.name);
            match field.name {
                "block_hashes" => {
                    self.array(names.len());
                    names.iter().for_each(|name| self.int(*name));
                }
                "parent_block_hash" if parent.is_some() => self.int(parent.unwrap_or_default()),
                "token_ids" => {
                    let tokens = names.len() * BLOCK_TOKENS as usize;
                    self.array(tokens);
                    (0..tokens).for_each(|_| self.int(rng.below(VOCABULARY) as u64));
                }
                "block_size" => self.int(u64::from(BLOCK_TOKENS)),
                "medium" => self.text("GPU"),
                "extra_keys" => {
                    self.array(names.len());
                    self.bytes.extend(names.iter().map(|_| 0xc0));
                }
                "group_idx" => self.int(0),
                "kv_cache_spec_kind" => self.text("full_attention"),
                _ => self.bytes.push(0xc0),
            }
        }
    }

    fn removed(&mut self, name: u64) {
        self.open("BlockRemoved", 3);
        self.field("block_hashes");
        self.array(1);
        self.int(name);
        self.field("medium");
        self.text("GPU");
        self.field("group_idx");
        self.int(0);
    }
}

/// Messages that store `per_event` blocks in each of `events` events, until there are `blocks`; and the engine's names.
fn stores(encoding: Encoding, blocks: usize, events: usize, per_event: usize) -> (Vec<Vec<u8>>, Vec<u64>) {
    let mut rng = Rng::new(7);
    let names: Vec<u64> = (0..blocks).map(|_| rng.next_u64()).collect();
    // Each position within an event is one request, whose chain the blocks there continue.
    let mut last = vec![None; events];
    let messages = names
        .chunks(events * per_event)
        .map(|names| {
            let mut writer = Writer::batch(encoding, names.len().div_ceil(per_event));
            for (names, last) in names.chunks(per_event).zip(&mut last) {
                writer.stored(names, *last, &mut rng);
                *last = names.last().copied();
            }
            writer.end()
        })
        .collect();
    (messages, names)
}

fn removals(encoding: Encoding, names: &[u64]) -> Vec<Vec<u8>> {
    let message = |names: &[u64]| {
        let mut writer = Writer::batch(encoding, names.len());
        names.iter().for_each(|name| writer.removed(*name));
        writer.end()
    };
    names.chunks(512).map(message).collect()
}

fn seed(lora: Option<&str>, salt: Option<&str>) -> ChainSeed {
    ChainSeed::new("meta-llama/Llama-3.1-8B-Instruct", lora, salt)
}

fn kv_events(criterion: &mut Criterion<CoreTime>) {
    let shapes = [("prefill", 1, 512), ("decode", 64, 1)];
    for (name, encoding) in [("arrays", Encoding::Arrays), ("maps", Encoding::Maps)] {
        let mut group = criterion.benchmark_group(name);
        group.sample_size(20);
        for (shape, events, per_event) in shapes {
            let (messages, _) = stores(encoding, 16_384, events, per_event);
            let mut batch = Batch::default();
            group.throughput(Throughput::Elements(16_384));
            group.bench_function(BenchmarkId::new("decode", shape), |bencher| {
                bencher.iter(|| {
                    for message in &messages {
                        decode(black_box(message), &mut batch).expect("a batch");
                    }
                });
            });
            let mut linker = Linker::default();
            group.bench_function(BenchmarkId::new("decode_link", shape), |bencher| {
                bencher.iter(|| {
                    for message in &messages {
                        decode(black_box(message), &mut batch).expect("a batch");
                        // Every parent is known: the cost of linking a block without an index.
                        let known = |name: EngineHash| Some(kvlane_core::block::BlockHash(name.0));
                        linker.link(&batch, BLOCK_TOKENS, seed, known, |event| {
                            black_box(event);
                        });
                    }
                });
            });
            let (mut messages, names) = stores(encoding, 65_536, events, per_event);
            group.throughput(Throughput::Elements(65_536));
            messages.extend(removals(encoding, &names[names.len() / 2..]));
            group.bench_function(BenchmarkId::new("apply", shape), |bencher| {
                let empty = || ExactIndex::new(Config { memory_bytes_max: 1 << 30 });
                bencher.iter_batched_ref(
                    empty,
                    |index| {
                        for message in &messages {
                            decode(black_box(message), &mut batch).expect("a batch");
                            let known = |name| index.hash_of(ENDPOINT, name);
                            linker.link(&batch, BLOCK_TOKENS, seed, known, |event| {
                                index.apply(ENDPOINT, event);
                            });
                        }
                    },
                    BatchSize::PerIteration,
                );
            });
        }
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().with_measurement(CoreTime { origin: Instant::now() });
    targets = kv_events
}
criterion_main!(benches);
