//! How samples are spread: mean, percentiles, and the whole distribution at every percent.

use serde::{Deserialize, Serialize};

use super::ci::rank;

/// The distribution of some samples, in their unit. Percentiles are nearest ranks, as those of
/// [`Percentiles`](super::summary::Percentiles).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// How many samples.
    pub count: u64,
    /// Arithmetic mean.
    pub mean: f64,
    /// The value that 10 % of the samples do not exceed.
    pub p10: f64,
    /// Median.
    pub p50: f64,
    /// The value that 90 % of the samples do not exceed.
    pub p90: f64,
    /// The value that 99 % of the samples do not exceed.
    pub p99: f64,
    /// The largest.
    pub max: f64,
    /// The percentiles 0 (the smallest sample) to 100 (the largest).
    pub percentiles: Vec<f64>,
}

// === impl Spread ===

impl Spread {
    /// The spread of `samples`, which are sorted in place; `None` if there are none.
    pub fn of(samples: &mut [f64]) -> Option<Self> {
        let last = samples.len().checked_sub(1)?;
        samples.sort_unstable_by(f64::total_cmp);
        let mean = samples.iter().sum::<f64>() / samples.len() as f64;
        let percentiles = (0..=100).map(|percent| samples[rank(samples.len(), percent)]).collect();
        Some(Self::at(samples.len() as u64, mean, samples[last], percentiles))
    }

    /// The share of samples that do not exceed each percentile, as points to draw.
    pub fn points(&self) -> Vec<(f64, f64)> {
        self.percentiles.iter().enumerate().map(|(percent, &value)| (value, percent as f64 / 100.0)).collect()
    }

    /// A spread from its percentiles, of which there are 101.
    pub(super) fn at(count: u64, mean: f64, max: f64, percentiles: Vec<f64>) -> Self {
        let [p10, p50, p90, p99] = [10, 50, 90, 99].map(|percent| percentiles[percent]);
        Self { count, mean, p10, p50, p90, p99, max, percentiles }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_its_ends_and_its_middle() {
        let spread = Spread::of(&mut (1..=1000).rev().map(f64::from).collect::<Vec<_>>()).unwrap();
        assert_eq!((spread.p10, spread.p50, spread.p90, spread.p99), (100.0, 500.0, 900.0, 990.0));
        assert_eq!((spread.percentiles[0], spread.percentiles[100], spread.max), (1.0, 1000.0, 1000.0));
        assert_eq!((spread.count, spread.mean), (1000, 500.5));
        assert_eq!(Spread::of(&mut []), None);
    }
}
