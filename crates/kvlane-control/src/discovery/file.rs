//! Workers in a file: a YAML or JSON list, read again when it changes.
//!
//! A file that is missing, half written or wrong in any entry changes nothing: the workers stay those of its last
//! valid version until it is valid again. A list without entries is valid, an empty file is not: it is what a program
//! leaves that is about to write one.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvlane_fleet::discovery::{Source, Target, Targets};
use kvlane_fleet::file_watch::Watch;
use kvlane_fleet::worker::config::WorkerSpec;
use kvlane_fleet::worker::{Origin, Worker, WorkerId};
use kvlane_http::address::worker_name;
use kvlane_wire::yaml::Document;

use crate::controller::WORKERS_MAX;

/// Time between two checks whether the file has changed; it is read when two in a row find the same version.
pub const CHECK_INTERVAL: Duration = Duration::from_millis(250);
/// Time between two reports that the file has not changed.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(5);
/// The largest file.
const BYTES_MAX: u64 = 16 << 20;

/// Publishes the workers of a file, now and whenever it changes.
pub async fn run(path: PathBuf, source: Source) {
    let mut watch = Watch::new(vec![path.clone()]);
    loop {
        watch.reads();
        let is_valid = publish(&path, &source);
        loop {
            tokio::select! {
                () = watch.changed(CHECK_INTERVAL) => break,
                () = tokio::time::sleep(CONFIRM_INTERVAL) => if is_valid { source.confirm() },
            }
        }
    }
}

/// Reads the file and publishes its workers. Returns whether it was valid.
fn publish(path: &Path, source: &Source) -> bool {
    let problem = match read(path) {
        Ok(targets) => {
            tracing::info!(path = %path.display(), workers = targets.workers.len(), "workers file read");
            source.publish(targets);
            return true;
        }
        Err(problem) => format!("{}: {problem}", path.display()),
    };
    if source.fail(problem.clone()) {
        tracing::error!(problem, "workers file cannot be used; the workers stay as they were");
    }
    false
}

