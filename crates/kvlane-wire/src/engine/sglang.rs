//! SGLang (`sglang/srt/metrics/collector.py`), which serves metrics only with `--enable-metrics`.

use super::cache::CacheNames;
use super::{Capacity, Dialect, Names};

pub(super) const CACHE: CacheNames = CacheNames {
    // Versions before 0.5.11; later ones report it in `/server_info`.
    block_tokens: Some(("sglang:cache_config_info", "page_size")),
    queried_tokens: &["sglang:prompt_tokens_total"],
    // Newer versions label it by where the tokens were found.
    hit_tokens: &["sglang:cached_tokens_total"],
    rank_label: Some("dp_rank"),
};

pub(super) const NAMES: Names = Names {
    dialect: Dialect::Sglang,
    running: "sglang:num_running_reqs",
    waiting: "sglang:num_queue_reqs",
    // `token_usage` is the usage of the fullest pool; older and newer versions both have it.
    kv_usage: &["sglang:token_usage", "sglang:full_token_usage"],
    kv_capacity: Some(Capacity { name: "sglang:max_total_num_tokens", tokens: |sample| Some(sample.value) }),
    rank_label: Some("dp_rank"),
};

#[cfg(test)]
mod tests {
    use super::super::load_report;
    use super::*;

    #[test]
    fn a_page_is_read_by_its_names() {
        let page = concat!(
            "sglang:num_running_reqs{model_name=\"m\",tp_rank=\"0\"} 5.0\n",
            "sglang:num_queue_reqs{model_name=\"m\",tp_rank=\"0\"} 2.0\n",
            "sglang:token_usage{model_name=\"m\",tp_rank=\"0\"} 0.125\n",
            "sglang:max_total_num_tokens{model_name=\"m\"} 471258.0\n",
        );
        let (dialect, reported) = load_report(page).expect("an SGLang page");
        assert_eq!(dialect, Dialect::Sglang);
        assert_eq!((reported.running, reported.waiting, reported.kv_usage_ratio), (5, 2, 0.125));
        assert_eq!(reported.kv_capacity_tokens, Some(471_258));
    }
}
