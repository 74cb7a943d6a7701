//! Stall detection: an engine with requests in flight makes no progress, though it still answers health checks.
//!
//! A hung collective or a stopped engine process shows from outside as open connections, `/health` with 200, and no
//! tokens. An engine is stalled when it has shown no progress for much longer than its own rates predict. Progress is
//! tokens, answers, KV events, and changes of the engine's own work counters. A long prefill that runs alone changes
//! those counters with every step; without counters, the rates bound how long it may take.

use crate::time::Nanos;

/// Shortest silence that counts as a stall: steps of a working engine take milliseconds, but a busy machine, a garbage
/// collection or a compilation may take a second or two.
pub const SILENCE_MIN: Nanos = Nanos::from_secs(4);
/// The same while the engines' speed is unknown: a machine a hundred times slower than assumed takes that long for a
/// step.
pub const SILENCE_MIN_UNLEARNED: Nanos = Nanos::from_secs(30);
/// Multiple of the expected time from which a silence counts: rates are medians, not bounds.
pub const EXPECTED_TIMES: f64 = 2.0;
/// The same where the engine has no counters.
pub const EXPECTED_TIMES_UNSEEN: f64 = 3.0;

/// When an engine is expected to make progress.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// Seconds until the end of a step, by the learned rates: then its counters change.
    pub step_s: f64,
    /// Seconds until a token: all prompts in flight there may be prefilled before.
    pub token_s: f64,
    /// Whether that token would be observed: at least one answer in flight is streamed.
    pub is_seen: bool,
    /// Whether the rates were learned from this pool's answers, or the operator configured its machines.
    pub is_learned: bool,
}

/// The engine's own work counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counters {
    /// Not available.
    Absent,
    /// They were read, and did not change during the silence.
    Still,
}

impl Expected {
    /// The silence from which the engine counts as stalled; `None` if a stall cannot be told from slow work.
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
        assert_eq!(
            prefill.patience(Counters::Still),
            Some(Nanos::from_secs(6)),
            "counters change with each step"
        );
        assert_eq!(
            prefill.patience(Counters::Absent),
            Some(Nanos::from_secs(90)),
            "only tokens show progress"
        );
    }

    #[test]
    fn unobservable_progress_is_no_stall_unless_counters_show_it() {
        let unseen = Expected { is_seen: false, ..STEP };
        assert_eq!(unseen.patience(Counters::Absent), None);
        assert_eq!(unseen.patience(Counters::Still), Some(SILENCE_MIN));
    }

    #[test]
    fn until_engine_speeds_are_learned_the_silence_limit_is_longer() {
        let unlearned = Expected { is_learned: false, ..STEP };
        assert_eq!(unlearned.patience(Counters::Absent), None);
        assert_eq!(unlearned.patience(Counters::Still), Some(SILENCE_MIN_UNLEARNED));
    }
}
