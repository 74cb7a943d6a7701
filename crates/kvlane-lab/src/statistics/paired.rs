//! Paired comparison of two runs, request by request.
//!
//! The requests of a trace differ far more among each other than two routers do, so a difference of two means is lost
//! in their spread. Matched by its index in the trace, each request is compared with itself: its own properties are
//! in both of its times and cancel in the difference. A request that failed on either side has no difference; the
//! number of these is part of the result, since failing the slow requests would look fast.

use std::collections::BTreeMap;

use kvlane_trace::record::Record;
use serde::{Deserialize, Serialize};

use super::ci::Figure;
use super::draws::{Estimate, RandomStreams, interval, of_sorted, resample};

/// The requests that two runs of one trace have in common.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Matched {
    /// A figure of each request that was answered in both, before and after, in the order of their ids.
    pub pairs: Vec<(f64, f64)>,
    /// Requests that were answered before, but not after.
    pub lost: u64,
    /// Requests that were answered after, but not before.
    pub gained: u64,
}

/// Result of a paired comparison. Differences are after minus before: negative is faster.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Paired {
    /// Requests that were compared, in all runs together.
    pub matched: u64,
    /// Requests that were answered before, but not after.
    pub lost: u64,
    /// Requests that were answered after, but not before.
    pub gained: u64,
    /// The mean of the differences.
    pub mean_difference: Estimate,
    /// Their median.
    pub median_difference: Estimate,
    /// The share of the requests that got faster.
    pub faster_share: Estimate,
    /// The mean after over the mean before.
    pub mean_ratio: Estimate,
}

/// Share of the requests with one id that must be alike for two runs to have sent the same requests.
const ALIKE_MIN: f64 = 0.9;
/// Difference of a prompt's length that chat templates and tokenizers explain: tokens, and a share of the longer one.
const LENGTH_TOKENS: u32 = 128;
const LENGTH_SHARE: f64 = 0.25;

/// Whether two runs sent the same requests under the same ids, as far as records show it: conversation, predecessor and
/// the length of the prompt.
pub fn same_requests(before: &[Record], after: &[Record]) -> bool {
    let by_id: BTreeMap<u64, &Record> = before.iter().map(|record| (record.id, record)).collect();
    let both = after.iter().filter_map(|record| Some((*by_id.get(&record.id)?, record)));
    let (mut count, mut same) = (0.0, 0.0);
    for (before, after) in both {
        count += 1.0;
        same += f64::from(u8::from(alike(before, after)));
    }
    count > 0.0 && same >= ALIKE_MIN * count
}

/// Whether two records may be of one request. A field that one of them lacks says nothing.
fn alike(before: &Record, after: &Record) -> bool {
    let longer = before.prompt_tokens.max(after.prompt_tokens);
    let apart = before.prompt_tokens.abs_diff(after.prompt_tokens);
    let length = apart <= LENGTH_TOKENS || f64::from(apart) <= LENGTH_SHARE * f64::from(longer);
    let session = before.session.zip(after.session).is_none_or(|(before, after)| before == after);
    let base = before.base.zip(after.base).is_none_or(|(before, after)| before == after);
    length && session && base
}

// === impl Matched ===

impl Matched {
    /// Matches two runs of one trace by the requests' ids. `figure` is what is compared, such as [`Record::ttft_s`].
    pub fn of(before: &[Record], after: &[Record], figure: impl Fn(&Record) -> Option<f64>) -> Self {
        let answer = |record: &Record| record.is_ok().then(|| figure(record)).flatten();
        let before: BTreeMap<u64, Option<f64>> =
            before.iter().map(|record| (record.id, answer(record))).collect();
        let after: BTreeMap<u64, Option<f64>> =
            after.iter().map(|record| (record.id, answer(record))).collect();
        let mut matched = Self::default();
        for (id, before) in &before {
            match (before, after.get(id).copied().flatten()) {
                (Some(before), Some(after)) => matched.pairs.push((*before, after)),
                (Some(_), None) => matched.lost += 1,
                (None, Some(_)) => matched.gained += 1,
                (None, None) => {}
            }
        }
        let only_after = |(id, figure): &(&u64, &Option<f64>)| figure.is_some() && !before.contains_key(id);
        matched.gained += after.iter().filter(only_after).count() as u64;
        matched
    }
}

