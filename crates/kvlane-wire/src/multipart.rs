//! Forms (`multipart/form-data`, RFC 7578): finds the value of one field in a body that arrives in pieces.
//!
//! A form is read only as far as that field, and of its other parts nothing is kept, so a file of any size may stand before
//! it. What a strict parser would reject is a form without the field.

use std::ops::Range;

use memchr::memmem;

/// Longest boundary (RFC 2046, section 5.1.1).
const BOUNDARY_BYTES_MAX: usize = 70;
/// Longest head of a part.
const HEAD_BYTES_MAX: usize = 8 << 10;
/// Longest value.
const VALUE_BYTES_MAX: usize = 1 << 10;
/// Most blanks after a delimiter.
const PADDING_BYTES_MAX: usize = 256;
const CRLF: &[u8] = b"\r\n";

/// The search for one field.
#[derive(Debug)]
pub struct FieldScanner {
    field: &'static str,
    /// CR LF, two hyphens, and the boundary: what ends a part.
    delimiter: Vec<u8>,
    /// Bytes that may be needed again when more arrive.
    pending: Vec<u8>,
    /// Bytes before these, with the line end that is thought to be before the form.
    passed: usize,
    /// Where the value stands in the form.
    at: Option<Range<usize>>,
    state: State,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// Before the first part, or in a part that is not searched for.
    Skip,
    /// After a delimiter.
    Delimited,
    /// In the head of a part; it begins with the CR LF of its delimiter.
    Head,
    /// In the field's value.
    Value,
    Done(Option<String>),
}

/// How far the search is.
#[derive(Debug, PartialEq, Eq)]
pub enum Search<'a> {
    /// The field may still come.
    More,
    /// It has this value.
    Found(&'a str),
    /// The form has no such field, or is not well formed.
    Missing,
}

/// The boundary of a form, by the `Content-Type` of a request; none if that names no form.
pub fn boundary(content_type: &str) -> Option<String> {
    let (kind, parameters) = content_type.split_once(';')?;
    if !kind.trim().eq_ignore_ascii_case("multipart/form-data") {
        return None;
    }
    let boundary = parameter(parameters, "boundary")?;
    (1..=BOUNDARY_BYTES_MAX).contains(&boundary.len()).then_some(boundary)
}

/// The value of a parameter in `; name=value; name="value"`.
fn parameter(mut list: &str, wanted: &str) -> Option<String> {
    loop {
        list = list.trim_start_matches([' ', '\t', ';']);
        let (name, rest) = list.split_once('=')?;
        let (value, rest) = match rest.trim_start().strip_prefix('"') {
            Some(quoted) => unquote(quoted)?,
            None => {
                let (token, rest) = rest.split_once(';').unwrap_or((rest, ""));
                (token.trim().to_owned(), rest)
            }
        };
        if name.trim().eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        list = rest;
    }
}

/// The text of a quoted string after its first quote, and what follows its last one. A backslash stands for itself unless
/// it precedes a quote or a backslash: browsers send the names of files unescaped.
fn unquote(quoted: &str) -> Option<(String, &str)> {
    let mut text = String::new();
    let mut chars = quoted.char_indices().peekable();
    while let Some((at, char)) = chars.next() {
        match char {
            '"' => return Some((text, &quoted[at + 1..])),
            '\\' if chars.peek().is_some_and(|(_, next)| matches!(next, '"' | '\\')) => {
                text.extend(chars.next().map(|(_, escaped)| escaped));
            }
            char => text.push(char),
        }
    }
    None
}

// === impl FieldScanner ===

impl FieldScanner {
    /// Searches a form with this boundary for a field.
    pub fn new(boundary: &str, field: &'static str) -> Self {
        let delimiter = [CRLF, b"--", boundary.as_bytes()].concat();
        // The first delimiter may be the first line.
        Self { field, delimiter, pending: CRLF.to_vec(), passed: 0, at: None, state: State::Skip }
    }

