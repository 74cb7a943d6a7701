//! How far times to first token are from their predictions.

/// Largest errors of the classes, as shares of the measured time; one more class is beyond the last.
pub const ERRORS: [f64; 3] = [0.15, 0.35, 1.0];

/// First tokens, by the error of their predicted times: from the placement, of requests that are streamed and neither
/// split nor waiting for an adapter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Predictions([u64; ERRORS.len() + 1]);

// === impl Predictions ===

impl Predictions {
    pub(super) fn check(&mut self, predicted_s: f64, measured_s: f64) {
        let error = (predicted_s - measured_s).abs();
        let class = ERRORS.iter().position(|most| error <= most * measured_s);
        self.0[class.unwrap_or(ERRORS.len())] += 1;
    }

    /// Per class of [`ERRORS`].
    pub fn counts(&self) -> [u64; ERRORS.len() + 1] {
        self.0
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
        assert_eq!(predictions.counts(), [3, 2, 2, 2]);
    }
}
