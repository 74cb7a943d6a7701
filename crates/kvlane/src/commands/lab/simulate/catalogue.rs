//! The scenarios and the traces that come with kvlane.

use std::fmt::Write as _;
use std::path::Path;

use kvlane_trace::TraceError;
use kvlane_trace::format::{self, Options};
use kvlane_trace::trace::Trace;

/// Name and text of each.
const SCENARIOS: &[(&str, &str)] = &[
    ("seed-000-7b", include_str!("../../../../../../scenarios/seed-000-7b.yaml")),
    ("seed-000-14b", include_str!("../../../../../../scenarios/seed-000-14b.yaml")),
    ("seed-001", include_str!("../../../../../../scenarios/seed-001.yaml")),
    ("seed-002", include_str!("../../../../../../scenarios/seed-002.yaml")),
    ("seed-004", include_str!("../../../../../../scenarios/seed-004.yaml")),
    ("seed-004-tp2", include_str!("../../../../../../scenarios/seed-004-tp2.yaml")),
    ("seed-004-elastic", include_str!("../../../../../../scenarios/seed-004-elastic.yaml")),
    ("seed-004-cache", include_str!("../../../../../../scenarios/seed-004-cache.yaml")),
    ("mooncake-fig5", include_str!("../../../../../../scenarios/mooncake-fig5.yaml")),
    ("prefill-qwen3-32b", include_str!("../../../../../../scenarios/prefill-qwen3-32b.yaml")),
    ("prefill-gpt-oss-120b", include_str!("../../../../../../scenarios/prefill-gpt-oss-120b.yaml")),
    ("replicas-240", include_str!("../../../../../../scenarios/replicas-240.yaml")),
    ("replicas-1000", include_str!("../../../../../../scenarios/replicas-1000.yaml")),
    ("replicas-mooncake", include_str!("../../../../../../scenarios/replicas-mooncake.yaml")),
    ("replicas-partition", include_str!("../../../../../../scenarios/replicas-partition.yaml")),
    ("cells", include_str!("../../../../../../scenarios/cells.yaml")),
    ("cells-documents", include_str!("../../../../../../scenarios/cells-documents.yaml")),
];

/// Traces by name: conversations published with Mooncake (FAST'25), Apache-2.0; sessions of a coding agent from Weka's
/// kv-cache-tester, Apache-2.0; conversations of Azure's inference service, CC-BY-4.0. See the README beside them.
const TRACES: [(&str, &[u8]); 3] = [
    ("mooncake-conversation", include_bytes!("../../../../assets/mooncake-conversation.trace.jsonl.gz")),
    ("weka-agentic", include_bytes!("../../../../assets/weka-agentic.packed.jsonl.gz")),
    ("azure-conversation", include_bytes!("../../../../assets/azure-conversation.csv.gz")),
];

/// The built-in trace of this name, as the contents of a file.
pub(crate) fn trace(name: &Path) -> Option<&'static [u8]> {
    TRACES.iter().find(|(known, _)| name == Path::new(known)).map(|(_, bytes)| *bytes)
}

/// Opens a trace: a built-in one by its name, any other as a file relative to `directory`.
pub(crate) fn open(path: &Path, directory: &Path) -> Result<Trace, TraceError> {
    if let Some(bytes) = trace(path) {
        return format::read(bytes, &Options::default());
    }
    format::open(&directory.join(path), &Options::default())
}

/// The text of the scenario with this name.
pub(super) fn text(name: &str) -> Option<&'static str> {
    SCENARIOS.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// All names.
pub(super) fn names() -> Vec<&'static str> {
    SCENARIOS.iter().map(|(name, _)| *name).collect()
}

/// Each name with the comment on its first line.
pub(super) fn list() -> String {
    let mut out = String::new();
    for (name, text) in SCENARIOS {
        let about = text.lines().next().and_then(|line| line.strip_prefix("# ")).unwrap_or_default();
        _ = writeln!(out, "{name:20} {about}");
    }
    out
}
