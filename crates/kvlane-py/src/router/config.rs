//! Arguments of the router's constructor.

use std::path::Path;

use anyhow::Context as _;
use kvlane_core::config::Setting as _;
use kvlane_core::policy::{PolicyConfig, fleet_cost, name_or_config};
use kvlane_core::time::Nanos;
use kvlane_core::timing::{TimingFile, TimingModel};
use kvlane_wire::kv::BLOCK_TOKENS_MAX;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::error::exception;

/// The longest span, in seconds.
const SPAN_MAX_S: f64 = 1e9;

/// The policy of a name, or of a mapping with `name` and parameters; the gateway's default without either.
pub(super) fn policy(policy: Option<&Bound<'_, PyAny>>) -> PyResult<PolicyConfig> {
    let Some(given) = policy else { return Ok(PolicyConfig::FleetCost(fleet_cost::Config::default())) };
    if let Ok(name) = given.cast::<PyString>() {
        let name = name.to_string_lossy();
        return PolicyConfig::by_name(&name)
            .ok_or_else(|| PyValueError::new_err(format!("policy: {}", PolicyConfig::unknown(&name))));
    }
    let text: String = given.py().import("json")?.call_method1("dumps", (given,))?.extract()?;
    let mut json = serde_json::Deserializer::from_str(&text);
    let policy = name_or_config(&mut json).context("policy").map_err(exception)?;
    policy.check("policy").map_err(exception)?;
    Ok(policy)
}

/// The timing model of a preset or a file, as `routing.timing` takes it.
pub(super) fn timing(said: &Path) -> PyResult<TimingModel> {
    if let Some(timing) = said.to_str().and_then(|name| TimingModel::preset(name).ok()) {
        return Ok(timing);
    }
    let read = || {
        let text = std::fs::read_to_string(said)?;
        anyhow::Ok(TimingFile::from_json(&text)?.timing)
    };
    let place = || {
        format!("timing {}: neither a preset (as in llama-3.3-70b@h100x4) nor a timing file", said.display())
    };
    read().with_context(place).map_err(exception)
}

pub(super) fn span(name: &str, secs: f64) -> PyResult<Nanos> {
    match (0.0..SPAN_MAX_S).contains(&secs) {
        true => Ok(Nanos::from_secs_f64(secs)),
        false => Err(PyValueError::new_err(format!("{name} {secs}: must be from 0 to {SPAN_MAX_S} seconds"))),
    }
}

pub(super) fn block_tokens(tokens: u32) -> PyResult<u32> {
    match (1..=BLOCK_TOKENS_MAX).contains(&tokens) {
        true => Ok(tokens),
        false => {
            Err(PyValueError::new_err(format!("block_tokens {tokens}: must be from 1 to {BLOCK_TOKENS_MAX}")))
        }
    }
}
