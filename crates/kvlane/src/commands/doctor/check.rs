//! One row of the checklist, and the lists of rows that make a report.

use serde::Serialize;

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    /// As it should be.
    Ok,
    /// It works, but not as well as it could.
    Warn,
    /// It does not work.
    Fail,
    /// It could not be checked, because of another row.
    Skip,
}

/// One row.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Check {
    /// What was checked, the same word in every version.
    pub(super) name: &'static str,
    pub(super) verdict: Verdict,
    /// What was seen.
    pub(super) said: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) fix: Option<String>,
}

/// Rows about one thing.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(transparent)]
pub(super) struct Checks(pub(super) Vec<Check>);

// === impl Verdict ===

impl Verdict {
    /// As the table shows it.
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
