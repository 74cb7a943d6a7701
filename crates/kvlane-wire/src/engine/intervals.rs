//! Reads from an engine's metrics page how long its output tokens were apart.

use std::collections::BTreeMap;

use super::{ENGINES, RANKS_MAX};
use crate::prometheus::{Sample, samples};

/// The times between an engine's output tokens since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenIntervals {
    /// How many.
    pub count: f64,
    /// Their sum.
    pub seconds: f64,
}

/// The times between output tokens of a page's ranks, in order of rank; empty if the page has none. A page without rank
/// labels describes rank 0.
pub fn token_intervals(page: &str) -> Vec<(u32, TokenIntervals)> {
    let names = || ENGINES.iter().flat_map(|kind| kind.intervals.iter().map(move |names| (*kind, names)));
    let of_any = |sample: &Sample<'_>| {
        names().any(|(_, (count, seconds))| [count, seconds].contains(&&sample.name))
            && sample.value.is_finite()
    };
    let all: Vec<Sample<'_>> = samples(page).filter(of_any).collect();
    let has = |name: &str| all.iter().any(|sample| sample.name == name);
    let Some((kind, (count, seconds))) = names().find(|(_, (count, seconds))| has(count) && has(seconds))
    else {
        return Vec::new();
    };
    let mut ranks: BTreeMap<u32, TokenIntervals> = BTreeMap::new();
    for sample in &all {
        let rank = kind.rank(sample).unwrap_or(0);
        if ranks.len() >= RANKS_MAX && !ranks.contains_key(&rank) {
            continue;
        }
        let of_rank = ranks.entry(rank).or_default();
        if sample.name == *count {
            of_rank.count += sample.value;
        } else if sample.name == *seconds {
            of_rank.seconds += sample.value;
        }
    }
    ranks.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_told_by_rank_under_the_newest_name() {
        let page = concat!(
            "vllm:inter_token_latency_seconds_bucket{engine=\"0\",le=\"0.01\"} 3\n",
            "vllm:inter_token_latency_seconds_count{engine=\"1\"} 40\n",
            "vllm:inter_token_latency_seconds_sum{engine=\"1\"} 2.5\n",
            "vllm:inter_token_latency_seconds_count{engine=\"0\"} 8\n",
            "vllm:inter_token_latency_seconds_sum{engine=\"0\"} 0.5\n",
            "vllm:time_per_output_token_seconds_count{engine=\"0\"} 99\n",
            "vllm:time_per_output_token_seconds_sum{engine=\"0\"} 99\n",
        );
        let told = |count, seconds| TokenIntervals { count, seconds };
        assert_eq!(token_intervals(page), [(0, told(8.0, 0.5)), (1, told(40.0, 2.5))]);
        let old = "vllm:time_per_output_token_seconds_count 5\nvllm:time_per_output_token_seconds_sum 1\n";
        assert_eq!(token_intervals(old), [(0, told(5.0, 1.0))]);
        let sglang = concat!(
            "sglang:inter_token_latency_seconds_count{dp_rank=\"3\"} 7\n",
            "sglang:inter_token_latency_seconds_sum{dp_rank=\"3\"} 0.25\n",
        );
        assert_eq!(token_intervals(sglang), [(3, told(7.0, 0.25))]);
        let llama = "llamacpp:tokens_predicted_total 70\nllamacpp:tokens_predicted_seconds_total 1.75\n";
        assert_eq!(token_intervals(llama), [(0, told(70.0, 1.75))]);
    }

    #[test]
    fn half_of_it_is_nothing() {
        assert_eq!(token_intervals("vllm:inter_token_latency_seconds_count 8\n"), []);
        let broken = "vllm:inter_token_latency_seconds_count 8\nvllm:inter_token_latency_seconds_sum NaN\n";
        assert_eq!(token_intervals(broken), []);
        assert_eq!(token_intervals(""), []);
    }
}
