//! Request queue of one pool. Bounded; each request has a deadline.
//!
//! A request leaves in exactly one of four ways: dequeued, displaced, expired, cancelled. A dequeued request that finds
//! no endpoint returns to its position.
//!
//! Order: higher [`SchedulingRequest::priority`] first; within a priority, requests of active conversations before
//! those that begin or resume one ([`Lane`]); within a lane, the tenant with the least service; within a tenant,
//! the earliest deadline ([`Waiting::goes_by`]). Requests that begin a conversation may be held back as a whole
//! ([`Queue::in_order`]) and then block no others.
//!
//! **Deadlines.** A request with a target for its time to first token has that as its deadline. Once it has passed, or
//! should be missed, the request is best effort: its deadline is the queue's timeout, like that of requests without a
//! target, which therefore keep their arrival order. A request without a target is overtaken only by those whose
//! targets end before its own timeout, so it does not wait for ever: its turn comes before its timeout unless those
//! with targets take every slot until then, as requests that arrived before it would.
//!
//! **Fairness.** Each priority and lane keeps a counter of the service of each tenant: a virtual token counter (Sheng
//! et al., *Fairness in Serving Large Language Models*, OSDI'24, arXiv 2401.00588), charged at dispatch with the
//! forecast and corrected when the request is over, as in that paper's variant with predicted lengths. Cached prompt
//! tokens are not charged (as in DLPM, arXiv 2501.14312). The tenant with the lowest counter goes first. When a tenant
//! without queued requests queues one, its counter is lifted to that of the tenant served last, so that an idle tenant
//! accumulates no credit. Hence, with U the largest charge of one request: the counters of any two queued tenants
//! differ by at most U, and of two tenants that stay queued during some interval, neither is served more than 2 U
//! beyond the other in it: one largest request each. Corrections add their own amount.
//!
//! **Starvation.** Priorities are strict and do not age: a request of low priority may wait until its deadline, but no
//! longer. An ageing rate would be one more setting without an obvious value.
//!
//! **Full queue.** The lowest-ranked request is displaced: the last request of the tenant with the most queued
//! requests in the last priority and lane, if the new request ranks before them or its tenant has at least two fewer
//! there.

mod account;
mod services;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use foldhash::fast::FixedState;
use hashbrown::HashMap;

pub(crate) use self::account::{Account, Lane};
use self::services::Services;
use crate::replica::{ReplicaId, Service};
use crate::request::{RequestId, SchedulingRequest, SessionKey, TenantKey};
use crate::time::Nanos;

/// Tenants without queued requests that a priority and lane remembers. A forgotten tenant gains at most one largest
/// request.
const TENANTS_MAX: usize = 1024;

/// A queued request. Its prefix is looked up again when its turn comes.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) request: SchedulingRequest,
    /// Prompt tokens per block.
    pub(crate) block_tokens: u32,
    /// When it is rejected.
    pub(crate) deadline: Nanos,
    /// When it should have its first token, unless that cannot be met.
    pub(crate) due: Option<Nanos>,
}

/// The order within a tenant: the deadline, then the position.
type Rank = (Nanos, u64);

/// The request queue.
#[derive(Debug)]
pub(crate) struct Queue {
    /// Queued requests by arrival.
    waiting: BTreeMap<u64, (Waiting, Lane)>,
    places: HashMap<RequestId, u64, FixedState>,
    deadlines: BTreeSet<Rank>,
    /// The queued requests with a target for their time to first token that can still be met.
    dues: BTreeSet<Rank>,
    bands: BTreeMap<(Reverse<i8>, Lane), Band>,
    /// Queued requests of conversations that are not active, by conversation.
    gated_by_session: HashMap<SessionKey, BTreeSet<u64>, FixedState>,
    /// Number of requests that wait for session admission, those without a session included.
    gated_len: usize,
    next_place: u64,
    len_max: usize,
    services: Services,
}

