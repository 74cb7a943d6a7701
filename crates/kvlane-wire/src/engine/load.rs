//! Reads an engine's load from its metrics page.

use std::collections::BTreeMap;

use kvlane_core::load::LoadReport;

use super::{ENGINES, EngineKind, RANKS_MAX};
use crate::prometheus::{Sample, samples};

/// The load on an engine's metrics page, and the engine. Counts are summed over the page's ranks, ratios
/// averaged; a missing gauge counts as zero, as engines leave out idle ones.
pub fn load_report(page: &str) -> Option<(&'static EngineKind, LoadReport)> {
    let (kind, samples) = recognised(page)?;
    Some((kind, reported(kind, &samples)))
}

/// Like [`load_report`], per data-parallel rank, in order of rank. A page without rank labels describes rank 0.
pub fn load_reports(page: &str) -> Option<(&'static EngineKind, Vec<(u32, LoadReport)>)> {
    let (kind, samples) = recognised(page)?;
    let mut by_rank: BTreeMap<u32, Vec<Sample<'_>>> = BTreeMap::new();
    let mut common = Vec::new();
    for sample in samples {
        match kind.rank(&sample) {
            Some(rank) if by_rank.contains_key(&rank) || by_rank.len() < RANKS_MAX => {
                by_rank.entry(rank).or_default().push(sample);
            }
            _ => common.push(sample),
        }
    }
    if by_rank.is_empty() {
        return Some((kind, vec![(0, reported(kind, &common))]));
    }
    let reports = by_rank.into_iter().map(|(rank, samples)| (rank, reported(kind, &samples)));
    Some((kind, reports.collect()))
}

/// The page's engine, and its relevant samples.
fn recognised(page: &str) -> Option<(&'static EngineKind, Vec<Sample<'_>>)> {
    let samples: Vec<Sample<'_>> =
        samples(page).filter(|sample| ENGINES.iter().any(|kind| mentions(kind, sample))).collect();
    let is = |kind: &&EngineKind| samples.iter().any(|sample| sample.name == kind.load.running);
    let kind = ENGINES.iter().copied().find(is)?;
    Some((kind, samples))
}

fn reported(kind: &EngineKind, samples: &[Sample<'_>]) -> LoadReport {
    let names = &kind.load;
    let values = |name: &'static str| {
        samples.iter().filter(move |sample| sample.name == name).map(|sample| sample.value)
    };
    let total = |name: &'static str| values(name).filter(|value| value.is_finite()).sum::<f64>();
    let usage = names.kv_usage.iter().find_map(|name| mean(values(name))).unwrap_or(0.0);
    let capacity = names.kv_capacity.map(|capacity| {
        let told = samples.iter().filter(|sample| sample.name == capacity.name);
        told.filter_map(capacity.tokens).sum::<f64>()
    });
    LoadReport {
        // Casts from floats saturate.
        running: total(names.running) as u32,
        waiting: total(names.waiting) as u32,
        kv_usage_ratio: usage.clamp(0.0, 1.0) as f32,
        kv_capacity_tokens: capacity
            .filter(|tokens| *tokens >= 1.0 && tokens.is_finite())
            .map(|tokens| tokens as u64),
    }
}

fn mentions(kind: &EngineKind, sample: &Sample<'_>) -> bool {
    let names = &kind.load;
    sample.name == names.running
        || sample.name == names.waiting
        || names.kv_usage.contains(&sample.name)
        || names.kv_capacity.is_some_and(|capacity| sample.name == capacity.name)
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
