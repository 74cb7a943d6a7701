//! `heavy_offload`: the prompts of heavy requests are computed elsewhere (the elastic offload of the agentic study
//! "elastic P/D").
//!
//! A session's endpoint is chosen as in [`super::linear`], and decodes its answers. A request is heavy if at least
//! `heavy_tokens` of its prompt are uncached there. Then the other endpoint with the fewest tokens in flight computes the
//! prompt, unless `offloads_max` split requests are in flight or that endpoint has more than `overload_factor` times the
//! mean of tokens in flight. All other requests (the study's WARM and MEDIUM) are served whole. The session stays at the
//! endpoint that decodes, which holds all of its blocks afterwards.
//!
//! The defaults are the study's 20,000 tokens, its cap of four and its limit of 1.5. An earlier form also required that
//! the other endpoint has less in flight than the session's, which stopped all offloading. The study does not say of what
//! its limit is a multiple: the mean of tokens in flight is our interpretation. Known limits: the threshold
//! fits one model, one machine and one link, and slow transfers delay exactly the largest prompts. Where endpoints only
//! prefill or only decode, roles decide what is split, and this is `linear`.

use serde::{Deserialize, Serialize};

use super::linear::{self, Linear, mean_tokens, tokens};
use crate::bounded::AtLeastOne;
use crate::endpoint::EndpointId;
use crate::policy::{Candidate, CostUnit, Pairs, Pick, PickContext, Policy};
use crate::request::SessionKey;

/// What is split, and how much of it at a time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Uncached tokens from which a prompt is heavy.
    pub heavy_tokens: u32,
    /// Most split requests in flight in the pool.
    pub offloads_max: u32,
    /// Tokens in flight at an endpoint, relative to the mean, above which it computes no prompts for others.
    pub overload_factor: AtLeastOne,
}

impl Default for Config {
    fn default() -> Self {
        Self { heavy_tokens: 20_000, offloads_max: 4, overload_factor: AtLeastOne::of(1.5) }
    }
}

/// The policy, with the endpoint of each session.
pub struct HeavyOffload {
    config: Config,
    homes: Linear,
}

impl HeavyOffload {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self { config, homes: Linear::new(linear::Config::default()) }
    }
}

impl Policy for HeavyOffload {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        self.homes.pick(cx, candidates)
    }

    fn cost_unit(&self) -> CostUnit {
        CostUnit::Tokens
    }

    fn pick_split(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate], pairs: Pairs<'_>) -> Option<Pick> {
        if !candidates.iter().all(|row| row.part.may_serve_alone()) {
            return None;
        }
        let row = self.homes.pick(cx, candidates);
        let decode = &candidates[row];
        let offloads: u32 = candidates.iter().map(|row| pairs.transfers.in_flight(row.endpoint)).sum();
        if decode.uncached_tokens(cx.request) < self.config.heavy_tokens || offloads >= self.config.offloads_max {
            return Some(Pick::alone(row));
        }
        let limit = self.config.overload_factor.get() * mean_tokens(candidates);
        let others = candidates.iter().enumerate().filter(|(_, other)| other.can_prefill_for(decode));
        let least = others.min_by(|(_, a), (_, b)| tokens(a).total_cmp(&tokens(b)));
        let prefill = least.filter(|(_, other)| tokens(other) <= limit).map(|(other, _)| other);
        Some(Pick { row, prefill })
    }

    fn keeps_sessions(&self) -> bool {
        true
    }

    fn turn_elsewhere(&mut self, session: SessionKey, endpoint: EndpointId, prompt_tokens: u32) {
        self.homes.turn_elsewhere(session, endpoint, prompt_tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disaggregation::Transfers;
    use crate::policy::testing::Case;
    use crate::policy::Reason;
    use crate::request::SessionKey;
    use crate::rng::Rng;
    use crate::time::Nanos;

    /// A fleet in which every endpoint does everything. Rows: overlap, requests, queued prefill tokens, context tokens.
    fn case(prompt_tokens: u32, rows: &[(u32, u32, u64, u64)]) -> Case {
        let mut case = Case::new("heavy_offload", prompt_tokens, rows);
        case.rows.iter_mut().for_each(|row| row.part.network = Some(0));
        case.request.session = Some(SessionKey(1));
        case
    }

    fn split(case: &mut Case, transfers: &Transfers) -> Option<Pick> {
        let mut rng = Rng::new(1);
        let mut cx = PickContext {
            request: &case.request,
            now: Nanos::ZERO,
            output_tokens: 200,
            usual_output_tokens: 200.0,
            peers: None,
            adapter: None,
            rng: &mut rng,
            reason: Reason::default(),
            work: [None; 2],
            costs: None,
            pairs: None,
        };
        case.policy.pick_split(&mut cx, &case.rows, Pairs { transfers, now: Nanos::ZERO })
    }

    // The second is the session's; of the others the third has least in flight.
    const ROWS: [(u32, u32, u64, u64); 3] = [(0, 2, 0, 5000), (1000, 0, 0, 0), (0, 1, 0, 2000)];

    #[test]
    fn a_heavy_prompt_is_computed_at_the_least_loaded_other_endpoint() {
        let none = Transfers::default();
        assert_eq!(split(&mut case(21_000, &ROWS), &none), Some(Pick { row: 1, prefill: Some(2) }));
        assert_eq!(split(&mut case(20_999, &ROWS), &none), Some(Pick::alone(1)), "19,999 uncached tokens");
    }

    #[test]
    fn no_more_than_the_cap_are_split_at_a_time() {
        let (mut case, mut transfers) = (case(30_000, &ROWS), Transfers::default());
        let [a, b, c] = [0, 1, 2].map(|row: usize| case.rows[row].endpoint);
        for (from, to) in [(a, b), (b, c), (c, a)] {
            transfers.begin(from, to);
        }
        assert_eq!(split(&mut case, &transfers), Some(Pick { row: 1, prefill: Some(2) }), "three");
        transfers.begin(a, c);
        assert_eq!(split(&mut case, &transfers), Some(Pick::alone(1)), "four");
        transfers.end(a, b);
        assert_eq!(split(&mut case, &transfers), Some(Pick { row: 1, prefill: Some(2) }));
    }

    #[test]
    fn an_overloaded_endpoint_computes_nothing_for_others() {
        // The mean is 2,000, and the only other endpoint has twice that.
        let mut case = case(30_000, &[(0, 1, 0, 4000), (0, 0, 0, 0)]);
        assert_eq!(split(&mut case, &Transfers::default()), Some(Pick::alone(1)));
    }

    #[test]
    fn the_session_stays_where_it_is_decoded() {
        let mut case = case(30_000, &ROWS);
        assert_eq!(split(&mut case, &Transfers::default()), Some(Pick { row: 1, prefill: Some(2) }));
        case.rows[1].overlap_tokens = 29_000;
        case.rows[1].load.in_flight.context_tokens = 3000;
        assert_eq!(split(&mut case, &Transfers::default()), Some(Pick::alone(1)), "a warm turn");
    }

    #[test]
    fn roles_decide_where_there_are_any() {
        let mut case = case(30_000, &ROWS);
        case.rows[0].part.role = crate::disaggregation::Role::Prefill;
        assert_eq!(split(&mut case, &Transfers::default()), None);
    }
}
