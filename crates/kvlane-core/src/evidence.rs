//! A mean of observations, and the number of observations that it counts as.

use serde::{Deserialize, Serialize};

/// A mean and its weight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Evidence {
    pub(crate) mean: f64,
    /// Observations that it counts as; 0 where there are none.
    pub(crate) weight: f64,
}

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
}
