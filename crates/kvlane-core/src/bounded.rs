//! Configuration numbers whose type guarantees that they are finite and within bounds.
//!
//! A comparison with NaN is false, so a check such as `value < least || value > most` accepts NaN, and a later
//! computation fails far from the cause. A [`Bounded`] is checked only where it is constructed: neither a file, a flag
//! nor code can obtain a value out of bounds.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, de};

/// A finite number from `LEAST` to `MOST`.
#[derive(Clone, Copy, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct Bounded<const LEAST: u64, const MOST: u64>(f64);

/// A share of something: 0 to 1.
pub type Share = Bounded<0, 1>;

/// A weight, or a number of seconds or tokens: 0 to 10⁹. Policies' results with such numbers stay finite.
pub type Amount = Bounded<0, 1_000_000_000>;

/// A factor or a rate of at least one: 1 to 10⁹.
pub type AtLeastOne = Bounded<1, 1_000_000_000>;

/// The number is NaN or outside its bounds.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("{value} is out of range: must be {least} to {most}")]
pub struct OutOfBounds {
    /// The number; NaN if the text is not a number.
    pub value: f64,
    /// The smallest accepted value.
    pub least: u64,
    /// The largest accepted value.
    pub most: u64,
}

/// The text is not a number within the bounds.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NotBounded {
    /// The text is not a number.
    #[error("'{0}' is not a number")]
    NoNumber(String),
    /// The number is outside its bounds.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
}

// === impl Bounded ===

impl<const LEAST: u64, const MOST: u64> Bounded<LEAST, MOST> {
    /// The bounds, both inclusive.
    const BOUNDS: (f64, f64) = {
        assert!(
            LEAST <= MOST && MOST <= 1 << f64::MANTISSA_DIGITS,
            "bounds must be exact as floats and in order"
        );
        (LEAST as f64, MOST as f64)
    };

    /// `value`, if it is within the bounds.
    ///
    /// # Errors
    /// If `value` is out of bounds; NaN always is.
    pub const fn new(value: f64) -> Result<Self, OutOfBounds> {
        let (least, most) = Self::BOUNDS;
        // This form rejects NaN.
        if least <= value && value <= most {
            Ok(Self(value))
        } else {
            Err(OutOfBounds { value, least: LEAST, most: MOST })
        }
    }

    /// A constant in the code: a default or a published parameter.
    ///
    /// # Panics
    /// If `value` is out of bounds. External values go through [`Bounded::new`].
    pub const fn of(value: f64) -> Self {
        match Self::new(value) {
            Ok(bounded) => bounded,
            Err(_) => panic!("constant is outside the bounds of its type"),
        }
    }

    /// The number.
    pub const fn get(self) -> f64 {
        self.0
    }
}

impl<const LEAST: u64, const MOST: u64> fmt::Debug for Bounded<LEAST, MOST> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl<const LEAST: u64, const MOST: u64> fmt::Display for Bounded<LEAST, MOST> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl<const LEAST: u64, const MOST: u64> FromStr for Bounded<LEAST, MOST> {
    type Err = NotBounded;

    fn from_str(text: &str) -> Result<Self, NotBounded> {
        let value: f64 = text.parse().map_err(|_| NotBounded::NoNumber(text.to_owned()))?;
        Ok(Self::new(value)?)
    }
}

impl<'de, const LEAST: u64, const MOST: u64> Deserialize<'de> for Bounded<LEAST, MOST> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(f64::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// For any bit pattern, a number is accepted exactly if it is finite and within the bounds.
        #[test]
        fn a_number_is_taken_exactly_if_it_is_within_its_bounds(bits in any::<u64>(), near in -2.0..4.0f64) {
            for value in [f64::from_bits(bits), near] {
                let within = value.is_finite() && (1.0..=3.0).contains(&value);
                let taken = Bounded::<1, 3>::new(value);
                prop_assert_eq!(taken.is_ok(), within, "{}", value);
                prop_assert_eq!(value.to_string().parse::<Bounded<1, 3>>().is_ok(), within);
                if let Ok(taken) = taken {
                    prop_assert_eq!(taken.get(), value);
                    let text = serde_json::to_string(&taken).expect("JSON");
                    prop_assert_eq!(serde_json::from_str::<Bounded<1, 3>>(&text).expect("accepted as by `new`"), taken);
                }
            }
        }
    }

    #[test]
    fn what_is_no_number_within_the_bounds_is_refused_with_what_would_be_right() {
        for (text, problem) in [
            ("NaN", "NaN is out of range: must be 0 to 1"),
            ("inf", "inf is out of range: must be 0 to 1"),
            ("-inf", "-inf is out of range: must be 0 to 1"),
            ("1.5", "1.5 is out of range: must be 0 to 1"),
            ("-0.5", "-0.5 is out of range: must be 0 to 1"),
            ("much", "'much' is not a number"),
        ] {
            assert_eq!(text.parse::<Share>().map_err(|error| error.to_string()), Err(problem.to_owned()));
        }
        assert_eq!("-0".parse(), Ok(Share::of(0.0)));
        let error = serde_json::from_str::<Share>("2").expect_err("above the bound").to_string();
        assert!(error.contains("2 is out of range: must be 0 to 1"), "{error}");
    }
}
