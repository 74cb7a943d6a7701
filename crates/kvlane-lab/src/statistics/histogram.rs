//! Histogram in constant memory, for samples per token or block rather than per request.
//!
//! Bins are a fixed share of the value wide, 128 per doubling, so percentiles are accurate to 0.8 %; mean and maximum
//! are exact.

use super::spread::Spread;
use super::summary::Percentiles;

/// Bits of a float's fraction that tell bins apart: bins are at most 0.8 % wide.
const FRACTION_BITS: u32 = 7;

/// Smaller samples count as zero: below a microsecond nothing is told apart. A power of two.
const SMALLEST: f64 = 1.0 / (1 << 20) as f64;

/// Samples of zero or more, such as seconds, with weights. Percentiles are nearest ranks, at a bin's lower end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    /// Weight by bin, up to the last one in use. The first one is for zero.
    weights: Vec<u64>,
    count: u64,
    sum: f64,
    max: f64,
}

// === impl Histogram ===

impl Histogram {
    /// Adds a sample `times` times. A value below zero counts as zero.
    pub fn add(&mut self, value: f64, weight: u64) {
        if weight == 0 {
            return;
        }
        let value = value.max(0.0);
        let above = value.to_bits().checked_sub(SMALLEST.to_bits());
        let bin = above.map_or(0, |above| (above >> (52 - FRACTION_BITS)) as usize + 1);
        self.grow(bin + 1);
        self.weights[bin] += weight;
        self.count += weight;
        self.sum += value * weight as f64;
        self.max = self.max.max(value);
    }

    /// Adds all samples of another histogram.
    pub fn merge(&mut self, other: &Self) {
        self.grow(other.weights.len());
        self.weights.iter_mut().zip(&other.weights).for_each(|(ours, theirs)| *ours += theirs);
        self.count += other.count;
        self.sum += other.sum;
        self.max = self.max.max(other.max);
    }

    /// Number of samples.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Mean and percentiles; `None` without samples.
    pub fn percentiles(&self) -> Option<Percentiles> {
        let Spread { mean, p50, p90, p99, max, .. } = self.spread()?;
        Some(Percentiles { mean, p50, p90, p99, max })
    }

    /// The whole distribution; `None` without samples.
    pub fn spread(&self) -> Option<Spread> {
        let low = |bin: usize| match bin {
            0 => 0.0,
            _ => f64::from_bits(SMALLEST.to_bits() + ((bin as u64 - 1) << (52 - FRACTION_BITS))),
        };
        let (mut bin, mut seen) = (0, self.weights.first().copied().unwrap_or(0));
        let percentiles = (0..=100).map(|percent| {
            let rank = (u128::from(self.count) * percent).div_ceil(100).max(1);
            while u128::from(seen) < rank && bin + 1 < self.weights.len() {
                bin += 1;
                seen += self.weights[bin];
            }
            if percent == 100 { self.max } else { low(bin) }
        });
        let mean = self.sum / self.count as f64;
        (self.count > 0).then(|| Spread::at(self.count, mean, self.max, percentiles.collect()))
    }

    fn grow(&mut self, bins: usize) {
        if bins > self.weights.len() {
            self.weights.resize(bins, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_counted_is_nothing_said_and_any_number_has_a_bin() {
        let mut all = Histogram::default();
        all.add(1.0, 0);
        assert_eq!((all.spread(), all.percentiles()), (None, None));
        for value in [f64::MAX, f64::MIN_POSITIVE, 0.0, -1.0, f64::NAN] {
            all.add(value, 1);
        }
        assert_eq!((all.count(), all.percentiles().expect("five").p50), (5, 0.0));
    }

    proptest! {
        /// A percentile is the nearest rank of the samples, less at most a bin's width, however they are split.
        #[test]
        fn percentiles_are_those_of_the_samples(
            samples in prop::collection::vec((prop_oneof![Just(0.0), 0.0..1e-5, 0.0..1e7], 1u64..5), 1..200),
            half in 0usize..200,
        ) {
            let (mut histogram, mut rest, mut all) = (Histogram::default(), Histogram::default(), Vec::new());
            for (index, &(value, weight)) in samples.iter().enumerate() {
                if index < half { &mut histogram } else { &mut rest }.add(value, weight);
                all.extend(std::iter::repeat_n(value, weight as usize));
            }
            histogram.merge(&rest);
            let (binned, exact) = (histogram.spread().unwrap(), Spread::of(&mut all).unwrap());
            prop_assert_eq!((binned.count, binned.max), (exact.count, exact.max));
            prop_assert!((binned.mean - exact.mean).abs() <= 1e-9 * exact.mean);
            for (binned, exact) in binned.percentiles.iter().zip(&exact.percentiles) {
                prop_assert!(*binned <= *exact && *binned >= *exact * 0.992 - SMALLEST, "{binned} for {exact}");
            }
            let Percentiles { mean, p50, p90, p99, max } = histogram.percentiles().unwrap();
            prop_assert_eq!((mean, p50, p90, p99, max), (binned.mean, binned.p50, binned.p90, binned.p99, binned.max));
        }
    }
}
