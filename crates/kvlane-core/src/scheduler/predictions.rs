//! How far times to first token are from their predictions.

/// Classes of errors: their names, and the largest error in each, as a share of the measured time.
const CLASSES: [(&str, f64); 4] =
    [("0-15%", 0.15), ("15-35%", 0.35), ("35-100%", 1.0), ("100%+", f64::INFINITY)];

/// First tokens, by the error of their predicted times: from the placement, of requests that are streamed and neither
/// split nor waiting for an adapter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Predictions([u64; CLASSES.len()]);

// === impl Predictions ===

impl Predictions {
    pub(super) fn check(&mut self, predicted_s: f64, measured_s: f64) {
        let error = (predicted_s - measured_s).abs();
        let class = CLASSES.iter().position(|(_, most)| error <= most * measured_s);
        self.0[class.unwrap_or(CLASSES.len() - 1)] += 1;
    }

    /// How many there are of each class, the smallest errors first.
    pub fn counts(&self) -> [(&'static str, u64); CLASSES.len()] {
        std::array::from_fn(|class| (CLASSES[class].0, self.0[class]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_shares_of_what_was_measured() {
        let mut predictions = Predictions::default();
        for predicted_s in [1.0, 0.86, 1.15, 0.84, 1.3, 1.9, 0.0, 2.1, f64::NAN] {
            predictions.check(predicted_s, 1.0);
        }
        let counts = [("0-15%", 3), ("15-35%", 2), ("35-100%", 2), ("100%+", 2)];
        assert_eq!(predictions.counts(), counts);
    }
}
