//! The gateways in front of a fleet: a router each, which know the same endpoints by the same ids. Clients' requests go to
//! them in turns, as a load balancer sends them, and each tells the others what it places.
//!
//! A gateway may die, and later be replaced by a new one; a partition may keep news from some of the others; and each has a
//! clock of its own, so that nothing may depend on comparing theirs.
//!
//! With [cells](super::cells) each gateway belongs to one, and places requests on its endpoints only.

use std::sync::Arc;

use kvlane_core::cache_accuracy::Feed;
use kvlane_core::endpoint::{EndpointId, Pool};
use kvlane_core::event::KvEvent;
use kvlane_core::replica::{ALL_EVERY, News, ReplicaId};
use kvlane_core::request::RequestId;
use kvlane_core::rng::Rng;
use kvlane_core::router::{self, Router};
use kvlane_core::scheduler::{Input, Output};
use kvlane_core::time::Nanos;

use super::cells::CellsConfig;
use super::{Event, World};
use crate::fault::Side;

/// The gateways, and their exchange.
#[derive(Clone, Debug, PartialEq)]
pub struct GatewaysConfig {
    /// How many, of each cell; 0 counts as one.
    pub count: u16,
    /// Cells behind a front tier; `None` for one fleet without a front tier.
    pub cells: Option<CellsConfig>,
    /// How they tell each other what they place; `None` if they do not.
    pub exchange: Option<Exchange>,
    /// Largest difference between two gateways' clocks.
    pub skew: Nanos,
    /// Time between two [samples](Sample) of their loads, if any are taken.
    pub sample_every: Option<Nanos>,
}

/// How gateways tell each other what they place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exchange {
    /// Longest time between two news of a gateway.
    pub every: Nanos,
    /// Shortest time between two news: a placement is told when it has passed. As long as `every`: news comes regularly.
    pub gap: Nanos,
    /// Shortest time from telling to hearing.
    pub delay: Nanos,
    /// Longest time in addition, uniformly drawn: news overtake each other.
    pub jitter: Nanos,
    /// Share of news that is lost.
    pub lost: f64,
    /// Share that arrives twice.
    pub duplicated: f64,
}

/// Requests in flight at one time, as the gateways that live have them in their ledgers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// The time.
    pub at: Nanos,
    /// Requests in flight at all endpoints.
    pub requests: u64,
    /// Those at the endpoint that has most.
    pub requests_max: u64,
    /// Number of endpoints.
    pub endpoints: usize,
    /// By how many requests a gateway's view differs from this, summed over the endpoints: the largest of all gateways.
    pub view_error: u64,
    /// Number of changes of any ledger so far, at least.
    pub changes: u64,
}

/// The gateways' routers.
pub(super) struct Gateways {
    /// Those of all cells, which they are in in turns.
    gateways: Vec<Gateway>,
    /// Number of cells.
    cells: usize,
    /// Whether a front tier is told their prompts.
    is_sketched: bool,
    /// The gateway of each replica id: ids are given in the order of starts.
    homes: Vec<usize>,
    /// The endpoints, to give them ids while no gateway lives.
    endpoints: Pool,
    /// How the endpoints came to be, for a gateway that starts: ids depend on the order.
    changes: Vec<Change>,
    exchange: Option<Exchange>,
    skew: Nanos,
    clocks: Rng,
    /// Partitions in force, by fault.
    partitions: Vec<(usize, [Side; 2])>,
    pub(super) traffic: Traffic,
}

struct Gateway {
    router: Router,
    replica: ReplicaId,
    /// How far its clock is ahead of the world's.
    ahead: Nanos,
    /// Deaths in force.
    deaths: u32,
    /// When it is to tell all loads next.
    all_at: Nanos,
    /// When it has told last, and tells next.
    told_at: Nanos,
    tells_at: Nanos,
}

/// A change of the endpoints.
enum Change {
    Join(Arc<str>),
    Leave(EndpointId),
}

/// News on its way.
pub(super) struct Letter {
    pub(super) at: Nanos,
    pub(super) to: ReplicaId,
    pub(super) news: Arc<News>,
}

/// News exchanged so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// News told, counted once for each gateway that is told.
    pub news: u64,
    /// Loads of endpoints in them.
    pub shares: u64,
    /// Marks of prompts in them.
    pub marks: u64,
    /// Marks in snapshots for gateways that started.
    pub snapshot_marks: u64,
}

impl Default for GatewaysConfig {
    fn default() -> Self {
        Self { count: 1, cells: None, exchange: None, skew: Nanos::ZERO, sample_every: None }
    }
}

