//! What engines say of their own steps: a second source of rates where answers do not pass through this router, or come
//! as a whole.
//!
//! An engine counts the times between its output tokens, and the prompt tokens that it looked up and did not find. The mean
//! time between two readings is that of its steps, the computing of prompts included; the number of tokens says how many
//! steps there were. All of it is of all its requests, also of those that other routers sent.

use serde::{Deserialize, Serialize};

use super::fit::Prefilled;
use super::model::{Work, chunks};
use crate::time::Nanos;

/// What an engine has measured itself since it started.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct OwnMeasures {
    /// Times between output tokens: how many.
    pub intervals: f64,
    /// Their sum.
    pub seconds: f64,
    /// Prompt tokens that it has computed; `None` if it does not say.
    pub computed_tokens: Option<u64>,
    /// Prompt tokens that it has fetched from a store or another engine.
    pub fetched_tokens: u64,
}

/// A reading of an engine's own measures, and the work that is known there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Told {
    pub(crate) at: Nanos,
    pub(crate) own: OwnMeasures,
    /// Sequences in its batch, as it says.
    pub(crate) running: u32,
    /// Of each of them, tokens of context.
    pub(crate) context_tokens: u64,
    /// Of this router's prompts.
    pub(crate) prefilled: Prefilled,
}

impl Told {
    /// The seconds that its steps took since an earlier reading, and their work; `None` if they say nothing.
    pub(crate) fn since(&self, before: &Self) -> Option<(f64, Work)> {
        let intervals = self.own.intervals - before.own.intervals;
        let step_s = (self.own.seconds - before.own.seconds) / intervals;
        let sequences = before.running.midpoint(self.running).max(1);
        // Steps in a row are no more than fit into the time.
        let most = (self.at - before.at).as_secs_f64() / step_s;
        let steps = (intervals / f64::from(sequences)).min(most);
        let ours = Prefilled {
            prompts: self.prefilled.prompts - before.prefilled.prompts,
            tokens: self.prefilled.tokens - before.prefilled.tokens,
            pairs: self.prefilled.pairs - before.prefilled.pairs,
        };
        let tokens = match (self.own.computed_tokens, before.own.computed_tokens) {
            (Some(now), Some(then)) => now.checked_sub(then)?,
            _ => ours.tokens,
        };
        // Others' prompts are taken to be like ours.
        let like_ours = |of_ours: u64| (of_ours as f64 * tokens as f64 / ours.tokens.max(1) as f64) as u64;
        let work = Work {
            tokens,
            pairs: like_ours(ours.pairs),
            steps,
            chunks: chunks(tokens, like_ours(ours.prompts)),
            sequences,
            context_tokens: before.context_tokens.midpoint(self.context_tokens) * u64::from(sequences),
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
        own: OwnMeasures { intervals: 0.0, seconds: 0.0, computed_tokens: None, fetched_tokens: 0 },
        running: 0,
        context_tokens: 0,
        prefilled: Prefilled { prompts: 0, tokens: 0, pairs: 0 },
    };

    /// Invariant: The rates of an engine follow from its own counters where its answers are not seen, also if half of its
    /// prompts are others'.
    #[test]
    fn rates_follow_from_what_an_engine_counts_itself() {
        for seed in 0..60 {
            let others = seed % 2;
            let mut rng = Rng::new(seed);
            let slower = 0.2 * 300f64.powf(rng.unit());
            let machine = Rates::default().times(slower * (0.5 + rng.unit()), slower);
            let (mut fit, mut pace, base) = (Fit::default(), Pace::default(), Rates::default());
            let mut told = NONE;
            for _ in 0..100 {
                let before = told;
                let prompts = rng.below(4) as u64;
                let length = 200 + 3000 * rng.below(2) as u64;
                told.running = 4 + rng.below(30) as u32;
                told.context_tokens = 2000;
                told.prefilled.prompts += prompts;
                told.prefilled.tokens += prompts * length;
                told.prefilled.pairs += prompts * length * length / 2;
                let prompts = prompts * (1 + others);
                let computed = told.own.computed_tokens.unwrap_or_default() + prompts * length;
                told.own.computed_tokens = (seed % 3 > 0 || others > 0).then_some(computed);
                let sequences = before.running.midpoint(told.running).max(1);
                let steps = 20.0 + f64::from(rng.below(200) as u32);
                let tokens = prompts * length;
                let work = Work {
                    tokens,
                    pairs: prompts * length * length / 2,
                    steps,
                    chunks: chunks(tokens, prompts),
                    sequences,
                    context_tokens: u64::from(sequences) * 2000,
                    ..Work::default()
                };
                let busy_s = machine.seconds_of(&work) * (0.9 + 0.2 * rng.unit());
                told.own.intervals += steps * f64::from(sequences);
                told.own.seconds += busy_s * f64::from(sequences);
                // It has idled as well.
                told.at += Nanos::from_secs_f64(busy_s * (1.0 + rng.unit()));
                if let Some((taken_s, work)) = told.since(&before) {
                    fit.observe(&mut pace, &base, Measured::Tokens, taken_s, &work);
                }
            }
            let rates = pace.rates(&fit.rates(&base));
            for (name, found, true_s, most) in [
                ("step", rates.decode_step_s(16, 32_000), machine.decode_step_s(16, 32_000), 0.1),
                ("prefill", rates.prefill_s(2000, 2_000_000), machine.prefill_s(2000, 2_000_000), 0.2),
            ] {
                assert!((found / true_s - 1.0).abs() < most, "seed {seed}, {name}: {found} {true_s}");
            }
        }
    }

    #[test]
    fn an_engine_that_restarted_or_rested_says_nothing() {
        let of = |at, intervals, seconds, computed_tokens| Told {
            at: Nanos::from_secs(at),
            own: OwnMeasures { intervals, seconds, computed_tokens, fetched_tokens: 0 },
            running: 2,
            ..NONE
        };
        let busy = of(10, 100.0, 5.0, Some(10));
        assert!(busy.since(&NONE).is_some());
        for (other, before) in [
            (busy, busy),
            (NONE, busy),
            (of(20, 200.0, 9.0, Some(9)), busy),
            (of(20, 100.0, f64::NAN, None), busy),
            (of(20, 1e3, f64::INFINITY, None), busy),
        ] {
            assert_eq!(other.since(&before), None, "{other:?}");
        }
    }
}
