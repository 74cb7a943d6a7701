//! Any text, encoded here and by the `tokenizers` library: the same ids.
#![no_main]

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use kvlane_tokens::{Config, Source, Tokenizer};
use libfuzzer_sys::fuzz_target;

fn tiny() -> PathBuf {
    let tiny = "crates/kvlane-tokens/tests/data/tiny";
    let mut above = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().map(|folder| folder.join(tiny));
    above.find(|tiny| tiny.exists()).expect("the small model's folder")
}

static BOTH: LazyLock<(Tokenizer, tokenizers::Tokenizer)> = LazyLock::new(|| {
    let config = Config { cache_bytes_max: 1 << 14, ..Config::default() };
    let ours = Tokenizer::load(&Source::at(tiny()), &config).expect("the small model's tokenizer");
    assert!(ours.is_fast());
    let library = tokenizers::Tokenizer::from_file(tiny().join("tokenizer.json"));
    (ours, library.expect("the small model's tokenizer"))
});

fuzz_target!(|text: &str| {
    let (ours, library) = &*BOTH;
    let expect = library.encode(text, false).expect("encoded");
    for _ in 0..2 {
        let mut ids = Vec::new();
        ours.text(text, false, &mut ids).expect("encoded");
        assert_eq!(ids, expect.get_ids());
    }
});
