//! Any text as a metrics page.
#![no_main]

use kvlane_wire::{engine, prometheus};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|page: &str| {
    for sample in prometheus::samples(page) {
        let _ = sample.label("engine");
    }
    if let Some((_, reported)) = engine::load_report(page) {
        assert!((0.0..=1.0).contains(&reported.kv_usage_ratio));
    }
    let reports = engine::load_reports(page).map_or(0, |(_, reports)| reports.len());
    assert!(reports <= engine::RANKS_MAX && engine::prefix_caches(page).len() <= engine::RANKS_MAX);
    let _ = engine::block_tokens(page);
});
