//! Service level objectives (SLO) of requests: only the endpoints stay on which the most requests should meet theirs.
//!
//! Among these the policy chooses, by cost as ever: the share of requests within their objectives
//! grows with what is left for others. A request does not delay the first tokens of those placed before it, since
//! engines compute prompts in order of arrival. It does lengthen their decode steps, by which those in flight there may miss
//! their TPOT that would meet it without: each counts as much as the request itself. So a request without objectives
//! leaves endpoints out, too.
//!
//! Where every endpoint should miss its own, a request is refused, or placed as if it had none, as [`IfMissed`] says: by
//! default one of negative priority is refused, as llm-d does. A queued one that should miss its target when its turn
//! comes lets those behind it go first. A retry is not refused: its client has been told to wait.
//!
//! [`IfMissed`]: crate::request::IfMissed

use super::Scheduler;
use crate::load::InFlight;
use crate::policy::Candidate;
use crate::queue::Waiting;
use crate::request::{SchedulingRequest, Slo};
use crate::time::Nanos;

/// Whether a request should meet its objectives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SloFit {
    /// It should on the rows that are left, or has none.
    Met,
    /// It should not on any row, and may be placed on any.
    BestEffort,
    /// It should not on any row, and is to be refused.
    Refused {
        /// By how much its first token would be late on the soonest row.
        late: Nanos,
    },
}

/// Milliseconds of a decode step on this row, without and with the request.
fn step_ms(row: &Candidate, request: &SchedulingRequest) -> (f64, f64) {
    let InFlight { requests, context_tokens, .. } = row.load.in_flight;
    let with_tokens = context_tokens + u64::from(request.prompt_tokens);
    let [before_s, with_s] = [(requests, context_tokens), (requests + 1, with_tokens)]
        .map(|(n, tokens)| row.rates.decode_step_s(n, tokens));
    (before_s * 1e3, with_s * 1e3)
}

/// The request's TPOT objective, if it should meet it on this row.
pub(super) fn tpot_met_ms(row: &Candidate, request: &SchedulingRequest) -> Option<u32> {
    request.slo.tpot_ms.filter(|&most_ms| step_ms(row, request).1 <= f64::from(most_ms))
}

/// Whether a request placed on this row should meet its objectives, with so much time left for its first token.
fn meets(row: &Candidate, request: &SchedulingRequest, left_s: Option<f64>) -> bool {
    left_s.is_none_or(|left_s| row.first_token_s(request) <= left_s)
        && (request.slo.tpot_ms.is_none() || tpot_met_ms(row, request).is_some())
}

