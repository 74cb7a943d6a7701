//! Limits over several routers, behind a load balancer that knows no keys.
//!
//! Each router tells, for each key, the total that it has charged, and its requests in flight: values with one writer, of
//! which a later one replaces an earlier one, so that loss, repetition and order of news do not matter. A router charges
//! what others tell to its own usage of the key.
//!
//! Between two news the routers do not know of each other's admissions. So a router assumes that the others have admitted
//! in this time what it has admitted itself, times the usual proportion: how often others were
//! asked lately for this key, over how often it was (for a key without a history, for all keys that it was asked for; at
//! first, the number of others). A
//! client that stays with one router is not limited by the others, and one that is spread over all is. Near the end
//! of a limit a router waits the longer the later its turn is: its place in an order that differs from key to key. A
//! request is admitted if
//!
//! ```text
//! its amount + turn × time of two news + proportion × own untold amount ≤ what is left
//! ```
//!
//! with all amounts as times of refill. Where news comes in time, and clients do not change how they are spread, the
//! routers together admit about what one would, and at most one request for each other router more at once; that is
//! paid back by later requests. A router that is alone admits exactly what [`super`] says.

use std::collections::BTreeMap;

use foldhash::fast::FixedState;
use hashbrown::{HashMap, HashSet};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::rate::{MINUTE, Rate};
use super::used::{Spread, Usage, Used};
use crate::replica::ReplicaId;
use crate::time::Nanos;

/// Usage of all keys.
pub(super) type Keys = HashMap<u64, Used, FixedState>;

/// News of one limiter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct News {
    /// The key and the model of its entry in the configuration.
    pub subject: (String, String),
    /// Rises with each news of this limiter.
    pub number: u64,
    /// Usage of the keys where it has changed; of all keys if it was asked for all.
    pub usages: Vec<(u64, Usage)>,
}

/// Requests that an assumption counts as much as, beside those that were seen.
const ASSUMED_OF_KEY: f64 = 8.0;
const ASSUMED_OF_ALL: f64 = 32.0;

/// The other routers, as a limiter knows them.
#[derive(Debug, Default)]
pub(super) struct Replicas {
    own: Option<ReplicaId>,
    peers: BTreeMap<ReplicaId, Peer>,
    /// Keys whose usage has changed since the last news, and between that and the news before.
    changed: HashSet<u64, FixedState>,
    changed_before: HashSet<u64, FixedState>,
    told_at: Nanos,
    /// The time of two news.
    window: Nanos,
    /// Of all keys that came in here.
    spread: Spread,
}

#[derive(Debug)]
struct Peer {
    since: Nanos,
    /// The number of the latest news of each key, and its contents.
    usages: HashMap<u64, (u64, Usage), FixedState>,
}

// === impl Replicas ===

impl Replicas {
    /// The usage of a key changes.
    pub(super) fn note(&mut self, key: u64) {
        if self.own.is_some() {
            self.changed.insert(key);
        }
    }

    /// See [`super::Limiter::set_replicas`].
    pub(super) fn set(
        &mut self,
        keys: &mut Keys,
        now: Nanos,
        own: ReplicaId,
        others: impl Iterator<Item = ReplicaId> + Clone,
    ) {
        self.own = Some(own);
        self.peers.retain(|replica, peer| {
            let lives = others.clone().any(|other| other == *replica);
            if !lives {
                for (key, (_, usage)) in &peer.usages {
                    if let Some(used) = keys.get_mut(key) {
                        used.elsewhere = used.elsewhere.saturating_sub(usage.in_flight);
                    }
                }
            }
            lives
        });
        for other in others {
            self.peers.entry(other).or_insert_with(|| Peer { since: now, usages: HashMap::default() });
        }
    }

    /// See [`super::Limiter::tell`].
    pub(super) fn tell(&mut self, keys: &mut Keys, now: Nanos, all: bool) -> Vec<(u64, Usage)> {
        let Replicas { changed, changed_before, told_at, window, spread, .. } = self;
        *window = (now - *told_at) + (now - *told_at);
        *told_at = now;
        let changed = std::mem::take(changed);
        let before = std::mem::replace(changed_before, changed.clone());
        for key in before.union(&changed) {
            let Some(used) = keys.get_mut(key) else { continue };
            for rate in [&mut used.requests, &mut used.tokens] {
                rate.recent = [Nanos::ZERO, rate.recent[0]];
            }
            let heard = f64::from(used.asked_lately[1]);
            used.entered = [0, used.entered[0]];
            used.asked_lately = [0, used.asked_lately[0]];
            used.spread.add_here(now, heard);
            spread.add_here(now, heard);
        }
        let told = |(key, used): (&u64, &Used)| (*key, used.told(now));
        let mut usages: Vec<_> = if all {
            keys.iter().map(told).collect()
        } else {
            changed.iter().filter_map(|key| Some(told((key, keys.get(key)?)))).collect()
        };
        usages.sort_unstable_by_key(|(key, _)| *key);
        usages
    }

