//! What engines say of their own steps: a second source of rates where answers do not pass through this router, or come
//! as a whole.
//!
//! An engine counts the times between its output tokens. The mean of those between two readings is that of its steps, the
//! computing of prompts included. The number of tokens says how many steps there were, and our ledger which prompts were computed in them.

use super::fit::Prefilled;
use super::model::{Work, chunks};
use crate::time::Nanos;

/// A reading of an engine's own counters, and the work that was known there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Told {
    pub(crate) at: Nanos,
    /// Times between output tokens since the engine started: how many, and their sum.
    pub(crate) intervals: f64,
    pub(crate) seconds: f64,
    /// Sequences in its batch, as it says.
    pub(crate) running: u32,
    pub(crate) context_tokens: u64,
    pub(crate) prefilled: Prefilled,
}

impl Told {
    /// The seconds that its steps took since an earlier reading, and their work; `None` if they say nothing.
    pub(crate) fn since(&self, before: &Self) -> Option<(f64, Work)> {
        let intervals = self.intervals - before.intervals;
        let step_s = (self.seconds - before.seconds) / intervals;
        let sequences = before.running.midpoint(self.running).max(1);
        // Steps in a row are no more than fit into the time.
        let most = (self.at - before.at).as_secs_f64() / step_s;
        let steps = (intervals / f64::from(sequences)).min(most);
        let tokens = self.prefilled.tokens - before.prefilled.tokens;
        let work = Work {
            tokens,
            pairs: self.prefilled.pairs - before.prefilled.pairs,
            steps,
            chunks: chunks(tokens, self.prefilled.prompts - before.prefilled.prompts),
            sequences,
            context_tokens: before.context_tokens.midpoint(self.context_tokens),
            ..Work::default()
        };
        (steps >= 1.0 && step_s > 0.0).then_some((steps * step_s, work))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Fit, Measured, Pace, Rates};
    use super::*;
    use crate::rng::Rng;

    const NONE: Told = Told {
        at: Nanos(0),
        intervals: 0.0,
        seconds: 0.0,
        running: 0,
        context_tokens: 0,
        prefilled: Prefilled { prompts: 0, tokens: 0, pairs: 0 },
    };

    /// Invariant: The rates of an engine follow from its own counters where its answers are not seen.
    #[test]
    fn rates_follow_from_what_an_engine_counts_itself() {
        for seed in 0..50 {
            let mut rng = Rng::new(seed);
            let slower = 0.2 * 300f64.powf(rng.unit());
            let machine = Rates::default().times(slower * (0.5 + rng.unit()), slower);
            let (mut fit, mut pace, base) = (Fit::default(), Pace::default(), Rates::default());
            let mut told = NONE;
            for _ in 0..100 {
                let before = told;
                let prompts = rng.below(4) as u64;
                let lengths = 200 + 3000 * rng.below(2) as u64;
                told.running = 4 + rng.below(30) as u32;
                told.context_tokens = u64::from(told.running) * 2000;
                told.prefilled.prompts += prompts;
                told.prefilled.tokens += prompts * lengths;
                told.prefilled.pairs += prompts * lengths * lengths / 2;
                let sequences = before.running.midpoint(told.running).max(1);
                let steps = 20.0 + f64::from(rng.below(200) as u32);
                let tokens = prompts * lengths;
                let work = Work {
                    tokens,
                    pairs: prompts * lengths * lengths / 2,
                    steps,
                    chunks: chunks(tokens, prompts),
                    sequences,
                    context_tokens: before.context_tokens.midpoint(told.context_tokens),
                    ..Work::default()
                };
                let busy_s = machine.seconds_of(&work) * (0.9 + 0.2 * rng.unit());
                told.intervals += steps * f64::from(sequences);
                told.seconds += busy_s * f64::from(sequences);
                // It has idled as well.
                told.at = told.at + Nanos::from_secs_f64(busy_s * (1.0 + rng.unit()));
                if let Some((taken_s, work)) = told.since(&before) {
                    fit.observe(&mut pace, &base, Measured::Tokens, taken_s, &work);
                }
            }
            let rates = pace.rates(&fit.rates(&base));
            for (name, found, true_s) in [
                ("step", rates.decode_step_s(16, 32_000), machine.decode_step_s(16, 32_000)),
                ("prefill", rates.prefill_s(2000, 2_000_000), machine.prefill_s(2000, 2_000_000)),
            ] {
                assert!((found / true_s - 1.0).abs() < 0.2, "seed {seed}, {name}: {found} {true_s}");
            }
        }
    }

    #[test]
    fn an_engine_that_restarted_or_rested_says_nothing() {
        let busy = Told { at: Nanos::from_secs(10), intervals: 100.0, seconds: 5.0, running: 2, ..NONE };
        assert!(busy.since(&NONE).is_some());
        assert_eq!(busy.since(&busy), None);
        assert_eq!(NONE.since(&busy), None);
        let odd = Told { at: Nanos::from_secs(20), seconds: f64::NAN, ..busy };
        assert_eq!(odd.since(&busy), None);
        assert_eq!(Told { intervals: 1e3, seconds: f64::INFINITY, ..odd }.since(&busy), None);
    }
}
