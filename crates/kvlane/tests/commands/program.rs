//! Runs the program that was built with the tests.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

/// The exit code of clap when the arguments are wrong.
pub(crate) const USAGE: i32 = 2;
/// The exit code of a command that failed.
pub(crate) const FAILURE: i32 = 1;
/// A log line that has not come after this long will not come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// `kvlane ARGS`, without the caller's log level and without colours.
pub(crate) fn kvlane(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvlane"));
    command.args(args).env_remove("KVLANE_LOG").env_remove("OPENAI_API_KEY").env("NO_COLOR", "1");
    // What this machine has downloaded is no part of a test.
    command.env("HF_HUB_CACHE", "/nowhere").env("HF_ENDPOINT", "http://127.0.0.1:1");
    command.stdin(Stdio::null());
    command
}

/// Runs it to its end.
pub(crate) fn run(args: &[&str]) -> Output {
    kvlane(args).output().expect("it starts")
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs it, which must succeed. Returns its stdout and stderr.
#[track_caller]
pub(crate) fn succeeds(args: &[&str]) -> (String, String) {
    let output = run(args);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{args:?}: {said}");
    (text(&output.stdout), said)
}

/// Runs it, which must fail with `code`, print nothing to stdout, and all of `words` to stderr.
#[track_caller]
pub(crate) fn fails(args: &[&str], code: i32, words: &[&str]) {
    let output = run(args);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {said}");
    assert!(output.stdout.is_empty(), "{args:?} printed to stdout: {}", text(&output.stdout));
    for word in words {
        assert!(said.contains(word), "{args:?}: '{word}' is not in: {said}");
    }
}

/// A file of docs/.
pub(crate) fn document(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A server of the program (`serve`, `mock-engine`) and its log. It is killed when this is dropped.
pub(crate) struct Running {
    child: Child,
    log: Receiver<String>,
    before: Vec<String>,
}

// === impl Running ===

impl Running {
    /// Starts it without waiting for anything.
    pub(crate) fn start(args: &[&str]) -> Self {
        Self::of(kvlane(args))
    }

    /// Starts this command.
    pub(crate) fn of(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("it starts");
        let log = BufReader::new(child.stderr.take().expect("piped"));
        let (sender, lines) = channel();
        std::thread::spawn(move || log.lines().map_while(Result::ok).try_for_each(|line| sender.send(line)));
        Self { child, log: lines, before: Vec::new() }
    }

    /// Starts it and waits until it serves. Returns the line that says so, too.
    pub(crate) fn serving(args: &[&str]) -> (Self, String) {
        let mut running = Self::start(args);
        // Not a key of the configuration, which is logged before.
        let line =
            running.logs_what("serving", |line| line.contains(" serving ") || line.contains("\"serving\""));
        (running, line)
    }

    /// Waits for a log line with all of `words`.
    #[track_caller]
    pub(crate) fn logs(&mut self, words: &[&str]) -> String {
        self.logs_what(&format!("{words:?}"), |line| words.iter().all(|word| line.contains(word)))
    }

    #[track_caller]
    fn logs_what(&mut self, what: &str, is_it: impl Fn(&str) -> bool) -> String {
        loop {
            match self.log.recv_timeout(PATIENCE) {
                Ok(line) if is_it(&line) => return line,
                Ok(line) => self.before.push(line),
                Err(error) => panic!("{error}: {what} was not logged: {:#?}", self.before),
            }
        }
    }

    /// Sends signals in turn, such as `-TERM`.
    pub(crate) fn signal(&self, names: &[&str]) {
        let id = self.child.id();
        let kills: Vec<String> = names.iter().map(|name| format!("kill {name} {id}")).collect();
        assert!(Command::new("sh").args(["-c", &kills.join("; ")]).status().expect("sh runs").success());
    }

    /// Waits until it ends, which it must do with exit code 0. Returns what it logged until then.
    #[track_caller]
    pub(crate) fn ends(mut self) -> String {
        let mut log = std::mem::take(&mut self.before);
        loop {
            match self.log.recv_timeout(PATIENCE) {
                Ok(line) => log.push(line),
                Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => break,
                Err(error) => panic!("{error}: it does not end: {log:#?}"),
            }
        }
        let log = log.join("\n");
        assert_eq!(self.child.wait().expect("it ends").code(), Some(0), "{log}");
        log
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A mock engine and its URL.
pub(crate) struct Engine {
    pub(crate) url: String,
    /// Killed with it.
    _running: Running,
}

// === impl Engine ===

impl Engine {
    pub(crate) fn start(args: &[&str]) -> Self {
        let (running, line) = Running::serving(&[&["mock-engine", "--port", "0"], args].concat());
        let address = line.split("address=").nth(1).and_then(|rest| rest.split_whitespace().next());
        Self { url: format!("http://{}", address.expect("it says where")), _running: running }
    }
}
