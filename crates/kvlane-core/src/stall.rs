//! Whether an engine with requests in flight has stopped making progress, though it still answers health checks.
//!
//! What a hung collective or a stopped engine process looks like from outside: connections stand, `/health` says 200, and no
//! token comes. An engine is stalled when it has given no sign of progress for much longer than its own rates predict. Signs
//! are tokens, answers, KV events, and changes of the engine's own counters of work; a long prefill that runs alone moves
//! those counters with every step, and the same rates say how long it may take where there are none.

use crate::time::Nanos;

/// The shortest silence that counts as a stall: steps of an engine that is well take milliseconds, but a busy machine, a
/// garbage collection or a compilation may take a second or two.
pub const SILENCE_MIN: Nanos = Nanos::from_secs(4);
/// A silence counts from so many times the expected span on: rates are medians, not bounds.
pub const EXPECTED_TIMES: f64 = 2.0;
/// The same where the engine has no counters that could say otherwise.
pub const EXPECTED_TIMES_UNSEEN: f64 = 3.0;

/// What an engine is expected to do next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// Until a sign of progress, by the rates that were learned, in seconds.
    pub sign_s: f64,
    /// Whether that sign would be seen here: some answer in flight is a stream.
    pub is_seen: bool,
    /// Whether the rates were learned from answers of this pool.
    pub is_learned: bool,
}

/// What the engine's own counters of work say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counters {
    /// It has none, or none that can be read.
    Absent,
    /// They were read and stood still throughout the silence.
    Still,
}

impl Expected {
    /// The silence from which on the engine is stalled; never, where nothing would tell a stall from slow work.
    pub fn patience(&self, counters: Counters) -> Option<Nanos> {
        let times = match counters {
            Counters::Still => EXPECTED_TIMES,
            Counters::Absent if self.is_seen && self.is_learned => EXPECTED_TIMES_UNSEEN,
            Counters::Absent => return None,
        };
        Some(Nanos::from_secs_f64(times * self.sign_s).max(SILENCE_MIN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Expected = Expected { sign_s: 0.05, is_seen: true, is_learned: true };

    #[test]
    fn a_silence_is_a_stall_when_it_is_much_longer_than_expected_and_no_sooner_than_the_shortest() {
        assert_eq!(STEP.patience(Counters::Still), Some(SILENCE_MIN));
        let prefill = Expected { sign_s: 30.0, ..STEP };
        assert_eq!(prefill.patience(Counters::Still), Some(Nanos::from_secs(60)));
        assert_eq!(prefill.patience(Counters::Absent), Some(Nanos::from_secs(90)));
    }

    #[test]
    fn what_nobody_would_see_is_no_stall_unless_counters_say_so() {
        for expected in [Expected { is_seen: false, ..STEP }, Expected { is_learned: false, ..STEP }] {
            assert_eq!(expected.patience(Counters::Absent), None);
            assert_eq!(expected.patience(Counters::Still), Some(SILENCE_MIN));
        }
    }
}
