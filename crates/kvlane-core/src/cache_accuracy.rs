//! Whether what we believe of an endpoint's cache is true, and what to do while it is not.
//!
//! For every answer, what the endpoint was predicted to hold of the prompt is compared with what the engine says it
//! reused. Both sources of predictions are checked all the time, the engine's events ([`crate::index::exact`]) and our
//! own dispatches ([`crate::index::approx`]), whichever of them counts: so it is seen when one that was wrong holds
//! again. What an endpoint's predictions are worth follows from two things, the state of its event feed and its last
//! [`WINDOW`] answers, and has one of four names, [`Knowledge`].
//!
//! An answer is *wrong* for the events when prediction and report are more than a block apart, either way: too much
//! means blocks that were evicted or never there, too little means stores that were not heard of. Dispatches are
//! coarser: they count in estimated tokens and know no evictions, so for them shares of the prompt are compared, and
//! they are wrong when those are more than [`APPROXIMATE_SHARE`] apart. An answer for which nothing was predicted and
//! nothing reused says nothing.

use serde::{Deserialize, Serialize};

/// What the stream of an endpoint's KV events is worth. Told by whoever reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Feed {
    /// There is none.
    #[default]
    Absent,
    /// There is one, and it cannot be used: its blocks or tokens are not ours, or it is not to be understood.
    Refused,
    /// Something is missing, and is being asked for again.
    Syncing,
    /// All that the engine has said is known.
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

/// How an endpoint's share of a prompt is known, from best to worst.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Knowledge {
    /// By the engine's events, and predictions hold.
    Exact,
    /// By the engine's events, but predictions have often been wrong of late: they count as far as they were right.
    Degraded,
    /// By what we have sent there.
    #[default]
    Approximate,
    /// Not at all: what we have sent there tells nothing about what it reuses. Only its load counts.
    LoadOnly,
}

impl Knowledge {
    /// All of them.
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

/// Why knowledge of an endpoint has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// The state of its feed.
    Feed(Feed),
    /// Predictions were wrong too often.
    Wrong,
    /// Predictions hold again.
    HoldsAgain,
    /// It has lost all, and what was wrong with it may be over.
    StartedAgain,
}

impl Cause {
    /// In words, for logs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Feed(Feed::Absent) => "it has no event feed",
            Self::Feed(Feed::Refused) => "its event feed cannot be used",
            Self::Feed(Feed::Syncing) => "its event feed has gaps, or is out of reach",
            Self::Feed(Feed::Live) => "its event feed is complete",
            Self::Wrong => "what it reused differed too often from what was predicted",
            Self::HoldsAgain => "predictions hold again",
            Self::StartedAgain => "it started again",
        }
    }
}

/// A change of knowledge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnowledgeChange {
    /// What it was.
    pub from: Knowledge,
    /// What it is.
    pub to: Knowledge,
    /// Why.
    pub cause: Cause,
}

/// What was predicted of one prompt at one endpoint, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prediction {
    /// By the engine's events, and by what we have sent there since.
    pub exact: u32,
    /// By what we have sent there.
    pub approximate: u32,
}

/// What an answer says it took.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReportedReuse {
    /// Tokens of its prompt, cached ones included.
    pub prompt_tokens: u32,
    /// Those that came from the cache.
    pub cached_tokens: u32,
}

/// Tokens over all answers so far, as counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Answers that told what they reused.
    pub answers: u64,
    /// Those of them for which the prediction that counted was wrong.
    pub wrong: u64,
    /// Tokens that were predicted to be reused.
    pub predicted: u64,
    /// Tokens that were reused.
    pub reported: u64,
    /// Tokens of both: the smaller of the two, answer by answer.
    pub both: u64,
}

/// What one endpoint's predictions have been worth.
#[derive(Clone, Copy, Debug, Default)]
pub struct CacheAccuracy {
    feed: Feed,
    exact: Record,
    approximate: Record,
    totals: Totals,
    counted: Counted,
}

