//! Latencies of recent requests: lock-free histograms of a few hundred bytes.

use std::sync::atomic::{AtomicU32, Ordering};

/// Steps per doubling of a time: each is 9 % longer than the one before.
const STEPS_PER_DOUBLING: usize = 8;
/// The shortest time that is distinguished.
const SHORTEST_S: f64 = 0.000_1;
/// Steps up to 1,677 s.
const STEPS: usize = 24 * STEPS_PER_DOUBLING;

/// Latencies of the requests of one pool.
#[derive(Default)]
pub struct Latencies {
    /// From arrival to first token.
    pub ttft: Histogram,
    /// Between two output tokens after the first, averaged per request.
    pub tpot: Histogram,
    /// From arrival to the last byte.
    pub duration: Histogram,
}

/// Counts of times by length. The counts only grow, modulo 2³²: those of a period are a difference.
pub struct Histogram([AtomicU32; STEPS]);

/// Counts at one moment, or of a period.
#[derive(Clone)]
pub struct Counts([u32; STEPS]);

// === impl Histogram ===

impl Default for Histogram {
    fn default() -> Self {
        Self([const { AtomicU32::new(0) }; STEPS])
    }
}

impl Histogram {
    /// Records a time in seconds.
    pub fn note(&self, seconds: f64) {
        self.0[step_of(seconds)].fetch_add(1, Ordering::Relaxed);
    }

    /// A copy of the counts.
    pub fn counts(&self) -> Counts {
        Counts(std::array::from_fn(|n| self.0[n].load(Ordering::Relaxed)))
    }
}

// === impl Counts ===

impl Counts {
    /// The counts since `before`.
    pub fn since(&self, before: &Self) -> Self {
        Self(std::array::from_fn(|n| self.0[n].wrapping_sub(before.0[n])))
    }

    /// The number of times.
    pub fn total(&self) -> u64 {
        self.0.iter().map(|count| u64::from(*count)).sum()
    }

    /// The quantile in seconds, within 5 %; NaN if there are no times.
    pub fn quantile(&self, share: f64) -> f64 {
        let total = self.total();
        // Casts saturate.
        let rank = ((total as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (step, count) in self.0.iter().enumerate() {
            seen += u64::from(*count);
            if seen >= rank {
                let middle = (step as f64 - 0.5) / STEPS_PER_DOUBLING as f64;
                return SHORTEST_S * middle.exp2();
            }
        }
        f64::NAN
    }
}

/// Casts saturate: times below the shortest, and NaN, are in the first step.
fn step_of(seconds: f64) -> usize {
    let step = ((seconds / SHORTEST_S).log2() * STEPS_PER_DOUBLING as f64).ceil();
    (step as usize).min(STEPS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_five_percent() {
        let spread = Histogram::default();
        let before = spread.counts();
        for n in 1..=1000 {
            spread.note(f64::from(n) / 1000.0);
        }
        let lately = spread.counts().since(&before);
        assert_eq!(lately.total(), 1000);
        for (share, due_s) in [(0.5, 0.5), (0.9, 0.9), (0.99, 0.99), (1.0, 1.0), (0.001, 0.001)] {
            let told_s = lately.quantile(share);
            assert!((told_s / due_s - 1.0).abs() < 0.05, "{told_s} where {due_s} is due");
        }
    }

    #[test]
    fn earlier_times_do_not_count_and_an_empty_period_has_no_quantile() {
        let spread = Histogram::default();
        spread.note(100.0);
        let before = spread.counts();
        assert!(spread.counts().since(&before).quantile(0.5).is_nan());
        spread.note(1.0);
        assert!(spread.counts().since(&before).quantile(1.0) < 1.1);
    }

    #[test]
    fn any_number_has_a_step() {
        let spread = Histogram::default();
        for seconds in [0.0, -1.0, f64::NAN, f64::INFINITY, f64::MIN_POSITIVE, 1e300] {
            spread.note(seconds);
        }
        assert_eq!(spread.counts().total(), 6);
    }
}
