//! Confidence intervals by the percentile bootstrap.
//!
//! A figure of a run (a mean, a 99th percentile) would be slightly different in another run. The bootstrap estimates
//! by how much: it draws as many samples as there were, with replacement, computes the figure of the draw, and
//! repeats this many times; the middle 95 % of the results is the interval (B. Efron and R. J. Tibshirani, *An
//! Introduction to the Bootstrap*, 1993, chapter 13).
//!
//! Samples must be independent. Runs under different seeds are: pass one figure per seed to [`of_seeds`]. Requests of
//! one run share queues and caches, so an interval over them ([`of_requests`]) covers only the variation within that
//! run, not between runs, and is too narrow for the latter.
//!
//! Draws come from [`kvlane_core::rng::Rng`]: the same samples and seed give the same interval.

use kvlane_core::rng::Rng;
use serde::{Deserialize, Serialize};

/// Share of the draws inside an interval.
pub const LEVEL: f64 = 0.95;
/// Draws per interval. At this many, the ends themselves are off by about a twentieth of the width.
const DRAWS: usize = 1000;
/// Above this number of samples the bootstrap's limit is used instead of draws: it is closer than draws would be.
const SAMPLES_MAX: usize = 20_000;
/// Half width of the middle [`LEVEL`] of a normal distribution, in standard deviations.
const NORMAL: f64 = 1.959_963_984_540_054;

/// A confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Its lower end.
    pub low: f64,
    /// Its upper end.
    pub high: f64,
}

/// A figure of a set of samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Figure {
    /// The arithmetic mean.
    Mean,
    /// The nearest rank at this many percent, as [`super::summary::Percentiles`] has it.
    Percentile(u8),
}

/// The interval of the mean of `figures`, one per seed. `None` below two.
///
/// With few seeds the interval is too narrow (with five, it contains the true value four times out of five rather
/// than nineteen out of twenty). To compare two policies run under the same seeds, pass the differences seed by seed:
/// common variation then cancels.
pub fn of_seeds(figures: &[f64], seed: u64) -> Option<Interval> {
    of(figures, Figure::Mean, seed)
}

/// The interval of a figure over the requests of a run. `None` below two requests.
pub fn of_requests(samples: &[f64], figure: Figure, seed: u64) -> Option<Interval> {
    of(samples, figure, seed)
}

/// The intervals of several figures of several sets of samples, each as [`of_requests`] has it: by set, then by figure.
/// Sets of one size are drawn together, which makes all of them cost little more than one.
pub fn of_all_requests(sets: &[Vec<f64>], figures: &[Figure], seed: u64) -> Vec<Vec<Option<Interval>>> {
    let mut sorted = sets.to_vec();
    sorted.iter_mut().for_each(|set| set.sort_unstable_by(f64::total_cmp));
    let mut intervals = vec![vec![None; figures.len()]; sets.len()];
    for (first, set) in sorted.iter().enumerate() {
        let count = set.len();
        if count > SAMPLES_MAX {
            intervals[first] = figures.iter().map(|figure| Some(limit(set, *figure))).collect();
        } else if count > 1 && intervals[first].contains(&None) {
            let (places, alike): (Vec<usize>, Vec<&[f64]>) = sorted
                .iter()
                .enumerate()
                .filter(|(_, set)| set.len() == count)
                .map(|(n, set)| (n, &set[..]))
                .unzip();
            for (place, of_set) in places.into_iter().zip(draw(&alike, figures, seed)) {
                intervals[place] = of_set.into_iter().map(Some).collect();
            }
        }
    }
    intervals
}

fn of(samples: &[f64], figure: Figure, seed: u64) -> Option<Interval> {
    of_all_requests(&[samples.to_vec()], &[figure], seed)[0][0]
}

/// Draws from sorted sets of one size. The indices of the drawn samples are the same for all of them, and so is the
/// index of each percentile.
fn draw(sets: &[&[f64]], figures: &[Figure], seed: u64) -> Vec<Vec<Interval>> {
    let count = sets[0].len();
    let mut ranks: Vec<usize> = figures
        .iter()
        .filter_map(|figure| match figure {
            Figure::Percentile(percent) => Some(rank(count, *percent)),
            Figure::Mean => None,
        })
        .collect();
    ranks.sort_unstable();
    let mut rng = Rng::new(seed);
    let (mut drawn, mut times) = (vec![0; count], vec![0; count]);
    let mut means = vec![Vec::with_capacity(DRAWS); sets.len()];
    let mut places = vec![Vec::with_capacity(DRAWS); ranks.len()];
    for _ in 0..DRAWS {
        drawn.fill_with(|| rng.below(count));
        if ranks.len() < figures.len() {
            for (set, means) in sets.iter().zip(&mut means) {
                means.push(drawn.iter().map(|&place| set[place]).sum::<f64>() / count as f64);
            }
        }
        // Sorted, the draw has each index as often as it was drawn.
        times.fill(0);
        drawn.iter().for_each(|&place| times[place] += 1);
        let (mut place, mut through) = (0, times[0]);
        for (rank, places) in ranks.iter().zip(&mut places) {
            while through <= *rank {
                place += 1;
                through += times[place];
            }
            places.push(place);
        }
    }
    means.iter_mut().for_each(|means| means.sort_unstable_by(f64::total_cmp));
    places.iter_mut().for_each(|places| places.sort_unstable());
    let of_set = |(set, means): (&&[f64], &Vec<f64>)| {
        let of_figure = |figure: &Figure| match figure {
            Figure::Mean => {
                let (low, high) = middle(means);
                Interval { low, high }
            }
            Figure::Percentile(percent) => {
                let of_rank = ranks.partition_point(|other| *other < rank(count, *percent));
                // Places of sorted samples are in the samples' order.
                let (low, high) = middle(&places[of_rank]);
                Interval { low: set[low], high: set[high] }
            }
        };
        figures.iter().map(of_figure).collect()
    };
    sets.iter().zip(&means).map(of_set).collect()
}

