//! Reading a file line by line: limits, numbers, and handling of invalid lines.

use std::io::{BufRead, Read};

use serde_json::Number;

use super::{REQUESTS_MAX, TraceError};

/// Maximum line in bytes. A session of a coding agent is one line and may have millions of tokens in blocks of 64.
const LINE_BYTES_MAX: u64 = 64 * 1024 * 1024;

/// Maximum bytes of a file without lines.
const REST_BYTES_MAX: u64 = 8 << 30;

/// Why a line is not a request.
#[derive(Debug)]
pub(super) enum Fault {
    /// The field at fault, or `line` for the line as a whole, and the cause.
    Field(&'static str, String),
    /// There are more requests than the reader takes.
    TooLong,
}

/// The lines of a file.
pub(super) struct Lines<R> {
    input: R,
    line: u64,
    bytes: Vec<u8>,
    bytes_max: u64,
    skip_bad: bool,
    skipped: Option<(u64, TraceError)>,
}

// === impl Lines ===

impl<R: BufRead> Lines<R> {
    pub(super) fn new(input: R, skip_bad: bool) -> Self {
        Self { input, line: 0, bytes: Vec::new(), bytes_max: LINE_BYTES_MAX, skip_bad, skipped: None }
    }

    /// The next line that is not blank, and its number.
    pub(super) fn next(&mut self) -> Result<Option<(u64, &[u8])>, TraceError> {
        loop {
            let failed = |source| TraceError::Read { line: self.line, source };
            self.bytes.clear();
            let read = self.input.by_ref().take(self.bytes_max).read_until(b'\n', &mut self.bytes);
            if read.map_err(failed)? == 0 {
                return Ok(None);
            }
            self.line += 1;
            if self.bytes.len() as u64 == self.bytes_max && self.bytes.last() != Some(&b'\n') {
                let why = format!("longer than {} bytes", self.bytes_max);
                return Err(TraceError::Line { line: self.line, field: "line", why });
            }
            if !self.bytes.trim_ascii().is_empty() {
                return Ok(Some((self.line, self.bytes.trim_ascii_end())));
            }
        }
    }

    /// All that is left, for a format that has no lines.
    pub(super) fn rest(&mut self) -> Result<Vec<u8>, TraceError> {
        let mut bytes = Vec::new();
        let read = self.input.by_ref().take(REST_BYTES_MAX + 1).read_to_end(&mut bytes);
        read.map_err(|source| TraceError::Read { line: 0, source })?;
        if bytes.len() as u64 > REST_BYTES_MAX {
            let why = format!("longer than {REST_BYTES_MAX} bytes: use fewer files");
            return Err(TraceError::Line { line: 1, field: "recording", why });
        }
        Ok(bytes)
    }

    /// Calls `take` for each line that is not blank, and fails with the first that it rejects, or counts it.
    pub(super) fn each(
        &mut self,
        mut take: impl FnMut(u64, &[u8]) -> Result<(), Fault>,
    ) -> Result<(), TraceError> {
        while let Some((line, bytes)) = self.next()? {
            match take(line, bytes) {
                Ok(()) => {}
                Err(Fault::TooLong) => return Err(TraceError::TooLong { max: REQUESTS_MAX }),
                Err(Fault::Field(field, why)) => {
                    let error = TraceError::Line { line, field, why };
                    if !self.skip_bad {
                        return Err(error);
                    }
                    self.skipped.get_or_insert((0, error)).0 += 1;
                }
            }
        }
        Ok(())
    }

    /// The last line that was read.
    pub(super) fn line(&self) -> u64 {
        self.line
    }

    /// A note about skipped lines.
    pub(super) fn skipped(&self) -> Option<String> {
        self.skipped
            .as_ref()
            .map(|(count, first)| format!("skipped {count} invalid lines; the first: {first}"))
    }
}

/// A JSON line as a `T`.
pub(super) fn json<'a, T: serde::Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, Fault> {
    serde_json::from_slice(bytes).map_err(|why| Fault::Field("line", why.to_string()))
}

/// A required field.
pub(super) fn needed<T>(field: &'static str, value: Option<T>) -> Result<T, Fault> {
    value.ok_or_else(|| Fault::Field(field, "missing".to_owned()))
}

/// A time that is at least zero and within limits, in the field's unit.
pub(super) fn time(field: &'static str, value: &Number, unit: &str) -> Result<f64, Fault> {
    let time = value.as_f64().filter(|time| time.is_finite() && (0.0..1e15).contains(time));
    time.ok_or_else(|| Fault::Field(field, format!("{value} is not a time in {unit}")))
}

/// A number of tokens, at least `min`.
pub(super) fn tokens(field: &'static str, value: Option<Number>, min: u32) -> Result<u32, Fault> {
    let value = needed(field, value)?;
    let count = value.as_u64().and_then(|count| u32::try_from(count).ok());
    in_range(field, count, &value, min)
}

/// A number of tokens of a text file, at least `min`.
pub(super) fn text_tokens(field: &'static str, value: &str, min: u32) -> Result<u32, Fault> {
    in_range(field, value.parse().ok(), value, min)
}

fn in_range(
    field: &'static str,
    count: Option<u32>,
    value: impl std::fmt::Display,
    min: u32,
) -> Result<u32, Fault> {
    count.filter(|count| (min..=TOKENS_MAX).contains(count)).ok_or_else(|| {
        Fault::Field(field, format!("{value} is not a number of tokens from {min} to {TOKENS_MAX}"))
    })
}

/// Most tokens of a prompt or an answer. Twice that many still fit into 32 bits.
pub(super) const TOKENS_MAX: u32 = 1 << 30;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_does_not_end_is_refused_at_the_limit() {
        let text = [b'['; 200];
        let mut lines = Lines { bytes_max: 100, ..Lines::new(&text[..], true) };
        assert!(matches!(lines.next(), Err(TraceError::Line { line: 1, .. })));
        let mut lines = Lines { bytes_max: 100, ..Lines::new(&text[..99], true) };
        assert_eq!(lines.next().unwrap(), Some((1, &text[..99])));
        assert_eq!(lines.next().unwrap(), None);
    }
}
