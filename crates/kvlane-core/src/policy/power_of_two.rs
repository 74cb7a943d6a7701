//! `power_of_two`: of two random endpoints, the one with fewer requests in flight (Mitzenmacher, 2001). Robust when
//! load information is stale; ignores caches.

use serde::{Deserialize, Serialize};

use super::{Candidate, CostUnit, PickContext, Policy, Reason};

/// No parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {}

/// The policy.
pub struct PowerOfTwo;

impl PowerOfTwo {
    /// The policy with these parameters.
    pub fn new(_: Config) -> Self {
        Self
    }
}

impl Policy for PowerOfTwo {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        cx.reason = Reason::LeastLoaded;
        let first = cx.rng.below(candidates.len());
        let second = (first + 1 + cx.rng.below(candidates.len() - 1)) % candidates.len();
        let requests = |row: usize| candidates[row].load.in_flight.requests;
        cx.note(first, f64::from(requests(first)));
        cx.note(second, f64::from(requests(second)));
        if requests(second) < requests(first) { second } else { first }
    }

    fn cost_unit(&self) -> CostUnit {
        CostUnit::Requests
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::picks;
    use super::*;

    #[test]
    fn the_busiest_is_never_picked_and_the_others_are() {
        let rows = [(0, 9, 0, 0), (0, 1, 0, 0), (0, 2, 0, 0)];
        let all = picks(r#"{"name":"power_of_two"}"#, 10, &rows);
        assert_eq!(all, [(1, Reason::LeastLoaded), (2, Reason::LeastLoaded)]);
    }
}
