//! Prometheus text exposition: a reader for a server's gauges and counters.
//!
//! Lines that are not samples are skipped: the reader looks for a few known names, and an invalid line elsewhere must
//! not hide them.

use std::borrow::Cow;

/// One line of a metrics page: `name{labels} value`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample<'a> {
    /// The metric's name, prefix and suffix included.
    pub name: &'a str,
    /// The text between the braces, or empty.
    pub labels: &'a str,
    /// The value; may be NaN or infinite.
    pub value: f64,
}

/// The samples of a page, in page order.
pub fn samples(page: &str) -> impl Iterator<Item = Sample<'_>> {
    page.lines().filter_map(sample)
}

/// Sum over all label sets of the metric `name`, if the page has it with a finite value.
pub fn sum(page: &str, name: &str) -> Option<f64> {
    samples(page)
        .filter(|sample| sample.name == name && sample.value.is_finite())
        .map(|sample| sample.value)
        .reduce(|total, value| total + value)
}

fn sample(line: &str) -> Option<Sample<'_>> {
    let line = line.trim_ascii();
    let name_end = line.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'))?;
    let (name, rest) = line.split_at(name_end);
    if name.is_empty() {
        return None;
    }
    let rest = rest.trim_ascii_start();
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(inside) => {
            let end = labels_end(inside)?;
            (&inside[..end], &inside[end + 1..])
        }
        None => ("", rest),
    };
    // A timestamp may follow the value.
    let value = rest.split_ascii_whitespace().next()?.parse().ok()?;
    Some(Sample { name, labels, value })
}

/// The position of the closing brace; braces within quotes are text.
fn labels_end(inside: &str) -> Option<usize> {
    let (mut quoted, mut escaped) = (false, false);
    inside.bytes().position(|byte| {
        let closes = byte == b'}' && !quoted;
        quoted ^= byte == b'"' && !escaped;
        escaped = byte == b'\\' && quoted && !escaped;
        closes
    })
}

// === impl Sample ===

impl<'a> Sample<'a> {
    /// The value of a label, with its escapes decoded.
    pub fn label(&self, name: &str) -> Option<Cow<'a, str>> {
        let mut rest = self.labels;
        loop {
            let (key, after) = rest.split_once('=')?;
            let value = after.trim_ascii_start().strip_prefix('"')?;
            let end = value_end(value)?;
            if key.trim_ascii() == name {
                return Some(unescape(&value[..end]));
            }
            rest = value[end + 1..].trim_ascii_start().strip_prefix(',')?;
        }
    }
}

/// The position of a label value's closing quote.
fn value_end(value: &str) -> Option<usize> {
    let mut escaped = false;
    value.bytes().position(|byte| {
        let closes = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        closes
    })
}

fn unescape(value: &str) -> Cow<'_, str> {
    if !value.contains('\\') {
        return Cow::Borrowed(value);
    }
    let mut out = String::with_capacity(value.len());
    let mut characters = value.chars();
    while let Some(character) = characters.next() {
        match (character, characters.as_str().chars().next()) {
            ('\\', Some(escaped)) => {
                characters.next();
                out.push(if escaped == 'n' { '\n' } else { escaped });
            }
            _ => out.push(character),
        }
    }
    Cow::Owned(out)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn only(page: &str) -> Sample<'_> {
        let mut all = samples(page);
        let sample = all.next().expect("a sample");
        assert_eq!(all.next(), None, "only one");
        sample
    }

    #[test]
    fn a_sample_has_a_name_labels_and_a_value() {
        let sample = only("vllm:num_requests_running{engine=\"0\",model_name=\"a b\"} 3.0 1700000000\n");
        assert_eq!((sample.name, sample.value), ("vllm:num_requests_running", 3.0));
        assert_eq!(sample.label("engine").as_deref(), Some("0"));
        assert_eq!(sample.label("model_name").as_deref(), Some("a b"));
        assert_eq!(sample.label("model"), None);
    }

    #[test]
    fn braces_commas_and_escapes_in_a_label_value_are_text() {
        let sample = only(r#"x{a="}, b=\"1\"",b="c\\d\ne"} 1"#);
        assert_eq!(sample.label("a").as_deref(), Some("}, b=\"1\""));
        assert_eq!(sample.label("b").as_deref(), Some("c\\d\ne"));
    }

    #[test]
    fn lines_that_are_not_samples_are_passed_over() {
        let page = "# HELP x y\n# TYPE x gauge\n\nx\nx{\nx{a=\"}\nx{} y\n{} 1\n<html>\nx 2\r\n";
        assert_eq!(only(page).value, 2.0);
    }

    #[test]
    fn a_sum_runs_over_label_sets_and_passes_over_what_is_not_finite() {
        let page = "x{e=\"0\"} 2\nx{e=\"1\"} 3\nx{e=\"2\"} NaN\nxy 50\n";
        assert_eq!(sum(page, "x"), Some(5.0));
        assert_eq!(sum(page, "y"), None);
    }

    proptest! {
        #[test]
        fn any_text_is_read_without_a_panic(page in "\\PC{0,40}|[a-z:{}\"=\\\\, 0-9\n]{0,60}") {
            for sample in samples(&page) {
                prop_assert!(page.contains(sample.name));
                sample.label("a");
            }
        }
    }
}
