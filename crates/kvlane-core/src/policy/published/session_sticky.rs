//! `session_sticky`: a session stays at its first endpoint, chosen by the fewest tokens placed there (the placement of
//! the agentic study "elastic P/D", its cache-aware proxy: greedy bin packing by cumulative tokens with the cache hit
//! as tie break, then session affinity from the second turn on).
//!
//! The first turn of a session goes to the endpoint with the smallest sum of prompt tokens of all requests placed there
//! so far; ties go to the longest match, remaining ties are random. Later turns go to the endpoint of the previous
//! turn, whatever the load, and their prompts count there too. A request without a session is placed as a first turn.
//! An endpoint that joins starts with the smallest sum of the others; otherwise it would get every session until it has
//! caught up.
//!
//! At least the last 32,768 and at most 65,536 sessions are remembered. Known limits: a session's total work is not
//! known at its first turn, so heavy sessions may share an endpoint by chance and stay there; the study saw the hit
//! rate rise and times to first token grow by 30 %.

use serde::{Deserialize, Serialize};

use crate::endpoint::EndpointId;
use crate::policy::{Candidate, CostUnit, PickContext, Policy, Reason};
use crate::recent::Recent;
use crate::request::SessionKey;
use crate::table::ByEndpoint;

/// No parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {}

/// Most sessions remembered.
const SESSIONS_MAX: usize = 65_536;

/// The policy, with the endpoint of each session and the tokens placed on each endpoint.
pub struct SessionSticky {
    sessions: Recent<SessionKey, EndpointId>,
    given_tokens: ByEndpoint<u64>,
}

impl SessionSticky {
    /// The policy with these parameters.
    pub fn new(_: Config) -> Self {
        Self { sessions: Recent::new(SESSIONS_MAX), given_tokens: ByEndpoint::default() }
    }
}

impl Policy for SessionSticky {
    fn pick(&mut self, cx: &mut PickContext<'_>, candidates: &[Candidate]) -> usize {
        let known = candidates.iter().filter_map(|row| self.given_tokens.get(row.endpoint));
        let least = known.min().copied().unwrap_or(0);
        for row in candidates {
            self.given_tokens.get_or_insert(row.endpoint, || least);
        }
        let given = |row: &Candidate| self.given_tokens.get(row.endpoint).copied().unwrap_or(least);
        let home = cx.request.session.and_then(|session| self.sessions.get(&session).copied());
        let stays = home.and_then(|home| candidates.iter().position(|row| row.endpoint == home));
        let row = stays.unwrap_or_else(|| {
            cx.cheapest_of(candidates, |row| given(row) == least, |row| -f64::from(row.overlap_tokens))
                .unwrap_or(0)
        });
        for (n, row) in candidates.iter().enumerate() {
            cx.note(n, given(row) as f64);
        }
        cx.reason = if stays.is_some() { Reason::Affinity } else { Reason::LeastLoaded };
        let endpoint = candidates[row].endpoint;
        let given_tokens = self.given_tokens.get_or_insert(endpoint, || least);
        *given_tokens = given_tokens.saturating_add(u64::from(cx.request.prompt_tokens));
        if let Some(session) = cx.request.session {
            self.sessions.insert(session, endpoint);
        }
        row
    }

    fn cost_unit(&self) -> CostUnit {
        CostUnit::Tokens
    }

    fn keeps_sessions(&self) -> bool {
        true
    }

    fn turn_elsewhere(&mut self, session: SessionKey, endpoint: EndpointId, prompt_tokens: u32) {
        self.sessions.insert(session, endpoint);
        if self.given_tokens.get(endpoint).is_some() {
            let given = self.given_tokens.get_or_insert(endpoint, || 0);
            *given = given.saturating_add(prompt_tokens.into());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::testing::Case;

    fn turn(case: &mut Case, session: u64, prompt_tokens: u32) -> (usize, Reason) {
        case.request.session = Some(SessionKey(session));
        case.request.prompt_tokens = prompt_tokens;
        case.pick()
    }

    #[test]
    fn a_session_begins_where_the_fewest_tokens_went_and_stays() {
        let mut case = Case::new("session_sticky", 100, &[(64, 0, 0, 0), (0, 0, 0, 0)]);
        assert_eq!(turn(&mut case, 1, 1000), (0, Reason::LeastLoaded), "a hit breaks the tie");
        assert_eq!(turn(&mut case, 2, 300), (1, Reason::LeastLoaded));
        assert_eq!(turn(&mut case, 2, 600), (1, Reason::Affinity));
        assert_eq!(turn(&mut case, 3, 200), (1, Reason::LeastLoaded), "900 to 1,000");
        assert_eq!(case.costs, [1000.0, 900.0]);
        assert_eq!(turn(&mut case, 4, 10), (0, Reason::LeastLoaded), "1,100 to 1,000");
        case.rows[0].load.in_flight.requests = 1000;
        assert_eq!(turn(&mut case, 1, 10), (0, Reason::Affinity), "whatever the load");
    }

    #[test]
    fn turns_placed_by_another_router_count_as_its_own() {
        let mut case = Case::new("session_sticky", 100, &[(64, 0, 0, 0), (0, 0, 0, 0)]);
        assert_eq!(turn(&mut case, 1, 1000).0, 0);
        case.policy.turn_elsewhere(SessionKey(1), case.rows[1].endpoint, 1500);
        assert_eq!(turn(&mut case, 2, 100), (0, Reason::LeastLoaded), "1,000 to 1,500");
        assert_eq!(turn(&mut case, 1, 1000), (1, Reason::Affinity));
    }

    #[test]
    fn who_joins_begins_with_the_least_of_the_others() {
        let mut case = Case::new("session_sticky", 100, &[(0, 0, 0, 0), (0, 0, 0, 0), (64, 0, 0, 0)]);
        let late = case.rows.pop().expect("a row");
        for session in 0..2 {
            turn(&mut case, session, 1000);
        }
        case.rows.push(late);
        assert_eq!(turn(&mut case, 2, 100).0, 2, "of three equal endpoints the one with the hit");
        assert_ne!(turn(&mut case, 3, 100).0, 2, "1,100 to 1,000");
    }

    #[test]
    fn a_session_whose_endpoint_left_begins_anew() {
        let mut case = Case::new("session_sticky", 100, &[(0, 0, 0, 0), (0, 0, 0, 0)]);
        let home = turn(&mut case, 1, 100).0;
        case.rows.remove(home);
        assert_eq!(turn(&mut case, 1, 100), (0, Reason::LeastLoaded));
        assert_eq!(turn(&mut case, 1, 100), (0, Reason::Affinity));
    }
}