    /// See [`super::Limiter::hear`]. At most `keys_max` keys of the router are remembered.
    pub(super) fn hear(
        &mut self,
        keys: &mut Keys,
        keys_max: usize,
        now: Nanos,
        replica: ReplicaId,
        news: (u64, &[(u64, Usage)]),
    ) {
        let (number, usages) = news;
        let peer = self.peers.entry(replica);
        let peer = peer.or_insert_with(|| Peer { since: now, usages: HashMap::default() });
        for &(key, usage) in usages {
            if peer.usages.len() >= keys_max && !peer.usages.contains_key(&key) {
                // What is heard next counts as heard for the first time.
                let in_flight = |(_, (_, usage)): (&u64, &(u64, Usage))| usage.in_flight > 0;
                peer.usages.retain(|key, known| in_flight((key, known)));
                peer.since = now;
            }
            let known = peer.usages.get(&key).copied();
            if known.is_some_and(|(known, _)| number <= known) {
                continue;
            }
            peer.usages.insert(key, (number, usage));
            let known = known.map(|(_, usage)| usage);
            let used = keys.entry(key).or_insert_with(|| Used::new(now));
            used.elsewhere = used.elsewhere.saturating_add(usage.in_flight);
            used.elsewhere -= known.map_or(0, |known| known.in_flight).min(used.elsewhere);
            // One that is younger than what was heard was forgotten meanwhile.
            let same = known.filter(|known| known.age <= usage.age);
            let is_new = usage.age <= now - peer.since;
            match same.or(is_new.then(Usage::default)) {
                Some(before) => {
                    used.requests.heard(now, before.requests, usage.requests);
                    used.tokens.heard(now, before.tokens, usage.tokens);
                    let asked = usage.asked.saturating_sub(before.asked) as f64;
                    used.spread.add_elsewhere(now, asked);
                    if used.asked > 0 {
                        self.spread.add_elsewhere(now, asked);
                    }
                }
                // When it was charged is not known.
                None => {
                    used.requests.back = used.requests.back.max(now + usage.requests_owed);
                    used.tokens.back = used.tokens.back.max(now + usage.tokens_owed);
                }
            }
        }
    }

    /// How long an amount has to wait because others may have admitted something. `left` is what is left of the limit,
    /// as far as it is known.
    pub(super) fn wait(
        &self,
        now: Nanos,
        key: u64,
        (used, rate): (&Used, &Rate),
        amount: Nanos,
        left: Nanos,
    ) -> Nanos {
        if self.peers.is_empty() {
            return Nanos::ZERO;
        }
        let unheard = Nanos((rate.untold().0 as f64 * self.proportion(now, &used.spread)) as u64);
        let fits =
            |turn: u64| (amount + Nanos(self.window.0.saturating_mul(turn))).min(MINUTE) + unheard <= left;
        if fits(self.peers.len() as u64) || fits(self.turn(key)) {
            Nanos::ZERO
        } else {
            self.window.max(Nanos(1))
        }
    }

    /// Requests that others are likely to have admitted since their last news.
    pub(super) fn unheard(&self, now: Nanos, used: &Used) -> u32 {
        let own = used.entered[0].saturating_add(used.entered[1]);
        if self.peers.is_empty() { 0 } else { (f64::from(own) * self.proportion(now, &used.spread)) as u32 }
    }

    /// Requests that come in elsewhere for each one here.
    fn proportion(&self, now: Nanos, of_key: &Spread) -> f64 {
        let of_all = self.spread.proportion(now, ASSUMED_OF_ALL, self.peers.len() as f64);
        of_key.proportion(now, ASSUMED_OF_KEY, of_all)
    }

    /// Routers whose turn is before this one's.
    fn turn(&self, key: u64) -> u64 {
        let order = |replica: ReplicaId| xxh3_64_with_seed(&key.to_le_bytes(), replica.0);
        let own = self.own.map(order);
        self.peers.keys().filter(|peer| Some(order(**peer)) < own).count() as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Config, Limiter, Permit};
    use super::*;

