//! What files of comma-separated values have in common: columns by name, no quotes.

use std::io::BufRead;

use super::TraceError;
use super::lines::{Fault, Lines};

/// Columns by their names.
pub(super) struct Columns {
    names: Vec<String>,
}

// === impl Columns ===

impl Columns {
    /// Reads the header.
    pub(super) fn read<R: BufRead>(
        lines: &mut Lines<R>,
        needed: &[&'static str],
    ) -> Result<Self, TraceError> {
        let Some((line, bytes)) = lines.next()? else { return Err(TraceError::Empty) };
        let text = String::from_utf8_lossy(bytes);
        let names: Vec<String> =
            text.trim_start_matches('\u{feff}').split(',').map(|name| name.trim().to_owned()).collect();
        match needed.iter().find(|name| !names.iter().any(|there| there == *name)) {
            Some(field) => Err(TraceError::Line {
                line,
                field,
                why: format!("the header has no such column; it has {}", names.join(",")),
            }),
            None => Ok(Self { names }),
        }
    }

    /// The place of a column that may be missing.
    pub(super) fn place(&self, name: &str) -> Option<usize> {
        self.names.iter().position(|there| there == name)
    }

    /// The values of a line.
    pub(super) fn split<'a>(&self, bytes: &'a [u8]) -> Result<Vec<&'a str>, Fault> {
        let text = std::str::from_utf8(bytes).map_err(|why| Fault::Field("line", why.to_string()))?;
        let values: Vec<&str> = text.split(',').map(str::trim).collect();
        if values.len() != self.names.len() {
            let why = format!("{} values, the header has {} columns", values.len(), self.names.len());
            return Err(Fault::Field("line", why));
        }
        Ok(values)
    }
}
