//! Tokens per second on one core, compared with the `tokenizers` library. Printed, never asserted.
//!
//! The tokenizer is trained on the repository's own text, or read from the file in `TOKENIZER_JSON`.

use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvlane_tokens::bpe::Bpe;
use serde_json::{Value, json};
use tokenizers::Tokenizer;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const CHINESE: [&str; 12] = [
    "缓存",
    "请求",
    "模型",
    "推理服务器",
    "的",
    "我们",
    "可以",
    "在",
    "前缀",
    "路由到同一个节点",
    "因此",
    "等待时间",
];

/// All files below `folder` with this ending, ordered by name.
fn read(folder: &Path, ending: &str) -> String {
    let mut paths: Vec<_> =
        std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    paths.sort();
    let text = |path: &std::path::PathBuf| match path.is_dir() {
        true => read(path, ending),
        false if path.extension().is_some_and(|found| found == ending) => {
            std::fs::read_to_string(path).unwrap_or_default()
        }
        false => String::new(),
    };
    paths.iter().map(text).collect()
}

/// Sentences of pseudo-random words, all different, as in prose.
fn chinese() -> String {
    let mut state = 1_u64;
    let mut draw = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize
    };
    let mut text = String::new();
    while text.len() < 300_000 {
        (0..5 + draw() % 10).for_each(|_| text.push_str(CHINESE[draw() % CHINESE.len()]));
        text.push(['。', '，'][draw() % 2]);
    }
    text
}

fn trained(texts: &[(&str, String)]) -> Value {
    let mut tokenizer = Tokenizer::new(BPE::default());
    let pre_tokenizer = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": O200K}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    ]});
    let pre_tokenizer: tokenizers::PreTokenizerWrapper =
        serde_json::from_value(pre_tokenizer).expect("a pre-tokenizer as the library writes it");
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer));
    let trainer = BpeTrainer::builder()
        .vocab_size(16_000)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .show_progress(false)
        .build();
    let texts = texts.iter().map(|(_, text)| text.as_str());
    tokenizer.train(&mut TrainerWrapper::from(trainer), texts).expect("training on text");
    serde_json::to_value(&tokenizer).expect("a tokenizer is JSON")
}

fn encode(criterion: &mut Criterion) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let texts = [
        ("english", read(&root.join("docs"), "md")),
        ("code", read(&root.join("crates/kvlane-core/src"), "rs")),
        ("chinese", chinese()),
        ("one_letter", "a".repeat(1_000_000)),
    ];
    let tokenizer = match std::env::var_os("TOKENIZER_JSON") {
        Some(path) => serde_json::from_slice(&std::fs::read(path).expect("TOKENIZER_JSON is a file"))
            .expect("TOKENIZER_JSON is JSON"),
        None => trained(&texts[..3]),
    };
    let theirs: Tokenizer = serde_json::from_value(tokenizer.clone()).expect("the library reads it");
    let ours = || Bpe::from_tokenizer(&tokenizer).expect("the tokenizer is of a kind encoded here");
    let warm = ours();
    for (name, text) in &texts {
        let mut ids = Vec::new();
        warm.encode(text, &mut ids);
        let expected = theirs.encode_fast(text.as_str(), false).expect("the library encodes any text");
        assert_eq!(ids, expected.get_ids(), "{name}");
        let mut group = criterion.benchmark_group(format!("encode_{name}"));
        group.throughput(Throughput::Elements(ids.len() as u64));
        group.sample_size(10).measurement_time(Duration::from_secs(1));
        group.bench_function("warm", |bencher| {
            bencher.iter(|| {
                ids.clear();
                warm.encode(black_box(text), &mut ids);
            });
        });
        group.bench_function("cold", |bencher| {
            bencher.iter_custom(|times| {
                let once = |_| {
                    let bpe = ours();
                    let mut ids = Vec::with_capacity(text.len());
                    let start = Instant::now();
                    bpe.encode(black_box(text), &mut ids);
                    start.elapsed()
                };
                (0..times).map(once).sum()
            });
        });
        group.bench_function("tokenizers", |bencher| {
            bencher
                .iter(|| theirs.encode_fast(black_box(text.as_str()), false).map(|encoding| encoding.len()));
        });
        group.finish();
    }
}

criterion_group!(benches, encode);
criterion_main!(benches);
