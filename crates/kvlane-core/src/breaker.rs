//! Circuit breaker of one endpoint: whether its recent answers allow to place requests there.
//!
//! Closed, it takes requests. After [`Config::failure_threshold`] failures in a row it opens: none for a cool-down, which
//! doubles each time the endpoint fails again. Then it is half-open: one request is let through, and what becomes of it
//! closes the breaker or opens it again. The beginning of its answer closes it on trial, as answers may take minutes: until
//! one has come to its end, a single failure opens it again.
//!
//! Only requests that were placed since it last opened count: those that were there before fail one after the other, and
//! say nothing that is not known.

use serde::{Deserialize, Serialize};

use crate::request::RequestId;
use crate::rng::Rng;
use crate::time::Nanos;

/// By how much a cool-down differs from its length, up or down, so that endpoints that failed together are not tried
/// together. Envoy and gRPC use a fifth, too.
const JITTER: f64 = 0.2;

/// When a breaker opens and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Failed requests in a row that open it; 0 never opens it.
    pub failure_threshold: u32,
    /// First cool-down.
    pub cooldown: Nanos,
    /// Longest cool-down. An endpoint that has been good for as long begins with the first one when it fails again.
    pub cooldown_max: Nanos,
    /// How long an endpoint that comes back is given less than its share.
    pub slow_start: Nanos,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            failure_threshold: 3,
            cooldown: Nanos(1_000_000_000),
            cooldown_max: Nanos(60_000_000_000),
            slow_start: Nanos(10_000_000_000),
        }
    }
}

/// Where a breaker stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Requests are placed.
    #[default]
    Closed,
    /// None are, until its cool-down is over.
    Open,
    /// One is, to see.
    HalfOpen,
}

/// One endpoint's breaker.
#[derive(Clone, Copy, Debug, Default)]
pub struct Breaker {
    state: State,
    /// Failures in a row while closed; all of them since it was closed last while not.
    failures: u32,
    /// How often it has opened; and how often without a long good time in between.
    opened: u32,
    opened_in_a_row: u32,
    /// While open: when its cool-down is over.
    until: Nanos,
    /// Since when it is closed.
    closed_at: Nanos,
    /// The request that is let through while half-open.
    probe: Option<RequestId>,
}

// === impl State ===

impl State {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Open => "open",
            Self::HalfOpen => "half_open",
        }
    }
}

// === impl Breaker ===

impl Breaker {
    /// Where it stands.
    pub fn state(&self) -> State {
        self.state
    }

    /// Failures in a row.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// When its cool-down is over, while open.
    pub fn until(&self) -> Option<Nanos> {
        (self.state == State::Open).then_some(self.until)
    }

    /// Whether a request may be placed.
    pub(crate) fn admits(&self) -> bool {
        match self.state {
            State::Closed => true,
            State::Open => false,
            State::HalfOpen => self.probe.is_none(),
        }
    }

    /// What requests that are placed from here on are told apart by from those before it opened.
    pub(crate) fn era(&self) -> u32 {
        self.opened
    }

    /// A request is placed.
    pub(crate) fn placed(&mut self, request: RequestId) {
        if self.state == State::HalfOpen && self.probe.is_none() {
            self.probe = Some(request);
        }
    }

    /// A request that was placed in `era` has failed. Whether it stands differently.
    pub(crate) fn failed(&mut self, now: Nanos, era: u32, config: &Config, rng: &mut Rng) -> bool {
        if era != self.opened || config.failure_threshold == 0 {
            return false;
        }
        self.failures = self.failures.saturating_add(1);
        if self.state == State::Closed {
            if self.failures < config.failure_threshold {
                return false;
            }
            if now - self.closed_at >= config.cooldown_max {
                self.opened_in_a_row = 0;
            }
        }
        let factor = 1u64.checked_shl(self.opened_in_a_row).unwrap_or(u64::MAX);
        let cooldown = Nanos(config.cooldown.0.saturating_mul(factor)).min(config.cooldown_max);
        self.until = now + jittered(cooldown, rng);
        self.opened = self.opened.wrapping_add(1);
        self.opened_in_a_row = self.opened_in_a_row.saturating_add(1);
        self.probe = None;
        std::mem::replace(&mut self.state, State::Open) != State::Open
    }

    /// A request that was placed in `era` was answered soundly. Whether it stands differently.
    pub(crate) fn succeeded(&mut self, now: Nanos, era: u32) -> bool {
        era == self.opened && self.close(now)
    }

    /// The answer to a request that was placed in `era` has begun. Whether it stands differently.
    pub(crate) fn begun(&mut self, now: Nanos, era: u32, config: &Config) -> bool {
        let closed = era == self.opened && self.state != State::Closed && self.close(now);
        if closed {
            self.failures = config.failure_threshold.saturating_sub(1);
        }
        closed
    }

    /// Closes it, whatever it has seen. Whether it stands differently.
    pub(crate) fn close(&mut self, now: Nanos) -> bool {
        self.failures = 0;
        if self.state == State::Closed {
            return false;
        }
        (self.state, self.closed_at, self.probe) = (State::Closed, now, None);
        true
    }