/// The limit of the bootstrap for many samples: a mean of draws is normal around the mean; the rank of a percentile
/// among the samples is binomial around its own, which is normal, too.
fn limit(sorted: &[f64], figure: Figure) -> Interval {
    let count = sorted.len() as f64;
    match figure {
        Figure::Mean => {
            let mean = sorted.iter().sum::<f64>() / count;
            let squares: f64 = sorted.iter().map(|sample| (sample - mean) * (sample - mean)).sum();
            let half = NORMAL * (squares / count / count).sqrt();
            // As every draw does, the interval lies within the samples.
            let (least, most) = (sorted[0], sorted[sorted.len() - 1]);
            Interval { low: (mean - half).max(least), high: (mean + half).min(most) }
        }
        Figure::Percentile(percent) => {
            let share = f64::from(percent.min(100)) / 100.0;
            let half = NORMAL * (count * share * (1.0 - share)).sqrt();
            let at = rank(sorted.len(), percent) as f64;
            let end = |place: f64| sorted[place.round().clamp(0.0, count - 1.0) as usize];
            Interval { low: end(at - half), high: end(at + half) }
        }
    }
}

/// The ends of the middle [`LEVEL`] of sorted draws, of which there is at least one.
pub(crate) fn middle<T: Copy>(draws: &[T]) -> (T, T) {
    let outside = (draws.len() as f64 * (1.0 - LEVEL) / 2.0) as usize;
    (draws[outside], draws[draws.len() - 1 - outside])
}

/// The nearest rank, from zero.
pub(crate) fn rank(count: usize, percent: u8) -> usize {
    (count * usize::from(percent.min(100))).div_ceil(100).max(1) - 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop, prop_assert, prop_assert_eq, proptest};

    use super::*;
    use crate::statistics::summary::Percentiles;

    fn uniform(count: usize, seed: u64) -> Vec<f64> {
        let mut rng = Rng::new(seed);
        (0..count).map(|_| rng.unit()).collect()
    }

    #[test]
    fn nineteen_of_twenty_intervals_hold_the_truth() {
        for (figure, truth) in [(Figure::Mean, 0.5), (Figure::Percentile(90), 0.9)] {
            let holds = |seed: &u64| {
                let interval = of_requests(&uniform(200, *seed), figure, seed + 1000).unwrap();
                (interval.low..=interval.high).contains(&truth)
            };
            let held = (0..200).filter(holds).count();
            assert!((180..=198).contains(&held), "{figure:?}: {held} of 200");
        }
    }

    #[test]
    fn the_limit_is_what_draws_come_to() {
        for figure in [Figure::Mean, Figure::Percentile(50), Figure::Percentile(99)] {
            let mut samples: Vec<f64> = uniform(4000, 3).iter().map(|unit| unit * unit).collect();
            samples.sort_unstable_by(f64::total_cmp);
            let (drawn, limit) = (of_requests(&samples, figure, 1).unwrap(), limit(&samples, figure));
            let width = limit.high - limit.low;
            assert!((drawn.low - limit.low).abs() < width / 8.0, "{figure:?}: {drawn:?} {limit:?}");
            assert!((drawn.high - limit.high).abs() < width / 8.0, "{figure:?}: {drawn:?} {limit:?}");
        }
    }

    #[test]
    fn the_limit_of_a_rare_failure_is_not_below_none() {
        let mut failures = vec![0.0; SAMPLES_MAX + 1];
        failures[7] = 1.0;
        let interval = of_requests(&failures, Figure::Mean, 1).unwrap();
        assert!(interval.low == 0.0 && interval.high > 0.0, "{interval:?}");
    }

    #[test]
    fn sets_drawn_together_have_the_intervals_they_have_alone() {
        let sets = [uniform(300, 1), uniform(40, 2), uniform(300, 3), Vec::new()];
        let figures = [Figure::Percentile(90), Figure::Mean, Figure::Percentile(50)];
        for (set, together) in sets.iter().zip(of_all_requests(&sets, &figures, 7)) {
            let alone = figures.map(|figure| of_requests(set, figure, 7));
            assert_eq!(together, alone);
            assert_eq!(alone[0].is_some(), !set.is_empty());
        }
    }

    #[test]
    fn one_sample_has_no_interval_and_equal_ones_have_no_width() {
        assert_eq!((of_seeds(&[], 1), of_seeds(&[3.0], 1)), (None, None));
        assert_eq!(of_seeds(&[3.0; 5], 1), Some(Interval { low: 3.0, high: 3.0 }));
    }

    proptest! {
        #[test]
        fn an_interval_lies_within_the_samples_whatever_their_order(
            mut samples in prop::collection::vec(-1e6..1e6, 2..60), percent in 0u8..=100, seed: u64,
        ) {
            let first = of_requests(&samples, Figure::Percentile(percent), seed).unwrap();
            samples.reverse();
            prop_assert_eq!(of_requests(&samples, Figure::Percentile(percent), seed), Some(first));
            let mean = of_seeds(&samples, seed).unwrap();
            let all = Percentiles::of(&mut samples).unwrap();
            prop_assert!(first.low <= first.high && mean.low <= mean.high);
            prop_assert!(samples.contains(&first.low) && samples.contains(&first.high));
            prop_assert!(mean.low >= samples[0] - 1e-6 && mean.high <= all.max + 1e-6);
        }
    }
}
