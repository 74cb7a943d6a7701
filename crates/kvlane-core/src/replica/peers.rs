//! The other routers of a pool: what each of them has placed where.

use std::collections::BTreeMap;

use super::{LEASE, PeerState, ReplicaId, Share};
use crate::endpoint::{EndpointId, Pool};
use crate::load::InFlight;
use crate::rates::Prefilled;
use crate::rng::Rng;
use crate::table::ByEndpoint;
use crate::time::Nanos;

/// Most peers that are counted; those beyond it are ignored.
const PEERS_MAX: usize = 256;

/// What each of the other routers has placed where. The sums are in [`crate::endpoint::Endpoint::elsewhere`].
#[derive(Debug, Default)]
pub(crate) struct Peers {
    peers: BTreeMap<ReplicaId, Peer>,
    /// When the next peer may have been silent for too long.
    review_at: Option<Nanos>,
}

#[derive(Debug, Default)]
struct Peer {
    heard: Nanos,
    /// The number of the latest news of each endpoint, and its contents.
    shares: ByEndpoint<(u64, Share)>,
}

// === impl Peers ===

impl Peers {
    /// Takes over news, as far as it is newer than what was heard. `placed` is told of seconds of work placed on an
    /// endpoint since, and `changed` of a breaker that has opened or closed since.
    pub(crate) fn hear(
        &mut self,
        now: Nanos,
        (replica, number): (ReplicaId, u64),
        shares: &[(EndpointId, Share)],
        pool: &mut Pool,
        mut placed: impl FnMut(EndpointId, f64),
        mut changed: impl FnMut(EndpointId, u32),
    ) {
        if self.peers.len() >= PEERS_MAX && !self.peers.contains_key(&replica) {
            return;
        }
        let peer = self.peers.entry(replica).or_default();
        peer.heard = peer.heard.max(now);
        self.review_at = Some(self.review_at.map_or(now + LEASE, |at| at.min(now + LEASE)));
        for &(id, share) in shares {
            let Some(endpoint) = pool.get_mut(id) else { continue };
            let mut is_first = false;
            let held = peer.shares.get_or_insert(id, || {
                is_first = true;
                (0, Share::default())
            });
            if number <= held.0 && !is_first {
                continue;
            }
            let (_, before) = std::mem::replace(held, (number, share));
            endpoint.elsewhere = endpoint.elsewhere.less(&before.in_flight).plus(&share.in_flight);
            // Prompts for which it no longer waits have been computed, which has kept answers waiting.
            let InFlight { prefilling, prefill_tokens: tokens, prefill_pairs: pairs, .. } =
                before.in_flight.less(&share.in_flight);
            endpoint.pace.has_prefilled(Prefilled { prompts: prefilling.into(), tokens, pairs });
            if share.breaker_changes != before.breaker_changes {
                changed(id, share.breaker_changes);
            }
            // Work placed before this router knew the other one was placed at an unknown time.
            if !is_first && share.placed_s > before.placed_s {
                placed(id, share.placed_s - before.placed_s);
            }
        }
    }

    /// Whether this router was heard lately.
    pub(crate) fn knows(&self, replica: ReplicaId) -> bool {
        self.peers.contains_key(&replica)
    }

    /// Forgets what routers have placed that have been silent for [`LEASE`].
    pub(crate) fn expire(&mut self, now: Nanos, pool: &mut Pool) {
        if self.review_at.is_none_or(|at| now < at) {
            return;
        }
        self.peers.retain(|_, peer| {
            let lives = now < peer.heard + LEASE;
            if !lives {
                for (id, (_, share)) in peer.shares.iter() {
                    if let Some(endpoint) = pool.get_mut(id) {
                        endpoint.elsewhere = endpoint.elsewhere.less(&share.in_flight);
                    }
                }
            }
            lives
        });
        self.review_at = self.peers.values().map(|peer| peer.heard + LEASE).min();
    }

    /// A number that differs between routers that hear each other: all of them hear all but themselves. `None` if no router
    /// was heard lately.
    pub(crate) fn salt(&self) -> Option<u64> {
        let mixed = |replica: &ReplicaId| Rng::new(replica.0).next_u64();
        self.peers.keys().map(mixed).reduce(|all, one| all ^ one)
    }

