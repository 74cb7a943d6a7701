//! Summary of many records.
//!
//! Percentiles are exact: the nearest rank of all samples, no sketch, no interpolation. Failed requests count only as
//! errors, so a latency here is always the latency of an answer.

use std::collections::BTreeMap;

use kvlane_trace::record::Record;
use serde::{Deserialize, Serialize};

use super::ci::rank;

/// Mean and nearest-rank percentiles of a set of samples, in the samples' unit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// The value that 90 % of the samples do not exceed.
    pub p90: f64,
    /// The value that 99 % of the samples do not exceed.
    pub p99: f64,
    /// The largest sample.
    pub max: f64,
}

/// Summary of one replay.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Requests sent.
    pub requests: u64,
    /// Requests that were not answered in full.
    pub errors: u64,
    /// Those, by class.
    pub errors_by_class: BTreeMap<String, u64>,
    /// Time to first token in seconds; `None` where nothing was streamed.
    pub ttft_s: Option<Percentiles>,
    /// End-to-end latency in seconds.
    pub e2e_s: Option<Percentiles>,
    /// Time per output token after the first, in seconds: one mean per request.
    pub tpot_s: Option<Percentiles>,
    /// Prompt tokens of answered requests.
    pub prompt_tokens: u64,
    /// Output tokens of answered requests.
    pub output_tokens: u64,
    /// Share of prompt tokens from caches, over the answers that report it.
    pub cached_share: Option<f64>,
    /// Output tokens per second from the first scheduled request to the last end.
    pub output_tokens_per_s: f64,
    /// Answered requests by endpoint.
    pub per_endpoint: BTreeMap<String, u64>,
    /// Those that were split, by the endpoint that computed the prompt.
    #[serde(default)]
    pub per_prefill_endpoint: BTreeMap<String, u64>,
}

// === impl Percentiles ===

impl Percentiles {
    /// The percentiles of `samples`, which are sorted in place; `None` if there are none.
    pub fn of(samples: &mut [f64]) -> Option<Self> {
        samples.sort_unstable_by(f64::total_cmp);
        let count = samples.len();
        let at = |percent: u8| samples[rank(count, percent)];
        (count > 0).then(|| Self {
            mean: samples.iter().sum::<f64>() / count as f64,
            p50: at(50),
            p90: at(90),
            p99: at(99),
            max: samples[count - 1],
        })
    }
}

// === impl Summary ===

