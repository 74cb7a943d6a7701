//! What each client may use.

use kvlane_core::limit;
use serde::{Deserialize, Serialize};

use kvlane_core::config::{ConfigError, within, wrong};

/// The most entries.
const LIMITS_MAX: usize = 10_000;
/// Whoever, and whatever.
pub const ANY: &str = "*";

/// What one key may use of one model, or each key of all models together.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitSpec {
    /// Whose: the name of a key, and likewise, for itself, of a tenant that is believed; `*` is each for itself, unless
    /// another entry for the same model names it.
    pub key: String,
    /// Of which model: its base model or an adapter; `*` is all models together.
    pub model: String,
    /// Requests per minute; 0 is no limit.
    pub requests_per_minute: u64,
    /// Tokens of prompts and answers per minute; 0 is no limit.
    pub tokens_per_minute: u64,
    /// Requests at a time; 0 is no limit.
    pub concurrent_requests: u32,
}

impl Default for LimitSpec {
    fn default() -> Self {
        Self {
            key: ANY.into(),
            model: ANY.into(),
            requests_per_minute: 0,
            tokens_per_minute: 0,
            concurrent_requests: 0,
        }
    }
}

// === impl LimitSpec ===

impl LimitSpec {
    /// What it is about: which key and which model.
    pub fn subject(&self) -> (&str, &str) {
        (&self.key, &self.model)
    }

    /// What each key may use.
    pub fn limiter(&self) -> limit::Config {
        limit::Config {
            requests_per_minute: self.requests_per_minute,
            tokens_per_minute: self.tokens_per_minute,
            concurrent_requests: self.concurrent_requests,
            ..limit::Config::default()
        }
    }
}

/// Checks all entries.
///
/// # Errors
/// The first entry that is wrong.
pub fn validate(limits: &[LimitSpec]) -> Result<(), ConfigError> {
    within("limits", limits.len(), 0, LIMITS_MAX)?;
    let mut seen = std::collections::BTreeSet::new();
    for (n, spec) in limits.iter().enumerate() {
        let field = format!("limits[{n}]");
        if spec.key.is_empty() || spec.model.is_empty() {
            return wrong(&field, "a key or model is empty: write its name, or '*' for all".into());
        }
        if (spec.requests_per_minute, spec.tokens_per_minute, spec.concurrent_requests) == (0, 0, 0) {
            let problem =
                "it limits nothing: set requests_per_minute, tokens_per_minute or concurrent_requests";
            return wrong(&field, problem.into());
        }
        if !seen.insert((&spec.key, &spec.model)) {
            let problem = format!("key '{}' and model '{}' are there twice", spec.key, spec.model);
            return wrong(&field, problem);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(key: &str, model: &str, requests_per_minute: u64) -> LimitSpec {
        LimitSpec { key: key.into(), model: model.into(), requests_per_minute, ..LimitSpec::default() }
    }

    #[test]
    fn what_limits_nothing_or_twice_is_refused() {
        assert_eq!(validate(&[spec("*", "*", 1), spec("a", "*", 1), spec("a", "m", 1)]), Ok(()));
        for (limits, field, word) in [
            (vec![spec("a", "*", 1), spec("*", "*", 0)], "limits[1]", "limits nothing"),
            (vec![spec("a", "m", 1), spec("a", "m", 2)], "limits[1]", "twice"),
            (vec![spec("", "m", 1)], "limits[0]", "empty"),
            (vec![spec("a", "", 1)], "limits[0]", "empty"),
            (vec![spec("a", "m", 1); LIMITS_MAX + 1], "limits", "10000"),
        ] {
            let error = validate(&limits).expect_err(word);
            assert!(error.field == field && error.problem.contains(word), "{error}");
        }
    }
}
