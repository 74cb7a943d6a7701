//! The scenarios that come with kvlane.

use std::fmt::Write as _;

/// Name and text of each.
const SCENARIOS: &[(&str, &str)] = &[("seed-001", include_str!("../../../scenarios/seed-001.yaml"))];

/// The text of the scenario called `name`.
pub(super) fn text(name: &str) -> Option<&'static str> {
    SCENARIOS.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// All names.
pub(super) fn names() -> Vec<&'static str> {
    SCENARIOS.iter().map(|(name, _)| *name).collect()
}

/// Each name with the first sentence of what it is about.
pub(super) fn list() -> String {
    let mut out = String::new();
    for (name, text) in SCENARIOS {
        let about = text.lines().find_map(|line| line.strip_prefix("about: ")).unwrap_or_default();
        _ = writeln!(out, "{name:20} {}", about.trim_matches(['"', '>', '|', ' ']));
    }
    out
}
