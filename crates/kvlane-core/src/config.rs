//! Errors of configuration values: which field is wrong, and what would be right.

use std::fmt;
use std::time::Duration;

/// The shortest time that a configured duration may have, where zero means nothing.
pub const LEAST_TIME: Duration = Duration::from_millis(1);
/// The longest time that a configured duration may have.
pub const MOST_TIME: Duration = Duration::from_secs(365 * 24 * 3600);

/// What is wrong with a configuration, where, and what to write instead.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct ConfigError {
    /// The field, as `section.key`.
    pub field: String,
    /// What is wrong and what would be right.
    pub problem: String,
}

/// An error for `field`.
///
/// # Errors
/// Always: shorthand for `Err(ConfigError { .. })`.
pub fn wrong<T>(field: &str, problem: String) -> Result<T, ConfigError> {
    Err(ConfigError { field: field.into(), problem })
}

/// Checks the bounds of a whole number. Fractions have a type that checks itself: [`Bounded`](crate::bounded::Bounded).
///
/// # Errors
/// The field and its range.
pub fn within<T: Ord + fmt::Display>(field: &str, value: T, least: T, most: T) -> Result<(), ConfigError> {
    if value < least || value > most {
        return wrong(field, format!("{value} is out of range: must be {least} to {most}"));
    }
    Ok(())
}
