//! Compares the encoder with the `tokenizers` library: the same ids for any tokenizer and text.

use std::path::Path;
use std::sync::LazyLock;

use kvlane_tokens::bpe::Bpe;
use proptest::prelude::*;
use proptest::sample::Index;
use serde_json::{Value, json};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{Model, Tokenizer};

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const O200K: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK_REST: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

const LANGUAGES: &str = "你好，世界。这是一个测试。 こんにちは世界、カタカナもあります。 안녕하세요 세계 Привет, мир! Съешь ещё этих мягких \
    французских булок. Grüße aus Köln, Übergröße. Γειά σου Κόσμε. مرحبا بالعالم שלום עולם नमस्ते दुनिया สวัสดีชาวโลก 🙂🚀👩‍💻 \
    café naïve façade 12345 3.14159 x² ½ don't we'll I'VE they're\r\n\t\tindent\n\n    four\n";

/// The repository's own documents and code, and a few other languages.
fn corpus() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let files = [
        "README.md",
        "ARCHITECTURE.md",
        "crates/kvlane-core/src/block.rs",
        "crates/kvlane-core/src/cache_accuracy.rs",
    ];
    let mut texts: Vec<_> =
        files.iter().filter_map(|file| std::fs::read_to_string(root.join(file)).ok()).collect();
    texts.push(LANGUAGES.repeat(8));
    texts.iter().flat_map(|text| text.split_inclusive('\n')).map(str::to_owned).collect()
}

fn split(pattern: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
}

fn byte_level(add_prefix_space: bool, use_regex: bool) -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": use_regex})
}

fn sequence(stages: impl IntoIterator<Item = Value>) -> Value {
    json!({"type": "Sequence", "pretokenizers": stages.into_iter().collect::<Vec<_>>()})
}

/// Pre-tokenizers as in the files of each family.
fn pre_tokenizers() -> Vec<Value> {
    let mut removed = split(LLAMA3);
    removed["behavior"] = json!("Removed");
    removed["invert"] = json!(true);
    let deepseek = [r"\p{N}{1,3}", "[一-龥\u{3040}-ゟ゠-ヿ]+", DEEPSEEK_REST].map(split);
    vec![
        byte_level(false, true),
        byte_level(true, true),
        sequence([split(LLAMA3), byte_level(false, false)]),
        sequence([removed, byte_level(false, false)]),
        sequence([split(QWEN2), byte_level(false, false)]),
        sequence([split(O200K), byte_level(false, false)]),
        sequence(deepseek.into_iter().chain([byte_level(false, false)])),
        sequence([json!({"type": "Digits", "individual_digits": true}), byte_level(false, true)]),
    ]
}

/// A model trained on the corpus, split into words by one pre-tokenizer.
fn trained(pre_tokenizer: &Value) -> Value {
    let mut tokenizer = Tokenizer::new(BPE::default());
    let pre_tokenizer: tokenizers::PreTokenizerWrapper =
        serde_json::from_value(pre_tokenizer.clone()).unwrap();
    tokenizer.with_pre_tokenizer(Some(pre_tokenizer));
    let trainer = BpeTrainer::builder()
        .vocab_size(2000)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .show_progress(false)
        .build();
    tokenizer.train(&mut TrainerWrapper::from(trainer), corpus().into_iter()).unwrap();
    serde_json::to_value(&tokenizer).unwrap()
}

/// One tokenizer in both implementations.
struct Both {
    name: String,
    ours: Bpe,
    theirs: Tokenizer,
}

impl Both {
    fn new(tokenizer: &Value) -> Both {
        Both {
            name: format!("{} {}", tokenizer["normalizer"], tokenizer["pre_tokenizer"]),
            ours: Bpe::from_tokenizer(tokenizer).unwrap(),
            theirs: serde_json::from_value(tokenizer.clone()).unwrap(),
        }
    }

    /// The difference between the two on `text`, if any.
    fn difference(&self, text: &str) -> Option<String> {
        let expected = self.theirs.encode_fast(text, false).unwrap();
        let mut ids = vec![7];
        self.ours.encode(text, &mut ids);
        (ids[1..] != *expected.get_ids())
            .then(|| format!("{text:?} is {:?}, not {:?} with {}", &ids[1..], expected.get_ids(), self.name))
    }

    fn check(&self, text: &str) {
        assert_eq!(self.difference(text), None);
    }
}

static ALL: LazyLock<Vec<Both>> = LazyLock::new(|| {
    let mut all = Vec::new();
    let models =
        [trained(&byte_level(false, true)), trained(&sequence([split(O200K), byte_level(false, false)]))];
    for (index, pre_tokenizer) in pre_tokenizers().into_iter().enumerate() {
        let mut tokenizer = models[index % 2].clone();
        tokenizer["pre_tokenizer"] = pre_tokenizer;
        for (normalizer, ignore_merges) in [(Value::Null, index < 4), (json!({"type": "NFC"}), index >= 4)] {
            tokenizer["normalizer"] = normalizer;
            tokenizer["model"]["ignore_merges"] = json!(ignore_merges);
            all.push(Both::new(&tokenizer));
        }
    }
    all
});

