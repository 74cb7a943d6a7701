//! Texts cut into cached pieces have the ids of the whole, for any cache contents.

use std::path::Path;

use base64::prelude::{BASE64_STANDARD, Engine as _};
use kvlane_tokens::{Config, Cut, LoadError, Prompt, Source, Tokenizer, UnixTime};
use kvlane_wire::api::Api;
use proptest::prelude::*;
use serde_json::{Value, json};

fn tiny() -> Source {
    Source::at(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny"))
}

fn load(cache_bytes_max: usize) -> Tokenizer {
    Tokenizer::load(&tiny(), &Config { cache_bytes_max, ..Config::default() })
        .expect("the small model's tokenizer")
}

fn library() -> tokenizers::Tokenizer {
    tokenizers::Tokenizer::from_file(tiny().path.join("tokenizer.json")).expect("the small model's tokenizer")
}

/// Texts that are difficult at their ends or when joined.
fn fragment() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("<|eot_id|>".to_owned()),
        Just("<|im_start|>".to_owned()),
        Just("<think>".to_owned()),
        Just("<|".to_owned()),
        Just(" \n\n ".to_owned()),
        Just("  ".to_owned()),
        Just("x = {\n    'a': [1, 2]\n}\n".to_owned()),
        Just("你好，世界 🙂 e\u{301}".to_owned()),
        "[ -~]{0,12}",
        "\\PC{0,6}",
        "[a-z]{1,9} ".prop_map(|word| word.repeat(40)),
    ]
}

fn text() -> impl Strategy<Value = String> {
    prop::collection::vec(fragment(), 0..12).prop_map(|parts| parts.concat())
}

/// Conversations that grow turn by turn from one of a few beginnings.
fn conversations() -> impl Strategy<Value = Vec<Value>> {
    let turn = (0_usize..3, text());
    prop::collection::vec(turn, 1..10).prop_map(|turns| {
        let mut histories: Vec<Vec<Value>> = vec![Vec::new(); 3];
        turns
            .into_iter()
            .map(|(of, text)| {
                let history = &mut histories[of];
                let role = if history.len().is_multiple_of(2) { "user" } else { "assistant" };
                history.push(json!({"role": role, "content": text}));
                json!({"messages": history.clone()})
            })
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Invariant: Token ids do not depend on earlier prompts.
    ///
    /// Also held by `a_long_text_in_chunks_has_the_ids_of_the_whole`,
    /// `where_pieces_cannot_be_encoded_apart_the_whole_is`.
    #[test]
    fn whatever_was_asked_before_the_ids_are_those_of_the_whole_text(bodies in conversations()) {
        thread_local! {
            // Across all cases, one cache is so small that it evicts constantly, and one keeps everything.
            static TOKENIZERS: (Tokenizer, Tokenizer, tokenizers::Tokenizer) = (load(8 << 10), load(64 << 20), library());
        }
        TOKENIZERS.with(|(small, large, library)| {
            for body in &bodies {
                let body = body.to_string();
                let mut prompts = [Prompt::default(), Prompt::default()];
                for (tokenizer, prompt) in [small, large].into_iter().zip(&mut prompts) {
                    tokenizer.prompt(Api::ChatCompletions, body.as_bytes(), UnixTime(0), prompt).expect("tokens");
                    assert!(prompt.reused_tokens as usize <= prompt.tokens.len());
                }
                let whole = library.encode_fast(prompts[0].text.as_str(), false).expect("tokens");
                assert_eq!(&prompts[0].tokens, whole.get_ids());
                assert_eq!(&prompts[1].tokens, whole.get_ids());
            }
        });
    }

    #[test]
    fn a_long_text_in_chunks_has_the_ids_of_the_whole(parts in prop::collection::vec(text(), 1..12), cut in 0_usize..1000) {
        thread_local! {
            static TOKENIZERS: (Tokenizer, tokenizers::Tokenizer) = (load(64 << 20), library());
        }
        TOKENIZERS.with(|(tokenizer, library)| {
            let text = parts.concat().repeat(2);
            let at = text.char_indices().map(|(at, _)| at).nth(text.len() * cut / 1000).unwrap_or(text.len());
            // A prefix, the whole, and the rest: the same chunks at other positions.
            for text in [&text[..at], &text, &text[at..]] {
                let mut ids = Vec::new();
                tokenizer.text(text, true, &mut ids).expect("tokens");
                assert_eq!(ids, library.encode_fast(text, true).expect("tokens").get_ids());
            }
        });
    }

    #[test]
    fn no_body_makes_it_panic(damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6), api in 0..Api::ALL.len()) {
        thread_local! {
            static TOKENIZER: Tokenizer = load(1 << 20);
        }
        let body = r#"{"messages": [{"role": "system", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": null,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}, {"role": "tool", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "prompt": [1, 2], "input": "x", "text": ["a"],
            "chat_template_kwargs": {"a": 1.5}, "truncate_prompt_tokens": 3, "max_tokens": 1, "continue_final_message": false, "system": "s"}"#;
        let mut body = body.as_bytes().to_vec();
        for (at, byte) in damage {
            let at = at.index(body.len());
            body[at] = byte;
        }
        TOKENIZER.with(|tokenizer| {
            let mut prompt = Prompt::default();
            if tokenizer.prompt(Api::ALL[api], &body, UnixTime(0), &mut prompt).is_err() {
                assert!(prompt.tokens.is_empty());
            }
        });
    }

    #[test]
    fn no_bytes_make_it_panic(body in prop::collection::vec(any::<u8>(), 0..200), api in 0..Api::ALL.len()) {
        thread_local! {
            static TOKENIZER: Tokenizer = load(1 << 20);
        }
        TOKENIZER.with(|tokenizer| {
            let _ = tokenizer.prompt(Api::ALL[api], &body, UnixTime(0), &mut Prompt::default());
        });
    }
}

