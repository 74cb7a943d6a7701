//! Any bytes as the body of a request, counted with each template in use: twice to the same end, ids that there are,
//! and what is rendered is what is counted.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use kvlane_tokens::{Config, Prompt, Source, Tokenizer, UnixTime};
use kvlane_wire::api::Api;
use libfuzzer_sys::fuzz_target;

const TEMPLATES: [&str; 8] = ["deepseek", "gemma", "harmony", "llama", "mistral", "phi", "python", "qwen"];

static TOKENIZERS: LazyLock<Vec<Tokenizer>> = LazyLock::new(|| {
    let tests = "crates/kvlane-tokens/tests";
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|folder| folder.join(tests));
    let tests = above.find(|tests| tests.exists()).expect("the folder of the tests");
    let config = Config {
        cache_bytes_max: 1 << 16,
        text_bytes_max: 1 << 20,
        template_fuel_k: 500,
        ..Config::default()
    };
    let load = |name: &&str| {
        let template = tests.join("oracle/templates").join(format!("{name}.jinja"));
        let source = Source { chat_template: Some(template), ..Source::at(tests.join("data/tiny")) };
        Tokenizer::load(&source, &config).expect("a template of the tests")
    };
    TEMPLATES.iter().map(load).collect()
});

fuzz_target!(|bytes: &[u8]| {
    let Some((&which, body)) = bytes.split_first() else { return };
    let tokenizer = &TOKENIZERS[usize::from(which) % TEMPLATES.len()];
    let (mut first, mut again, mut text) = (Prompt::default(), Prompt::default(), String::new());
    for api in Api::ALL {
        let counted = tokenizer.prompt(api, body, UnixTime(1_700_000_000), &mut first);
        assert_eq!(counted, tokenizer.prompt(api, body, UnixTime(1_700_000_000), &mut again));
        assert_eq!(first.tokens, again.tokens);
        assert!(first.reused_tokens as usize <= first.tokens.len());
        if counted.is_ok() {
            tokenizer.render(api, body, UnixTime(1_700_000_000), &mut text).expect("rendered before");
        }
    }
});
