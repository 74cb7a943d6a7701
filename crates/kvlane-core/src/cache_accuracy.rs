//! Cache accuracy: compares predicted with reported prefix reuse, per endpoint, and falls back when predictions prove
//! wrong.
//!
//! For every answer, the predicted reuse of its prompt is compared with the reuse that the engine reports. Both sources
//! of predictions are checked all the time, whichever of them is in use: KV events ([`crate::index::exact`]) and our
//! own dispatches ([`crate::index::approx`]). So recovery of an inaccurate source is noticed. The state of an
//! endpoint's event feed and its last [`WINDOW`] answers determine one of four levels, [`Knowledge`].
//!
//! For KV events, an answer is *wrong* when prediction and report are more than a block apart, in either direction: a
//! prediction that is too high means evicted or missing blocks, one that is too low means missed store events.
//! Dispatches are coarser: they count estimated tokens and do not see evictions, so their shares of the prompt are
//! compared, and they are wrong when the shares are more than [`APPROXIMATE_SHARE`] apart. An answer with neither
//! predicted nor reported reuse is not counted.
//!
//! An engine with a KV connector may also fetch a prefix from a store that other engines fill, and reports it as reused.
//! Once its counters have shown such a fetch, more reuse than predicted says nothing about predictions: it is counted apart,
//! and earlier answers no longer count.

use serde::{Deserialize, Serialize};

/// State of an endpoint's KV event feed, set by the feed's reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Feed {
    /// The endpoint has no feed.
    #[default]
    Absent,
    /// The feed cannot be used: its block size or tokens differ from ours, or it cannot be parsed.
    Refused,
    /// Events are missing and are being requested again.
    Syncing,
    /// All of the engine's events have been applied.
    Live,
}

impl Feed {
    /// The name in logs, metrics and the operators' API.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Refused => "refused",
            Self::Syncing => "syncing",
            Self::Live => "live",
        }
    }
}

/// How an endpoint's overlap is known, from most to least accurate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Knowledge {
    /// By KV events, and predictions are accurate.
    Exact,
    /// By KV events, but predictions have often been wrong recently: they are scaled by their precision.
    Degraded,
    /// By our dispatches to it.
    #[default]
    Approximate,
    /// Not known: dispatches do not predict its reuse. Only its load counts.
    LoadOnly,
}

impl Knowledge {
    /// All levels.
    pub const ALL: [Self; 4] = [Self::Exact, Self::Degraded, Self::Approximate, Self::LoadOnly];

    /// The name in headers, metrics, logs and receipts.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Degraded => "degraded",
            Self::Approximate => "approximate",
            Self::LoadOnly => "load_only",
        }
    }
}

/// Why an endpoint's knowledge level has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The state of its feed changed.
    Feed(Feed),
    /// Predictions were wrong too often.
    Wrong,
    /// Predictions hold again.
    HoldsAgain,
    /// Its engine fetches from a store, which was not known when earlier answers were judged.
    Fetches,
    /// The endpoint restarted: its cache is empty, and earlier errors may no longer apply.
    StartedAgain,
}

impl Cause {
    /// A description for logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Feed(Feed::Absent) => "endpoint has no KV event feed",
            Self::Feed(Feed::Refused) => "KV event feed cannot be used",
            Self::Feed(Feed::Syncing) => "KV event feed has gaps or is unreachable",
            Self::Feed(Feed::Live) => "KV event feed is complete",
            Self::Wrong => "reported prefix reuse differed too often from predictions",
            Self::HoldsAgain => "predictions are accurate again",
            Self::Fetches => "endpoint fetches from a store, so earlier answers no longer count",
            Self::StartedAgain => "endpoint restarted",
        }
    }
}

/// A change of the knowledge level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnowledgeChange {
    /// The previous level.
    pub from: Knowledge,
    /// The current level.
    pub to: Knowledge,
    /// Why it changed.
    pub cause: Cause,
}

/// Predicted reuse of one prompt at one endpoint, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prediction {
    /// By KV events, and by dispatches whose events are still to come.
    pub exact: u32,
    /// By dispatches.
    pub approximate: u32,
    /// Of `exact`, what is only below the GPU: in host memory, on disk or in a shared store. It is reused as well, after
    /// it was loaded.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lower: u32,
}

fn is_zero(tokens: &u32) -> bool {
    *tokens == 0
}

