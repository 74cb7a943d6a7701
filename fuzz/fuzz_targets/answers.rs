//! Any bytes as what an engine answers about its models and its feeds.
#![no_main]

use kvlane_wire::{engine, models};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| {
    for model in models::parse(body).into_iter().flatten() {
        let _ = models::context_len(&model.card);
    }
    let Ok(text) = std::str::from_utf8(body) else { return };
    let queries = engine::ENGINES.iter().filter_map(|engine| engine.feeds.as_ref());
    for feeds in queries.flat_map(|query| (query.parse)(text)) {
        assert!(feeds.len() <= engine::RANKS_MAX);
        for feed in feeds {
            let _ = engine::resolve(&feed.endpoint, text);
        }
    }
});
