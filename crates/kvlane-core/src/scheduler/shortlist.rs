//! Shortlist: in a large fleet, the rows are those that the policy can pick and not those of all endpoints.
//!
//! The columns follow each change of an endpoint. For a request, the policy names the endpoints that it wants to look at
//! ([`shortlist`](crate::policy::Policy::shortlist)), and only their rows are built. The pick among them is the pick among all rows, within the
//! bound that the policy states. Where that is not possible, all rows are built: below [`SCANNED_MAX`] endpoints, where
//! that takes no longer; for a policy without a shortlist; for a request with latency objectives or an adapter; while requests with an
//! objective for their TPOT are in flight; where endpoints have parts in disaggregated serving; beside a shadow policy; and where no
//! endpoint accepts the request.

use super::Scheduler;
use super::availability::{Availability, accepts, availability_of};
use crate::cache_accuracy::Prediction;
use crate::columns::{Columns, Fleet};
use crate::decision::ROWS_MAX;
use crate::endpoint::{Endpoint, EndpointId};
use crate::policy::{Candidate, PickContext, Reason};
use crate::request::{SchedulingRequest, Slo};
use crate::time::Nanos;

/// Most endpoints whose rows are all built: as many as a receipt shows.
pub(super) const SCANNED_MAX: usize = ROWS_MAX;
/// Most holders of a prompt whose rows are all built. More are priced in the columns with the others.
const HOLDERS_MAX: usize = 64;

/// The columns, and reusable memory.
#[derive(Debug)]
pub(super) struct Shortlist {
    pub(super) columns: Columns,
    /// Most endpoints whose rows are all built.
    pub(super) scanned_max: usize,
    slots: Vec<u16>,
    /// By slot: its position among the holders of the prompt that was looked up last.
    places: Vec<u32>,
    /// Endpoints that accept the request and are not among the rows.
    pub(super) left_out: u32,
}

// === impl Shortlist ===

impl Default for Shortlist {
    fn default() -> Self {
        Self {
            columns: Columns::default(),
            scanned_max: SCANNED_MAX,
            slots: Vec::new(),
            places: Vec::new(),
            left_out: 0,
        }
    }
}

impl Shortlist {
    /// Notes the holders of a prompt, in a pool with this many slots.
    fn place(&mut self, overlap: &[(EndpointId, Prediction)], slots: usize) {
        self.places.resize(slots.max(self.places.len()), 0);
        for (place, (id, _)) in (0..).zip(overlap) {
            if let Some(at) = self.places.get_mut(id.slot()) {
                *at = place;
            }
        }
    }
}

// === impl Scheduler ===

impl Scheduler {
    /// Fills the rows with the endpoints that can be picked for the request. False if all rows must be built.
    pub(super) fn fill_shortlist(
        &mut self,
        now: Nanos,
        request: &SchedulingRequest,
        overlap: &[(EndpointId, Prediction)],
    ) -> bool {
        self.shortlist.left_out = 0;
        if self.pool.len() <= self.shortlist.scanned_max
            || !self.policy.has_shortlist()
            || self.splits.any
            || self.shadow.is_some()
            || request.slo != Slo::default()
            || self.tpots_due > 0
            || request.adapter.is_some()
        {
            return false;
        }
        self.update_columns(now);
        let mut slots = std::mem::take(&mut self.shortlist.slots);
        slots.clear();
        for &excluded in &*request.excluded {
            if self.pool.get(excluded).is_some() {
                self.shortlist.columns.set(excluded.slot(), None);
                self.pool.note_change(excluded.slot());
            }
        }
        self.shortlist.place(overlap, self.pool.len());
        self.fill_conditional(now, request, overlap);
        self.list(now, request, overlap, &mut slots);
        let Shortlist { columns, places, left_out, .. } = &mut self.shortlist;
        let (endpoints, _) = columns.totals();
        *left_out = endpoints as u32 - slots.len() as u32;
        let listed = slots.iter().filter_map(|&slot| self.pool.at(slot.into()));
        let row = |endpoint: &Endpoint| {
            self.learning.row(now, endpoint, predicted(places, overlap, endpoint.id, request))
        };
        self.rows.extend(listed.map(row));
        self.shortlist.slots = slots;
        !self.rows.is_empty()
    }

    /// Fills the rows with the endpoints that accept some requests, among them this one.
    fn fill_conditional(
        &mut self,
        now: Nanos,
        request: &SchedulingRequest,
        overlap: &[(EndpointId, Prediction)],
    ) {
        let Shortlist { columns, places, .. } = &self.shortlist;
        let in_flight_max = self.config.max_requests_per_endpoint;
        let (mut settled, mut requests) = columns.totals();
        self.rows.clear();
        for endpoint in columns.conditional().iter().filter_map(|&slot| self.pool.at(slot.into())) {
            let is_free = availability_of(endpoint, now, in_flight_max) == Availability::Free;
            if !is_free || request.excluded.contains(&endpoint.id) {
                continue;
            }
            if endpoint.back_since.is_none() {
                settled += 1;
                requests += u64::from(endpoint.in_flight().requests);
            }
            let prediction = predicted(places, overlap, endpoint.id, request);
            self.rows.push(self.learning.row(now, endpoint, prediction));
        }
        self.apply_slow_start(now, request, settled, requests);
    }

