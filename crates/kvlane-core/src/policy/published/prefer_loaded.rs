//! `prefer_loaded`: the fewest requests in flight among the endpoints that have the request's adapter loaded; without any, among
//! those with a free slot, else among all (llm-d/llm-d-router #709).
//!
//! Without an adapter it is the fewest requests in flight. Known limits: an adapter that is asked for more than one endpoint
//! can serve stays at that one, and a load evicts whichever adapter is next there.

use serde::{Deserialize, Serialize};

use crate::policy::{Candidate, PickContext, Policy, Reason};

/// No parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {}

/// The policy.
pub struct PreferLoaded;

/// More than any number of requests in flight.
const CLASS: f64 = (1_u64 << 33) as f64;

impl PreferLoaded {
    /// The policy with these parameters.
    pub fn new(_: Config) -> Self {
        Self
    }
}

impl Policy for PreferLoaded {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        cx.reason = Reason::LeastLoaded;
        let view = cx.adapter;
        let class = |at: usize| match view.and_then(|view| view.rows.get(at)) {
            Some(row) if row.loaded => 0.0,
            Some(row) if row.has_room => 1.0,
            Some(_) => 2.0,
            None => 0.0,
        };
        cx.cheapest_at(candidates, |at, row| class(at) * CLASS + f64::from(row.load.in_flight.requests))
    }
}

#[cfg(test)]
mod tests {
    use crate::adapters::AdapterRow;
    use crate::policy::testing::Case;

    /// An endpoint that has the adapter, one with a free slot and one that has to evict another.
    fn rows() -> [AdapterRow; 3] {
        [AdapterRow::loaded(0.0), AdapterRow::to_load(0.5), AdapterRow::to_evict(0.5, 60.0)]
    }

    #[test]
    fn a_loaded_adapter_beats_a_free_slot_and_that_beats_an_eviction() {
        let mut case = Case::new("prefer_loaded", 100, &[(0, 9, 0, 0), (0, 5, 0, 0), (0, 0, 0, 0)]);
        assert_eq!(case.pick().0, 2, "the fewest requests without an adapter");
        case.adapters = rows().to_vec();
        assert_eq!(case.pick().0, 0);
        case.adapters[0] = AdapterRow::to_evict(0.5, 60.0);
        assert_eq!(case.pick().0, 1);
        case.adapters[1] = case.adapters[0];
        assert_eq!(case.pick().0, 2);
    }
}
