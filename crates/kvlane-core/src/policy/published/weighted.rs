//! `weighted`: a weighted sum of scores in [0, 1], the highest wins (llm-d's endpoint picker; llm-d/llm-d-router,
//! commit ebab687, `pkg/epp/framework/plugins/scheduling`).
//!
//! - queue: `(max W - W) / (max W - min W)`, 1 if all are equal; `W` is the requests waiting by the engine's report;
//! - kv: `1 - k`; `k` is the KV cache usage that the engine reports;
//! - prefix: the share of the prompt that the endpoint is expected to hold;
//! - active_request: `(max B - B) / max B`, 1 if nothing is in flight; `B` is our own count;
//! - no_hit_lru: for a prompt that no endpoint holds any of, endpoints rank by the time since they were last given such
//!   a prompt: `1 - r / (n - 1)` for the one with `r` of the `n` before it, 1 for all that never were; 0.5 for any
//!   other prompt. llm-d gives those that never were 1, `1 - 1 / (n - 1)` and so on in list order; here their order is
//!   random. llm-d remembers 1,024 endpoints, kvlane all.
//! - lora_affinity: by what the engine reports of the request's adapter, 1 if a request with it runs, 0.8 if fewer adapters run
//!   and wait than the engine has slots, 0.6 if a request with it waits, else 0. A report has the adapters of requests in flight, not those that
//!   are loaded without any.
//!
//! | Set | queue | kv | prefix | active_request | no_hit_lru | lora_affinity | Where llm-d has it |
//! |---|---|---|---|---|---|---|---|
//! | `weighted`, also `llm_d_precise` | 2 | 2 | 3 | 0 | 2 | 0 | guide to precise prefix routing |
//! | `llm_d_default` | 2 | 2 | 3 | 0 | 0 | 0 | `pkg/epp/config/loader/defaults.go` |
//! | `llm_d_perf` | 0 | 2 | 2 | 4 | 2 | 0 | configuration of its performance tests |
//! | `llm_d_lora` | 2 | 2 | 3 | 0 | 0 | 1 | its defaults, with the scorer at the weight that it has if none is set |
//!
//! Ties are random. Known limit: scores have no unit, so one more queued request can weigh as much as a whole prompt.

use serde::{Deserialize, Serialize};

use crate::adapters::Reported;
use crate::bounded::Amount;
use crate::policy::{Candidate, PickContext, Policy, Reason};
use crate::table::ByEndpoint;

/// The weights of the scores.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Weight of the engine's queue.
    pub queue: Amount,
    /// Weight of the free KV cache.
    pub kv: Amount,
    /// Weight of the cached prefix.
    pub prefix: Amount,
    /// Weight of our own requests in flight.
    pub active_request: Amount,
    /// Weight of the time since the last cold prompt.
    pub no_hit_lru: Amount,
    /// Weight of the engine's report of the adapter.
    pub lora_affinity: Amount,
}

/// The weights in the order of the fields.
const fn weights(queue: f64, kv: f64, prefix: f64, active_request: f64, no_hit_lru: f64) -> Config {
    Config {
        queue: Amount::of(queue),
        kv: Amount::of(kv),
        prefix: Amount::of(prefix),
        active_request: Amount::of(active_request),
        no_hit_lru: Amount::of(no_hit_lru),
        lora_affinity: Amount::of(0.0),
    }
}

/// llm-d's defaults.
pub const LLM_D_DEFAULT: Config = weights(2.0, 2.0, 3.0, 0.0, 0.0);

/// The weights of llm-d's performance tests.
pub const LLM_D_PERF: Config = weights(0.0, 2.0, 2.0, 4.0, 2.0);

/// llm-d's defaults with its scorer of adapters.
pub const LLM_D_LORA: Config = Config { lora_affinity: Amount::of(1.0), ..LLM_D_DEFAULT };

impl Default for Config {
    fn default() -> Self {
        weights(2.0, 2.0, 3.0, 0.0, 2.0)
    }
}

/// The policy, with the order in which endpoints were given cold prompts.
pub struct Weighted {
    config: Config,
    /// Number of the last cold prompt given to each endpoint, from 1.
    last_cold: ByEndpoint<u64>,
    cold: u64,
    /// These numbers for the current candidates, ascending; kept to reuse its memory.
    order: Vec<u64>,
}

// === impl Weighted ===

impl Weighted {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self { config, last_cold: ByEndpoint::default(), cold: 0, order: Vec::new() }
    }
}

