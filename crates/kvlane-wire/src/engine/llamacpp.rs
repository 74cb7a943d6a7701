//! llama.cpp's `llama-server` (`tools/server`), which serves metrics only with `--metrics`.

use super::cache::CacheNames;
use super::progress::ProgressNames;
use super::{Dialect, Names};

/// Every answer reports its cache reuse, so counters are not needed.
pub(super) const CACHE: CacheNames =
    CacheNames { block_tokens: None, queried_tokens: &[], hit_tokens: &[], rank_label: None };

/// The first counter counts the model's calls, including those for parts of prompts.
pub(super) const PROGRESS: ProgressNames = ProgressNames {
    names: &["llamacpp:n_decode_total", "llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total"],
    rank_label: None,
};

pub(super) const NAMES: Names = Names {
    dialect: Dialect::LlamaCpp,
    running: "llamacpp:requests_processing",
    waiting: "llamacpp:requests_deferred",
    // Versions of 2025 and later do not report it: their caches belong to slots.
    kv_usage: &["llamacpp:kv_cache_usage_ratio"],
    kv_capacity: None,
    rank_label: None,
};

#[cfg(test)]
mod tests {
    use super::super::load_report;
    use super::*;

    #[test]
    fn a_page_is_read_by_its_names() {
        let page = "llamacpp:requests_processing 4\nllamacpp:requests_deferred 46\n";
        let (dialect, reported) = load_report(page).expect("a llama.cpp page");
        assert_eq!(dialect, Dialect::LlamaCpp);
        assert_eq!((reported.running, reported.waiting), (4, 46));
        assert_eq!((reported.kv_usage_ratio, reported.kv_capacity_tokens), (0.0, None));
    }
}
