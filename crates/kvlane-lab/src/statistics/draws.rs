//! The bootstrap over runs and their requests.
//!
//! An experiment repeats a run under several seeds. Two things vary: the seeds, and the requests of a run under a
//! seed. A draw repeats both: runs with replacement, then of each drawn run its requests with replacement (A. C.
//! Davison and D. V. Hinkley, *Bootstrap Methods and their Application*, 1997, section 3.8). A figure is computed for
//! every drawn run, and the mean of these is the draw's. Anything derived from figures (a slope, a crossing) is
//! computed from draws as well, and the middle 95 % of the results is its interval.
//!
//! With one run the seeds do not vary: the interval then covers only the variation between the run's requests.
//! Requests of a run share queues and caches, so results of another run may lie outside it.

use kvlane_core::rng::Rng;
use serde::{Deserialize, Serialize};

use super::ci::{Figure, Interval, middle, rank};

/// Draws of an experiment.
pub const DRAWS: usize = 1000;
/// Draws of an experiment that has very many requests: enough for the ends of an interval to be within a tenth of its
/// width.
const DRAWS_MIN: usize = 200;
/// Requests that are drawn altogether; beyond, there are fewer draws.
const DRAWN_MAX: usize = 200_000_000;

/// A figure and its interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// As measured: the mean over the runs.
    pub value: f64,
    /// The interval over runs and requests; `None` if there are too few of both.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
}

/// A figure as measured, and in each draw.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Drawn {
    /// As measured.
    pub value: f64,
    /// As drawn; empty if nothing could be drawn.
    pub draws: Vec<f64>,
}

/// Random streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RandomStreams {
    /// Draws runs. The same for all measurements under the same seeds: a draw then has the same runs of each, and
    /// common variation cancels in a comparison.
    pub runs: u64,
    /// Draws requests. A different one for each measurement, so that draws are independent.
    pub requests: u64,
}

/// Number of times that each sample of a run is in a draw, by the sample's index.
pub(crate) type Times<'a> = &'a [u32];

