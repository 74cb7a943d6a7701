//! Prompt tokens that came from caches, and how many could have.
//!
//! The trace says which tokens of a prompt an earlier request has: an infinite cache that is empty at first finds no
//! others of it. Engines find more than that where a chat template begins every prompt alike, and where their caches
//! are not empty at first. What was found was in a cache, so no bound is below it; and of caches that held the prompts
//! before the run, the trace's repetition is no bound.

use kvlane_trace::record::Record;

/// Share of the prompt tokens beyond the trace's repetition that chat templates may explain.
const TEMPLATE_MAX: f64 = 0.05;

/// Shares of the prompt tokens: of the answers that report cached tokens, or of all if none does.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CachedShares {
    /// What came from caches, if the answers report it.
    pub found: Option<f64>,
    /// What the trace repeats, if the records contain it.
    pub repeated: Option<f64>,
    /// What the trace repeats or a cache had, whichever is more of each prompt.
    most: Option<f64>,
}

// === impl CachedShares ===

impl CachedShares {
    /// The shares of a run.
    pub fn of(records: &[Record]) -> Self {
        let answered = || records.iter().filter(|record| record.is_ok());
        let reported = answered().any(|record| record.cached_tokens.is_some());
        let counted = || answered().filter(|record| !reported || record.cached_tokens.is_some());
        let share = |tokens: &dyn Fn(&Record) -> Option<u32>| {
            let (mut part, mut whole) = (0.0, 0.0);
            for record in counted() {
                part += f64::from(tokens(record)?.min(record.prompt_tokens));
                whole += f64::from(record.prompt_tokens);
            }
            (whole > 0.0).then(|| part / whole)
        };
        let repeated = |record: &Record| record.reusable_tokens.or(record.shared_tokens);
        Self {
            found: share(&|record| record.cached_tokens),
            repeated: share(&repeated),
            most: share(&|record| Some(repeated(record)?.max(record.cached_tokens.unwrap_or(0)))),
        }
    }

    /// What an infinite cache would have held; never below what was found. `None` if it is unknown: the records do not
    /// say what the trace repeats, or caches held the prompts before.
    pub fn most(&self) -> Option<f64> {
        self.most.filter(|_| !self.is_warm())
    }

    /// Why more was found than the trace repeats, if it was.
    pub fn excess(&self) -> Option<String> {
        let (found, repeated) = (self.found?, self.repeated?);
        if found <= repeated {
            return None;
        }
        let [found, repeated] = [found, repeated].map(|share| format!("{:.1} %", share * 100.0));
        Some(match self.is_warm() {
            true => format!(
                "{found} of the prompt tokens came from caches, though the trace repeats only {repeated}: the caches held these \
                 prompts before. Flush them, or use another --seed."
            ),
            false => format!(
                "{found} of the prompt tokens came from caches, though the trace repeats only {repeated}: the chat template \
                 begins every prompt with the same tokens."
            ),
        })
    }

    /// Whether more was found than chat templates explain.
    fn is_warm(&self) -> bool {
        self.found.zip(self.repeated).is_some_and(|(found, repeated)| found > repeated + TEMPLATE_MAX)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, prop_assert, proptest};

    use super::*;

    fn record(cached: Option<u32>, reusable: Option<u32>) -> Record {
        Record {
            prompt_tokens: 1000,
            cached_tokens: cached,
            reusable_tokens: reusable,
            status: 200,
            ..Record::default()
        }
    }

    #[test]
    fn a_chat_template_raises_the_bound_and_is_named() {
        let shares =
            CachedShares::of(&[record(Some(0), Some(0)), record(Some(58), Some(41)), record(None, None)]);
        assert_eq!((shares.found, shares.repeated, shares.most()), (Some(0.029), Some(0.0205), Some(0.029)));
        assert!(shares.excess().is_some_and(|why| why.contains("chat template")));
    }

    #[test]
    fn caches_that_held_the_prompts_before_have_no_bound() {
        let shares = CachedShares::of(&[record(Some(900), Some(0)), record(Some(900), Some(900))]);
        assert_eq!((shares.found, shares.most()), (Some(0.9), None));
        assert!(shares.excess().is_some_and(|why| why.contains("held these prompts before")));
    }

    #[test]
    fn without_a_report_the_bound_is_what_the_trace_repeats() {
        let shares = CachedShares::of(&[record(None, Some(500)), record(None, Some(100))]);
        assert_eq!((shares.found, shares.most(), shares.excess()), (None, Some(0.3), None));
        assert_eq!(CachedShares::of(&[]), CachedShares::default());
    }

    proptest! {
        #[test]
        fn no_more_is_found_than_the_bound(
            tokens in prop::collection::vec((any::<Option<u32>>(), any::<Option<u32>>()), 0..20),
        ) {
            let records: Vec<Record> =
                tokens.iter().map(|(a, b)| record(a.map(|a| a % 1001), b.map(|b| b % 2000))).collect();
            let shares = CachedShares::of(&records);
            if let (Some(found), Some(most)) = (shares.found, shares.most()) {
                prop_assert!(found <= most && most <= 1.0);
            }
        }
    }
}