/// Prefix reuse that an answer reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedReuse {
    /// Prompt tokens, cached ones included.
    pub prompt_tokens: u32,
    /// Prompt tokens that came from the cache.
    pub cached_tokens: u32,
}

/// Counters over all answers so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Answers that reported their reuse.
    pub answers: u64,
    /// Answers for which the prediction in use was wrong.
    pub wrong: u64,
    /// Tokens predicted to be reused.
    pub predicted: u64,
    /// Tokens reported as reused.
    pub reported: u64,
    /// Tokens both predicted and reused: the smaller of the two, per answer.
    pub both: u64,
    /// Tokens reported beyond the prediction by an engine that fetches from outside. No part of `reported`.
    pub outside: u64,
}

/// Accuracy of one endpoint's predictions.
#[derive(Clone, Copy, Debug, Default)]
pub struct CacheAccuracy {
    feed: Feed,
    exact: Record,
    approximate: Record,
    totals: Totals,
    counted: Counted,
    fetches: bool,
}

/// Recent answers of one source of predictions.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    /// One bit per answer, the latest lowest; set if the prediction was wrong.
    wrong: u16,
    seen: u8,
    worth: Worth,
    /// Recent tokens; older answers weigh less.
    predicted: f32,
    reported: f32,
    both: f32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Worth {
    #[default]
    Good,
    Poor,
    None,
}

/// State for comparing predictions with an engine's cache counters, where its answers do not report reuse.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    /// Last counter values: tokens queried and tokens hit.
    last: Option<(f64, f64)>,
    /// Sums over requests prefilled since then.
    prompt_tokens: u64,
    exact: u64,
    approximate: u64,
}

/// Answers remembered per source.
pub const WINDOW: u32 = 16;
/// Wrong answers in the window from which predictions by KV events are scaled by their precision, and from which they
/// are not used.
const POOR: u32 = 4;
const WORTHLESS: u32 = 10;
/// Wrong answers in the window from which dispatches are not used. Higher, since the only fallback is load alone.
const APPROXIMATE_WORTHLESS: u32 = 12;
/// Wrong answers in the window below which each fallback is reverted. Lower than the limits above, to avoid flapping.
const GOOD_AGAIN: u32 = 1;
const POOR_AGAIN: u32 = 4;
const APPROXIMATE_GOOD_AGAIN: u32 = 6;
/// Fewest answers needed for a judgement.
const SEEN_MIN: u32 = 6;
/// Tolerance of an approximate prediction, as a share of the prompt.
pub const APPROXIMATE_SHARE: f32 = 0.25;
/// Tolerance of an exact prediction in tokens, where blocks are smaller: SGLang matches single tokens, and templates
/// differ in the last few.
const TOKENS_OFF_MAX: u32 = 16;
/// Weight of the past when one answer is added.
const DECAY: f32 = 1.0 - 1.0 / WINDOW as f32;
/// Largest relative difference between an engine's counter and our prompts at which all of the engine's requests are
/// taken to be ours.
const FOREIGN_SHARE_MAX: f64 = 0.1;

// === impl Prediction ===

impl Prediction {
    /// That for the first `tokens` of the prompt.
    pub(crate) fn within(self, tokens: u32) -> Self {
        let exact = self.exact.min(tokens);
        Self { exact, approximate: self.approximate.min(tokens), lower: self.lower.min(exact) }
    }
}

// === impl CacheAccuracy ===

impl CacheAccuracy {
    /// The endpoint's knowledge level.
    pub fn knowledge(&self) -> Knowledge {
        match (self.feed, self.exact.worth, self.approximate.worth) {
            (Feed::Live, Worth::Good, _) => Knowledge::Exact,
            (Feed::Live, Worth::Poor, _) => Knowledge::Degraded,
            (_, _, Worth::None) => Knowledge::LoadOnly,
            _ => Knowledge::Approximate,
        }
    }

    /// The state of its feed.
    pub fn feed(&self) -> Feed {
        self.feed
    }

    /// Predicted tokens to use in a decision.
    pub fn counting(&self, prediction: Prediction) -> u32 {
        match self.knowledge() {
            Knowledge::Exact => prediction.exact,
            Knowledge::Degraded => (prediction.exact as f32 * self.exact.precision()) as u32,
            Knowledge::Approximate => prediction.approximate,
            Knowledge::LoadOnly => 0,
        }
    }

