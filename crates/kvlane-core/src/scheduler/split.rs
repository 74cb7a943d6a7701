//! Split placements: one endpoint computes a request's prompt, another decodes its answer.
//!
//! Each leg is in flight under an id of its own, with its own reservation, breaker and measurements. Both are reserved
//! in the step that decides, so no endpoint looks idle while its blocks are on their way. The prefill leg is over when
//! the transfer is: until then its endpoint holds the blocks. It ends with its request at the latest.

use super::in_flight::Receiving;
use super::{Config, Output, Scheduler};
use crate::disaggregation::{Part, Role, Transfers, WarmUp};
use crate::endpoint::EndpointId;
use crate::policy::{Candidate, Pairs, Pick, PickContext, Policy};
use crate::request::{RequestId, SchedulingRequest};
use crate::time::Nanos;

/// What the scheduler knows of its endpoints' parts.
pub(super) struct Splits {
    pub(super) transfers: Transfers,
    /// Picks where prompts are computed if the policy knows no price of a split.
    prefill_policy: Box<dyn Policy>,
    /// Whether any endpoint does not simply serve requests alone.
    pub(super) any: bool,
    /// Whether two endpoints can share a request.
    possible: bool,
    /// Prefill legs in flight.
    pub(super) legs: usize,
    /// Requests that wait for blocks from elsewhere.
    pub(super) receiving: usize,
    /// Rows of one leg, and their positions among all rows.
    rows: Vec<Candidate>,
    at: Vec<usize>,
}

// === impl Splits ===

impl Splits {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            transfers: Transfers::default(),
            prefill_policy: Self::prefill_policy(config),
            any: false,
            possible: false,
            legs: 0,
            receiving: 0,
            rows: Vec::new(),
            at: Vec::new(),
        }
    }

    fn prefill_policy(config: &Config) -> Box<dyn Policy> {
        config.prefill_policy.as_ref().unwrap_or(&config.policy).build()
    }

    pub(super) fn configure(&mut self, before: &Config, config: &Config) {
        if (&before.policy, &before.prefill_policy) != (&config.policy, &config.prefill_policy) {
            self.prefill_policy = Self::prefill_policy(config);
        }
    }

    /// Whether a request may be split between two of these rows. One that was tried before is served alone where an
    /// endpoint can.
    pub(super) fn may_split(&self, request: &SchedulingRequest, rows: &[Candidate]) -> bool {
        self.possible
            && request.leg.is_some()
            && (request.attempt == 0 || !rows.iter().any(|row| row.part.may_serve_alone()))
            // Without either kind, no pair is looked for.
            && rows.iter().any(|row| row.part.may_decode())
            && rows
                .iter()
                .filter(|row| row.part.may_prefill())
                .any(|prefill| rows.iter().any(|decode| prefill.can_prefill_for(decode)))
    }

    /// Leaves out the rows that cannot serve the request. Without a row that serves requests alone by its role, and
    /// without a pair, those of other roles that can serve alone stay.
    pub(super) fn keep_parts(&self, request: &SchedulingRequest, rows: &mut Vec<Candidate>) {
        if !self.any || self.may_split(request, rows) {
            return;
        }
        let serves = rows.iter().any(|row| row.part.may_serve_alone());
        let stays = if serves { Part::may_serve_alone } else { Part::could_serve_alone };
        rows.retain(|row| stays(&row.part));
    }

    /// Picks among the rows that `is_wanted` with `policy`.
    fn pick_among(
        (rows, at): (&mut Vec<Candidate>, &mut Vec<usize>),
        policy: &mut dyn Policy,
        cx: &mut PickContext<'_>,
        all: &[Candidate],
        is_wanted: impl Fn(&Candidate) -> bool,
    ) -> Option<usize> {
        rows.clear();
        at.clear();
        for (row, candidate) in all.iter().enumerate().filter(|(_, row)| is_wanted(row)) {
            rows.push(*candidate);
            at.push(row);
        }
        // Costs are by position among these rows, and shown by position among all.
        // Nor are the adapter's rows of these.
        let (costs, adapter) = (cx.costs.take(), cx.adapter.take());
        let picked = (!rows.is_empty()).then(|| at[policy.pick(cx, rows)]);
        (cx.costs, cx.adapter) = (costs, adapter);
        picked
    }

    /// Picks by roles: the policy picks where to decode, and the prefill policy where the prompt is computed if that
    /// endpoint only decodes or the prompt is long enough.
    fn pick_by_role(
        &mut self,
        policy: &mut dyn Policy,
        cx: &mut PickContext<'_>,
        all: &[Candidate],
        split_tokens_min: Option<u32>,
    ) -> Option<Pick> {
        let Self { transfers, prefill_policy, rows, at, .. } = self;
        let (request, pairs) = (cx.request, Pairs { transfers, now: cx.now });
        let connects = |row: &Candidate| all.iter().any(|other| other.can_prefill_for(row));
        let may_answer =
            |row: &Candidate| row.part.may_serve_alone() || row.part.may_decode() && connects(row);
        let row = Self::pick_among((rows, at), policy, cx, all, may_answer)?;
        let (reason, decode) = (cx.reason, &all[row]);
        let serves_alone = decode.part.may_serve_alone();
        let is_long = match split_tokens_min {
            Some(least) => decode.uncached_tokens(request) >= least.max(1),
            None => decode.part.role == Role::Decode,
        };
        if serves_alone && !is_long {
            return Some(Pick::alone(row));
        }
        let may_share = |prefill: &Candidate| {
            prefill.can_prefill_for(decode) && (!serves_alone || pairs.has_room(prefill, decode))
        };
        let prefill = Self::pick_among((rows, at), &mut **prefill_policy, cx, all, may_share);
        cx.reason = reason;
        Some(Pick { row, prefill })
    }
}

