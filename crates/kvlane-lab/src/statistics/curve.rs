//! A figure over load: slope, knee, and crossings of two curves.
//!
//! All of these follow from a figure's values at a few loads. Each value has the draws of its bootstrap
//! ([`super::draws`]), so the results have intervals, too: the same computation on every draw.

use serde::{Deserialize, Serialize};

use super::ci::Interval;
use super::draws::{Drawn, Estimate, interval};

/// Minimum sag below the chord for a knee, as a share of the chord's rise: a straight line has none.
pub const SAG_MIN: f64 = 0.1;
/// Minimum share of the draws with a crossing for it to be significant.
pub const CROSSED_MIN: f64 = 0.5;

/// A figure at several loads, by load.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curve {
    points: Vec<(f64, Drawn)>,
}

/// A crossing of two curves.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Crossing {
    /// The load.
    pub at: f64,
    /// Its interval, over the draws that cross between the same two measured loads or next to them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
    /// The share of the draws that cross there, in the same direction.
    pub share_of_draws: f64,
    /// Whether the first curve is the lower one below this load (and the higher one above).
    pub lower_before: bool,
}

/// The load up to which a figure stays within a bound.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Within {
    /// The load, interpolated between two measured ones; the highest measured load if the bound is never exceeded.
    pub load: Estimate,
    /// Whether the bound is exceeded at all: if not, `load` is a lower limit.
    pub passed: bool,
}

// === impl Curve ===

impl Curve {
    /// A curve through `(load, figure)`. Points come in order of their loads; of equal loads the first counts.
    pub fn new(mut points: Vec<(f64, Drawn)>) -> Self {
        points.retain(|(load, drawn)| load.is_finite() && drawn.value.is_finite());
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        points.dedup_by(|a, b| a.0 == b.0);
        Self { points }
    }

    /// The loads and figures as measured.
    pub fn values(&self) -> Vec<(f64, f64)> {
        self.points.iter().map(|(load, drawn)| (*load, drawn.value)).collect()
    }

    /// Slope per unit of load, by least squares. `None` below two loads.
    pub fn slope(&self) -> Option<Estimate> {
        Some(self.drawn_slope()?.estimate())
    }

    /// This curve's slope over another one's: 2 rises twice as fast. `None` if the other one does not rise.
    pub fn slope_ratio(&self, other: &Self) -> Option<Estimate> {
        let (ours, theirs) = (self.drawn_slope()?, other.drawn_slope()?);
        let ratio =
            Drawn::follow(&[&ours, &theirs], |slopes| (slopes[1] > 0.0).then(|| slopes[0] / slopes[1]))?;
        Some(ratio.estimate())
    }

    /// The knee: the load where the curve sags furthest below the chord from its first to its last point, both axes
    /// scaled to 1 (V. Satopää et al., *Finding a "Kneedle" in a Haystack*, ICDCS workshops 2011). It is one of the
    /// measured loads. `None` below three loads, or if the curve sags less than [`SAG_MIN`].
    pub fn knee(&self) -> Option<Estimate> {
        let loads = self.loads();
        let drawn = Drawn::follow(&self.figures(), |values| knee(&loads, values))?;
        Some(drawn.estimate())
    }

    /// The load at which the figure first exceeds `bound` from below. `None` without a point, or if the figure is
    /// above the bound at the lowest load already.
    pub fn within(&self, bound: f64) -> Option<Within> {
        let loads = self.loads();
        let first = |values: &[f64]| {
            let above = values.iter().position(|value| *value > bound)?;
            let before = above.checked_sub(1)?;
            let share = (bound - values[before]) / (values[above] - values[before]);
            Some(loads[before] + (loads[above] - loads[before]) * share)
        };
        let values: Vec<f64> = self.points.iter().map(|(_, drawn)| drawn.value).collect();
        if values.first().is_none_or(|value| *value > bound) {
            return None;
        }
        let highest = *loads.last()?;
        // A draw that starts above the bound is never within it; its limit is at most the lowest load.
        let load = Drawn::follow(&self.figures(), |values| match values[0] > bound {
            true => Some(loads[0]),
            false => Some(first(values).unwrap_or(highest)),
        })?;
        Some(Within { load: load.estimate(), passed: first(&values).is_some() })
    }

