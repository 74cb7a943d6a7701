//! The gateways in front of a fleet: a router each, which know the same endpoints by the same ids. Clients' requests go to
//! them in turns, as a load balancer sends them, and each tells the others what it places.

use std::sync::Arc;

use kvlane_core::cache_accuracy::Feed;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::event::KvEvent;
use kvlane_core::replica::{News, ReplicaId};
use kvlane_core::rng::Rng;
use kvlane_core::router::{self, Router};
use kvlane_core::scheduler::{Input, Output};
use kvlane_core::time::Nanos;

/// Number of gateways, and their exchange.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatewaysConfig {
    /// How many; 0 counts as one.
    pub count: u16,
    /// How they tell each other what they place; `None` if they do not.
    pub exchange: Option<Exchange>,
}

/// How gateways tell each other what they place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exchange {
    /// Time between two news of a gateway.
    pub every: Nanos,
    /// Shortest time from telling to hearing.
    pub delay: Nanos,
    /// Longest time in addition, uniformly drawn: news overtake each other.
    pub jitter: Nanos,
    /// Share of news that is lost.
    pub lost: f64,
    /// Share that arrives twice.
    pub duplicated: f64,
}

/// Time between two news that tell all loads, so that what was lost is made up for.
const ALL_EVERY: Nanos = Nanos::from_secs(1);

/// The gateways' routers.
pub(super) struct Gateways {
    routers: Vec<Router>,
    exchange: Option<Exchange>,
    /// When a gateway is to tell all loads next.
    all_at: Vec<Nanos>,
    pub(super) traffic: Traffic,
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
}

impl Default for GatewaysConfig {
    fn default() -> Self {
        Self { count: 1, exchange: None }
    }
}

// === impl Gateways ===

impl Gateways {
    /// Routers without endpoints. Each has its own seed.
    pub(super) fn new(config: &router::Config, gateways: GatewaysConfig) -> Self {
        let count = gateways.count.max(1);
        let routers = (0..count).map(|n| {
            let mut config = config.clone();
            config.scheduler.seed = config.scheduler.seed.wrapping_add(u64::from(n) << 32);
            Router::new(config)
        });
        let routers: Vec<Router> = routers.collect();
        let exchange = gateways.exchange.filter(|_| count > 1);
        if exchange.is_some() {
            routers.iter().for_each(Router::share);
        }
        Self { routers, exchange, all_at: vec![Nanos::ZERO; usize::from(count)], traffic: Traffic::default() }
    }

    pub(super) fn count(&self) -> usize {
        self.routers.len()
    }

    /// The router of a gateway.
    pub(super) fn at(&self, gateway: usize) -> &Router {
        &self.routers[gateway]
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Router> {
        self.routers.iter()
    }

    /// Time between two news of a gateway, if there is an exchange.
    pub(super) fn exchange_every(&self) -> Option<Nanos> {
        self.exchange.map(|exchange| exchange.every)
    }

    /// A gateway tells its news: to whom they come, and when. News that are lost, or told twice, are drawn.
    pub(super) fn tell(
        &mut self,
        gateway: usize,
        now: Nanos,
        rng: &mut Rng,
    ) -> Vec<(Nanos, usize, Arc<News>)> {
        let Some(Exchange { delay, jitter, lost, duplicated, .. }) = self.exchange else { return Vec::new() };
        let all = self.all_at[gateway] <= now;
        if all {
            self.all_at[gateway] = now + ALL_EVERY;
        }
        let news = Arc::new(self.routers[gateway].tell(all));
        let mut heard = Vec::new();
        for to in (0..self.routers.len()).filter(|to| *to != gateway) {
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
                heard.push((at, to, news.clone()));
            }
        }
        heard
    }

    /// News of one gateway come to another one.
    pub(super) fn hear(&self, to: usize, from: usize, now: Nanos, news: News, out: &mut Vec<Output>) {
        self.routers[to].hear(now, ReplicaId(from as u64), news, out);
    }

    /// Adds an endpoint to all of them.
    pub(super) fn join(
        &self,
        now: Nanos,
        name: &Arc<str>,
        healthy: bool,
        out: &mut Vec<Output>,
    ) -> Option<EndpointId> {
        // All routers have seen the same joins and leaves, so the ids are the same.
        self.routers.iter().fold(None, |_, router| router.join(now, name.clone(), healthy, false, out))
    }

    pub(super) fn leave(&self, now: Nanos, endpoint: EndpointId, out: &mut Vec<Output>) {
        self.routers.iter().for_each(|router| router.leave(now, endpoint, out));
    }

    pub(super) fn forget(&self, now: Nanos, endpoint: EndpointId, out: &mut Vec<Output>) {
        self.routers.iter().for_each(|router| router.forget(now, endpoint, out));
    }

    pub(super) fn configure(&self, now: Nanos, config: &router::Config, out: &mut Vec<Output>) {
        self.routers.iter().for_each(|router| router.configure(now, config.clone(), out));
    }

    pub(super) fn set_feed(&self, now: Nanos, endpoint: EndpointId, feed: Feed, out: &mut Vec<Output>) {
        self.routers.iter().for_each(|router| router.set_feed(now, endpoint, feed, out));
    }

    /// All of them read an engine's KV event.
    pub(super) fn apply(&self, endpoint: EndpointId, event: &KvEvent) {
        self.routers.iter().for_each(|router| _ = router.apply(endpoint, event));
    }

    /// All of them see what is not about one request.
    pub(super) fn step(&self, now: Nanos, input: &Input, out: &mut Vec<Output>) {
        self.routers.iter().for_each(|router| router.step(now, input.clone(), out));
    }
}
