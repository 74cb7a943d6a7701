//! `kvlane replay` as people meet it.

use std::io::BufReader;
use std::path::Path;
use std::process::Output;

use kvlane_trace::record::{self, Record};
use serde_json::Value;

use crate::program::{Engine, run, text};

fn replay(args: &[&str]) -> Output {
    run(&[&["replay"], args].concat())
}

fn write(directory: &Path, name: &str, contents: &str) -> String {
    let path = directory.join(name);
    std::fs::write(&path, contents).expect("a file");
    path.display().to_string()
}

fn records(path: &str) -> Vec<Record> {
    record::read(BufReader::new(std::fs::File::open(path).expect("a file"))).expect("records")
}

/// Mooncake's format: a conversation of two turns, and another one that shares its first block.
const TRACE: &str = r#"{"timestamp":0,"input_length":1024,"output_length":3,"hash_ids":[1,2],"session_id":"a"}
{"timestamp":10,"input_length":1536,"output_length":5,"hash_ids":[1,2,3],"session_id":"a","delay":20}
{"timestamp":2000,"input_length":1024,"output_length":4,"hash_ids":[1,9],"session_id":"b"}
"#;

/// What a busy machine does to the client is not what these tests are about.
const PATIENT: [&str; 4] = ["--late-max-ms", "100000", "--cpu-max-percent", "1000"];

