//! Signals for autoscalers: what a new request of usual size would find, computed when metrics are read.

use kvlane_core::decision::{Receipt, ReceiptRow};
use kvlane_core::endpoint::Endpoint;
use kvlane_core::load::InFlight;
use kvlane_core::rates::Rates;
use kvlane_core::scheduler::Scheduler;
use kvlane_fleet::metrics::{Metrics, StatLabels};

/// Decisions from which the usual request is taken.
const USUAL_OF: usize = 128;

/// The mean of recent requests.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct UsualRequest {
    /// Prompt tokens.
    pub(crate) prompt_tokens: f64,
    /// Those that the chosen endpoint was predicted to have cached.
    pub(crate) cached_tokens: f64,
}

/// The least of some figures of endpoints, their mean and their most.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stats {
    least: f64,
    mean: f64,
    most: f64,
}

/// The signals of one pool.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Signals {
    /// Seconds of prefill in flight at an endpoint.
    queue_s: Option<Stats>,
    /// Seconds to the first token of the usual request.
    ttft_s: Option<Stats>,
    /// Use of KV caches, of the endpoints that report it.
    kv_usage_ratio: Option<Stats>,
}

// === impl UsualRequest ===

impl UsualRequest {
    /// The mean of the requests that were placed last; none if no decisions are kept.
    pub(crate) fn of(scheduler: &Scheduler) -> Option<Self> {
        Self::mean(scheduler.receipts().iter().rev().take(USUAL_OF))
    }

    fn mean<'a>(receipts: impl Iterator<Item = &'a Receipt>) -> Option<Self> {
        let (mut count, mut sum) = (0.0, Self::default());
        for receipt in receipts {
            let chosen = |row: &&ReceiptRow| row.endpoint == receipt.placement.endpoint;
            let cached_tokens = receipt.rows.iter().find(chosen).map_or(0, |row| row.overlap_tokens);
            count += 1.0;
            sum.prompt_tokens += f64::from(receipt.prompt_tokens);
            sum.cached_tokens += f64::from(cached_tokens.min(receipt.prompt_tokens));
        }
        let mean =
            Self { prompt_tokens: sum.prompt_tokens / count, cached_tokens: sum.cached_tokens / count };
        (count > 0.0).then_some(mean)
    }

    /// Seconds to its first token at an endpoint with this load: as placement predicts it.
    fn first_token_s(&self, load: &InFlight, rates: &Rates) -> f64 {
        let uncached = self.prompt_tokens - self.cached_tokens;
        let pairs = uncached * self.cached_tokens + uncached * (uncached + 1.0) / 2.0;
        let tokens = load.prefill_tokens + uncached as u64;
        rates.prefill_s(tokens, load.prefill_pairs + pairs as u64) + rates.shown_step_s(load)
    }
}

// === impl Stats ===

impl Stats {
    fn of(values: impl Iterator<Item = f64>) -> Option<Self> {
        let (mut count, mut sum, mut least, mut most) = (0.0, 0.0, f64::INFINITY, f64::NEG_INFINITY);
        for value in values {
            count += 1.0;
            sum += value;
            least = value.min(least);
            most = value.max(most);
        }
        (count > 0.0).then(|| Self { least, mean: sum / count, most })
    }

    /// Each with its label.
    fn named(self) -> [(&'static str, f64); 3] {
        [("min", self.least), ("mean", self.mean), ("max", self.most)]
    }
}

// === impl Signals ===

impl Signals {
    /// Of endpoints that take requests.
    fn of(endpoints: &[(InFlight, Rates, Option<f64>)], usual: Option<UsualRequest>) -> Self {
        let queued =
            endpoints.iter().map(|(load, rates, _)| rates.prefill_s(load.prefill_tokens, load.prefill_pairs));
        let ttft_s = usual.and_then(|usual| {
            Stats::of(endpoints.iter().map(|(load, rates, _)| usual.first_token_s(load, rates)))
        });
        let kv_usage_ratio = Stats::of(endpoints.iter().filter_map(|(_, _, ratio)| *ratio));
        Self { queue_s: Stats::of(queued), ttft_s, kv_usage_ratio }
    }
}

/// Drops what was read before.
pub(crate) fn clear(metrics: &Metrics) {
    for gauges in [&metrics.requests.queue, &metrics.requests.predicted_ttft, &metrics.workers.kv_usage_ratio]
    {
        gauges.clear();
    }
}

/// Sets the signals of one pool.
pub(crate) fn read(
    metrics: &Metrics,
    model: &str,
    endpoints: &[(Endpoint, Rates)],
    usual: Option<UsualRequest>,
) {
    let eligible = endpoints.iter().filter(|(endpoint, _)| endpoint.healthy && !endpoint.draining);
    let ratio = |endpoint: &Endpoint| {
        let ratio = endpoint.load.reported.map(|(reported, _)| f64::from(reported.kv_usage_ratio));
        ratio.filter(|ratio| (0.0..=1.0).contains(ratio))
    };
    let facts: Vec<_> =
        eligible.map(|(endpoint, rates)| (endpoint.load.in_flight, *rates, ratio(endpoint))).collect();
    let Signals { queue_s, ttft_s, kv_usage_ratio } = Signals::of(&facts, usual);
    for (gauges, stats) in [
        (&metrics.requests.queue, queue_s),
        (&metrics.requests.predicted_ttft, ttft_s),
        (&metrics.workers.kv_usage_ratio, kv_usage_ratio),
    ] {
        for (stat, value) in stats.into_iter().flat_map(Stats::named) {
            gauges.get_or_create(&StatLabels { model: model.into(), stat }).set(value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A second for a thousand tokens, and ten milliseconds for a step.
    fn rates() -> Rates {
        Rates {
            prefill_token_s: 1e-3,
            prefill_pair_s: 0.0,
            step_s: 0.01,
            sequence_s: 0.0,
            context_token_s: 0.0,
        }
    }

    fn with_prefill(prefill_tokens: u64) -> InFlight {
        InFlight { requests: 1, prefilling: 1, prefill_tokens, ..InFlight::default() }
    }

    #[test]
    fn signals_are_those_of_the_usual_request_at_each_endpoint() {
        let endpoints = [(with_prefill(1000), rates(), Some(0.25)), (with_prefill(3000), rates(), None)];
        let usual = UsualRequest { prompt_tokens: 2000.0, cached_tokens: 1500.0 };
        let signals = Signals::of(&endpoints, Some(usual));
        let near = |stats: Option<Stats>, least: f64, mean: f64, most: f64| {
            let stats = stats.expect("endpoints").named().map(|(_, value)| value);
            let differs = |(is, expected): (&f64, f64)| (is - expected).abs() > 1e-9;
            assert!(!stats.iter().zip([least, mean, most]).any(differs), "{stats:?}");
        };
        near(signals.queue_s, 1.0, 2.0, 3.0);
        near(signals.ttft_s, 1.51, 2.51, 3.51);
        near(signals.kv_usage_ratio, 0.25, 0.25, 0.25);
    }

    #[test]
    fn without_endpoints_or_decisions_there_is_no_signal() {
        assert_eq!(Signals::of(&[], Some(UsualRequest::default())), Signals::default());
        assert_eq!(UsualRequest::mean([].into_iter()), None);
        let signals = Signals::of(&[(with_prefill(0), rates(), None)], None);
        assert_eq!((signals.ttft_s, signals.kv_usage_ratio), (None, None));
        assert_eq!(signals.queue_s, Some(Stats { least: 0.0, mean: 0.0, most: 0.0 }));
    }
}
