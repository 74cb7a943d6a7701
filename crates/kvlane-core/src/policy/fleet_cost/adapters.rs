//! The price of a request's adapter, where it names one.
//!
//! | Term | Seconds | Whose time it is |
//! |---|---|---|
//! | load | until the adapter is loaded: its load, loads before it, and the wait for a slot | this request, until its first token |
//! | loader | `l u/(1-u)` if another endpoint has it loaded | requests that wait for later loads at this endpoint, which are delayed by this one, and so on |
//! | evicted | `l (1 + l/2g + u/(1-u))` if no other endpoint has the evicted adapter | its next request, which waits for it to be loaded again, and those that come meanwhile |
//! | moved | `n (m - m')/2` less | future requests of this adapter, whose first token takes `m` longer than elsewhere where it is loaded, and `m'` here |
//!
//! `l` is the learned time of a load, `u` the share of time in which an endpoint loads adapters, and `g` the mean time between two requests of the evicted adapter. `m` is the mean over recent
//! requests with an adapter: by how much their time to first token, without a load, would have exceeded that at the best endpoint.
//! Of the endpoints that have the adapter loaded, the lowest counts; where none has, that of the best endpoint. Half of the
//! difference, since it shrinks as requests move. `n` is the number of requests of this adapter that the load serves: until the
//! evicted adapter is asked for again, divided by the number of endpoints that then have this one. A free slot is as if it held an
//! adapter that was not asked for yet, and where the adapter is loaded already, taking it costs a load as well: that of the adapter which needs it later.
//!
//! So an adapter gets a second endpoint when what its future requests save pays for the loads that this causes, and one that is
//! loaded nowhere goes where its future requests wait little. The term "new prefix" is left out: "moved" takes its place.

use super::{FleetCost, MEMORY_REQUESTS};
use crate::adapters::{AdapterRow, AdapterView};
use crate::policy::Candidate;
use crate::request::SchedulingRequest;
use crate::table::ByEndpoint;

/// Largest share of time in which an endpoint loads adapters.
const SHARE_MAX: f64 = 0.95;

/// By how much the first tokens of requests take longer at each endpoint than at the best one.
#[derive(Default)]
pub(super) struct Excess {
    means: ByEndpoint<Mean>,
}

#[derive(Clone, Copy, Default)]
struct Mean {
    secs: f64,
    samples: f64,
}

/// The price of an adapter at any row.
pub(super) struct AdapterPrice<'a> {
    view: AdapterView<'a>,
    excess: &'a Excess,
    /// Whether a row has it loaded.
    is_loaded: bool,
    /// The excess at the best row that has it loaded, or at the best row.
    now_s: f64,
}

// === impl Excess ===

impl Excess {
    /// Takes the times to first token of a request at all rows, without an adapter.
    pub(super) fn add(&mut self, request: &SchedulingRequest, candidates: &[Candidate]) {
        let least_s = candidates.iter().map(|row| row.first_token_s(request)).fold(f64::INFINITY, f64::min);
        for row in candidates {
            let mean = self.means.get_or_insert(row.endpoint, Mean::default);
            let more_s = row.first_token_s(request) - least_s;
            if more_s.is_finite() {
                mean.samples = (mean.samples + 1.0).min(MEMORY_REQUESTS);
                mean.secs += (more_s - mean.secs) / mean.samples;
            }
        }
    }

    fn secs(&self, row: &Candidate) -> f64 {
        self.means.get(row.endpoint).map_or(0.0, |mean| mean.secs)
    }
}

// === impl AdapterPrice ===

impl<'a> AdapterPrice<'a> {
    /// The prices for these rows.
    fn new(view: AdapterView<'a>, excess: &'a Excess, candidates: &[Candidate]) -> Self {
        debug_assert_eq!(view.rows.len(), candidates.len(), "the view is that of the rows");
        let least = |is_wanted: fn(&AdapterRow) -> bool| {
            let wanted = view.rows.iter().zip(candidates).filter(|(row, _)| is_wanted(row));
            wanted.map(|(_, candidate)| excess.secs(candidate)).reduce(f64::min)
        };
        let loaded = least(|row| row.loaded);
        let now_s = loaded.or_else(|| least(|_| true)).unwrap_or(0.0);
        Self { view, excess, is_loaded: loaded.is_some(), now_s }
    }