const FRAGMENTS: &[&str] = &[
    " ",
    "  ",
    "\t",
    "\n",
    "\r\n",
    "\u{a0}",
    "\u{3000}",
    "a",
    "the",
    " request",
    "Engine",
    "XML",
    "é",
    "e\u{301}",
    "\u{1100}\u{1161}\u{11a8}",
    "\u{212b}",
    "\u{0f73}",
    "中",
    "文字世界",
    "ひ",
    "か\u{3099}",
    "カタカナ",
    "한국",
    "สวัสดี",
    "नमस्ते",
    "\u{301}",
    "'s",
    "'LL",
    "'ſ",
    "don't",
    ".",
    ", ",
    "//",
    "==",
    "(",
    "€",
    "0",
    "12345678",
    "½",
    "🙂",
    "👩‍💻",
    "\0",
    "\u{200b}",
    "\u{378}",
    "𝒳",
    "fn main() {",
    "aaaaaaaaaaaaaaaaaaaa",
];

prop_compose! {
    fn text()(parts in prop::collection::vec(prop_oneof![
        8 => prop::sample::select(FRAGMENTS).prop_map(str::to_owned),
        2 => any::<char>().prop_map(String::from),
        2 => "[a-z]{1,12}",
        1 => (any::<char>(), 1..70_usize).prop_map(|(character, times)| String::from(character).repeat(times)),
    ], 0..24)) -> String {
        parts.concat()
    }
}

/// A tokenizer of arbitrary merges, in an order that training would not produce: a merge may precede the merges that
/// produce its parts, and a token may be produced in several ways.
fn arbitrary_merges(picks: &[(Index, Index)], order: &[Index], ignore_merges: bool) -> Value {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let mut tokens: Vec<String> = alphabet.iter().map(|character| character.to_string()).collect();
    let mut parts: Vec<String> = ["a", "b", "c"].map(str::to_owned).to_vec();
    let mut merges = Vec::new();
    for (left, right) in picks {
        let (left, right) = (left.get(&parts).clone(), right.get(&parts).clone());
        let made = format!("{left}{right}");
        if made.len() > 12 {
            continue;
        }
        if !tokens.contains(&made) {
            tokens.push(made.clone());
            parts.push(made);
        }
        merges.push(json!([left, right]));
    }
    for (place, other) in order.iter().enumerate().take(merges.len()) {
        let other = other.index(merges.len());
        merges.swap(place, other);
    }
    let vocab: serde_json::Map<String, Value> =
        tokens.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": byte_level(false, true), "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": ignore_merges,
            "vocab": vocab, "merges": merges},
    })
}

/// tiktoken's merging by its definition: of all neighbours whose bytes are a token, the lowest rank first.
fn by_definition(ranks: &[(Vec<u8>, u32)], word: &[u8]) -> Vec<u32> {
    let rank = |bytes: &[u8]| ranks.iter().find(|(token, _)| token == bytes).map(|(_, rank)| *rank);
    if let Some(rank) = rank(word) {
        return vec![rank];
    }
    let mut parts: Vec<Vec<u8>> = word.iter().map(|&byte| vec![byte]).collect();
    loop {
        let merged = |at: usize| rank(&parts[at..at + 2].concat()).map(|rank| (rank, at));
        match (0..parts.len().saturating_sub(1)).filter_map(merged).min() {
            Some((_, at)) => {
                let right = parts.remove(at + 1);
                parts[at].extend(right);
            }
            None => return parts.iter().map(|part| rank(part).unwrap()).collect(),
        }
    }
}

proptest! {
    /// Invariant: Token ids are those of the `tokenizers` library, and an allowed cut changes none.
    ///
    /// Also held by `every_scanner_splits_as_its_expression`, `a_cut_that_is_allowed_changes_no_id`.
    #[test]
    fn ids_are_those_of_the_library(text in text()) {
        for both in &*ALL {
            prop_assert_eq!(both.difference(&text), None);
        }
    }

    #[test]
    fn any_order_of_merges_gives_the_ids_of_the_library(
        picks in prop::collection::vec(any::<(Index, Index)>(), 0..40),
        order in prop::collection::vec(any::<Index>(), 0..40),
        ignore_merges in any::<bool>(),
        words in prop::collection::vec(prop_oneof![4 => "[abc]{1,40}", 2 => "[ab]{40,200}", 1 => "a{1,300}"], 1..12),
    ) {
        let both = Both::new(&arbitrary_merges(&picks, &order, ignore_merges));
        prop_assert_eq!(both.difference(&words.join(" ")), None);
        for word in &words {
            prop_assert_eq!(both.difference(word), None);
        }
    }

    #[test]
    fn ranks_merge_by_their_definition(
        tokens in prop::collection::btree_set("[abc]{2,7}", 0..40),
        order in prop::collection::vec(any::<Index>(), 40),
        word in prop_oneof!["[abc]{1,40}", "[ab]{40,120}"],
    ) {
        let mut tokens: Vec<_> = tokens.into_iter().collect();
        for (place, other) in order.iter().enumerate().take(tokens.len()) {
            let other = other.index(tokens.len());
            tokens.swap(place, other);
        }
        let bytes = (0..=255).map(|byte| vec![byte]);
        let ranks: Vec<_> = bytes.chain(tokens.into_iter().map(String::into_bytes)).zip(0..).collect();
        let mut ids = Vec::new();
        Bpe::from_ranks(ranks.iter().cloned(), QWEN2).unwrap().encode(&word, &mut ids);
        prop_assert_eq!(ids, by_definition(&ranks, word.as_bytes()));
    }

    #[test]
    fn a_cut_that_is_allowed_changes_no_id(text in text()) {
        for both in &*ALL {
            let mut whole = Vec::new();
            both.ours.encode(&text, &mut whole);
            for at in (0..text.len()).filter(|&at| Bpe::cuts_at(&text, at)) {
                let mut halves = Vec::new();
                both.ours.encode(&text[..at], &mut halves);
                both.ours.encode(&text[at..], &mut halves);
                prop_assert_eq!(&halves, &whole, "cut at {} with {}", at, both.name);
            }
        }
    }
}