// === impl Scheduler ===

impl Scheduler {
    /// Sets an endpoint's part in disaggregated serving.
    pub(super) fn assign(&mut self, endpoint: EndpointId, part: Part) {
        if let Some(endpoint) = self.pool.get_mut(endpoint) {
            endpoint.part = part;
        }
        self.review_parts();
    }

    /// Updates what is known of the endpoints' parts.
    pub(super) fn review_parts(&mut self) {
        let parts: Vec<Part> = self.pool.endpoints().map(|endpoint| endpoint.part).collect();
        self.splits.any = parts.iter().any(|part| *part != Part::default());
        // In a fleet without either kind this is one look at each, however many join and leave.
        let mut prefills = parts.iter().enumerate().filter(|(_, part)| part.may_prefill());
        self.splits.possible = parts.iter().any(Part::may_decode)
            && prefills.any(|(at, prefill)| {
                parts.iter().enumerate().any(|(other, decode)| other != at && prefill.can_prefill_for(decode))
            });
    }

    /// Whether two endpoints can share a request.
    pub fn has_pairs(&self) -> bool {
        self.splits.possible
    }

    /// Whether an endpoint can serve a request, alone or with another.
    pub fn takes_requests(&self) -> bool {
        let parts = || self.pool.eligible().map(|endpoint| endpoint.part);
        parts().any(|part| part.could_serve_alone())
            || self.splits.possible
                && parts().any(|prefill| parts().any(|decode| prefill.can_prefill_for(&decode)))
    }

    /// Learned times and limits of transfers between endpoints.
    pub fn transfers(&self) -> &Transfers {
        &self.splits.transfers
    }

    /// Picks among the rows.
    pub(super) fn pick(
        splits: &mut Splits,
        policy: &mut dyn Policy,
        split_tokens_min: Option<u32>,
        cx: &mut PickContext<'_>,
        rows: &[Candidate],
    ) -> Pick {
        if !splits.may_split(cx.request, rows) {
            return Pick::alone(policy.pick(cx, rows));
        }
        let priced = match split_tokens_min {
            None => policy.pick_split(cx, rows, Pairs { transfers: &splits.transfers, now: cx.now }),
            Some(_) => None,
        };
        let pick = priced.or_else(|| splits.pick_by_role(policy, cx, rows, split_tokens_min));
        pick.unwrap_or_else(|| Pick::alone(policy.pick(cx, rows)))
    }

    /// A prompt was computed on its prefill leg: the transfer of its blocks begins.
    pub(super) fn computed_elsewhere(&mut self, now: Nanos, leg: RequestId, request: RequestId) {
        if let Some(endpoint) = self.flights.get(leg).map(|flight| flight.endpoint)
            && let Some(ledger) = self.pool.in_flight_mut(endpoint)
        {
            ledger.moving += 1;
        }
        let receiving = self.flights.get_mut(request).and_then(|flight| flight.receiving.as_mut());
        if let Some(Receiving { since, .. }) = receiving {
            since.get_or_insert(now);
        }
    }