    /// The seconds at the row in this place.
    pub(super) fn secs(&self, at: usize, candidate: &Candidate) -> f64 {
        let Some(row) = self.view.rows.get(at) else { return 0.0 };
        if row.loaded {
            return row.wait_s;
        }
        let share = (row.load_s / self.view.load_gap_s.max(f64::MIN_POSITIVE)).min(SHARE_MAX);
        let delays_s = row.load_s * share / (1.0 - share);
        let evicted_s = match row.evicted {
            Some(evicted) if evicted.last => {
                row.load_s * (1.0 + 0.5 * row.load_s / evicted.gap_s.max(row.load_s)) + delays_s
            }
            None if self.is_loaded => row.load_s + delays_s,
            _ => 0.0,
        };
        let stays_s = row.evicted.map_or(self.view.seen_s, |evicted| evicted.gap_s);
        let served = stays_s / self.view.gap_s.max(f64::MIN_POSITIVE) / (f64::from(self.view.copies) + 1.0);
        let saved_s = self.now_s - self.excess.secs(candidate);
        // Its requests are not sent where they cost more.
        let saved_s = if self.is_loaded { saved_s.max(0.0) } else { saved_s };
        // Where it is loaded nowhere, each endpoint has to load it.
        let loader_s = if self.is_loaded { delays_s } else { 0.0 };
        row.wait_s + loader_s + evicted_s - if saved_s == 0.0 { 0.0 } else { 0.5 * served * saved_s }
    }

    /// The seconds at this one of the rows.
    pub(super) fn secs_of(&self, candidates: &[Candidate], row: &Candidate) -> f64 {
        let at = candidates.iter().position(|other| other.endpoint == row.endpoint);
        at.map_or(0.0, |at| self.secs(at, row))
    }
}

// === impl FleetCost ===

impl FleetCost {
    /// The price of the request's adapter, if it names one.
    pub(super) fn adapter_price<'a>(
        &'a self,
        view: Option<AdapterView<'a>>,
        candidates: &[Candidate],
    ) -> Option<AdapterPrice<'a>> {
        view.map(|view| AdapterPrice::new(view, &self.excess, candidates))
    }
}

#[cfg(test)]
mod tests {
    use crate::adapters::{AdapterRow, Evicted};
    use crate::policy::testing::Case;

    fn case(rows: &[AdapterRow]) -> Case {
        let mut case = Case::new("fleet_cost", 1000, &vec![(0, 0, 0, 0); rows.len()]);
        case.adapters = rows.to_vec();
        case
    }

    /// The prices of the rows' adapters.
    fn prices(rows: &[AdapterRow]) -> Vec<f64> {
        let mut with = case(rows);
        with.pick();
        let mut without = case(&[]);
        without.rows = with.rows.clone();
        without.pick();
        with.costs.iter().zip(&without.costs).map(|(with, without)| with - without).collect()
    }

    #[test]
    fn a_load_costs_its_time_and_that_of_the_adapter_it_evicts() {
        let last = AdapterRow::to_evict(0.5, 10.0);
        let evicted = last.evicted.map(|evicted| Evicted { last: false, ..evicted });
        let prices = prices(&[AdapterRow::to_load(0.5), last, AdapterRow { evicted, ..last }]);
        // The endpoint loads for 0.5 s of 20 s.
        let delays_s = 0.5 * 0.025 / 0.975;
        crate::policy::testing::near(&prices, &[
            0.5,
            0.5 + 0.5 * (1.0 + 0.5 * 0.5 / 10.0) + delays_s,
            0.5,
        ]);
    }

    #[test]
    fn a_loaded_adapter_costs_nothing_and_one_that_is_being_loaded_the_rest_of_its_load() {
        let prices = prices(&[AdapterRow::loaded(0.0), AdapterRow::loaded(0.3)]);
        crate::policy::testing::near(&prices, &[0.0, 0.3]);
    }

    /// Invariant: An adapter that one endpoint has loaded gets a second one when its requests wait longer there than a load and its
    /// consequences cost.
    #[test]
    fn a_second_endpoint_loads_an_adapter_when_its_requests_save_more_than_that_costs() {
        let busy = |tokens: u64| {
            let mut case = case(&[AdapterRow::loaded(0.0), AdapterRow::to_evict(0.5, 60.0)]);
            let load = &mut case.rows[0].load.in_flight;
            (load.requests, load.prefilling, load.prefill_tokens) = (1, 1, tokens);
            (0..20).map(|_| case.pick().0).collect::<Vec<_>>()
        };
        assert_eq!(busy(500), [0; 20], "12 ms for each of 30 requests");
        assert_eq!(busy(4000)[0], 0, "one request alone does not pay for it");
        assert_eq!(busy(4000)[19], 1, "100 ms for each");
    }

    #[test]
    fn an_adapter_that_is_loaded_nowhere_goes_where_requests_wait_little() {
        let mut case = case(&[AdapterRow::to_load(0.5); 2]);
        case.rows[0].load.in_flight.prefill_tokens = 4000;
        (0..20).for_each(|_| _ = case.pick());
        case.rows[0].load.in_flight.prefill_tokens = 0;
        assert_eq!(case.pick().0, 1, "idle now, and busy before");
    }
}
