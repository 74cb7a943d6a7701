//! `linear`: a session stays at its endpoint unless that is overloaded (the scheduler of the agentic study "elastic
//! P/D" that its offload was compared with).
//!
//! A session goes to the endpoint with the fewest tokens in flight `T`; ties go to the longest match, remaining ties are
//! random. It stays there as long as `T` there is at most `overload_factor` times the mean over the endpoints; then it
//! is placed again. A request without a session is placed as a first turn.
//!
//! The study names the parts, session affinity, balance of tokens, the cache hit as tie break, the factor, and no
//! formula. That tokens in flight are meant, not those placed so far as in [`super::session_sticky`], and that the
//! factor applies to their mean, is our interpretation. It tried 2, 1.5, 1.3 and 1 for the factor and saw no difference;
//! the default is the first of them. Known limits: on an idle fleet all endpoints are equal, so sessions with a common
//! head gather where it is cached.
//!
//! At least the last 32,768 and at most 65,536 sessions are remembered.

use serde::{Deserialize, Serialize};

use crate::bounded::AtLeastOne;
use crate::endpoint::EndpointId;
use crate::policy::{Candidate, CostUnit, PickContext, Policy, Reason};
use crate::recent::Recent;
use crate::request::SessionKey;

/// When a session leaves its endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Config {
    /// Tokens in flight at a session's endpoint, relative to the mean, above which the session is placed again.
    pub overload_factor: AtLeastOne,
}

impl Default for Config {
    fn default() -> Self {
        Self { overload_factor: AtLeastOne::of(2.0) }
    }
}

/// Most sessions remembered.
const SESSIONS_MAX: usize = 65_536;

/// The policy, with the endpoint of each session.
pub struct Linear {
    config: Config,
    sessions: Recent<SessionKey, EndpointId>,
}

/// Tokens in flight at an endpoint.
pub(super) fn tokens(row: &Candidate) -> f64 {
    row.load.in_flight.context_tokens as f64
}

/// Their mean over the endpoints.
pub(super) fn mean_tokens(candidates: &[Candidate]) -> f64 {
    candidates.iter().map(tokens).sum::<f64>() / candidates.len().max(1) as f64
}

impl Linear {
    /// The policy with these parameters.
    pub fn new(config: Config) -> Self {
        Self { config, sessions: Recent::new(SESSIONS_MAX) }
    }
}

impl Policy for Linear {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        let limit = self.config.overload_factor.get() * mean_tokens(candidates);
        let home = cx.request.session.and_then(|session| self.sessions.get(&session).copied());
        let home = home.and_then(|home| candidates.iter().position(|row| row.endpoint == home));
        let stays = home.filter(|&row| tokens(&candidates[row]) <= limit);
        let row = stays.unwrap_or_else(|| {
            let least = candidates.iter().map(tokens).fold(f64::INFINITY, f64::min);
            cx.cheapest_of(candidates, |row| tokens(row) <= least, |row| -f64::from(row.overlap_tokens))
                .unwrap_or(0)
        });
        for (n, row) in candidates.iter().enumerate() {
            cx.note(n, tokens(row));
        }
        cx.reason = match (home, stays) {
            (_, Some(_)) => Reason::Affinity,
            (Some(_), None) => Reason::Imbalance,
            (None, None) => Reason::LeastLoaded,
        };
        if let Some(session) = cx.request.session {
            self.sessions.insert(session, candidates[row].endpoint);
        }
        row
    }

    fn cost_unit(&self) -> CostUnit {
        CostUnit::Tokens
    }

    fn keeps_sessions(&self) -> bool {
        true
    }

    fn turn_elsewhere(&mut self, session: SessionKey, endpoint: EndpointId, _: u32) {
        self.sessions.insert(session, endpoint);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::PolicyConfig;
    use crate::policy::testing::Case;

    // Overlap, requests, queued prefill tokens, context tokens.
    const ROWS: [(u32, u32, u64, u64); 3] = [(0, 1, 0, 4000), (0, 1, 0, 4000), (64, 1, 0, 4000)];

    fn case(overload_factor: f64) -> Case {
        let config = Config { overload_factor: AtLeastOne::of(overload_factor) };
        let mut case = Case::of(&PolicyConfig::Linear(config), 1000, &ROWS);
        case.request.session = Some(SessionKey(1));
        case
    }

    #[test]
    fn a_session_begins_where_the_fewest_tokens_are_in_flight_and_a_hit_breaks_ties() {
        let mut case = case(2.0);
        assert_eq!(case.pick(), (2, Reason::LeastLoaded));
        assert_eq!(case.costs, [4000.0; 3]);
        case.request.session = Some(SessionKey(2));
        case.rows[1].load.in_flight.context_tokens = 3999;
        assert_eq!(case.pick(), (1, Reason::LeastLoaded), "load comes first");
    }

    #[test]
    fn it_stays_until_its_endpoint_is_overloaded() {
        let mut case = case(1.5);
        assert_eq!(case.pick().0, 2);
        // 8,000 of 16,000 tokens: exactly one and a half times the mean.
        case.rows[2].load.in_flight.context_tokens = 8000;
        assert_eq!(case.pick(), (2, Reason::Affinity));
        case.rows[2].load.in_flight.context_tokens = 8004;
        case.rows[0].load.in_flight.context_tokens = 3990;
        assert_eq!(case.pick(), (0, Reason::Imbalance));
        case.rows[2].load.in_flight.context_tokens = 0;
        assert_eq!(case.pick(), (0, Reason::Affinity), "and does not return");
    }

    #[test]
    fn a_session_is_where_another_router_placed_its_last_turn() {
        let mut case = case(2.0);
        assert_eq!(case.pick().0, 2);
        case.policy.turn_elsewhere(SessionKey(1), case.rows[0].endpoint, 100);
        assert_eq!(case.pick(), (0, Reason::Affinity));
    }

    #[test]
    fn without_a_session_each_request_is_placed_by_load() {
        let mut case = case(2.0);
        case.request.session = None;
        assert_eq!(case.pick(), (2, Reason::LeastLoaded));
        case.rows[0].load.in_flight.context_tokens = 0;
        assert_eq!(case.pick(), (0, Reason::LeastLoaded));
    }
}
