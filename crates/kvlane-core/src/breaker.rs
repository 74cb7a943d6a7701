//! Circuit breaker per endpoint: closed, open, half-open.
//!
//! A closed breaker admits requests. After [`Config::failure_threshold`] consecutive failures it opens and admits none
//! for a cool-down, which doubles each time the endpoint fails again. Then it is half-open: it admits one request (the
//! probe), whose outcome closes the breaker or opens it again. The start of the probe's answer closes the breaker
//! provisionally, as answers may take minutes: until an answer is complete, a single failure opens it again.
//!
//! Only requests placed since it last opened count: those placed before fail one after the other and add no
//! information.

use serde::{Deserialize, Serialize};

use crate::request::RequestId;
use crate::rng::Rng;
use crate::time::Nanos;

/// Relative jitter of a cool-down, up or down, so that endpoints that failed together are not probed together. Envoy
/// and gRPC use a fifth, too.
const JITTER: f64 = 0.2;

/// When a breaker opens and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Consecutive failures that open it; 0 never opens it.
    pub failure_threshold: u32,
    /// First cool-down.
    pub cooldown: Nanos,
    /// Longest cool-down. An endpoint without failures for this long starts again with the first cool-down.
    pub cooldown_max: Nanos,
    /// Duration of slow start, in which a recovered endpoint gets less than its share.
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

/// State of a breaker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// Requests are admitted.
    #[default]
    Closed,
    /// No request is admitted until the cool-down is over.
    Open,
    /// One probe request is admitted.
    HalfOpen,
}

/// One endpoint's breaker.
#[derive(Clone, Copy, Debug, Default)]
pub struct Breaker {
    state: State,
    /// While closed: consecutive failures. Otherwise: failures since it was last closed.
    failures: u32,
    /// How often it has opened in total, and how often in a row without a long failure-free time between.
    opened: u32,
    opened_in_a_row: u32,
    /// While open: end of the cool-down.
    until: Nanos,
    /// When it was closed.
    closed_at: Nanos,
    /// The probe request while half-open.
    probe: Option<RequestId>,
    /// How often it has opened, or closed after that: see [`Breaker::changes`].
    changes: u32,
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
    /// Its state.
    pub fn state(&self) -> State {
        self.state
    }

    /// Consecutive failures.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// End of the cool-down, while open.
    pub fn until(&self) -> Option<Nanos> {
        (self.state == State::Open).then_some(self.until)
    }

    /// What the breakers of other routers are told: how often it has opened, or closed after that. An odd number while
    /// requests from here fail.
    pub(crate) fn changes(&self) -> u32 {
        self.changes
    }

    /// Whether it admits a request.
    pub(crate) fn admits(&self) -> bool {
        match self.state {
            State::Closed => true,
            State::Open => false,
            State::HalfOpen => self.probe.is_none(),
        }
    }

    /// Identifies the requests placed from now on, as opposed to those placed before it last opened.
    pub(crate) fn era(&self) -> u32 {
        self.opened
    }

    /// A request was placed.
    pub(crate) fn placed(&mut self, request: RequestId) {
        if self.state == State::HalfOpen && self.probe.is_none() {
            self.probe = Some(request);
        }
    }

    /// A request placed in `era` failed. Returns whether the state changed.
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
        self.changes = self.changes.wrapping_add(u32::from(is_even(self.changes)));
        self.opened = self.opened.wrapping_add(1);
        self.opened_in_a_row = self.opened_in_a_row.saturating_add(1);
        self.probe = None;
        std::mem::replace(&mut self.state, State::Open) != State::Open
    }

    /// A request placed in `era` was answered successfully. Returns whether the state changed.
    pub(crate) fn succeeded(&mut self, now: Nanos, era: u32) -> bool {
        era == self.opened && self.close(now)
    }

    /// The answer to a request placed in `era` has begun. Returns whether the state changed.
    pub(crate) fn begun(&mut self, now: Nanos, era: u32, config: &Config) -> bool {
        let closed = era == self.opened && self.state != State::Closed && self.close(now);
        if closed {
            self.failures = config.failure_threshold.saturating_sub(1);
        }
        closed
    }

    /// Closes the breaker unconditionally. Returns whether the state changed.
    pub(crate) fn close(&mut self, now: Nanos) -> bool {
        self.failures = 0;
        if self.state == State::Closed {
            return false;
        }
        (self.state, self.closed_at, self.probe) = (State::Closed, now, None);
        self.changes = self.changes.wrapping_add(u32::from(!is_even(self.changes)));
        true
    }

    /// The breaker of another router has opened (`changes` is odd) or closed. Here, too, one request is let through, and
    /// what becomes of it counts. Returns whether the state changed.
    pub(crate) fn changed_elsewhere(&mut self, changes: u32, config: &Config) -> bool {
        let is_hint = match self.state {
            State::Closed => !is_even(changes),
            State::Open => is_even(changes),
            State::HalfOpen => false,
        };
        if !is_hint || config.failure_threshold == 0 {
            return false;
        }
        self.state = State::HalfOpen;
        true
    }

    /// A request is over. If it was the probe and has no outcome, another request may be the probe.
    pub(crate) fn over(&mut self, request: RequestId) {
        self.probe.take_if(|probe| *probe == request);
    }

    /// Becomes half-open if the cool-down is over. Returns whether the state changed.
    pub(crate) fn end_cooldown(&mut self, now: Nanos) -> bool {
        let ripe = self.state == State::Open && self.until <= now;
        if ripe {
            self.state = State::HalfOpen;
        }
        ripe
    }
}