#[test]
fn the_corpus_has_the_ids_of_the_library() {
    let text = corpus().concat();
    for both in &*ALL {
        both.check(&text);
    }
}

#[test]
fn a_word_longer_than_any_memory_kept_is_encoded_whole() {
    let word = "ab".repeat(100_000);
    let both = &ALL[4];
    both.check(&word);
    both.check("ab");
}

#[test]
fn many_threads_share_one_encoder() {
    let both = &ALL[4];
    let expected = both.theirs.encode_fast(LANGUAGES, false).unwrap().get_ids().to_vec();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..8 {
                    let mut ids = Vec::new();
                    both.ours.encode(LANGUAGES, &mut ids);
                    assert_eq!(ids, expected);
                }
            });
        }
    });
}

#[test]
fn what_is_not_encoded_here_is_refused_with_its_reason() {
    let plain = arbitrary_merges(&[], &[], false);
    assert!(Bpe::from_tokenizer(&plain).is_ok());
    let mut untyped = plain.clone();
    untyped["model"].as_object_mut().unwrap().remove("type");
    assert!(Bpe::from_tokenizer(&untyped).is_ok(), "as in GPT-2's file");
    let refused = |path: &str, value: Value, reason: &str| {
        let mut tokenizer = plain.clone();
        *tokenizer.pointer_mut(path).unwrap() = value;
        let error = Bpe::from_tokenizer(&tokenizer).unwrap_err().to_string();
        assert!(error.contains(reason), "{path}: {error}");
    };
    refused("/model/type", json!("WordPiece"), "WordPiece");
    refused("/model/dropout", json!(0.1), "dropout");
    refused("/model/end_of_word_suffix", json!("</w>"), "end_of_word_suffix");
    refused("/model/continuing_subword_prefix", json!("##"), "continuing_subword_prefix");
    refused("/model/vocab", json!({"a": 0}), "byte 0x00");
    refused("/model/vocab", json!({"a": 1_u64 << 40}), "1099511627776");
    refused("/model/vocab", json!([]), "vocabulary");
    refused("/model/merges", json!("a b"), "merges");
    refused("/model/merges", json!(["a b", "ab"]), "merge 0");
    refused("/model/merges", json!([["a", 1]]), "merge 0");
    refused("/normalizer", json!({"type": "NFKC"}), "NFKC");
    refused("/normalizer", json!({"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}), "Lowercase");
    refused("/pre_tokenizer", Value::Null, "pre-tokenizer");
    refused("/pre_tokenizer", json!({"type": "Metaspace"}), "Metaspace");
    refused("/pre_tokenizer", sequence([split("."), byte_level(false, false)]), "scanner");
    refused("/pre_tokenizer", sequence([split(LLAMA3), byte_level(true, false)]), "space");
    refused("/pre_tokenizer", sequence([split(LLAMA3), byte_level(false, true)]), "Split, ByteLevel");
    refused("/pre_tokenizer", byte_level(false, false), "ByteLevel");
    assert!(Bpe::from_tokenizer(&Value::Null).is_err());
    assert!(Bpe::from_ranks([(vec![0], 0)].into_iter(), LLAMA3).is_err());
    assert!(Bpe::from_ranks((0..=255).map(|byte| (vec![byte], u32::MAX)), LLAMA3).is_err());
}

#[test]
fn the_vocabulary_and_its_model_agree_on_every_token() {
    for both in &*ALL {
        let mut tokens: Vec<_> = both.theirs.get_model().get_vocab().into_iter().collect();
        tokens.sort_unstable();
        let words: Vec<_> =
            tokens.iter().map(|(token, _)| token.replace('Ġ', " ").replace('Ċ', "\n")).collect();
        both.check(&words.join("\n"));
    }
}
