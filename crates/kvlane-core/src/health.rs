//! When probes change whether an engine is healthy.
//!
//! The gateway and the simulator both drive this.

/// Probes in a row that change an engine's health.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Failed probes after which a healthy engine is down.
    pub failures: u32,
    /// Successful probes after which an engine that is down is healthy again.
    pub successes: u32,
}

/// The result of one probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// The engine answered that it is well.
    Success,
    /// It answered otherwise, or not in time.
    Failure,
    /// Its port refuses connections: no process listens there.
    Refused,
}

/// The probes of one engine since its health last changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Probes {
    failures: u32,
    successes: u32,
    /// An engine that no probe has failed yet: it has just joined.
    tried: bool,
}

// === impl Probes ===

impl Probes {
    /// Failed probes in a row.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Records a probe of an engine that was `healthy`; returns whether it is now. One success suffices for an engine that
    /// has just joined, one refused connection for any.
    pub fn note(&mut self, thresholds: &Thresholds, healthy: bool, probe: Probe) -> bool {
        let is_healthy = match probe {
            Probe::Success => {
                (self.failures, self.successes) = (0, self.successes.saturating_add(1));
                healthy || !self.tried || self.successes >= thresholds.successes
            }
            Probe::Failure | Probe::Refused => {
                (self.failures, self.successes) = (self.failures.saturating_add(1), 0);
                healthy && probe != Probe::Refused && self.failures < thresholds.failures.max(1)
            }
        };
        self.tried = true;
        if is_healthy != healthy {
            (self.failures, self.successes) = (0, 0);
        }
        is_healthy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const THRESHOLDS: Thresholds = Thresholds { failures: 3, successes: 2 };

    fn health(probes: &mut Probes, mut healthy: bool, results: &[Probe]) -> Vec<bool> {
        let after = |probe: &Probe| {
            healthy = probes.note(&THRESHOLDS, healthy, *probe);
            healthy
        };
        results.iter().map(after).collect()
    }

    #[test]
    fn it_takes_several_probes_to_change_the_health() {
        use Probe::{Failure, Success};
        let results =
            [Failure, Failure, Success, Failure, Failure, Failure, Success, Failure, Success, Success];
        let expect = [true, true, true, true, true, false, false, false, false, true];
        assert_eq!(health(&mut Probes::default(), true, &results), expect);
    }

    #[test]
    fn a_refused_connection_is_enough() {
        let mut probes = Probes::default();
        assert_eq!(health(&mut probes, true, &[Probe::Refused]), [false]);
        assert_eq!(probes.failures(), 0, "its health has changed");
    }

    #[test]
    fn one_success_suffices_for_an_engine_that_has_just_joined() {
        assert_eq!(health(&mut Probes::default(), false, &[Probe::Success]), [true]);
        let late = [Probe::Failure, Probe::Success, Probe::Success];
        assert_eq!(health(&mut Probes::default(), false, &late), [false, false, true]);
    }
}
