//! Rate limits and concurrency limits per key: requests per minute, tokens per minute, concurrent requests.
//!
//! An unused key may use a minute's worth at once; after that, its limit refills at a constant rate. Tokens are charged
//! at admission, by the expected number, and corrected when the request is over. Since a token rate is no limit on
//! prompt length, a request of more than a minute's worth is admitted when the key has no other charge, and the key's
//! next request waits until that charge has refilled.
//!
//! Each rate is stored as the time at which all usage will have refilled (the generic cell rate algorithm of ATM Forum
//! TM-4.0, section 4.4.2, with a minute as its tolerance), so that an unused key need not be stored.

mod rate;
mod replicas;
mod used;

use serde::{Deserialize, Serialize};

use self::rate::{MINUTE, Rate, left, span, wait};
pub use self::replicas::News;
use self::replicas::{Keys, Replicas};
pub use self::used::Usage;
use self::used::Used;
use crate::replica::ReplicaId;
use crate::time::Nanos;

/// Number of keys below which idle keys are not collected.
const KEYS_MIN: usize = 1024;

/// Limits of each key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Requests per minute; 0 is no limit.
    pub requests_per_minute: u64,
    /// Tokens of prompts and answers per minute; 0 is no limit.
    pub tokens_per_minute: u64,
    /// Concurrent requests; 0 is no limit.
    pub concurrent_requests: u32,
    /// Keys remembered while none of their requests is in flight. Beyond that, the keys with the least usage are reset.
    pub keys_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { requests_per_minute: 0, tokens_per_minute: 0, concurrent_requests: 0, keys_max: 65_536 }
    }
}

/// Which limit a request exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// [`Config::requests_per_minute`].
    Requests,
    /// [`Config::tokens_per_minute`].
    Tokens,
    /// [`Config::concurrent_requests`].
    Concurrency,
}

/// A request exceeds a limit of its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exceeded {
    /// The limit.
    pub kind: Kind,
    /// Time after which it fits, without other requests; 0 if it fits once another request ends.
    pub retry_after: Nanos,
}

/// An admitted request. It counts as in flight until [`Limiter::settle`] or [`Limiter::cancel`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a request in flight counts until it is settled"]
pub struct Permit {
    key: u64,
    /// What it was charged.
    requests: u64,
    tokens: u64,
    /// When its charge will have refilled, without correction.
    requests_back: Nanos,
    tokens_back: Nanos,
}

/// A key's remaining limits, as reported in response headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Requests that would be admitted at once; `None` without a limit.
    pub requests_left: Option<u64>,
    /// Time until all of its requests have refilled.
    pub requests_reset: Nanos,
    /// Tokens that would be admitted at once; `None` without a limit.
    pub tokens_left: Option<u64>,
    /// Time until all of its tokens have refilled.
    pub tokens_reset: Nanos,
    /// Its requests in flight.
    pub in_flight: u32,
}

/// Usage of many keys under one set of limits.
#[derive(Debug)]
pub struct Limiter {
    config: Config,
    keys: Keys,
    /// Number of keys at which idle ones are collected.
    sweep_len: usize,
    replicas: Replicas,
}

// === impl Kind ===

impl Kind {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::Tokens => "tokens",
            Self::Concurrency => "concurrency",
        }
    }
}

// === impl Limiter ===

impl Limiter {
    /// A limiter without any usage.
    pub fn new(config: Config) -> Self {
        Self { config, keys: Keys::default(), sweep_len: KEYS_MIN, replicas: Replicas::default() }
    }

    /// Limits of each key.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Changes the limits. A key's usage stays the same share of a minute.
    pub fn configure(&mut self, config: Config) {
        self.config = config;
    }

    /// Number of remembered keys.
    pub fn keys(&self) -> usize {
        self.keys.len()
    }

    /// Admitted requests that are neither settled nor cancelled.
    pub fn in_flight(&self) -> u64 {
        self.keys.values().map(|used| u64::from(used.in_flight)).sum()
    }