    /// Of the predicted tokens to use, those that are only below the GPU. Dispatches do not know tiers.
    pub fn counting_lower(&self, prediction: Prediction) -> u32 {
        match self.knowledge() {
            Knowledge::Exact => prediction.lower,
            Knowledge::Degraded => (prediction.lower as f32 * self.exact.precision()) as u32,
            Knowledge::Approximate | Knowledge::LoadOnly => 0,
        }
    }

    /// Counters over all answers, by the source in use.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Precision: the share of recently predicted tokens that were reused; 1 if none were predicted.
    pub fn precision(&self) -> f32 {
        self.source().precision()
    }

    /// Recall: the share of recently reused tokens that were predicted; 1 if none were reused.
    pub fn recall(&self) -> f32 {
        self.source().recall()
    }

    fn source(&self) -> &Record {
        match self.knowledge() {
            Knowledge::Exact | Knowledge::Degraded => &self.exact,
            Knowledge::Approximate | Knowledge::LoadOnly => &self.approximate,
        }
    }

    /// Sets the state of the feed. Answers before a gap do not count for the feed after it.
    pub(crate) fn set_feed(&mut self, feed: Feed) -> Option<KnowledgeChange> {
        if feed == self.feed {
            return None;
        }
        let from = self.knowledge();
        self.feed = feed;
        if feed == Feed::Live {
            self.exact = Record::default();
        }
        self.change(from, Cause::Feed(feed))
    }

    /// The engine has fetched tokens from outside its cache, and may do so again. What answers reported beyond
    /// predictions until this was known may have come from there as well, so the record begins anew the first time.
    pub(crate) fn fetched(&mut self) -> Option<KnowledgeChange> {
        if self.fetches {
            return None;
        }
        let from = self.knowledge();
        (self.fetches, self.exact, self.approximate) = (true, Record::default(), Record::default());
        self.change(from, Cause::Fetches)
    }

    /// The endpoint restarted: resets all judgements.
    pub(crate) fn forget(&mut self) -> Option<KnowledgeChange> {
        let from = self.knowledge();
        let Self { feed, totals, fetches, .. } = *self;
        *self = Self { feed, totals, fetches, ..Self::default() };
        self.change(from, Cause::StartedAgain)
    }

    /// Compares a prompt's predicted reuse with the engine's report.
    pub(crate) fn observe(
        &mut self,
        prediction: Prediction,
        prompt_tokens: u32,
        reported: ReportedReuse,
        block_tokens: u32,
    ) -> Option<KnowledgeChange> {
        let from = self.knowledge();
        // Of what an engine with a store reports, a source is held to no more than it predicted.
        let held_to = |predicted: u32| match self.fetches {
            true => reported.cached_tokens.min(predicted),
            false => reported.cached_tokens,
        };
        let (exact_cached, approximate_cached) = (held_to(prediction.exact), held_to(prediction.approximate));
        let tolerance = block_tokens.max(TOKENS_OFF_MAX);
        let exact_wrong = self
            .exact
            .judge(prediction.exact, exact_cached, || prediction.exact.abs_diff(exact_cached) > tolerance);
        let approximate_wrong = self.approximate.judge(prediction.approximate, approximate_cached, || {
            let share = |tokens: u32, of: u32| tokens as f32 / of.max(1) as f32;
            let (expected, seen) = (
                share(prediction.approximate, prompt_tokens),
                share(approximate_cached, reported.prompt_tokens),
            );
            (expected - seen).abs() > APPROXIMATE_SHARE
        });
        let (predicted, cached, wrong) = match from {
            Knowledge::Exact | Knowledge::Degraded => (prediction.exact, exact_cached, exact_wrong),
            Knowledge::Approximate | Knowledge::LoadOnly => {
                (prediction.approximate, approximate_cached, approximate_wrong)
            }
        };
        self.totals.answers += 1;
        self.totals.wrong += u64::from(wrong);
        self.totals.predicted += u64::from(predicted);
        self.totals.reported += u64::from(cached);
        self.totals.both += u64::from(predicted.min(cached));
        self.totals.outside += u64::from(reported.cached_tokens - cached);
        self.exact.worth = self.exact.judged_by_events();
        self.approximate.worth = self.approximate.judged_by_dispatches();
        let better = self.knowledge() < from;
        self.change(from, if better { Cause::HoldsAgain } else { Cause::Wrong })
    }