    /// Lists the slots of the columns to look at, in order.
    fn list(
        &mut self,
        now: Nanos,
        request: &SchedulingRequest,
        overlap: &[(EndpointId, Prediction)],
        slots: &mut Vec<u16>,
    ) {
        let columns = &mut self.shortlist.columns;
        let (forced, prefill) = self.forced.unzip();
        slots.extend(forced.into_iter().chain(prefill.flatten()).map(|id| id.slot() as u16));
        let has_cached = overlap.len() > HOLDERS_MAX;
        if !has_cached {
            slots.extend(overlap.iter().map(|(id, _)| id.slot() as u16));
        }
        let held = columns.hold(overlap, request.prompt_tokens);
        slots.extend(held.map(|(_, slot)| slot));
        let sent = self.rows.iter().map(Candidate::sent_tokens);
        let fleet = Fleet {
            columns,
            has_cached,
            has_lower: has_cached && overlap.iter().any(|(_, prediction)| prediction.lower > 0),
            rates: self.learning.pool_rates(),
            seen_tokens: sent.chain(held.map(|(sent, _)| sent)).max().unwrap_or(0),
        };
        let mut cx = PickContext {
            request,
            now,
            output_tokens: self.learning.forecast.tokens(request),
            usual_output_tokens: self.learning.forecast.usual_tokens(),
            peers: self.peers.salt(),
            adapter: None,
            rng: &mut self.rng,
            reason: Reason::default(),
            work: [None; 2],
            costs: None,
            pairs: None,
        };
        self.policy.shortlist(&mut cx, &fleet, slots);
        self.shortlist.columns.release(overlap);
        slots.retain(|&slot| self.shortlist.columns.contains(slot.into()));
        slots.sort_unstable();
        slots.dedup();
    }

    /// Takes over what has changed since the last decision.
    fn update_columns(&mut self, now: Nanos) {
        let in_flight_max = self.config.max_requests_per_endpoint;
        while let Some((slot, endpoint)) = self.pool.take_changed() {
            let endpoint = endpoint.map(|endpoint| (endpoint, accepts(endpoint, now, in_flight_max)));
            self.shortlist.columns.set(slot, endpoint);
        }
    }
}