/// One priority and lane.
#[derive(Debug, Default)]
struct Band {
    tenants: HashMap<Option<TenantKey>, Tenant, FixedState>,
    /// Tenants with queued requests, by service, then by the first of their requests.
    order: BTreeSet<(i64, Rank, Option<TenantKey>)>,
    /// Highest service that a dequeued tenant had before its dequeue. Every counter is at most one charge above it.
    floor: i64,
}

#[derive(Debug, Default)]
struct Tenant {
    served: i64,
    waiting: BTreeSet<Rank>,
}

// === impl Waiting ===

impl Waiting {
    /// The deadline that it is queued by.
    fn goes_by(&self) -> Nanos {
        self.due.map_or(self.deadline, |due| due.min(self.deadline))
    }
}

// === impl Queue ===

impl Queue {
    pub(crate) fn new(len_max: usize) -> Self {
        Self {
            waiting: BTreeMap::new(),
            places: HashMap::default(),
            deadlines: BTreeSet::new(),
            dues: BTreeSet::new(),
            bands: BTreeMap::new(),
            gated_by_session: HashMap::default(),
            gated_len: 0,
            next_place: 0,
            len_max,
            services: Services::default(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether any request waits for session admission.
    pub(crate) fn has_gated(&self) -> bool {
        self.gated_len > 0
    }

    /// The first request, in queue order, that waits for session admission.
    pub(crate) fn first_gated(&self) -> Option<&SchedulingRequest> {
        let mut bands = self.bands.iter().filter(|((_, lane), _)| self.gated_len > 0 && lane.is_gated());
        let place = bands.find_map(|(_, band)| Some(band.order.first()?.1.1))?;
        self.waiting.get(&place).map(|(waiting, _)| &waiting.request)
    }

    /// Queues a request. If the queue is full, returns the request without room: the new one or a displaced one.
    pub(crate) fn push(&mut self, waiting: Waiting, lane: Lane) -> Option<(Waiting, Lane)> {
        let mut displaced = None;
        if self.waiting.len() >= self.len_max {
            let Some(last) = self.displaceable(Account::of(&waiting.request, lane)) else {
                return Some((waiting, lane));
            };
            displaced = self.take(last);
        }
        let place = self.next_place;
        self.next_place += 1;
        self.enter(place, waiting, lane);
        displaced
    }

    /// Returns a dequeued request to its position, because no endpoint accepts it. Its conversation is admitted
    /// already.
    pub(crate) fn put_back(&mut self, place: u64, waiting: Waiting) {
        self.enter(place, waiting, Lane::Active);
    }

    fn enter(&mut self, place: u64, waiting: Waiting, lane: Lane) {
        self.places.insert(waiting.request.id, place);
        self.deadlines.insert((waiting.deadline, place));
        self.dues.extend(waiting.due.map(|due| (due, place)));
        self.enqueue(place, waiting, lane);
    }

    /// Changes the bound. Requests queued beyond it stay.
    pub(crate) fn set_len_max(&mut self, len_max: usize) {
        self.len_max = len_max;
    }

    /// The conversations of the queued requests that need no session admission.
    pub(crate) fn ungated_sessions(&self) -> impl Iterator<Item = SessionKey> {
        let ungated = self.waiting.values().filter(|(_, lane)| *lane == Lane::Active);
        ungated.filter_map(|(waiting, _)| waiting.request.session)
    }

    pub(crate) fn contains(&self, id: RequestId) -> bool {
        self.places.contains_key(&id)
    }

    /// Whether one more request fits without displacing another.
    pub(crate) fn has_room(&self) -> bool {
        self.waiting.len() < self.len_max
    }

    /// Whether any queued request needs no session admission.
    pub(crate) fn has_ungated(&self) -> bool {
        self.waiting.len() > self.gated_len
    }

    /// Queued requests in the current dequeue order, with their positions; those that need session admission only if
    /// `may_admit`.
    pub(crate) fn in_order(&self, may_admit: bool) -> impl Iterator<Item = (u64, &Waiting)> {
        let bands = self.bands.iter().filter(move |((_, lane), _)| may_admit || *lane == Lane::Active);
        let places = bands.flat_map(|(_, band)| {
            let of = |(.., tenant): &(i64, Rank, Option<TenantKey>)| band.tenants.get(tenant);
            band.order.iter().filter_map(of).flat_map(|tenant| tenant.waiting.iter().map(|&(_, place)| place))
        });
        places.filter_map(|place| Some((place, &self.waiting.get(&place)?.0)))
    }

    /// Removes the request at a position: its turn has come.
    pub(crate) fn take_turn(&mut self, place: u64) -> Option<(Waiting, Lane)> {
        let (waiting, lane) = self.waiting.get(&place)?;
        let account = Account::of(&waiting.request, *lane);
        let band = self.bands.get_mut(&account.band())?;
        let served = band.tenants.get(&account.tenant).map_or(band.floor, |tenant| tenant.served);
        band.floor = band.floor.max(served);
        self.take(place)
    }

    /// Updates the counters for a request placed without queueing, as if it had been dequeued.
    pub(crate) fn pass(&mut self, account: Account) {
        let band = self.bands.entry(account.band()).or_default();
        debug_assert!(
            band.order.is_empty() || account.lane == Lane::Active,
            "a queued request was overtaken"
        );
        if let Some(tenant) = band.tenants.get(&account.tenant) {
            band.floor = band.floor.max(tenant.served);
        }
    }

    /// Charges a tenant for service; a negative charge returns an excess.
    pub(crate) fn charge(&mut self, account: Account, tokens: i64) {
        self.services.charged(account, tokens);
        self.bands.entry(account.band()).or_default().charge(account.tenant, tokens);
    }

    /// Takes the service of tenants for other routers, where it has changed since the last time; or all.
    pub(crate) fn tell(&mut self, all: bool) -> Vec<Service> {
        self.services.tell(all)
    }

    /// Charges what another router told, as far as it is newer than what was heard.
    pub(crate) fn hear(&mut self, replica: ReplicaId, number: u64, services: &[Service]) {
        let bands = &mut self.bands;
        self.services.hear(replica, number, services, |account, tokens| {
            bands.entry(account.band()).or_default().charge(account.tenant, tokens);
        });
    }

    /// Removes one request whose deadline has passed.
    pub(crate) fn pop_expired(&mut self, now: Nanos) -> Option<(Waiting, Lane)> {
        let &(deadline, place) = self.deadlines.first()?;
        if deadline > now {
            return None;
        }
        self.take(place)
    }

    /// A request whose target for the first token has passed, and its position.
    pub(crate) fn first_missed(&self, now: Nanos) -> Option<(u64, &SchedulingRequest)> {
        let &(_, place) = self.dues.first().filter(|(due, _)| *due <= now)?;
        self.waiting.get(&place).map(|(waiting, _)| (place, &waiting.request))
    }

    /// The request at a position misses its target: it is best effort from here on.
    pub(crate) fn miss(&mut self, place: u64) {
        let Some((waiting, lane)) = self.waiting.get_mut(&place) else { return };
        let Some(due) = waiting.due else { return };
        let was = (waiting.goes_by(), place);
        waiting.due = None;
        let rank = (waiting.goes_by(), place);
        let account = Account::of(&waiting.request, *lane);
        self.dues.remove(&(due, place));
        if let Some(band) = self.bands.get_mut(&account.band()).filter(|_| rank != was) {
            // In this order, since a tenant without queued requests loses its lead.
            band.enqueue(account.tenant, rank);
            band.leave(account.tenant, was);
        }
    }

    /// Removes a request whose client is gone.
    pub(crate) fn remove(&mut self, id: RequestId) -> Option<(Waiting, Lane)> {
        let place = *self.places.get(&id)?;
        self.take(place)
    }

    /// A conversation has been admitted: its other queued requests need no admission any more.
    pub(crate) fn admit_session(&mut self, session: SessionKey, mut each: impl FnMut()) {
        for place in self.gated_by_session.get(&session).cloned().unwrap_or_default() {
            if let Some((waiting, lane)) = self.leave_band(place) {
                debug_assert!(lane.is_gated());
                self.enqueue(place, waiting, Lane::Active);
                each();
            }
        }
    }

    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        self.deadlines.first().into_iter().chain(self.dues.first()).map(|&(deadline, _)| deadline).min()
    }

    /// The request that a new one displaces, if any.
    fn displaceable(&self, newcomer: Account) -> Option<u64> {
        let (&last, band) = self.bands.iter().rev().find(|(_, band)| !band.order.is_empty())?;
        let len = |tenant: &Option<TenantKey>| band.tenants.get(tenant).map_or(0, |t| t.waiting.len());
        let longest = band.order.iter().map(|(.., tenant)| tenant).max_by_key(|tenant| len(tenant))?;
        let gives_way =
            newcomer.band() < last || newcomer.band() == last && len(longest) >= len(&newcomer.tenant) + 2;
        gives_way.then(|| Some(band.tenants.get(longest)?.waiting.last()?.1)).flatten()
    }

    fn enqueue(&mut self, place: u64, waiting: Waiting, lane: Lane) {
        let account = Account::of(&waiting.request, lane);
        self.bands.entry(account.band()).or_default().enqueue(account.tenant, (waiting.goes_by(), place));
        if lane.is_gated() {
            self.gated_len += 1;
            if let Some(session) = waiting.request.session {
                self.gated_by_session.entry(session).or_default().insert(place);
            }
        }
        self.waiting.insert(place, (waiting, lane));
    }

    fn leave_band(&mut self, place: u64) -> Option<(Waiting, Lane)> {
        let (waiting, lane) = self.waiting.remove(&place)?;
        let account = Account::of(&waiting.request, lane);
        if let Some(band) = self.bands.get_mut(&account.band()) {
            band.leave(account.tenant, (waiting.goes_by(), place));
        }
        if lane.is_gated() {
            self.gated_len -= 1;
            if let Some(session) = waiting.request.session
                && let Some(places) = self.gated_by_session.get_mut(&session)
            {
                places.remove(&place);
                if places.is_empty() {
                    self.gated_by_session.remove(&session);
                }
            }
        }
        Some((waiting, lane))
    }

    fn take(&mut self, place: u64) -> Option<(Waiting, Lane)> {
        let (waiting, lane) = self.leave_band(place)?;
        self.places.remove(&waiting.request.id);
        self.deadlines.remove(&(waiting.deadline, place));
        if let Some(due) = waiting.due {
            self.dues.remove(&(due, place));
        }
        Some((waiting, lane))
    }
}

// === impl Band ===

impl Band {
    fn enqueue(&mut self, key: Option<TenantKey>, rank: Rank) {
        let floor = self.floor;
        let tenant = self.tenants.entry(key).or_default();
        let was_first = tenant.waiting.first().copied();
        if was_first.is_none() {
            tenant.served = tenant.served.max(floor);
        }
        tenant.waiting.insert(rank);
        let first = was_first.map_or(rank, |first| first.min(rank));
        if was_first != Some(first) {
            if let Some(was_first) = was_first {
                self.order.remove(&(tenant.served, was_first, key));
            }
            self.order.insert((tenant.served, first, key));
        }
        self.forget();
    }

    fn leave(&mut self, key: Option<TenantKey>, rank: Rank) {
        let Some(tenant) = self.tenants.get_mut(&key) else { return };
        let Some(&first) = tenant.waiting.first() else { return };
        tenant.waiting.remove(&rank);
        if first == rank {
            self.order.remove(&(tenant.served, first, key));
            if let Some(&next) = tenant.waiting.first() {
                self.order.insert((tenant.served, next, key));
            }
        }
    }

    fn charge(&mut self, key: Option<TenantKey>, tokens: i64) {
        let floor = self.floor;
        let tenant = self.tenants.entry(key).or_default();
        let first = tenant.waiting.first().copied();
        if let Some(first) = first {
            self.order.remove(&(tenant.served, first, key));
        }
        tenant.served = if first.is_some() { tenant.served } else { tenant.served.max(floor) };
        tenant.served = tenant.served.saturating_add(tokens);
        if let Some(first) = first {
            self.order.insert((tenant.served, first, key));
        }
        self.forget();
    }

    /// Bounds the table: first drops tenants whose counters would be lifted anyway, then all without queued requests.
    fn forget(&mut self) {
        let len_max = TENANTS_MAX.max(self.order.len() * 2);
        if self.tenants.len() > len_max {
            let floor = self.floor;
            self.tenants.retain(|_, tenant| !tenant.waiting.is_empty() || tenant.served > floor);
        }
        if self.tenants.len() > len_max {
            self.tenants.retain(|_, tenant| !tenant.waiting.is_empty());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn waiting(id: u64, priority: i8, tenant: Option<u64>, session: Option<u64>) -> Waiting {
        let request = SchedulingRequest {
            priority,
            tenant: tenant.map(TenantKey),
            session: session.map(SessionKey),
            ..SchedulingRequest::new(RequestId(id), 1)
        };
        Waiting { request, block_tokens: 16, deadline: Nanos(100), due: None }
    }

    fn push(queue: &mut Queue, id: u64, priority: i8, tenant: u64, lane: Lane) -> Option<u64> {
        let displaced = queue.push(waiting(id, priority, Some(tenant), None), lane);
        displaced.map(|(waiting, _)| waiting.request.id.0)
    }

    fn pop(queue: &mut Queue, may_admit: bool) -> Option<(Waiting, Lane)> {
        let (place, _) = queue.in_order(may_admit).next()?;
        queue.take_turn(place)
    }

    fn drain(queue: &mut Queue, may_admit: bool, tokens: i64) -> Vec<u64> {
        let mut order = Vec::new();
        while let Some((waiting, lane)) = pop(queue, may_admit) {
            queue.charge(Account::of(&waiting.request, lane), tokens);
            order.push(waiting.request.id.0);
        }
        order
    }

    #[test]
    fn order_is_priority_then_continuation_then_least_served_tenant_then_arrival() {
        let mut queue = Queue::new(9);
        push(&mut queue, 0, 0, 1, Lane::New);
        push(&mut queue, 1, 0, 1, Lane::Active);
        push(&mut queue, 2, 0, 1, Lane::Active);
        push(&mut queue, 3, 0, 2, Lane::Active);
        push(&mut queue, 4, -1, 2, Lane::Active);
        push(&mut queue, 5, 1, 2, Lane::New);
        assert_eq!(drain(&mut queue, false, 10), [1, 3, 2, 4]);
        assert_eq!(drain(&mut queue, true, 10), [5, 0]);
    }

    #[test]
    fn an_idle_tenant_has_no_credit() {
        let mut queue = Queue::new(99);
        (0..20).for_each(|id| _ = push(&mut queue, id, 0, 1, Lane::Active));
        for _ in 0..10 {
            let (waiting, lane) = pop(&mut queue, true).expect("the queue is not empty");
            queue.charge(Account::of(&waiting.request, lane), 100);
        }
        (20..30).for_each(|id| _ = push(&mut queue, id, 0, 2, Lane::Active));
        let order = drain(&mut queue, true, 100);
        let (old, new) = order[..10].iter().partition::<Vec<u64>, _>(|&&id| id < 20);
        assert_eq!((old.len(), new.len()), (5, 5), "{order:?}");
    }

    #[test]
    fn when_the_queue_is_full_the_lowest_rank_is_rejected() {
        let mut queue = Queue::new(3);
        (0..3).for_each(|id| assert_eq!(push(&mut queue, id, 0, 1, Lane::New), None));
        assert_eq!(push(&mut queue, 3, 0, 1, Lane::New), Some(3), "the new request itself ranks last");
        assert_eq!(
            push(&mut queue, 4, 0, 2, Lane::New),
            Some(2),
            "the other tenant has three queued, this one none"
        );
        assert_eq!(push(&mut queue, 5, 0, 2, Lane::New), Some(5), "displacing would be no fairer");
        assert_eq!(push(&mut queue, 6, 0, 1, Lane::Active), Some(1), "its conversation is active");
        assert_eq!(push(&mut queue, 7, -1, 3, Lane::Active), Some(7));
        assert_eq!(drain(&mut queue, true, 1), [6, 0, 4]);
    }

    #[test]
    fn what_waits_of_a_conversation_that_has_begun_goes_on() {
        let mut queue = Queue::new(9);
        for (id, session) in [(0, 7), (1, 7), (2, 8)] {
            assert!(queue.push(waiting(id, 0, None, Some(session)), Lane::New).is_none());
        }
        let (first, _) = pop(&mut queue, true).expect("one request is queued");
        let mut moved = 0;
        queue.admit_session(first.request.session.expect("named"), || moved += 1);
        assert_eq!((first.request.id.0, moved), (0, 1));
        assert_eq!(drain(&mut queue, false, 1), [1]);
        assert!(queue.has_gated());
    }

    #[test]
    fn a_target_that_has_passed_gives_its_place_back_and_takes_no_service_from_its_tenant() {
        let mut queue = Queue::new(9);
        let targeted = |id, tenant, due| Waiting { due, ..waiting(id, 0, Some(tenant), None) };
        for (id, due) in [(0, None), (1, Some(Nanos(30))), (2, Some(Nanos(20))), (3, None)] {
            assert!(queue.push(targeted(id, 1, due), Lane::Active).is_none());
        }
        let order =
            |queue: &Queue| queue.in_order(true).map(|(_, waiting)| waiting.request.id.0).collect::<Vec<_>>();
        assert_eq!(order(&queue), [2, 1, 0, 3], "by target, then by arrival");
        let missed = queue.first_missed(Nanos(20)).map(|(place, request)| (place, request.id.0));
        assert_eq!(missed, Some((2, 2)));
        queue.miss(2);
        assert_eq!((queue.first_missed(Nanos(29)).is_none(), order(&queue)), (true, vec![1, 0, 2, 3]));
        // The other tenant is served, and this one keeps its lead though its only request moves.
        let mut queue = Queue::new(9);
        queue.push(targeted(0, 1, Some(Nanos(20))), Lane::Active);
        for id in 1..4 {
            queue.push(targeted(id, 2, Some(Nanos(10))), Lane::Active);
        }
        for _ in 0..2 {
            let place = queue.in_order(true).find(|(_, waiting)| waiting.request.id.0 > 0).expect("one").0;
            let (out, lane) = queue.take_turn(place).expect("it is queued");
            queue.charge(Account::of(&out.request, lane), 100);
        }
        queue.miss(0);
        assert_eq!(order(&queue), [0, 3]);
        queue.charge(Account::of(&waiting(0, 0, Some(1), None).request, Lane::Active), 150);
        assert_eq!(order(&queue), [0, 3], "150 are fewer than 200");
    }

    #[derive(Clone, Debug)]
    enum Act {
        Push {
            tenant: u64,
            priority: i8,
            begins: bool,
            session: Option<u64>,
            patience: u64,
            target: Option<u64>,
        },
        Pop {
            may_admit: bool,
            tokens: i64,
        },
        Correct {
            popped: usize,
            tokens: i64,
        },
        Cancel(u64),
        Wait(u64),
    }

    /// Largest charge of one request.
    const U: i64 = 100;

    fn acts() -> impl Strategy<Value = Vec<Act>> {
        // Runs of pushes keep tenants queued for long, which the bound is about.
        let session = prop::option::weighted(0.3, 0u64..3);
        let times = (1u64..400, prop::option::of(0u64..500));
        let push = (0u64..3, 0i8..2, prop::bool::weighted(0.3), session, times).prop_map(
            |(tenant, priority, begins, session, (patience, target))| Act::Push {
                tenant,
                priority,
                begins,
                session: session.filter(|_| begins),
                patience,
                target,
            },
        );
        let act = prop_oneof![
            10 => push,
            8 => (any::<bool>(), 0..=U).prop_map(|(may_admit, tokens)| Act::Pop { may_admit, tokens }),
            1 => (0usize..50, -20i64..20).prop_map(|(popped, tokens)| Act::Correct { popped, tokens }),
            1 => (0u64..300).prop_map(Act::Cancel),
            1 => (0u64..20).prop_map(Act::Wait),
        ];
        prop::collection::vec(act, 1..400)
    }

    /// Service of two tenants that are both queued.
    #[derive(Clone, Copy, Default)]
    struct Race {
        ahead: i64,
        least: i64,
        most: i64,
        corrected: i64,
    }

    /// Account, deadline, session and target of each queued request.
    type Model = BTreeMap<u64, (Account, Nanos, Option<u64>, Option<Nanos>)>;

    fn waits(model: &Model, account: Account) -> bool {
        model.values().any(|&(other, ..)| other == account)
    }

    proptest! {
        /// Invariant: Queued tenants get equal service, to within the two largest requests; of a tenant's requests of one priority and lane, the one with the earliest deadline is dequeued first: its target for the first token while that has not passed, else its timeout.
        ///
        /// No request is lost or duplicated, the dequeued request is the one whose turn it is, and no tenant that stays
        /// queued is served more than two largest requests, plus corrections, beyond another.
        #[test]
        fn whatever_happens_two_tenants_that_wait_are_served_alike(acts in acts(), corrections: bool) {
            let mut queue = Queue::new(40);
            let mut model = Model::new();
            let mut races: BTreeMap<(i8, Lane, u64, u64), Race> = BTreeMap::new();
            let (mut now, mut next, mut popped) = (Nanos(0), 0, Vec::new());
            for act in acts {
                let mut charged = None;
                match act {
                    Act::Push { tenant, priority, begins, session, patience, target } => {
                        let lane = if begins { Lane::New } else { Lane::Active };
                        let mut newcomer = waiting(next, priority, Some(tenant), session);
                        newcomer.deadline = now + Nanos(patience);
                        newcomer.due = target.map(|most| now + Nanos(most));
                        let account = Account::of(&newcomer.request, lane);
                        model.insert(next, (account, newcomer.deadline, session, newcomer.due));
                        next += 1;
                        let full = queue.len() == 40;
                        let out = queue.push(newcomer, lane);
                        prop_assert_eq!(out.is_some(), full);
                        if let Some((out, _)) = out {
                            let (gone, ..) = model.remove(&out.request.id.0).expect("it was queued");
                            let last = model.values().map(|(account, ..)| account.band()).max();
                            prop_assert!(Some(gone.band()) >= last, "the last band is displaced");
                        }
                    }
                    Act::Pop { may_admit, tokens } => {
                        let may = |account: &Account| may_admit || account.lane == Lane::Active;
                        let best = model.values().map(|(account, ..)| *account).filter(may).map(Account::band).min();
                        let Some((out, lane)) = pop(&mut queue, may_admit) else {
                            prop_assert_eq!(best, None);
                            continue;
                        };
                        let account = Account::of(&out.request, lane);
                        prop_assert_eq!(Some(account.band()), best);
                        let own = model.iter().filter(|(_, (other, ..))| *other == account);
                        let goes_by = own.map(|(&id, &(_, deadline, _, due))| (deadline.min(due.unwrap_or(deadline)), id));
                        let first = goes_by.min().map(|(_, id)| id);
                        prop_assert_eq!(first, Some(out.request.id.0), "the earliest deadline of a tenant");
                        let (.., session, _) = model.remove(&out.request.id.0).expect("it was queued");
                        if let Some(session) = session.filter(|_| lane == Lane::New) {
                            let mut moved = 0;
                            queue.admit_session(SessionKey(session), || moved += 1);
                            for (account, _, other, _) in model.values_mut() {
                                if *other == Some(session) && account.lane == Lane::New {
                                    account.lane = Lane::Active;
                                    moved -= 1;
                                }
                            }
                            prop_assert_eq!(moved, 0);
                        }
                        queue.charge(account, tokens);
                        popped.push(account);
                        charged = Some((account, tokens, 0));
                    }
                    Act::Correct { popped: at, tokens } => {
                        if let Some(&account) = popped.get(at).filter(|_| corrections) {
                            queue.charge(account, tokens);
                            charged = Some((account, tokens, tokens.abs()));
                        }
                    }
                    Act::Cancel(id) => {
                        let known = model.remove(&id).is_some();
                        prop_assert_eq!(queue.contains(RequestId(id)), known);
                        prop_assert_eq!(queue.remove(RequestId(id)).is_some(), known);
                    }
                    Act::Wait(span) => {
                        now += Nanos(span);
                        while let Some((place, request)) = queue.first_missed(now) {
                            let (.., due) = model.get_mut(&request.id.0).expect("it is queued");
                            prop_assert!(due.take().is_some_and(|due| due <= now));
                            queue.miss(place);
                        }
                        prop_assert!(model.values().all(|&(.., due)| due.is_none_or(|due| due > now)));
                        while let Some((out, _)) = queue.pop_expired(now) {
                            let (_, deadline, ..) = model.remove(&out.request.id.0).expect("it was queued");
                            prop_assert!(deadline <= now);
                        }
                        let times = |&(_, deadline, _, due): &(_, Nanos, _, Option<Nanos>)| {
                            deadline.min(due.unwrap_or(deadline))
                        };
                        let next = model.values().map(times).min();
                        prop_assert!(next.is_none_or(|next| next > now));
                        prop_assert_eq!(queue.next_deadline(), next);
                    }
                }
                prop_assert_eq!(queue.len(), model.len());
                let begins = model.values().any(|(account, ..)| account.lane == Lane::New);
                prop_assert_eq!(queue.has_gated(), begins);
                for priority in 0..2 {
                    for lane in [Lane::Active, Lane::New] {
                        for (a, b) in [(0, 1), (0, 2), (1, 2)] {
                            let of = |tenant| Account { priority, lane, tenant: Some(TenantKey(tenant)) };
                            let race = races.entry((priority, lane, a, b)).or_default();
                            if !(waits(&model, of(a)) && waits(&model, of(b))) {
                                *race = Race::default();
                                continue;
                            }
                            let Some((account, tokens, corrected)) = charged else { continue };
                            race.corrected += if account.band() == of(a).band() { corrected } else { 0 };
                            race.ahead += tokens * i64::from(account == of(a)) - tokens * i64::from(account == of(b));
                            (race.least, race.most) = (race.least.min(race.ahead), race.most.max(race.ahead));
                            prop_assert!(race.most - race.least <= 2 * U + race.corrected, "{:?}", account);
                        }
                    }
                }
            }
            // No request is left behind.
            let mut left: Vec<u64> = drain(&mut queue, true, 1);
            left.sort_unstable();
            prop_assert!(left.iter().eq(model.keys()));
            prop_assert!(queue.deadlines.is_empty() && queue.dues.is_empty() && queue.places.is_empty() && queue.gated_by_session.is_empty());
        }
    }
}
