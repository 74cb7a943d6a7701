//! An endpoint that says it is too busy (429 or 503 with an engine that works) is left alone for a while.
//!
//! That is no failure: it says nothing about whether its answers are sound. For how long, the endpoint says; where it does
//! not, a short time that doubles while it goes on saying so.

use crate::breaker::jittered;
use crate::rng::Rng;
use crate::time::Nanos;

/// Longest time that an endpoint is believed to be busy for: who says more is asked again all the same.
const TOLD_MAX: Nanos = Nanos::from_secs(30);
/// For how long an endpoint is left alone that does not say for how long: about what an engine takes for a large prompt,
/// and then twice that, up to the last.
const FIRST: Nanos = Nanos::from_millis(250);
const LAST: Nanos = Nanos::from_secs(8);

/// Until when one endpoint is left alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct Busy {
    until: Nanos,
    /// How often in a row it has not said for how long.
    untold: u32,
}

// === impl Busy ===

impl Busy {
    /// Until when, if that is still to come.
    pub fn until(&self, now: Nanos) -> Option<Nanos> {
        (self.until > now).then_some(self.until)
    }

    /// It says that it is busy, and perhaps for how long.
    pub(crate) fn told(&mut self, now: Nanos, retry_after: Option<Nanos>, rng: &mut Rng) {
        match retry_after.filter(|span| *span > Nanos::ZERO) {
            Some(span) => self.until = self.until.max(now + span.min(TOLD_MAX)),
            // Whatever else was placed there is refused in the same moment, and says no more than the first.
            None if self.until > now => {}
            None => {
                let span = Nanos(FIRST.0 << self.untold.min(16)).min(LAST);
                self.until = now + jittered(span, rng);
                self.untold = self.untold.saturating_add(1);
            }
        }
    }

    /// It has answered a request.
    pub(crate) fn answered(&mut self) {
        self.untold = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_believed_up_to_a_bound() {
        let (mut busy, mut rng) = (Busy::default(), Rng::new(1));
        busy.told(Nanos(5), Some(Nanos::from_secs(2)), &mut rng);
        assert_eq!(busy.until(Nanos(5)), Some(Nanos::from_secs(2) + Nanos(5)));
        busy.told(Nanos(6), Some(Nanos::from_secs(1)), &mut rng);
        assert_eq!(busy.until(Nanos(6)), Some(Nanos::from_secs(2) + Nanos(5)), "the longer one holds");
        busy.told(Nanos(7), Some(Nanos::from_secs(3600)), &mut rng);
        assert_eq!(busy.until(Nanos(7)), Some(TOLD_MAX + Nanos(7)));
        assert_eq!(busy.until(TOLD_MAX + Nanos(7)), None);
    }

    #[test]
    fn without_a_time_it_doubles_until_an_answer() {
        let (mut busy, mut rng, mut now) = (Busy::default(), Rng::new(1), Nanos::from_secs(9));
        for millis in [250.0, 500.0, 1000.0, 2000.0, 4000.0, 8000.0, 8000.0] {
            busy.told(now, None, &mut rng);
            let until = busy.until(now).expect("busy");
            busy.told(now, Some(Nanos::ZERO), &mut rng);
            assert_eq!(busy.until(now), Some(until), "the same moment counts once");
            let ratio = (until - now).as_secs_f64() * 1e3 / millis;
            assert!((0.8..=1.2).contains(&ratio), "{ratio} of {millis} ms");
            now = until;
        }
        busy.answered();
        busy.told(now, None, &mut rng);
        assert!(busy.until(now).expect("busy") - now <= Nanos::from_millis(300));
    }
}