    /// Crossings of this curve and another one, by load: at common loads, and between them by linear interpolation.
    pub fn crossings(&self, other: &Self) -> Vec<Crossing> {
        let common: Vec<(f64, &Drawn, &Drawn)> = self
            .points
            .iter()
            .filter_map(|(load, ours)| {
                let theirs = other.points.iter().find(|(other, _)| other == load)?;
                Some((*load, ours, &theirs.1))
            })
            .collect();
        let loads: Vec<f64> = common.iter().map(|(load, ..)| *load).collect();
        let apart = |n: usize, draw: Option<usize>| {
            let (_, ours, theirs) = common[n];
            draw.map_or(ours.value - theirs.value, |draw| ours.draws[draw] - theirs.draws[draw])
        };
        let draws = common
            .iter()
            .map(|(_, ours, theirs)| ours.draws.len().min(theirs.draws.len()))
            .min()
            .unwrap_or(0);
        let of = |draw: Option<usize>| {
            crossings(&loads, &(0..loads.len()).map(|n| apart(n, draw)).collect::<Vec<f64>>())
        };
        let drawn: Vec<Vec<(f64, bool)>> = (0..draws).map(|draw| of(Some(draw))).collect();
        let with_interval = |(at, lower_before): (f64, bool)| {
            // The neighbouring loads determine whether a draw's crossing counts as the same one.
            let place = loads.partition_point(|load| *load < at);
            let near = loads[place.saturating_sub(2)]..=loads[(place + 1).min(loads.len() - 1)];
            let same = |draw: &Vec<(f64, bool)>| {
                draw.iter().find(|(at, lower)| *lower == lower_before && near.contains(at)).map(|(at, _)| *at)
            };
            let same: Vec<f64> = drawn.iter().filter_map(same).collect();
            let share_of_draws = if draws == 0 { 0.0 } else { same.len() as f64 / draws as f64 };
            Crossing { at, interval: interval(same), share_of_draws, lower_before }
        };
        of(None).into_iter().map(with_interval).collect()
    }

    fn loads(&self) -> Vec<f64> {
        self.points.iter().map(|(load, _)| *load).collect()
    }

    fn figures(&self) -> Vec<&Drawn> {
        self.points.iter().map(|(_, drawn)| drawn).collect()
    }

    fn drawn_slope(&self) -> Option<Drawn> {
        let loads = self.loads();
        Drawn::follow(&self.figures(), |values| slope(&loads, values))
    }
}

/// The slope of the line of least squares.
fn slope(xs: &[f64], ys: &[f64]) -> Option<f64> {
    let count = xs.len() as f64;
    let (x_mean, y_mean) = (xs.iter().sum::<f64>() / count, ys.iter().sum::<f64>() / count);
    let spread: f64 = xs.iter().map(|x| (x - x_mean) * (x - x_mean)).sum();
    let together: f64 = xs.iter().zip(ys).map(|(x, y)| (x - x_mean) * (y - y_mean)).sum();
    (spread > 0.0).then(|| together / spread)
}

fn knee(xs: &[f64], ys: &[f64]) -> Option<f64> {
    let (&[first_x, .., last_x], &[first_y, .., last_y]) = (xs, ys) else { return None };
    if last_x <= first_x || last_y <= first_y {
        return None;
    }
    let sag = |(x, y): (&f64, &f64)| (x - first_x) / (last_x - first_x) - (y - first_y) / (last_y - first_y);
    let sags: Vec<f64> = xs.iter().zip(ys).map(sag).collect();
    let (at, sag) = sags.into_iter().enumerate().max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)))?;
    (sag >= SAG_MIN).then(|| xs[at])
}

