//! Any bytes as what an engine answers about its models and its feeds.
#![no_main]

use kvlane_wire::{engine, models};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| {
    for model in models::parse(body).into_iter().flatten() {
        let _ = model.max_model_len();
    }
    let Ok(text) = std::str::from_utf8(body) else { return };
    for feeds in [engine::vllm_feeds(text), engine::sglang_feeds(text)].into_iter().flatten() {
        assert!(feeds.len() <= engine::RANKS_MAX);
        for feed in feeds {
            let _ = engine::resolve(&feed.endpoint, text);
        }
    }
});
