//! `vllm_dp`: `argmin (4 * waiting + running)`, vLLM's balancing over its data-parallel engines (vLLM v0.10.2,
//! `vllm/v1/engine/core_client.py`, `DPLBAsyncMPClient.get_core_engine_for_request`).
//!
//! Both counts are from the engine's last report, and as in vLLM each request placed since then counts as one more
//! waiting request. For an engine that reports nothing, our own ledger is used: requests without a first token wait,
//! the others run. Ties go to the first in the pool's order, as in vLLM. Known limits: it ignores caches and prompt
//! lengths, and an engine's counts are as old as its last report.

use serde::{Deserialize, Serialize};

use crate::policy::{Candidate, PickContext, Policy, Reason};
use crate::table::ByEndpoint;
use crate::time::Nanos;

/// No parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {}

/// The policy, with the requests placed since each engine's last report.
pub struct VllmDp {
    placed: ByEndpoint<(Nanos, u32)>,
}

impl VllmDp {
    /// The policy with these parameters.
    pub fn new(_: Config) -> Self {
        Self { placed: ByEndpoint::default() }
    }
}

impl Policy for VllmDp {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        cx.reason = Reason::LeastLoaded;
        let row = cx.first_cheapest(candidates, |row| {
            let (waiting, running) = match row.load.reported {
                Some((reported, at)) => {
                    let placed = self.placed.get(row.endpoint).filter(|(report, _)| *report == at);
                    (
                        f64::from(reported.waiting) + placed.map_or(0.0, |(_, n)| f64::from(*n)),
                        reported.running,
                    )
                }
                None => {
                    let ledger = row.load.in_flight;
                    (f64::from(ledger.prefilling), ledger.requests.saturating_sub(ledger.prefilling))
                }
            };
            4.0 * waiting + f64::from(running)
        });
        if let Some((_, at)) = candidates[row].load.reported {
            let placed = self.placed.get_or_insert(candidates[row].endpoint, || (at, 0));
            let before = if placed.0 == at { placed.1 } else { 0 };
            *placed = (at, before.saturating_add(1));
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::LoadReport;
    use crate::policy::testing::Case;

    fn report(waiting: u32, running: u32, at: u64) -> Option<(LoadReport, Nanos)> {
        let reported = LoadReport { running, waiting, kv_usage_ratio: 0.0, kv_capacity_tokens: None };
        Some((reported, Nanos(at)))
    }

    #[test]
    fn one_that_waits_weighs_four_that_run() {
        let mut case = Case::new("vllm_dp", 100, &[(0, 0, 0, 0); 2]);
        case.rows[0].load.reported = report(1, 2, 5);
        case.rows[1].load.reported = report(0, 5, 5);
        assert_eq!(case.pick(), (1, Reason::LeastLoaded));
        assert_eq!(case.costs, [6.0, 5.0]);
    }

    #[test]
    fn what_was_placed_since_the_report_waits_and_a_report_settles_it() {
        let mut case = Case::new("vllm_dp", 100, &[(0, 0, 0, 0); 2]);
        case.rows[0].load.reported = report(0, 0, 5);
        case.rows[1].load.reported = report(0, 5, 5);
        assert_eq!([case.pick().0, case.pick().0, case.pick().0], [0, 0, 1], "at 0 to 5, 4 to 5, 8 to 5");
        case.rows[0].load.reported = report(0, 2, 6);
        assert_eq!(case.pick().0, 0);
        assert_eq!(case.costs, [2.0, 9.0]);
    }

    #[test]
    fn without_reports_the_ledger_tells_and_the_first_of_equals_wins() {
        let mut case = Case::new("vllm_dp", 100, &[(0, 6, 0, 0), (0, 3, 0, 0), (0, 3, 0, 0)]);
        case.rows[1].load.in_flight.prefilling = 1;
        case.rows[2].load.in_flight.prefilling = 1;
        assert_eq!([case.pick().0, case.pick().0], [0, 0], "6 running against 1 waiting and 2 running");
        assert_eq!(case.costs, [6.0, 6.0, 6.0]);
    }
}