/// Sign changes of differences, and whether they were negative before: at the first zero, or between two by linear
/// interpolation. Touching is not a crossing.
fn crossings(xs: &[f64], apart: &[f64]) -> Vec<(f64, bool)> {
    let mut found = Vec::new();
    let mut last: Option<usize> = None;
    for n in 0..xs.len() {
        if apart[n] == 0.0 {
            continue;
        }
        if let Some(before) = last.filter(|&before| (apart[before] < 0.0) != (apart[n] < 0.0)) {
            let at = match before + 1 < n {
                true => xs[before + 1],
                false => xs[before] + (xs[n] - xs[before]) * (apart[before] / (apart[before] - apart[n])),
            };
            found.push((at, apart[before] < 0.0));
        }
        last = Some(n);
    }
    found
}

#[cfg(test)]
mod tests {
    use kvlane_core::rng::Rng;
    use proptest::prelude::{prop, prop_assert, proptest};

    use super::*;
    use crate::statistics::ci::Figure;
    use crate::statistics::draws::RandomStreams;

    /// A curve without chance.
    fn exact(points: &[(f64, f64)]) -> Curve {
        let drawn = |&(load, value): &(f64, f64)| (load, Drawn { value, draws: vec![value; 10] });
        Curve::new(points.iter().map(drawn).collect())
    }

    /// Times around `law` of the load, three runs of 100 requests at each load.
    fn noisy(loads: &[f64], noise: f64, law: impl Fn(f64) -> f64) -> Curve {
        let mut rng = Rng::new(11);
        let mut point = |&load: &f64| {
            let mut run = || (0..100).map(|_| law(load) + (rng.unit() - 0.5) * noise).collect::<Vec<f64>>();
            let runs = [run(), run(), run()];
            (load, Drawn::of(&runs, Figure::Mean, RandomStreams::of(5, rng.next_u64())).unwrap())
        };
        Curve::new(loads.iter().map(&mut point).collect())
    }

    #[test]
    fn a_straight_line_has_its_slope_and_no_knee() {
        let line = exact(&[(4.0, 1.5), (8.0, 2.5), (16.0, 4.5), (24.0, 6.5)]);
        let slope = line.slope().unwrap();
        assert!((slope.value - 0.25).abs() < 1e-12);
        assert_eq!(line.knee(), None);
        let steeper = exact(&[(4.0, 0.0), (24.0, 15.0)]);
        assert!((steeper.slope_ratio(&line).unwrap().value - 3.0).abs() < 1e-12);
        assert_eq!(line.slope_ratio(&exact(&[(1.0, 2.0), (2.0, 1.0)])), None, "the other one falls");
    }

    #[test]
    fn a_measured_slope_lies_in_its_interval() {
        let curve = noisy(&[1.0, 2.0, 3.0, 4.0], 1.0, |load| 0.5 * load);
        let slope = curve.slope().unwrap();
        let interval = slope.interval.unwrap();
        assert!(interval.low < 0.5 && 0.5 < interval.high, "{interval:?}");
        assert!(interval.high - interval.low < 0.1, "{interval:?}");
    }

    #[test]
    fn the_knee_is_where_a_queue_begins_to_grow() {
        // One over one less the utilisation.
        let queue = |load: f64| 1.0 / (1.0 - load);
        let loads = [0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95];
        let points: Vec<(f64, f64)> = loads.iter().map(|&load| (load, queue(load))).collect();
        assert_eq!(exact(&points).knee().unwrap().value, 0.8);
        let knee = noisy(&loads, 0.5, queue).knee().unwrap();
        assert_eq!(knee, Estimate { value: 0.8, interval: Some(Interval { low: 0.8, high: 0.8 }) });
        assert_eq!(exact(&points[..2]).knee(), None, "two points are a line");
        assert_eq!(exact(&[(1.0, 5.0), (2.0, 1.0), (3.0, 2.0)]).knee(), None, "it falls");
    }

