//! `kvlane trace import` and `generate` as people meet them.

use std::path::{Path, PathBuf};

use kvlane_trace::format::{Options, open};

use crate::program::{self, FAILURE};

/// What it prints; it must succeed.
#[track_caller]
fn prints(args: &[&str]) -> String {
    program::succeeds(&[&["trace"], args].concat()).0
}

/// Runs it, which must fail and say all of `words`.
#[track_caller]
fn fails(args: &[&str], words: &[&str]) {
    program::fails(&[&["trace"], args].concat(), FAILURE, words);
}

fn sample(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvlane-trace/tests/data").join(name);
    path.display().to_string()
}

fn file(directory: &Path, name: &str, text: &str) -> PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, text).expect("it can be written");
    path
}

#[test]
fn an_import_says_what_it_read_and_can_be_imported_again() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("weka.jsonl.gz").display().to_string();
    let said = prints(&[
        "import",
        &sample("weka_packed.jsonl"),
        "--out",
        &out,
        "--session-rate",
        "0.5",
        "--seed",
        "3",
    ]);
    assert!(said.contains("requests of 6 sessions") && said.contains("in blocks of 64"), "{said}");
    assert!(said.contains("note: sessions start at 0.5 per second on average (Poisson, seed 3)"), "{said}");
    let again = directory.path().join("again.jsonl").display().to_string();
    prints(&["import", &out, "--out", &again]);
    let read = |path: &str| open(Path::new(path), &Options::default()).expect("it is a trace");
    assert_eq!(read(&out), read(&again));
    let text = std::fs::read_to_string(&again).expect("without .gz it is text");
    assert!(text.starts_with("{\"kvlane_trace\":1,\"block_tokens\":64,"));
    prints(&["import", &out, "--out", &again, "--open-loop"]);
    assert!(read(&again).requests.iter().all(|request| request.after.is_none()));
}

#[test]
fn a_bad_line_is_named_and_can_be_skipped() {
    let directory = tempfile::tempdir().expect("a directory");
    let lines = "{\"timestamp\": 0, \"input_length\": 9, \"output_length\": 1, \"hash_ids\": [1]}\n{\"timestamp\": 1}\n";
    let path = file(directory.path(), "bad.jsonl", lines).display().to_string();
    let out = directory.path().join("out.jsonl").display().to_string();
    fails(&["import", &path, "--out", &out], &["bad.jsonl", "trace line 2, input_length: missing"]);
    let said = prints(&["import", &path, "--out", &out, "--skip-bad"]);
    assert!(
        said.contains("note: skipped 1 invalid lines; the first: trace line 2, input_length: missing"),
        "{said}"
    );
}

#[test]
fn what_makes_no_sense_is_named() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("out.jsonl").display().to_string();
    let mooncake = sample("mooncake_fast25_conversation.jsonl");
    fails(&["import", "/nowhere.jsonl", "--out", &out], &["/nowhere.jsonl"]);
    fails(&["import", &mooncake, "--out", "/nowhere/x.jsonl"], &["--out /nowhere/x.jsonl"]);
    fails(&["import", &mooncake, "--out", &out, "--format", "csv"], &["--format csv", "mooncake", "azure"]);
    fails(&["import", &mooncake, "--out", &out, "--jitter", "on"], &["--jitter on: must be auto or off"]);
    fails(&["import", &mooncake, "--out", &out, "--block-tokens", "256"], &["in blocks of 256 need"]);
    fails(&["import", &mooncake, "--out", &out, "--session-rate", "0"], &["--session-rate 0"]);
    fails(&["generate", "dream", "--out", &out], &["unknown workload 'dream'", "did you mean"]);
    fails(&["generate", "--out", &out], &["--config"]);
    fails(
        &["generate", "chat", "--out", &out, "--set", "colour=1"],
        &["--set colour=1", "unknown field `colour`"],
    );
    fails(&["generate", "chat", "--out", &out, "--rate", "0"], &["workload chat: arrivals.rate is 0"]);
    let config = file(directory.path(), "w.yaml", "kind: rag\nskew: {a: 1}\n").display().to_string();
    fails(&["generate", "--config", &config, "--out", &out], &["w.yaml", "a map is not a number"]);
}

