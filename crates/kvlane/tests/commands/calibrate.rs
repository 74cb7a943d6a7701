//! `kvlane calibrate` and the timing file it writes, as people meet them.

use serde_json::Value;

use crate::program::{Engine, FAILURE, USAGE, document, fails, run, text};

#[test]
fn a_server_is_measured_and_what_is_found_starts_another_like_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    let (out, json, html) = (path("timing.json"), path("report.json"), path("report.html"));
    let preset = "llama-3.1-8b@h100";
    let sizes = ["--kv-cache-size", "4000", "--block-size", "32", "--max-num-seqs", "16"];
    let engine = Engine::start(&[&["--preset", preset, "--speed", "2"], &sizes[..]].concat());
    let asked =
        ["calibrate", &engine.url, "--preset", preset, "--quick", "--repeats", "2", "--max-num-seqs", "16"];
    let output =
        run(&[&asked[..], &["--out", &out, "--json", &json, "--html", &html, "--seed", "1"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let table = text(&output.stdout);
    for word in ["efficiency.compute", "host.request_secs", "prefill 4096", "decode 1 x", "not fitted"] {
        assert!(table.contains(word), "'{word}' is not in: {table}");
    }
    let read = |path: &str| std::fs::read_to_string(path).expect(path);
    let report: Value = serde_json::from_str(&read(&json)).expect("JSON");
    assert_eq!(report["schema"], "kvlane.calibrate/1");
    assert_eq!(report["constants"].as_array().map(Vec::len), Some(7));
    let rows = report["points"].as_array().expect("a list");
    let seqs: Vec<u64> = rows.iter().filter_map(|row| row["work"]["decode"]["seqs"].as_u64()).collect();
    assert!(
        seqs.contains(&1) && seqs.iter().all(|seqs| *seqs <= 16),
        "as many as the server runs at once: {seqs:?}"
    );
    assert!(read(&html).contains("<svg"));
    let timing: Value = serde_json::from_str(&read(&out)).expect("JSON");
    assert_eq!(timing["schema"], "kvlane.timing/1");
    assert_eq!((&timing["kv_capacity_tokens"], &timing["block_tokens"]), (&128_000.into(), &32.into()));
    assert_eq!(timing["residuals"].as_array().map(Vec::len), report["points"].as_array().map(Vec::len));
    drop(Engine::start(&["--timing", &out]));

    // A second calibration with the same prompts finds them cached.
    let again = run(&[&asked[..], &["--seed", "1"]].concat());
    assert!(text(&again.stderr).contains("came from the cache"), "{}", text(&again.stderr));
}

#[test]
fn what_is_wrong_is_named_with_what_to_do() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("timing.json");
    let file = file.to_string_lossy();
    std::fs::write(&*file, r#"{"schema":"kvlane.timing/9"}"#).expect("written");
    fails(
        &["mock-engine", "--port", "0", "--timing", &file],
        FAILURE,
        &["--timing", &file, "kvlane calibrate"],
    );
    fails(&["mock-engine", "--port", "0", "--timing", "/nowhere.json"], FAILURE, &["--timing /nowhere.json"]);
    fails(&["demo", "--timing", "/nowhere.json"], FAILURE, &["--timing /nowhere.json"]);
    fails(
        &["mock-engine", "--timing", &file, "--preset", "qwen2.5-7b@a100"],
        USAGE,
        &["cannot be used with"],
    );
    fails(&["calibrate", "http://127.0.0.1:1"], FAILURE, &["--preset", "--config-json"]);
    fails(&["calibrate", "127.0.0.1:1", "--preset", "qwen2.5-7b@a100"], FAILURE, &["http://host:port"]);
    fails(&["calibrate", "http://127.0.0.1:1", "--preset", "gpt@tpu"], FAILURE, &["gpt@tpu", "did you mean"]);
    fails(&["calibrate", "http://127.0.0.1:1", "--config-json", &file], FAILURE, &["--config-json", &file]);
    let known = ["calibrate", "http://127.0.0.1:1", "--preset", "qwen2.5-7b@a100"];
    fails(&known, FAILURE, &["/v1/models of 127.0.0.1:1"]);
    fails(&[&known[..], &["--repeats", "0"]].concat(), FAILURE, &["--repeats 0"]);
    fails(
        &[&known[..], &["--out", "/nowhere/timing.json"]].concat(),
        FAILURE,
        &["cannot write /nowhere/timing.json"],
    );
}

#[test]
fn every_flag_is_in_its_document() {
    let help = text(&run(&["calibrate", "--help"]).stdout);
    let (document, guide) = (document("calibrate.md"), document("guide.md"));
    assert!(guide.contains("calibrate.md"), "the guide leads there");
    let named = |line: &str| {
        let name: String = line.trim_start().strip_prefix("--")?.chars().take_while(|c| *c != ' ').collect();
        Some(format!("`--{name}`"))
    };
    let flags: Vec<String> = help
        .lines()
        .filter_map(named)
        .filter(|flag| !flag.starts_with("`--log-") && flag != "`--help-all`")
        .collect();
    assert!(flags.len() > 10, "{flags:?}");
    for flag in flags {
        assert!(document.contains(&flag), "docs/calibrate.md does not explain {flag}");
    }
}
