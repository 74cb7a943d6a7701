//! A gateway that is told another configuration while it serves: by SIGHUP, and by its file alone.

use std::path::Path;
use std::time::Duration;

use kvlane_gateway::config::Config;
use serde_json::{Value, json};

use crate::program::Running;

/// A gateway with this configuration file.
fn start(file: &Path, more: &[&str]) -> Running {
    Running::serving(&[&["serve", "--config", file.to_str().expect("UTF-8")], more].concat()).0
}

fn stop(gateway: Running) {
    gateway.signal(&["-TERM"]);
    gateway.ends();
}

fn write(file: &Path, text: &str) {
    let unfinished = file.with_extension("unfinished");
    std::fs::write(&unfinished, text).expect("written");
    std::fs::rename(&unfinished, file).expect("renamed");
}

#[test]
fn sighup_reloads_the_file_and_a_wrong_one_keeps_the_one_before() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("kvlane.yaml");
    write(&file, "server: {port: 0, reload_interval: 0s}\nmetrics: {port: 0}\n");
    let mut gateway = start(&file, &["--queue-size", "7"]);
    write(
        &file,
        "server: {port: 0, reload_interval: 0s}\nmetrics: {port: 0}\nretry: {max_total_retries: 2}\nrouting: {queue_size: 9}\n",
    );
    gateway.signal(&["-HUP"]);
    let line = gateway.logs(&["configuration reloaded"]);
    assert!(line.contains("retry.max_total_retries"), "{line}");
    assert!(!line.contains("routing.queue_size"), "the flag counts more than the file: {line}");

    write(&file, "server: {port: 0}\nretry: {max_total_retires: 3}\n");
    gateway.signal(&["-HUP"]);
    let line = gateway.logs(&["reload failed"]);
    assert!(line.contains("max_total_retires") && line.contains("kvlane.yaml"), "{line}");
    stop(gateway);
}

#[test]
fn a_file_that_changes_is_reloaded_without_a_signal() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("kvlane.yaml");
    let with =
        |more: &str| format!("server: {{port: 0, reload_interval: 5ms}}\nmetrics: {{port: 0}}\n{more}");
    write(&file, &with(""));
    let mut gateway = start(&file, &[]);
    write(&file, &with("retry: {max_total_retries: 2}\n"));
    let line = gateway.logs(&["configuration reloaded"]);
    assert!(line.contains("retry.max_total_retries"), "{line}");
    write(&file, "nonsense");
    gateway.logs(&["reload failed"]);
    write(&file, &with("upstream: {idle_max: 9}\n"));
    let line = gateway.logs(&["configuration reloaded"]);
    assert!(line.contains("upstream.idle_max") && line.contains("retry.max_total_retries"), "{line}");
    stop(gateway);
}

/// Where the numbers of a configuration are that are not whole, as JSON pointers.
fn floats(tree: &Value, place: &str) -> Vec<String> {
    match tree {
        Value::Number(number) if number.is_f64() => vec![place.to_owned()],
        Value::Object(fields) => {
            fields.iter().flat_map(|(name, value)| floats(value, &format!("{place}/{name}"))).collect()
        }
        _ => Vec::new(),
    }
}

#[test]
fn no_reload_takes_a_number_that_is_not_within_its_bounds() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("kvlane.yaml");
    let mut config = Config::default();
    (config.server.port, config.metrics.port) = (0, 0);
    config.server.reload_interval = Duration::ZERO;
    let tree = serde_json::to_value(&config).expect("JSON");
    write(&file, &tree.to_string());
    let mut gateway = start(&file, &[]);
    let places = floats(&tree, "");
    assert!(places.len() >= 7, "{places:?}");
    for place in places {
        for value in [".nan", ".inf", "-.inf", "-1.0", "1e300"] {
            let mut wrong = tree.clone();
            *wrong.pointer_mut(&place).expect("it is there") = json!("@");
            write(&file, &wrong.to_string().replace(r#""@""#, value));
            gateway.signal(&["-HUP"]);
            let line = gateway.logs(&["reload failed"]);
            let key = place[1..].replace('/', ".");
            let why = ["is out of range", " is not a "].iter().any(|why| line.contains(why));
            assert!(line.contains(&key) && why, "{key} {value}: {line}");
        }
    }
    config.retry.max_total_retries = 2;
    write(&file, &serde_json::to_string(&config).expect("JSON"));
    gateway.signal(&["-HUP"]);
    gateway.logs(&["configuration reloaded"]);
    stop(gateway);
}
