//! Histograms of times, recorded without a lock.
//!
//! `/metrics` exports the counts between a few bounds. [`Histogram::fine`] has steps between them, so that a percentile
//! of the last seconds, as the dashboard shows, comes from the same counts.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};

/// Steps per doubling of a time in a fine histogram: each is at most 9 % longer than the one before.
const STEPS_PER_DOUBLING: f64 = 8.0;
/// The shortest time that a fine histogram distinguishes, in seconds.
const SHORTEST_S: f64 = 0.000_1;

/// Counts of times by length, and their sum. Clones share the counts.
#[derive(Clone, Debug)]
pub struct Histogram(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Upper bounds of the steps in seconds.
    steps: Vec<f64>,
    /// The positions of the exported bounds in `steps`.
    exported: Vec<usize>,
    /// The times in each step, then those beyond the last.
    counts: Vec<AtomicU64>,
    sum_ns: AtomicU64,
}

/// The counts of a histogram at one moment, or of a period.
#[derive(Clone)]
pub struct Counts {
    of: Histogram,
    counts: Vec<u64>,
}

// === impl Histogram ===

impl Histogram {
    /// A histogram with these upper bounds in seconds, in ascending order.
    pub fn new(bounds: impl IntoIterator<Item = f64>) -> Self {
        Self::with_steps(bounds, |_, _| 1)
    }

    /// The same, with steps between the bounds.
    pub fn fine(bounds: impl IntoIterator<Item = f64>) -> Self {
        // Casts saturate.
        Self::with_steps(bounds, |from, to| ((to / from).log2() * STEPS_PER_DOUBLING).ceil() as usize)
    }

    /// `steps_between` says how many steps there are from one bound to the next.
    fn with_steps(bounds: impl IntoIterator<Item = f64>, steps_between: impl Fn(f64, f64) -> usize) -> Self {
        let (mut steps, mut exported, mut from) = (Vec::new(), Vec::new(), SHORTEST_S);
        for bound in bounds {
            let count = steps_between(from, bound).max(1);
            let part = |n| from * (bound / from).powf(n as f64 / count as f64);
            steps.extend((1..count).map(part));
            exported.push(steps.len());
            steps.push(bound);
            from = bound;
        }
        let counts = (0..=steps.len()).map(|_| AtomicU64::new(0)).collect();
        Self(Arc::new(Inner { steps, exported, counts, sum_ns: AtomicU64::new(0) }))
    }

    /// Records a time in seconds.
    pub fn observe(&self, seconds: f64) {
        let Inner { steps, counts, sum_ns, .. } = &*self.0;
        counts[steps.partition_point(|bound| *bound < seconds)].fetch_add(1, Ordering::Relaxed);
        // Casts saturate: NaN and negative times add nothing.
        sum_ns.fetch_add((seconds * 1e9) as u64, Ordering::Relaxed);
    }

    /// A copy of the counts.
    pub fn counts(&self) -> Counts {
        let counts = self.0.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        Counts { of: self.clone(), counts }
    }
}

impl TypedMetric for Histogram {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for Histogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let Inner { steps, exported, sum_ns, .. } = &*self.0;
        let sum_s = sum_ns.load(Ordering::Relaxed) as f64 / 1e9;
        let counts = self.counts();
        let mut from = 0;
        let mut buckets: Vec<(f64, u64)> = Vec::with_capacity(exported.len() + 1);
        for &at in exported {
            buckets.push((steps[at], counts.counts[from..=at].iter().sum()));
            from = at + 1;
        }
        buckets.push((f64::INFINITY, counts.counts[from..].iter().sum()));
        encoder.encode_histogram::<NoLabelSet>(sum_s, counts.total(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

// === impl Counts ===

impl Counts {
    /// The counts since `before`, which are earlier counts of the same histogram.
    pub fn since(&self, before: &Self) -> Self {
        let counts = self.counts.iter().zip(&before.counts).map(|(now, before)| now - before);
        Self { of: self.of.clone(), counts: counts.collect() }
    }

    /// The number of times.
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The quantile in seconds, in a fine histogram within 5 %; NaN if there are no times.
    pub fn quantile(&self, share: f64) -> f64 {
        // Casts saturate.
        let rank = ((self.total() as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (step, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                let steps = &self.of.0.steps;
                let to = steps[step.min(steps.len() - 1)];
                let from = step.checked_sub(1).map_or(to, |before| steps[before]);
                return (from * to).sqrt();
            }
        }
        f64::NAN
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;
    use prometheus_client::registry::Registry;

    use super::*;

    const BOUNDS: [f64; 4] = [0.005, 0.1, 1.0, 10.0];

    #[test]
    fn quantiles_are_within_five_percent() {
        let histogram = Histogram::fine(BOUNDS);
        let before = histogram.counts();
        for n in 1..=1000 {
            histogram.observe(f64::from(n) / 1000.0);
        }
        let lately = histogram.counts().since(&before);
        assert_eq!(lately.total(), 1000);
        for (share, due_s) in [(0.5, 0.5), (0.9, 0.9), (0.99, 0.99), (1.0, 1.0), (0.001, 0.001)] {
            let quantile_s = lately.quantile(share);
            assert!((quantile_s / due_s - 1.0).abs() < 0.05, "{quantile_s} where {due_s} is due");
        }
    }

    #[test]
    fn earlier_times_do_not_count_and_an_empty_period_has_no_quantile() {
        let histogram = Histogram::fine(BOUNDS);
        histogram.observe(100.0);
        let before = histogram.counts();
        assert!(histogram.counts().since(&before).quantile(0.5).is_nan());
        histogram.observe(1.0);
        assert!(histogram.counts().since(&before).quantile(1.0) < 1.1);
    }

    #[test]
    fn any_number_has_a_step() {
        let histogram = Histogram::fine(BOUNDS);
        for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY, f64::MIN_POSITIVE, 1e300] {
            histogram.observe(seconds);
        }
        assert_eq!(histogram.counts().total(), 6);
    }

    #[test]
    fn what_is_exported_is_exact_and_the_same_with_and_without_steps() {
        let text = |histogram: Histogram| {
            for seconds in [0.001, 0.005, 0.006, 0.1, 0.100_001, 2.0, 10.0, 10.5] {
                histogram.observe(seconds);
            }
            let (mut registry, mut text) = (Registry::default(), String::new());
            registry.register("t", "a time", histogram);
            encode(&mut text, &registry).expect("text");
            text
        };
        let fine = text(Histogram::fine(BOUNDS));
        assert_eq!(fine, text(Histogram::new(BOUNDS)));
        for line in [
            "t_sum 22.712001",
            "t_count 8",
            "t_bucket{le=\"0.005\"} 2",
            "t_bucket{le=\"0.1\"} 4",
            "t_bucket{le=\"1.0\"} 5",
            "t_bucket{le=\"10.0\"} 7",
            "t_bucket{le=\"+Inf\"} 8",
        ] {
            assert!(fine.contains(line), "{line} is not in {fine}");
        }
    }
}