impl Summary {
    /// Summarizes `records`. Every time is multiplied by `time_scale`: pass the speed factor of a replay that ran
    /// faster than its trace to get results in trace seconds, 1 otherwise.
    pub fn of(records: &[Record], time_scale: f64) -> Self {
        let answered = || records.iter().filter(|record| record.is_ok());
        let percentiles = |latency: fn(&Record) -> Option<f64>| {
            let mut samples: Vec<f64> = answered().filter_map(latency).map(|s| s * time_scale).collect();
            Percentiles::of(&mut samples)
        };
        let mut errors_by_class = BTreeMap::new();
        for record in records.iter().filter(|record| !record.is_ok()) {
            let class = record.error.as_deref().unwrap_or("status");
            *errors_by_class.entry(class.to_owned()).or_default() += 1;
        }
        let count = |endpoint: fn(&Record) -> Option<&String>| {
            let mut counts = BTreeMap::new();
            answered()
                .filter_map(endpoint)
                .for_each(|endpoint| *counts.entry(endpoint.clone()).or_default() += 1);
            counts
        };
        let (cached, cacheable) = answered()
            .filter_map(|record| Some((record.cached_tokens?, record.prompt_tokens)))
            .fold((0, 0), |(cached, all), (hit, prompt)| (cached + u64::from(hit), all + u64::from(prompt)));
        let output_tokens = answered().map(|record| u64::from(record.output_tokens)).sum();
        let start_s = records.iter().map(|record| record.scheduled_s).fold(f64::INFINITY, f64::min);
        let end_s = records.iter().map(|record| record.end_s).fold(f64::NEG_INFINITY, f64::max);
        let span_s = (end_s - start_s) * time_scale;
        Self {
            requests: records.len() as u64,
            errors: errors_by_class.values().sum(),
            errors_by_class,
            ttft_s: percentiles(Record::ttft_s),
            e2e_s: percentiles(|record| Some(record.e2e_s())),
            tpot_s: percentiles(Record::tpot_s),
            prompt_tokens: answered().map(|record| u64::from(record.prompt_tokens)).sum(),
            output_tokens,
            cached_share: (cacheable > 0).then(|| cached as f64 / cacheable as f64),
            output_tokens_per_s: if span_s > 0.0 { output_tokens as f64 / span_s } else { 0.0 },
            per_endpoint: count(|record| record.endpoint.as_ref()),
            per_prefill_endpoint: count(|record| record.prefill_endpoint.as_ref()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn answer(id: u64, ttft_s: f64, cached_tokens: Option<u32>) -> Record {
        Record {
            id,
            scheduled_s: 10.0,
            sent_s: 10.0,
            first_token_s: Some(10.0 + ttft_s),
            end_s: 10.0 + ttft_s + 1.0,
            prompt_tokens: 100,
            cached_tokens,
            output_tokens: 11,
            endpoint: Some(format!("e{}", id % 2)),
            status: 200,
            ..Record::default()
        }
    }

    #[test]
    fn percentiles_are_nearest_ranks() {
        let mut samples: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        let all = Percentiles::of(&mut samples).unwrap();
        assert_eq!((all.p50, all.p90, all.p99, all.max), (100.0, 180.0, 198.0, 200.0));
        assert_eq!(all.mean, 100.5);
    }

    #[test]
    fn one_sample_is_every_percentile_and_none_is_nothing() {
        let one = Percentiles { mean: 7.0, p50: 7.0, p90: 7.0, p99: 7.0, max: 7.0 };
        assert_eq!(Percentiles::of(&mut [7.0]), Some(one));
        assert_eq!(Percentiles::of(&mut []), None);
    }

    #[test]
    fn failed_requests_count_as_errors_and_in_nothing_else() {
        let reset = Record { error: Some("reset".into()), output_tokens: 999, ..answer(1, 500.0, Some(100)) };
        let refused = Record { status: 503, ..answer(2, 500.0, Some(100)) };
        let summary = Summary::of(&[answer(0, 0.5, Some(25)), reset, refused], 1.0);
        assert_eq!((summary.requests, summary.errors), (3, 2));
        assert_eq!(summary.errors_by_class, BTreeMap::from([("reset".into(), 1), ("status".into(), 1)]));
        assert_eq!(summary.ttft_s.unwrap().max, 0.5);
        assert_eq!(summary.cached_share, Some(0.25));
        assert_eq!(summary.output_tokens, 11);
        assert_eq!(summary.per_endpoint, BTreeMap::from([("e0".into(), 1)]));
    }

    #[test]
    fn answers_that_say_nothing_of_their_cache_do_not_dilute_the_share() {
        let summary = Summary::of(&[answer(0, 1.0, Some(50)), answer(1, 1.0, None)], 1.0);
        assert_eq!(summary.cached_share, Some(0.5));
        assert_eq!(Summary::of(&[answer(1, 1.0, None)], 1.0).cached_share, None);
    }

    #[test]
    fn a_time_scale_stretches_latencies_and_slows_the_rate() {
        let records = [answer(0, 1.0, None), answer(1, 3.0, None)];
        let summary = Summary::of(&records, 10.0);
        assert_eq!(summary.ttft_s.unwrap().p50, 10.0);
        assert_eq!(summary.e2e_s.unwrap().max, 40.0);
        assert!((summary.tpot_s.unwrap().mean - 1.0).abs() < 1e-12);
        assert_eq!(summary.output_tokens_per_s, 22.0 / 40.0);
    }

    #[test]
    fn no_records_make_an_empty_summary_that_survives_json() {
        let summary = Summary::of(&[], 1.0);
        assert_eq!((summary.requests, summary.output_tokens_per_s, summary.ttft_s), (0, 0.0, None));
        let json = serde_json::to_string(&summary).unwrap();
        assert_eq!(serde_json::from_str::<Summary>(&json).unwrap(), summary);
    }

    proptest! {
        #[test]
        fn percentiles_are_samples_in_order(mut samples in prop::collection::vec(-1e6..1e6, 1..300)) {
            let all = Percentiles::of(&mut samples).unwrap();
            prop_assert!(all.p50 <= all.p90 && all.p90 <= all.p99 && all.p99 <= all.max);
            for value in [all.p50, all.p90, all.p99, all.max] {
                prop_assert!(samples.contains(&value));
            }
            let at_most = samples.iter().filter(|&&sample| sample <= all.p90).count();
            prop_assert!(at_most * 10 >= samples.len() * 9, "{at_most} of {}", samples.len());
        }
    }
}
