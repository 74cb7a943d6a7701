//! Compares token counts with those of vLLM 0.32 for requests to a small model. See `data/README.md`.

use std::path::Path;

use kvlane_tokens::{Config, Cut, Prompt, Source, Tokenizer, UnixTime, Unknown};
use kvlane_wire::api::Api;
use serde_json::Value;

fn tiny() -> Tokenizer {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny");
    Tokenizer::load(&Source::at(dir), &Config::default()).expect("the small model's tokenizer")
}

fn lines(file: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(file);
    let text = std::fs::read_to_string(path).expect("a fixture");
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().expect("ids").iter().map(|id| id.as_u64().expect("an id") as u32).collect()
}

#[test]
fn what_the_engine_served_is_counted_alike() {
    let tokenizer = tiny();
    assert_eq!(tokenizer.cut(), Cut::AtSpecialTokens);
    assert!(tokenizer.is_fast());
    let mut prompt = Prompt::default();
    let mut compared = 0;
    for file in ["chat-golden.jsonl", "served.jsonl"] {
        // The second pass uses the cache.
        for line in lines(file).iter().chain(&lines(file)) {
            let body = line["body"].as_str().expect("a body");
            let api = Api::from_path(line["path"].as_str().expect("a path")).expect("an API");
            let result = tokenizer.prompt(api, body.as_bytes(), UnixTime::default(), &mut prompt);
            match line["error"].as_str() {
                Some(why) => assert_eq!(result, Err(Unknown::Refused(why.to_owned())), "{}", line["name"]),
                None => {
                    assert_eq!(result, Ok(()), "{body}");
                    if let Some(text) = line["text"].as_str() {
                        assert_eq!(prompt.text, text);
                    }
                    assert_eq!(prompt.tokens, ids(&line["tokens"]), "{body}");
                    compared += 1;
                }
            }
        }
    }
    assert_eq!(compared, 2 * (8 + 4));
    assert!(tokenizer.stats().tokens_reused > 500, "{:?}", tokenizer.stats());
}
