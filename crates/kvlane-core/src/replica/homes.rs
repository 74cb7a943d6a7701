//! Where conversations had their last turns, whichever router placed them.
//!
//! A turn's stamp is one more than the latest that its router knew of the conversation (a Lamport clock), with a number of
//! the router for turns that two of them place at once. Of two turns the one with the larger stamp is the later, so
//! routers that have heard of the same turns agree.

use std::collections::VecDeque;

use super::{ReplicaId, Turn};
use crate::endpoint::EndpointId;
use crate::recent::Recent;
use crate::request::SessionKey;

/// Most conversations that are remembered: as many as policies remember.
const SESSIONS_MAX: usize = 65_536;

/// Most turns in one piece of news.
const TOLD_AT_ONCE: usize = 512;

/// Bits of a stamp that are the router's.
const ROUTER_BITS: u32 = 32;

/// The last turns of conversations.
pub(crate) struct Homes {
    last: Recent<SessionKey, Home>,
    /// Conversations whose last turn was placed here and is to be told. Each is here once.
    untold: VecDeque<SessionKey>,
    /// The bits of this router.
    own: u64,
}

#[derive(Clone, Copy)]
struct Home {
    stamp: u64,
    endpoint: EndpointId,
    prompt_tokens: u32,
    is_untold: bool,
}

// === impl Homes ===

impl Homes {
    /// Those of a router that knows no conversation.
    pub(crate) fn new(own: ReplicaId) -> Self {
        let own = own.0 >> (u64::BITS - ROUTER_BITS) ^ own.0 & u64::from(u32::MAX);
        Self { last: Recent::new(SESSIONS_MAX), untold: VecDeque::new(), own }
    }

    /// A turn was placed here.
    pub(crate) fn placed(&mut self, session: SessionKey, endpoint: EndpointId, prompt_tokens: u32) {
        let before = self.last.get(&session);
        let (turns, is_untold) =
            before.map_or((0, false), |home| (home.stamp >> ROUTER_BITS, home.is_untold));
        let stamp = (turns + 1) << ROUTER_BITS | self.own;
        self.last.insert(session, Home { stamp, endpoint, prompt_tokens, is_untold: true });
        if !is_untold {
            self.untold.push_back(session);
        }
    }

    /// Another router tells of a turn. Returns whether it is later than what was known.
    pub(crate) fn hear(&mut self, endpoint: EndpointId, turn: &Turn) -> bool {
        let &Turn { session, stamp, prompt_tokens } = turn;
        let mut is_first = false;
        let home = self.last.get_or_insert(session, || {
            is_first = true;
            Home { stamp, endpoint, prompt_tokens, is_untold: false }
        });
        if !is_first && stamp <= home.stamp {
            return false;
        }
        (home.stamp, home.endpoint, home.prompt_tokens) = (stamp, endpoint, prompt_tokens);
        true
    }

    /// Takes some of the last turns that are to be told.
    pub(crate) fn tell(&mut self) -> Vec<(EndpointId, Turn)> {
        let some = self.untold.len().min(TOLD_AT_ONCE);
        let told = self.untold.drain(..some).filter_map(|session| {
            let home = self.last.get(&session)?;
            home.is_untold = false;
            let Home { stamp, endpoint, prompt_tokens, .. } = *home;
            Some((endpoint, Turn { session, stamp, prompt_tokens }))
        });
        told.collect()
    }

    /// Tells all last turns: there is a router that has not heard them.
    pub(crate) fn tell_anew(&mut self) {
        self.untold = self.last.iter().map(|(session, _)| *session).collect();
        self.last.values_mut().for_each(|home| home.is_untold = true);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn endpoint(slot: u16) -> EndpointId {
        EndpointId::new(slot, 0)
    }

    fn home(homes: &mut Homes, session: u64) -> Option<EndpointId> {
        homes.last.get(&SessionKey(session)).map(|home| home.endpoint)
    }

    proptest! {
        /// Invariant: Routers that have heard of the last turns of conversations agree on where these are,
        /// in whatever order news came, how often it was repeated, and which older news was lost.
        #[test]
        fn any_order_repetition_and_loss_of_older_news_give_the_same_homes(
            placed in prop::collection::vec((0usize..3, 0u64..5, 0u16..4), 1..40),
            heard in prop::collection::vec(any::<prop::sample::Index>(), 0..80),
        ) {
            let mut routers: Vec<Homes> = (0..3).map(|n| Homes::new(ReplicaId(n))).collect();
            let mut told = Vec::new();
            let mut chaos = heard.iter();
            for (router, session, at) in placed {
                routers[router].placed(SessionKey(session), endpoint(at), 100);
                told.extend(routers[router].tell());
                if let Some(n) = chaos.next() {
                    let (endpoint, turn) = told[n.index(told.len())];
                    routers[n.index(3)].hear(endpoint, &turn);
                }
            }
            for router in &mut routers {
                router.tell_anew();
            }
            let last: Vec<_> = routers.iter_mut().flat_map(Homes::tell).collect();
            for (n, router) in routers.iter_mut().enumerate() {
                let disorder = chaos.clone().map(|n| n.index(last.len())).chain((0..last.len()).rev());
                for at in disorder.map(|at| (at + n) % last.len()) {
                    router.hear(last[at].0, &last[at].1);
                }
            }
            for session in 0..5 {
                let homes: Vec<_> = routers.iter_mut().map(|router| home(router, session)).collect();
                prop_assert!(homes.iter().all(|home| *home == homes[0]), "{:?}", homes);
            }
        }
    }

    #[test]
    fn a_router_that_has_heard_of_a_turn_places_the_next_one_later() {
        let (mut one, mut other) = (Homes::new(ReplicaId(1)), Homes::new(ReplicaId(2)));
        for turn in 0..20 {
            let (here, there) = if turn % 2 == 0 { (&mut one, &mut other) } else { (&mut other, &mut one) };
            here.placed(SessionKey(7), endpoint(turn), 10);
            let told = here.tell();
            assert!(there.hear(told[0].0, &told[0].1) && !there.hear(told[0].0, &told[0].1));
            assert_eq!((home(here, 7), home(there, 7)), (Some(endpoint(turn)), Some(endpoint(turn))));
            assert_eq!(there.tell(), [], "what was heard is not told on");
        }
    }

    /// Invariant: What routers tell each other of conversations is bounded, and each turn is told once.
    #[test]
    fn turns_are_told_once_and_in_bounded_pieces() {
        let mut homes = Homes::new(ReplicaId(1));
        for session in (0..1000).chain(0..1000) {
            homes.placed(SessionKey(session), endpoint(0), 10);
        }
        let pieces: Vec<usize> = (0..3).map(|_| homes.tell().len()).collect();
        assert_eq!(pieces, [512, 488, 0]);
        homes.tell_anew();
        homes.placed(SessionKey(3), endpoint(0), 10);
        assert_eq!((homes.tell().len(), homes.tell().len(), homes.untold.len()), (512, 488, 0));
        for session in 0..200_000 {
            homes.placed(SessionKey(session), endpoint(0), 10);
        }
        homes.tell_anew();
        assert!(homes.untold.len() <= SESSIONS_MAX);
    }
}