/// Takes `figures` of the runs as they are, and of every draw. `sizes` are the runs' numbers of samples, none of them 0.
/// The first entry is as measured.
pub(crate) fn resample<const FIGURES: usize>(
    sizes: &[usize],
    lots: RandomStreams,
    mut figures: impl FnMut(usize, Times<'_>) -> [f64; FIGURES],
) -> ([f64; FIGURES], Vec<[f64; FIGURES]>) {
    debug_assert!(!sizes.is_empty() && !sizes.contains(&0));
    let whole: usize = sizes.iter().sum();
    let draws = (DRAWN_MAX / whole.max(1)).clamp(DRAWS_MIN, DRAWS);
    let mut times = vec![0; sizes.iter().copied().max().unwrap_or(0)];
    let mut of_runs = |runs: &mut dyn Iterator<Item = usize>, fill: &mut dyn FnMut(&mut [u32])| {
        let mut sum = [0.0; FIGURES];
        for run in runs {
            let times = &mut times[..sizes[run]];
            fill(times);
            sum.iter_mut().zip(figures(run, times)).for_each(|(sum, figure)| *sum += figure);
        }
        sum.map(|sum| sum / sizes.len() as f64)
    };
    let measured = of_runs(&mut (0..sizes.len()), &mut |times| times.fill(1));
    if whole == sizes.len() && sizes.len() == 1 {
        return (measured, Vec::new());
    }
    // The stream that draws runs is separate: it does not depend on their sizes.
    let (mut of_seeds, mut of_requests) = (Rng::new(lots.runs), Rng::new(lots.requests));
    let drawn = (0..draws).map(|_| {
        let mut runs = (0..sizes.len()).map(|_| of_seeds.below(sizes.len()));
        of_runs(&mut runs, &mut |times| {
            times.fill(0);
            for _ in 0..times.len() {
                times[of_requests.below(times.len())] += 1;
            }
        })
    });
    let drawn = drawn.collect();
    (measured, drawn)
}

/// The middle of the draws.
pub(crate) fn interval(mut draws: Vec<f64>) -> Option<Interval> {
    draws.retain(|draw| !draw.is_nan());
    draws.sort_unstable_by(f64::total_cmp);
    (!draws.is_empty()).then(|| {
        let (low, high) = middle(&draws);
        Interval { low, high }
    })
}

// === impl RandomStreams ===

impl RandomStreams {
    /// The lots of one thing among several, by its number, of an experiment with this seed.
    pub fn of(seed: u64, which: u64) -> Self {
        // A multiplier of 64 bits keeps the streams of neighbours apart; the generator mixes what it is seeded with.
        Self { runs: seed, requests: seed ^ (which + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) }
    }
}

// === impl Drawn ===

impl Drawn {
    /// A figure of runs, each given by its samples; runs without samples do not count. `None` without any sample.
    pub fn of(runs: &[Vec<f64>], figure: Figure, lots: RandomStreams) -> Option<Self> {
        let mut runs: Vec<Vec<f64>> = runs.iter().filter(|run| !run.is_empty()).cloned().collect();
        runs.iter_mut().for_each(|run| run.sort_unstable_by(f64::total_cmp));
        let sizes: Vec<usize> = runs.iter().map(Vec::len).collect();
        if sizes.is_empty() {
            return None;
        }
        let ([value], draws) = resample(&sizes, lots, |run, times| [of_sorted(&runs[run], times, figure)]);
        Some(Self { value, draws: draws.into_iter().map(|[draw]| draw).collect() })
    }

    /// A share of runs, each given by its samples of part and whole: the sum of the parts over the sum of the wholes.
    pub fn share(runs: &[Vec<(f64, f64)>], lots: RandomStreams) -> Option<Self> {
        let whole = |run: &[(f64, f64)]| run.iter().map(|(_, whole)| whole).sum::<f64>();
        let runs: Vec<&Vec<(f64, f64)>> = runs.iter().filter(|run| whole(run) > 0.0).collect();
        let sizes: Vec<usize> = runs.iter().map(|run| run.len()).collect();
        if sizes.is_empty() {
            return None;
        }
        let ([value], draws) = resample(&sizes, lots, |run, times| {
            let (mut part, mut whole) = (0.0, 0.0);
            for (&times, sample) in times.iter().zip(runs[run]) {
                part += f64::from(times) * sample.0;
                whole += f64::from(times) * sample.1;
            }
            [part / whole]
        });
        Some(Self { value, draws: draws.into_iter().map(|[draw]| draw).collect() })
    }

    /// The figure with its interval.
    pub fn estimate(&self) -> Estimate {
        Estimate { value: self.value, interval: interval(self.draws.clone()) }
    }

    /// A value derived from figures: `law` of them as measured, and of every draw that all of them have.
    pub(crate) fn follow(of: &[&Self], law: impl Fn(&[f64]) -> Option<f64>) -> Option<Self> {
        let values: Vec<f64> = of.iter().map(|drawn| drawn.value).collect();
        let value = law(&values)?;
        let draws = of.iter().map(|drawn| drawn.draws.len()).min().unwrap_or(0);
        let draws = (0..draws).filter_map(|n| {
            let drawn: Vec<f64> = of.iter().map(|drawn| drawn.draws[n]).collect();
            law(&drawn)
        });
        Some(Self { value, draws: draws.collect() })
    }
}

/// A figure of sorted samples, each with a count.
pub(crate) fn of_sorted(sorted: &[f64], times: Times<'_>, figure: Figure) -> f64 {
    match figure {
        Figure::Mean => {
            let sum: f64 = sorted.iter().zip(times).map(|(sample, &times)| sample * f64::from(times)).sum();
            sum / sorted.len() as f64
        }
        Figure::Percentile(percent) => {
            let rank = rank(sorted.len(), percent);
            let mut through = 0;
            for (sample, &times) in sorted.iter().zip(times) {
                through += times as usize;
                if through > rank {
                    return *sample;
                }
            }
            f64::NAN
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{prop, prop_assert, prop_assert_eq, proptest};

    use super::*;
    use crate::statistics::{ci, summary::Percentiles};

    const LOTS: RandomStreams = RandomStreams { runs: 1, requests: 2 };

    /// `runs` runs of `requests` each: a run's own level, spread evenly over `between`, and requests around it.
    fn experiment(runs: usize, requests: usize, between: f64, seed: u64) -> Vec<Vec<f64>> {
        let mut rng = Rng::new(seed);
        let mut run = || {
            let level = rng.unit() * between;
            (0..requests).map(|_| level + rng.unit()).collect()
        };
        (0..runs).map(|_| run()).collect()
    }

    #[test]
    fn the_interval_of_one_run_is_that_of_its_requests() {
        let runs = experiment(1, 400, 0.0, 5);
        for figure in [Figure::Mean, Figure::Percentile(50), Figure::Percentile(90)] {
            let drawn = Drawn::of(&runs, figure, LOTS).unwrap().estimate().interval.unwrap();
            let alone = ci::of_requests(&runs[0], figure, 2).unwrap();
            let width = alone.high - alone.low;
            assert!((drawn.low - alone.low).abs() < width / 5.0, "{figure:?} {drawn:?} {alone:?}");
            assert!((drawn.high - alone.high).abs() < width / 5.0, "{figure:?} {drawn:?} {alone:?}");
        }
    }

    #[test]
    fn what_differs_from_seed_to_seed_is_in_the_interval_of_several_runs() {
        let width = |runs: &[Vec<f64>]| {
            let interval = Drawn::of(runs, Figure::Mean, LOTS).unwrap().estimate().interval.unwrap();
            interval.high - interval.low
        };
        let (alike, apart) = (experiment(6, 200, 0.0, 5), experiment(6, 200, 2.0, 5));
        assert!(width(&apart) > 5.0 * width(&alike), "{} {}", width(&apart), width(&alike));
    }

    #[test]
    fn nine_of_ten_intervals_over_ten_seeds_hold_the_truth() {
        // Of few seeds a bootstrap interval is known to be a little too narrow.
        let holds = |seed: &u64| {
            let runs = experiment(10, 50, 1.0, *seed);
            let interval = Drawn::of(&runs, Figure::Mean, RandomStreams::of(seed + 1000, 0))
                .unwrap()
                .estimate()
                .interval
                .unwrap();
            (interval.low..=interval.high).contains(&1.0)
        };
        let held = (0..200).filter(holds).count();
        assert!((170..=198).contains(&held), "{held} of 200");
    }

    #[test]
    fn lots_of_one_seed_draw_the_same_runs_and_other_requests_of_each_thing() {
        // Each run is one level, so that a draw's mean tells which runs were in it.
        let of = |levels: &[f64], requests: usize| {
            let runs: Vec<Vec<f64>> = levels.iter().map(|level| vec![*level; requests]).collect();
            Drawn::of(&runs, Figure::Mean, RandomStreams::of(9, requests as u64)).unwrap().draws
        };
        let (a, b) = (of(&[1.0, 10.0, 100.0], 3), of(&[2.0, 20.0, 200.0], 17));
        assert!(a.iter().zip(&b).all(|(a, b)| (2.0 * a - b).abs() < 1e-9));
        assert!(a.iter().any(|draw| (draw - a[0]).abs() > 1e-9), "all draws are the same");
        let run = experiment(1, 50, 0.0, 1);
        let of = |which: u64| Drawn::of(&run, Figure::Mean, RandomStreams::of(9, which)).unwrap().draws;
        assert!(of(0).iter().zip(of(1)).filter(|(a, b)| **a == *b).count() < 50);
    }

    #[test]
    fn a_share_is_of_all_parts_over_all_wholes_not_the_mean_of_shares() {
        let runs = vec![vec![(0.0, 1.0), (90.0, 99.0)]];
        let share = Drawn::share(&runs, LOTS).unwrap();
        assert_eq!(share.value, 0.9);
        let interval = share.estimate().interval.unwrap();
        assert!((interval.low, interval.high) == (0.0, 90.0 / 99.0), "{interval:?}");
        assert_eq!(Drawn::share(&[vec![], vec![(0.0, 0.0)]], LOTS), None);
    }

    #[test]
    fn one_request_has_no_interval_and_nothing_has_no_figure() {
        let one = Drawn::of(&[vec![3.0], vec![]], Figure::Mean, LOTS).unwrap();
        assert_eq!(one.estimate(), Estimate { value: 3.0, interval: None });
        assert_eq!(Drawn::of(&[vec![], vec![]], Figure::Mean, LOTS), None);
        assert_eq!(Drawn::of(&[], Figure::Mean, LOTS), None);
    }

    proptest! {
        #[test]
        fn a_figure_as_measured_is_the_mean_of_its_runs_and_draws_stay_within_the_samples(
            runs in prop::collection::vec(prop::collection::vec(-1e3..1e3, 1..20), 1..5), seed: u64,
        ) {
            let drawn = Drawn::of(&runs, Figure::Percentile(90), RandomStreams::of(seed, 3)).unwrap();
            let each = runs.iter().map(|run| Percentiles::of(&mut run.clone()).unwrap().p90);
            let mean = each.sum::<f64>() / runs.len() as f64;
            prop_assert!((drawn.value - mean).abs() < 1e-9);
            let all: Vec<f64> = runs.concat();
            let (low, high) = (all.iter().copied().fold(f64::INFINITY, f64::min), all.iter().copied().fold(f64::NEG_INFINITY, f64::max));
            prop_assert!(drawn.draws.iter().all(|draw| (low - 1e-9..=high + 1e-9).contains(draw)));
            prop_assert_eq!(drawn.clone(), Drawn::of(&runs, Figure::Percentile(90), RandomStreams::of(seed, 3)).unwrap());
        }
    }
}
