//! Rate limits and concurrency caps of many keys: requests and tokens per minute, requests at a time.
//!
//! A key that has used nothing may use a minute's worth at once, and then as fast as its limit gives it back. Tokens are
//! charged when a request is admitted, by what it is expected to take, and corrected when it is over. Since a cap on
//! tokens is no cap on the length of a prompt, a request of more than a minute's worth is let in when nothing else is
//! charged, and whoever sent it then waits for as long as that takes to come back.
//!
//! Each rate is kept as the time at which all that was used has come back (the generic cell rate algorithm of ATM Forum
//! TM-4.0, section 4.4.2, with a minute as its tolerance), so that a key with nothing to remember need not be kept.

use foldhash::fast::FixedState;
use hashbrown::HashMap;
use serde::{Deserialize, Serialize};

use crate::time::Nanos;

/// What comes back within it may be used at once.
const MINUTE: Nanos = Nanos::from_secs(60);
/// Keys below which nobody looks for those that can be forgotten.
const KEYS_MIN: usize = 1024;

/// What each key may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Requests per minute; 0 is no limit.
    pub requests_per_minute: u64,
    /// Tokens of prompts and answers per minute; 0 is no limit.
    pub tokens_per_minute: u64,
    /// Requests at a time; 0 is no limit.
    pub concurrent_requests: u32,
    /// Keys that are remembered while none of their requests is in flight. Beyond, those that have used the least begin
    /// anew.
    pub keys_max: usize,
}

impl Default for Config {
    fn default() -> Self {
        Self { requests_per_minute: 0, tokens_per_minute: 0, concurrent_requests: 0, keys_max: 65_536 }
    }
}

/// What a request ran into.
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

/// A request is beyond what its key may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exceeded {
    /// Of what.
    pub kind: Kind,
    /// When there is room for it, if nothing else comes; 0 where that is whenever another request ends.
    pub retry_after: Nanos,
}

/// A request that was let in. It is given back by [`Limiter::settle`] or [`Limiter::cancel`], or counts for ever.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a request in flight counts until it is settled"]
pub struct Permit {
    key: u64,
    tokens: u64,
    /// When what it was charged will have come back, if nothing is corrected.
    requests_back: Nanos,
    tokens_back: Nanos,
}

/// What a key may still use, as response headers tell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    /// Requests that would be let in at once; none where there is no limit.
    pub requests_left: Option<u64>,
    /// Time until all of its requests have come back.
    pub requests_reset: Nanos,
    /// Tokens that would be let in at once; none where there is no limit.
    pub tokens_left: Option<u64>,
    /// Time until all of its tokens have come back.
    pub tokens_reset: Nanos,
    /// Its requests in flight.
    pub in_flight: u32,
}

/// What many keys have used of one set of limits.
#[derive(Debug)]
pub struct Limiter {
    config: Config,
    keys: HashMap<u64, Used, FixedState>,
    /// Number of keys from which on it is worth looking for idle ones.
    sweep_len: usize,
}

/// What one key has used.
#[derive(Clone, Copy, Debug, Default)]
struct Used {
    /// When all requests have come back.
    requests_back: Nanos,
    /// When all tokens have.
    tokens_back: Nanos,
    in_flight: u32,
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
    /// Nobody has used anything.
    pub fn new(config: Config) -> Self {
        Self { config, keys: HashMap::default(), sweep_len: KEYS_MIN }
    }

    /// What each key may use.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Other limits from here on. What a key has used is the same share of a minute as before.
    pub fn configure(&mut self, config: Config) {
        self.config = config;
    }

    /// Keys that are remembered.
    pub fn keys(&self) -> usize {
        self.keys.len()
    }

    /// Requests that were let in and are neither settled nor cancelled.
    pub fn in_flight(&self) -> u64 {
        self.keys.values().map(|used| u64::from(used.in_flight)).sum()
    }

