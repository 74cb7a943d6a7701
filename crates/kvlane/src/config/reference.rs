//! `docs/configuration.md`, made from the keys and the flags.
//!
//! `KVLANE_WRITE_CONFIGURATION=1 cargo test -p kvlane --bin kvlane reference` writes it and `config/example.yaml` again.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use clap::{Args as _, Command};
use kvlane_core::config::{Key, Kind, Setting as _};
use kvlane_gateway::config::Config;
use kvlane_gateway::reload::NEEDS_RESTART;
use serde_json::{Value, json};

use super::MoreArgs;
use super::document::{default_of, example, key_of, schema};
use super::flags::{FLAGS, Flag};

const HEAD: &str = "# Configuration keys

Every key of the configuration file, its flag of `serve` and `check`, its default and its bounds. Bounds are inclusive; those of a list \
are of its length. Keys and flags have the same meaning; [the guide](guide.md#configuration) explains files, `--set` and flags. \
`kvlane config` prints a file with every key, and `kvlane config --schema` its JSON schema.

`X[].key` is a key of each entry of the list `X`, `X.*.key` of each entry of the map `X`, whose names are yours. A key marked \
*restart* keeps its value at a [reload](operations.md#reload).
";

/// The document.
fn markdown() -> String {
    let (keys, defaults) = (Config::keys(), json!(Config::default()));
    let mut text = HEAD.to_owned();
    for section in &keys {
        let intro = if section.kind == Kind::Section { &*section.doc } else { "Entries of a list." };
        let _ = write!(text, "\n## `{}`\n\n{intro}\n\n", section.name);
        text += "| Key | Flag | Default | Bounds | Meaning |\n|---|---|---|---|---|\n";
        let mut rows = Vec::new();
        add_rows(&mut rows, section, section.name.to_owned(), &defaults);
        text.extend(rows);
    }
    text += "\n## Other flags\n\n| Flag | Meaning |\n|---|---|\n";
    for arg in MoreArgs::augment_args(Command::new("serve")).get_arguments() {
        let (name, help) =
            (arg.get_id().as_str().replace('_', "-"), arg.get_help().expect("help").to_string());
        let env = arg.get_env().map_or_else(String::new, |env| format!(", or `{}`", env.display()));
        let _ = writeln!(text, "| `--{name}`{env} | {} |", cell(&help));
    }
    for flag in FLAGS.iter().filter(|flag| key_of(&keys, flag.key).is_none()) {
        let _ = writeln!(text, "| {} | sets `{}`; {} |", name(flag), flag.key, flag.said().replace("--", ""));
    }
    text
}

fn add_rows(rows: &mut Vec<String>, key: &Key, path: String, defaults: &Value) {
    if key.kind != Kind::Section || path.contains('.') {
        let flags: Vec<String> = FLAGS.iter().filter(|flag| flag.key == path).map(name).collect();
        let default = default_of(defaults, &path).filter(|_| key.keys.is_empty());
        let default = default.map_or_else(String::new, |default| format!("`{}`", sized(&default)));
        let bounds = key.bounds.as_ref();
        let bounds =
            bounds.map_or_else(String::new, |(least, most)| format!("{} to {}", sized(least), sized(most)));
        let restart =
            NEEDS_RESTART.iter().any(|fixed| path == *fixed || path.starts_with(&format!("{fixed}.")));
        let restart = if restart { " *restart*" } else { "" };
        let meaning = key.doc.replace('\n', " ");
        rows.push(format!(
            "| `{path}` | {} | {default} | {bounds} | {}{restart} |\n",
            flags.join("<br>"),
            cell(&meaning)
        ));
    }
    let entry = match key.kind {
        Kind::List => "[]",
        Kind::Map => ".*",
        _ => "",
    };
    for below in &key.keys {
        add_rows(rows, below, format!("{path}{entry}.{}", below.name), defaults);
    }
}

/// A flag with its other names.
fn name(flag: &Flag) -> String {
    let mut text = format!("`--{}`", flag.name);
    if let Some(value) = flag.sets() {
        let _ = write!(text, ": {value}");
    }
    flag.aliases.iter().flatten().for_each(|alias| _ = write!(text, ", `--{alias}`"));
    flag.env.iter().for_each(|env| _ = write!(text, ", variable `{env}`"));
    text
}

/// Numbers of bytes in their largest unit.
fn sized(number: &str) -> String {
    let units = [(40, "TiB"), (30, "GiB"), (20, "MiB")];
    let bytes: Option<u64> = number.parse().ok().filter(|&bytes| bytes > 0);
    let unit = bytes.and_then(|bytes| units.iter().find(|(shift, _)| bytes % (1 << shift) == 0));
    bytes.zip(unit).map_or(number.to_owned(), |(bytes, (shift, unit))| format!("{} {unit}", bytes >> shift))
}

fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}

fn assert_current(path: &str, text: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    if std::env::var_os("KVLANE_WRITE_CONFIGURATION").is_some() {
        fs::write(&file, text).expect("written");
    }
    assert!(
        fs::read_to_string(&file).expect("UTF-8") == text,
        "{path} is stale: KVLANE_WRITE_CONFIGURATION=1 cargo test -p kvlane --bin kvlane reference"
    );
}

#[test]
fn the_documents_of_the_configuration_are_what_the_sections_say() {
    let text = markdown();
    for row in [
        "| `routing.queue_size` | `--queue-size` | `100` | 0 to 1000000 | Maximum queued requests per pool;",
        "| `server.body_memory` |  | `1 GiB` | 1 MiB to 1 TiB |",
        "| `workers[].kv_events[].endpoint` |",
        "| `timeouts.routes.*.request_timeout` |  |  | 1ms to a year |",
    ] {
        assert!(text.contains(row), "{row} is not in: {text}");
    }
    assert_current("docs/configuration.md", &text);
    assert_current("config/example.yaml", &example());
}

#[test]
fn every_flag_sets_a_key_that_is_there() {
    let keys = Config::keys();
    for flag in FLAGS {
        let key = flag.key.strip_prefix("routing.policy.").map_or(flag.key, |_| "routing.policy");
        assert!(key_of(&keys, key).is_some(), "--{}: there is no key {}", flag.name, flag.key);
    }
}

#[test]
fn the_schema_has_the_type_the_default_and_the_bounds_of_a_key() {
    let schema = schema();
    let at = |path: &str| schema.pointer(path).unwrap_or_else(|| panic!("{path} is missing"));
    let size = at("/properties/routing/properties/queue_size");
    let told = ["type", "default", "minimum", "maximum"].map(|name| &size[name]);
    assert_eq!(told, [&json!("integer"), &json!(100), &json!(0), &json!(1_000_000)]);
    assert_eq!(at("/properties/workers/items/anyOf/0/properties/url/type"), &json!("string"));
    assert_eq!(at("/properties/tracing/properties/endpoint/type"), &json!(["string", "null"]));
    assert_eq!(at("/properties/retry/properties/budget/properties/share/maximum"), &json!(1));
    assert_eq!(at("/properties/server/additionalProperties"), &json!(false));
}
