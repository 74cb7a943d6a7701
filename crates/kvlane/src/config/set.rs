//! Sets one key of a configuration.

use anyhow::{Result, anyhow, bail};
use kvlane_gateway::config::Config;
use kvlane_http::secret::revealed;
use kvlane_wire::mistake::in_words;
use serde_json::{Value, json};

/// Where all keys are, for an error about one that is unknown.
pub(super) const KEYS: &str = "`kvlane config` prints every key.";

/// A value after `=`: JSON if it parses, else text.
pub(super) fn scalar(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

/// The configuration with one key set. `a.b+` adds entries to the map `a.b`.
pub(super) fn with(config: &Config, key: &str, value: Value) -> Result<Config> {
    let mut tree = revealed(|| serde_json::to_value(config))?;
    let (key, adds) = key.strip_suffix('+').map_or((key, false), |path| (path, true));
    // Another policy starts with its own default parameters.
    let path = key.strip_suffix("policy.name").map_or(key.to_owned(), |section| format!("{section}policy"));
    let mut at = &mut tree;
    for name in path.split('.') {
        let Value::Object(section) = at else { bail!("{key}: '{name}' is inside a value, not a section") };
        at = section.entry(name).or_insert_with(|| json!({}));
    }
    match (adds, at, value) {
        (true, Value::Object(at), Value::Object(more)) => {
            for (name, value) in more {
                match (at.get_mut(&name), value) {
                    // Other keys of the entry are kept.
                    (Some(Value::Object(entry)), Value::Object(fields)) => entry.extend(fields),
                    (_, value) => _ = at.insert(name, value),
                }
            }
        }
        (_, at, value) => *at = value,
    }
    serde_path_to_error::deserialize(tree).map_err(|error| {
        // The error may be in a key below the one that was set, as in `--set retry={jitter: 2}`.
        let below = error.path().to_string();
        let at = if below.starts_with(key) { &below } else { key };
        // A policy names its parameter itself.
        let cause = in_words(&error.inner().to_string(), KEYS);
        let name = at.rsplit('.').next().unwrap_or(at);
        anyhow!("{at}: {}", cause.strip_prefix(&format!("{name}: ")).unwrap_or(&cause))
    })
}