#[test]
fn the_next_turn_encodes_only_what_is_new() {
    let tokenizer = load(64 << 20);
    let mut prompt = Prompt::default();
    let mut ask = |messages: &[Value]| {
        let body = json!({"messages": messages}).to_string();
        tokenizer.prompt(Api::ChatCompletions, body.as_bytes(), UnixTime(0), &mut prompt).expect("tokens");
        (prompt.tokens.len(), prompt.reused_tokens as usize)
    };
    let message = |role, content: &str| json!({"role": role, "content": content.repeat(50)});
    let mut messages =
        vec![message("system", "Be brief, and precise. "), message("user", "What is a cache? ")];
    let (first, reused) = ask(&messages);
    assert_eq!(reused, 0);
    messages.push(message("assistant", "What one keeps at hand. "));
    messages.push(message("user", "Why? "));
    let (second, reused) = ask(&messages);
    assert!(second > first + 300, "{second} after {first}");
    assert!(reused > first * 9 / 10 && reused < first, "{reused} of {first}");

    // A growing plain prompt is cut by its content.
    let mut reused = 0;
    for words in [6000, 6500] {
        let text: Vec<String> = (0..words).map(|i| format!("word{}", i * i % 997)).collect();
        let body = json!({"prompt": text.join(" ")}).to_string();
        tokenizer.prompt(Api::Completions, body.as_bytes(), UnixTime(0), &mut prompt).expect("tokens");
        reused = prompt.reused_tokens as usize * 100 / prompt.tokens.len();
    }
    assert!(reused > 80, "{reused} %");

    // A cache partition finds its own entries and no others.
    let body = json!({"prompt": "What nobody else may know. ".repeat(200)}).to_string();
    let mut reused = |apart| {
        prompt.apart = apart;
        tokenizer.prompt(Api::Completions, body.as_bytes(), UnixTime(0), &mut prompt).expect("tokens");
        prompt.reused_tokens
    };
    assert_eq!((reused(2), reused(4), reused(0)), (0, 0, 0));
    assert!([reused(2), reused(4), reused(0)].iter().all(|&reused| reused > 1000));
}

/// A tokenizer of a few words in its own directory.
fn made(pre_tokenizer: Value, normalizer: Value, added: Value) -> (tempfile::TempDir, Source) {
    let words = ["[UNK]", "▁", "▁a", "▁b", "a", "b", "\n", ".", "▁."];
    let vocab: serde_json::Map<String, Value> =
        words.iter().enumerate().map(|(id, word)| ((*word).to_owned(), json!(id))).collect();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null,
        "model": {"type": "BPE", "vocab": vocab, "merges": [["▁", "a"], ["▁", "b"], ["▁", "."]], "unk_token": "[UNK]",
                  "dropout": null, "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
                  "byte_fallback": false, "ignore_merges": false},
    });
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).expect("a file");
    let source = Source::at(dir.path());
    (dir, source)
}

fn added(id: u32, content: &str, more: Value) -> Value {
    let mut token = json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                           "normalized": false, "special": true});
    for (key, value) in more.as_object().expect("an object") {
        token[key] = value.clone();
    }
    token
}