    /// Lets in a request that is expected to take so many tokens, prompt and answer together.
    ///
    /// # Errors
    /// What it is beyond; it has used nothing then. Where it is beyond several, the one that takes longest.
    pub fn admit(&mut self, now: Nanos, key: u64, tokens: u64) -> Result<Permit, Exceeded> {
        let Config { requests_per_minute, tokens_per_minute, concurrent_requests, .. } = self.config;
        let used = self.keys.get(&key).copied().unwrap_or_default();
        let waits = [
            (Kind::Tokens, wait(now, used.tokens_back, tokens, tokens_per_minute)),
            (Kind::Requests, wait(now, used.requests_back, 1, requests_per_minute)),
        ];
        let [longest, other] = waits;
        let (kind, retry_after) = if other.1 > longest.1 { other } else { longest };
        if retry_after > Nanos::ZERO {
            return Err(Exceeded { kind, retry_after });
        }
        if concurrent_requests > 0 && used.in_flight >= concurrent_requests {
            return Err(Exceeded { kind: Kind::Concurrency, retry_after: Nanos::ZERO });
        }
        let permit = Permit {
            key,
            tokens,
            requests_back: used.requests_back.max(now) + span(1, requests_per_minute),
            tokens_back: used.tokens_back.max(now) + span(tokens, tokens_per_minute),
        };
        let Permit { requests_back, tokens_back, .. } = permit;
        self.keys.insert(key, Used { requests_back, tokens_back, in_flight: used.in_flight + 1 });
        self.forget(now);
        Ok(permit)
    }

    /// A request is over and took so many tokens.
    pub fn settle(&mut self, now: Nanos, permit: Permit, tokens: u64) {
        let per_minute = self.config.tokens_per_minute;
        let Some(used) = self.keys.get_mut(&permit.key) else { return };
        used.in_flight = used.in_flight.saturating_sub(1);
        let (expected, took) = (span(permit.tokens, per_minute), span(tokens, per_minute));
        if took > expected {
            used.tokens_back = used.tokens_back.max(now) + (took - expected);
        } else {
            give_back(now, &mut used.tokens_back, permit.tokens_back, expected - took);
        }
    }

    /// A request that was let in goes nowhere: another limit is against it. It has used nothing.
    pub fn cancel(&mut self, now: Nanos, permit: Permit) {
        let requests = span(1, self.config.requests_per_minute);
        if let Some(used) = self.keys.get_mut(&permit.key) {
            give_back(now, &mut used.requests_back, permit.requests_back, requests);
        }
        self.settle(now, permit, 0);
    }

    /// What a key may still use.
    pub fn standing(&self, now: Nanos, key: u64) -> Standing {
        let used = self.keys.get(&key).copied().unwrap_or_default();
        Standing {
            requests_left: left(now, used.requests_back, self.config.requests_per_minute),
            requests_reset: used.requests_back - now,
            tokens_left: left(now, used.tokens_back, self.config.tokens_per_minute),
            tokens_reset: used.tokens_back - now,
            in_flight: used.in_flight,
        }
    }

    /// Forgets keys with nothing to remember, and if that are too few, those that have used the least.
    fn forget(&mut self, now: Nanos) {
        if self.keys.len() < self.sweep_len.min(self.config.keys_max.saturating_add(1)) {
            return;
        }
        self.keys.retain(|_, used| used.in_flight > 0 || used.back() > now);
        let keys_max = self.config.keys_max;
        if self.keys.len() > keys_max {
            let idle = self.keys.values().filter(|used| used.in_flight == 0);
            let mut back: Vec<Nanos> = idle.map(Used::back).collect();
            // An eighth more than has to go, so that the next one need not look again.
            let excess = (self.keys.len() - keys_max + keys_max / 8).min(back.len());
            if let Some(nth) = excess.checked_sub(1) {
                let (_, &mut last, _) = back.select_nth_unstable(nth);
                self.keys.retain(|_, used| used.in_flight > 0 || used.back() > last);
            }
        }
        self.sweep_len = (self.keys.len() * 2).max(KEYS_MIN);
    }
}

// === impl Used ===

impl Used {
    /// When all has come back.
    fn back(&self) -> Nanos {
        self.requests_back.max(self.tokens_back)
    }
}