    /// A request's blocks have arrived, or the request is over: its prefill leg ends.
    pub(super) fn received(&mut self, now: Nanos, request: RequestId, seen: bool, out: &mut Vec<Output>) {
        if self.splits.receiving == 0 {
            return;
        }
        let Some(flight) = self.flights.get_mut(request) else { return };
        let Some(Receiving { leg, from, tokens, since }) = flight.receiving.take() else { return };
        let to = flight.endpoint;
        self.splits.receiving -= 1;
        let mut step_s = 0.0;
        if let Some(endpoint) = self.pool.get_mut(to) {
            endpoint.load.in_flight.moving -= 1;
            let in_flight = endpoint.in_flight();
            let rates = self.learning.rates(endpoint);
            step_s = rates.decode_step_s(in_flight.decoding(), in_flight.context_tokens);
        }
        if let (true, Some(since)) = (seen, since) {
            let taken_s = ((now - since).as_secs_f64() - step_s).max(0.0);
            self.splits.transfers.ended(now, from, to, tokens, taken_s);
        }
        self.splits.transfers.end(from, to);
        self.settle(now, leg, out);
    }

    /// A transfer between two endpoints that no request needs. The time until its first token includes a decode step.
    pub(super) fn warm_up(&mut self, now: Nanos, from: EndpointId, to: EndpointId, mut warm_up: WarmUp) {
        let (Some(_), Some(endpoint)) = (self.pool.get(from), self.pool.get(to)) else { return };
        if let WarmUp::Ended { next, .. } = &mut warm_up {
            let in_flight = endpoint.in_flight();
            let rates = self.learning.rates(endpoint);
            let step_s = rates.decode_step_s(in_flight.decoding(), in_flight.context_tokens);
            *next = *next - Nanos::from_secs_f64(step_s);
        }
        self.splits.transfers.warm_up(now, from, to, warm_up);
    }