    #[test]
    fn a_bound_is_passed_between_two_measured_loads() {
        let curve = exact(&[(1.0, 0.5), (2.0, 1.0), (3.0, 3.0), (4.0, 1.5)]);
        let within = |bound: f64| curve.within(bound).map(|within| (within.load.value, within.passed));
        assert_eq!(within(2.0), Some((2.5, true)), "where it is passed first");
        assert_eq!(within(3.0), Some((4.0, false)), "never: the highest load");
        assert_eq!(within(0.4), None, "the lowest load is above it");
        assert_eq!(exact(&[]).within(1.0), None);
    }

    #[test]
    fn curves_cross_where_their_difference_changes_its_sign() {
        let flat = exact(&[(4.0, 2.0), (8.0, 2.0), (16.0, 2.0), (24.0, 2.0)]);
        let steep = exact(&[(4.0, 1.0), (8.0, 1.5), (16.0, 2.5), (24.0, 3.5)]);
        let crossing = Crossing {
            at: 12.0,
            interval: Some(Interval { low: 12.0, high: 12.0 }),
            share_of_draws: 1.0,
            lower_before: false,
        };
        assert_eq!(flat.crossings(&steep), [crossing]);
        assert_eq!(steep.crossings(&flat), [Crossing { lower_before: true, ..crossing }]);
        assert_eq!(flat.crossings(&flat), []);
        let touching = exact(&[(4.0, 1.0), (8.0, 2.0), (16.0, 1.0), (24.0, 1.0)]);
        assert_eq!(touching.crossings(&flat), [], "it touches and turns back");
        let through = exact(&[(4.0, 1.0), (8.0, 2.0), (16.0, 3.0)]);
        assert_eq!(through.crossings(&flat)[0].at, 8.0, "where they are equal");
    }

    #[test]
    fn a_crossing_that_is_chance_has_few_draws() {
        let loads = [1.0, 2.0, 3.0, 4.0];
        let clear = noisy(&loads, 0.5, |load| load).crossings(&noisy(&loads, 0.4, |_| 2.5));
        assert_eq!(clear.len(), 1);
        assert!(clear[0].share_of_draws > 0.99 && (clear[0].at - 2.5).abs() < 0.1, "{clear:?}");
        // Two that are the same but for noise cross here or there.
        let mut rng = Rng::new(2);
        let mut same = || {
            let mut point = |&load: &f64| {
                let run: Vec<f64> = (0..50).map(|_| rng.unit()).collect();
                (load, Drawn::of(&[run], Figure::Mean, RandomStreams::of(5, rng.next_u64())).unwrap())
            };
            Curve::new(loads.iter().map(&mut point).collect())
        };
        let (a, b) = (same(), same());
        assert!(a.crossings(&b).iter().all(|crossing| crossing.share_of_draws < 0.9));
    }

    proptest! {
        #[test]
        fn crossings_lie_between_the_loads_and_alternate(
            points in prop::collection::vec((0.1..100.0, -5.0..5.0, -5.0..5.0), 0..12),
        ) {
            let curve = |which: fn(&(f64, f64, f64)) -> f64| {
                exact(&points.iter().map(|point| (point.0, which(point))).collect::<Vec<_>>())
            };
            let (a, b) = (curve(|point| point.1), curve(|point| point.2));
            let found = a.crossings(&b);
            let loads = a.loads();
            for pair in found.windows(2) {
                prop_assert!(pair[0].at <= pair[1].at && pair[0].lower_before != pair[1].lower_before);
            }
            for crossing in &found {
                prop_assert!(loads[0] <= crossing.at && crossing.at <= loads[loads.len() - 1]);
                prop_assert!(crossing.share_of_draws > 0.99);
            }
            if let Some(knee) = a.knee() {
                prop_assert!(loads.contains(&knee.value));
            }
            if let Some(within) = a.within(1.0) {
                prop_assert!(loads[0] <= within.load.value && within.load.value <= loads[loads.len() - 1]);
            }
        }
    }
}