    /// Admits a request that is expected to take `tokens`, prompt and answer together.
    ///
    /// # Errors
    /// The limit it exceeds; the request then uses nothing. If it exceeds several, the one with the longest wait.
    pub fn admit(&mut self, now: Nanos, key: u64, tokens: u64) -> Result<Permit, Exceeded> {
        let Config { requests_per_minute, tokens_per_minute, .. } = self.config;
        self.ask(key);
        let used = self.used(now, key);
        let waits = [
            (Kind::Tokens, self.wait(now, key, (&used, &used.tokens), tokens, tokens_per_minute)),
            (Kind::Requests, self.wait(now, key, (&used, &used.requests), 1, requests_per_minute)),
        ];
        let [longest, other] = waits;
        let (kind, retry_after) = if other.1 > longest.1 { other } else { longest };
        if retry_after > Nanos::ZERO {
            return Err(Exceeded { kind, retry_after });
        }
        self.enter(now, key, 1, tokens)
    }

    /// Admits a request that waits and may never be sent: it counts as in flight and is not charged to the rates.
    ///
    /// # Errors
    /// As many of the key's requests are in flight as may.
    pub fn hold(&mut self, now: Nanos, key: u64) -> Result<Permit, Exceeded> {
        self.enter(now, key, 0, 0)
    }

    fn enter(&mut self, now: Nanos, key: u64, requests: u64, tokens: u64) -> Result<Permit, Exceeded> {
        let Config { requests_per_minute, tokens_per_minute, concurrent_requests, .. } = self.config;
        let mut used = self.used(now, key);
        let in_flight = used.requests_now().saturating_add(self.replicas.unheard(now, &used));
        if concurrent_requests > 0 && in_flight >= concurrent_requests {
            return Err(Exceeded { kind: Kind::Concurrency, retry_after: Nanos::ZERO });
        }
        used.requests.charge(now, span(requests, requests_per_minute));
        used.tokens.charge(now, span(tokens, tokens_per_minute));
        used.in_flight += 1;
        used.entered[0] += 1;
        self.keys.insert(key, used);
        self.replicas.note(key);
        self.forget(now);
        let (requests_back, tokens_back) = (used.requests.back, used.tokens.back);
        Ok(Permit { key, requests, tokens, requests_back, tokens_back })
    }

    /// A request asks, which may be refused.
    fn ask(&mut self, key: u64) {
        if let Some(used) = self.keys.get_mut(&key) {
            used.asked += 1;
            used.asked_lately[0] = used.asked_lately[0].saturating_add(1);
            self.replicas.note(key);
        }
    }

    fn used(&self, now: Nanos, key: u64) -> Used {
        self.keys.get(&key).copied().unwrap_or_else(|| Used::new(now))
    }

    /// Time until `amount` fits.
    fn wait(&self, now: Nanos, key: u64, used: (&Used, &Rate), amount: u64, per_minute: u64) -> Nanos {
        let back = used.1.back;
        match wait(now, back, amount, per_minute) {
            Nanos::ZERO if per_minute > 0 => {
                self.replicas.wait(now, key, used, span(amount, per_minute), MINUTE - (back - now))
            }
            wait => wait,
        }
    }

    /// A request is over and took `tokens`.
    pub fn settle(&mut self, now: Nanos, permit: Permit, tokens: u64) {
        let per_minute = self.config.tokens_per_minute;
        let Some(used) = self.keys.get_mut(&permit.key) else { return };
        used.in_flight = used.in_flight.saturating_sub(1);
        used.entered[0] = used.entered[0].saturating_sub(1);
        let (expected, took) = (span(permit.tokens, per_minute), span(tokens, per_minute));
        if took > expected {
            used.tokens.charge(now, took - expected);
        } else {
            used.tokens.give_back(now, permit.tokens_back, expected - took);
        }
        self.replicas.note(permit.key);
    }

