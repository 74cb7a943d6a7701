//! How samples are spread: mean, percentiles, and the whole distribution at every percent.

use serde::{Deserialize, Serialize};

/// Bits of a float's fraction that tell bins apart: bins are at most 0.8 % wide.
const FRACTION_BITS: u32 = 7;

/// Smaller samples of a histogram count as zero: below a microsecond nothing is told apart. A power of two.
const SMALLEST: f64 = 1.0 / (1 << 20) as f64;

/// The distribution of some samples, in their unit. Percentiles are nearest ranks, as those of
/// [`crate::statistics::summary::Percentiles`].
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

/// Samples of zero or more with weights, in bins whose width is a fixed share of the value. Takes the same few
/// kilobytes for any number of samples; percentiles are a bin's lower end.
#[derive(Clone, Debug, Default)]
pub(super) struct Histogram {
    /// Weight by bin. The first one is for zero.
    weights: Vec<u64>,
    sum: f64,
    max: f64,
}

// === impl Spread ===

impl Spread {
    /// The spread of `samples`, which are sorted in place; `None` if there are none.
    pub fn of(samples: &mut [f64]) -> Option<Self> {
        let last = samples.len().checked_sub(1)?;
        samples.sort_unstable_by(f64::total_cmp);
        let rank = |percent: usize| samples[(samples.len() * percent).div_ceil(100).max(1) - 1];
        let mean = samples.iter().sum::<f64>() / samples.len() as f64;
        Some(Self::at(samples.len() as u64, mean, samples[last], (0..=100).map(rank).collect()))
    }

    /// The share of samples that do not exceed each percentile, as points to draw.
    pub fn points(&self) -> Vec<(f64, f64)> {
        self.percentiles.iter().enumerate().map(|(percent, &value)| (value, percent as f64 / 100.0)).collect()
    }

    fn at(count: u64, mean: f64, max: f64, percentiles: Vec<f64>) -> Self {
        let [p10, p50, p90, p99] = [10, 50, 90, 99].map(|percent| percentiles[percent]);
        Self { count, mean, p10, p50, p90, p99, max, percentiles }
    }
}

// === impl Histogram ===

impl Histogram {
    /// Adds a sample so many times. Below zero counts as zero.
    pub(super) fn add(&mut self, value: f64, weight: u64) {
        let value = value.max(0.0);
        let above = value.to_bits().checked_sub(SMALLEST.to_bits());
        let bin = above.map_or(0, |above| (above >> (52 - FRACTION_BITS)) as usize + 1);
        if bin >= self.weights.len() {
            self.weights.resize(bin + 1, 0);
        }
        self.weights[bin] += weight;
        self.sum += value * weight as f64;
        self.max = self.max.max(value);
    }

    /// What it holds; `None` if nothing.
    pub(super) fn spread(&self) -> Option<Spread> {
        let count: u64 = self.weights.iter().sum();
        let low = |bin: usize| match bin {
            0 => 0.0,
            _ => f64::from_bits(SMALLEST.to_bits() + ((bin as u64 - 1) << (52 - FRACTION_BITS))),
        };
        let (mut bin, mut seen) = (0, self.weights.first().copied().unwrap_or(0));
        let percentiles = (0..=100).map(|percent| {
            let rank = (u128::from(count) * percent).div_ceil(100).max(1);
            while u128::from(seen) < rank && bin + 1 < self.weights.len() {
                bin += 1;
                seen += self.weights[bin];
            }
            if percent == 100 { self.max } else { low(bin) }
        });
        (count > 0).then(|| Spread::at(count, self.sum / count as f64, self.max, percentiles.collect()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_spread_has_its_ends_and_its_middle() {
        let spread = Spread::of(&mut (1..=1000).rev().map(f64::from).collect::<Vec<_>>()).unwrap();
        assert_eq!((spread.p10, spread.p50, spread.p90, spread.p99), (100.0, 500.0, 900.0, 990.0));
        assert_eq!((spread.percentiles[0], spread.percentiles[100], spread.max), (1.0, 1000.0, 1000.0));
        assert_eq!((spread.count, spread.mean), (1000, 500.5));
        assert_eq!((Spread::of(&mut []), Histogram::default().spread()), (None, None));
    }

    proptest! {
        #[test]
        fn bins_are_one_percent_wide(
            samples in prop::collection::vec((prop_oneof![Just(0.0), 0.0..1e-5, 0.0..1e7], 1u64..5), 1..200),
        ) {
            let mut histogram = Histogram::default();
            let mut all = Vec::new();
            for &(value, weight) in &samples {
                histogram.add(value, weight);
                all.extend(std::iter::repeat_n(value, weight as usize));
            }
            let (binned, exact) = (histogram.spread().unwrap(), Spread::of(&mut all).unwrap());
            prop_assert_eq!((binned.count, binned.max), (exact.count, exact.max));
            prop_assert!((binned.mean - exact.mean).abs() <= 1e-9 * exact.mean);
            for (binned, exact) in binned.percentiles.iter().zip(&exact.percentiles) {
                prop_assert!(*binned <= *exact && *binned >= *exact * 0.992 - SMALLEST, "{binned} for {exact}");
            }
        }
    }
}
