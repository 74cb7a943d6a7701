//! Reads YAML files: configurations, lists of workers, scenarios. JSON is YAML, too.
//!
//! A file becomes a tree of JSON values with their places, and the tree a `T`. Only the tree is read from YAML: code
//! that reads each type from YAML made the binary 2 MB larger.

use std::fmt;

use serde::de::{Deserialize, DeserializeOwned, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Number, Value};
use serde_path_to_error::{Path, Segment};
use serde_saphyr::options::NonFiniteFloatPolicy;
use serde_saphyr::{Location, Spanned};

use crate::mistake::in_words;

/// Lines of a file that are shown around the place where it is wrong.
const SHOWN_LINES: usize = 2;

/// What is wrong with a file: the cause with its key, the line and column, and the lines around it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct YamlError(String);

/// A file that has been parsed, with the place of each of its values.
pub struct Document<'a> {
    text: &'a str,
    /// Where all keys are listed, for an error about one that is unknown.
    list: &'a str,
    tree: Spanned<Node>,
}

impl fmt::Display for YamlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for YamlError {}

/// Parses a YAML text. An empty one sets nothing: it is an empty map.
///
/// # Errors
/// The cause, once, with its key and its place.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, YamlError> {
    Document::parse(text)?.read()
}

// === impl Document ===

impl<'a> Document<'a> {
    /// Parses a YAML text.
    ///
    /// # Errors
    /// It is not YAML, and where.
    pub fn parse(text: &'a str) -> Result<Self, YamlError> {
        let options = serde_saphyr::options! {
            with_snippet: false,
            // JSON has no such numbers: `T` rejects the text where it expects a number.
            non_finite_float_policy: NonFiniteFloatPolicy::AsString,
        };
        let tree = serde_saphyr::from_str_with_options(text, options).map_err(|error| {
            let at = error.location().map_or_else(String::new, |at| shown(text, &at));
            YamlError(format!("{}{at}", of_text(&error.to_string())))
        })?;
        Ok(Self { text, list: "", tree })
    }

    /// The same document, whose keys are all listed where `list` says.
    #[must_use]
    pub fn listed_by(self, list: &'a str) -> Self {
        Self { list, ..self }
    }

    /// Whether it has no value.
    pub fn is_empty(&self) -> bool {
        self.tree.value.value().is_null()
    }

    /// Its value. An empty document is an empty map.
    ///
    /// # Errors
    /// The first key that is unknown, missing or has a wrong type, and where.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, YamlError> {
        let value = match self.tree.value.value() {
            Value::Null => Value::Object(serde_json::Map::new()),
            value => value,
        };
        serde_path_to_error::deserialize(value).map_err(|error| {
            let at = find(&self.tree, error.path());
            let (line, column) = (at.line(), at.column());
            let (key, inner) = (place(error.path()), in_words(&error.inner().to_string(), self.list));
            YamlError(format!("{key}{inner} (line {line}, column {column}){}", shown(self.text, &at)))
        })
    }

    /// An error about `key` of the list item `index`, for what is wrong with a value of the right type.
    pub fn item_error(&self, index: usize, key: &str, why: &str) -> YamlError {
        let item = match &self.tree.value {
            Node::List(items) => items.get(index),
            _ => None,
        };
        let of_key = item.and_then(|item| match &item.value {
            Node::Map(entries) => entries.iter().find(|(name, _)| name.value == key),
            _ => None,
        });
        let at = match (of_key, item) {
            (Some((name, _)), _) => name.referenced,
            (None, Some(item)) => item.referenced,
            (None, None) => self.tree.referenced,
        };
        let (line, column) = (at.line(), at.column());
        YamlError(format!("[{index}].{key}: {why} (line {line}, column {column}){}", shown(self.text, &at)))
    }
}

/// A value of the file; keys and values with their places.
enum Node {
    Scalar(Value),
    List(Vec<Spanned<Node>>),
    Map(Vec<(Spanned<String>, Spanned<Node>)>),
}