    /// Adds a prefilled request whose reuse may be covered by the engine's counters instead of its answer.
    pub(crate) fn expect_in_counters(&mut self, prediction: Prediction, prompt_tokens: u32) {
        self.counted.prompt_tokens += u64::from(prompt_tokens);
        self.counted.exact += u64::from(prediction.exact);
        self.counted.approximate += u64::from(prediction.approximate);
    }

    /// Removes a request added by [`CacheAccuracy::expect_in_counters`]: its answer reported its reuse.
    pub(crate) fn exclude_from_counters(&mut self, prediction: Prediction, prompt_tokens: u32) {
        let Counted { prompt_tokens: prompts, exact, approximate, .. } = &mut self.counted;
        *prompts = prompts.saturating_sub(prompt_tokens.into());
        *exact = exact.saturating_sub(prediction.exact.into());
        *approximate = approximate.saturating_sub(prediction.approximate.into());
    }

    /// Compares the predictions since the last call with the change of the engine's counters: tokens queried and tokens
    /// hit. No comparison is possible if other clients' requests have changed the counters too.
    pub(crate) fn count(&mut self, queries: f64, hits: f64, block_tokens: u32) -> Option<KnowledgeChange> {
        let Counted { last, prompt_tokens, exact, approximate } = self.counted;
        self.counted = Counted { last: Some((queries, hits)), ..Counted::default() };
        let (queries_before, hits_before) = last?;
        let (asked, found) = (queries - queries_before, hits - hits_before);
        let ours = prompt_tokens as f64;
        let all_ours = ours > 0.0 && (asked - ours).abs() <= FOREIGN_SHARE_MAX * ours;
        if !all_ours || !(0.0..=f64::from(u32::MAX)).contains(&found) {
            return None;
        }
        // Casts saturate, and sums between two reads of an engine's metrics are far below the limit.
        let prediction = Prediction { exact: exact as u32, approximate: approximate as u32, lower: 0 };
        let reported = ReportedReuse { prompt_tokens: asked as u32, cached_tokens: found as u32 };
        let tolerance = block_tokens.max((FOREIGN_SHARE_MAX * ours) as u32);
        self.observe(prediction, prompt_tokens as u32, reported, tolerance)
    }

    fn change(&self, from: Knowledge, cause: Cause) -> Option<KnowledgeChange> {
        let to = self.knowledge();
        (from != to).then_some(KnowledgeChange { from, to, cause })
    }
}

// === impl Record ===

impl Record {
    /// Records one answer; returns whether it was wrong.
    fn judge(&mut self, predicted: u32, reported: u32, is_wrong: impl FnOnce() -> bool) -> bool {
        if predicted == 0 && reported == 0 {
            return false;
        }
        let wrong = is_wrong();
        self.wrong = self.wrong << 1 | u16::from(wrong);
        self.seen = self.seen.saturating_add(1).min(WINDOW as u8);
        for (sum, tokens) in [
            (&mut self.predicted, predicted),
            (&mut self.reported, reported),
            (&mut self.both, predicted.min(reported)),
        ] {
            *sum = *sum * DECAY + tokens as f32;
        }
        wrong
    }

    fn judged_by_events(&self) -> Worth {
        let wrong = self.wrong.count_ones();
        match self.worth {
            worth if u32::from(self.seen) < SEEN_MIN => worth,
            _ if wrong >= WORTHLESS => Worth::None,
            Worth::None if wrong > POOR_AGAIN => Worth::None,
            Worth::Good if wrong < POOR => Worth::Good,
            _ if wrong <= GOOD_AGAIN => Worth::Good,
            _ => Worth::Poor,
        }
    }

    fn judged_by_dispatches(&self) -> Worth {
        let wrong = self.wrong.count_ones();
        match self.worth {
            worth if u32::from(self.seen) < SEEN_MIN => worth,
            Worth::None if wrong > APPROXIMATE_GOOD_AGAIN => Worth::None,
            _ if wrong >= APPROXIMATE_WORTHLESS => Worth::None,
            _ => Worth::Good,
        }
    }

    fn precision(&self) -> f32 {
        if self.predicted > 0.0 { (self.both / self.predicted).min(1.0) } else { 1.0 }
    }

