//! Any bytes as one of a tokenizer's files. What loads encodes any text, twice the same.
#![no_main]

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use kvlane_tokens::bpe::Bpe;
use kvlane_tokens::{Config, Source, Tokenizer};
use libfuzzer_sys::fuzz_target;

const TOKENIZER: &str =
    r#"{"version":"1.0","added_tokens":[],"model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"a"}}"#;
const TEXT: &str = "Hello  you're 1234 <s> \u{1F642} e\u{301}\r\n\r\n\tde";

static DIRECTORY: LazyLock<PathBuf> = LazyLock::new(|| {
    let dir = PathBuf::from(format!("/dev/shm/kvlane-fuzz-tokenizer-files-{}", std::process::id()));
    fs::create_dir_all(&dir).expect("a directory in memory");
    dir
});

fn encoded(tokenizer: &Tokenizer) -> Option<Vec<u32>> {
    let mut ids = Vec::new();
    tokenizer.text(TEXT, true, &mut ids).ok().map(|()| ids)
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&which, content)) = bytes.split_first() else { return };
    let file = |name: &str| DIRECTORY.join(name);
    let (name, beside) = match which % 4 {
        // What is encoded here; the library's own reader of such files is not what is tried.
        0 => {
            if let Ok(parsed) = serde_json::from_slice(content)
                && let Ok(bpe) = Bpe::from_tokenizer(&parsed)
            {
                bpe.encode(TEXT, &mut Vec::new());
            }
            return;
        }
        1 => ("tokenizer_config.json", true),
        2 => ("special_tokens_map.json", true),
        _ => ("fuzzed.tiktoken", false),
    };
    for old in fs::read_dir(&*DIRECTORY).into_iter().flatten().flatten() {
        fs::remove_file(old.path()).expect("removed");
    }
    if beside {
        fs::write(file("tokenizer.json"), TOKENIZER).expect("written");
    } else {
        fs::write(file("tokenizer_config.json"), r#"{"tokenizer_class":"QWenTokenizer"}"#).expect("written");
    }
    fs::write(file(name), content).expect("written");
    let config = Config { text_bytes_max: 1 << 16, template_fuel_k: 20, ..Config::default() };
    if let Ok(tokenizer) = Tokenizer::load(&Source::at(&*DIRECTORY), &config) {
        assert_eq!(encoded(&tokenizer), encoded(&tokenizer));
    }
});
