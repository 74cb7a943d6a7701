//! A gateway that is told another configuration while it serves: by SIGHUP, and by its file alone.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use kvlane_live::config::Config;
use serde_json::{Value, json};

/// How long a line is waited for before the test counts as failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// A gateway and what it logs.
struct Gateway {
    process: Child,
    lines: Receiver<String>,
}

// === impl Gateway ===

impl Gateway {
    fn start(file: &Path, more: &[&str]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_kvlane"))
            .args(["serve", "--config", file.to_str().expect("UTF-8")])
            .args(more)
            .env_remove("KVLANE_LOG")
            .env("NO_COLOR", "1")
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let log = BufReader::new(process.stderr.take().expect("its log"));
        let (tell, lines) = channel();
        std::thread::spawn(move || log.lines().map_while(Result::ok).try_for_each(|line| tell.send(line)));
        let mut gateway = Self { process, lines };
        gateway.logs("serving");
        gateway
    }

    /// Waits for a line with `text`.
    fn logs(&mut self, text: &str) -> String {
        let mut before = Vec::new();
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) if line.contains(text) => return line,
                Ok(line) => before.push(line),
                Err(error) => panic!("{error}: {text:?} was not logged after {before:#?}"),
            }
        }
    }

    fn signal(&self, name: &str) {
        let pid = self.process.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().expect("kill runs").success());
    }

    fn end(mut self) {
        self.signal("-TERM");
        assert!(self.process.wait().expect("it ends").success());
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.process.kill();
    }
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
    let mut gateway = Gateway::start(&file, &["--queue-size", "7"]);
    write(
        &file,
        "server: {port: 0, reload_interval: 0s}\nmetrics: {port: 0}\nretry: {max_total_retries: 2}\nrouting: {queue_size: 9}\n",
    );
    gateway.signal("-HUP");
    let line = gateway.logs("configuration reloaded");
    assert!(line.contains("retry.max_total_retries"), "{line}");
    assert!(!line.contains("routing.queue_size"), "the flag counts more than the file: {line}");

    write(&file, "server: {port: 0}\nretry: {max_total_retires: 3}\n");
    gateway.signal("-HUP");
    let line = gateway.logs("not reloaded");
    assert!(line.contains("max_total_retires") && line.contains("kvlane.yaml"), "{line}");
    gateway.end();
}

#[test]
fn a_file_that_changes_is_reloaded_without_a_signal() {
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("kvlane.yaml");
    let with =
        |more: &str| format!("server: {{port: 0, reload_interval: 5ms}}\nmetrics: {{port: 0}}\n{more}");
    write(&file, &with(""));
    let mut gateway = Gateway::start(&file, &[]);
    write(&file, &with("retry: {max_total_retries: 2}\n"));
    let line = gateway.logs("configuration reloaded");
    assert!(line.contains("retry.max_total_retries"), "{line}");
    write(&file, "nonsense");
    gateway.logs("not reloaded");
    write(&file, &with("upstream: {idle_max: 9}\n"));
    let line = gateway.logs("configuration reloaded");
    assert!(line.contains("upstream.idle_max") && line.contains("retry.max_total_retries"), "{line}");
    gateway.end();
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
    let mut gateway = Gateway::start(&file, &[]);
    let places = floats(&tree, "");
    assert!(places.len() >= 7, "{places:?}");
    for place in places {
        for value in [".nan", ".inf", "-.inf", "-1.0", "1e300"] {
            let mut wrong = tree.clone();
            *wrong.pointer_mut(&place).expect("it is there") = json!("@");
            write(&file, &wrong.to_string().replace(r#""@""#, value));
            gateway.signal("-HUP");
            let line = gateway.logs("not reloaded");
            let key = place[1..].replace('/', ".");
            assert!(line.contains(&key) && line.contains("is out of range"), "{key} {value}: {line}");
        }
    }
    config.retry.max_total_retries = 2;
    write(&file, &serde_json::to_string(&config).expect("JSON"));
    gateway.signal("-HUP");
    gateway.logs("configuration reloaded");
    gateway.end();
}
