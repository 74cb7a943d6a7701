//! What a scheduler tells the routers of other replicas, and hears from them.

use super::{Output, Scheduler};
use crate::breaker::State;
use crate::endpoint::{Endpoint, EndpointId};
use crate::replica::{Estimate, Homes, News, PeerState, ReplicaId, Service, Share, Subject, Turn};
use crate::request::SessionKey;
use crate::table::ByEndpoint;
use crate::time::Nanos;

/// What was told.
#[derive(Debug, Default)]
pub(super) struct Told {
    number: u64,
    shares: ByEndpoint<Share>,
    /// Seconds of work placed on each endpoint since the start.
    placed_s: ByEndpoint<f64>,
}

// === impl Told ===

impl Told {
    /// A request was placed, which gives an endpoint this much work.
    pub(super) fn placed(&mut self, endpoint: EndpointId, work_s: f64) {
        *self.placed_s.get_or_insert(endpoint, || 0.0) += work_s;
    }
}

impl Scheduler {
    /// Adds the next news for other routers: what has changed since the last, or all.
    pub fn tell(&mut self, all: bool, news: &mut News) {
        self.told.number += 1;
        news.number = self.told.number;
        news.services = self.queue.tell(all);
        if all {
            news.learned = self.tell_learned();
        }
        news.turns = self.homes.as_mut().map(Homes::tell).unwrap_or_default();
        for endpoint in self.pool.endpoints() {
            let placed_s = self.told.placed_s.get(endpoint.id).copied().unwrap_or(0.0);
            let breaker_changes = endpoint.breaker.changes();
            let share = Share { in_flight: endpoint.load.in_flight, placed_s, breaker_changes };
            let told = self.told.shares.get_or_insert(endpoint.id, Share::default);
            if all || share.is_news(told) {
                *told = share;
                news.shares.push((endpoint.id, share));
            }
        }
    }

    /// Another router told what it has placed.
    pub(super) fn heard(
        &mut self,
        now: Nanos,
        (replica, number): (ReplicaId, u64),
        shares: &[(EndpointId, Share)],
        services: &[Service],
        learned: &[(Subject, Estimate)],
        out: &mut Vec<Output>,
    ) {
        // Endpoints may have room again.
        self.queue_blocked = false;
        self.queue.hear(replica, number, services);
        if !self.peers.knows(replica) {
            self.learned.tell_anew();
            self.homes.iter_mut().for_each(Homes::tell_anew);
        }
        self.hear_learned(now, (replica, number), learned);
        let policy = &mut self.policy;
        let placed = |endpoint, work_s| policy.placed_elsewhere(now, endpoint, work_s);
        let mut findings = Vec::new();
        let changed = |endpoint, changes| findings.push((endpoint, changes));
        self.peers.hear(now, (replica, number), shares, &mut self.pool, placed, changed);
        if !findings.is_empty() {
            self.hear_findings(now, &findings, out);
        }
    }

    /// Breakers of another router have opened or closed. A router that is cut off finds all endpoints dead: at most half
    /// of them are tried at a time.
    fn hear_findings(&mut self, now: Nanos, findings: &[(EndpointId, u32)], out: &mut Vec<Output>) {
        let is_open = |endpoint: &Endpoint| endpoint.breaker.state() != State::Closed;
        let room = self.pool.len() / 2;
        let mut doubtful = self.pool.endpoints().filter(|endpoint| is_open(endpoint)).count();
        for &(id, changes) in findings {
            let Some(endpoint) = self.pool.get_mut(id) else { continue };
            let was_open = is_open(endpoint);
            let is_tried = was_open || doubtful < room;
            if is_tried && endpoint.breaker.changed_elsewhere(changes, &self.config.breaker) {
                doubtful += usize::from(!was_open);
                out.push(Output::Breaker { endpoint: id, state: endpoint.breaker.state() });
            }
        }
        self.review(now, out);
    }

    /// Begins to keep what other routers, which know this one as `own`, do not know otherwise.
    pub(crate) fn share(&mut self, own: ReplicaId) {
        self.homes = Some(Homes::new(own));
    }

