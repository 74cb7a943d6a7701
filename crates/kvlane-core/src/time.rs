//! Time in the core: nanoseconds since an origin that the driver chose.
//!
//! The core never reads a clock. The gateway passes monotonic time since its start, the simulator virtual time, a
//! replay the recorded time.

use std::ops::{Add, AddAssign, Sub};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A point in time, or a span, in nanoseconds. Arithmetic saturates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Nanos(pub u64);

impl Nanos {
    /// The driver's origin; also the empty span.
    pub const ZERO: Self = Self(0);
    /// Later than any time a driver reaches.
    pub const MAX: Self = Self(u64::MAX);

    /// Whole seconds.
    pub const fn from_secs(secs: u64) -> Self {
        Self(secs.saturating_mul(1_000_000_000))
    }

    /// Whole milliseconds.
    pub const fn from_millis(millis: u64) -> Self {
        Self(millis.saturating_mul(1_000_000))
    }

    /// Whole microseconds.
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros.saturating_mul(1_000))
    }

    /// Seconds, rounded to the nearest nanosecond. Negative and NaN become zero, infinity the largest value.
    pub fn from_secs_f64(secs: f64) -> Self {
        Self((secs * 1e9).round() as u64)
    }

    /// Whole microseconds, modulo 2³²: a time that a column can hold. See [`micros_since`].
    pub(crate) fn micros(self) -> u32 {
        (self.0 / 1000) as u32
    }

    /// Seconds as a float.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }
}

/// Microseconds from a time until now: none if it is later, or more than 35 minutes ago.
pub(crate) fn micros_since(since: u32, now: Nanos) -> i32 {
    (now.micros().wrapping_sub(since) as i32).max(0)
}

impl From<Duration> for Nanos {
    fn from(span: Duration) -> Self {
        Self(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl Add for Nanos {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl AddAssign for Nanos {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for Nanos {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates_instead_of_wrapping() {
        assert_eq!(Nanos::from_millis(1) - Nanos::from_secs(1), Nanos::ZERO);
        assert_eq!(Nanos::MAX + Nanos::from_secs(1), Nanos::MAX);
        assert_eq!(Nanos::from_secs_f64(-1.0), Nanos::ZERO);
        assert_eq!(Nanos::from_secs_f64(0.25).as_secs_f64(), 0.25);
    }
}