// === impl Node ===

impl Node {
    fn value(&self) -> Value {
        match self {
            Self::Scalar(value) => value.clone(),
            Self::List(nodes) => nodes.iter().map(|node| node.value.value()).collect(),
            Self::Map(entries) => {
                entries.iter().map(|(key, node)| (key.value.clone(), node.value.value())).collect()
            }
        }
    }
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyNode)
    }
}

struct AnyNode;

impl<'de> Visitor<'de> for AnyNode {
    type Value = Node;

    fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Node, E> {
        Ok(Node::Scalar(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Node, E> {
        Ok(Node::Scalar(Number::from_f64(value).map_or(Value::Null, Value::Number)))
    }

    fn visit_str<E>(self, value: &str) -> Result<Node, E> {
        Ok(Node::Scalar(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Node, A::Error> {
        let mut nodes = Vec::new();
        while let Some(node) = seq.next_element()? {
            nodes.push(node);
        }
        Ok(Node::List(nodes))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Node, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Node::Map(entries))
    }
}

/// The place of the key or list item at `path`, or of the last one on the way to it.
fn find(tree: &Spanned<Node>, path: &Path) -> Location {
    let (mut node, mut at) = (tree, tree.referenced);
    for segment in path {
        (node, at) = match (&node.value, segment) {
            (Node::List(nodes), Segment::Seq { index }) if *index < nodes.len() => {
                (&nodes[*index], nodes[*index].referenced)
            }
            (Node::Map(entries), Segment::Map { key }) => {
                let Some((key, value)) = entries.iter().find(|(name, _)| name.value == *key) else { break };
                (value, key.referenced)
            }
            _ => break,
        };
    }
    at
}

/// What is wrong with a text that is not YAML, with its place behind.
fn of_text(error: &str) -> String {
    match error.rsplit_once(" at line ") {
        Some((what, place)) => format!("{} (line {place})", in_words(what, "")),
        None => in_words(error, ""),
    }
}

/// The key with the error, as `section.key: `; empty for the whole file.
fn place(path: &Path) -> String {
    match path.to_string().as_str() {
        "." => String::new(),
        path => format!("{path}: "),
    }
}

/// The line and those before it, with a mark under the column; both count from 1.
fn shown(text: &str, at: &Location) -> String {
    let (line, column) = (at.line() as usize, at.column() as usize);
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
    fn a_wrong_item_is_shown_at_its_key() {
        let text = "- port: 1\n- name: x\n  port: 2\n";
        let document = Document::parse(text).expect("YAML");
        assert_eq!(
            document.item_error(1, "port", "it is in use").to_string(),
            "[1].port: it is in use (line 3, column 3)\n1 | - port: 1\n2 | - name: x\n3 |   port: 2\n  |   ^"
        );
        let of_item = document.item_error(1, "url", "it is missing").to_string();
        assert!(of_item.contains("(line 2, column 3)"), "{of_item}");
        assert!(document.item_error(7, "url", "it is missing").to_string().contains("(line 1, column 1)"));
    }

    #[test]
    fn what_is_wrong_is_said_once_and_shown() {
        for (text, what) in [
            ("port: 1\nprot: 2\n", "unknown field `prot`"),
            ("port: many\n", "\"many\" is not a whole number"),
            ("port: [\n", "unclosed bracket"),
            ("", "missing field `port`"),
        ] {
            let said = read::<Port>(text).expect_err("wrong").to_string();
            assert_eq!(said.matches(what).count(), 1, "{text:?}: {said}");
            assert!(!said.contains("error:"), "{text:?}: {said}");
        }
        let said = read::<Port>("port: 1\nprot: 2\n").expect_err("wrong").to_string();
        assert!(said.contains("line 2") && said.ends_with("\n1 | port: 1\n2 | prot: 2\n  | ^"), "{said}");
    }
}
