//! Back-off for an endpoint that answers that it is too busy (429 or 503 from a working engine).
//!
//! A busy answer is no failure: it says nothing about the correctness of the endpoint's answers. The back-off lasts as
//! long as the endpoint's `Retry-After` says; without one, a short time that doubles with each further busy answer.

use crate::breaker::jittered;
use crate::rng::Rng;
use crate::time::Nanos;

/// Longest back-off, whatever `Retry-After` says.
const TOLD_MAX: Nanos = Nanos::from_secs(30);
/// First and longest back-off without `Retry-After`. The first is about the time that an engine takes for a large
/// prompt.
const FIRST: Nanos = Nanos::from_millis(250);
const LAST: Nanos = Nanos::from_secs(8);

/// Back-off of one endpoint.
#[derive(Clone, Copy, Debug, Default)]
pub struct Busy {
    until: Nanos,
    /// Consecutive busy answers without `Retry-After`.
    unspecified: u32,
}

// === impl Busy ===

impl Busy {
    /// End of the back-off, if it is still to come.
    pub fn until(&self, now: Nanos) -> Option<Nanos> {
        (self.until > now).then_some(self.until)
    }

    /// The endpoint answered that it is busy, perhaps with a `Retry-After`.
    pub(crate) fn back_off(&mut self, now: Nanos, retry_after: Option<Nanos>, rng: &mut Rng) {
        match retry_after.filter(|span| *span > Nanos::ZERO) {
            Some(span) => self.until = self.until.max(now + span.min(TOLD_MAX)),
            // Other requests placed there are refused at the same moment and add no information.
            None if self.until > now => {}
            None => {
                let span = Nanos(FIRST.0 << self.unspecified.min(16)).min(LAST);
                self.until = now + jittered(span, rng);
                self.unspecified = self.unspecified.saturating_add(1);
            }
        }
    }

    /// The endpoint answered a request.
    pub(crate) fn answered(&mut self) {
        self.unspecified = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_believed_up_to_a_bound() {
        let (mut busy, mut rng) = (Busy::default(), Rng::new(1));
        busy.back_off(Nanos(5), Some(Nanos::from_secs(2)), &mut rng);
        assert_eq!(busy.until(Nanos(5)), Some(Nanos::from_secs(2) + Nanos(5)));
        busy.back_off(Nanos(6), Some(Nanos::from_secs(1)), &mut rng);
        assert_eq!(busy.until(Nanos(6)), Some(Nanos::from_secs(2) + Nanos(5)), "the longer back-off holds");
        busy.back_off(Nanos(7), Some(Nanos::from_secs(3600)), &mut rng);
        assert_eq!(busy.until(Nanos(7)), Some(TOLD_MAX + Nanos(7)));
        assert_eq!(busy.until(TOLD_MAX + Nanos(7)), None);
    }

    #[test]
    fn without_a_time_it_doubles_until_an_answer() {
        let (mut busy, mut rng, mut now) = (Busy::default(), Rng::new(1), Nanos::from_secs(9));
        for millis in [250.0, 500.0, 1000.0, 2000.0, 4000.0, 8000.0, 8000.0] {
            busy.back_off(now, None, &mut rng);
            let until = busy.until(now).expect("busy");
            busy.back_off(now, Some(Nanos::ZERO), &mut rng);
            assert_eq!(busy.until(now), Some(until), "answers at the same moment count once");
            let ratio = (until - now).as_secs_f64() * 1e3 / millis;
            assert!((0.8..=1.2).contains(&ratio), "{ratio} of {millis} ms");
            now = until;
        }
        busy.answered();
        busy.back_off(now, None, &mut rng);
        assert!(busy.until(now).expect("busy") - now <= Nanos::from_millis(300));
    }
}