impl Matched {
    /// Matches two runs by the ids of their answered requests, with the figure of each.
    pub fn by_id(before: &[(u32, f32)], after: &[(u32, f32)]) -> Self {
        let after: BTreeMap<u32, f32> = after.iter().copied().collect();
        let pair = |(id, before): &(u32, f32)| Some((f64::from(*before), f64::from(*after.get(id)?)));
        let pairs: Vec<(f64, f64)> = before.iter().filter_map(pair).collect();
        let matched = pairs.len();
        Self { pairs, lost: (before.len() - matched) as u64, gained: (after.len() - matched) as u64 }
    }
}

// === impl Paired ===

impl Paired {
    /// Compares the matched requests of the runs of several seeds. `None` if no request was answered in both.
    pub fn of(runs: &[Matched], lots: RandomStreams) -> Option<Self> {
        let mut pairs: Vec<Vec<(f64, f64)>> =
            runs.iter().map(|run| run.pairs.clone()).filter(|pairs| !pairs.is_empty()).collect();
        let difference = |(before, after): &(f64, f64)| after - before;
        pairs.iter_mut().for_each(|run| {
            run.sort_unstable_by(|a, b| difference(a).total_cmp(&difference(b)));
        });
        let sorted: Vec<Vec<f64>> = pairs.iter().map(|run| run.iter().map(difference).collect()).collect();
        let sizes: Vec<usize> = pairs.iter().map(Vec::len).collect();
        if sizes.is_empty() {
            return None;
        }
        let (measured, draws) = resample(&sizes, lots, |run, times| {
            let (mut before, mut after, mut faster) = (0.0, 0.0, 0.0);
            for (pair, &times) in pairs[run].iter().zip(times) {
                let times = f64::from(times);
                before += pair.0 * times;
                after += pair.1 * times;
                faster += if pair.1 < pair.0 { times } else { 0.0 };
            }
            let count = sizes[run] as f64;
            let median = of_sorted(&sorted[run], times, Figure::Percentile(50));
            [(after - before) / count, median, faster / count, after / before]
        });
        let estimate = |which: usize| Estimate {
            value: measured[which],
            interval: interval(draws.iter().map(|figures| figures[which]).collect()),
        };
        Some(Self {
            matched: sizes.iter().sum::<usize>() as u64,
            lost: runs.iter().map(|run| run.lost).sum(),
            gained: runs.iter().map(|run| run.gained).sum(),
            mean_difference: estimate(0),
            median_difference: estimate(1),
            faster_share: estimate(2),
            mean_ratio: estimate(3),
        })
    }
}

#[cfg(test)]
mod tests {
    use kvlane_core::rng::Rng;
    use proptest::prelude::{prop, prop_assert, proptest};

    use super::*;

    const LOTS: RandomStreams = RandomStreams { runs: 1, requests: 2 };

    fn answer(id: u64, ttft_s: f64) -> Record {
        Record { id, first_token_s: Some(ttft_s), end_s: ttft_s, status: 200, ..Record::default() }
    }

    fn ttft(before: &[Record], after: &[Record]) -> Matched {
        Matched::of(before, after, Record::ttft_s)
    }

    #[test]
    fn requests_are_matched_by_their_ids_not_by_their_order() {
        let matched = ttft(&[answer(1, 1.0), answer(2, 2.0)], &[answer(2, 20.0), answer(1, 10.0)]);
        assert_eq!(matched.pairs, [(1.0, 10.0), (2.0, 20.0)]);
    }

