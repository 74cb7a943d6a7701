//! Documents made from the keys of the configuration: the example file and the JSON schema.

use kvlane_core::config::{Key, Kind, Setting as _};
use kvlane_gateway::config::{Config, WorkerSpec};
use serde_json::{Map, Value, json};

/// Widest line of a comment.
const LINE_WIDTH: usize = 110;

/// A configuration file with every key at its default, and two workers.
pub(crate) fn example() -> String {
    let workers = ["http://127.0.0.1:8001", "http://127.0.0.1:8002"].map(WorkerSpec::new).into();
    let config = json!(Config { workers, ..Config::default() });
    let mut text = "# kvlane.yaml: every key with its default. Omit keys that you do not change.\n\
                    # Durations: 250ms, 2s, 1m 30s. Check a file with `kvlane check --config FILE`.\n"
        .to_owned();
    for key in Config::keys() {
        text.push('\n');
        write_key(&mut text, &key, &config[key.name], "");
    }
    text
}

/// The JSON schema of a configuration file.
pub(crate) fn schema() -> Value {
    let mut schema = section(&Config::keys(), Some(&json!(Config::default())));
    schema["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    schema["title"] = json!("kvlane.yaml");
    schema
}

/// The keys that differ from their defaults, with their values.
pub(crate) fn changed(config: &Config) -> Value {
    differing(&json!(config), &json!(Config::default())).unwrap_or_else(|| json!({}))
}

/// What of `value` differs from `default`.
fn differing(value: &Value, default: &Value) -> Option<Value> {
    let (Value::Object(map), Value::Object(defaults)) = (value, default) else {
        return (value != default).then(|| value.clone());
    };
    let of = |name: &String| defaults.get(name).unwrap_or(&Value::Null);
    let changed: Map<String, Value> =
        map.iter().filter_map(|(name, value)| Some((name.clone(), differing(value, of(name))?))).collect();
    (!changed.is_empty()).then_some(Value::Object(changed))
}

/// The key at a path, as in `server.port`.
pub(super) fn key_of<'a>(keys: &'a [Key], path: &str) -> Option<&'a Key> {
    let (name, rest) = path.split_once('.').map_or((path, None), |(name, rest)| (name, Some(rest)));
    let key = keys.iter().find(|key| key.name == name)?;
    rest.map_or(Some(key), |rest| key_of(&key.keys, rest))
}

/// The value at a path in a file; none if it is not set.
pub(super) fn default_of(defaults: &Value, path: &str) -> Option<String> {
    let value = defaults.pointer(&format!("/{}", path.replace('.', "/")))?;
    let text = written(value);
    (!["null", "[]", "{}"].contains(&&*text)).then_some(text)
}

fn write_key(text: &mut String, key: &Key, value: &Value, pad: &str) {
    write_comments(text, &key.doc, &format!("{pad}#"));
    let name = key.name;
    if let (Kind::Section, Value::Object(map)) = (key.kind, value) {
        *text += &format!("{pad}{name}:\n");
        for below in &key.keys {
            write_key(text, below, map.get(below.name).unwrap_or(&Value::Null), &format!("{pad}  "));
        }
        return;
    }
    write_entry_keys(text, &key.keys, &format!("{pad}#  "));
    match value {
        Value::Array(entries) if entries.iter().any(Value::is_object) => {
            *text += &format!("{pad}{name}:\n");
            entries.iter().for_each(|entry| *text += &format!("{pad}  - {}\n", written(entry)));
        }
        value => *text += &format!("{pad}{name}: {}\n", written(value)),
    }
}

/// Writes the keys of an entry of a list or map as comments.
fn write_entry_keys(text: &mut String, keys: &[Key], begin: &str) {
    for key in keys {
        write_comments(text, &format!("{}: {}", key.name, key.doc), begin);
        write_entry_keys(text, &key.keys, &format!("{begin}  "));
    }
}

/// Writes a comment whose lines begin with `begin`. No line ends within `code`.
fn write_comments(text: &mut String, paragraphs: &str, begin: &str) {
    for paragraph in paragraphs.lines() {
        let (mut line, mut word) = (begin.to_owned(), String::new());
        for part in paragraph.split(' ') {
            word = format!("{word} {part}");
            if word.matches('`').count() % 2 == 0 {
                if line.len() + word.len() > LINE_WIDTH {
                    *text += &format!("{line}\n");
                    line = begin.to_owned();
                }
                line += &std::mem::take(&mut word);
            }
        }
        *text += &format!("{line}\n");
    }
}

/// A value as YAML, in one line.
pub(crate) fn written(value: &Value) -> String {
    let list = |items: Vec<String>| items.join(", ");
    match value {
        Value::String(text) if is_plain(text) => text.clone(),
        Value::String(text) => format!("'{}'", text.replace('\'', "''")),
        Value::Array(items) => format!("[{}]", list(items.iter().map(written).collect())),
        // A policy with its defaults.
        Value::Object(map) if map.len() == 1 && map.get("name").is_some_and(Value::is_string) => {
            written(&map["name"])
        }
        Value::Object(map) => {
            format!(
                "{{{}}}",
                list(map.iter().map(|(name, value)| format!("{name}: {}", written(value))).collect())
            )
        }
        other => other.to_string(),
    }
}

/// Whether a text can be written without quotes, and is read as text.
fn is_plain(text: &str) -> bool {
    let is_word = |c: char| c.is_ascii_alphanumeric() || "_-./:".contains(c);
    let is_other =
        text.parse::<f64>().is_ok() || ["true", "false", "null", "yes", "no", "on", "off"].contains(&text);
    !text.is_empty()
        && text.chars().all(is_word)
        && !text.starts_with(['-', ':'])
        && !text.ends_with(':')
        && !is_other
}

/// The schema of a section, or of an entry of a list or map, which has no defaults.
fn section(keys: &[Key], defaults: Option<&Value>) -> Value {
    let default = |key: &Key| defaults.map(|defaults| &defaults[key.name]);
    let properties: Map<String, Value> =
        keys.iter().map(|key| (key.name.to_owned(), property(key, default(key)))).collect();
    json!({"type": "object", "additionalProperties": false, "properties": properties})
}

fn property(key: &Key, default: Option<&Value>) -> Value {
    let entry = || section(&key.keys, None);
    let mut schema = match key.kind {
        Kind::Section if default == Some(&Value::Null) => json!({"anyOf": [entry(), {"type": "null"}]}),
        Kind::Section => section(&key.keys, default),
        // Workers may be written as their URLs.
        Kind::List if key.name == "workers" => json!({"items": {"anyOf": [entry(), {"type": "string"}]}}),
        // A list may be written as its only entry.
        Kind::List if !key.keys.is_empty() => json!({"items": entry()}),
        Kind::Map if !key.keys.is_empty() => json!({"type": "object", "additionalProperties": entry()}),
        Kind::List | Kind::Any => json!({}),
        kind => {
            let name = match kind {
                Kind::Flag => "boolean",
                Kind::Integer => "integer",
                Kind::Number => "number",
                Kind::Map => "object",
                _ => "string",
            };
            json!({"type": if default == Some(&Value::Null) { json!([name, "null"]) } else { json!(name) }})
        }
    };
    schema["description"] = json!(key.doc);
    if let Some(default) = default.filter(|default| !default.is_null() && key.kind != Kind::Section) {
        schema["default"] = default.clone();
    }
    if let (Some((least, most)), Kind::Integer | Kind::Number) = (&key.bounds, key.kind) {
        schema["minimum"] = json!(least.parse::<i64>().ok());
        schema["maximum"] = json!(most.parse::<i64>().ok());
    }
    schema
}
