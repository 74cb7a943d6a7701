//! Whether an engine's metrics page shows that it works: a number for each rank that changes with its work and stands still
//! when its core does.

use std::collections::BTreeMap;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{RANKS_MAX, llamacpp, vllm};
use crate::prometheus::samples;

/// An engine's samples that its core moves. Those that its HTTP server moves by itself are no signs of life: a server
/// answers, and counts its answers, while its core stands still.
pub(super) struct ProgressNames {
    /// The samples.
    pub(super) names: &'static [&'static str],
    /// The label that tells data-parallel ranks apart, where one page speaks for several.
    pub(super) rank_label: Option<&'static str>,
}

/// SGLang's core tells its gauges every 40 steps only, which is no sign within seconds.
const ENGINES: [&ProgressNames; 2] = [&vllm::PROGRESS, &llamacpp::PROGRESS];

/// For each rank a number that is another one when its core has worked in between; empty if the page does not tell.
pub fn progress(page: &str) -> BTreeMap<u32, u64> {
    let mut by_rank = BTreeMap::new();
    for sample in samples(page) {
        let Some(engine) = ENGINES.iter().find(|engine| engine.names.contains(&sample.name)) else {
            continue;
        };
        let rank = engine.rank_label.and_then(|label| sample.label(label)?.parse().ok()).unwrap_or(0);
        if by_rank.len() >= RANKS_MAX && !by_rank.contains_key(&rank) {
            continue;
        }
        let of_name = xxh3_64_with_seed(sample.name.as_bytes(), sample.value.to_bits());
        let sum: &mut u64 = by_rank.entry(rank).or_default();
        // The order of samples says nothing.
        *sum = sum.wrapping_add(of_name);
    }
    by_rank
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_another_one_when_the_core_has_worked_and_no_other_way() {
        let page = |tokens: u32, requests: u32, rank_1: u32| {
            format!(
                "vllm:iteration_tokens_total_count{{engine=\"0\"}} {tokens}\n\
                 http_requests_total{{handler=\"/health\"}} {requests}\n\
                 vllm:kv_cache_usage_perc{{engine=\"1\"}} 0.{rank_1}\n"
            )
        };
        let (first, later) = (progress(&page(1, 1, 1)), progress(&page(1, 2, 1)));
        assert_eq!(first, later, "an HTTP server's own counters are no progress");
        assert_eq!(first.keys().collect::<Vec<_>>(), [&0, &1]);
        let (one, other) = (progress(&page(2, 1, 1)), progress(&page(1, 1, 2)));
        assert_eq!((one[&0] != first[&0], one[&1] == first[&1]), (true, true));
        assert_eq!((other[&0] == first[&0], other[&1] != first[&1]), (true, true));
        assert_eq!(progress("process_cpu_seconds_total 3\n"), BTreeMap::new());
    }
}