/// The last answers of one source of predictions.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    /// One bit for each answer, the last one lowest; set where it was wrong.
    wrong: u16,
    seen: u8,
    worth: Worth,
    /// Tokens of late, older answers weighing less.
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

/// What an engine's counters are compared with, where its answers tell nothing.
#[derive(Clone, Copy, Debug, Default)]
struct Counted {
    /// What the counters said last: tokens asked for and found.
    last: Option<(f64, f64)>,
    /// Sums over requests whose prompts were computed since.
    prompt_tokens: u64,
    exact: u64,
    approximate: u64,
}

/// Answers that are remembered of each source.
pub const WINDOW: u32 = 16;
/// Wrong ones among them that make the engine's events count only as far as they were right, and none of them any more.
const POOR: u32 = 4;
const WORTHLESS: u32 = 10;
/// Wrong ones of dispatches among them from which on dispatches do not count. Higher, since there is nothing better to
/// step down to than the load alone.
const APPROXIMATE_WORTHLESS: u32 = 12;
/// Wrong ones among them below which each step is taken back. Apart from those above, so that nothing flutters.
const GOOD_AGAIN: u32 = 1;
const POOR_AGAIN: u32 = 4;
const APPROXIMATE_GOOD_AGAIN: u32 = 6;
/// Fewest answers to judge by.
const SEEN_MIN: u32 = 6;
/// Shares of a prompt that an approximate prediction may be off by.
pub const APPROXIMATE_SHARE: f32 = 0.25;
/// Tokens that a prediction by events may be off by where blocks are smaller: SGLang matches single tokens, and templates
/// differ in the last few.
const TOKENS_OFF_MAX: u32 = 16;
/// How much the past weighs against one more answer.
const DECAY: f32 = 1.0 - 1.0 / WINDOW as f32;
/// How far apart an engine's counter and the prompts that we know of may be for all of them to be ours.
const FOREIGN_SHARE_MAX: f64 = 0.1;

// === impl CacheAccuracy ===

impl CacheAccuracy {
    /// How the endpoint's share of a prompt is known.
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

    /// Tokens that count in a decision.
    pub fn counting(&self, prediction: Prediction) -> u32 {
        match self.knowledge() {
            Knowledge::Exact => prediction.exact,
            Knowledge::Degraded => (prediction.exact as f32 * self.exact.precision()) as u32,
            Knowledge::Approximate => prediction.approximate,
            Knowledge::LoadOnly => 0,
        }
    }

    /// Tokens predicted and reported of all answers, by the source that counted.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Of the tokens predicted of late, the share that was reused; 1 if none were predicted.
    pub fn precision(&self) -> f32 {
        self.source().precision()
    }

    /// Of the tokens reused of late, the share that was predicted; 1 if none were reused.
    pub fn recall(&self) -> f32 {
        self.source().recall()
    }

    fn source(&self) -> &Record {
        match self.knowledge() {
            Knowledge::Exact | Knowledge::Degraded => &self.exact,
            Knowledge::Approximate | Knowledge::LoadOnly => &self.approximate,
        }
    }

    /// Takes note of the state of the feed. What was heard before a gap says nothing of what comes after it.
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

    /// It has started again: nothing that was wrong with it needs to be so any more.
    pub(crate) fn forget(&mut self) -> Option<KnowledgeChange> {
        let from = self.knowledge();
        let Self { feed, totals, .. } = *self;
        *self = Self { feed, totals, ..Self::default() };
        self.change(from, Cause::StartedAgain)
    }

