//! `least_load`: the fewest requests in flight, by our own count; ties are random.

use serde::{Deserialize, Serialize};

use super::{Candidate, CostUnit, PickContext, Policy, Reason};

/// No parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {}

/// The policy.
pub struct LeastLoad;

impl LeastLoad {
    /// The policy with these parameters.
    pub fn new(_: Config) -> Self {
        Self
    }
}

impl Policy for LeastLoad {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        cx.reason = Reason::LeastLoaded;
        cx.cheapest(candidates, |row| f64::from(row.load.in_flight.requests))
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
    fn fewest_requests_win_and_ties_are_drawn() {
        let rows = [(0, 2, 0, 0), (0, 1, 900, 900), (0, 1, 0, 0), (0, 3, 0, 0)];
        let all = picks(r#"{"name":"least_load"}"#, 10, &rows);
        assert_eq!(all, [(1, Reason::LeastLoaded), (2, Reason::LeastLoaded)]);
    }
}