impl Scheduler {
    /// Leaves only the rows on which the most requests should meet their objectives, and on which this one should if that is
    /// among them.
    pub(super) fn keep_within_slo(&mut self, now: Nanos, waiting: &Waiting) -> SloFit {
        let Waiting { request, due, .. } = waiting;
        let has_objectives = request.slo != Slo::default();
        // What a split request takes is in no row.
        if !has_objectives && self.tpots_due == 0 || self.splits.may_split(request, &self.rows) {
            return SloFit::Met;
        }
        let left_s = due.map(|due| (due - now).as_secs_f64());
        let pool = &self.pool;
        let more_met = |row: &Candidate| {
            let is_met = has_objectives && meets(row, request, left_s);
            let (before_ms, with_ms) = step_ms(row, request);
            let missed =
                pool.get(row.endpoint).map_or(0, |endpoint| endpoint.tpots.between(before_ms, with_ms));
            (i64::from(is_met) - i64::from(missed), is_met)
        };
        let Some(most) = self.rows.iter().map(more_met).max() else { return SloFit::Met };
        let (_, is_met) = most;
        let is_best_effort = has_objectives && !is_met;
        if is_best_effort && request.is_refused_if_late() {
            let soonest_s =
                self.rows.iter().map(|row| row.first_token_s(request)).fold(f64::INFINITY, f64::min);
            let late_s = left_s.map_or(0.0, |left_s| soonest_s - left_s);
            return SloFit::Refused { late: Nanos::from_secs_f64(late_s) };
        }
        self.rows.retain(|row| more_met(row) == most);
        if is_best_effort { SloFit::BestEffort } else { SloFit::Met }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{World, config};
    use super::*;
    use crate::decision::{Refused, Rejection};
    use crate::rates::Rates;
    use crate::request::{IfMissed, RequestId};
    use crate::scheduler::{Config, Input, Output};

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

    fn refused(out: &[Output]) -> Option<(u64, Refused)> {
        out.iter().find_map(|output| match output {
            Output::Reject { request, refused } => Some((request.0, *refused)),
            _ => None,
        })
    }

    fn dispatched(out: &[Output]) -> Vec<u64> {
        let of = |output: &Output| match output {
            Output::Dispatch { request, .. } => Some(request.0),
            _ => None,
        };
        out.iter().filter_map(of).collect()
    }

    const FAST: Slo = Slo { ttft_ms: Some(1000), tpot_ms: None, if_missed: IfMissed::ByPriority };

    /// One request at a time; others wait for a minute.
    fn queued() -> Config {
        Config {
            max_concurrent_requests: 1,
            queue_size: 100,
            queue_timeout: Nanos::from_secs(60),
            ..config("round_robin")
        }
    }

    #[test]
    fn an_endpoint_that_should_be_late_is_left_out() {
        let mut world = World::new(config("round_robin"), 2);
        let none = Slo::default();
        assert_eq!(slot(&arrive(&mut world, 0, 200_000, none, 0)), Some(0), "seconds of prefill");
        assert_eq!(slot(&arrive(&mut world, 1, 100, none, 0)), Some(1));
        for id in 2..6 {
            assert_eq!(slot(&arrive(&mut world, id, 100, FAST, 0)), Some(1), "the other one is late");
        }
        let slow_steps = Slo { tpot_ms: Some(0), ..none };
        assert!(slot(&arrive(&mut world, 6, 100, slow_steps, 0)).is_some(), "late everywhere, and placed");
    }

    /// Invariant: A request that should miss its objectives everywhere is refused where `if_missed` says so, and without it only if its priority is negative; any other, and a retry, is placed.
    #[test]
    fn a_request_that_should_be_late_is_refused_as_its_objectives_say() {
        for (if_missed, priority, refuses) in [
            (IfMissed::ByPriority, 0, false),
            (IfMissed::ByPriority, -1, true),
            (IfMissed::BestEffort, -1, false),
            (IfMissed::Refuse, 100, true),
        ] {
            let mut world = World::new(config("round_robin"), 1);
            let slo = Slo { if_missed, ..FAST };
            arrive(&mut world, 0, 200_000, Slo::default(), 0);
            let out = arrive(&mut world, 1, 100, slo, priority);
            let why = refused(&out).map(|(_, refused)| refused.why);
            assert_eq!(why, refuses.then_some(Rejection::SloMissed), "{if_missed:?} {priority}");
            assert_eq!(slot(&out), (!refuses).then_some(0));
            let again =
                SchedulingRequest { attempt: 1, slo, priority, ..SchedulingRequest::new(RequestId(9), 100) };
            let again = Input::Arrived { request: again, overlap: Vec::new(), block_tokens: 16 };
            assert_eq!(slot(&world.step(again)), Some(0), "a retry");
            assert_eq!(slot(&arrive(&mut world, 2, 100, Slo::default(), -1)), Some(0));
            world.step(Input::Finished { request: RequestId(0) });
            assert_eq!(slot(&arrive(&mut world, 3, 100, slo, priority)), Some(0), "there is room again");
        }
    }

    /// Invariant: A request goes where the most requests should meet their TPOT, those in flight counted with it.
    #[test]
    fn a_request_is_not_placed_where_it_makes_others_miss_their_objectives() {
        let mut world = World::new(config("round_robin"), 2);
        // Two requests fit the target at an endpoint, a third does not.
        let step_ms = |requests, tokens: u32| 1e3 * Rates::default().decode_step_s(requests, tokens.into());
        let tpot_ms = step_ms(2, 200).ceil() as u32;
        let slo = Slo { tpot_ms: Some(tpot_ms), ..Slo::default() };
        let long = |tokens: u32| step_ms(2, 100 + tokens) > f64::from(tpot_ms);
        let tokens = (1..).map(|n| n * 1000).find(|&tokens| long(tokens)).expect("some length");
        assert_eq!(slot(&arrive(&mut world, 0, 100, slo, 0)), Some(0));
        for id in 1..4 {
            assert_eq!(
                slot(&arrive(&mut world, id, tokens, Slo::default(), 0)),
                Some(1),
                "not beside the one with a target"
            );
        }
        // Only the second of these would push both others over their target.
        assert_eq!(slot(&arrive(&mut world, 4, 100, slo, 0)), Some(0), "both meet it");
        assert_eq!(
            slot(&arrive(&mut world, 5, tokens, slo, 0)),
            Some(1),
            "best effort: two would miss theirs"
        );
        // With the last of them what was kept for them is free.
        for id in [0, 4] {
            world.step(Input::Finished { request: RequestId(id) });
        }
        let slots: Vec<_> =
            (6..8).map(|id| slot(&arrive(&mut world, id, tokens, Slo::default(), 0))).collect();
        assert!(slots.contains(&Some(0)) && slots.contains(&Some(1)), "{slots:?}");
    }

    #[test]
    fn what_misses_its_objective_anyway_is_not_protected() {
        let mut world = World::new(config("round_robin"), 2);
        let slo = Slo { tpot_ms: Some(0), ..Slo::default() };
        arrive(&mut world, 0, 100, slo, 0);
        let slots: Vec<_> =
            (1..3).map(|id| slot(&arrive(&mut world, id, 100_000, Slo::default(), 0))).collect();
        assert_eq!(slots, [Some(1), Some(0)]);
    }

    #[test]
    fn a_refusal_says_when_the_objectives_should_be_met() {
        let config = Config { queue_timeout: Nanos::from_secs(3600), ..config("round_robin") };
        let mut world = World::new(config, 1);
        arrive(&mut world, 0, 200_000, Slo::default(), 0);
        let slo = Slo { if_missed: IfMissed::Refuse, ..FAST };
        let late = refused(&arrive(&mut world, 1, 100, slo, 0)).expect("late").1.retry_after;
        let twice = Slo { ttft_ms: Some(2000), ..slo };
        let less = refused(&arrive(&mut world, 2, 100, twice, 0)).expect("late").1.retry_after;
        let (late_s, less_s) = (late.as_secs_f64(), less.as_secs_f64());
        assert!(late_s > 2.0 && (late_s - less_s - 1.0).abs() < 1e-6, "{late_s} s, {less_s} s");
    }

    #[test]
    fn targets_order_the_queue_and_what_has_passed_waits_as_if_it_had_none() {
        let mut world = World::new(queued(), 1);
        let ttft_ms = |ms| Slo { ttft_ms: Some(ms), ..Slo::default() };
        assert_eq!(slot(&arrive(&mut world, 0, 100, Slo::default(), 0)), Some(0));
        for (id, slo) in [
            (1, Slo::default()),
            (2, ttft_ms(9000)),
            (3, ttft_ms(5000)),
            (4, ttft_ms(7000)),
            (5, Slo::default()),
        ] {
            assert_eq!(arrive(&mut world, id, 100, slo, 0), []);
        }
        let mut order = Vec::new();
        for (now_s, last) in [(6, 0), (6, 4), (6, 2), (6, 1), (6, 3)] {
            world.now = Nanos::from_secs(now_s);
            order.extend(dispatched(&world.step(Input::Finished { request: RequestId(last) })));
        }
        assert_eq!(order, [4, 2, 1, 3, 5], "the target of 3 has passed");
    }

    #[test]
    fn a_queued_request_that_is_to_be_refused_is_refused_when_its_target_passes() {
        let mut world = World::new(queued(), 1);
        arrive(&mut world, 0, 100, Slo::default(), 0);
        assert_eq!(arrive(&mut world, 1, 100, Slo { if_missed: IfMissed::Refuse, ..FAST }, 0), []);
        let next = world.scheduler.next_deadline().expect("its target");
        assert!(next < Nanos::from_secs(2), "{next:?}");
        world.now = next;
        let (id, refused) = refused(&world.step(Input::Tick)).expect("its target has passed");
        assert_eq!((id, refused.why), (1, Rejection::SloMissed));
        assert_eq!(world.scheduler.queued(), 0);
    }

    #[test]
    fn a_queued_request_that_should_miss_its_target_lets_those_behind_it_go_first() {
        let mut world = World::new(queued(), 1);
        arrive(&mut world, 0, 100, Slo::default(), 0);
        arrive(&mut world, 1, 200_000, FAST, 0);
        arrive(&mut world, 2, 100, FAST, 0);
        let order: Vec<u64> = [0, 2]
            .into_iter()
            .flat_map(|last| dispatched(&world.step(Input::Finished { request: RequestId(last) })))
            .collect();
        assert_eq!(order, [2, 1], "seconds of prefill are more than its target");
    }

    #[test]
    fn a_target_counts_from_the_arrival() {
        let mut world = World::new(Config { max_concurrent_requests: 2, ..queued() }, 2);
        // Its prefill leaves the first endpoint too little of a second, and enough of a minute.
        arrive(&mut world, 0, 60_000, Slo::default(), 0);
        arrive(&mut world, 1, 100, Slo::default(), 0);
        let slo = Slo { ttft_ms: Some(60_000), if_missed: IfMissed::Refuse, ..Slo::default() };
        arrive(&mut world, 2, 100, slo, 0);
        world.now = Nanos::from_millis(59_900);
        let out = world.step(Input::Finished { request: RequestId(1) });
        assert_eq!(slot(&out), Some(1), "round robin would take the first endpoint");
    }
}
