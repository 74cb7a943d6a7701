//! Reads YAML files for the commands that take one.

use anyhow::{Result, anyhow};
use serde::de::DeserializeOwned;
use serde_path_to_error::{Path, Track};

/// Lines of a file that are shown around the place where it is wrong.
const SHOWN_LINES: usize = 2;

/// Parses a YAML text. An error states the cause once, with its key, and shows the place.
pub(crate) fn read<T: DeserializeOwned>(text: &str) -> Result<T> {
    let options = serde_saphyr::options! { with_snippet: false };
    let mut track = Track::new();
    let read = serde_saphyr::with_deserializer_from_str_with_options(text, options, |file| {
        T::deserialize(serde_path_to_error::Deserializer::new(file, &mut track))
    });
    read.map_err(|error| {
        let key = place(&track.path());
        let shown = error
            .location()
            .map_or_else(String::new, |at| shown(text, at.line() as usize, at.column() as usize));
        anyhow!("{key}{error}{shown}")
    })
}

/// The key with the error, as `section.key: `; empty for the whole file.
fn place(path: &Path) -> String {
    match path.to_string().as_str() {
        "." => String::new(),
        path => format!("{path}: "),
    }
}

/// The line and those before it, with a mark under the column; both count from 1.
fn shown(text: &str, line: usize, column: usize) -> String {
    let last = line.min(text.lines().count());
    let first = last.saturating_sub(SHOWN_LINES).max(1);
    let width = last.to_string().len();
    let mut out = String::new();
    for (number, line) in (1..=last).zip(text.lines()).skip(first - 1) {
        out += &format!("\n{number:>width$} | {line}");
    }
    if last > 0 {
        out += &format!("\n{:width$} | {}^", "", " ".repeat(column.saturating_sub(1)));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Port {
        #[serde(rename = "port")]
        _port: u16,
    }

    #[test]
    fn what_is_wrong_is_said_once_and_shown() {
        for (text, what) in [
            ("port: 1\nprot: 2\n", "unknown field `prot`"),
            ("port: many\n", "u16"),
            ("port: [\n", "expected"),
            ("", "unexpected end of input"),
        ] {
            let said = read::<Port>(text).expect_err("wrong").to_string();
            assert_eq!(said.matches(what).count(), 1, "{text:?}: {said}");
            assert!(!said.contains("error:"), "{text:?}: {said}");
        }
        let said = read::<Port>("port: 1\nprot: 2\n").expect_err("wrong").to_string();
        assert!(said.contains("line 2") && said.ends_with("\n1 | port: 1\n2 | prot: 2\n  | ^"), "{said}");
    }
}