#[test]
fn a_workload_is_made_from_flags_as_from_a_file_and_the_same_every_time() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = |name: &str| directory.path().join(name).display().to_string();
    let yaml = "kind: shared-prefix\ngroups: 3\nquestion_tokens: {min: 10, max: 90}\n\
                arrivals: {process: poisson, rate: 5, count: 40}\n";
    let config = file(directory.path(), "w.yaml", yaml).display().to_string();
    let said = prints(&["generate", "--config", &config, "--seed", "7", "--out", &out("a.jsonl")]);
    assert!(said.contains("40 requests of 40 sessions"), "{said}");
    let kind = ["generate", "shared-prefix", "--set", "groups=3"];
    let range = ["--set", "question_tokens={\"min\":10,\"max\":90}"];
    let rates = ["--rate", "5", "--count", "40", "--seed", "7", "--out", &out("b.jsonl")];
    prints(&[&kind[..], &range, &rates].concat());
    let bytes = |name: &str| std::fs::read(directory.path().join(name)).expect("it was written");
    assert_eq!(bytes("a.jsonl"), bytes("b.jsonl"));
    prints(&["generate", "--config", &config, "--seed", "8", "--out", &out("c.jsonl")]);
    assert_ne!(bytes("a.jsonl"), bytes("c.jsonl"));
}

#[test]
fn a_trace_of_so_many_seconds_is_so_long_and_says_what_was_left_out() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("chat.jsonl").display().to_string();
    let said = prints(&["generate", "chat", "--rate", "2", "--seconds", "600", "--out", &out]);
    let span = said.split(" sessions in ").nth(1).and_then(|rest| rest.split(" s;").next());
    let span_s: f64 = span.and_then(|span| span.parse().ok()).expect("a span");
    assert!((500.0..=600.0).contains(&span_s), "{said}");
    assert!(said.contains("are left out"), "{said}");
}

#[test]
fn every_kind_is_listed_with_settings_that_a_file_may_have() {
    let said = prints(&["generate", "--kinds"]);
    assert_eq!(said.lines().count(), kvlane_trace::generate::Workload::KINDS.len());
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("out.jsonl").display().to_string();
    for line in said.lines() {
        let config = file(directory.path(), "w.yaml", line).display().to_string();
        prints(&["generate", "--config", &config, "--rate", "1", "--seconds", "20", "--out", &out]);
    }
}

/// Invariant: Every trace format, workload, scenario, scenario key and figure is documented.
///
/// Also held by `every_key_of_a_scenario_is_explained`, `every_scenario_and_figure_is_explained`.
#[test]
fn every_flag_kind_and_format_is_in_the_document() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/traces.md");
    let document = std::fs::read_to_string(path).expect("docs/traces.md");
    for command in ["import", "generate"] {
        let help = prints(&[command, "--help"]);
        let name = |line: &str| -> Option<String> {
            Some(line.trim_start().strip_prefix("--")?.split([' ', '\n']).next()?.to_owned())
        };
        // Those of all commands are in the guide.
        let listed: Vec<String> = help
            .lines()
            .filter_map(name)
            .filter(|flag| !flag.starts_with("log-") && flag != "help-all")
            .collect();
        assert!(listed.len() > 5, "{command}: {listed:?}");
        for flag in listed {
            assert!(
                document.contains(&format!("`--{flag}")),
                "docs/traces.md does not explain --{flag} of {command}"
            );
        }
    }
    let kinds = kvlane_trace::generate::Workload::KINDS.iter().copied();
    let formats = kvlane_trace::format::Format::ALL.iter().map(|format| format.name());
    for name in kinds.chain(formats) {
        assert!(document.contains(&format!("`{name}`")), "docs/traces.md does not name {name}");
    }
}