/// The prediction for an endpoint, at most the prompt. `places` may be of an earlier prompt.
fn predicted(
    places: &[u32],
    overlap: &[(EndpointId, Prediction)],
    id: EndpointId,
    request: &SchedulingRequest,
) -> Prediction {
    let place = places.get(id.slot()).copied().unwrap_or(u32::MAX);
    let of = overlap.get(place as usize).filter(|(holder, _)| *holder == id);
    of.map(|(_, prediction)| prediction.within(request.prompt_tokens)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::availability::{Choice, IfNoneAvailable};
    use super::super::tests::{World, config, endpoint, placed};
    use super::*;
    use crate::breaker;
    use crate::cache_accuracy::Feed;
    use crate::replica::ReplicaId;
    use crate::request::RequestId;
    use crate::rng::Rng;
    use crate::scheduler::{Config, Input};

    /// Share by which a pick may cost more than the cheapest if there are too many as cheap.
    const BOUND: f64 = 1e-4;

    fn fleet(endpoints: usize, max_requests_per_endpoint: u32) -> World {
        let breaker = breaker::Config { slow_start: Nanos::from_secs(5), ..breaker::Config::default() };
        let config = Config { max_requests_per_endpoint, breaker, ..config("fleet_cost") };
        let mut world = World::new(config, endpoints);
        world.scheduler.shortlist.scanned_max = 0;
        world
    }

    /// Something that happens to an endpoint or to a request in flight.
    fn happens(rng: &mut Rng, endpoints: usize, requests: u64) -> Input {
        let endpoint = endpoint(rng.below(endpoints) as u16);
        let request = RequestId(rng.below(requests as usize + 1) as u64);
        let yes = rng.below(3) > 0;
        match rng.below(16) {
            0 => Input::Health { endpoint, healthy: yes },
            1 => Input::Draining { endpoint, draining: !yes },
            2 => Input::Stalled { endpoint, stalled: !yes },
            3 => Input::Busy { request, retry_after: Some(Nanos::from_millis(rng.below(9000) as u64)) },
            4 => Input::Fed { endpoint, feed: if yes { Feed::Live } else { Feed::Absent } },
            5..8 => Input::Finished { request },
            8..12 => Input::FirstToken { request },
            _ => Input::Tokens { request, count: 16 },
        }
    }

    /// Endpoints that hold a part of a prompt: none, a few, or most.
    fn overlap(rng: &mut Rng, endpoints: usize) -> Vec<(EndpointId, Prediction)> {
        let share = [0.0, 0.03, 0.9][rng.below(3)];
        let held = (0..endpoints).filter_map(|slot| {
            let (exact, approximate) = (rng.below(9000) as u32, rng.below(9000) as u32);
            let lower = if rng.below(3) == 0 { rng.below(exact as usize + 1) as u32 } else { 0 };
            (rng.unit() < share).then_some((endpoint(slot as u16), Prediction { exact, approximate, lower }))
        });
        held.collect()
    }

    /// The prices of all rows.
    fn prices(world: &mut World, request: &SchedulingRequest) -> Vec<(EndpointId, f64)> {
        let scheduler = &mut world.scheduler;
        let mut costs = vec![f64::NAN; scheduler.rows.len()];
        let mut cx = PickContext {
            request,
            now: world.now,
            output_tokens: scheduler.learning.forecast.tokens(request),
            usual_output_tokens: scheduler.learning.forecast.usual_tokens(),
            peers: scheduler.peers.salt(),
            adapter: None,
            rng: &mut Rng::new(1),
            reason: Reason::default(),
            work: [None; 2],
            costs: Some(&mut costs),
            pairs: None,
        };
        scheduler.policy.pick(&mut cx, &scheduler.rows);
        scheduler.rows.iter().map(|row| row.endpoint).zip(costs).collect()
    }

    fn facts(row: &Candidate) -> (EndpointId, u32, Prediction, u32) {
        (row.endpoint, row.overlap_tokens, row.prediction, row.load.in_flight.requests)
    }

    proptest! {
        /// Invariant: In a large fleet, the endpoint that a scan of all would pick is among those that are looked at; where
        /// more than 64 cost the same within a ten-thousandth, one of these.
        #[test]
        fn the_shortlist_has_the_row_that_a_scan_picks(
            seed: u64,
            endpoints in 1usize..200,
            max_requests_per_endpoint in prop::sample::select(vec![0u32, 2]),
        ) {
            let mut rng = Rng::new(seed);
            let mut world = fleet(endpoints, max_requests_per_endpoint);
            let others = rng.below(3) as u64;
            for id in 0..150 {
                world.now += Nanos::from_millis(rng.below(2000) as u64);
                for replica in (0..others).map(ReplicaId) {
                    world.step(Input::Heard { replica, number: id, shares: Vec::new(), services: Vec::new(), learned: Vec::new(), turns: Vec::new() });
                }
                for _ in 0..rng.below(6) {
                    let input = happens(&mut rng, endpoints, id);
                    world.step(input);
                }
                let mut request = SchedulingRequest::new(RequestId(id), 1 + rng.below(12_000) as u32);
                request.excluded = (0..rng.below(3)).map(|_| endpoint(rng.below(endpoints) as u16)).collect();
                let overlap = overlap(&mut rng, endpoints);

                let now = world.now;
                world.scheduler.review_if_due(now, &mut Vec::new());
                let is_listed = world.scheduler.fill_shortlist(now, &request, &overlap);
                let listed: Vec<_> = world.scheduler.rows.iter().map(facts).collect();
                let left_out = world.scheduler.shortlist.left_out as usize;
                let fit = world.scheduler.fill_rows(now, &request, &overlap, IfNoneAvailable::Refuse);
                prop_assert!(is_listed == (fit == Choice::Rows), "{is_listed} {fit:?}");
                if is_listed {
                    let all: Vec<_> = world.scheduler.rows.iter().map(facts).collect();
                    prop_assert!(listed.iter().all(|row| all.contains(row)), "{listed:?} of {all:?}");
                    prop_assert_eq!(listed.len() + left_out, all.len());
                    let sent = |rows: &[(EndpointId, u32, Prediction, u32)]| {
                        rows.iter().map(|(_, cached, prediction, _)| prediction.approximate.max(*cached)).max()
                    };
                    prop_assert_eq!(sent(&listed), sent(&all));
                    let prices = prices(&mut world, &request);
                    let least = prices.iter().map(|(_, cost)| *cost).fold(f64::INFINITY, f64::min);
                    let among = |(id, _): &&(EndpointId, f64)| listed.iter().any(|row| row.0 == *id);
                    let found = prices.iter().filter(among).map(|(_, cost)| *cost).fold(f64::INFINITY, f64::min);
                    let band = prices.iter().filter(|(_, cost)| *cost <= least * (1.0 + BOUND)).count();
                    prop_assert!(found == least || band > 64 && found <= least * (1.0 + BOUND), "{found} {least} {band}");
                }
                world.step(Input::Arrived { request, overlap, block_tokens: 16 });
            }
        }
    }

    #[test]
    fn idle_endpoints_of_a_large_fleet_share_the_requests() {
        let mut world = fleet(1000, 0);
        let mut given = std::collections::BTreeSet::new();
        for id in 0..500 {
            given.extend(placed(&world.arrive(id, 1000, &[])));
            world.step(Input::Finished { request: RequestId(id) });
        }
        assert!(given.len() > 300, "{}", given.len());
    }

    #[test]
    fn the_same_seed_gives_the_same_placements() {
        let placements = || {
            let mut world = fleet(300, 0);
            (0..300).map(|id| placed(&world.arrive(id, 1000, &[(endpoint(7), 640)]))).collect::<Vec<_>>()
        };
        assert_eq!(placements(), placements());
    }
}