    /// Routers that tell each other every 20 ms, in turns.
    struct World {
        limiters: Vec<Limiter>,
        now: Nanos,
        /// What was told and has not arrived.
        under_way: Vec<Told>,
        delay: Nanos,
        number: u64,
    }

    /// When news arrives, from whom, and its number.
    type Told = (Nanos, usize, u64, Vec<(u64, Usage)>);

    const KEY: u64 = 7;

    impl World {
        fn new(config: Config, routers: usize, delay: Nanos) -> Self {
            let limiters = (0..routers).map(|_| Limiter::new(config)).collect();
            let mut world = Self { limiters, now: Nanos::ZERO, under_way: Vec::new(), delay, number: 0 };
            world.live(0..routers);
            world.run_until(Nanos::from_secs(1));
            world
        }

        fn live(&mut self, live: std::ops::Range<usize>) {
            for own in live.clone() {
                let others = live.clone().filter(|other| *other != own).map(|other| ReplicaId(other as u64));
                self.limiters[own].set_replicas(self.now, ReplicaId(own as u64), others);
            }
        }

        /// Lets time pass, in steps of a millisecond.
        fn run_until(&mut self, until: Nanos) {
            let (routers, step) = (self.limiters.len() as u64, Nanos::from_millis(1));
            while self.now < until {
                self.now += step;
                for own in 0..routers {
                    if (self.now.0 / step.0 + own * 20 / routers).is_multiple_of(20) {
                        let told = self.limiters[own as usize].tell(self.now, false);
                        self.number += 1;
                        self.under_way.push((self.now + self.delay, own as usize, self.number, told));
                    }
                }
                let (arrived, rest) =
                    std::mem::take(&mut self.under_way).into_iter().partition(|news| news.0 <= self.now);
                self.under_way = rest;
                for (_, from, number, usages) in arrived {
                    for (_, limiter) in self.limiters.iter_mut().enumerate().filter(|(n, _)| *n != from) {
                        limiter.hear(self.now, ReplicaId(from as u64), number, &usages);
                    }
                }
            }
        }

        fn ask(&mut self, at: usize) -> Option<Permit> {
            self.limiters[at].admit(self.now, KEY, 1).ok()
        }
    }

    fn per_minute(requests_per_minute: u64) -> Config {
        Config { requests_per_minute, ..Config::default() }
    }

    /// Requests that are admitted in each second, of `each` that come in every `every_ms`, at the router that `at` says.
    fn admitted(
        config: Config,
        routers: usize,
        (every_ms, each): (u64, u64),
        at: impl Fn(u64) -> usize,
    ) -> Vec<u64> {
        let mut world = World::new(config, routers, Nanos::from_millis(10));
        let start = world.now;
        let mut seconds = vec![0; 90];
        for n in 0..90_000 / every_ms {
            world.run_until(start + Nanos::from_millis(n * every_ms + 1));
            for m in 0..each {
                let router = at(n * each + m) % routers;
                if let Some(permit) = world.ask(router) {
                    seconds[(n * every_ms / 1000) as usize] += 1;
                    let now = world.now;
                    world.limiters[router].settle(now, permit, 1);
                }
            }
        }
        seconds
    }

    /// Invariant: Eight routers together admit in a second at most a tenth more than one would, and one request for each of them; over
    /// time they admit as many.
    #[test]
    fn eight_routers_admit_what_one_would() {
        for (requests_per_minute, load) in
            [(60, (1000, 14)), (600, (50, 5)), (6000, (1, 1)), (60_000, (1, 12))]
        {
            let config = per_minute(requests_per_minute);
            let one = admitted(config, 1, load, |_| 0);
            for spread in [|n| n as usize, |n| (n as usize).wrapping_mul(2_654_435_761) >> 7, |_| 3] {
                let eight = admitted(config, 8, load, spread);
                let limit = (requests_per_minute / 60).max(1);
                let excess = |(eight, one): (&u64, &u64)| *eight <= one.max(&limit) * 11 / 10 + 7;
                assert!(eight.iter().zip(&one).all(excess), "{requests_per_minute}: {eight:?} and {one:?}");
                let [all, alone] = [&eight, &one].map(|seconds| seconds.iter().sum::<u64>());
                assert!(
                    all * 100 >= alone * 97 && all <= alone + 7,
                    "{requests_per_minute}: {all} and {alone}"
                );
            }
        }
    }

