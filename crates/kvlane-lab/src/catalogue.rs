//! The scenarios and the traces that come with kvlane.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use kvlane_core::suggest::suggest;
use kvlane_trace::TraceError;
use kvlane_trace::format::{self, Options};
use kvlane_trace::trace::Trace;
use kvlane_wire::yaml::{self, YamlError};

use crate::scenario::Scenario;

/// Name and text of each.
const SCENARIOS: &[(&str, &str)] = &[
    ("seed-000-7b", include_str!("../scenarios/seed-000-7b.yaml")),
    ("seed-000-14b", include_str!("../scenarios/seed-000-14b.yaml")),
    ("seed-000-m1", include_str!("../scenarios/seed-000-m1.yaml")),
    ("seed-001", include_str!("../scenarios/seed-001.yaml")),
    ("seed-002", include_str!("../scenarios/seed-002.yaml")),
    ("seed-003", include_str!("../scenarios/seed-003.yaml")),
    ("seed-004", include_str!("../scenarios/seed-004.yaml")),
    ("seed-004-tp2", include_str!("../scenarios/seed-004-tp2.yaml")),
    ("seed-004-elastic", include_str!("../scenarios/seed-004-elastic.yaml")),
    ("seed-004-cache", include_str!("../scenarios/seed-004-cache.yaml")),
    ("mooncake-fig5", include_str!("../scenarios/mooncake-fig5.yaml")),
    ("nim-70b", include_str!("../scenarios/nim-70b.yaml")),
    ("nim-70b-long-answers", include_str!("../scenarios/nim-70b-long-answers.yaml")),
    ("prefill-qwen3-32b", include_str!("../scenarios/prefill-qwen3-32b.yaml")),
    ("prefill-gpt-oss-120b", include_str!("../scenarios/prefill-gpt-oss-120b.yaml")),
    ("replicas-240", include_str!("../scenarios/replicas-240.yaml")),
    ("replicas-1000", include_str!("../scenarios/replicas-1000.yaml")),
    ("replicas-mooncake", include_str!("../scenarios/replicas-mooncake.yaml")),
    ("replicas-partition", include_str!("../scenarios/replicas-partition.yaml")),
    ("cells", include_str!("../scenarios/cells.yaml")),
    ("adapters", include_str!("../scenarios/adapters.yaml")),
    ("cells-documents", include_str!("../scenarios/cells-documents.yaml")),
];

/// Traces by name: conversations published with Mooncake (FAST'25), Apache-2.0; sessions of a coding agent from Weka's
/// kv-cache-tester, Apache-2.0; conversations of Azure's inference service, CC-BY-4.0. See the README beside them.
const TRACES: [(&str, &[u8]); 3] = [
    ("mooncake-conversation", include_bytes!("../assets/mooncake-conversation.trace.jsonl.gz")),
    ("weka-agentic", include_bytes!("../assets/weka-agentic.packed.jsonl.gz")),
    ("azure-conversation", include_bytes!("../assets/azure-conversation.csv.gz")),
];

/// Whether a built-in trace has this name.
pub fn is_trace(name: &Path) -> bool {
    trace(name).is_some()
}

/// The built-in trace of this name, as the contents of a file.
fn trace(name: &Path) -> Option<&'static [u8]> {
    TRACES.iter().find(|(known, _)| name == Path::new(known)).map(|(_, bytes)| *bytes)
}

/// Opens a trace: a built-in one by its name, any other as a file relative to `directory`.
///
/// # Errors
/// It cannot be read; without such a file, the built-in traces are named.
pub fn open(path: &Path, directory: &Path) -> Result<Trace, TraceError> {
    open_with(path, directory, &Options::default())
}

/// Opens a trace as [`open`] does, with these options.
///
/// # Errors
/// The same.
pub fn open_with(path: &Path, directory: &Path, options: &Options) -> Result<Trace, TraceError> {
    if let Some(bytes) = trace(path) {
        return format::read(bytes, options);
    }
    format::open(&directory.join(path), options).map_err(|error| match error {
        TraceError::Open { source, .. } if source.kind() == io::ErrorKind::NotFound => {
            let known = TRACES.iter().map(|(known, _)| *known);
            TraceError::Absent { meant: suggest(&path.to_string_lossy(), known, "") }
        }
        other => other,
    })
}

/// Why a scenario cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ScenarioError {
    /// No scenario has this name, and no file.
    #[error("scenario {name}: neither a file nor a known name: {meant}", meant = suggest(name, names(), "`--list` shows all."))]
    Absent {
        /// The name.
        name: String,
        /// Why it cannot be read as a file.
        source: io::Error,
    },
    /// It is not a scenario.
    #[error("scenario {name}")]
    Invalid {
        /// Its name.
        name: String,
        /// What is wrong.
        source: YamlError,
    },
}

/// Reads a scenario, a built-in one by its name, any other from a file; and the directory for its relative paths.
///
/// # Errors
/// There is none, or it is invalid.
pub fn scenario(name: &str) -> Result<(Scenario, PathBuf), ScenarioError> {
    let invalid = |source| ScenarioError::Invalid { name: name.to_owned(), source };
    if let Some((_, text)) = SCENARIOS.iter().find(|(known, _)| *known == name) {
        return Ok((yaml::read(text).map_err(invalid)?, PathBuf::new()));
    }
    let path = Path::new(name);
    let text = std::fs::read_to_string(path)
        .map_err(|source| ScenarioError::Absent { name: name.to_owned(), source })?;
    let directory = path.parent().unwrap_or(Path::new("")).to_owned();
    Ok((yaml::read(&text).map_err(invalid)?, directory))
}

/// The names of the scenarios.
pub fn names() -> Vec<&'static str> {
    SCENARIOS.iter().map(|(name, _)| *name).collect()
}

/// The name of each scenario with the comment on its first line, for a terminal.
pub fn list() -> String {
    let mut out = String::new();
    for (name, text) in SCENARIOS {
        let about = text.lines().next().and_then(|line| line.strip_prefix("# ")).unwrap_or_default();
        _ = writeln!(out, "{name:20} {about}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_that_is_neither_a_file_nor_built_in_is_answered_with_the_names() {
        let said = open(Path::new("mooncake"), Path::new("/nowhere")).expect_err("no such trace").to_string();
        assert_eq!(
            said,
            "neither a file nor the name of a trace that comes with kvlane: use `mooncake-conversation`, \
             `weka-agentic` or `azure-conversation`"
        );
        for (name, _) in TRACES {
            assert!(
                is_trace(Path::new(name))
                    && !open(Path::new(name), Path::new("")).expect("readable").requests.is_empty()
            );
        }
    }
}