    /// Reads the next piece of the form.
    pub fn push(&mut self, piece: &[u8]) -> Search<'_> {
        if !matches!(self.state, State::Done(_)) {
            self.pending.extend_from_slice(piece);
            while self.step() {}
        }
        match &self.state {
            State::Done(Some(value)) => Search::Found(value),
            State::Done(None) => Search::Missing,
            _ => Search::More,
        }
    }

    /// Where the value stands, in bytes from the start of the form, once it is found.
    pub fn value_at(&self) -> Option<Range<usize>> {
        self.at.clone()
    }

    /// Goes on by what is pending; returns whether there may be more to do.
    fn step(&mut self) -> bool {
        let pending = &mut self.pending;
        let (drop, next) = match &self.state {
            State::Skip => match memmem::find(pending, &self.delimiter) {
                Some(at) => (at + self.delimiter.len(), State::Delimited),
                None => {
                    // Its last bytes may begin a delimiter.
                    let over = (pending.len() + 1).saturating_sub(self.delimiter.len());
                    pending.drain(..over);
                    self.passed += over;
                    return false;
                }
            },
            State::Delimited => {
                let padding = pending.iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
                match &pending[padding..] {
                    _ if padding > PADDING_BYTES_MAX => (0, State::Skip),
                    [b'-', b'-', ..] if padding == 0 => (0, State::Done(None)),
                    [b'\r', b'\n', ..] => (padding, State::Head),
                    [] | [b'\r'] | [b'-'] => return false,
                    // A longer line: part of a part.
                    _ => (0, State::Skip),
                }
            }
            State::Head => match memmem::find(pending, b"\r\n\r\n") {
                Some(end) if end > HEAD_BYTES_MAX => (0, State::Done(None)),
                Some(end) if is_field(&pending[..end], self.field) => (end + 2, State::Value),
                // The delimiter of an empty part begins with the end of its head.
                Some(end) => (end + 2, State::Skip),
                None if pending.len() < HEAD_BYTES_MAX + 4 => return false,
                None => (0, State::Done(None)),
            },
            State::Value => match memmem::find(pending, &self.delimiter) {
                Some(end) => {
                    let value = str::from_utf8(pending[..end].trim_ascii()).ok();
                    let value =
                        value.filter(|value| !value.is_empty() && end <= VALUE_BYTES_MAX + CRLF.len());
                    self.at = value.map(|value| {
                        let blank = pending[..end].len() - pending[..end].trim_ascii_start().len();
                        let start = self.passed + blank - CRLF.len();
                        start..start + value.len()
                    });
                    (0, State::Done(value.map(str::to_owned)))
                }
                None if pending.len() < VALUE_BYTES_MAX + CRLF.len() + self.delimiter.len() => return false,
                None => (0, State::Done(None)),
            },
            State::Done(_) => (pending.len(), self.state.clone()),
        };
        pending.drain(..drop);
        self.passed += drop;
        self.state = next;
        if matches!(self.state, State::Done(_)) {
            self.pending = Vec::new();
            return false;
        }
        true
    }
}

