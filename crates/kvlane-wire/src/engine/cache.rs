//! Reads an engine's prefix cache from its metrics page: block size and reuse counters.

use std::collections::BTreeMap;

use super::kind::CacheNames;
use super::{ENGINES, EngineKind, RANKS_MAX};
use crate::prometheus::{Sample, samples};

/// An engine's prefix cache counters since its start, in prompt tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefixCache {
    /// Tokens looked up.
    pub queried_tokens: u64,
    /// Tokens found in the engine's own cache.
    pub hit_tokens: u64,
    /// Tokens fetched from another engine or a store, by a KV connector.
    pub external_hit_tokens: u64,
}

impl PrefixCache {
    /// Tokens that were looked up, and neither found nor fetched.
    pub fn computed_tokens(&self) -> u64 {
        self.queried_tokens.saturating_sub(self.hit_tokens).saturating_sub(self.external_hit_tokens)
    }
}

/// The prefix cache counters of a page's ranks, in order of rank; empty if the page has none. A page without rank
/// labels describes rank 0.
pub fn prefix_caches(page: &str) -> Vec<(u32, PrefixCache)> {
    let all: Vec<Sample<'_>> =
        samples(page).filter(|sample| ENGINES.iter().any(|kind| counts(kind, sample))).collect();
    for kind in ENGINES {
        let newest = |list: &[&'static str]| {
            list.iter().find(|name| all.iter().any(|sample| sample.name == **name)).copied()
        };
        let (Some(queried), Some(hit)) = (newest(kind.cache.queried_tokens), newest(kind.cache.hit_tokens))
        else {
            continue;
        };
        let external = newest(kind.cache.external_hit_tokens);
        let mut ranks: BTreeMap<u32, PrefixCache> = BTreeMap::new();
        for sample in &all {
            let rank = kind.rank(sample).unwrap_or(0);
            if ranks.len() >= RANKS_MAX && !ranks.contains_key(&rank) {
                continue;
            }
            let cache = ranks.entry(rank).or_default();
            // Casts from floats saturate.
            if sample.name == queried {
                cache.queried_tokens = cache.queried_tokens.saturating_add(sample.value as u64);
            } else if sample.name == hit {
                cache.hit_tokens = cache.hit_tokens.saturating_add(sample.value as u64);
            } else if Some(sample.name) == external {
                cache.external_hit_tokens = cache.external_hit_tokens.saturating_add(sample.value as u64);
            }
        }
        return ranks.into_iter().collect();
    }
    Vec::new()
}

/// The block size in tokens, if the page has it and all ranks agree.
pub fn block_tokens(page: &str) -> Option<u32> {
    let mut told = samples(page).filter_map(|sample| {
        let mut labels = ENGINES.iter().filter_map(|kind| kind.cache.block_tokens);
        let (_, label) = labels.find(|(name, _)| *name == sample.name)?;
        sample.label(label)?.parse::<u32>().ok().filter(|tokens| *tokens > 0)
    });
    let first = told.next()?;
    told.all(|other| other == first).then_some(first)
}

fn counts(kind: &EngineKind, sample: &Sample<'_>) -> bool {
    let CacheNames { queried_tokens, hit_tokens, external_hit_tokens, .. } = &kind.cache;
    [queried_tokens, hit_tokens, external_hit_tokens].iter().any(|names| names.contains(&sample.name))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn reuse_is_told_by_rank() {
        let page = concat!(
            "vllm:prefix_cache_queries_total{engine=\"1\",model_name=\"m\"} 100\n",
            "vllm:prefix_cache_queries_created{engine=\"1\",model_name=\"m\"} 1.7e9\n",
            "vllm:prefix_cache_hits_total{engine=\"1\",model_name=\"m\"} 40\n",
            "vllm:prefix_cache_queries_total{engine=\"0\",model_name=\"m\"} 7\n",
            "vllm:gpu_prefix_cache_queries_total{engine=\"0\",model_name=\"m\"} 9999\n",
            "vllm:external_prefix_cache_hits_total{engine=\"0\",model_name=\"m\"} 5\n",
        );
        let cache = |queried_tokens, hit_tokens, external_hit_tokens| PrefixCache {
            queried_tokens,
            hit_tokens,
            external_hit_tokens,
        };
        // What a connector fetched is not a hit of the engine's own cache.
        assert_eq!(prefix_caches(page), [(0, cache(7, 0, 5)), (1, cache(100, 40, 0))]);
    }

    #[test]
    fn older_names_are_read_and_sources_added_up() {
        let old = "vllm:gpu_prefix_cache_queries_total 10\nvllm:gpu_prefix_cache_hits_total 4\n";
        assert_eq!(
            prefix_caches(old),
            [(0, PrefixCache { queried_tokens: 10, hit_tokens: 4, external_hit_tokens: 0 })]
        );
        let sglang = concat!(
            "sglang:prompt_tokens_total{model_name=\"m\"} 90\n",
            "sglang:cached_tokens_total{model_name=\"m\",cache_source=\"device\"} 30\n",
            "sglang:cached_tokens_total{model_name=\"m\",cache_source=\"host\"} 3\n",
        );
        assert_eq!(
            prefix_caches(sglang),
            [(0, PrefixCache { queried_tokens: 90, hit_tokens: 33, external_hit_tokens: 0 })]
        );
        assert_eq!(prefix_caches("vllm:prefix_cache_queries_total 10\n"), [], "without a hits counter");
        assert_eq!(prefix_caches(""), []);
    }

    #[test]
    fn the_size_of_a_block_is_told_by_a_label() {
        let vllm = "vllm:cache_config_info{block_size=\"32\",engine=\"0\",num_gpu_blocks=\"4096\"} 1.0\n";
        assert_eq!(block_tokens(vllm), Some(32));
        assert_eq!(
            block_tokens("sglang:cache_config_info{num_pages=\"80\",page_size=\"16\"} 1.0\n"),
            Some(16)
        );
        let other = "vllm:cache_config_info{block_size=\"16\",engine=\"1\"} 1.0\n";
        assert_eq!(block_tokens(&[vllm, other].concat()), None, "ranks that disagree");
        assert_eq!(block_tokens("vllm:cache_config_info{block_size=\"None\"} 1\n"), None);
        assert_eq!(block_tokens("vllm:cache_config_info{block_size=\"0\"} 1\n"), None);
        assert_eq!(block_tokens("sglang:cache_config_info{num_pages=\"7\",page_size=\"1\"} 1\n"), Some(1));
        let unknown = "vllm:cache_config_info{block_size=\"None\"} 1\nother{block_size=\"8\"} 1\n";
        assert_eq!(block_tokens(unknown), None);
    }

    proptest! {
        #[test]
        fn any_page_is_read(values in prop::collection::vec((0..4_u32, any::<f64>()), 0..9)) {
            let line = |(rank, value): &(u32, f64)| {
                format!("vllm:prefix_cache_queries_total{{engine=\"{rank}\"}} {value}\n\
                         vllm:prefix_cache_hits_total{{engine=\"{rank}\"}} {value}\n")
            };
            let caches = prefix_caches(&values.iter().map(line).collect::<String>());
            prop_assert!(caches.iter().all(|(_, cache)| cache.queried_tokens == cache.hit_tokens));
        }
    }
}
