//! Adapters (LoRA) that kvlane has engines load. The section `adapters`.

use std::collections::BTreeMap;
use std::time::Duration;

use kvlane_core::config::{ConfigError, TIME, wrong};
use kvlane_core::section;

use crate::catalogue::ModelSpec;

/// Most adapters of the configuration.
const ADAPTERS_MAX: usize = 4096;

section! {
    /// Adapters that engines are asked to load, and to unload.
    pub struct Adapters {
        /// The adapters by name, as in `{sql: {path: /adapters/sql, model: llama-70b}}`. Others are left as they are.
        pub names: BTreeMap<String, AdapterSpec> = BTreeMap::new(), in 0..=ADAPTERS_MAX;
        /// Longest time of a load, and for which a request waits for one.
        #[serde(with = "humantime_serde")]
        pub load_timeout: Duration = Duration::from_secs(60), in TIME;
        /// Time after which a load that failed is tried again at the same worker.
        #[serde(with = "humantime_serde")]
        pub retry_after: Duration = Duration::from_secs(60), in TIME;
    }
}

section! {
    /// An adapter.
    #[derive(Eq)]
    pub struct AdapterSpec {
        /// What engines get as `lora_path`: a directory that each of them can read, or a name that they can download.
        pub path: String;
        /// Its base model, as workers list it. Without it, the only one that is served.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub model: Option<String>;
        /// Number of workers that have it loaded at least. 0: it is loaded when a request asks for it.
        #[serde(default = "one")]
        pub copies: u32;
    }
}

fn one() -> u32 {
    1
}

// === impl Adapters ===

impl Adapters {
    /// Checks the names, also beside those of the catalogue.
    ///
    /// # Errors
    /// The first one that is wrong.
    pub fn validate(&self, models: &BTreeMap<String, ModelSpec>) -> Result<(), ConfigError> {
        for (name, spec) in &self.names {
            let field = format!("adapters.names.{name}");
            if name.is_empty() || spec.path.is_empty() {
                return wrong(
                    &field,
                    "a name or path is empty: write it as `sql: {path: /adapters/sql}`".into(),
                );
            }
            if models.contains_key(name) {
                return wrong(
                    &field,
                    "a name of `models` is the same: requests for it would not get the adapter".into(),
                );
            }
            if spec.model.as_ref() == Some(name) {
                return wrong(&field, "its base model has the same name".into());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::TargetSpec;

    #[test]
    fn adapters_are_checked_beside_the_catalogue() {
        let spec = |path: &str| AdapterSpec { path: path.into(), model: Some("m".into()), copies: 1 };
        let named =
            |name: &str, spec| Adapters { names: [(name.to_owned(), spec)].into(), ..Adapters::default() };
        let taken = ModelSpec { targets: vec![TargetSpec::new("m", 1)], ..ModelSpec::default() };
        let models = [("taken".to_owned(), taken)].into();
        assert_eq!(named("sql", spec("/sql")).validate(&models), Ok(()));
        for (name, path) in [("", "/sql"), ("sql", ""), ("taken", "/sql"), ("m", "/sql")] {
            let error = named(name, spec(path)).validate(&models).expect_err("it is wrong");
            assert!(error.to_string().contains("adapters.names."), "{error}");
        }
    }
}
