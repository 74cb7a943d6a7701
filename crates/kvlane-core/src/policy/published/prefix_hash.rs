//! `prefix_hash`: consistent hashing that replaces an overloaded owner by the least loaded endpoint (smg-project/smg,
//! commit f8daa8835, `model_gateway/src/policies/prefix_hash.rs`).
//!
//! The hash of the prompt's first block is a position on a ring; the first endpoint from there on owns the prompt. It
//! gets the request unless `B > max(load_factor * mean, mean + load_margin)` with `mean = (sum B + 1) / n`; then the
//! least loaded endpoint gets it, or the owner if all are above. `B` is the requests in flight. Unlike
//! `consistent_hash`, both margins must be exceeded, so requests stay with the owner at low load, and the search does
//! not continue along the ring. The defaults are SMG's: 1.25 and 10. Ties are random; SMG takes the first.
//!
//! SMG hashes the first 256 tokens, or 1,024 characters. Here it is the first block, 64 tokens unless an engine has
//! another block size, so prompts are grouped more coarsely. A prompt shorter than a block is placed by its session;
//! without a session, the smallest `B` wins. Known limits are those of `consistent_hash`.

use serde::{Deserialize, Serialize};

use super::consistent_hash::key;
use crate::bounded::{Amount, AtLeastOne};
use crate::policy::{Candidate, CostUnit, PickContext, Policy, Reason};
use crate::ring::Ring;

/// Load bounds and ring size.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Largest ratio of an owner's requests in flight to the mean.
    pub load_factor: AtLeastOne,
    /// Largest difference of an owner's requests in flight to the mean.
    pub load_margin: Amount,
    /// Points per endpoint on the ring, at most 4096.
    pub virtual_nodes: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self { load_factor: AtLeastOne::of(1.25), load_margin: Amount::of(10.0), virtual_nodes: 256 }
    }
}

/// The policy.
pub struct PrefixHash {
    config: Config,
    ring: Ring,
}

impl PrefixHash {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self { config, ring: Ring::new(config.virtual_nodes) }
    }
}

impl Policy for PrefixHash {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        let requests = |row: &Candidate| f64::from(row.load.in_flight.requests);
        let Some(key) = key(cx.request) else {
            cx.reason = Reason::LeastLoaded;
            return cx.cheapest(candidates, requests);
        };
        let sum: f64 = candidates.iter().map(requests).sum();
        let mean = (sum + 1.0) / candidates.len() as f64;
        let bound = (self.config.load_factor.get() * mean).max(mean + self.config.load_margin.get());
        let owner = self.ring.rows(key, candidates.iter().map(|row| row.endpoint)).next().unwrap_or(0);
        let least = cx.cheapest(candidates, requests);
        let leaves = requests(&candidates[owner]) > bound && requests(&candidates[least]) <= bound;
        cx.reason = if leaves { Reason::Saturated } else { Reason::Affinity };
        if leaves { least } else { owner }
    }

    fn cost_unit(&self) -> CostUnit {
        CostUnit::Requests
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::BlockHash;
    use crate::policy::testing::Case;

    #[test]
    fn an_owner_is_left_when_it_is_above_both_margins() {
        let mut case = Case::new("prefix_hash", 100, &[(0, 0, 0, 0); 4]);
        case.request.head = Some(BlockHash(7));
        let (owner, reason) = case.pick();
        assert_eq!(reason, Reason::Affinity);
        // The mean is 15 / 4 = 3.75 and the limit 13.75; with one more request, 16 / 4 and 14.
        case.rows[owner].load.in_flight.requests = 14;
        let (other, reason) = case.pick();
        assert_ne!(other, owner);
        assert_eq!(reason, Reason::Saturated);
        case.rows[other].load.in_flight.requests = 1;
        assert_eq!(case.pick(), (owner, Reason::Affinity));
        // 200 at every endpoint except the owner: the factor decides.
        for row in &mut case.rows {
            row.load.in_flight.requests = 200;
        }
        case.rows[owner].load.in_flight.requests = 260;
        assert_eq!(case.pick(), (owner, Reason::Affinity), "the bound is 1.25 * 861 / 4 = 269");
        case.rows[owner].load.in_flight.requests = 280;
        assert_eq!(case.pick().1, Reason::Saturated, "1.25 * 881 / 4 = 275");
    }

    #[test]
    fn prompts_that_begin_alike_have_one_owner() {
        let mut case = Case::new("prefix_hash", 100, &[(0, 0, 0, 0); 4]);
        let mut owners = [0; 4];
        for head in 0..400 {
            case.request.head = Some(BlockHash(head));
            let owner = case.pick();
            assert_eq!(owner, case.pick());
            owners[owner.0] += 1;
        }
        assert!(owners.iter().all(|&n| n > 50), "{owners:?}");
    }
}