    /// A conversation's turn was placed here.
    pub(super) fn note_turn(&mut self, session: SessionKey, endpoint: EndpointId, prompt_tokens: u32) {
        if let Some(homes) = &mut self.homes
            && (self.admission.is_some() || self.policy.keeps_sessions())
        {
            homes.placed(session, endpoint, prompt_tokens);
        }
    }

    /// Other routers have placed turns of conversations.
    pub(super) fn hear_turns(&mut self, now: Nanos, turns: &[(EndpointId, Turn)]) {
        let Some(homes) = &mut self.homes else { return };
        for (endpoint, turn) in turns {
            if self.pool.get(*endpoint).is_none() || !homes.hear(*endpoint, turn) {
                continue;
            }
            self.policy.turn_elsewhere(turn.session, *endpoint, turn.prompt_tokens);
            if let Some(admission) = &mut self.admission {
                admission.heard(now, turn.session, turn.prompt_tokens.into());
            }
        }
    }

    /// The routers of other replicas that were heard lately.
    pub fn peers(&self) -> impl Iterator<Item = PeerState> {
        self.peers.states()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{World, config, endpoint, placed};
    use super::*;
    use crate::request::{RequestId, SchedulingRequest};
    use crate::scheduler::{Config, Input};

    /// A router that shares, in front of so many endpoints.
    fn world(policy: &str, own: u64, endpoints: usize) -> World {
        let mut world = World::new(config(policy), endpoints);
        world.scheduler.share(ReplicaId(own));
        world
    }

    /// One router tells another all that it has.
    fn tell(from: &mut World, own: u64, to: &mut World) -> Vec<Output> {
        let mut news = News::default();
        from.scheduler.tell(true, &mut news);
        let News { number, shares, services, learned, turns, prompts: _ } = news;
        to.step(Input::Heard { replica: ReplicaId(own), number, shares, services, learned, turns })
    }

    /// Requests to this endpoint fail until its breaker opens.
    fn fail(world: &mut World, slot: u16) {
        while world.scheduler.pool.get(endpoint(slot)).expect("here").breaker.state() == State::Closed {
            world.step(Input::Blamed { endpoint: endpoint(slot) });
        }
    }

    fn half_open(slot: u16) -> Output {
        Output::Breaker { endpoint: endpoint(slot), state: State::HalfOpen }
    }

    fn breakers(world: &World) -> Vec<State> {
        world.scheduler.pool().endpoints().map(|one| one.breaker.state()).collect()
    }

    /// Invariant: An endpoint at which requests of one router fail gets one request of each other router, and more when
    /// that is answered.
    #[test]
    fn what_one_breaker_finds_each_other_router_tries_once() {
        let [mut one, mut other] = [1, 2].map(|own| world("round_robin", own, 3));
        fail(&mut one, 1);
        assert_eq!(tell(&mut one, 1, &mut other), [half_open(1)]);
        assert_eq!(tell(&mut one, 1, &mut other), [], "once");
        let at: Vec<_> =
            (0..6).map(|id| placed(&other.arrive(id, 100, &[])).expect("placed").slot()).collect();
        assert_eq!(at.iter().filter(|slot| **slot == 1).count(), 1, "{at:?}");
        let tried = at.iter().position(|slot| *slot == 1).expect("tried") as u64;
        assert_eq!(tell(&mut other, 2, &mut one), [], "it has found nothing itself");
        other.step(Input::Succeeded { request: RequestId(tried) });
        assert_eq!(breakers(&other), [State::Closed; 3]);
        assert_eq!(breakers(&one)[1], State::Open, "only the cool-down or its own trial ends that");
    }

    #[test]
    fn when_an_endpoint_answers_one_router_again_the_others_do_not_wait_for_their_cool_downs() {
        let [mut one, mut other] = [1, 2].map(|own| world("round_robin", own, 3));
        for world in [&mut one, &mut other] {
            fail(world, 1);
        }
        assert_eq!(tell(&mut one, 1, &mut other), []);
        one.now += Nanos::from_secs(5);
        one.step(Input::Tick);
        let ids = 0..3;
        ids.for_each(|id| {
            one.arrive(id, 100, &[]);
            one.step(Input::Succeeded { request: RequestId(id) });
        });
        assert_eq!(breakers(&one), [State::Closed; 3]);
        assert_eq!(tell(&mut one, 1, &mut other), [half_open(1)]);
    }

    /// Invariant: A router that can reach no endpoint does not make the others avoid more than half of them.
    #[test]
    fn a_router_that_is_cut_off_makes_the_others_doubt_half_of_the_endpoints_at_most() {
        for (endpoints, doubtful) in [(1, 0), (2, 1), (5, 2)] {
            let [mut one, mut other] = [1, 2].map(|own| world("round_robin", own, endpoints));
            (0..endpoints as u16).for_each(|slot| fail(&mut one, slot));
            assert_eq!(tell(&mut one, 1, &mut other).len(), doubtful);
            let doubted = breakers(&other).iter().filter(|state| **state == State::HalfOpen).count();
            assert_eq!(doubted, doubtful);
        }
    }

    fn turn(world: &mut World, id: u64, session: u64) -> EndpointId {
        let session = Some(SessionKey(session));
        let request = SchedulingRequest { session, ..SchedulingRequest::new(RequestId(id), 100) };
        let out = world.step(Input::Arrived { request, overlap: Vec::new(), block_tokens: 16 });
        world.step(Input::FirstToken { request: RequestId(id) });
        world.step(Input::Finished { request: RequestId(id) });
        placed(&out).expect("placed")
    }

    /// Invariant: With a policy that keeps conversations at an endpoint, a turn goes there whichever router gets it.
    #[test]
    fn a_conversation_stays_whichever_router_gets_its_next_turn() {
        for policy in ["session_sticky", "linear", "heavy_offload"] {
            let [mut one, mut other] = [1, 2].map(|own| world(policy, own, 8));
            let at: Vec<_> = (0..8).map(|n| turn(&mut one, n, n)).collect();
            tell(&mut one, 1, &mut other);
            for n in 0..8 {
                assert_eq!(turn(&mut other, n, n), at[n as usize], "{policy}");
            }
        }
    }

    #[test]
    fn a_router_that_begins_hears_of_all_conversations_and_others_of_none_twice() {
        let [mut one, mut other] = [1, 2].map(|own| world("session_sticky", own, 8));
        let told = |world: &mut World| {
            let mut news = News::default();
            world.scheduler.tell(true, &mut news);
            news.turns.len()
        };
        (0..20).for_each(|n| _ = turn(&mut one, n, n));
        assert_eq!((told(&mut one), told(&mut one)), (20, 0));
        tell(&mut other, 2, &mut one);
        assert_eq!((told(&mut one), told(&mut one)), (20, 0));
    }

    #[test]
    fn only_policies_that_keep_conversations_and_session_admission_tell_of_turns() {
        let told = |config: Config| {
            let mut world = World::new(config, 2);
            world.scheduler.share(ReplicaId(1));
            turn(&mut world, 0, 7);
            let mut news = News::default();
            world.scheduler.tell(true, &mut news);
            news.turns.len()
        };
        let admitting = Config { session_admission: true, ..config("fleet_cost") };
        assert_eq!([config("fleet_cost"), config("linear"), admitting].map(told), [0, 1, 1]);
    }

    #[test]
    fn a_conversation_that_is_active_at_another_router_does_not_wait_here() {
        let admitting = |own| {
            let mut world = World::new(Config { session_admission: true, ..config("round_robin") }, 2);
            world.scheduler.share(ReplicaId(own));
            world
        };
        let [mut one, mut other] = [1, 2].map(admitting);
        turn(&mut one, 0, 7);
        tell(&mut one, 1, &mut other);
        let admission = other.scheduler.admission.as_ref().expect("it is on");
        use crate::queue::Lane::{Active, New};
        assert_eq!([7, 8].map(|session| admission.lane(SessionKey(session))), [Active, New]);
    }

    #[test]
    fn turns_at_endpoints_that_have_left_are_ignored() {
        let [mut one, mut other] = [1, 2].map(|own| world("session_sticky", own, 1));
        turn(&mut one, 0, 7);
        other.step(Input::Left { endpoint: endpoint(0) });
        tell(&mut one, 1, &mut other);
        assert_eq!(placed(&other.arrive(0, 100, &[])), None);
    }
}
