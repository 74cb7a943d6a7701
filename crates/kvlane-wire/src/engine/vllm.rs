//! vLLM (`vllm/v1/metrics/loggers.py`). One line per data-parallel rank, distinguished by the label `engine`.

use super::cache::CacheNames;
use super::progress::ProgressNames;
use super::{Capacity, Dialect, Names};

pub(super) const CACHE: CacheNames = CacheNames {
    block_tokens: Some(("vllm:cache_config_info", "block_size")),
    // In tokens. Renamed from `gpu_` when caches on other devices were added.
    queried_tokens: &["vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"],
    hit_tokens: &["vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"],
    rank_label: Some("engine"),
};
use crate::prometheus::Sample;

/// Counters change with the steps that produce tokens, the block usage with every chunk of a prompt.
pub(super) const PROGRESS: ProgressNames = ProgressNames {
    names: &[
        "vllm:iteration_tokens_total_count",
        "vllm:iteration_tokens_total_sum",
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
    ],
    rank_label: Some("engine"),
};

pub(super) const NAMES: Names = Names {
    dialect: Dialect::Vllm,
    running: "vllm:num_requests_running",
    waiting: "vllm:num_requests_waiting",
    // Renamed from `gpu_` when caches on other devices were added.
    kv_usage: &["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"],
    kv_capacity: Some(Capacity { name: "vllm:cache_config_info", tokens: capacity_tokens }),
    rank_label: Some("engine"),
};

/// A rank's cache capacity in tokens: reported directly by newer versions (caches with several layer groups hold less
/// than their blocks suggest), otherwise number of blocks times block size.
fn capacity_tokens(info: &Sample<'_>) -> Option<f64> {
    let number = |label| info.label(label)?.parse::<f64>().ok();
    number("kv_cache_size_tokens").or_else(|| Some(number("block_size")? * number("num_gpu_blocks")?))
}

#[cfg(test)]
mod tests {
    use super::super::{load_report, load_reports};
    use super::*;

    #[test]
    fn a_page_is_summed_over_ranks_and_its_usage_averaged() {
        let page = concat!(
            "# HELP vllm:num_requests_running Number of requests in model execution batches.\n",
            "# TYPE vllm:num_requests_running gauge\n",
            "vllm:num_requests_running{engine=\"0\",model_name=\"tiny\"} 3.0\n",
            "vllm:num_requests_running{engine=\"1\",model_name=\"tiny\"} 4.0\n",
            "vllm:num_requests_waiting{engine=\"0\",model_name=\"tiny\"} 1.0\n",
            "vllm:num_requests_waiting_by_reason{engine=\"0\",reason=\"capacity\"} 9.0\n",
            "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"tiny\"} 0.25\n",
            "vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"tiny\"} 0.75\n",
            "vllm:cache_config_info{block_size=\"32\",engine=\"0\",num_gpu_blocks=\"4096\"} 1.0\n",
            "vllm:cache_config_info{block_size=\"32\",engine=\"1\",num_gpu_blocks=\"4096\"} 1.0\n",
        );
        let (dialect, reported) = load_report(page).expect("a vLLM page");
        assert_eq!(dialect, Dialect::Vllm);
        assert_eq!((reported.running, reported.waiting, reported.kv_usage_ratio), (7, 1, 0.5));
        assert_eq!(reported.kv_capacity_tokens, Some(2 * 32 * 4096));
        let (_, by_rank) = load_reports(page).expect("a vLLM page");
        let of = |rank: usize| (by_rank[rank].0, by_rank[rank].1.running, by_rank[rank].1.waiting);
        assert_eq!((by_rank.len(), of(0), of(1)), (2, (0, 3, 1), (1, 4, 0)));
        assert_eq!((by_rank[1].1.kv_usage_ratio, by_rank[1].1.kv_capacity_tokens), (0.75, Some(32 * 4096)));
    }

    #[test]
    fn the_capacity_it_tells_counts_more_than_its_blocks() {
        let page = concat!(
            "vllm:num_requests_running 0\n",
            "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"100\",kv_cache_size_tokens=\"900\"} 1\n",
        );
        assert_eq!(load_report(page).expect("a vLLM page").1.kv_capacity_tokens, Some(900));
    }

    #[test]
    fn an_unknown_capacity_is_none() {
        let page = "vllm:num_requests_running 0\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"None\"} 1\n";
        assert_eq!(load_report(page).expect("a vLLM page").1.kv_capacity_tokens, None);
    }

    #[test]
    fn the_old_name_of_the_usage_gauge_is_read() {
        let page = "vllm:num_requests_running 0\nvllm:gpu_cache_usage_perc 0.5\n";
        assert_eq!(load_report(page).expect("a vLLM page").1.kv_usage_ratio, 0.5);
    }
}
