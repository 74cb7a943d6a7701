//! Any text as a chat template, in front of conversations: bounded, and the same twice.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use kvlane_tokens::{Config, Source, Tokenizer, UnixTime};
use kvlane_wire::api::Api;
use libfuzzer_sys::fuzz_target;

const TEXT_BYTES_MAX: usize = 1 << 16;

/// As small as a tokenizer may be: what is tried is the template.
const TOKENIZER: &str =
    r#"{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}"#;

const BODIES: [&str; 3] = [
    r#"{"messages":[{"role":"system","content":"s"},{"role":"user","content":"hi"},{"role":"assistant","content":"a"},{"role":"user","content":"b"}]}"#,
    r#"{"messages":[{"role":"user","content":[{"type":"text","text":"t"}]},{"role":"assistant","content":null,"tool_calls":[{"id":"c","type":"function","function":{"name":"f","arguments":"{\"x\":[1,2.5,null]}"}}]},{"role":"tool","tool_call_id":"c","content":"r"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object","properties":{"x":{"type":"array"}}}}}]}"#,
    r#"{"messages":[{"role":"user","content":"u"}],"chat_template_kwargs":{"enable_thinking":false,"n":[1,{"k":"v"}]},"add_generation_prompt":false}"#,
];

/// The source, whose template is written anew for each input.
static SOURCE: LazyLock<Source> = LazyLock::new(|| {
    let dir = PathBuf::from(format!("/dev/shm/kvlane-fuzz-templates-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("a directory in memory");
    fs::write(dir.join("tokenizer.json"), TOKENIZER).expect("written");
    Source { chat_template: Some(dir.join("template.jinja")), ..Source::at(dir) }
});

fuzz_target!(|template: &str| {
    let path = SOURCE.chat_template.as_ref().expect("a template");
    fs::write(path, template).expect("written");
    let config = Config { text_bytes_max: TEXT_BYTES_MAX, template_fuel_k: 20, ..Config::default() };
    let Ok(tokenizer) = Tokenizer::load(&SOURCE, &config) else { return };
    let (mut first, mut again) = (String::new(), String::new());
    for body in BODIES {
        let render = |out: &mut String| {
            tokenizer.render(Api::ChatCompletions, body.as_bytes(), UnixTime(1_700_000_000), out)
        };
        assert_eq!(render(&mut first), render(&mut again));
        assert_eq!(first, again);
        assert!(first.len() <= TEXT_BYTES_MAX);
    }
});