    proptest! {
        /// Invariant: Whatever clients do, several routers admit in any interval at most its refill, a tenth more than a minute's worth,
        /// and one request for each of them, if news comes in time.
        #[test]
        fn no_client_uses_more_than_is_restored_anywhere(
            asks in prop::collection::vec((0u64..400, 1u64..30), 1..60),
            routers in 2usize..9,
            requests_per_minute in 40u64..1200,
            delay in 0u64..15,
        ) {
            let mut world = World::new(per_minute(requests_per_minute), routers, Nanos::from_millis(delay));
            let (mut admitted, mut turn) = (Vec::new(), 0);
            for (millis, count) in asks {
                world.run_until(world.now + Nanos::from_millis(millis));
                for _ in 0..count {
                    turn += 1;
                    if let Some(permit) = world.ask(turn % routers) {
                        let now = world.now;
                        admitted.push(now);
                        world.limiters[turn % routers].settle(now, permit, 1);
                    }
                }
            }
            for (first, &from) in admitted.iter().enumerate() {
                for (last, &to) in admitted.iter().enumerate().skip(first) {
                    let refill = (to - from).as_secs_f64() / 60.0 * requests_per_minute as f64;
                    let worth = refill + requests_per_minute as f64 * 1.1 + routers as f64;
                    prop_assert!((last - first + 1) as f64 <= worth, "{} in {:?}", last - first + 1, to - from);
                }
            }
        }

        /// Invariant: Limiters that have heard the latest news of each other know the same usage, in whatever order news came, how often
        /// it was repeated, and which older news was lost.
        #[test]
        fn any_order_repetition_and_loss_of_older_news_give_the_same_usage(
            asks in prop::collection::vec((0usize..3, 0u64..4, any::<bool>()), 1..40),
            order in prop::collection::vec(any::<prop::sample::Index>(), 0..80),
        ) {
            let config = Config { tokens_per_minute: 100_000, ..per_minute(1000) };
            let now = Nanos::from_secs(100);
            let mut tellers: Vec<Limiter> = (0..3).map(|_| Limiter::new(config)).collect();
            let others = |own: u64| (0..4).filter(move |other| *other != own).map(ReplicaId);
            for (own, teller) in (0..).zip(&mut tellers) {
                teller.set_replicas(Nanos::ZERO, ReplicaId(own), others(own));
            }
            let mut told = Vec::new();
            let mut held = Vec::new();
            for (number, (from, key, over)) in (1..).zip(asks) {
                if let Ok(permit) = tellers[from].admit(now, key, 10) {
                    held.push((from, permit));
                }
                if over && let Some((from, permit)) = held.pop() {
                    tellers[from].settle(now, permit, 4);
                }
                for (from, teller) in (0..).zip(&mut tellers) {
                    told.push((ReplicaId(from), number, teller.tell(now, false)));
                }
            }
            let hear = |which: &mut dyn Iterator<Item = usize>| {
                let mut limiter = Limiter::new(config);
                limiter.set_replicas(Nanos::ZERO, ReplicaId(3), others(3));
                for n in which {
                    limiter.hear(now, told[n].0, told[n].1, &told[n].2);
                }
                limiter
            };
            let straight = hear(&mut (0..told.len()));
            // Everything arrives in the end, the latest first: as news of all keys would repair what was lost.
            let mut crooked = hear(&mut order.iter().map(|n| n.index(told.len())).chain((0..told.len()).rev()));
            for key in 0..4 {
                prop_assert_eq!(crooked.standing(now, key), straight.standing(now, key));
                prop_assert_eq!(crooked.used(now, key).elsewhere, straight.used(now, key).elsewhere);
            }
            crooked.set_replicas(now, ReplicaId(3), [].into_iter());
            prop_assert!((0..4).all(|key| crooked.used(now, key).elsewhere == 0), "they have died");
        }
    }

    #[test]
    fn a_router_that_comes_later_knows_what_was_used_before() {
        let (config, now) = (per_minute(60), Nanos::from_secs(100));
        let mut old = Limiter::new(config);
        (0..50).for_each(|_| drop(old.admit(now, KEY, 1)));
        let mut new = Limiter::new(config);
        let later = now + Nanos::from_secs(10);
        for (own, other, limiter) in [(1, 2, &mut old), (2, 1, &mut new)] {
            limiter.set_replicas(later, ReplicaId(own), [ReplicaId(other)].into_iter());
        }
        new.hear(later, ReplicaId(1), 1, &old.tell(later, true));
        assert_eq!(new.standing(later, KEY).requests_left, Some(20), "ten have refilled");
    }
}
