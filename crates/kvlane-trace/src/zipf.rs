//! Zipf's distribution.

use kvlane_core::rng::Rng;

/// Zipf's distribution over `0..n`, by its cumulative weights.
pub(crate) struct Zipf {
    cumulative: Vec<f64>,
}

// === impl Zipf ===

impl Zipf {
    /// Number `n`, counted from 1, is drawn in proportion to `1 / n^skew`.
    pub(crate) fn new(n: u32, skew: f64) -> Self {
        let mut sum = 0.0;
        let cumulative = (1..=n).map(|rank| {
            sum += f64::from(rank).powf(-skew);
            sum
        });
        Self { cumulative: cumulative.collect() }
    }

    pub(crate) fn draw(&self, rng: &mut Rng) -> u32 {
        let all = self.cumulative.last().copied().unwrap_or(0.0);
        let at = rng.unit() * all;
        let place = self.cumulative.partition_point(|&sum| sum <= at);
        place.min(self.cumulative.len().saturating_sub(1)) as u32
    }
}