// === impl Gateways ===

impl Gateways {
    /// Routers without endpoints. Each has its own seed.
    pub(super) fn new(config: &router::Config, gateways: &GatewaysConfig, seed: u64) -> Self {
        let (count, cells) = (usize::from(gateways.count.max(1)), gateways.cells.as_ref());
        let mut all = Self {
            gateways: Vec::new(),
            cells: cells.map_or(1, |cells| usize::from(cells.count.max(1))),
            is_sketched: cells.is_some_and(|cells| cells.sketches.is_some()),
            homes: Vec::new(),
            endpoints: Pool::default(),
            changes: Vec::new(),
            exchange: gateways.exchange.filter(|_| count > 1),
            skew: gateways.skew,
            clocks: Rng::new(!seed),
            partitions: Vec::new(),
            traffic: Traffic::default(),
        };
        for n in 0..count * all.cells {
            let gateway = all.fresh(config, n);
            all.gateways.push(gateway);
        }
        all
    }

    /// A gateway without endpoints that is about to start in this place.
    fn fresh(&mut self, config: &router::Config, place: usize) -> Gateway {
        let replica = ReplicaId(self.homes.len() as u64);
        self.homes.push(place);
        let mut config = config.clone();
        config.scheduler.seed = config.scheduler.seed.wrapping_add(replica.0 << 32);
        let router = Router::new(config);
        if self.exchange.is_some() || self.is_sketched {
            router.share(replica);
        }
        let ahead = match self.skew {
            Nanos::ZERO => Nanos::ZERO,
            Nanos(skew) => Nanos((skew as f64 * self.clocks.unit()) as u64),
        };
        let never = Nanos::ZERO;
        Gateway { router, replica, ahead, deaths: 0, all_at: never, told_at: never, tells_at: never }
    }

    pub(super) fn count(&self) -> usize {
        self.gateways.len()
    }

    /// Whether there is a gateway in this place, which lives.
    pub(super) fn lives(&self, gateway: usize) -> bool {
        self.gateways.get(gateway).is_some_and(Gateway::lives)
    }

    /// The first that lives from this one on, in turns: of its cell if one does.
    pub(super) fn first_from(&self, gateway: usize) -> Option<usize> {
        let count = self.count();
        let own = (gateway..gateway + count).step_by(self.cells);
        own.chain(gateway..gateway + count).map(|n| n % count).find(|&n| self.lives(n))
    }

    /// The gateway of a cell whose turn it is.
    pub(super) fn in_turn(&self, cell: usize, turn: usize) -> usize {
        turn % (self.count() / self.cells) * self.cells + cell
    }

    /// Whether a gateway places requests on an endpoint: both are of one cell.
    fn serves(&self, gateway: usize, endpoint: EndpointId) -> bool {
        gateway % self.cells == endpoint.slot() % self.cells
    }

    /// The gateways that know what a cell does: one of those that live if they tell each other, otherwise all.
    pub(super) fn tellers(&self, cell: usize) -> Vec<&Router> {
        let of_cell = (cell..self.count()).step_by(self.cells).filter(|&gateway| self.lives(gateway));
        let most = if self.has_exchange() { 1 } else { usize::MAX };
        of_cell.take(most).map(|gateway| self.at(gateway)).collect()
    }

    /// Whether they tell each other what they place.
    pub(super) fn has_exchange(&self) -> bool {
        self.exchange.is_some()
    }

    /// The router of a gateway.
    pub(super) fn at(&self, gateway: usize) -> &Router {
        &self.gateways[gateway].router
    }

    /// A gateway's time.
    pub(super) fn time(&self, gateway: usize, now: Nanos) -> Nanos {
        now + self.gateways[gateway].ahead
    }

    fn living(&self) -> impl Iterator<Item = &Gateway> {
        self.gateways.iter().filter(|gateway| gateway.lives())
    }