fn is_even(changes: u32) -> bool {
    changes.is_multiple_of(2)
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
        assert!(!breaker.succeeded(Nanos(2), 0), "already closed");
        assert!(!fail(&mut breaker, Nanos(3)), "failures are not consecutive");
        assert!(fail(&mut breaker, Nanos(4)) && !breaker.admits());
        assert!(!breaker.failed(Nanos(5), 0, &config(), &mut Rng::new(0)), "placed before it opened");
        assert!(!breaker.succeeded(Nanos(5), 0), "placed before it opened");
        assert_eq!((breaker.state(), breaker.era()), (State::Open, 1));
    }

    #[test]
    fn one_request_is_let_through_and_what_becomes_of_it_counts() {
        let mut breaker = Breaker::default();
        (0..2).for_each(|_| _ = fail(&mut breaker, Nanos(1)));
        let until = breaker.until().expect("open");
        assert!(!breaker.end_cooldown(until - Nanos(1)) && breaker.end_cooldown(until));
        assert!(breaker.admits());
        breaker.placed(RequestId(1));
        breaker.placed(RequestId(2));
        assert!(!breaker.admits(), "one probe at a time");
        breaker.over(RequestId(2));
        assert!(!breaker.admits(), "the finished request was not the probe");
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
            assert!(breaker.end_cooldown(now));
        }
        for (good_s, due_s) in [(7, 8.0), (8, 1.0)] {
            assert!(breaker.succeeded(now, breaker.era()));
            now += Nanos::from_secs(good_s);
            fail(&mut breaker, now);
            fail(&mut breaker, now);
            let cooldown = breaker.until().expect("open") - now;
            assert!((cooldown.as_secs_f64() / due_s - 1.0).abs() <= 0.2, "{cooldown:?} after {good_s} s");
            now += cooldown;
            assert!(breaker.end_cooldown(now));
        }
    }

    #[test]
    fn an_answer_that_begins_closes_it_on_trial() {
        let failed_after = |ends: bool| {
            let mut breaker = Breaker::default();
            (0..2).for_each(|_| _ = fail(&mut breaker, Nanos(1)));
            let now = breaker.until().expect("open");
            breaker.end_cooldown(now);
            assert!(!breaker.begun(now, 0, &config()), "placed before it opened");
            assert!(breaker.begun(now, breaker.era(), &config()) && breaker.admits());
            assert!(!breaker.begun(now, breaker.era(), &config()), "already closed");
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
    fn other_routers_are_told_when_it_opens_and_when_it_closes() {
        let mut breaker = Breaker::default();
        let mut now = Nanos(1);
        let mut told = vec![breaker.changes()];
        for fails in [true, true, true, false, true, true] {
            match fails {
                true => _ = fail(&mut breaker, now),
                false => _ = breaker.succeeded(now, breaker.era()),
            }
            told.push(breaker.changes());
            now = breaker.until().unwrap_or(now);
            breaker.end_cooldown(now);
        }
        assert_eq!(told, [0, 0, 1, 1, 2, 2, 3], "a second cool-down is no news");
    }

    #[test]
    fn what_another_router_found_is_tried_once_and_not_told_on() {
        for (fails, after) in [(true, (State::Open, 1)), (false, (State::Closed, 0))] {
            let mut breaker = Breaker::default();
            assert!(!breaker.changed_elsewhere(2, &config()), "it has closed there, and is closed here");
            assert!(breaker.changed_elsewhere(3, &config()) && breaker.admits());
            assert!(!breaker.changed_elsewhere(5, &config()), "it is being tried");
            breaker.placed(RequestId(1));
            assert_eq!((breaker.admits(), breaker.changes()), (false, 0));
            match fails {
                true => _ = fail(&mut breaker, Nanos(9)),
                false => _ = breaker.succeeded(Nanos(9), breaker.era()),
            }
            assert_eq!((breaker.state(), breaker.changes()), after);
        }
    }

    #[test]
    fn an_endpoint_that_answers_another_router_is_tried_before_the_cool_down_ends() {
        let mut breaker = Breaker::default();
        (0..2).for_each(|_| _ = fail(&mut breaker, Nanos(1)));
        assert!(!breaker.changed_elsewhere(1, &config()), "it fails there, too");
        assert!(breaker.changed_elsewhere(2, &config()) && breaker.admits());
        assert!(!fail(&mut Breaker::default(), Nanos(1)) && fail(&mut breaker, Nanos(2)));
        assert_eq!(breaker.state(), State::Open);
    }

    #[test]
    fn without_a_threshold_it_never_opens() {
        let never = Config { failure_threshold: 0, ..config() };
        let mut breaker = Breaker::default();
        assert!(!breaker.changed_elsewhere(1, &never));
        assert!((0..100).all(|n| !breaker.failed(Nanos(n), 0, &never, &mut Rng::new(0))));
        assert!(breaker.admits());
    }
}