/// Time in which so much comes back, rounded up; none where there is no limit.
fn span(amount: u64, per_minute: u64) -> Nanos {
    let Some(per_minute) = std::num::NonZeroU64::new(per_minute) else { return Nanos::ZERO };
    let nanos = (u128::from(amount) * u128::from(MINUTE.0)).div_ceil(u128::from(per_minute.get()));
    Nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

/// How long it takes until `amount` fits within a minute's worth. More than that fits when nothing is used.
fn wait(now: Nanos, back: Nanos, amount: u64, per_minute: u64) -> Nanos {
    if per_minute == 0 { Nanos::ZERO } else { (back - now) + span(amount, per_minute).min(MINUTE) - MINUTE }
}

/// How much fits.
fn left(now: Nanos, back: Nanos, per_minute: u64) -> Option<u64> {
    let room = MINUTE - (back - now);
    (per_minute > 0).then(|| {
        let amount = u128::from(room.0) * u128::from(per_minute) / u128::from(MINUTE.0);
        u64::try_from(amount).unwrap_or(u64::MAX)
    })
}

/// Gives back what a charge, all of it to come back at `charged_back`, was too high by: what time has given back since
/// is not given back again.
fn give_back(now: Nanos, back: &mut Nanos, charged_back: Nanos, span: Nanos) {
    *back = *back - span.min(charged_back - now);
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
        assert!(limiter.admit(now, 2, 0).is_ok(), "that is somebody else");
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
        let _all = limiter.admit(later, 1, 60).expect("all has come back");
        limiter.settle(later, long, 0);
        assert_eq!(limiter.standing(later, 1).tokens_left, Some(0));
    }

    #[test]
    fn more_than_a_minutes_worth_goes_in_alone_and_is_paid_off() {
        let mut limiter = limiter(0, 60, 0);
        let permit = limiter.admit(Nanos::ZERO, 1, 180).expect("nothing else is charged");
        limiter.settle(SECOND, permit, 180);
        assert_eq!(refused(limiter.admit(SECOND, 1, 60)), (Kind::Tokens, Nanos::from_secs(179)));
        assert!(limiter.admit(Nanos::from_secs(180), 1, 60).is_ok());
    }

    #[test]
    fn so_many_at_a_time_until_one_is_over() {
        let mut limiter = limiter(0, 0, 1);
        let first = limiter.admit(Nanos::ZERO, 1, 9).expect("nobody else is there");
        assert_eq!(refused(limiter.admit(Nanos::ZERO, 1, 9)), (Kind::Concurrency, Nanos::ZERO));
        limiter.settle(Nanos::ZERO, first, 9);
        assert!(limiter.admit(Nanos::ZERO, 1, 9).is_ok());
    }

    #[test]
    fn a_cancelled_request_has_used_nothing() {
        let mut limiter = limiter(1, 60, 1);
        let permit = limiter.admit(SECOND, 1, 60).expect("nothing is used");
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
            let permit = limiter.admit(now, key, 0).expect("each comes once");
            limiter.settle(now, permit, 0);
        }
        assert!(limiter.keys() <= 2 * KEYS_MIN, "{} keys, 1000 of which owe", limiter.keys());
        assert_eq!(limiter.in_flight(), 1, "whoever is in flight is remembered");
        limiter.configure(Config { keys_max: 100, ..limiter.config });
        for key in 0..10_000 {
            let permit = limiter.admit(Nanos::from_secs(200), key, 0).expect("each comes once");
            limiter.settle(Nanos::from_secs(200), permit, 0);
            assert!(limiter.keys() <= 101, "{} keys", limiter.keys());
        }
        limiter.settle(Nanos::from_secs(200), stays, 0);
        assert_eq!(limiter.in_flight(), 0);
    }

    proptest! {
        /// In any time, no key uses more than comes back in it and a minute's worth, and one request.
        #[test]
        fn nobody_uses_more_than_comes_back(
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
                        prop_assert_eq!(limiter.standing(now, 1), before, "a refusal uses nothing");
                        let cap = concurrent_requests > 0 && held.len() as u32 >= concurrent_requests;
                        let after = limiter.admit(now + retry_after, 1, tokens);
                        prop_assert!(after.is_ok() || cap, "it was told to come at that time");
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
