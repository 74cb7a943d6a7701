//! The configuration section `limits`.

use kvlane_core::config::{ConfigError, wrong};
use kvlane_core::{limit, section};

/// Matches every key, or all models.
pub const ANY: &str = "*";

section! {
    /// The limits of one key for one model, or of each key for all models together.
    #[derive(Eq)]
    pub struct LimitSpec {
        /// The name of a key, and separately of a tenant that a trusted key's holder names; `*` is each one separately,
        /// unless another entry for the same model names it.
        pub key: String = ANY.into();
        /// A base model or an adapter; `*` is all models together.
        pub model: String = ANY.into();
        /// Requests per minute; 0 is no limit.
        pub requests_per_minute: u64 = 0;
        /// Tokens of prompts and answers per minute; 0 is no limit.
        pub tokens_per_minute: u64 = 0;
        /// Concurrent requests; 0 is no limit.
        pub concurrent_requests: u32 = 0;
    }
}

// === impl LimitSpec ===

impl LimitSpec {
    /// Its key and its model.
    pub fn subject(&self) -> (&str, &str) {
        (&self.key, &self.model)
    }

    /// The limits of each key.
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
            let problem = format!("key '{}' and model '{}' have two entries", spec.key, spec.model);
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
    fn an_entry_without_limits_or_a_duplicate_is_rejected() {
        assert_eq!(validate(&[spec("*", "*", 1), spec("a", "*", 1), spec("a", "m", 1)]), Ok(()));
        for (limits, field, word) in [
            (vec![spec("a", "*", 1), spec("*", "*", 0)], "limits[1]", "limits nothing"),
            (vec![spec("a", "m", 1), spec("a", "m", 2)], "limits[1]", "two entries"),
            (vec![spec("", "m", 1)], "limits[0]", "empty"),
            (vec![spec("a", "", 1)], "limits[0]", "empty"),
        ] {
            let error = validate(&limits).expect_err(word);
            assert!(error.field == field && error.problem.contains(word), "{error}");
        }
    }
}
