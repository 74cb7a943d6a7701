//! `weighted`: a weighted sum of scores in [0, 1], the highest wins (llm-d's endpoint picker; llm-d/llm-d-router,
//! commit ebab687, `pkg/epp/framework/plugins/scheduling`).
//!
//! - queue: `(max W - W) / (max W - min W)`, 1 if all are equal; `W` is the requests the engine says are waiting;
//! - kv: `1 - k`; `k` is the share of KV blocks the engine says are in use;
//! - prefix: the share of the prompt that the endpoint is expected to hold;
//! - no_hit_lru: only for a prompt of which nobody holds anything: endpoints rank by how long ago they were last given
//!   such a prompt, the longest ago scores 1.
//!
//! The default weights are those of llm-d's guide to precise prefix routing. Known limit: scores have no unit, so one
//! request more in a queue can weigh as much as a whole prompt.

use serde::{Deserialize, Serialize};

use super::{Candidate, PickContext, Policy, Reason};
use crate::endpoint::EndpointId;
use crate::load::Reported;

/// The weights of the scores.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Of the engines' queues.
    pub queue: f64,
    /// Of free KV cache.
    pub kv: f64,
    /// Of what is in the cache.
    pub prefix: f64,
    /// Of not having been given a prompt that nobody knows.
    pub no_hit_lru: f64,
}

impl Default for Config {
    fn default() -> Self {
        Self { queue: 2.0, kv: 2.0, prefix: 3.0, no_hit_lru: 2.0 }
    }
}

/// The policy: it remembers in which order endpoints were given prompts that nobody held.
pub struct Weighted {
    config: Config,
    /// When an endpoint, by slot, was last given such a prompt: the number of that prompt.
    last_cold: Vec<(EndpointId, u64)>,
    cold: u64,
}

// === impl Weighted ===

impl Weighted {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self { config, last_cold: Vec::new(), cold: 0 }
    }

    /// The number of the last cold prompt an endpoint was given, 0 if there was none.
    fn last_cold(&self, id: EndpointId) -> u64 {
        self.last_cold.get(id.slot()).filter(|(holder, _)| *holder == id).map_or(0, |(_, number)| *number)
    }

    fn given_cold(&mut self, id: EndpointId) {
        self.cold += 1;
        if id.slot() >= self.last_cold.len() {
            self.last_cold.resize(id.slot() + 1, (EndpointId::new(0, 0), 0));
        }
        self.last_cold[id.slot()] = (id, self.cold);
    }
}

impl Policy for Weighted {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        let prompt_tokens = f64::from(cx.request.prompt_tokens.max(1));
        let reported = |row: &Candidate| row.load.reported.map(|(reported, _)| reported);
        let waiting = |row: &Candidate| f64::from(reported(row).map_or(0, |Reported { waiting, .. }| waiting));
        let (mut least, mut most, mut cold) = (f64::INFINITY, 0f64, true);
        for row in candidates {
            (least, most) = (least.min(waiting(row)), most.max(waiting(row)));
            cold &= row.overlap_tokens == 0;
        }
        let rank = |row: &Candidate| {
            let mine = self.last_cold(row.endpoint);
            let longer_ago = candidates.iter().filter(|other| self.last_cold(other.endpoint) < mine).count();
            1.0 - longer_ago as f64 / (candidates.len() - 1).max(1) as f64
        };
        let Config { queue, kv, prefix, no_hit_lru } = self.config;
        let row = cx.cheapest(candidates, |row| {
            let queue_score = if most > least { (most - waiting(row)) / (most - least) } else { 1.0 };
            let kv_score = 1.0 - reported(row).map_or(0.0, |reported| f64::from(reported.kv_usage_ratio));
            let prefix_score = f64::from(row.overlap_tokens) / prompt_tokens;
            let cold_score = if cold && no_hit_lru != 0.0 { rank(row) } else { 0.5 };
            -(queue * queue_score + kv * kv_score + prefix * prefix_score + no_hit_lru * cold_score)
        });
        cx.reason = Reason::LowestCost;
        if cold {
            self.given_cold(candidates[row].endpoint);
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use super::super::PolicyConfig;
    use super::*;
    use crate::load::Load;
    use crate::request::{RequestId, SchedulingRequest};
    use crate::rng::Rng;
    use crate::time::Nanos;

    fn row(slot: u16, overlap_tokens: u32, waiting: u32, kv_usage_ratio: f32) -> Candidate {
        let reported = Reported { running: 0, waiting, kv_usage_ratio, kv_capacity_tokens: None };
        let load = Load { reported: Some((reported, Nanos::ZERO)), ..Load::default() };
        Candidate::approximate(EndpointId::new(slot, 0), overlap_tokens, load)
    }

    fn pick(policy: &mut dyn Policy, rows: &[Candidate]) -> usize {
        let request = SchedulingRequest::new(RequestId(1), 100);
        let mut rng = Rng::new(1);
        let mut cx = PickContext {
            request: &request,
            now: Nanos::ZERO, output_tokens: 200, usual_output_tokens: 200.0,
            rng: &mut rng,
            reason: Reason::default(),
            costs: None,
        };
        policy.pick(&mut cx, rows)
    }

    fn weighted() -> Box<dyn Policy> {
        PolicyConfig::by_name("weighted").expect("a policy").build()
    }

    #[test]
    fn a_whole_prefix_outweighs_a_queue_and_half_of_one_does_not() {
        let rows = |overlap| [row(0, overlap, 1, 0.0), row(1, 0, 0, 0.0)];
        assert_eq!(pick(&mut *weighted(), &rows(100)), 0, "3 against 2");
        assert_eq!(pick(&mut *weighted(), &rows(50)), 1, "1.5 against 2");
    }

    #[test]
    fn a_fuller_cache_scores_less() {
        assert_eq!(pick(&mut *weighted(), &[row(0, 10, 0, 0.9), row(1, 0, 0, 0.1)]), 1);
    }

    #[test]
    fn prompts_that_nobody_knows_go_round() {
        let mut policy = weighted();
        let rows = [row(0, 0, 0, 0.0), row(1, 0, 0, 0.0), row(2, 0, 0, 0.0)];
        let mut picks: Vec<usize> = (0..6).map(|_| pick(&mut *policy, &rows)).collect();
        assert_eq!(picks[..3], picks[3..], "in the same order again");
        picks.truncate(3);
        picks.sort_unstable();
        assert_eq!(picks, [0, 1, 2]);
    }
}
