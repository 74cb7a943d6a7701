//! `round_robin`: each endpoint in turn. An endpoint that is not eligible at its turn is skipped.

use serde::{Deserialize, Serialize};

use super::{Candidate, PickContext, Policy, Reason};

/// No parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {}

/// The policy, with the slot it picked last.
pub struct RoundRobin {
    last_slot: Option<usize>,
}

impl RoundRobin {
    /// The policy with these parameters.
    pub fn new(_: Config) -> Self {
        Self { last_slot: None }
    }
}

impl Policy for RoundRobin {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        cx.reason = Reason::Turn;
        let after = |slot| candidates.iter().position(|candidate| candidate.endpoint.slot() > slot);
        let row = self.last_slot.and_then(after).unwrap_or(0);
        self.last_slot = Some(candidates[row].endpoint.slot());
        row
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::Case;
    use super::*;
    use crate::endpoint::EndpointId;

    #[test]
    fn turns_go_on_when_an_endpoint_is_missing() {
        let mut case = Case::new("round_robin", 1, &[(0, 0, 0, 0); 3]);
        let mut turn = |slots: &[u16]| {
            case.rows.truncate(slots.len());
            case.rows.resize(slots.len(), case.rows[0]);
            for (row, &slot) in case.rows.iter_mut().zip(slots) {
                row.endpoint = EndpointId::new(slot, 0);
            }
            let (row, reason) = case.pick();
            assert_eq!(reason, Reason::Turn);
            slots[row]
        };
        assert_eq!([turn(&[0, 1, 2]), turn(&[0, 1, 2]), turn(&[0, 2]), turn(&[0, 1, 2])], [0, 1, 2, 0]);
    }
}
