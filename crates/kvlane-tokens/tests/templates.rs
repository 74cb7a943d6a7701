//! Compares renderings with those of vLLM 0.32, for conversations and templates like those in use.
//!
//! `oracle/render.py` had vLLM's own code render each of `oracle/cases.py` with each of `oracle/templates`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use kvlane_tokens::{Config, Prompt, Source, Tokenizer, UnixTime, Unknown};
use kvlane_wire::api::Api;
use serde_json::Value;

/// 2026-11-20 16:37:30, the time of the oracle's clock.
const NOW: UnixTime = UnixTime(1_795_192_650);

fn tests() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests")
}

fn tokenizer(template: &str) -> Tokenizer {
    let mut source = Source::at(tests().join("data/tiny"));
    source.chat_template = Some(tests().join(format!("oracle/templates/{template}.jinja")));
    Tokenizer::load(&source, &Config::default()).expect("the small model's tokenizer with another template")
}

/// Invariant: Conversations are rendered as the engine renders them, and their tokens counted alike.
///
/// Also held by `what_the_engine_served_is_counted_alike`.
#[test]
fn conversations_are_rendered_as_the_engine_renders_them() {
    let text = std::fs::read_to_string(tests().join("data/templates.jsonl")).expect("the oracle's answers");
    let mut tokenizers: BTreeMap<String, Tokenizer> = BTreeMap::new();
    let mut prompt = Prompt::default();
    let mut different = String::new();
    let (mut same, mut refused) = (0, 0);
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).expect("JSON");
        let of = |key: &str| line[key].as_str().unwrap_or_default();
        let tokenizer =
            tokenizers.entry(of("template").to_owned()).or_insert_with(|| tokenizer(of("template")));
        let api = Api::from_path(of("path")).expect("an API");
        let result = tokenizer.prompt(api, of("body").as_bytes(), NOW, &mut prompt);
        match (result, line["error"].as_str()) {
            (Ok(()), None)
                if prompt.text == of("text")
                    && prompt.tokens.len() as u64 == line["tokens"].as_u64().expect("a count") =>
            {
                same += 1;
            }
            // A request that the engine rejects costs no prefill, so any reason is acceptable here.
            (Err(Unknown::Refused(_) | Unknown::Template(_)), Some(_)) => refused += 1,
            (result, error) => {
                different.push_str(&format!(
                    "{} / {}: {result:?}, {error:?}\n{}",
                    of("template"),
                    of("name"),
                    first_difference(&prompt.text, of("text"))
                ));
            }
        }
    }
    assert!(different.is_empty(), "{same} alike, {refused} refused, but\n{different}");
    assert!(same > 300 && refused > 20, "{same} alike, {refused} refused");
}

fn first_difference(ours: &str, theirs: &str) -> String {
    let pairs = ours.lines().zip(theirs.lines());
    let differing = pairs.filter(|(ours, theirs)| ours != theirs).take(3);
    differing.map(|(ours, theirs)| format!("  here:   {ours:?}\n  engine: {theirs:?}\n")).collect()
}