    /// The transfer of a request's blocks has failed.
    pub(super) fn lost(&mut self, now: Nanos, request: RequestId) {
        let Some(flight) = self.flights.get(request) else { return };
        let Some(Receiving { from, since, .. }) = flight.receiving else { return };
        let lost_s = (now - since.unwrap_or(flight.timed.placed())).as_secs_f64();
        self.splits.transfers.failed(now, from, flight.endpoint, lost_s);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Input;
    use super::super::tests::{World, config, endpoint};
    use super::*;
    use crate::cache_accuracy::Prediction;
    use crate::load::{InFlight, LoadReport};

    const LEG: RequestId = RequestId(1001);

    /// Endpoints of these roles, which are connected.
    fn world(config: Config, roles: &[Role]) -> World {
        let mut world = World::new(config, roles.len());
        for (slot, &role) in (0..).zip(roles) {
            let part = Part { role, network: Some(7), serves_alone: true };
            world.step(Input::Assigned { endpoint: endpoint(slot), part });
        }
        world
    }

    /// A request that may be split arrives: where it is decoded, and where its prompt is computed if elsewhere.
    fn arrive(world: &mut World, id: u64, prompt_tokens: u32) -> Option<(u16, Option<u16>)> {
        arrive_again(world, id, prompt_tokens, 0)
    }

    fn arrive_again(
        world: &mut World,
        id: u64,
        prompt_tokens: u32,
        attempt: u32,
    ) -> Option<(u16, Option<u16>)> {
        let leg = Some(RequestId(1000 + id));
        let request =
            SchedulingRequest { leg, attempt, ..SchedulingRequest::new(RequestId(id), prompt_tokens) };
        let out = world.step(Input::Arrived { request, overlap: Vec::new(), block_tokens: 16 });
        out.iter().find_map(|output| match output {
            Output::Dispatch { placement, .. } => {
                let slot = |id: EndpointId| id.slot() as u16;
                Some((slot(placement.endpoint), placement.prefill.map(|leg| slot(leg.endpoint))))
            }
            _ => None,
        })
    }

    /// Invariant: A split request is reserved at both endpoints when it is placed: computed at one, expected at the other.
    ///
    /// The proxy of the study "elastic P/D" did not reserve the second (its bugs 1 and 5), and gave it more requests than
    /// its KV cache held.
    #[test]
    fn both_ends_are_reserved_at_the_decision_and_free_when_the_request_is_over() {
        let mut world = world(config("least_load"), &[Role::Prefill, Role::Decode]);
        assert_eq!(arrive(&mut world, 1, 100), Some((1, Some(0))));
        let pairs = 100 * 101 / 2;
        let computing = InFlight {
            requests: 1,
            prefilling: 1,
            prefill_tokens: 100,
            prefill_pairs: pairs,
            lower_tokens: 0,
            context_tokens: 100,
            moving: 0,
        };
        let expected = InFlight { requests: 1, moving: 1, context_tokens: 100, ..InFlight::default() };
        assert_eq!((world.ledger(0), world.ledger(1)), (computing, expected));
        assert_eq!(world.scheduler.in_flight(), 1, "one request");
        assert!(world.scheduler.expected(endpoint(1)).is_none(), "nothing to decode yet");

        world.step(Input::Begun { request: LEG });
        assert_eq!((world.ledger(0), world.ledger(1)), (expected, expected), "its blocks are on their way");
        assert!(world.scheduler.expected(endpoint(0)).is_none(), "nothing left to compute");
        let holding = InFlight { requests: 1, context_tokens: 100, ..InFlight::default() };
        world.step(Input::FirstToken { request: RequestId(1) });
        assert_eq!((world.ledger(0), world.ledger(1)), (InFlight::default(), holding), "they have arrived");
        world.step(Input::Finished { request: LEG });
        world.step(Input::Finished { request: RequestId(1) });
        assert_eq!((world.ledger(0), world.ledger(1)), (InFlight::default(), InFlight::default()));
        let link = world.scheduler.transfers().links(world.now).next().expect("it was used");
        assert_eq!((link.in_flight, link.ended, link.failed), (0, 1, 0));
    }

    #[test]
    fn a_request_that_ends_at_any_stage_leaves_nothing() {
        for stage in 0..4 {
            let mut world = world(config("least_load"), &[Role::Prefill, Role::Decode]);
            arrive(&mut world, 1, 100);
            match stage {
                0 => {}
                1 => _ = world.step(Input::Failed { request: LEG }),
                2 => _ = world.step(Input::Finished { request: LEG }),
                _ => {
                    world.step(Input::Begun { request: LEG });
                    world.step(Input::TransferFailed { request: RequestId(1) });
                }
            }
            world.step(Input::Finished { request: RequestId(1) });
            assert_eq!(
                (world.ledger(0), world.ledger(1)),
                (InFlight::default(), InFlight::default()),
                "{stage}"
            );
            assert_eq!((world.scheduler.in_flight(), world.scheduler.splits.receiving), (0, 0), "{stage}");
            let link = world.scheduler.transfers().links(world.now).next().expect("it was used");
            assert_eq!((link.in_flight, link.failed), (0, u64::from(stage == 3)), "{stage}");
        }
    }

    /// Invariant: At most as many split requests are in flight between two endpoints as their learned limit allows; the
    /// others are served by one endpoint, if one can.
    #[test]
    fn a_request_beyond_the_limit_of_transfers_is_served_by_one() {
        let mut world = world(config("least_load"), &[Role::Prefill, Role::Decode]);
        let split = (0..6).filter(|&id| arrive(&mut world, id, 100) == Some((1, Some(0)))).count();
        assert_eq!(split, 4, "the limit at first");
        world.step(Input::Finished { request: RequestId(0) });
        assert_eq!(arrive(&mut world, 7, 100), Some((1, Some(0))), "there is room again");
    }

    #[test]
    fn endpoints_that_cannot_serve_alone_share_every_request() {
        let mut world = world(config("round_robin"), &[Role::Prefill, Role::Decode]);
        for slot in 0..2 {
            let role = [Role::Prefill, Role::Decode][usize::from(slot)];
            let part = Part { role, network: Some(7), serves_alone: false };
            world.step(Input::Assigned { endpoint: endpoint(slot), part });
        }
        for id in 0..9 {
            assert_eq!(arrive_again(&mut world, id, 100, (id % 2) as u32), Some((1, Some(0))), "{id}");
        }
        world.step(Input::Left { endpoint: endpoint(0) });
        assert_eq!(arrive(&mut world, 10, 100), None, "no prefill");
    }

    #[test]
    fn a_request_that_was_tried_before_is_served_by_one_endpoint() {
        let mut world = world(config("fleet_cost"), &[Role::Prefill, Role::Decode]);
        assert_eq!(arrive_again(&mut world, 1, 100_000, 1), Some((1, None)));
    }

    #[test]
    fn prefill_endpoints_serve_whole_requests_only_where_no_other_can() {
        let mut world = world(config("least_load"), &[Role::Prefill, Role::Decode, Role::Encode]);
        world.step(Input::Health { endpoint: endpoint(1), healthy: false });
        assert_eq!(arrive(&mut world, 1, 100), Some((0, None)));
        world.step(Input::Health { endpoint: endpoint(0), healthy: false });
        assert_eq!(arrive(&mut world, 2, 100), None, "an encoder serves no request");
    }

    #[test]
    fn endpoints_of_different_networks_do_not_share_requests() {
        let mut world = world(config("least_load"), &[Role::Prefill, Role::Decode]);
        let part = Part { role: Role::Prefill, network: Some(8), serves_alone: true };
        world.step(Input::Assigned { endpoint: endpoint(0), part });
        assert_eq!(arrive(&mut world, 1, 100), Some((1, None)));
    }

    #[test]
    fn where_a_length_is_set_it_decides() {
        let config = Config { split_tokens_min: Some(1000), ..config("fleet_cost") };
        let mut world = world(config, &[Role::Both, Role::Both]);
        let (short, long) = (arrive(&mut world, 1, 999), arrive(&mut world, 2, 1000));
        assert!(short.is_some_and(|(_, prefill)| prefill.is_none()), "{short:?}");
        assert!(long.is_some_and(|(row, prefill)| prefill.is_some_and(|other| other != row)), "{long:?}");
    }

    /// The price of a split: a long prompt would stall many answers, a short one hardly any.
    #[test]
    fn a_prompt_goes_elsewhere_if_it_would_cost_the_answers_here_more_than_its_transfer() {
        let mut world = world(config("fleet_cost"), &[Role::Prefill, Role::Decode]);
        for id in 0..40 {
            let request = SchedulingRequest::new(RequestId(id), 2000);
            world.step(Input::Arrived { request, overlap: Vec::new(), block_tokens: 16 });
            world.step(Input::FirstToken { request: RequestId(id) });
        }
        assert_eq!(arrive(&mut world, 50, 30_000), Some((1, Some(0))));
        world.step(Input::Finished { request: RequestId(50) });
        assert_eq!(arrive(&mut world, 51, 16), Some((1, None)));
        (0..30).for_each(|_| {
            let now = world.now;
            world.scheduler.splits.transfers.failed(now, endpoint(0), endpoint(1), 120.0);
        });
        assert_eq!(arrive(&mut world, 52, 30_000), Some((1, None)), "transfers cost too much");
    }

    /// An endpoint decodes requests, which `others` do not get.
    fn decode_at(
        world: &mut World,
        slot: u16,
        others: &[u16],
        ids: std::ops::Range<u64>,
        prompt_tokens: u32,
    ) {
        for id in ids.map(RequestId) {
            let excluded = others.iter().map(|&other| endpoint(other)).collect::<Vec<_>>().into();
            let request = SchedulingRequest { excluded, ..SchedulingRequest::new(id, prompt_tokens) };
            world.step(Input::Arrived { request, overlap: Vec::new(), block_tokens: 16 });
            world.step(Input::FirstToken { request: id });
            assert!(world.ledger(slot).requests > 0);
        }
    }

    /// The copy at the decode endpoint evicts blocks that others need, and what they compute again stalls answers there.
    #[test]
    fn where_prompts_repeat_a_copy_costs_what_it_evicts() {
        let picked = |repeats: bool| {
            let mut world = world(config("fleet_cost"), &[Role::Prefill, Role::Decode]);
            for id in 0..300 {
                let held = if repeats { 2000 } else { 0 };
                world.arrive(id, 2000, &[(endpoint(1), held)]);
                world.step(Input::Finished { request: RequestId(id) });
            }
            decode_at(&mut world, 1, &[0], 400..410, 2000);
            arrive(&mut world, 500, 30_000)
        };
        assert_eq!(picked(false), Some((1, Some(0))));
        assert_eq!(picked(true), Some((1, None)));
    }

    /// An endpoint whose cache is full gets neither a whole request nor a prompt, though it holds the prefix.
    #[test]
    fn a_prompt_waits_for_room_where_it_is_computed() {
        let picked = |capacity_tokens: u64, transfers_fail: bool| {
            let mut world = world(config("fleet_cost"), &[Role::Both, Role::Both]);
            decode_at(&mut world, 0, &[1], 0..1, 39_600);
            for slot in 0..2 {
                let kv_capacity_tokens = Some(if slot == 0 { capacity_tokens } else { 4_000_000 });
                let reported = LoadReport { running: 0, waiting: 0, kv_usage_ratio: 0.0, kv_capacity_tokens };
                world.step(Input::Reported { endpoint: endpoint(slot), reported });
            }
            for (from, to) in [(0, 1), (1, 0)].into_iter().filter(|_| transfers_fail) {
                let now = world.now;
                (0..30).for_each(|_| {
                    world.scheduler.splits.transfers.failed(now, endpoint(from), endpoint(to), 60.0)
                });
            }
            let held = Prediction { exact: 0, approximate: 9990, lower: 0 };
            let request =
                SchedulingRequest { leg: Some(LEG), ..SchedulingRequest::new(RequestId(9), 10_000) };
            let overlap = vec![(endpoint(0), held)];
            let out = world.step(Input::Arrived { request, overlap, block_tokens: 16 });
            out.iter().find_map(|output| match output {
                Output::Dispatch { placement, .. } => {
                    Some((placement.endpoint, placement.prefill.map(|leg| leg.endpoint)))
                }
                _ => None,
            })
        };
        assert_eq!(
            picked(4_000_000, false),
            Some((endpoint(1), Some(endpoint(0)))),
            "with room, prompts go there"
        );
        assert_eq!(picked(40_000, false), Some((endpoint(1), None)));
        assert_eq!(picked(4_000_000, true), Some((endpoint(0), None)), "with room, whole requests do");
        assert_eq!(picked(40_000, true), Some((endpoint(1), None)));
    }

    #[test]
    fn blocks_are_not_sent_where_a_long_step_is_in_progress() {
        let picked = |computed: bool| {
            let mut world = world(config("fleet_cost"), &[Role::Prefill, Role::Decode, Role::Decode]);
            decode_at(&mut world, 2, &[0, 1], 0..1, 9000);
            let excluded = [0, 2].map(endpoint).into();
            let request = SchedulingRequest { excluded, ..SchedulingRequest::new(RequestId(5), 8000) };
            world.step(Input::Arrived { request, overlap: Vec::new(), block_tokens: 16 });
            if computed {
                world.step(Input::FirstToken { request: RequestId(5) });
            }
            arrive(&mut world, 50, 30_000)
        };
        assert_eq!((picked(true), picked(false)), (Some((1, Some(0))), Some((2, Some(0)))));
    }

    #[test]
    fn a_pair_that_is_warmed_up_gets_no_request_of_any_policy() {
        for policy in ["fleet_cost", "least_load"] {
            let config = Config { split_tokens_min: Some(1), ..config(policy) };
            let mut world = world(config, &[Role::Prefill, Role::Decode]);
            let (from, to) = (endpoint(0), endpoint(1));
            let mut step = |id, warm_up| {
                world.step(Input::WarmUp { from, to, warm_up });
                let placed = arrive(&mut world, id, 1000);
                world.step(Input::Finished { request: RequestId(id) });
                placed
            };
            assert_eq!(step(1, WarmUp::Due), Some((1, None)), "{policy}");
            let next = Nanos(30_000_000);
            let ended = WarmUp::Ended { first: Nanos::from_secs(7), next, tokens: 64 };
            assert_eq!(step(2, ended), Some((1, Some(0))), "{policy}");
            assert_eq!(step(3, WarmUp::Failed { lost: next }), Some((1, None)), "{policy}");
        }
    }

    #[test]
    fn a_decode_endpoint_without_room_in_its_cache_gets_no_split() {
        let mut world = world(config("fleet_cost"), &[Role::Prefill, Role::Decode, Role::Decode]);
        for slot in 0..3 {
            let reported = LoadReport {
                running: 0,
                waiting: 0,
                kv_usage_ratio: 0.0,
                kv_capacity_tokens: Some(if slot == 1 { 40_000 } else { 4_000_000 }),
            };
            world.step(Input::Reported { endpoint: endpoint(slot), reported });
        }
        for slot in [1, 2] {
            let (id, excluded) = (RequestId(slot.into()), [0, 3 - slot].map(endpoint).into());
            let request = SchedulingRequest { excluded, ..SchedulingRequest::new(id, 10_000) };
            world.step(Input::Arrived { request, overlap: Vec::new(), block_tokens: 16 });
            world.step(Input::FirstToken { request: id });
        }
        assert_eq!(arrive(&mut world, 50, 35_000).map(|(row, _)| row), Some(2));
    }
}