    /// The routers of those that live.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Router> {
        self.living().map(|gateway| &gateway.router)
    }

    /// The first time at which one of them waits for a tick.
    pub(super) fn next_deadline(&self) -> Option<Nanos> {
        let deadline = |gateway: &Gateway| {
            let at = gateway.router.read(|scheduler| scheduler.next_deadline())?;
            Some(Nanos(at.0.saturating_sub(gateway.ahead.0)))
        };
        self.living().filter_map(deadline).min()
    }

    /// Time between two news of a gateway, if there is an exchange.
    pub(super) fn exchange_every(&self) -> Option<Nanos> {
        self.exchange.map(|exchange| exchange.every)
    }

    /// The time at which a gateway is to tell what it has placed, if that is before its next news.
    fn tells_sooner(&mut self, gateway: usize, now: Nanos) -> Option<Nanos> {
        let gap = self.exchange?.gap;
        let gateway = &mut self.gateways[gateway];
        let at = now.max(gateway.told_at + gap);
        (at < gateway.tells_at).then(|| {
            gateway.tells_at = at;
            at
        })
    }

    /// The time at which a gateway tells next; none if it is not to tell now.
    fn tells_again(&mut self, gateway: usize, now: Nanos) -> Option<Nanos> {
        let every = self.exchange?.every;
        let gateway = &mut self.gateways[gateway];
        (gateway.tells_at == now).then(|| {
            (gateway.told_at, gateway.tells_at) = (now, now + every);
            gateway.tells_at
        })
    }

    /// A gateway tells its news. News that are lost, or told twice, are drawn.
    pub(super) fn tell(&mut self, gateway: usize, now: Nanos, rng: &mut Rng) -> Vec<Letter> {
        let Some(Exchange { delay, jitter, lost, duplicated, .. }) = self.exchange else { return Vec::new() };
        let from = &mut self.gateways[gateway];
        if !from.lives() {
            return Vec::new();
        }
        let all = from.all_at <= now;
        if all {
            from.all_at = now + ALL_EVERY;
        }
        let news = Arc::new(from.router.tell(all));
        let mut letters = Vec::new();
        for (place, to) in self.gateways.iter().enumerate() {
            if place == gateway || !to.lives() || self.are_parted(gateway, place) {
                continue;
            }
            self.traffic.news += 1;
            self.traffic.shares += news.shares.len() as u64;
            self.traffic.marks += news.prompts.iter().map(|prompt| prompt.marks.len() as u64).sum::<u64>();
            let copies = match rng.unit() {
                drawn if drawn < lost => 0,
                drawn if drawn < lost + duplicated => 2,
                _ => 1,
            };
            for _ in 0..copies {
                let at = now + delay + Nanos((jitter.0 as f64 * rng.unit()) as u64);
                letters.push(Letter { at, to: to.replica, news: news.clone() });
            }
        }
        letters
    }

    /// The replica in this place.
    pub(super) fn replica(&self, gateway: usize) -> ReplicaId {
        self.gateways[gateway].replica
    }

    /// News come to a gateway, if it lives and can be reached.
    pub(super) fn hear(&self, to: ReplicaId, from: ReplicaId, now: Nanos, news: News, out: &mut Vec<Output>) {
        let [at, sender] = [to, from].map(|replica| self.homes[replica.0 as usize]);
        let gateway = &self.gateways[at];
        if gateway.replica == to && gateway.lives() && !self.are_parted(at, sender) {
            gateway.router.hear(now + gateway.ahead, from, news, out);
        }
    }

    // --- partitions and deaths

    fn are_parted(&self, a: usize, b: usize) -> bool {
        let between =
            |(_, [one, other]): &(usize, [Side; 2])| one.has(a) && other.has(b) || one.has(b) && other.has(a);
        a % self.cells != b % self.cells || self.partitions.iter().any(between)
    }

    /// Gateways on one side hear nothing from those on the other.
    pub(super) fn part(&mut self, fault: usize, sides: [Side; 2]) {
        self.partitions.push((fault, sides));
    }

    /// They hear each other again, and first of all loads.
    pub(super) fn join_again(&mut self, fault: usize, now: Nanos) {
        self.partitions.retain(|(of, _)| *of != fault);
        self.tell_all_next(now);
    }

    fn tell_all_next(&mut self, now: Nanos) {
        self.gateways.iter_mut().for_each(|gateway| gateway.all_at = now);
    }

    /// A gateway dies; returns whether it lived.
    pub(super) fn kill(&mut self, gateway: usize) -> bool {
        let Some(gateway) = self.gateways.get_mut(gateway) else { return false };
        gateway.deaths += 1;
        gateway.deaths == 1
    }

    /// A death ends; returns whether another gateway is to start.
    pub(super) fn may_start(&mut self, gateway: usize) -> bool {
        let Some(gateway) = self.gateways.get_mut(gateway) else { return false };
        gateway.deaths -= 1;
        gateway.deaths == 0
    }

    /// A gateway starts where one has died: it knows the endpoints by the same ids, and the prompts that another one knows.
    fn start(&mut self, place: usize, now: Nanos, config: &router::Config, out: &mut Vec<Output>) {
        let mut gateway = self.fresh(config, place);
        gateway.tells_at = self.gateways[place].tells_at;
        let (router, time) = (&gateway.router, now + gateway.ahead);
        for change in &self.changes {
            match change {
                Change::Join(name) => _ = router.join(time, name.clone(), self.cells == 1, false, out),
                Change::Leave(endpoint) => router.leave(time, *endpoint, out),
            }
        }
        let donor = (0..self.count()).find(|&n| n != place && self.lives(n) && !self.are_parted(place, n));
        if let Some(donor) = donor.filter(|_| self.exchange.is_some()) {
            let prompts = self.gateways[donor].router.tell_marks();
            self.traffic.snapshot_marks +=
                prompts.iter().map(|prompt| prompt.marks.len() as u64).sum::<u64>();
            router.hear_marks(time, &prompts);
        }
        self.gateways[place] = gateway;
        self.tell_all_next(now);
    }

    // --- what one of them sees

    /// Steps the router of a gateway, if it lives.
    pub(super) fn step_one(&self, gateway: usize, now: Nanos, input: Input, out: &mut Vec<Output>) {
        if self.lives(gateway) {
            self.at(gateway).step(self.time(gateway, now), input, out);
        }
    }

    /// A gateway sees tokens of an answer.
    pub(super) fn progress(
        &self,
        gateway: usize,
        now: Nanos,
        (request, first, tokens): (RequestId, bool, u32),
        out: &mut Vec<Output>,
    ) {
        if self.lives(gateway) {
            self.at(gateway).progress(self.time(gateway, now), request, first, tokens, out);
        }
    }

    // --- what all of them see

    fn each(&self, now: Nanos, mut see: impl FnMut(&Router, Nanos)) {
        self.living().for_each(|gateway| see(&gateway.router, now + gateway.ahead));
    }

    /// Those that live, and whether they serve an endpoint.
    fn by_cell(&self, endpoint: EndpointId) -> impl Iterator<Item = (&Gateway, bool)> {
        let all = self.gateways.iter().enumerate().filter(|(_, gateway)| gateway.lives());
        all.map(move |(n, gateway)| (gateway, self.serves(n, endpoint)))
    }

    /// Adds an endpoint to all of them.
    pub(super) fn join(
        &mut self,
        now: Nanos,
        name: &Arc<str>,
        healthy: bool,
        out: &mut Vec<Output>,
    ) -> Option<EndpointId> {
        let id = self.endpoints.next_id()?;
        self.endpoints.join(id, name.clone());
        self.changes.push(Change::Join(name.clone()));
        // All routers have seen the same joins and leaves, so the ids are the same.
        for (gateway, serves) in self.by_cell(id) {
            let time = now + gateway.ahead;
            let known = gateway.router.join(time, name.clone(), healthy && serves, false, out);
            assert_eq!(known, Some(id), "all know an endpoint by the same id");
        }
        Some(id)
    }

    pub(super) fn leave(&mut self, now: Nanos, endpoint: EndpointId, out: &mut Vec<Output>) {
        self.endpoints.leave(endpoint);
        self.changes.push(Change::Leave(endpoint));
        self.each(now, |router, time| router.leave(time, endpoint, out));
    }

    pub(super) fn forget(&self, now: Nanos, endpoint: EndpointId, out: &mut Vec<Output>) {
        self.each(now, |router, time| router.forget(time, endpoint, out));
    }

    pub(super) fn configure(&self, now: Nanos, config: &router::Config, out: &mut Vec<Output>) {
        self.each(now, |router, time| router.configure(time, config.clone(), out));
    }

    pub(super) fn set_feed(&self, now: Nanos, endpoint: EndpointId, feed: Feed, out: &mut Vec<Output>) {
        self.each(now, |router, time| router.set_feed(time, endpoint, feed, out));
    }

    /// All of its cell read an engine's KV event.
    pub(super) fn apply(&self, endpoint: EndpointId, event: &KvEvent) {
        let of_cell = self.by_cell(endpoint).filter(|(_, serves)| *serves);
        of_cell.for_each(|(gateway, _)| _ = gateway.router.apply(endpoint, event));
    }

    /// All of them see what is not about one request; endpoints of other cells stay unhealthy.
    pub(super) fn step(&self, now: Nanos, input: &Input, out: &mut Vec<Output>) {
        if let Input::Health { endpoint, healthy: true } = *input {
            for (gateway, healthy) in self.by_cell(endpoint) {
                gateway.router.step(now + gateway.ahead, Input::Health { endpoint, healthy }, out);
            }
            return;
        }
        self.each(now, |router, time| router.step(time, input.clone(), out));
    }

    // --- samples

    /// The ledgers now; `changes` is the number of their changes so far.
    fn sample(&self, at: Nanos, changes: u64) -> Sample {
        let (mut truth, mut views) = (Vec::new(), Vec::new());
        for router in self.iter() {
            router.read(|scheduler| {
                let mut view = Vec::new();
                for endpoint in scheduler.pool().endpoints() {
                    let slot = endpoint.id.slot();
                    truth.resize(truth.len().max(slot + 1), 0_u64);
                    view.resize(slot + 1, 0_u64);
                    truth[slot] += u64::from(endpoint.load.in_flight.requests);
                    view[slot] = u64::from(endpoint.in_flight().requests);
                }
                views.push(view);
            });
        }
        let error = |view: &Vec<u64>| truth.iter().zip(view).map(|(a, b)| a.abs_diff(*b)).sum();
        Sample {
            at,
            requests: truth.iter().sum(),
            requests_max: truth.iter().copied().max().unwrap_or(0),
            endpoints: self.endpoints.endpoints().count(),
            view_error: views.iter().map(error).max().unwrap_or(0),
            changes,
        }
    }
}

