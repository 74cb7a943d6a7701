//! `round_robin`: each endpoint in turn. An endpoint that was not eligible at its turn is passed over.

use serde::{Deserialize, Serialize};

use super::{Candidate, PickContext, Policy, Reason};

/// It has no parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {}

/// The policy: it remembers the slot it picked last.
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
    use super::*;
    use crate::endpoint::EndpointId;
    use crate::load::Load;
    use crate::request::{RequestId, SchedulingRequest};
    use crate::rng::Rng;
    use crate::time::Nanos;

    #[test]
    fn turns_go_on_when_an_endpoint_is_missing() {
        let row = |slot| Candidate::approximate(EndpointId::new(slot, 0), 0, Load::default());
        let mut policy = RoundRobin::new(Config {});
        let mut turn = |slots: &[u16]| {
            let request = SchedulingRequest::new(RequestId(1), 1);
            let rng = &mut Rng::new(0);
            let mut cx =
                PickContext { request: &request, now: Nanos::ZERO, output_tokens: 200, usual_output_tokens: 200.0, rng, reason: Reason::default(), costs: None };
            let rows: Vec<_> = slots.iter().map(|&slot| row(slot)).collect();
            slots[policy.pick(&mut cx, &rows)]
        };
        assert_eq!([turn(&[0, 1, 2]), turn(&[0, 1, 2]), turn(&[0, 2]), turn(&[0, 1, 2])], [0, 1, 2, 0]);
    }
}
