//! Numbers of a configuration that are finite and within their bounds, by their type.
//!
//! A comparison with NaN is false, so a check such as `value < least || value > most` lets NaN through, and whatever
//! computes with it later is wrong far from its cause. A [`Bounded`] is checked where it is made and nowhere else: from
//! a file, a flag or a program, no value outside of its bounds can be had.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, de};

/// A finite number from `LEAST` to `MOST`.
#[derive(Clone, Copy, PartialEq, PartialOrd, Serialize)]
#[serde(transparent)]
pub struct Bounded<const LEAST: u64, const MOST: u64>(f64);

/// A share of something: 0 to 1.
pub type Share = Bounded<0, 1>;

/// A weight, a number of seconds or tokens: 0 to 10⁹. What policies compute with such numbers stays finite.
pub type Amount = Bounded<0, 1_000_000_000>;

/// A factor or a rate that must not be below one: 1 to 10⁹.
pub type AtLeastOne = Bounded<1, 1_000_000_000>;

/// A number is none, or outside of its bounds.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("{value} is out of range: take {least} to {most}")]
pub struct OutOfBounds {
    /// The number; NaN if what was written is no number.
    pub value: f64,
    /// The least that is taken.
    pub least: u64,
    /// The most that is taken.
    pub most: u64,
}

/// What was written is no number within its bounds.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NotBounded {
    /// It is no number.
    #[error("'{0}' is no number")]
    NoNumber(String),
    /// It is one outside of its bounds.
    #[error(transparent)]
    OutOfBounds(#[from] OutOfBounds),
}

// === impl Bounded ===

impl<const LEAST: u64, const MOST: u64> Bounded<LEAST, MOST> {
    /// The bounds, both of them taken.
    const BOUNDS: (f64, f64) = {
        assert!(
            LEAST <= MOST && MOST <= 1 << f64::MANTISSA_DIGITS,
            "bounds are exact as floats, and in order"
        );
        (LEAST as f64, MOST as f64)
    };

    /// `value`, if it is within the bounds.
    ///
    /// # Errors
    /// That it is not: NaN never is.
    pub const fn new(value: f64) -> Result<Self, OutOfBounds> {
        let (least, most) = Self::BOUNDS;
        // Written so that NaN fails.
        if least <= value && value <= most {
            Ok(Self(value))
        } else {
            Err(OutOfBounds { value, least: LEAST, most: MOST })
        }
    }

    /// `value`, which the code itself names: a default, a published parameter.
    ///
    /// # Panics
    /// If it is out of bounds. Whatever comes from outside goes through [`Bounded::new`].
    pub const fn of(value: f64) -> Self {
        match Self::new(value) {
            Ok(bounded) => bounded,
            Err(_) => panic!("a number in the code is outside of the bounds of its type"),
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
        /// Whatever bits a number has, it is taken exactly if it is finite and within the bounds.
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
                    prop_assert_eq!(serde_json::from_str::<Bounded<1, 3>>(&text).expect("the same"), taken);
                }
            }
        }
    }

    #[test]
    fn what_is_no_number_within_the_bounds_is_refused_with_what_would_be_right() {
        for (text, problem) in [
            ("NaN", "NaN is out of range: take 0 to 1"),
            ("inf", "inf is out of range: take 0 to 1"),
            ("-inf", "-inf is out of range: take 0 to 1"),
            ("1.5", "1.5 is out of range: take 0 to 1"),
            ("-0.5", "-0.5 is out of range: take 0 to 1"),
            ("much", "'much' is no number"),
        ] {
            assert_eq!(text.parse::<Share>().map_err(|error| error.to_string()), Err(problem.to_owned()));
        }
        assert_eq!("-0".parse(), Ok(Share::of(0.0)));
        let error = serde_json::from_str::<Share>("2").expect_err("too much").to_string();
        assert!(error.contains("2 is out of range: take 0 to 1"), "{error}");
    }
}