// === impl Gateway ===

impl Gateway {
    fn lives(&self) -> bool {
        self.deaths == 0
    }
}

// === impl World ===

impl World {
    /// Schedules the first news of each gateway, and the first sample.
    pub(super) fn begin_exchange(&mut self) {
        if let Some(every) = self.gateways.exchange_every() {
            let count = self.gateways.count() as u64;
            // They have not begun at the same moment.
            let at = |n| Nanos(every.0 / count * n);
            for n in 0..count {
                self.gateways.gateways[n as usize].tells_at = at(n);
                self.clock.schedule(at(n), Event::Exchange { gateway: n as u16 });
            }
        }
        if let Some(every) = self.config.gateways.sample_every {
            self.clock.schedule(every, Event::Sample);
        }
    }

    /// A gateway has placed a request, of which the others are to hear soon.
    pub(super) fn placed(&mut self, gateway: usize) {
        let now = self.now();
        if let Some(at) = self.gateways.tells_sooner(gateway, now) {
            self.clock.schedule(at, Event::Exchange { gateway: gateway as u16 });
        }
    }

    /// A gateway tells the others its news, and will again, unless it has told them before.
    pub(super) fn exchange(&mut self, gateway: u16) {
        let (now, from) = (self.now(), self.gateways.replica(gateway.into()));
        let Some(next) = self.gateways.tells_again(gateway.into(), now) else { return };
        for Letter { at, to, news } in self.gateways.tell(gateway.into(), now, &mut self.rng) {
            self.clock.schedule(at, Event::News { to, from, news });
        }
        self.clock.schedule(next, Event::Exchange { gateway });
    }