    /// When a peer may have been silent for too long.
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        self.review_at
    }

    /// The routers that were heard lately.
    pub(crate) fn states(&self) -> impl Iterator<Item = PeerState> {
        self.peers.iter().map(|(&replica, peer)| {
            let requests = peer.shares.iter().map(|(_, (_, share))| share.in_flight.requests).sum();
            PeerState { replica, heard: peer.heard, requests }
        })
    }
}

// === impl InFlight ===

impl InFlight {
    /// The load of both.
    pub fn plus(&self, other: &Self) -> Self {
        self.with(other, u32::saturating_add, u64::saturating_add)
    }

    /// The load without the other.
    pub(crate) fn less(&self, other: &Self) -> Self {
        self.with(other, u32::saturating_sub, u64::saturating_sub)
    }

    fn with(&self, other: &Self, few: fn(u32, u32) -> u32, many: fn(u64, u64) -> u64) -> Self {
        Self {
            requests: few(self.requests, other.requests),
            prefilling: few(self.prefilling, other.prefilling),
            moving: few(self.moving, other.moving),
            prefill_tokens: many(self.prefill_tokens, other.prefill_tokens),
            prefill_pairs: many(self.prefill_pairs, other.prefill_pairs),
            lower_tokens: many(self.lower_tokens, other.lower_tokens),
            context_tokens: many(self.context_tokens, other.context_tokens),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Nanos = Nanos::from_secs(1);

    fn pool(endpoints: usize) -> (Pool, Vec<EndpointId>) {
        let mut pool = Pool::default();
        let ids = (0..endpoints).map(|n| {
            let id = pool.next_id().expect("room");
            pool.join(id, format!("e{n}").into());
            id
        });
        let ids = ids.collect();
        (pool, ids)
    }

    fn share(requests: u32) -> Share {
        let in_flight =
            InFlight { requests, context_tokens: 1000 * u64::from(requests), ..InFlight::default() };
        Share { in_flight, ..Share::default() }
    }

    fn elsewhere(pool: &Pool) -> Vec<InFlight> {
        pool.endpoints().map(|endpoint| endpoint.elsewhere).collect()
    }

    proptest! {
        /// Invariant: Routers that have heard the latest news of each other know the same load, in whatever order news came,
        /// how often it was repeated, and which older news was lost.
        #[test]
        fn any_order_repetition_and_loss_of_older_news_give_the_same_load(
            told in prop::collection::vec((0u64..3, 0usize..4, 0u32..50), 1..40),
            order in prop::collection::vec(any::<prop::sample::Index>(), 0..80),
        ) {
            let (mut straight, ids) = pool(4);
            let mut crooked = straight_copy(&ids);
            let (mut in_order, mut in_disorder) = (Peers::default(), Peers::default());
            let hear = |peers: &mut Peers, pool: &mut Pool, n: usize| {
                let (replica, endpoint, requests) = told[n];
                let news = [(ids[endpoint], share(requests))];
                peers.hear(SECOND, (ReplicaId(replica), n as u64 + 1), &news, pool, |_, _| {}, |_, _| {});
            };
            (0..told.len()).for_each(|n| hear(&mut in_order, &mut straight, n));
            order.iter().for_each(|n| hear(&mut in_disorder, &mut crooked, n.index(told.len())));
            // The latest of each router and endpoint arrives in the end, as in news of all endpoints; the order is odd.
            for n in (0..told.len()).rev() {
                let is_last = !told[n + 1..].iter().any(|(replica, endpoint, _)| (*replica, *endpoint) == (told[n].0, told[n].1));
                if is_last {
                    hear(&mut in_disorder, &mut crooked, n);
                }
            }
            prop_assert_eq!(elsewhere(&straight), elsewhere(&crooked));
            in_disorder.expire(SECOND + LEASE, &mut crooked);
            prop_assert_eq!(elsewhere(&crooked), vec![InFlight::default(); 4]);
        }
    }

    fn straight_copy(ids: &[EndpointId]) -> Pool {
        let mut pool = Pool::default();
        ids.iter().for_each(|id| pool.join(*id, "copy".into()));
        pool
    }

    /// Invariant: The requests in flight of a router that is silent stop counting when its lease ends, not before.
    #[test]
    fn a_silent_router_counts_until_its_lease_ends() {
        let (mut pool, ids) = pool(1);
        let mut peers = Peers::default();
        for (at, replica) in [(SECOND, 1), (SECOND + SECOND, 2)] {
            peers.hear(at, (ReplicaId(replica), 1), &[(ids[0], share(5))], &mut pool, |_, _| {}, |_, _| {});
        }
        let requests = |pool: &Pool| elsewhere(pool)[0].requests;
        peers.expire(SECOND + LEASE - Nanos(1), &mut pool);
        assert_eq!(requests(&pool), 10);
        peers.expire(SECOND + LEASE, &mut pool);
        assert_eq!((requests(&pool), peers.states().count()), (5, 1));
        peers.hear(SECOND + LEASE, (ReplicaId(2), 2), &[], &mut pool, |_, _| {}, |_, _| {});
        peers.expire(SECOND + LEASE + SECOND, &mut pool);
        assert_eq!(requests(&pool), 5, "it was heard, though it had no news of this endpoint");
        peers.expire(SECOND + LEASE + LEASE, &mut pool);
        assert_eq!((requests(&pool), peers.next_deadline()), (0, None));
    }

    #[test]
    fn work_placed_elsewhere_is_told_once() {
        let (mut pool, ids) = pool(1);
        let mut peers = Peers::default();
        let mut placed_s = 0.0;
        for (number, total_s) in [(1, 10.0), (3, 14.0), (3, 14.0), (2, 12.0), (4, 15.0)] {
            let share = Share { placed_s: total_s, ..share(1) };
            peers.hear(
                SECOND,
                (ReplicaId(1), number),
                &[(ids[0], share)],
                &mut pool,
                |_, more_s| placed_s += more_s,
                |_, _| {},
            );
        }
        assert_eq!(placed_s, 5.0);
    }

    #[test]
    fn routers_that_hear_each_other_have_salts_of_their_own() {
        let salt = |own: u64| {
            let (mut pool, _) = pool(0);
            let mut peers = Peers::default();
            for other in (0..4).filter(|other| *other != own) {
                peers.hear(SECOND, (ReplicaId(other), 1), &[], &mut pool, |_, _| {}, |_, _| {});
            }
            peers.salt()
        };
        let salts: std::collections::BTreeSet<_> = (0..4).map(salt).collect();
        assert_eq!((salts.len(), salts.contains(&None), Peers::default().salt()), (4, false, None));
    }

    /// Invariant: Answers that wait while prompts of another router are computed do not make an endpoint count as slow.
    #[test]
    fn prompts_that_another_router_no_longer_awaits_have_been_computed() {
        let (mut pool, ids) = pool(1);
        let mut peers = Peers::default();
        for (number, prefill_tokens) in [(1, 4000), (2, 6000), (3, 1000), (4, 0)] {
            let in_flight =
                InFlight { prefill_tokens, prefill_pairs: 10 * prefill_tokens, ..InFlight::default() };
            let news = [(ids[0], Share { in_flight, ..Share::default() })];
            peers.hear(SECOND, (ReplicaId(1), number), &news, &mut pool, |_, _| {}, |_, _| {});
        }
        let pace = pool.get(ids[0]).expect("there").pace;
        assert_eq!((pace.prefilled().tokens, pace.prefilled().pairs), (6000, 60_000));
    }

    #[test]
    fn a_successor_in_the_same_slot_begins_without_load() {
        let (mut pool, ids) = pool(1);
        let mut peers = Peers::default();
        peers.hear(SECOND, (ReplicaId(1), 1), &[(ids[0], share(5))], &mut pool, |_, _| {}, |_, _| {});
        pool.leave(ids[0]);
        let next = pool.next_id().expect("room");
        pool.join(next, "next".into());
        peers.hear(
            SECOND,
            (ReplicaId(1), 2),
            &[(ids[0], share(7)), (next, share(1))],
            &mut pool,
            |_, _| {},
            |_, _| {},
        );
        assert_eq!(elsewhere(&pool)[0].requests, 1);
        peers.expire(SECOND + LEASE, &mut pool);
        assert_eq!(elsewhere(&pool)[0], InFlight::default());
    }
}
