//! `random`: uniformly random. A baseline without information.

use serde::{Deserialize, Serialize};

use super::{Candidate, PickContext, Policy, Reason};

/// No parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {}

/// The policy.
pub struct Random;

impl Random {
    /// The policy with these parameters.
    pub fn new(_: Config) -> Self {
        Self
    }
}

impl Policy for Random {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        cx.reason = Reason::Random;
        cx.rng.below(candidates.len())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::picks;
    use super::*;

    #[test]
    fn it_reaches_every_endpoint() {
        let all = picks(r#"{"name":"random"}"#, 10, &[(0, 9, 0, 0), (0, 0, 0, 0), (5, 0, 0, 0)]);
        assert_eq!(all, [(0, Reason::Random), (1, Reason::Random), (2, Reason::Random)]);
    }
}
