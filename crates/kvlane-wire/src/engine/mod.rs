//! Engine dialects: the names that each inference engine uses on its metrics page. One file per engine.
//!
//! A page is recognised by the names on it, so an endpoint's engine need not be configured.

mod cache;
mod feed;
mod llamacpp;
mod progress;
mod sglang;
mod vllm;

use std::collections::BTreeMap;

pub use cache::{PrefixCache, block_tokens, prefix_caches};
pub use feed::{FeedError, FeedSource, resolve, sglang_feeds, vllm_feeds};

pub use progress::progress;

use kvlane_core::load::LoadReport;

use crate::prometheus::{Sample, samples};

/// An engine, by the names it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    /// vLLM, and servers that copy its metrics.
    Vllm,
    /// SGLang.
    Sglang,
    /// llama.cpp's `llama-server`.
    LlamaCpp,
}

/// An engine's metric names for the fields of a [`LoadReport`]. For a renamed gauge, the newest name comes first and
/// the first one present is used.
struct Names {
    dialect: Dialect,
    /// Gauge of sequences in the batch. It identifies the engine.
    running: &'static str,
    /// Gauge of requests in the queue.
    waiting: &'static str,
    /// Gauges of the KV cache usage, 0 to 1.
    kv_usage: &'static [&'static str],
    /// The sample with the KV cache size, if any.
    kv_capacity: Option<Capacity>,
    /// The label that distinguishes data-parallel ranks, where one page describes several.
    rank_label: Option<&'static str>,
}

/// A sample with the size of a KV cache.
#[derive(Clone, Copy)]
struct Capacity {
    name: &'static str,
    /// Reads the capacity in tokens.
    tokens: fn(&Sample<'_>) -> Option<f64>,
}

const DIALECTS: [&Names; 3] = [&vllm::NAMES, &sglang::NAMES, &llamacpp::NAMES];

impl Dialect {
    /// The engine's name as a metric label.
    pub const fn name(self) -> &'static str {
        match self {
            Dialect::Vllm => "vllm",
            Dialect::Sglang => "sglang",
            Dialect::LlamaCpp => "llamacpp",
        }
    }
}

/// The load on an engine's metrics page, and the engine's dialect. Counts are summed over the page's ranks, ratios
/// averaged; a missing gauge counts as zero, as engines leave out idle ones.
pub fn load_report(page: &str) -> Option<(Dialect, LoadReport)> {
    let (names, samples) = recognised(page)?;
    Some((names.dialect, names.reported(&samples)))
}

/// Like [`load_report`], per data-parallel rank, in order of rank. A page without rank labels describes rank 0.
pub fn load_reports(page: &str) -> Option<(Dialect, Vec<(u32, LoadReport)>)> {
    let (names, samples) = recognised(page)?;
    let mut by_rank: BTreeMap<u32, Vec<Sample<'_>>> = BTreeMap::new();
    let mut common = Vec::new();
    for sample in samples {
        let rank = names.rank_label.and_then(|label| sample.label(label)?.parse().ok());
        match rank {
            Some(rank) if by_rank.contains_key(&rank) || by_rank.len() < RANKS_MAX => {
                by_rank.entry(rank).or_default().push(sample);
            }
            _ => common.push(sample),
        }
    }
    if by_rank.is_empty() {
        return Some((names.dialect, vec![(0, names.reported(&common))]));
    }
    let reports = by_rank.into_iter().map(|(rank, samples)| (rank, names.reported(&samples)));
    Some((names.dialect, reports.collect()))
}

/// Most ranks on one page; a page with more is treated as invalid.
pub const RANKS_MAX: usize = 256;

/// The page's engine, and its relevant samples.
fn recognised(page: &str) -> Option<(&'static Names, Vec<Sample<'_>>)> {
    let samples: Vec<Sample<'_>> =
        samples(page).filter(|sample| DIALECTS.iter().any(|names| names.mentions(sample))).collect();
    let names = DIALECTS.iter().find(|names| samples.iter().any(|sample| sample.name == names.running))?;
    Some((names, samples))
}

impl Names {
    fn reported(&self, samples: &[Sample<'_>]) -> LoadReport {
        let values = |name: &'static str| {
            samples.iter().filter(move |sample| sample.name == name).map(|sample| sample.value)
        };
        let total = |name: &'static str| values(name).filter(|value| value.is_finite()).sum::<f64>();
        let usage = self.kv_usage.iter().find_map(|name| mean(values(name))).unwrap_or(0.0);
        let capacity = self.kv_capacity.map(|capacity| {
            let told = samples.iter().filter(|sample| sample.name == capacity.name);
            told.filter_map(capacity.tokens).sum::<f64>()
        });
        LoadReport {
            // Casts from floats saturate.
            running: total(self.running) as u32,
            waiting: total(self.waiting) as u32,
            kv_usage_ratio: usage.clamp(0.0, 1.0) as f32,
            kv_capacity_tokens: capacity
                .filter(|tokens| *tokens >= 1.0 && tokens.is_finite())
                .map(|tokens| tokens as u64),
        }
    }

    fn mentions(&self, sample: &Sample<'_>) -> bool {
        sample.name == self.running
            || sample.name == self.waiting
            || self.kv_usage.contains(&sample.name)
            || self.kv_capacity.is_some_and(|capacity| sample.name == capacity.name)
    }
}

/// Mean of the finite values, if there are any.
fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (count, total) = values
        .filter(|value| value.is_finite())
        .fold((0_u32, 0.0), |(count, total), value| (count + 1, total + value));
    (count > 0).then(|| total / f64::from(count))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_page_of_something_else_is_no_report() {
        assert_eq!(load_report(""), None);
        assert_eq!(load_report("process_cpu_seconds_total 12\nrouter_requests_total 5\n"), None);
    }

    #[test]
    fn a_value_out_of_range_is_brought_into_it() {
        let page =
            "vllm:num_requests_running -1\nvllm:num_requests_waiting 1e300\nvllm:kv_cache_usage_perc 7\n";
        let (_, reported) = load_report(page).expect("a vLLM page");
        assert_eq!((reported.running, reported.waiting, reported.kv_usage_ratio), (0, u32::MAX, 1.0));
    }

    proptest! {
        #[test]
        fn any_values_give_a_ratio_between_zero_and_one(values in prop::collection::vec(any::<f64>(), 5)) {
            let page = format!(
                "vllm:num_requests_running {}\nvllm:num_requests_waiting {}\nvllm:kv_cache_usage_perc {}\n\
                 vllm:cache_config_info{{block_size=\"{}\",num_gpu_blocks=\"{}\"}} 1\n",
                values[0], values[1], values[2], values[3], values[4]
            );
            let (_, reported) = load_report(&page).expect("a vLLM page");
            prop_assert!((0.0..=1.0).contains(&reported.kv_usage_ratio));
        }
    }
}