impl Policy for Weighted {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        let Config { queue, kv, prefix, active_request, no_hit_lru, lora_affinity } = self.config;
        let [queue, kv, prefix, active_request, no_hit_lru, lora_affinity] =
            [queue, kv, prefix, active_request, no_hit_lru, lora_affinity].map(Amount::get);
        let prompt_tokens = f64::from(cx.request.prompt_tokens.max(1));
        let waiting =
            |row: &Candidate| row.load.reported.map_or(0.0, |(reported, _)| f64::from(reported.waiting));
        let requests = |row: &Candidate| f64::from(row.load.in_flight.requests);
        let (mut least, mut most, mut busiest, mut cold) = (f64::INFINITY, 0f64, 0f64, true);
        for row in candidates {
            (least, most) = (least.min(waiting(row)), most.max(waiting(row)));
            busiest = busiest.max(requests(row));
            cold &= row.overlap_tokens == 0;
        }
        let last_cold = |row: &Candidate| self.last_cold.get(row.endpoint).copied().unwrap_or(0);
        let ranked = cold && no_hit_lru != 0.0;
        self.order.clear();
        if ranked {
            self.order.extend(candidates.iter().map(last_cold));
            self.order.sort_unstable();
        }
        let rank = |row: &Candidate| {
            let longer_ago = self.order.partition_point(|&other| other < last_cold(row));
            1.0 - longer_ago as f64 / (candidates.len() - 1).max(1) as f64
        };
        let view = cx.adapter;
        let lora_score = |at: usize| match view.and_then(|view| view.rows.get(at)).map(|row| row.reported) {
            Some(Reported::Running) => 1.0,
            Some(Reported::Room) => 0.8,
            Some(Reported::Waiting) => 0.6,
            Some(Reported::Nothing) | None => 0.0,
        };
        let row = cx.cheapest_at(candidates, |at, row| {
            let queue_score = if most > least { (most - waiting(row)) / (most - least) } else { 1.0 };
            let kv_score = 1.0 - row.kv_usage();
            let prefix_score = f64::from(row.overlap_tokens) / prompt_tokens;
            let active_score = if busiest > 0.0 { (busiest - requests(row)) / busiest } else { 1.0 };
            let cold_score = if ranked { rank(row) } else { 0.5 };
            -(queue * queue_score
                + kv * kv_score
                + prefix * prefix_score
                + active_request * active_score
                + no_hit_lru * cold_score
                + lora_affinity * lora_score(at))
        });
        cx.reason = Reason::LowestCost;
        if cold {
            self.cold += 1;
            *self.last_cold.get_or_insert(candidates[row].endpoint, || 0) = self.cold;
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use crate::adapters::{AdapterRow, Reported};
    use crate::load::LoadReport;
    use crate::policy::testing::Case;
    use crate::time::Nanos;

    /// Rows of overlap, our own requests, waiting requests by the engine's report, and KV cache usage.
    fn case(name: &str, rows: &[(u32, u32, u32, f32)]) -> Case {
        let plain: Vec<_> = rows.iter().map(|&(overlap, requests, ..)| (overlap, requests, 0, 0)).collect();
        let mut case = Case::new(name, 100, &plain);
        for (row, &(.., waiting, kv_usage_ratio)) in case.rows.iter_mut().zip(rows) {
            let reported = LoadReport { running: 0, waiting, kv_usage_ratio, kv_capacity_tokens: None };
            row.load.reported = Some((reported, Nanos::ZERO));
        }
        case
    }

    #[test]
    fn a_whole_prefix_outweighs_a_queue_and_half_of_one_does_not() {
        let rows = |overlap| [(overlap, 0, 1, 0.0), (0, 0, 0, 0.0)];
        assert_eq!(case("weighted", &rows(100)).pick().0, 0, "3 against 2");
        assert_eq!(case("weighted", &rows(50)).pick().0, 1, "1.5 against 2");
    }

    #[test]
    fn a_fuller_cache_scores_less() {
        assert_eq!(case("weighted", &[(10, 0, 0, 0.9), (0, 0, 0, 0.1)]).pick().0, 1);
    }

    #[test]
    fn an_adapter_scores_by_what_its_engine_reports() {
        let mut case = case("llm_d_lora", &[(0, 0, 0, 0.0); 4]);
        let reported = [Reported::Nothing, Reported::Waiting, Reported::Room, Reported::Running];
        case.adapters = reported.map(|reported| AdapterRow { reported, ..AdapterRow::to_load(0.5) }).to_vec();
        assert_eq!(case.pick().0, 3);
        assert_eq!(case.costs, [-4.0, -4.6, -4.8, -5.0]);
    }

    #[test]
    fn unknown_prompts_are_placed_in_turn() {
        let mut case = case("weighted", &[(0, 0, 0, 0.0); 3]);
        let mut picks: Vec<usize> = (0..6).map(|_| case.pick().0).collect();
        assert_eq!(picks[..3], picks[3..], "the same order again");
        picks.truncate(3);
        picks.sort_unstable();
        assert_eq!(picks, [0, 1, 2]);
    }

    #[test]
    fn scores_add_up_by_the_weights_of_the_set() {
        // Waiting two of four, half the cache used, a quarter cached, three in flight of four.
        let rows = [(25, 3, 2, 0.5), (0, 4, 4, 0.0), (0, 0, 0, 1.0)];
        let costs = |name| {
            let mut case = case(name, &rows);
            case.pick();
            case.costs
        };
        assert_eq!(costs("llm_d_default"), [-(1.0 + 1.0 + 0.75), -2.0, -2.0]);
        assert_eq!(
            costs("llm_d_precise"),
            [-(1.0 + 1.0 + 0.75 + 1.0), -3.0, -3.0],
            "half of no_hit_lru for all"
        );
        assert_eq!(costs("llm_d_perf"), [-(1.0 + 0.5 + 1.0 + 1.0), -(2.0 + 1.0), -(4.0 + 1.0)]);
    }

    #[test]
    fn a_cold_prompt_ranks_by_how_long_ago_the_last_one_came() {
        let mut case = case("llm_d_precise", &[(0, 0, 0, 0.0); 3]);
        for _ in 0..3 {
            case.pick();
        }
        let (next, _) = case.pick();
        // Queue 2 and cache 2, plus by rank 2 for the first, 1 for the second, 0 for the last.
        assert_eq!(case.costs[next], -6.0);
        let mut ranked = case.costs.clone();
        ranked.sort_by(f64::total_cmp);
        assert_eq!(ranked, [-6.0, -5.0, -4.0]);
        case.rows[0].overlap_tokens = 50;
        case.pick();
        assert_eq!(
            case.costs,
            [-6.5, -5.0, -5.0],
            "half of no_hit_lru for all once an endpoint holds any of it"
        );
    }
}
