//! `smg_least_load`: seconds of queued work, with a barrier before a full KV cache (smg-project/smg, commit f8daa8835,
//! `model_gateway/src/policies/least_load.rs`).
//!
//! `argmin ((queued + placed) / throughput_tokens_s + kv_pressure_s * k / (1 - k))`:
//!
//! - `queued`: the requests waiting by the engine's report, each counted as `mean_prefill_tokens` (our engines do not
//!   report waiting tokens);
//! - `placed`: prompt tokens of the requests placed there since that report;
//! - `k`: the KV cache usage that the engine reports, at most 0.999.
//!
//! For an engine that reports nothing while others do, the score is the lowest of theirs plus `B * mean_prefill_tokens
//! / throughput_tokens_s`; if none reports, `argmin B`. The defaults are SMG's: 0.15 s, 1,024 tokens, and the 2,000
//! tokens/s it uses where no generation rate is reported. Ties are random. Known limits: it ignores caches, and uses
//! one rate for prefill and decode of every engine.

use serde::{Deserialize, Serialize};

use crate::bounded::{Amount, AtLeastOne};
use crate::policy::{Candidate, PickContext, Policy, Reason};
use crate::table::ByEndpoint;
use crate::time::Nanos;

/// Constants, with SMG's defaults.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Weight of KV pressure, in seconds.
    pub kv_pressure_s: Amount,
    /// Tokens per second that an engine processes.
    pub throughput_tokens_s: AtLeastOne,
    /// Tokens counted per waiting request.
    pub mean_prefill_tokens: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            kv_pressure_s: Amount::of(0.15),
            throughput_tokens_s: AtLeastOne::of(2000.0),
            mean_prefill_tokens: 1024,
        }
    }
}

/// KV cache usage that counts as full.
const KV_USAGE_MAX: f64 = 0.999;

/// The policy, with the tokens placed since each engine's last report.
pub struct SmgLeastLoad {
    config: Config,
    placed_tokens: ByEndpoint<(Nanos, u64)>,
}

// === impl SmgLeastLoad ===

impl SmgLeastLoad {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self { config, placed_tokens: ByEndpoint::default() }
    }

    fn seconds(&self, tokens: f64) -> f64 {
        tokens / self.config.throughput_tokens_s.get()
    }

    /// The score of an engine that reports its load.
    fn reported_s(&self, row: &Candidate) -> Option<f64> {
        let (reported, at) = row.load.reported?;
        let queued = f64::from(reported.waiting) * f64::from(self.config.mean_prefill_tokens);
        let placed = self.placed_tokens.get(row.endpoint).filter(|(report, _)| *report == at);
        let usage = row.kv_usage().min(KV_USAGE_MAX);
        Some(
            self.seconds(queued + placed.map_or(0.0, |(_, tokens)| *tokens as f64))
                + self.config.kv_pressure_s.get() * usage / (1.0 - usage),
        )
    }
}

impl Policy for SmgLeastLoad {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        cx.reason = Reason::LeastLoaded;
        let lowest = candidates.iter().filter_map(|row| self.reported_s(row)).reduce(f64::min);
        let request_s = self.seconds(f64::from(self.config.mean_prefill_tokens));
        let row = cx.cheapest(candidates, |row| match (self.reported_s(row), lowest) {
            (Some(score), _) => score,
            (None, Some(lowest)) => lowest + f64::from(row.load.in_flight.requests) * request_s,
            (None, None) => f64::from(row.load.in_flight.requests),
        });
        if let Some((_, at)) = candidates[row].load.reported {
            let placed = self.placed_tokens.get_or_insert(candidates[row].endpoint, || (at, 0));
            let before = if placed.0 == at { placed.1 } else { 0 };
            *placed = (at, before.saturating_add(u64::from(cx.request.prompt_tokens)));
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::LoadReport;
    use crate::policy::testing::{Case, near};

    fn report(waiting: u32, kv_usage_ratio: f32, at: u64) -> Option<(LoadReport, Nanos)> {
        let reported = LoadReport { running: 9, waiting, kv_usage_ratio, kv_capacity_tokens: None };
        Some((reported, Nanos(at)))
    }

    #[test]
    fn queued_work_and_kv_pressure_are_seconds() {
        let mut case = Case::new("smg_least_load", 1000, &[(0, 0, 0, 0); 2]);
        case.rows[0].load.reported = report(1, 0.5, 1);
        case.rows[1].load.reported = report(0, 0.8125, 1);
        assert_eq!(case.pick(), (1, Reason::LeastLoaded));
        near(&case.costs, &[0.512 + 0.15, 0.65]);
        // 1,000 tokens at 2,000 a second.
        assert_eq!(case.pick().0, 0);
        near(&case.costs, &[0.662, 1.15]);
        case.rows[1].load.reported = report(0, 0.0, 2);
        case.pick();
        near(&case.costs, &[1.162, 0.0]);
    }

    #[test]
    fn who_reports_nothing_is_as_good_as_the_best_but_for_its_own_requests() {
        let mut case = Case::new("smg_least_load", 1000, &[(0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 0)]);
        case.rows[0].load.reported = report(2, 0.0, 1);
        case.rows[2].load.reported = report(4, 0.0, 1);
        case.pick();
        near(&case.costs, &[1.024, 1.024 + 0.512, 2.048]);
    }

    #[test]
    fn without_reports_requests_in_flight_decide() {
        let mut case = Case::new("smg_least_load", 1000, &[(0, 3, 0, 0), (0, 2, 0, 0)]);
        assert_eq!(case.pick().0, 1);
        assert_eq!(case.costs, [3.0, 2.0]);
    }

    #[test]
    fn a_full_cache_is_dear_and_finite() {
        let mut case = Case::new("smg_least_load", 1000, &[(0, 0, 0, 0); 2]);
        case.rows[0].load.reported = report(0, 1.0, 1);
        case.rows[1].load.reported = report(100, f32::NAN, 1);
        assert_eq!(case.pick().0, 1);
        near(&case.costs, &[0.15 * 999.0, 51.2]);
    }
}