    /// Compares what was predicted of a prompt with what the engine says it reused.
    pub(crate) fn observe(
        &mut self,
        prediction: Prediction,
        prompt_tokens: u32,
        reported: ReportedReuse,
        block_tokens: u32,
    ) -> Option<KnowledgeChange> {
        let from = self.knowledge();
        let cached = reported.cached_tokens;
        let tolerance = block_tokens.max(TOKENS_OFF_MAX);
        let exact_wrong =
            self.exact.judge(prediction.exact, cached, || prediction.exact.abs_diff(cached) > tolerance);
        let approximate_wrong = self.approximate.judge(prediction.approximate, cached, || {
            let share = |tokens: u32, of: u32| tokens as f32 / of.max(1) as f32;
            let (expected, seen) =
                (share(prediction.approximate, prompt_tokens), share(cached, reported.prompt_tokens));
            (expected - seen).abs() > APPROXIMATE_SHARE
        });
        let (predicted, wrong) = match from {
            Knowledge::Exact | Knowledge::Degraded => (prediction.exact, exact_wrong),
            Knowledge::Approximate | Knowledge::LoadOnly => (prediction.approximate, approximate_wrong),
        };
        self.totals.answers += 1;
        self.totals.wrong += u64::from(wrong);
        self.totals.predicted += u64::from(predicted);
        self.totals.reported += u64::from(cached);
        self.totals.both += u64::from(predicted.min(cached));
        self.exact.worth = self.exact.judged_by_events();
        self.approximate.worth = self.approximate.judged_by_dispatches();
        let better = self.knowledge() < from;
        self.change(from, if better { Cause::HoldsAgain } else { Cause::Wrong })
    }

    /// Takes note of a request whose answer will not tell what it reused: the engine's counters may.
    pub(crate) fn owe(&mut self, prediction: Prediction, prompt_tokens: u32) {
        self.counted.prompt_tokens += u64::from(prompt_tokens);
        self.counted.exact += u64::from(prediction.exact);
        self.counted.approximate += u64::from(prediction.approximate);
    }

    /// The request of an earlier [`CacheAccuracy::owe`] has told after all.
    pub(crate) fn repay(&mut self, prediction: Prediction, prompt_tokens: u32) {
        let Counted { prompt_tokens: prompts, exact, approximate, .. } = &mut self.counted;
        *prompts = prompts.saturating_sub(prompt_tokens.into());
        *exact = exact.saturating_sub(prediction.exact.into());
        *approximate = approximate.saturating_sub(prediction.approximate.into());
    }

    /// Compares the sums of predictions since the last call with what the engine's counters have moved by: tokens
    /// looked for in its cache, and found. Where others' requests have moved them too, nothing can be said.
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
        // Casts saturate, and sums between two looks at an engine's metrics are far below.
        let prediction = Prediction { exact: exact as u32, approximate: approximate as u32 };
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
    /// Notes one answer; whether it was wrong.
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

    /// A prompt of 1,000 tokens of which `cached` were reused.
    fn reported(cached_tokens: u32) -> ReportedReuse {
        ReportedReuse { prompt_tokens: 1000, cached_tokens }
    }

    fn live() -> CacheAccuracy {
        let mut accuracy = CacheAccuracy::default();
        let change = accuracy.set_feed(Feed::Live).expect("a change");
        assert_eq!((change.from, change.to), (Knowledge::Approximate, Knowledge::Exact));
        accuracy
    }

    /// The changes that `answers` answers bring, each predicted and reported so.
    fn after(
        accuracy: &mut CacheAccuracy,
        answers: u32,
        exact: u32,
        approximate: u32,
        cached: u32,
    ) -> Vec<Knowledge> {
        let prediction = Prediction { exact, approximate };
        let observe = |_| accuracy.observe(prediction, 1000, reported(cached), 16);
        (0..answers).filter_map(observe).map(|change| change.to).collect()
    }

    #[test]
    fn one_that_lies_steps_down_to_what_we_know_ourselves_and_comes_back_when_predictions_hold() {
        let mut accuracy = live();
        assert_eq!(after(&mut accuracy, 40, 800, 800, 800), []);
        let down = after(&mut accuracy, WINDOW, 800, 320, 320);
        assert_eq!(down, [Knowledge::Degraded, Knowledge::Approximate]);
        assert_eq!(accuracy.counting(Prediction { exact: 800, approximate: 320 }), 320);
        let up = after(&mut accuracy, WINDOW, 320, 320, 320);
        assert_eq!(up, [Knowledge::Degraded, Knowledge::Exact]);
    }

