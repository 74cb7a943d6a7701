//! llama.cpp's `llama-server` (`tools/server`), which serves metrics only with `--metrics`.

use super::kind::{
    Advice, CardNames, ComputedNames, EngineKind, LoadNames, PrefixCaching, Settings, UsageObject,
};

/// Every answer reports its cache reuse, so counters of the cache are not needed.
pub(super) static ENGINE: EngineKind = EngineKind {
    name: "llamacpp",
    title: "llama.cpp",
    owner: "llamacpp",
    load: LoadNames {
        running: "llamacpp:requests_processing",
        waiting: "llamacpp:requests_deferred",
        // Versions of 2025 and later do not report it: their caches belong to slots.
        kv_usage: &["llamacpp:kv_cache_usage_ratio"],
        kv_capacity: None,
    },
    // The first counter counts the model's calls, including those for parts of prompts.
    intervals: &[("llamacpp:tokens_predicted_total", "llamacpp:tokens_predicted_seconds_total")],
    progress: &["llamacpp:n_decode_total", "llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total"],
    usage: Some(UsageObject {
        key: "\"timings\"",
        adds: true,
        names: Some(ComputedNames { computed: "prompt_n", cached: "cache_n", output: "predicted_n" }),
    }),
    card: CardNames { max_model_len: None, trained_len: Some("/meta/n_ctx_train") },
    versions: &[("/props", "build_info")],
    prefix_caching: PrefixCaching::Always("one prefix per slot, as llama.cpp keeps it"),
    has_blocks: false,
    settings: Settings {
        path: Some("/props"),
        max_model_len: Some("n_ctx"),
        max_num_seqs: Some("total_slots"),
        max_num_batched_tokens: Some("n_batch"),
        ..EngineKind::BARE.settings
    },
    advice: Advice { metrics: Some("--metrics"), ..EngineKind::BARE.advice },
    ..EngineKind::BARE
};

#[cfg(test)]
mod tests {
    use super::super::load_report;

    #[test]
    fn a_page_is_read_by_its_names() {
        let page = "llamacpp:requests_processing 4\nllamacpp:requests_deferred 46\n";
        let (kind, reported) = load_report(page).expect("a llama.cpp page");
        assert_eq!(kind.name, "llamacpp");
        assert_eq!((reported.running, reported.waiting), (4, 46));
        assert_eq!((reported.kv_usage_ratio, reported.kv_capacity_tokens), (0.0, None));
    }
}