    /// Takes a sample, and will again.
    pub(super) fn sample(&mut self) {
        let now = self.now();
        let sample = self.gateways.sample(now, self.ledger_changes);
        self.samples.push(sample);
        if let Some(every) = self.config.gateways.sample_every {
            self.clock.schedule(now + every, Event::Sample);
        }
    }

    /// A gateway has died. What was its last request at an endpoint that is to leave may have been the last of all.
    pub(super) fn end_gateway(&mut self, gateway: usize) {
        if self.gateways.kill(gateway) {
            let endpoints: Vec<EndpointId> = self.nodes.iter().map(|node| node.id).collect();
            endpoints.into_iter().for_each(|endpoint| self.drained(endpoint));
        }
    }

    /// Another gateway starts in the place of one that died, and finds the fleet as it is.
    pub(super) fn begin_gateway(&mut self, gateway: usize) {
        if !self.gateways.may_start(gateway) {
            return;
        }
        let now = self.now();
        let ruled = self.config.rules.is_some();
        self.gateways.start(gateway, now, &self.current_config(), &mut self.outputs);
        for node in self.nodes.iter().filter(|node| !node.active_faults.away) {
            let endpoint = node.id;
            let healthy = if ruled { node.found.healthy } else { node.alive() };
            let healthy = healthy && self.gateways.serves(gateway, endpoint);
            let inputs = [
                Input::Assigned { endpoint, part: node.part },
                Input::Health { endpoint, healthy },
                Input::Draining { endpoint, draining: node.is_draining() },
            ];
            for input in inputs {
                self.gateways.step_one(gateway, now, input, &mut self.outputs);
            }
            if node.engine.config().kv_events {
                let feed = if ruled && !node.has_feed() { Feed::Syncing } else { Feed::Live };
                let time = self.gateways.time(gateway, now);
                self.gateways.at(gateway).set_feed(time, endpoint, feed, &mut self.outputs);
            }
        }
    }
}
