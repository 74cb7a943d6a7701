//! Signals for autoscalers: what a new request of usual size would find, computed when metrics are read.

use kvlane_core::decision::{Receipt, ReceiptRow};
use kvlane_core::endpoint::Endpoint;
use kvlane_core::load::InFlight;
use kvlane_core::rates::Rates;
use kvlane_core::scheduler::Scheduler;
use kvlane_fleet::metrics::{Metrics, ModelLabel, StatLabels};

use crate::known::Known;

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

/// An endpoint that takes requests: its load, that of other replicas included, its speed, and the use of its KV cache, if
/// its engine reports it.
type Row = (InFlight, Rates, Option<f64>);

/// The signals of one pool.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Signals {
    /// Seconds of prefill before a new request: at the endpoint with the soonest first token, and on average.
    queue_s: Option<(f64, f64)>,
    /// Seconds to the first token of the usual request, at that endpoint.
    ttft_s: Option<f64>,
    /// Mean and most of the use of KV caches.
    kv_usage_ratio: Option<(f64, f64)>,
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

    /// Seconds of its own prefill with these rates.
    fn prefill_s(&self, rates: &Rates) -> f64 {
        let uncached = self.prompt_tokens - self.cached_tokens;
        let pairs = uncached * self.cached_tokens + uncached * (uncached + 1.0) / 2.0;
        rates.prefill_s(uncached as u64, pairs as u64)
    }
}

// === impl Signals ===

impl Signals {
    /// Of the endpoints that take requests, with this many requests in the gateway's queue.
    fn of(endpoints: &[Row], usual: Option<UsualRequest>, queued: usize) -> Self {
        let count = endpoints.len() as f64;
        let own_s = |rates: &Rates| usual.map_or(0.0, |usual| usual.prefill_s(rates));
        // Queued requests are computed before a new one, by all endpoints together.
        let queue_s = |(load, rates, _): &Row| {
            rates.prefill_s(load.prefill_tokens, load.prefill_pairs) + queued as f64 * own_s(rates) / count
        };
        let ttft_s = |row: &Row| queue_s(row) + own_s(&row.1) + row.1.shown_step_s(&row.0);
        let soonest = endpoints.iter().min_by(|one, other| ttft_s(one).total_cmp(&ttft_s(other)));
        let mean_s = endpoints.iter().map(queue_s).sum::<f64>() / count;
        let ratios = || endpoints.iter().filter_map(|(_, _, ratio)| *ratio);
        let most = ratios().max_by(f64::total_cmp);
        Self {
            queue_s: soonest.map(|row| (queue_s(row), mean_s)),
            ttft_s: usual.and_then(|_| soonest.map(ttft_s)),
            kv_usage_ratio: most.map(|most| (ratios().sum::<f64>() / ratios().count() as f64, most)),
        }
    }
}

/// Drops what was read before.
pub(crate) fn clear(metrics: &Metrics) {
    metrics.requests.queue.clear();
    metrics.requests.queue_mean.clear();
    metrics.requests.predicted_ttft.clear();
    metrics.workers.kv_usage_ratio.clear();
}

/// Sets the signals of one pool, with this many requests in its queue.
pub(crate) fn read(
    metrics: &Metrics,
    model: &str,
    endpoints: &[Known],
    usual: Option<UsualRequest>,
    queued: usize,
) {
    let eligible = endpoints.iter().filter(|known| known.endpoint.healthy && !known.endpoint.draining);
    let ratio = |endpoint: &Endpoint| {
        let ratio = endpoint.load.reported.map(|(reported, _)| f64::from(reported.kv_usage_ratio));
        ratio.filter(|ratio| (0.0..=1.0).contains(ratio))
    };
    let rows: Vec<Row> =
        eligible.map(|known| (known.endpoint.in_flight(), known.rates, ratio(&known.endpoint))).collect();
    let Signals { queue_s, ttft_s, kv_usage_ratio } = Signals::of(&rows, usual, queued);
    let label = ModelLabel { model: model.into() };
    if let Some((soonest_s, mean_s)) = queue_s {
        metrics.requests.queue.get_or_create(&label).set(soonest_s);
        metrics.requests.queue_mean.get_or_create(&label).set(mean_s);
    }
    if let Some(ttft_s) = ttft_s {
        metrics.requests.predicted_ttft.get_or_create(&label).set(ttft_s);
    }
    if let Some((mean, most)) = kv_usage_ratio {
        for (stat, value) in [("mean", mean), ("max", most)] {
            let labels = StatLabels { model: model.into(), stat };
            metrics.workers.kv_usage_ratio.get_or_create(&labels).set(value);
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
            load_token_s: 0.0,
            step_s: 0.01,
            sequence_s: 0.0,
            context_token_s: 0.0,
            request_s: 0.0,
            wait_steps: 0.0,
        }
    }

    fn with_prefill(prefill_tokens: u64) -> InFlight {
        InFlight { requests: 1, prefilling: 1, prefill_tokens, ..InFlight::default() }
    }

    #[test]
    fn signals_are_those_of_the_endpoint_with_the_soonest_first_token() {
        let endpoints =
            [(with_prefill(3000), rates(), Some(0.25)), (with_prefill(1000), rates(), Some(0.75))];
        let usual = UsualRequest { prompt_tokens: 2000.0, cached_tokens: 1500.0 };
        let near = |one: f64, other: f64| assert!((one - other).abs() < 1e-9, "{one} {other}");
        for (queued, waits_s) in [(0, 0.0), (4, 1.0)] {
            let signals = Signals::of(&endpoints, Some(usual), queued);
            let (queue_s, mean_s) = signals.queue_s.expect("endpoints");
            near(queue_s, 1.0 + waits_s);
            near(mean_s, 2.0 + waits_s);
            near(signals.ttft_s.expect("a usual request"), 1.51 + waits_s);
            assert_eq!(signals.kv_usage_ratio, Some((0.5, 0.75)));
        }
    }

    #[test]
    fn without_endpoints_or_decisions_there_is_no_signal() {
        assert_eq!(Signals::of(&[], Some(UsualRequest::default()), 3), Signals::default());
        assert_eq!(UsualRequest::mean([].into_iter()), None);
        let signals = Signals::of(&[(with_prefill(0), rates(), None)], None, 3);
        assert_eq!(signals, Signals { queue_s: Some((0.0, 0.0)), ..Signals::default() });
    }
}