/// Reads a file.
///
/// # Errors
/// Why it cannot be used.
pub fn read(path: &Path) -> Result<Targets, String> {
    let mut text = String::new();
    let file = File::open(path).map_err(|error| {
        format!("cannot open the workers file: {error}; write it, or correct discovery.workers_file")
    })?;
    // One byte more than is allowed shows that there are more.
    file.take(BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(|error| format!("cannot read the workers file: {error}"))?;
    if text.len() as u64 > BYTES_MAX {
        return Err(format!("the workers file is larger than {BYTES_MAX} bytes"));
    }
    parse(&text)
}

/// The workers in the text of a file.
///
/// # Errors
/// The first thing that is wrong, with its line and value.
pub fn parse(text: &str) -> Result<Targets, String> {
    let document = Document::parse(text).map_err(|error| error.to_string())?;
    if document.is_empty() {
        return Err("the file is empty: write [] if there are no workers".into());
    }
    let specs: Vec<WorkerSpec> = document.read().map_err(|error| {
        format!("{error}\nThe file is a list of workers, as in `- url: http://10.0.0.7:8000`")
    })?;
    if specs.len() > WORKERS_MAX {
        return Err(format!("it names {} workers; the maximum is {WORKERS_MAX}", specs.len()));
    }
    let mut lines: HashMap<&str, usize> = HashMap::new();
    for (n, spec) in specs.iter().enumerate() {
        let wrong = |key: &str, why: &str| Err(document.item_error(n, key, why).to_string());
        for (i, feed) in spec.kv_events.iter().enumerate() {
            if let Err(error) = feed.validate(&format!("kv_events[{i}]")) {
                return wrong("kv_events", &error.to_string());
            }
        }
        if let Err(why) = Worker::new(WorkerId(0), spec, Origin::Config, None) {
            let keys = ["api_key", "tls_server_name"];
            return wrong(keys.into_iter().find(|key| why.starts_with(key)).unwrap_or("url"), &why);
        }
        if let Some(first) = lines.insert(worker_name(&spec.url), n) {
            return wrong(
                "url",
                &format!("'{}' is also that of the entry [{first}]: leave one of them out", spec.url),
            );
        }
    }
    // The file does not say which process runs behind a URL; probes find out when it restarts.
    let target = |spec: WorkerSpec| Target { key: String::new(), spec, terminating: false };
    Ok(Targets { workers: specs.into_iter().map(target).collect(), problems: Vec::new() })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use kvlane_fleet::clock::Clock;
    use kvlane_fleet::discovery::{Discovery, FILE, Seen};
    use tempfile::TempDir;

    use super::*;

    #[test]
    fn what_is_wrong_with_an_entry_is_named_with_its_line_and_value() {
        for (text, words) in [
            ("", &["write [] if there are no workers"][..]),
            ("# nothing\n", &["write []"]),
            ("workers: []\n", &["is not a list", "line 1", "- url:"]),
            ("- url: http://a\n- ulr: http://b\n", &["unknown field `ulr`", "line 2", "2 | - ulr: http://b"]),
            ("- url: http://a\n- url: gpu:8000\n", &["[1].url", "'gpu:8000'", "http://host:port", "line 2"]),
            ("- url: http://a\n  role: decoder\n", &["[0].role", "decoder", "line 2"]),
            (
                "- url: http://a\n\n- url: http://a/v1/\n",
                &["[1].url", "'http://a/v1/'", "the entry [0]", "line 3"],
            ),
            (
                "- url: http://a\n  kv_events: {endpoint: 'a:1'}\n",
                &["kv_events[0].endpoint", "'a:1'", "line 2"],
            ),
            ("- url: http://a\n  api_key: {env: NO_SUCH_VARIABLE}\n", &["[0].api_key", "line 2"]),
            ("- url: http://a\n  mod", &["line 2"]),
        ] {
            let problem = parse(text).expect_err(text);
            for word in words {
                assert!(problem.contains(word), "{text:?}: '{word}' is not in: {problem}");
            }
        }
    }

    #[test]
    fn a_list_is_yaml_or_json_and_may_be_empty() {
        let urls = |text: &str| {
            let targets = parse(text).expect("right");
            targets.workers.into_iter().map(|target| target.spec.url).collect::<Vec<_>>()
        };
        assert_eq!(urls("- url: http://a\n- {url: 'http://b', role: prefill}\n"), ["http://a", "http://b"]);
        assert_eq!(urls(r#"[{"url": "http://a", "model": "m"}]"#), ["http://a"]);
        assert_eq!(urls("[]"), [""; 0]);
    }

    #[test]
    fn a_list_has_a_limit() {
        let entries = |count: usize| (0..count).map(|n| format!("- url: http://h{n}\n")).collect::<String>();
        assert_eq!(parse(&entries(WORKERS_MAX)).expect("right").workers.len(), WORKERS_MAX);
        let problem = parse(&entries(WORKERS_MAX + 1)).expect_err("too many");
        assert!(problem.contains("4097") && problem.contains("4096"), "{problem}");
    }

    /// A source of a file that is not there yet.
    fn watched() -> (TempDir, PathBuf, Source, Seen) {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("workers.yaml");
        let (source, seen) = Discovery::default().source(FILE, Clock::start(1.0));
        (directory, path, source, seen)
    }

    /// Lets a time pass on the paused clock.
    async fn passes(time: Duration) {
        let _ = tokio::time::timeout(time, std::future::pending::<()>()).await;
    }

    async fn urls(seen: &mut Seen) -> Vec<String> {
        let targets = seen.next().await.expect("the source runs");
        targets.workers.iter().map(|target| target.spec.url.clone()).collect()
    }

    /// Invariant: A workers file that is missing or wrong changes nothing until it is valid.
    #[tokio::test(start_paused = true)]
    async fn a_file_that_is_not_valid_leaves_the_workers_as_they_were() {
        let (directory, path, source, mut seen) = watched();
        let running = tokio::spawn(run(path.clone(), source));
        let wait = || passes(4 * CHECK_INTERVAL);
        wait().await;
        let status = seen.status();
        assert!(status.problem.is_some_and(|problem| problem.contains("workers.yaml: cannot open")));
        assert_eq!(status.confirmed, None);

        fs::write(&path, "- url: http://a\n- url: http://b\n").expect("written");
        assert_eq!(urls(&mut seen).await, ["http://a", "http://b"]);
        assert_eq!(seen.status().problem, None);
        // Truncated, half written, wrong, removed.
        for text in ["", "- url: http://a\n- ur", "- url: nonsense\n", "{"] {
            fs::write(&path, text).expect("written");
            wait().await;
            let status = seen.status();
            assert!(status.problem.is_some(), "{text:?}");
            assert_eq!(status.workers, 2, "{text:?}");
        }
        fs::remove_file(&path).expect("removed");
        wait().await;
        assert_eq!((seen.status().workers, seen.status().problem.is_some()), (2, true));

        let next = directory.path().join("next.yaml");
        fs::write(&next, "- url: http://c\n").expect("written");
        fs::rename(&next, &path).expect("replaced");
        assert_eq!(urls(&mut seen).await, ["http://c"]);
        assert_eq!(seen.status().problem, None);
        fs::write(&path, "[]\n").expect("written");
        assert_eq!(urls(&mut seen).await, [""; 0], "no workers is what it says");
        running.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_file_that_stays_as_it_is_is_up_to_date() {
        let (_directory, path, source, seen) = watched();
        fs::write(&path, "- url: http://a\n").expect("written");
        let running = tokio::spawn(run(path.clone(), source));
        let wait = || passes(2 * CONFIRM_INTERVAL);
        passes(CHECK_INTERVAL).await;
        let first = seen.status().confirmed.expect("it has been read");
        wait().await;
        let second = seen.status().confirmed.expect("it has been read");
        assert!(second > first);
        fs::write(&path, "- nonsense\n").expect("written");
        wait().await;
        let broken = seen.status();
        wait().await;
        assert_eq!(seen.status(), broken, "the age of what is known grows");
        running.abort();
    }
}
