//! A YAML file in the making: keys with what each was made from, and remarks.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use crate::config::document::written;

/// The file.
#[derive(Debug, Default)]
pub(super) struct Draft {
    /// The first lines: what to do with it.
    pub(super) about: &'static str,
    tree: Map<String, Value>,
    /// What keys were made from, by path.
    origins: Vec<(String, String)>,
    remarks: Vec<String>,
}

// === impl Draft ===

impl Draft {
    pub(super) fn new(about: &'static str) -> Self {
        Self { about, ..Self::default() }
    }

    /// Sets a key, as in `server.port`, that was made from `origin`. A policy may be followed by its parameters.
    pub(super) fn set(&mut self, path: &str, value: Value, origin: &str) {
        let mut at = &mut self.tree;
        let mut names: Vec<&str> = path.split('.').collect();
        let last = names.pop().unwrap_or_default();
        for name in names {
            let below = at.entry(name).or_insert_with(|| json!({}));
            if let Value::String(policy) = below {
                *below = json!({"name": policy});
            }
            let Value::Object(map) = below else { return };
            at = map;
        }
        at.insert(last.to_owned(), value);
        self.origins.push((path.to_owned(), origin.to_owned()));
    }

    /// Says something of the whole.
    pub(super) fn remark(&mut self, text: impl Into<String>) {
        let text = text.into();
        if !self.remarks.contains(&text) {
            self.remarks.push(text);
        }
    }

    /// Whether it sets nothing.
    pub(super) fn is_empty(&self) -> bool {
        self.tree.is_empty()
    }

    /// The file.
    pub(super) fn written(&self, from: &str) -> String {
        let mut text = format!("# Made by `kvlane migrate` from {from}. {}\n", self.about);
        for remark in &self.remarks {
            let _ = writeln!(text, "# {}", remark.replace('\n', " "));
        }
        text.push('\n');
        self.write_map(&mut text, &self.tree, "", "");
        text
    }

    fn write_map(&self, text: &mut String, map: &Map<String, Value>, path: &str, pad: &str) {
        for (name, value) in map {
            let at = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            let from = self.origins.iter().rev().find(|(of, _)| *of == at);
            let comment = from.filter(|(_, from)| !from.is_empty()).map(|(_, from)| format!("  # {from}"));
            let comment = comment.unwrap_or_default();
            match value {
                Value::Array(entries) if entries.iter().any(Value::is_object) => {
                    let _ = writeln!(text, "{pad}{name}:{comment}");
                    for entry in entries {
                        let _ = writeln!(text, "{pad}  - {}", written(entry));
                    }
                }
                // A section, of which some keys were set.
                Value::Object(below) if from.is_none() && !below.contains_key("name") => {
                    let _ = writeln!(text, "{pad}{name}:");
                    self.write_map(text, below, &at, &format!("{pad}  "));
                }
                value => _ = writeln!(text, "{pad}{name}: {}{comment}", written(value)),
            }
        }
    }
}
