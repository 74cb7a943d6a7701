//! `kvlane trace stats` and `kvlane trace sample` as people meet them, on the slice of a trace in the repository.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::program::{self, FAILURE, USAGE};

fn slice() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/mooncake-conversation-slice.jsonl.gz");
    path.to_str().expect("a path in UTF-8").to_owned()
}

fn succeeds(args: &[&str]) -> (String, String) {
    program::succeeds(&[&["trace"], args].concat())
}

fn fails(args: &[&str], code: i32, words: &[&str]) {
    program::fails(&[&["trace"], args].concat(), code, words);
}

#[test]
fn stats_are_a_table_json_and_a_page() {
    let dir = tempfile::tempdir().expect("a directory");
    let page = dir.path().join("stats.html");
    let (table, _) = succeeds(&["stats", &slice(), "--html", page.to_str().expect("UTF-8")]);
    for heading in ["Arrivals", "Lengths", "Prefix cache", "Cache size", "Sessions"] {
        assert!(table.contains(heading), "no {heading} in {table}");
    }
    let page = std::fs::read_to_string(page).expect("a page");
    assert!(page.contains("Trace mooncake-conversation-slice.jsonl.gz") && page.matches("<svg").count() == 6);
    let (json, told) = succeeds(&["stats", &slice(), "--json", "-"]);
    let stats: Value = serde_json::from_str(&json).expect("JSON alone on stdout");
    assert_eq!(stats["schema"], "kvlane.trace-stats/1");
    assert_eq!(told.trim(), table.trim());
    let lru = stats["cache"]["lru"].as_array().expect("a curve");
    let largest = lru.last().expect("a point");
    assert_eq!(largest["hit_token_share"], stats["cache"]["hit_token_share"]);
}

#[test]
fn a_sample_is_the_same_for_the_same_seed_and_says_what_it_has_changed() {
    let dir = tempfile::tempdir().expect("a directory");
    let out = |name: &str| -> PathBuf { dir.path().join(name) };
    let sample = |name: &str, more: &[&str]| {
        let (slice, out) = (slice(), out(name));
        let mut args =
            vec!["sample", &slice, "--seed", "1", "--json", "-", "--out", out.to_str().expect("UTF-8")];
        args.extend(more);
        let (json, told) = succeeds(&args);
        assert!(told.contains("of the fleet"), "{told}");
        let json: Value = serde_json::from_str(&json).expect("JSON alone on stdout");
        (json, std::fs::read(out).expect("a sample"))
    };
    let (report, bytes) = sample("a.jsonl.gz", &["--sample-ratio", "0.25"]);
    assert_eq!(sample("b.jsonl.gz", &["--sample-ratio", "0.25"]), (report.clone(), bytes));
    assert_eq!(report["schema"], "kvlane.trace-sample/1");
    assert_eq!(report["tried"].as_array().map(Vec::len), Some(4));
    let (fifty, _) = sample("c.jsonl", &["--target-requests", "50", "--method", "window"]);
    assert_eq!((&fifty["sample"]["requests"], &fifty["method"]), (&50.into(), &"window".into()));
    let (json, _) = succeeds(&["stats", out("c.jsonl").to_str().expect("UTF-8"), "--json", "-"]);
    let stats: Value = serde_json::from_str(&json).expect("JSON");
    assert_eq!(stats["cache"]["hit_blocks"], fifty["sample"]["cache"]["hit_blocks"]);
}

#[test]
fn what_makes_no_sense_is_refused_before_the_trace_is_read() {
    fails(&["sample", "no-such-file", "--out", "x"], USAGE, &["--sample-ratio"]);
    fails(
        &["sample", "no-such-file", "--out", "x", "--sample-ratio", "1.5"],
        1,
        &["--sample-ratio 1.5", "at most 1"],
    );
    fails(&["sample", "no-such-file", "--out", "x", "--target-requests", "0"], FAILURE, &["at least 1"]);
    let method = ["sample", "no-such-file", "--out", "x", "--sample-ratio", "1", "--method", "random"];
    fails(&method, FAILURE, &["--method random", "session-closed-window"]);
    fails(&["stats", "no-such-file"], FAILURE, &["no-such-file"]);
    fails(&["stats", &slice(), "--html", "no/such/place.html"], FAILURE, &["--html no/such/place.html"]);
}
