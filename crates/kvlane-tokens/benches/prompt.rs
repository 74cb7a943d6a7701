//! From a request's body to its token ids: a conversation of 100,000 tokens whose first 95,000 are cached, an uncached
//! one, and a growing plain prompt.
//!
//! Measures CPU time where the operating system provides it (Linux), so that other load on the machine does not matter.
//!
//! `KVLANE_BENCH_TOKENIZER=DIR` uses a model's tokenizer and template instead of the small one of the tests.

use std::fmt::Write as _;
use std::hint::black_box;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use kvlane_tokens::{Config, Prompt, Source, Tokenizer, UnixTime};
use kvlane_wire::api::Api;

/// New tokens per request.
const NEW_TOKENS: usize = 5_000;
/// Total tokens.
const TOKENS: usize = 100_000;
/// Tokens per message.
const MESSAGE_TOKENS: usize = 800;

fn tokenizer(cache_bytes_max: usize) -> Tokenizer {
    let dir = std::env::var_os("KVLANE_BENCH_TOKENIZER").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tiny")),
        PathBuf::from,
    );
    Tokenizer::load(&Source::at(dir), &Config { cache_bytes_max, ..Config::default() }).expect("a tokenizer")
}

/// CPU time of this thread. The operating system updates it a few hundred times a second, so a measurement must be
/// longer than that, which criterion ensures.
struct ProcessorTime;

// === impl ProcessorTime ===

impl Measurement for ProcessorTime {
    type Intermediate = Duration;
    type Value = Duration;

    fn start(&self) -> Duration {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
        let run = text.split(' ').next().and_then(|first| first.parse().ok());
        run.map_or_else(|| EPOCH.with(Instant::elapsed), Duration::from_nanos)
    }

    fn end(&self, start: Duration) -> Duration {
        self.start().saturating_sub(start)
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

thread_local! {
    static EPOCH: Instant = Instant::now();
}

/// An endless text of English, code and other scripts without repetition.
struct Words(u64);

// === impl Words ===

impl Words {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    /// A text of about `tokens` tokens.
    fn text(&mut self, tokenizer: &Tokenizer, tokens: usize) -> String {
        const WORDS: [&str; 24] = [
            "the", "request", "self", "return", "cache", "of", "import", "block", "and", "router", "tokens",
            "if", "None", "prefix", "is", "module", "value", "for", "error", "naïve", "Köln", "file", "path",
            "with",
        ];
        let mut text = String::new();
        let mut count = 0;
        let mut ids = Vec::new();
        while count < tokens {
            let mut line = String::new();
            for _ in 0..8 + self.next() % 8 {
                let word = WORDS[self.next() as usize % WORDS.len()];
                match self.next() % 16 {
                    0 => write!(line, "{}.{} ", word, self.next() % 10_000),
                    1 => write!(line, "{word}_{word}(\"x\"), "),
                    2 => write!(line, "{{{word}: 你好}} "),
                    _ => write!(line, "{word} "),
                }
                .expect("a string takes all");
            }
            line.push('\n');
            ids.clear();
            tokenizer.text(&line, false, &mut ids).expect("tokens");
            count += ids.len();
            text.push_str(&line);
        }
        text
    }
}

fn message(role: &str, content: &str) -> serde_json::Value {
    serde_json::json!({"role": role, "content": content})
}

fn conversation(messages: &[serde_json::Value]) -> Vec<u8> {
    let tools: Vec<_> = (0..10)
        .map(|i| {
            serde_json::json!({"type": "function", "function": {"name": format!("tool_{i}"), "description": "Reads a file.",
                "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}}}}})
        })
        .collect();
    serde_json::json!({"model": "m", "messages": messages, "tools": tools, "stream": true})
        .to_string()
        .into_bytes()
}

fn prompts(criterion: &mut Criterion<ProcessorTime>) {
    let warm = tokenizer(256 << 20);
    let mut words = Words(7);
    let mut messages = vec![message("system", &words.text(&warm, 2_000))];
    for turn in 0..(TOKENS - NEW_TOKENS - 2_000) / MESSAGE_TOKENS {
        let role = if turn % 2 == 0 { "user" } else { "assistant" };
        messages.push(message(role, &words.text(&warm, MESSAGE_TOKENS)));
    }
    let grown = |words: &mut Words| {
        let mut messages = messages.clone();
        messages.push(message("user", &words.text(&warm, NEW_TOKENS)));
        conversation(&messages)
    };
    let whole = grown(&mut words);
    let mut prompt = Prompt::default();
    let run = |tokenizer: &Tokenizer, api: Api, body: &[u8], prompt: &mut Prompt| {
        tokenizer.prompt(api, body, UnixTime(0), prompt).expect("tokens");
        black_box(prompt.tokens.len())
    };
    run(&warm, Api::ChatCompletions, &whole, &mut prompt);

    let mut group = criterion.benchmark_group("prompt");
    group.sample_size(20);
    let name = format!("chat of {} tokens in {} bytes", prompt.tokens.len(), whole.len());
    group.bench_function(format!("{name}, cached"), |bencher| {
        bencher.iter(|| run(&warm, Api::ChatCompletions, &whole, &mut prompt));
    });
    group.bench_function(format!("{name}, {NEW_TOKENS} uncached"), |bencher| {
        bencher.iter_batched(
            || grown(&mut words),
            |body| run(&warm, Api::ChatCompletions, &body, &mut prompt),
            BatchSize::NumIterations(16),
        );
    });
    let cold = tokenizer(0);
    group.bench_function(format!("{name}, uncached"), |bencher| {
        bencher.iter(|| run(&cold, Api::ChatCompletions, &whole, &mut prompt));
    });

    let text = words.text(&warm, TOKENS - NEW_TOKENS);
    let grown = |words: &mut Words| {
        let text = format!("{text}{}", words.text(&warm, NEW_TOKENS));
        serde_json::json!({"model": "m", "prompt": text}).to_string().into_bytes()
    };
    run(&warm, Api::Completions, &grown(&mut words), &mut prompt);
    group.bench_function(
        format!("plain prompt of {} tokens, {NEW_TOKENS} uncached", prompt.tokens.len()),
        |bencher| {
            bencher.iter_batched(
                || grown(&mut words),
                |body| run(&warm, Api::Completions, &body, &mut prompt),
                BatchSize::NumIterations(16),
            );
        },
    );
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default().with_measurement(ProcessorTime);
    targets = prompts
}
criterion_main!(benches);
