//! One row of the checklist, and the lists of rows that make a report.

use serde::Serialize;

/// Verdict of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    /// Correct.
    Ok,
    /// Works, with limitations.
    Warn,
    /// Does not work.
    Fail,
    /// Not checked, because of another row.
    Skip,
}

/// One row.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Check {
    /// Name of the check, stable across versions.
    pub(super) name: &'static str,
    pub(super) verdict: Verdict,
    /// The finding.
    pub(super) said: String,
    /// The remedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fix: Option<String>,
}

/// Rows about one subject.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(transparent)]
pub(super) struct Checks(pub(super) Vec<Check>);

// === impl Verdict ===

impl Verdict {
    /// The name in the table.
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
            Self::Skip => "-",
        }
    }
}

// === impl Checks ===

impl Checks {
    pub(super) fn ok(&mut self, name: &'static str, said: impl Into<String>) {
        self.0.push(Check { name, verdict: Verdict::Ok, said: said.into(), fix: None });
    }

    pub(super) fn warn(&mut self, name: &'static str, said: impl Into<String>, fix: impl Into<String>) {
        self.0.push(Check { name, verdict: Verdict::Warn, said: said.into(), fix: Some(fix.into()) });
    }

    pub(super) fn fail(&mut self, name: &'static str, said: impl Into<String>, fix: impl Into<String>) {
        self.0.push(Check { name, verdict: Verdict::Fail, said: said.into(), fix: Some(fix.into()) });
    }

    pub(super) fn skip(&mut self, name: &'static str, said: impl Into<String>) {
        self.0.push(Check { name, verdict: Verdict::Skip, said: said.into(), fix: None });
    }

    pub(super) fn count(&self, verdict: Verdict) -> usize {
        self.0.iter().filter(|check| check.verdict == verdict).count()
    }
}
