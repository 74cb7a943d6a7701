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
/// The same while nobody knows how fast the engines of the pool are: a machine that is a hundred times slower than assumed
/// takes that long for a step.
pub const SILENCE_MIN_UNLEARNED: Nanos = Nanos::from_secs(30);
/// A silence counts from so many times the expected span on: rates are medians, not bounds.
pub const EXPECTED_TIMES: f64 = 2.0;
/// The same where the engine has no counters that could say otherwise.
pub const EXPECTED_TIMES_UNSEEN: f64 = 3.0;

/// What an engine is expected to do next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// Seconds until the end of a step, by the rates that were learned: then its counters move.
    pub step_s: f64,
    /// Seconds until a token comes: all prompts in flight there may be computed before.
    pub token_s: f64,
    /// Whether that sign would be seen here: some answer in flight is a stream.
    pub is_seen: bool,
    /// Whether the rates were learned from answers of this pool, or the operator has said what its machines are.
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
        let expected_s = match counters {
            Counters::Still => EXPECTED_TIMES * self.step_s,
            Counters::Absent if self.is_seen && self.is_learned => EXPECTED_TIMES_UNSEEN * self.token_s,
            Counters::Absent => return None,
        };
        let least = if self.is_learned { SILENCE_MIN } else { SILENCE_MIN_UNLEARNED };
        Some(Nanos::from_secs_f64(expected_s).max(least))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Expected = Expected { step_s: 0.05, token_s: 0.1, is_seen: true, is_learned: true };

    #[test]
    fn a_silence_is_a_stall_when_it_is_much_longer_than_expected_and_no_sooner_than_the_shortest() {
        assert_eq!(STEP.patience(Counters::Still), Some(SILENCE_MIN));
        let prefill = Expected { step_s: 3.0, token_s: 30.0, ..STEP };
        assert_eq!(prefill.patience(Counters::Still), Some(Nanos::from_secs(6)), "each step shows");
        assert_eq!(prefill.patience(Counters::Absent), Some(Nanos::from_secs(90)), "only the token shows");
    }

    #[test]
    fn what_nobody_would_see_is_no_stall_unless_counters_say_so() {
        let unseen = Expected { is_seen: false, ..STEP };
        assert_eq!(unseen.patience(Counters::Absent), None);
        assert_eq!(unseen.patience(Counters::Still), Some(SILENCE_MIN));
    }

    #[test]
    fn while_nobody_knows_how_fast_engines_are_they_have_longer() {
        let unlearned = Expected { is_learned: false, ..STEP };
        assert_eq!(unlearned.patience(Counters::Absent), None);
        assert_eq!(unlearned.patience(Counters::Still), Some(SILENCE_MIN_UNLEARNED));
    }
}