/// Whether a part with this head is the field, and no file.
fn is_field(head: &[u8], field: &str) -> bool {
    let Ok(head) = str::from_utf8(head) else { return false };
    let disposition = head.split("\r\n").find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.trim().eq_ignore_ascii_case("content-disposition").then_some(value)
    });
    let Some((kind, parameters)) = disposition.and_then(|value| value.split_once(';')) else { return false };
    kind.trim().eq_ignore_ascii_case("form-data")
        && parameter(parameters, "name").is_some_and(|name| name == field)
        && parameter(parameters, "filename").is_none()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The model of a form that arrives in these pieces.
    fn model<'a>(boundary: &str, pieces: impl IntoIterator<Item = &'a [u8]>) -> Option<String> {
        let mut scanner = FieldScanner::new(boundary, "model");
        for piece in pieces {
            match scanner.push(piece) {
                Search::Found(value) => return Some(value.to_owned()),
                Search::Missing => return None,
                Search::More => {}
            }
        }
        None
    }

    fn whole(form: &str) -> Option<String> {
        model("xx", [form.as_bytes()])
    }

    #[test]
    fn the_value_stands_where_it_says() {
        let file =
            part("Content-Disposition: form-data; name=\"file\"; filename=\"a\"", &"\r\n--x".repeat(99));
        for form in [part(MODEL, "abc"), file.clone() + &part(MODEL, " abc "), file + &part(MODEL, "abc")] {
            for size in [1, 7, form.len()] {
                let mut scanner = FieldScanner::new("xx", "model");
                let found = [form.as_bytes(), b"--xx--"]
                    .concat()
                    .chunks(size)
                    .any(|piece| scanner.push(piece) != Search::More);
                assert!(found);
                assert_eq!(scanner.value_at().map(|at| &form[at]), Some("abc"));
            }
        }
    }

    fn part(head: &str, value: &str) -> String {
        format!("--xx\r\n{head}\r\n\r\n{value}\r\n")
    }

    const MODEL: &str = "Content-Disposition: form-data; name=\"model\"";

    #[test]
    fn a_form_names_its_model_wherever_the_field_stands() {
        let file = part(
            "Content-Disposition: form-data; name=\"file\"; filename=\"a; name=\\\"model\\\".wav\"\r\nContent-Type: audio/wav",
            "bytes\r\n--x name=\"model\"\r\n\r\nnot this\r\n--xxx\r\nor this",
        );
        let model = part(MODEL, "whisper");
        for form in [
            format!("{model}{file}--xx--\r\n"),
            format!("{file}{model}--xx--\r\n"),
            format!("preamble\r\n{file}{model}--xx--"),
            format!("{}{model}--xx", part("Content-Disposition: form-data; name=language", "")),
            part("content-disposition:form-data;filename*=x; NAME=model", " whisper ") + "--xx",
            part("Content-Type: text/plain\r\nContent-Disposition: form-data; name=model", "whisper")
                + "--xx",
            model.replacen("--xx", "--xx \t", 1) + "--xx",
        ] {
            assert_eq!(whole(&form).as_deref(), Some("whisper"), "{form}");
        }
    }

    #[test]
    fn what_is_no_field_of_that_name_is_passed_over() {
        for form in [
            String::new(),
            "--xx--\r\n".into(),
            part(MODEL, "whisper"),
            part(MODEL, "") + "--xx--",
            format!("--xx--\r\n{}--xx", part(MODEL, "after the end")),
            format!("{}--xx", part(MODEL, &"y".repeat(VALUE_BYTES_MAX + 1))),
            format!("{}--xx", part(&format!("x: {}\r\n{MODEL}", "y".repeat(HEAD_BYTES_MAX)), "whisper")),
            format!("{}--xx", part(&format!("{MODEL}; filename=\"m\""), "a file")),
            format!("{}--xx", part("Content-Disposition: form-data; name=\"models\"", "m")),
            format!("{}--xx", part("Content-Disposition: attachment; name=\"model\"", "m")),
            format!("x{}--xx", part(MODEL, "no line begins with the delimiter")),
        ] {
            assert_eq!(whole(&form), None, "{form}");
        }
    }

    #[test]
    fn the_boundary_is_read_from_the_content_type() {
        for (kind, expected) in [
            ("multipart/form-data; boundary=xx", Some("xx")),
            ("Multipart/Form-Data; charset=utf-8; Boundary=\"x x\"", Some("x x")),
            ("multipart/form-data; note=\"; boundary=no\"; boundary=xx; x=y", Some("xx")),
            ("multipart/form-data; boundary=", None),
            ("multipart/form-data; boundary=\"xx", None),
            ("multipart/form-data", None),
            ("multipart/mixed; boundary=xx", None),
            ("text/plain; boundary=xx", None),
        ] {
            assert_eq!(boundary(kind).as_deref(), expected, "{kind}");
        }
        assert_eq!(boundary(&format!("multipart/form-data; boundary={}", "x".repeat(71))), None);
    }

    #[test]
    fn little_of_a_file_is_kept() {
        let mut scanner = FieldScanner::new("xx", "model");
        scanner.push(part("Content-Disposition: form-data; name=\"file\"; filename=\"a\"", "").as_bytes());
        for _ in 0..100 {
            assert_eq!(scanner.push(&[b'\r'; 10_000]), Search::More);
            assert!(scanner.pending.len() < 10);
        }
    }

    proptest! {
        /// Invariant: A form names the same model however its bytes are split into pieces.
        #[test]
        fn any_split_finds_the_same_model(
            // Parts of lines that delimit, or nearly do.
            words in prop::collection::vec(prop::sample::select(vec![
                "--xx", "\r\n", "--", "\r", "\n", "x", "\r\n--xx\r\n", MODEL, "\r\n\r\n", "whisper", " ", "-",
                "Content-Disposition: form-data; name=\"file\"; filename=\"model\"",
            ]), 0..40),
            cuts in prop::collection::vec(0usize..200, 0..12),
        ) {
            let form = words.concat();
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut.min(form.len())).chain([0, form.len()]).collect();
            cuts.sort_unstable();
            let pieces = cuts.windows(2).map(|cut| &form.as_bytes()[cut[0]..cut[1]]);
            let expected = whole(&form);
            prop_assert_eq!(model("xx", pieces), expected.clone());
            prop_assert_eq!(model("xx", form.as_bytes().chunks(1)), expected);
        }

        /// A written form is read back.
        #[test]
        fn the_field_is_found_after_any_file(
            file in prop::collection::vec(prop::sample::select(vec![b'\r', b'\n', b'-', b'x', b'y', 0]), 0..300),
            step in 1usize..50,
        ) {
            prop_assume!(memmem::find(&[CRLF, &file, CRLF].concat(), b"\r\n--xx").is_none());
            let head = "--xx\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n";
            let end = format!("\r\n{}--xx--\r\n", part(MODEL, "whisper"));
            let form = [head.as_bytes(), &file, end.as_bytes()].concat();
            let found = model("xx", form.chunks(step));
            prop_assert_eq!(found.as_deref(), Some("whisper"));
        }
    }
}
