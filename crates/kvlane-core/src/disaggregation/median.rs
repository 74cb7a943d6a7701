//! A running median.

/// Most samples that make a median surer.
const SAMPLES_MAX: u32 = 200;

/// Largest factor; its inverse is the smallest.
const FACTOR_MAX: f64 = 50.0;

/// Ratio within which a part counts as like the whole: otherwise decisions would follow measurement noise.
const ALIKE: f64 = 1.25;

/// A factor that tracks the median of its samples. An outlier, such as a network stall, moves it no more than any other sample.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Factor {
    value: f64,
    samples: u32,
}

// === impl Factor ===

impl Default for Factor {
    fn default() -> Self {
        Self { value: 1.0, samples: 0 }
    }
}

impl Factor {
    pub(crate) fn see(&mut self, sample: f64) {
        if !(sample > 0.0 && sample.is_finite()) {
            return;
        }
        let sample = sample.clamp(1.0 / FACTOR_MAX, FACTOR_MAX);
        let stride = 1.0 + 0.5 / (1.0 + f64::from(self.samples) / 8.0) + 0.02;
        self.samples = (self.samples + 1).min(SAMPLES_MAX);
        // Limited to the sample, to avoid oscillation around it.
        self.value = if sample > self.value {
            (self.value * stride).min(sample)
        } else {
            (self.value / stride).max(sample)
        };
    }

    /// The factor; the whole's if there are no samples or the difference is within noise.
    pub(crate) fn or(&self, whole: &Self) -> f64 {
        let alike = whole.value / ALIKE..whole.value * ALIKE;
        if self.samples == 0 || alike.contains(&self.value) { whole.value } else { self.value }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_factor_finds_the_median_and_an_outlier_hardly_moves_it() {
        let mut factor = Factor::default();
        for n in 0..200 {
            factor.see([3.8, 4.0, 4.2][n % 3]);
        }
        assert!((3.8..=4.2).contains(&factor.value), "{factor:?}");
        let before = factor.value;
        for sample in [1e9, f64::NAN, -1.0, 0.0, f64::INFINITY] {
            factor.see(sample);
        }
        assert!(factor.value / before < 1.1, "{factor:?}");
    }

    #[test]
    fn a_part_without_samples_or_like_the_whole_has_the_factor_of_the_whole() {
        let whole = Factor { value: 2.0, samples: 100 };
        let value = |value, samples| Factor { value, samples }.or(&whole);
        assert_eq!([value(9.0, 0), value(2.2, 9), value(1.7, 9), value(3.0, 9)], [2.0, 2.0, 2.0, 3.0]);
    }
}
