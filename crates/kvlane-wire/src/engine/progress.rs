//! Detects progress on an engine's metrics page: a number per rank that changes when the engine's core works, and not
//! otherwise.

use std::collections::BTreeMap;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::{ENGINES, RANKS_MAX};
use crate::prometheus::samples;

/// A number per rank that changes when its core has worked; empty if the page shows no progress samples.
pub fn progress(page: &str) -> BTreeMap<u32, u64> {
    let mut by_rank = BTreeMap::new();
    for sample in samples(page) {
        let Some(kind) = ENGINES.iter().find(|kind| kind.progress.contains(&sample.name)) else { continue };
        let rank = kind.rank(&sample).unwrap_or(0);
        if by_rank.len() >= RANKS_MAX && !by_rank.contains_key(&rank) {
            continue;
        }
        let of_name = xxh3_64_with_seed(sample.name.as_bytes(), sample.value.to_bits());
        let sum: &mut u64 = by_rank.entry(rank).or_default();
        // Independent of the order of samples.
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
        assert_eq!(first, later, "the HTTP server's counters are not progress");
        assert_eq!(first.keys().collect::<Vec<_>>(), [&0, &1]);
        let (one, other) = (progress(&page(2, 1, 1)), progress(&page(1, 1, 2)));
        assert_eq!((one[&0] != first[&0], one[&1] == first[&1]), (true, true));
        assert_eq!((other[&0] == first[&0], other[&1] != first[&1]), (true, true));
        assert_eq!(progress("process_cpu_seconds_total 3\n"), BTreeMap::new());
    }
}