    #[test]
    fn requests_are_the_same_if_conversation_and_length_are_whatever_the_chat_template_adds() {
        let run = |tokens: u32, sessions: u32| -> Vec<Record> {
            let record = |id: u32| Record {
                prompt_tokens: tokens + 500 * id,
                session: Some(id % sessions),
                ..answer(id.into(), 1.0)
            };
            (0..40).map(record).collect()
        };
        assert!(same_requests(&run(1000, 7), &run(1090, 7)));
        assert!(!same_requests(&run(1000, 7), &run(1000, 5)), "other conversations");
        let reversed: Vec<Record> = run(1000, 40)
            .into_iter()
            .map(|record| Record { id: 39 - record.id, session: None, ..record })
            .collect();
        assert!(!same_requests(&run(1000, 40), &reversed), "other lengths");
        let later: Vec<Record> =
            run(1000, 7).into_iter().map(|record| Record { id: record.id + 100, ..record }).collect();
        assert!(!same_requests(&run(1000, 7), &later), "no id in common");
    }

    #[test]
    fn who_failed_on_one_side_is_counted_and_not_compared() {
        let failed = |id| Record { error: Some("reset".into()), ..answer(id, 0.1) };
        let before = [answer(1, 1.0), answer(2, 2.0), failed(3), failed(4), answer(6, 1.0)];
        let after = [answer(1, 1.0), failed(2), answer(3, 3.0), failed(4), answer(5, 5.0)];
        let matched = ttft(&before, &after);
        assert_eq!(matched, Matched { pairs: vec![(1.0, 1.0)], lost: 2, gained: 2 });
    }

    #[test]
    fn a_small_gain_shows_through_a_large_spread() {
        // Times from 0 to 100 s, each a tenth of a second shorter afterwards: two means would not tell.
        let mut rng = Rng::new(3);
        let pair = |_| {
            let before = rng.unit() * 100.0;
            (before, before - 0.1 + (rng.unit() - 0.5) * 0.1)
        };
        let pairs: Vec<(f64, f64)> = (0..200).map(pair).collect();
        let paired = Paired::of(&[Matched { pairs, ..Matched::default() }], LOTS).unwrap();
        for difference in [paired.mean_difference, paired.median_difference] {
            let interval = difference.interval.unwrap();
            assert!(interval.low > -0.12 && interval.high < -0.08, "{interval:?}");
        }
        assert_eq!((paired.matched, paired.faster_share.value), (200, 1.0));
        assert!(paired.mean_ratio.value < 1.0 && paired.mean_ratio.interval.unwrap().high < 1.0);
    }

    #[test]
    fn equal_times_are_not_faster_and_nothing_in_common_is_no_comparison() {
        let same = Matched { pairs: vec![(1.0, 1.0); 9], ..Matched::default() };
        let paired = Paired::of(&[same], LOTS).unwrap();
        assert_eq!((paired.faster_share.value, paired.mean_ratio.value), (0.0, 1.0));
        assert_eq!(Paired::of(&[Matched { lost: 5, ..Matched::default() }], LOTS), None);
        assert_eq!(Paired::of(&[], LOTS), None);
    }

    proptest! {
        #[test]
        fn the_other_way_round_differences_change_their_sign(
            runs in prop::collection::vec(prop::collection::vec((0.1..10.0, 0.1..10.0), 1..12), 1..4), seed: u64,
        ) {
            let matched = |swap: bool| -> Vec<Matched> {
                let pairs = |run: &Vec<(f64, f64)>| run.iter().map(|&(a, b)| if swap { (b, a) } else { (a, b) }).collect();
                runs.iter().map(|run| Matched { pairs: pairs(run), ..Matched::default() }).collect()
            };
            let (there, back) = (Paired::of(&matched(false), RandomStreams::of(seed, 1)).unwrap(), Paired::of(&matched(true), RandomStreams::of(seed, 1)).unwrap());
            prop_assert!((there.mean_difference.value + back.mean_difference.value).abs() < 1e-9);
            prop_assert!(there.faster_share.value + back.faster_share.value <= 1.0 + 1e-9);
            if let (Some(a), Some(b)) = (there.mean_difference.interval, back.mean_difference.interval) {
                prop_assert!(a.low <= a.high && b.low <= b.high);
            }
        }
    }
}
