//! Usage of one key: here, and elsewhere as far as it was heard.

use super::rate::Rate;
use crate::decaying_counter::DecayingCounter;
use crate::time::Nanos;

/// What one router knows of its own usage of a key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Requests charged since `age`, as time of refill.
    pub requests: Nanos,
    /// Tokens charged since `age`, as time of refill.
    pub tokens: Nanos,
    /// Time until all requests have refilled, that it knows of.
    pub requests_owed: Nanos,
    /// Time until all tokens have refilled, that it knows of.
    pub tokens_owed: Nanos,
    /// Requests since `age`, the refused ones included.
    pub asked: u64,
    /// Its requests in flight.
    pub in_flight: u32,
    /// How long it has remembered the key.
    pub age: Nanos,
}

/// Where the requests of a key, or of all keys, have come in lately.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spread {
    here: DecayingCounter,
    elsewhere: DecayingCounter,
}

/// Usage of one key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Used {
    /// Since when it is remembered.
    pub(super) since: Nanos,
    pub(super) requests: Rate,
    pub(super) tokens: Rate,
    pub(super) in_flight: u32,
    /// Requests in flight of other routers.
    pub(super) elsewhere: u32,
    /// Requests since it is remembered, and those of which other routers may not have heard: since the last news, and
    /// before it.
    pub(super) asked: u64,
    pub(super) asked_lately: [u32; 2],
    pub(super) spread: Spread,
    /// Requests that have entered and that other routers may not have heard of: since the last news, and before it.
    pub(super) entered: [u32; 2],
}

// === impl Spread ===

impl Spread {
    /// Requests elsewhere for each one here, if `requests` more had been seen with the proportion that is assumed.
    pub(super) fn proportion(mut self, now: Nanos, requests: f64, assumed: f64) -> f64 {
        (self.elsewhere.at(now, 0.0) + requests * assumed) / (self.here.at(now, 0.0) + requests)
    }

    pub(super) fn add_here(&mut self, now: Nanos, requests: f64) {
        self.here.at(now, 0.0);
        self.here.add(requests);
    }

    pub(super) fn add_elsewhere(&mut self, now: Nanos, requests: f64) {
        self.elsewhere.at(now, 0.0);
        self.elsewhere.add(requests);
    }
}

// === impl Used ===

impl Used {
    pub(super) fn new(now: Nanos) -> Self {
        let rate = Rate::default();
        let (in_flight, elsewhere, entered) = (0, 0, [0; 2]);
        let spread = Spread::default();
        Self {
            since: now,
            requests: rate,
            tokens: rate,
            in_flight,
            elsewhere,
            asked: 0,
            asked_lately: [0; 2],
            spread,
            entered,
        }
    }

    /// When all usage has refilled.
    pub(super) fn back(&self) -> Nanos {
        self.requests.back.max(self.tokens.back)
    }

    /// Requests in flight, those of other routers included.
    pub(super) fn requests_now(&self) -> u32 {
        self.in_flight.saturating_add(self.elsewhere)
    }

    /// What other routers are told.
    pub(super) fn told(&self, now: Nanos) -> Usage {
        Usage {
            requests: self.requests.charged,
            tokens: self.tokens.charged,
            requests_owed: self.requests.back - now,
            tokens_owed: self.tokens.back - now,
            asked: self.asked,
            in_flight: self.in_flight,
            age: now - self.since,
        }
    }
}
