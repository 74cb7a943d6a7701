//! Histogram of durations in constant memory, for samples per token or millisecond rather than per request.
//!
//! Bucket widths grow with the value, 32 buckets per doubling, so percentiles are accurate to 3 %; mean and maximum
//! are exact.

use std::time::Duration;

use super::summary::Percentiles;

/// Buckets per doubling.
const PER_DOUBLING: usize = 32;
/// Number of doublings of a nanosecond: 64 bits.
const DOUBLINGS: usize = 60;

/// A histogram of durations.
#[derive(Clone, Debug, PartialEq)]
pub struct Histogram {
    counts: Vec<u64>,
    count: u64,
    sum_s: f64,
    max: Duration,
}

// === impl Histogram ===

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; PER_DOUBLING * DOUBLINGS], count: 0, sum_s: 0.0, max: Duration::ZERO }
    }
}

impl Histogram {
    /// Adds a sample.
    pub fn add(&mut self, duration: Duration) {
        self.add_many(duration, 1);
    }

    /// Adds a number of equal samples.
    pub fn add_many(&mut self, duration: Duration, times: u64) {
        if times == 0 {
            return;
        }
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket(nanos)] += times;
        self.count += times;
        self.sum_s += duration.as_secs_f64() * times as f64;
        self.max = self.max.max(duration);
    }

    /// Adds all samples of another histogram.
    pub fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(ours, theirs)| *ours += theirs);
        self.count += other.count;
        self.sum_s += other.sum_s;
        self.max = self.max.max(other.max);
    }

    /// Number of samples.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Mean and percentiles in seconds; `None` without samples.
    pub fn percentiles(&self) -> Option<Percentiles> {
        let rank = |percent: u64| {
            let rank = (u128::from(self.count) * u128::from(percent)).div_ceil(100).max(1) as u64;
            let mut below = 0;
            let at = self.counts.iter().position(|count| {
                below += count;
                below >= rank
            });
            at.map_or(0.0, |at| middle_s(at).min(self.max.as_secs_f64()))
        };
        (self.count > 0).then(|| Percentiles {
            mean: self.sum_s / self.count as f64,
            p50: rank(50),
            p90: rank(90),
            p99: rank(99),
            max: self.max.as_secs_f64(),
        })
    }
}

/// The bucket of a number of nanoseconds. The first 32 are exact; then each doubling has 32.
fn bucket(nanos: u64) -> usize {
    let doubling = (u64::BITS - nanos.leading_zeros()).saturating_sub(PER_DOUBLING.ilog2() + 1) as usize;
    doubling * PER_DOUBLING + (nanos >> doubling) as usize
}

/// The middle of a bucket, in seconds.
fn middle_s(bucket: usize) -> f64 {
    let doubling = (bucket / PER_DOUBLING).saturating_sub(1);
    let from = ((bucket - doubling * PER_DOUBLING) as u64) << doubling;
    (from as f64 + ((1u64 << doubling) - 1) as f64 / 2.0) * 1e-9
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn nothing_counted_is_nothing_said() {
        assert_eq!(Histogram::default().percentiles(), None);
    }

    #[test]
    fn the_longest_duration_has_a_bucket() {
        let mut all = Histogram::default();
        all.add(Duration::MAX);
        all.add(Duration::ZERO);
        assert_eq!(all.count(), 2);
        assert_eq!(all.percentiles().expect("two").p50, 0.0);
    }

    proptest! {
        /// A percentile is the nearest rank of the samples, to within half a bucket, however they are split.
        #[test]
        fn percentiles_are_those_of_the_samples(
            micros in prop::collection::vec(0u64..100_000_000, 1..300), half in 0usize..300,
        ) {
            let (mut all, mut rest) = (Histogram::default(), Histogram::default());
            for (index, &micros) in micros.iter().enumerate() {
                if index < half { &mut all } else { &mut rest }.add(Duration::from_micros(micros));
            }
            all.merge(&rest);
            let mut samples: Vec<f64> = micros.iter().map(|&micros| micros as f64 * 1e-6).collect();
            let exact = Percentiles::of(&mut samples).expect("samples");
            let counted = all.percentiles().expect("samples");
            for (counted, exact) in [
                (counted.p50, exact.p50), (counted.p90, exact.p90), (counted.p99, exact.p99), (counted.max, exact.max),
            ] {
                prop_assert!((counted - exact).abs() <= exact / PER_DOUBLING as f64 + 1e-9, "{} of {}", counted, exact);
            }
            prop_assert!((counted.mean - exact.mean).abs() < 1e-6);
        }
    }
}