    /// A request is over. If it was the one that was let through, and has told nothing, another one is.
    pub(crate) fn over(&mut self, request: RequestId) {
        self.probe.take_if(|probe| *probe == request);
    }

    /// Its cool-down may be over. Whether it stands differently.
    pub(crate) fn ripen(&mut self, now: Nanos) -> bool {
        let ripe = self.state == State::Open && self.until <= now;
        if ripe {
            self.state = State::HalfOpen;
        }
        ripe
    }
}

/// A span that is up to [`JITTER`] longer or shorter.
pub(crate) fn jittered(span: Nanos, rng: &mut Rng) -> Nanos {
    Nanos::from_secs_f64(span.as_secs_f64() * (1.0 - JITTER + 2.0 * JITTER * rng.unit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config {
            failure_threshold: 2,
            cooldown: Nanos::from_secs(1),
            cooldown_max: Nanos::from_secs(8),
            slow_start: Nanos::ZERO,
        }
    }

    fn fail(breaker: &mut Breaker, now: Nanos) -> bool {
        breaker.failed(now, breaker.era(), &config(), &mut Rng::new(now.0))
    }

    #[test]
    fn so_many_failures_in_a_row_open_it() {
        let mut breaker = Breaker::default();
        assert!(!fail(&mut breaker, Nanos(1)));
        assert!(!breaker.succeeded(Nanos(2), 0), "it was closed");
        assert!(!fail(&mut breaker, Nanos(3)), "not in a row");
        assert!(fail(&mut breaker, Nanos(4)) && !breaker.admits());
        assert!(!breaker.failed(Nanos(5), 0, &config(), &mut Rng::new(0)), "it was there before");
        assert!(!breaker.succeeded(Nanos(5), 0), "so was this");
        assert_eq!((breaker.state(), breaker.era()), (State::Open, 1));
    }

    #[test]
    fn one_request_is_let_through_and_what_becomes_of_it_counts() {
        let mut breaker = Breaker::default();
        (0..2).for_each(|_| _ = fail(&mut breaker, Nanos(1)));
        let until = breaker.until().expect("open");
        assert!(!breaker.ripen(until - Nanos(1)) && breaker.ripen(until));
        assert!(breaker.admits());
        breaker.placed(RequestId(1));
        breaker.placed(RequestId(2));
        assert!(!breaker.admits(), "one at a time");
        breaker.over(RequestId(2));
        assert!(!breaker.admits(), "that was not the one");
        breaker.over(RequestId(1));
        assert!(breaker.admits());
        breaker.placed(RequestId(3));
        assert!(breaker.succeeded(until, breaker.era()));
        assert_eq!((breaker.state(), breaker.failures()), (State::Closed, 0));
    }

    #[test]
    fn cool_downs_double_up_to_the_longest_until_it_has_been_good_for_that_long() {
        let mut breaker = Breaker::default();
        let mut now = Nanos::from_secs(100);
        fail(&mut breaker, now);
        for secs in [1.0, 2.0, 4.0, 8.0, 8.0] {
            fail(&mut breaker, now);
            let cooldown = breaker.until().expect("open") - now;
            let ratio = cooldown.as_secs_f64() / secs;
            assert!((0.8..=1.2).contains(&ratio) && ratio != 1.0, "{cooldown:?} where {secs} s is due");
            now += cooldown;
            assert!(breaker.ripen(now));
        }
        for (good_s, due_s) in [(7, 8.0), (8, 1.0)] {
            assert!(breaker.succeeded(now, breaker.era()));
            now += Nanos::from_secs(good_s);
            fail(&mut breaker, now);
            fail(&mut breaker, now);
            let cooldown = breaker.until().expect("open") - now;
            assert!((cooldown.as_secs_f64() / due_s - 1.0).abs() <= 0.2, "{cooldown:?} after {good_s} s");
            now += cooldown;
            assert!(breaker.ripen(now));
        }
    }

    #[test]
    fn an_answer_that_begins_closes_it_on_trial() {
        let failed_after = |ends: bool| {
            let mut breaker = Breaker::default();
            (0..2).for_each(|_| _ = fail(&mut breaker, Nanos(1)));
            let now = breaker.until().expect("open");
            breaker.ripen(now);
            assert!(!breaker.begun(now, 0, &config()), "that one was there before");
            assert!(breaker.begun(now, breaker.era(), &config()) && breaker.admits());
            assert!(!breaker.begun(now, breaker.era(), &config()), "it was closed");
            if ends {
                breaker.succeeded(now, breaker.era());
            }
            fail(&mut breaker, now);
            (breaker.state(), breaker.until().map(|until| (until - now).as_secs_f64().round()))
        };
        assert_eq!(failed_after(true), (State::Closed, None));
        assert_eq!(failed_after(false), (State::Open, Some(2.0)), "as if it had been half-open");
    }

    #[test]
    fn without_a_threshold_it_never_opens() {
        let never = Config { failure_threshold: 0, ..config() };
        let mut breaker = Breaker::default();
        assert!((0..100).all(|n| !breaker.failed(Nanos(n), 0, &never, &mut Rng::new(0))));
        assert!(breaker.admits());
    }
}