#[test]
fn a_trace_becomes_figures_records_and_a_report() {
    let (engine, directory) =
        (Engine::start(&["--speed", "1000"]), tempfile::tempdir().expect("a directory"));
    let trace = write(directory.path(), "trace.jsonl", TRACE);
    let [kept, json, report] =
        ["records.jsonl", "figures.json", "report.html"].map(|name| directory.path().join(name));
    let [kept, json, report] = [&kept, &json, &report].map(|path| path.display().to_string());
    let files = ["--records", &kept, "--json", &json, "--report", &report, "--engine", &engine.url];
    let output = replay(&[&[engine.url.as_str(), "--trace", &trace], &files[..], &PATIENT].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    for word in [
        "3 requests of 2 conversations",
        "(mock)",
        "TTFT",
        "ITL",
        "TPOT",
        "E2E",
        "median and 99th",
        "own cache (APC)",
    ] {
        assert!(shown.contains(word), "'{word}' is not in: {shown}");
    }
    let figures: Value = serde_json::from_slice(&std::fs::read(&json).expect("figures")).expect("JSON");
    assert_eq!((&figures["schema"], &figures["summary"]["requests"]), (&"kvlane.replay/1".into(), &3.into()));
    let cache = &figures["engine_caches"][0];
    assert_eq!((&cache["engine"], &cache["rank"]), (&engine.url.as_str().into(), &0.into()));
    assert!(
        cache["queried_tokens"].as_u64() >= Some(3584) && cache["hit_share"].as_f64() > Some(0.4),
        "{cache}"
    );
    assert_eq!(cache["external_hit_share"], 0.0);
    let records = records(&kept);
    let lengths: Vec<u32> = records.iter().map(|record| record.output_tokens).collect();
    assert_eq!(lengths, [3, 5, 4]);
    assert!((records[1].scheduled_s - records[0].end_s - 0.02).abs() < 1e-6, "it waits for the answer");
    assert_eq!(records[2].scheduled_s, 2.0);
    assert_eq!(records[2].reusable_tokens, Some(512));
    assert!(records[1].cached_tokens >= Some(1008) && records[2].cached_tokens >= Some(496));
    assert!(std::fs::read_to_string(&report).expect("a report").contains("conversations onto"));
}

/// Invariant: A bench whose client was the bottleneck reports no figures.
///
/// Also held by `a_client_that_was_late_is_a_run_that_does_not_count`.
#[test]
fn a_client_that_was_the_bottleneck_shows_nothing_unless_told_to() {
    let (engine, directory) =
        (Engine::start(&["--speed", "1000"]), tempfile::tempdir().expect("a directory"));
    let trace = write(directory.path(), "trace.jsonl", TRACE);
    let [kept, json] =
        ["records.jsonl", "figures.json"].map(|name| directory.path().join(name).display().to_string());
    // No client is as punctual as that.
    let args = [engine.url.as_str(), "--trace", &trace, "--late-max-ms", "0.000001", "--records", &kept];
    let output = replay(&[&args[..], &["--json", &json]].concat());
    assert_eq!(output.status.code(), Some(3));
    assert!(output.stdout.is_empty(), "{}", text(&output.stdout));
    let said = text(&output.stderr);
    assert!(said.contains("client was the bottleneck") && said.contains("late"), "{said}");
    assert_eq!(std::fs::read_to_string(&json).expect("it was opened"), "");
    assert_eq!(records(&kept).len(), 3, "records are written all the same");
    let output = replay(&[&args[..], &["--despite-client", "--json", "-", "--seed", "1"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let figures: Value = serde_json::from_slice(&output.stdout).expect("JSON alone");
    assert!(figures["bottleneck"].as_array().is_some_and(|why| !why.is_empty()));
}

#[test]
fn real_prompts_are_sent_at_a_rate_in_the_order_of_their_conversations() {
    let (engine, directory) =
        (Engine::start(&["--speed", "1000"]), tempfile::tempdir().expect("a directory"));
    let lines = concat!(
        r#"{"messages":[{"role":"user","content":"Hello there, how are you?"}],"session":"a","output_tokens":2}"#,
        "\n",
        r#"{"prompt":"Once upon a time","output_tokens":6}"#,
        "\n",
        r#"{"messages":[{"role":"user","content":"And now?"}],"session":"a","output_tokens":3}"#,
        "\n",
    );
    let prompts = write(directory.path(), "prompts.jsonl", lines);
    let kept = directory.path().join("records.jsonl").display().to_string();
    let args = [engine.url.as_str(), "--prompts", &prompts, "--records", &kept];
    let output = replay(&args);
    assert!(
        !output.status.success() && text(&output.stderr).contains("--prompts"),
        "{}",
        text(&output.stderr)
    );
    let output = replay(&[&args[..], &["--rate", "50"], &PATIENT].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let records = records(&kept);
    let mut turns = records.iter().filter(|record| record.output_tokens != 6);
    let (first, second) = (turns.next().expect("a turn"), turns.next().expect("another"));
    assert_eq!((first.output_tokens, second.output_tokens, second.after), (2, 3, Some(first.id)));
    assert!((second.scheduled_s - first.end_s).abs() < 1e-6);
}

#[test]
fn a_trace_sped_up_is_called_another_load() {
    let (engine, directory) =
        (Engine::start(&["--speed", "1000"]), tempfile::tempdir().expect("a directory"));
    let trace = write(directory.path(), "trace.jsonl", TRACE);
    let args = [engine.url.as_str(), "--trace", &trace, "--speed", "100", "--json", "-"];
    let output = replay(&[&args[..], &PATIENT].concat());
    assert!(output.status.success());
    assert!(text(&output.stderr).contains("the load differs from the trace's"));
    let usual = replay(&[engine.url.as_str(), "--trace", &trace, "--requests", "1", "--json", "-"]);
    assert!(!text(&usual.stderr).contains("the load differs"));
}

#[test]
fn a_model_has_blocks_of_exactly_the_traces_tokens() {
    // A vocabulary in which the words are one token each, and everything else a token a letter.
    use kvlane_tokens::{Config, Source, Tokenizer};
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kvlane-tokens/tests/data/tiny");
    let tokenizer = Tokenizer::load(&Source::at(&tiny), &Config::default()).expect("a tokenizer");
    let mut ids = Vec::new();
    let mut count = |text: &str| -> Result<usize, kvlane_lab::prompt::WordsError> {
        ids.clear();
        tokenizer.text(text, false, &mut ids).expect("it encodes");
        Ok(ids.len())
    };
    let words = kvlane_lab::prompt::Words::pick(&mut count).expect("it has words");
    let trace = kvlane_trace::format::read(TRACE.as_bytes(), &kvlane_trace::format::Options::default());
    let trace = trace.expect("a trace");
    for (index, request) in (0..).zip(&trace.requests) {
        let mut text = Vec::new();
        words.append(&mut text, 7, &trace, index);
        let text = String::from_utf8(text).expect("words are ASCII");
        assert_eq!(count(&text).expect("it encodes"), request.input_tokens as usize);
        // Each block is its own tokens, wherever it stands.
        let cuts: Vec<usize> = text.match_indices(' ').map(|(at, _)| at).collect();
        assert_eq!(cuts.len(), request.input_tokens as usize);
        for block in 0..cuts.len() / 512 {
            let end = cuts.get((block + 1) * 512).copied().unwrap_or(text.len());
            assert_eq!(count(&text[cuts[block * 512]..end]).expect("it encodes"), 512);
        }
    }
}

#[test]
fn what_makes_no_sense_is_refused_with_what_to_do() {
    let fails = |args: &[&str], word: &str| {
        let output = replay(args);
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains(word), "{args:?}: {said}");
        assert!(output.stdout.is_empty());
    };
    let nobody = "http://127.0.0.1:1";
    fails(&[nobody], "--trace");
    fails(&[nobody, "--trace", "/nowhere"], "/nowhere");
    fails(&[nobody, "--trace", "azure-conversation"], "--model");
    fails(&["localhost:80", "--trace", "azure-conversation"], "http://host:port");
    fails(&[nobody, "--trace", "azure-conversation", "--model", "m", "--field", "messages=1"], "messages");
    fails(&[nobody, "--trace", "azure-conversation", "--speed", "0"], "--speed 0");
    fails(&[nobody, "--trace", "azure-conversation", "--late-max-ms", "0"], "--late-max-ms");
    fails(&[nobody, "--trace", "azure-conversation", "--records", "/nowhere/r"], "--records /nowhere/r");
    fails(&["https://localhost:1", "--trace", "azure-conversation", "--ca", "/nowhere"], "--ca");
}

#[test]
fn an_unreachable_server_is_a_failure() {
    let args = ["http://127.0.0.1:1", "--trace", "azure-conversation", "--requests", "1", "--model", "m"];
    let output = replay(&[&args[..], &PATIENT].concat());
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("connect"), "the table says why");
    assert!(text(&output.stderr).contains("request 0: connect"), "{}", text(&output.stderr));
}

#[test]
fn every_class_of_error_and_every_field_is_explained() {
    let document = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
        std::fs::read_to_string(path).expect("a document")
    };
    let replay = document("replay.md");
    use kvlane_lab::ErrorClass::{Connect, Failed, Reset, Status, Timeout, Truncated};
    for class in [Connect, Status, Reset, Timeout, Truncated, Failed] {
        assert!(replay.contains(&format!("| `{}` |", class.name())), "{}", class.name());
    }
    let whole = Record {
        first_token_s: Some(0.0),
        cached_tokens: Some(0),
        endpoint: Some(String::new()),
        session: Some(0),
        base: Some(0),
        shared_tokens: Some(0),
        error: Some(String::new()),
        reusable_tokens: Some(0),
        after: Some(0),
        think_s: Some(0.0),
        gaps: Some(record::Gaps::default()),
        stages_s: [(String::new(), 0.0)].into(),
        reason: Some(String::new()),
        attempts: Some(0),
        request_id: Some(String::new()),
        ..Record::default()
    };
    let Value::Object(fields) = serde_json::to_value(whole).expect("JSON") else { panic!("an object") };
    assert_eq!(fields.len(), 22);
    for field in fields.keys() {
        assert!(replay.contains(&format!("`{field}`")), "docs/replay.md does not explain {field}");
    }
}
