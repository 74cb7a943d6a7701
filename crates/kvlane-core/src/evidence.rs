//! A mean of observations, and the number of observations that it counts as.

use serde::{Deserialize, Serialize};

/// A mean and its weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Evidence {
    pub(crate) mean: f64,
    /// Observations that it counts as; 0 where there are none.
    pub(crate) weight: f64,
}

/// Observations of its own with which a router no longer needs those of others: what it has seen itself is newer, and is of the requests
/// that it places.
const ENOUGH: f64 = 50.0;

// === impl Evidence ===

impl Evidence {
    /// Whether there are no observations.
    pub(crate) fn is_none(&self) -> bool {
        self.weight <= 0.0
    }

    /// Both together. Without the other one, this one's mean stays as it is, to the last bit.
    pub(crate) fn and(self, other: Self) -> Self {
        if other.is_none() {
            return self;
        }
        let weight = self.weight + other.weight;
        Self { mean: (self.mean * self.weight + other.mean * other.weight) / weight, weight }
    }

    /// This one, which the other one brings to at most [`ENOUGH`] observations.
    pub(crate) fn filled_by(self, other: Self) -> Self {
        let missing = (ENOUGH - self.weight).max(0.0);
        self.and(Self { weight: other.weight.min(missing), ..other })
    }

    /// The mean in this unit.
    pub(crate) fn per(self, unit: f64) -> Self {
        Self { mean: self.mean / unit, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_counts_by_its_observations() {
        let (few, many) = (Evidence { mean: 1.0, weight: 10.0 }, Evidence { mean: 5.0, weight: 30.0 });
        assert_eq!(few.and(many), Evidence { mean: 4.0, weight: 40.0 });
        assert_eq!(many.and(few), few.and(many));
        let none = Evidence { mean: 7.0, weight: 0.0 };
        assert_eq!((few.and(none), none.and(few)), (few, few));
    }

    #[test]
    fn others_count_as_long_as_there_is_not_enough_evidence() {
        let others = Evidence { mean: 5.0, weight: 80.0 };
        let with = |weight| Evidence { mean: 1.0, weight }.filled_by(others);
        assert_eq!(with(0.0), Evidence { mean: 5.0, weight: ENOUGH });
        assert_eq!(with(ENOUGH / 2.0), Evidence { mean: 3.0, weight: ENOUGH });
        assert_eq!(with(ENOUGH), Evidence { mean: 1.0, weight: ENOUGH });
        assert_eq!(with(90.0), Evidence { mean: 1.0, weight: 90.0 });
    }
}