    /// An admitted request is not sent, because another limit rejects it. Its charge is returned.
    pub fn cancel(&mut self, now: Nanos, permit: Permit) {
        let requests = span(permit.requests, self.config.requests_per_minute);
        if let Some(used) = self.keys.get_mut(&permit.key) {
            used.requests.give_back(now, permit.requests_back, requests);
        }
        self.settle(now, permit, 0);
    }

    /// The other routers that were heard lately. What one that is missing had in flight no longer counts.
    pub fn set_replicas(
        &mut self,
        now: Nanos,
        own: ReplicaId,
        others: impl Iterator<Item = ReplicaId> + Clone,
    ) {
        self.replicas.set(&mut self.keys, now, own, others);
    }

    /// Takes the news for other routers: usage of keys where it has changed since the last, or of all.
    pub fn tell(&mut self, now: Nanos, all: bool) -> Vec<(u64, Usage)> {
        self.replicas.tell(&mut self.keys, now, all)
    }

    /// Takes over the news of another router, as far as it is newer than what was heard.
    pub fn hear(&mut self, now: Nanos, replica: ReplicaId, number: u64, usages: &[(u64, Usage)]) {
        let keys_max = self.config.keys_max;
        self.replicas.hear(&mut self.keys, keys_max, now, replica, (number, usages));
        self.forget(now);
    }

    /// A key's remaining limits.
    pub fn standing(&self, now: Nanos, key: u64) -> Standing {
        let used = self.used(now, key);
        Standing {
            requests_left: left(now, used.requests.back, self.config.requests_per_minute),
            requests_reset: used.requests.back - now,
            tokens_left: left(now, used.tokens.back, self.config.tokens_per_minute),
            tokens_reset: used.tokens.back - now,
            in_flight: used.in_flight,
        }
    }