    fn recall(&self) -> f32 {
        if self.reported > 0.0 { (self.both / self.reported).min(1.0) } else { 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A report for a prompt of 1,000 tokens of which `cached_tokens` were reused.
    fn reported(cached_tokens: u32) -> ReportedReuse {
        ReportedReuse { prompt_tokens: 1000, cached_tokens }
    }

    fn live() -> CacheAccuracy {
        let mut accuracy = CacheAccuracy::default();
        let change = accuracy.set_feed(Feed::Live).expect("a change");
        assert_eq!((change.from, change.to), (Knowledge::Approximate, Knowledge::Exact));
        accuracy
    }

    /// The knowledge changes after `answers` answers with these predicted and reported tokens.
    fn after(
        accuracy: &mut CacheAccuracy,
        answers: u32,
        exact: u32,
        approximate: u32,
        cached: u32,
    ) -> Vec<Knowledge> {
        let prediction = Prediction { exact, approximate, lower: 0 };
        let observe = |_| accuracy.observe(prediction, 1000, reported(cached), 16);
        (0..answers).filter_map(observe).map(|change| change.to).collect()
    }

    /// Invariant: An endpoint whose cache predictions prove wrong falls back alone, and recovers when predictions
    /// hold again.
    ///
    /// Also held by `an_engine_that_reuses_nothing_is_judged_by_its_load_alone`.
    #[test]
    fn one_that_lies_steps_down_to_what_we_know_ourselves_and_comes_back_when_predictions_hold() {
        let mut accuracy = live();
        assert_eq!(after(&mut accuracy, 40, 800, 800, 800), []);
        let down = after(&mut accuracy, WINDOW, 800, 320, 320);
        assert_eq!(down, [Knowledge::Degraded, Knowledge::Approximate]);
        assert_eq!(accuracy.counting(Prediction { exact: 800, approximate: 320, lower: 0 }), 320);
        let up = after(&mut accuracy, WINDOW, 320, 320, 320);
        assert_eq!(up, [Knowledge::Degraded, Knowledge::Exact]);
    }

    #[test]
    fn what_is_degraded_counts_as_far_as_it_was_right() {
        let mut accuracy = live();
        after(&mut accuracy, 12, 800, 0, 800);
        assert_eq!(after(&mut accuracy, 4, 800, 0, 400), [Knowledge::Degraded]);
        let counting = accuracy.counting(Prediction { exact: 1000, approximate: 7, lower: 0 });
        assert!((700..1000).contains(&counting), "{counting}");
        assert!((0.7..1.0).contains(&accuracy.precision()));
        assert_eq!(accuracy.recall(), 1.0);
    }

    #[test]
    fn an_engine_that_reuses_nothing_is_judged_by_its_load_alone() {
        let mut accuracy = CacheAccuracy::default();
        assert_eq!(after(&mut accuracy, 40, 0, 900, 0), [Knowledge::LoadOnly]);
        assert_eq!(accuracy.counting(Prediction { exact: 900, approximate: 900, lower: 0 }), 0);
        assert_eq!(after(&mut accuracy, 40, 0, 900, 890), [Knowledge::Approximate]);
    }

    #[test]
    fn a_block_more_or_less_is_right_and_two_are_not() {
        let mut accuracy = live();
        after(&mut accuracy, 32, 800, 0, 816);
        after(&mut accuracy, 32, 800, 0, 784);
        assert_eq!(accuracy.totals().wrong, 0);
        after(&mut accuracy, 1, 800, 0, 832);
        assert_eq!(accuracy.totals().wrong, 1);
    }

    /// Invariant: What an engine fetches from a store is not held against the predictions.
    #[test]
    fn what_comes_from_outside_is_counted_apart_and_less_than_predicted_is_still_wrong() {
        let mut accuracy = live();
        accuracy.fetched();
        assert_eq!(after(&mut accuracy, 40, 320, 320, 800), []);
        assert_eq!(after(&mut accuracy, 40, 0, 0, 800), []);
        let Totals { answers, wrong, reported, outside, .. } = accuracy.totals();
        assert_eq!((answers, wrong, reported, outside), (80, 0, 40 * 320, 40 * 480 + 40 * 800));
        assert_eq!((accuracy.precision(), accuracy.recall()), (1.0, 1.0));
        assert_eq!(
            after(&mut accuracy, WINDOW, 800, 320, 320),
            [Knowledge::Degraded, Knowledge::Approximate]
        );
        let too_little = after(&mut live(), WINDOW, 320, 800, 800);
        assert_eq!(too_little, [Knowledge::Degraded, Knowledge::Approximate], "by one that has no store");
    }

    #[test]
    fn what_came_from_outside_before_that_was_known_is_forgiven_once() {
        let mut accuracy = live();
        assert_eq!(after(&mut accuracy, 8, 0, 0, 800), [Knowledge::Degraded]);
        let change = accuracy.fetched().expect("a change");
        assert_eq!((change.to, change.cause), (Knowledge::Exact, Cause::Fetches));
        assert_eq!(after(&mut accuracy, 40, 0, 0, 800), []);
        assert_eq!(after(&mut accuracy, 8, 800, 800, 320), [Knowledge::Degraded]);
        assert_eq!(accuracy.fetched(), None);
        assert_eq!(accuracy.knowledge(), Knowledge::Degraded);
    }

    #[test]
    fn prompts_without_a_prediction_do_not_count() {
        let mut accuracy = live();
        after(&mut accuracy, 3, 800, 800, 0);
        after(&mut accuracy, 100, 0, 0, 0);
        assert_eq!(accuracy.knowledge(), Knowledge::Exact, "three wrong answers are too few");
        assert_eq!(after(&mut accuracy, 3, 800, 800, 0).first(), Some(&Knowledge::Degraded));
    }

    #[test]
    fn while_a_feed_catches_up_our_own_dispatches_count() {
        let mut accuracy = live();
        let change = accuracy.set_feed(Feed::Syncing).expect("a change");
        assert_eq!((change.to, change.cause), (Knowledge::Approximate, Cause::Feed(Feed::Syncing)));
        assert_eq!(accuracy.set_feed(Feed::Syncing), None);
        assert_eq!(accuracy.counting(Prediction { exact: 5, approximate: 3, lower: 0 }), 3);
        assert_eq!(accuracy.set_feed(Feed::Live).map(|change| change.to), Some(Knowledge::Exact));
    }

    #[test]
    fn counters_tell_where_answers_do_not_unless_others_move_them_too() {
        let mut accuracy = live();
        let (mut queries, mut hits) = (0.0, 0.0);
        let mut round = |accuracy: &mut CacheAccuracy, foreign: f64, found: f64| {
            (0..10).for_each(|_| {
                accuracy.expect_in_counters(Prediction { exact: 800, approximate: 800, lower: 0 }, 1000)
            });
            (queries, hits) = (queries + 10_000.0 + foreign, hits + found);
            accuracy.count(queries, hits, 16).map(|change| change.to)
        };
        assert_eq!(round(&mut accuracy, 0.0, 0.0), None, "the first reading has no predecessor");
        for _ in 0..20 {
            assert_eq!(round(&mut accuracy, 5000.0, 0.0), None, "other clients' requests are included");
        }
        assert_eq!(accuracy.totals().answers, 0);
        let changes: Vec<_> = (0..12).filter_map(|_| round(&mut accuracy, 300.0, 1000.0)).collect();
        assert_eq!(changes[0], Knowledge::Degraded);
        assert_eq!(accuracy.totals().wrong, 12);
    }

    proptest! {
        /// Invariant: A decision counts no more cached tokens than some source reported, and KV events count only
        /// while the feed is complete.
        ///
        /// Also held by `while_a_feed_catches_up_our_own_dispatches_count`.
        #[test]
        fn what_counts_is_never_more_than_a_source_said(
            answers in prop::collection::vec((0u32..1000, 0u32..1000, 0u32..=1000), 0..80),
            feeds in prop::collection::vec(0usize..4, 80),
            exact in 0u32..1000,
            approximate in 0u32..1000,
        ) {
            let mut accuracy = CacheAccuracy::default();
            for ((exact, approximate, cached), feed) in answers.into_iter().zip(feeds) {
                let before = accuracy.knowledge();
                let feed = [Feed::Absent, Feed::Refused, Feed::Syncing, Feed::Live][feed];
                let change = accuracy.set_feed(feed);
                prop_assert_eq!(change.is_some(), before != accuracy.knowledge());
                accuracy.observe(Prediction { exact, approximate, lower: 0 }, 1000, reported(cached), 16);
                prop_assert!(feed == Feed::Live || accuracy.knowledge() >= Knowledge::Approximate);
            }
            let counting = accuracy.counting(Prediction { exact, approximate, lower: 0 });
            prop_assert!(counting <= exact.max(approximate));
            prop_assert!((0.0..=1.0).contains(&accuracy.precision()) && (0.0..=1.0).contains(&accuracy.recall()));
        }
    }
}
