//! Service level objectives (SLO) of requests: endpoints that should miss them are left out.
//!
//! Where every endpoint should miss them, a request of negative priority is rejected, and any other is placed as if it
//! had none: late is better than never. llm-d sheds by the same rule.

use super::Scheduler;
use crate::policy::Candidate;
use crate::request::{SchedulingRequest, Slo};

/// Whether a request placed on this row should meet its objectives.
fn meets(row: &Candidate, request: &SchedulingRequest, slo: Slo) -> bool {
    let within =
        |seconds: f64, most_ms: Option<u32>| most_ms.is_none_or(|most| 1e3 * seconds <= f64::from(most));
    let in_flight = row.load.in_flight;
    let context_tokens = in_flight.context_tokens + u64::from(request.prompt_tokens);
    within(row.first_token_s(request), slo.ttft_ms)
        && within(row.rates.decode_step_s(in_flight.requests + 1, context_tokens), slo.tpot_ms)
}

impl Scheduler {
    /// Leaves the rows out on which the request should miss its objectives. Returns whether it may be placed.
    pub(super) fn keep_within_slo(&mut self, request: &SchedulingRequest) -> bool {
        let slo = request.slo;
        // What a split request takes is in no row.
        if slo == Slo::default() || self.splits.may_split(request, &self.rows) {
            return true;
        }
        if !self.rows.iter().any(|row| meets(row, request, slo)) {
            return request.priority >= 0;
        }
        self.rows.retain(|row| meets(row, request, slo));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{World, config};
    use super::*;
    use crate::decision::{Refused, Rejection};
    use crate::request::RequestId;
    use crate::scheduler::{Input, Output};

    fn arrive(world: &mut World, id: u64, prompt_tokens: u32, slo: Slo, priority: i8) -> Vec<Output> {
        let request =
            SchedulingRequest { slo, priority, ..SchedulingRequest::new(RequestId(id), prompt_tokens) };
        world.step(Input::Arrived { request, overlap: Vec::new(), block_tokens: 16 })
    }

    fn slot(out: &[Output]) -> Option<u16> {
        out.iter().find_map(|output| match output {
            Output::Dispatch { placement, .. } => Some(placement.endpoint.slot() as u16),
            _ => None,
        })
    }

    const FAST: Slo = Slo { ttft_ms: Some(1000), tpot_ms: None };

    #[test]
    fn an_endpoint_that_should_be_late_is_left_out() {
        let mut world = World::new(config("round_robin"), 2);
        let none = Slo::default();
        assert_eq!(slot(&arrive(&mut world, 0, 200_000, none, 0)), Some(0), "seconds of prefill");
        assert_eq!(slot(&arrive(&mut world, 1, 100, none, 0)), Some(1));
        for id in 2..6 {
            assert_eq!(slot(&arrive(&mut world, id, 100, FAST, 0)), Some(1), "the other one is late");
        }
        let slow_steps = Slo { ttft_ms: None, tpot_ms: Some(0) };
        assert!(slot(&arrive(&mut world, 6, 100, slow_steps, 0)).is_some(), "late everywhere, and placed");
    }

    /// Invariant: Only a request of negative priority is rejected because it should miss its objectives.
    #[test]
    fn only_a_request_of_negative_priority_is_rejected_for_being_late() {
        let mut world = World::new(config("round_robin"), 1);
        arrive(&mut world, 0, 200_000, Slo::default(), 0);
        assert_eq!(slot(&arrive(&mut world, 1, 100, FAST, 0)), Some(0));
        let out = arrive(&mut world, 2, 100, FAST, -1);
        let refused = |out: &[Output]| match out {
            [Output::Reject { refused: Refused { why, .. }, .. }] => Some(*why),
            _ => None,
        };
        assert_eq!(refused(&out), Some(Rejection::SloMissed));
        assert_eq!(slot(&arrive(&mut world, 3, 100, Slo::default(), -1)), Some(0));
        world.step(Input::Finished { request: RequestId(0) });
        assert_eq!(slot(&arrive(&mut world, 4, 100, FAST, -1)), Some(0), "there is room again");
    }
}