    /// Removes keys without usage and, if that does not suffice, those with the least usage.
    fn forget(&mut self, now: Nanos) {
        if self.keys.len() < self.sweep_len.min(self.config.keys_max.saturating_add(1)) {
            return;
        }
        self.keys.retain(|_, used| used.requests_now() > 0 || used.back() > now);
        let keys_max = self.config.keys_max;
        if self.keys.len() > keys_max {
            let idle = self.keys.values().filter(|used| used.requests_now() == 0);
            let mut back: Vec<Nanos> = idle.map(Used::back).collect();
            // Removes an eighth more than necessary, so that the next call need not search again.
            let excess = (self.keys.len() - keys_max + keys_max / 8).min(back.len());
            if let Some(nth) = excess.checked_sub(1) {
                let (_, &mut last, _) = back.select_nth_unstable(nth);
                self.keys.retain(|_, used| used.requests_now() > 0 || used.back() > last);
            }
        }
        self.sweep_len = (self.keys.len() * 2).max(KEYS_MIN);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Nanos = Nanos::from_secs(1);

    fn limiter(requests_per_minute: u64, tokens_per_minute: u64, concurrent_requests: u32) -> Limiter {
        Limiter::new(Config {
            requests_per_minute,
            tokens_per_minute,
            concurrent_requests,
            ..Config::default()
        })
    }

    #[test]
    fn a_request_that_waits_counts_as_in_flight_and_is_charged_to_no_rate() {
        let mut limiter = limiter(2, 60, 2);
        let (one, two) = (limiter.hold(Nanos::ZERO, 1), limiter.hold(Nanos::ZERO, 1));
        assert_eq!(refused(limiter.hold(Nanos::ZERO, 1)), (Kind::Concurrency, Nanos::ZERO));
        assert_eq!(refused(limiter.admit(Nanos::ZERO, 1, 1)), (Kind::Concurrency, Nanos::ZERO));
        assert!(limiter.hold(Nanos::ZERO, 2).is_ok(), "another key has its own limit");
        let all = limiter.standing(Nanos::ZERO, 1);
        assert_eq!((all.requests_left, all.tokens_left, all.in_flight), (Some(2), Some(60), 2));
        limiter.cancel(Nanos::ZERO, one.expect("room for two"));
        let sent = limiter.admit(Nanos::ZERO, 1, 10).expect("room for it");
        limiter.cancel(Nanos::ZERO, two.expect("room for two"));
        let left = limiter.standing(Nanos::ZERO, 1);
        assert_eq!(
            (left.requests_left, left.tokens_left, left.in_flight),
            (Some(1), Some(50), 1),
            "what was not charged is not returned"
        );
        limiter.settle(Nanos::ZERO, sent, 10);
        assert_eq!(limiter.standing(Nanos::ZERO, 1).in_flight, 0);
    }

    fn refused(result: Result<Permit, Exceeded>) -> (Kind, Nanos) {
        let Exceeded { kind, retry_after } = result.expect_err("beyond the limit");
        (kind, retry_after)
    }

    #[test]
    fn a_minutes_worth_at_once_and_then_as_it_comes_back() {
        let mut limiter = limiter(60, 0, 0);
        let now = Nanos::from_secs(7);
        for _ in 0..60 {
            let permit = limiter.admit(now, 1, 0).expect("within the limit");
            limiter.settle(now, permit, 0);
        }
        assert_eq!(refused(limiter.admit(now, 1, 0)), (Kind::Requests, SECOND));
        assert!(limiter.admit(now, 2, 0).is_ok(), "another key has its own limit");
        let soon = now + SECOND;
        assert_eq!(refused(limiter.admit(soon - Nanos(1), 1, 0)), (Kind::Requests, Nanos(1)));
        assert!(limiter.admit(soon, 1, 0).is_ok());
        assert_eq!(limiter.standing(soon, 1).requests_left, Some(0));
        assert_eq!(limiter.standing(soon, 3).requests_left, Some(60));
    }

    #[test]
    fn what_was_charged_too_much_comes_back_and_too_little_is_charged() {
        let mut limiter = limiter(0, 600, 0);
        let permit = limiter.admit(Nanos::ZERO, 1, 600).expect("within the limit");
        assert_eq!(refused(limiter.admit(Nanos::ZERO, 1, 1)).0, Kind::Tokens);
        limiter.settle(Nanos::ZERO, permit, 100);
        assert_eq!(limiter.standing(Nanos::ZERO, 1).tokens_left, Some(500));
        let permit = limiter.admit(Nanos::ZERO, 1, 100).expect("within the limit");
        limiter.settle(Nanos::ZERO, permit, 800);
        assert_eq!(refused(limiter.admit(Nanos::ZERO, 1, 1)), (Kind::Tokens, span(301, 600)));
    }

    #[test]
    fn what_time_gave_back_is_not_given_back_again() {
        let mut limiter = limiter(0, 60, 0);
        let long = limiter.admit(Nanos::ZERO, 1, 60).expect("within the limit");
        let later = Nanos::from_secs(90);
        let _all = limiter.admit(later, 1, 60).expect("all usage has refilled");
        limiter.settle(later, long, 0);
        assert_eq!(limiter.standing(later, 1).tokens_left, Some(0));
    }

    #[test]
    fn more_than_a_minutes_worth_goes_in_alone_and_is_paid_off() {
        let mut limiter = limiter(0, 60, 0);
        let permit = limiter.admit(Nanos::ZERO, 1, 180).expect("the key has no other charge");
        limiter.settle(SECOND, permit, 180);
        assert_eq!(refused(limiter.admit(SECOND, 1, 60)), (Kind::Tokens, Nanos::from_secs(179)));
        assert!(limiter.admit(Nanos::from_secs(180), 1, 60).is_ok());
    }

    #[test]
    fn so_many_at_a_time_until_one_is_over() {
        let mut limiter = limiter(0, 0, 1);
        let first = limiter.admit(Nanos::ZERO, 1, 9).expect("no other request is in flight");
        assert_eq!(refused(limiter.admit(Nanos::ZERO, 1, 9)), (Kind::Concurrency, Nanos::ZERO));
        limiter.settle(Nanos::ZERO, first, 9);
        assert!(limiter.admit(Nanos::ZERO, 1, 9).is_ok());
    }

    #[test]
    fn a_cancelled_request_has_used_nothing() {
        let mut limiter = limiter(1, 60, 1);
        let permit = limiter.admit(SECOND, 1, 60).expect("the key is unused");
        limiter.cancel(SECOND, permit);
        let standing = limiter.standing(SECOND, 1);
        assert_eq!((standing.requests_left, standing.tokens_left), (Some(1), Some(60)));
        assert!(limiter.admit(SECOND, 1, 60).is_ok());
    }

    #[test]
    fn keys_that_owe_nothing_are_forgotten_and_others_when_there_are_too_many() {
        let mut limiter = limiter(60, 0, 0);
        let stays = limiter.admit(Nanos::ZERO, u64::MAX, 0).expect("within the limit");
        for key in 0..100_000 {
            let now = Nanos::from_millis(key);
            let permit = limiter.admit(now, key, 0).expect("each key sends one request");
            limiter.settle(now, permit, 0);
        }
        assert!(limiter.keys() <= 2 * KEYS_MIN, "{} keys, 1000 of which have usage", limiter.keys());
        assert_eq!(limiter.in_flight(), 1, "a key with a request in flight is kept");
        limiter.configure(Config { keys_max: 100, ..limiter.config });
        for key in 0..10_000 {
            let permit = limiter.admit(Nanos::from_secs(200), key, 0).expect("each key sends one request");
            limiter.settle(Nanos::from_secs(200), permit, 0);
            assert!(limiter.keys() <= 101, "{} keys", limiter.keys());
        }
        limiter.settle(Nanos::from_secs(200), stays, 0);
        assert_eq!(limiter.in_flight(), 0);
    }

    proptest! {
        /// In any interval, a key uses at most the refill of that interval, a minute's worth and one request.
        #[test]
        fn no_client_uses_more_than_is_restored(
            asks in prop::collection::vec((0u64..20_000, 1u64..200, 0u64..100, any::<bool>()), 1..200),
            per_minute in 1u64..500,
            concurrent_requests in 0u32..4,
        ) {
            let mut limiter = limiter(per_minute, per_minute, concurrent_requests);
            let (mut now, mut held) = (Nanos::ZERO, Vec::new());
            let (mut admitted, mut used) = (Vec::new(), Vec::new());
            for (millis, tokens, share, over) in asks {
                now += Nanos::from_millis(millis);
                if over && let Some((permit, took)) = held.pop() {
                    limiter.settle(now, permit, took);
                }
                let before = limiter.standing(now, 1);
                match limiter.admit(now, 1, tokens) {
                    Ok(permit) => {
                        let took = tokens * share / 100;
                        held.push((permit, took));
                        admitted.push(now);
                        used.push((now, took));
                    }
                    Err(Exceeded { retry_after, .. }) => {
                        prop_assert_eq!(limiter.standing(now, 1), before, "a rejected request uses nothing");
                        let cap = concurrent_requests > 0 && held.len() as u32 >= concurrent_requests;
                        let after = limiter.admit(now + retry_after, 1, tokens);
                        prop_assert!(after.is_ok() || cap, "admitted after its `retry_after`");
                        if let Ok(permit) = after {
                            limiter.cancel(now + retry_after, permit);
                        }
                    }
                }
                prop_assert!(concurrent_requests == 0 || held.len() as u32 <= concurrent_requests);
                prop_assert_eq!(limiter.in_flight(), held.len() as u64);
            }
            let worth = |from: Nanos, to: Nanos| {
                u128::from((to - from + MINUTE).0) * u128::from(per_minute) / u128::from(MINUTE.0)
            };
            for (first, &from) in admitted.iter().enumerate() {
                for (last, &to) in admitted.iter().enumerate().skip(first) {
                    prop_assert!((last - first + 1) as u128 <= worth(from, to) + 1);
                    let tokens: u64 = used[first..=last].iter().map(|&(_, took)| took).sum();
                    prop_assert!(u128::from(tokens) <= worth(from, to) + 200, "{} tokens", tokens);
                }
            }
        }
    }
}