    #[test]
    fn what_is_degraded_counts_as_far_as_it_was_right() {
        let mut accuracy = live();
        after(&mut accuracy, 12, 800, 0, 800);
        assert_eq!(after(&mut accuracy, 4, 800, 0, 400), [Knowledge::Degraded]);
        let counting = accuracy.counting(Prediction { exact: 1000, approximate: 7 });
        assert!((700..1000).contains(&counting), "{counting}");
        assert!((0.7..1.0).contains(&accuracy.precision()));
        assert_eq!(accuracy.recall(), 1.0);
    }

    #[test]
    fn an_engine_that_reuses_nothing_is_judged_by_its_load_alone() {
        let mut accuracy = CacheAccuracy::default();
        assert_eq!(after(&mut accuracy, 40, 0, 900, 0), [Knowledge::LoadOnly]);
        assert_eq!(accuracy.counting(Prediction { exact: 900, approximate: 900 }), 0);
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

    #[test]
    fn prompts_nobody_knew_anything_of_say_nothing() {
        let mut accuracy = live();
        after(&mut accuracy, 3, 800, 800, 0);
        after(&mut accuracy, 100, 0, 0, 0);
        assert_eq!(accuracy.knowledge(), Knowledge::Exact, "three wrong ones are too few to judge by");
        assert_eq!(after(&mut accuracy, 3, 800, 800, 0).first(), Some(&Knowledge::Degraded));
    }

    #[test]
    fn while_a_feed_catches_up_our_own_dispatches_count() {
        let mut accuracy = live();
        let change = accuracy.set_feed(Feed::Syncing).expect("a change");
        assert_eq!((change.to, change.cause), (Knowledge::Approximate, Cause::Feed(Feed::Syncing)));
        assert_eq!(accuracy.set_feed(Feed::Syncing), None);
        assert_eq!(accuracy.counting(Prediction { exact: 5, approximate: 3 }), 3);
        assert_eq!(accuracy.set_feed(Feed::Live).map(|change| change.to), Some(Knowledge::Exact));
    }

    #[test]
    fn counters_tell_where_answers_do_not_unless_others_move_them_too() {
        let mut accuracy = live();
        let (mut queries, mut hits) = (0.0, 0.0);
        let mut round = |accuracy: &mut CacheAccuracy, foreign: f64, found: f64| {
            (0..10).for_each(|_| accuracy.owe(Prediction { exact: 800, approximate: 800 }, 1000));
            (queries, hits) = (queries + 10_000.0 + foreign, hits + found);
            accuracy.count(queries, hits, 16).map(|change| change.to)
        };
        assert_eq!(round(&mut accuracy, 0.0, 0.0), None, "the first look has nothing to compare with");
        for _ in 0..20 {
            assert_eq!(round(&mut accuracy, 5000.0, 0.0), None, "others asked too");
        }
        assert_eq!(accuracy.totals().answers, 0);
        let changes: Vec<_> = (0..12).filter_map(|_| round(&mut accuracy, 300.0, 1000.0)).collect();
        assert_eq!(changes[0], Knowledge::Degraded);
        assert_eq!(accuracy.totals().wrong, 12);
    }

    proptest! {
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
                accuracy.observe(Prediction { exact, approximate }, 1000, reported(cached), 16);
                prop_assert!(feed == Feed::Live || accuracy.knowledge() >= Knowledge::Approximate);
            }
            let counting = accuracy.counting(Prediction { exact, approximate });
            prop_assert!(counting <= exact.max(approximate));
            prop_assert!((0.0..=1.0).contains(&accuracy.precision()) && (0.0..=1.0).contains(&accuracy.recall()));
        }
    }
}