#[track_caller]
fn check(pre_tokenizer: Value, normalizer: Value, tokens: Value, expect: fn(&Cut) -> bool) {
    let (dir, source) = made(pre_tokenizer, normalizer, tokens);
    let tokenizer = Tokenizer::load(&source, &Config::default()).expect("a tokenizer");
    assert!(expect(&tokenizer.cut()), "{:?}", tokenizer.cut());
    let library = tokenizers::Tokenizer::from_file(dir.path().join("tokenizer.json")).expect("a tokenizer");
    for text in
        ["a b<s>a b", "<s> a<s>b", " a <m> b <m>. <w>a <w> b", "<s><m><w>\n<s>", "ab.a b <n> a<n>", "", "<s>"]
    {
        for _ in 0..2 {
            let mut ids = Vec::new();
            tokenizer.text(text, false, &mut ids).expect("tokens");
            assert_eq!(ids, library.encode_fast(text, false).expect("tokens").get_ids(), "{text:?}");
        }
    }
}

#[test]
fn tokens_that_strip_stand_alone_or_are_normalized_are_respected() {
    let tokens = || {
        json!([
            added(9, "<s>", json!({})),
            added(10, "<m>", json!({"lstrip": true, "rstrip": true})),
            added(11, "<w>", json!({"single_word": true})),
            added(12, "<n>", json!({"normalized": true, "special": false})),
        ])
    };
    let metaspace =
        |scheme| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
    let at_special = |cut: &Cut| *cut == Cut::AtSpecialTokens;
    check(metaspace("always"), Value::Null, tokens(), at_special);
    check(metaspace("never"), Value::Null, tokens(), at_special);
    // A piece that is not the first is encoded accordingly.
    check(metaspace("first"), Value::Null, tokens(), at_special);
    let prepend = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]});
    check(Value::Null, prepend, tokens(), at_special);
}

#[test]
fn where_pieces_cannot_be_encoded_apart_the_whole_is() {
    let metaspace =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": true});
    // No token can precede a piece to make it not the first.
    let tokens = json!([added(9, "<s>", json!({"lstrip": true}))]);
    check(metaspace, Value::Null, tokens, |cut| matches!(cut, Cut::Never(_)));
}

#[test]
fn what_is_wrong_with_the_files_is_said() {
    let dir = tempfile::tempdir().expect("a directory");
    let load =
        |path: &Path| Tokenizer::load(&Source::at(path), &Config::default()).expect_err("nothing to load");
    assert!(matches!(load(&dir.path().join("absent")), LoadError::Absent { .. }));
    assert!(matches!(load(dir.path()), LoadError::NoTokenizer { .. }));
    let file = dir.path().join("tokenizer.json");
    for bad in ["", "{}", "[1", "{\"model\": {\"type\": \"BPE\"}}"] {
        std::fs::write(&file, bad).expect("a file");
        let error = load(dir.path());
        assert!(error.to_string().contains("tokenizer.json"), "{error}");
    }
    std::fs::write(dir.path().join("o200k_base.tiktoken"), "no ranks").expect("a file");
    let error = load(&dir.path().join("o200k_base.tiktoken"));
    assert!(error.to_string().contains("line 1"), "{error}");

    let mut source = tiny();
    source.chat_template = Some(dir.path().join("chat.jinja"));
    let error = Tokenizer::load(&source, &Config::default()).expect_err("no template");
    assert!(error.to_string().contains("chat.jinja"), "{error}");
    std::fs::write(dir.path().join("chat.jinja"), "{% for %}").expect("a file");
    let error = Tokenizer::load(&source, &Config::default()).expect_err("no template");
    assert!(matches!(error, LoadError::Template { .. }), "{error}");
}

#[test]
fn a_rank_file_is_a_tokenizer_whose_prompts_are_counted_but_not_its_conversations() {
    let dir = tempfile::tempdir().expect("a directory");
    // Every byte, and "he", "ll", "hell" as further tokens.
    let mut ranks: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    ranks.extend([b"he".to_vec(), b"ll".to_vec(), b"hell".to_vec()]);
    let lines: String = ranks
        .iter()
        .enumerate()
        .map(|(rank, token)| format!("{} {rank}\n", BASE64_STANDARD.encode(token)))
        .collect();
    std::fs::write(dir.path().join("o200k_base.tiktoken"), lines).expect("a file");
    let config = json!({"added_tokens_decoder": {"300": {"content": "<|end|>", "special": true}}});
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).expect("a file");

    let tokenizer = Tokenizer::load(&Source::at(dir.path()), &Config::default()).expect("a tokenizer");
    let mut ids = Vec::new();
    tokenizer.text("hello<|end|> he", true, &mut ids).expect("tokens");
    assert_eq!(ids, [258, u32::from(b'o'), 300, u32::from(b' '), 256]);
    assert_eq!(tokenizer.cut(), Cut::AtSpecialTokens);
    assert!(!tokenizer.has_template() && tokenizer.is_fast());
}
