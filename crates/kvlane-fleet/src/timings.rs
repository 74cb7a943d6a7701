//! Timing of engines from the configuration: a file written by `kvlane calibrate`, or a preset for a model and a GPU.
//! Without either, timing is learned.

use std::collections::BTreeMap;

use kvlane_core::config::{ConfigError, wrong};
use kvlane_core::timing::{TimingFile, TimingModel};

use crate::routing::Routing;

/// The configured timing of the pools' engines.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timings {
    usual: Option<TimingFile>,
    own: BTreeMap<String, TimingFile>,
}

// === impl Timings ===

impl Timings {
    /// Reads the files and presets in `routing`.
    ///
    /// # Errors
    /// A file cannot be read or is not a timing file, or a preset's model or GPU is unknown.
    pub fn read(routing: &Routing) -> Result<Self, ConfigError> {
        let own = routing.pools.iter().filter_map(|(model, differs)| Some((model, differs.timing.as_ref()?)));
        let own = own
            .map(|(model, said)| Ok((model.clone(), one(&format!("routing.pools.{model}.timing"), said)?)));
        Ok(Self {
            usual: routing.timing.as_ref().map(|said| one("routing.timing", said)).transpose()?,
            own: own.collect::<Result<_, ConfigError>>()?,
        })
    }

    /// The timing of the pool of `model`.
    pub fn of(&self, model: &str) -> Option<&TimingFile> {
        self.own.get(model).or(self.usual.as_ref())
    }
}

/// A preset if there is one of this name, else a file.
fn one(field: &str, said: &str) -> Result<TimingFile, ConfigError> {
    let preset = match TimingModel::preset(said) {
        Ok(timing) => return Ok(TimingFile::new(timing)),
        Err(why) => why,
    };
    match std::fs::read_to_string(said) {
        Ok(text) => match TimingFile::from_json(&text) {
            Ok(file) => Ok(file),
            Err(why) => wrong(field, format!("{said}: {why}")),
        },
        Err(_) if said.contains('@') => wrong(field, preset.to_string()),
        Err(why) => wrong(field, format!("{said}: {why}; write a file or a preset such as qwen3-32b@h100x2")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routing::PoolOverride;

    fn routing(usual: Option<&str>, own: &[(&str, &str)]) -> Routing {
        let timing = |said: &str| Some(said.to_owned());
        let differs = |said: &str| PoolOverride { timing: timing(said), ..PoolOverride::default() };
        Routing {
            timing: usual.and_then(timing),
            pools: own.iter().map(|(model, said)| ((*model).to_owned(), differs(said))).collect(),
            ..Routing::default()
        }
    }

    #[test]
    fn a_pool_has_its_own_timing_or_the_common_one() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("timing.json");
        let calibrated = TimingFile::new(TimingModel::preset("llama-3.1-8b@a100").expect("in the tables"));
        std::fs::write(&path, calibrated.to_json()).expect("written");
        let path = path.to_str().expect("UTF-8");
        let timings = Timings::read(&routing(Some("qwen3-32b@h100x2"), &[("b", path)])).expect("right");
        assert_eq!(timings.of("a").map(|file| file.timing.name()).as_deref(), Some("qwen3-32b@h100x2"));
        assert_eq!(timings.of("b"), Some(&calibrated));
        assert_eq!(Timings::read(&routing(None, &[("b", path)])).expect("right").of("a"), None);
    }

    #[test]
    fn an_invalid_timing_is_named_with_its_field() {
        for (usual, own, words) in [
            (Some("qwen3-32b@abacus"), None, ["routing.timing: ", "unknown model or GPU"]),
            (Some("/nowhere/timing.json"), None, ["routing.timing: ", "/nowhere/timing.json"]),
            (None, Some(("m", "Cargo.toml")), ["routing.pools.m.timing: ", "not a timing file"]),
        ] {
            let own: Vec<_> = own.into_iter().collect();
            let error = Timings::read(&routing(usual, &own)).expect_err("wrong").to_string();
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
}
