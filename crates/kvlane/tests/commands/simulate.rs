//! `kvlane simulate` as people meet it: flags, files, figures, and what is wrong with an input.

use std::path::Path;

use serde_json::Value;

use crate::program::{self, FAILURE, USAGE, run, text};

/// A fleet and a load that take no time.
const SMALL: [&str; 8] =
    ["--workload", "chat", "--preset", "llama-3.1-8b@h100", "--engines", "2", "--rate", "1x10"];

/// A scenario that a user might write. It has to be as small as `SMALL`.
const SCENARIO: &str = "\
scenario: ours
fleet: {engines: 2, preset: llama-3.1-8b@h100}
workload:
  generate: {kind: chat}
  closed_loop: {concurrency: [2], conversations: {total: 4}}
policies: [round_robin, cache_aware]
";

/// Runs it; what it printed.
#[track_caller]
fn prints(args: &[&str]) -> String {
    program::succeeds(&[&["simulate"], args].concat()).0
}

/// Runs it; its figures.
#[track_caller]
fn figures(args: &[&str]) -> Value {
    let printed = prints(&[args, &["--json"]].concat());
    serde_json::from_str(&printed).unwrap_or_else(|why| panic!("{why}: {printed}"))
}

/// Runs it, which must fail with `code` and say all of `words`.
#[track_caller]
fn fails(args: &[&str], code: i32, words: &[&str]) {
    program::fails(&[&["simulate"], args].concat(), code, words);
}

/// Runs a scenario file, which must fail and say all of `words`.
#[track_caller]
fn file_fails(folder: &Path, scenario: &str, words: &[&str]) {
    let path = folder.join("bad.yaml");
    std::fs::write(&path, scenario).expect("written");
    fails(&["--scenario", &path.to_string_lossy()], FAILURE, words);
}

#[test]
fn a_terminal_of_120_columns_shows_all_figures() {
    let told = prints(&[&SMALL[..], &["--policy", "round_robin,cache_aware,fleet_cost"]].concat());
    // The rows of tables; a terminal may break the sentences between them.
    for line in told.lines().filter(|line| line.contains("  ")) {
        assert!(line.chars().count() <= 120, "{line}");
    }
    for figure in ["TTFT mean s", "TPOT mean ms", "cached %", "of at most", "goodput req/s", "preempted"] {
        assert!(told.contains(figure), "{figure}: {told}");
    }
}

fn rows(report: &Value) -> &[Value] {
    report["rows"].as_array().expect("rows")
}

#[test]
fn a_fleet_that_cannot_keep_up_gets_a_remark() {
    let overloaded =
        ["--workload", "chat", "--preset", "llama-3.3-70b@h100x4", "--engines", "1", "--rate", "20x60"];
    let args = [&overloaded[..], &["--policy", "round_robin"]].concat();
    let told = prints(&args);
    assert!(told.contains("Overloaded: requests arrive faster than the fleet serves them"), "{told}");
    assert!(told.contains("  round_robin, rate 20: mean TTFT "), "{told}");
    assert_eq!(rows(&figures(&args))[0]["overload"], "fleet");
    let told = prints(&SMALL);
    assert!(!told.contains("verloaded") && !told.contains("loaded:"), "{told}");
    assert_eq!(rows(&figures(&SMALL))[0]["overload"], Value::Null);
}

#[test]
fn gpus_that_cannot_share_the_heads_of_a_model_are_refused() {
    let uneven = ["--workload", "chat", "--preset", "llama-3.3-70b@h100x3", "--rate", "1x1"];
    fails(
        &uneven,
        FAILURE,
        &["llama-3.3-70b@h100x3", "3 GPUs cannot share 64 attention heads", "1, 2, 4, 8"],
    );
    let uneven =
        ["--workload", "chat", "--model", "llama-3.3-70b", "--gpu", "h100", "--tp", "3", "--rate", "1x1"];
    fails(&uneven, FAILURE, &["3 GPUs cannot share 64 attention heads"]);
}

/// Invariant: The same seeds give the same bytes with any number of threads.
#[test]
fn the_same_seeds_give_the_same_bytes_however_many_threads_there_are() {
    let run = |jobs| prints(&[&SMALL[..], &["--seeds", "3", "--jobs", jobs, "--json"]].concat());
    let one = run("1");
    assert_eq!(one, run("4"));
    assert_eq!(one, run("1"));
}

#[test]
fn a_row_has_its_arm_its_load_and_the_same_figures_published_and_simulated() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ours.yaml");
    let published =
        "published:\n  - {arm: cache_aware, rate: 2, out_tok_s: 100, ttft_mean_s: 0.1, itl_mean_ms: 10}\n";
    let open = SCENARIO.replace(
        "closed_loop: {concurrency: [2], conversations: {total: 4}}",
        "open_loop: {stages: [{rate: 1, seconds: 5}, {rate: 2, seconds: 5}]}",
    );
    std::fs::write(&path, format!("{open}{published}")).expect("written");
    let report = figures(&["--scenario", &path.to_string_lossy()]);
    assert_eq!((&report["schema"], &report["scenario"]), (&"kvlane.simulate/1".into(), &"ours".into()));
    let found: Vec<(&str, f64)> = rows(&report)
        .iter()
        .map(|row| (row["arm"].as_str().expect("a name"), row["rate"].as_f64().expect("a rate")))
        .collect();
    assert_eq!(
        found,
        [("round_robin", 1.0), ("round_robin", 2.0), ("cache_aware", 1.0), ("cache_aware", 2.0)]
    );
    let row = &rows(&report)[3];
    for (figure, published) in [("out_tok_s", 100.0), ("ttft_mean_s", 0.1), ("itl_mean_ms", 10.0)] {
        assert_eq!(row["published"][figure], published, "{figure}");
        let simulated = row["simulated"][figure].as_f64().expect(figure);
        assert!(simulated > 0.0);
        let error = row["error"][figure].as_f64().expect(figure);
        assert!((simulated / published - 1.0 - error).abs() < 1e-9, "{figure}: {error}");
    }
    assert_eq!(rows(&report)[0]["published"], serde_json::json!({}));
}

#[test]
fn open_and_closed_loops_and_factors_on_the_trace_are_all_driven() {
    let fleet = ["--workload", "chat", "--preset", "llama-3.1-8b@h100", "--policy", "least_load"];
    for (flag, given, name, expected) in [
        ("--rate", "1x5,2x5", "rate", [1.0, 2.0]),
        ("--concurrency", "1,3", "concurrency", [1.0, 3.0]),
        ("--load", "0.5,2", "load", [0.5, 2.0]),
    ] {
        let report = figures(&[&fleet[..], &[flag, given]].concat());
        let loads: Vec<f64> = rows(&report).iter().filter_map(|row| row[name].as_f64()).collect();
        assert_eq!(loads, expected, "{flag}");
        for row in rows(&report) {
            assert!(row["simulated"]["answered"].as_f64() > Some(0.0), "{flag}: {row}");
            assert_eq!(row["simulated"]["answered"], row["simulated"]["requests"], "{flag}");
        }
    }
}

#[test]
fn records_of_every_row_become_files_that_are_a_trace_again() {
    let folder = tempfile::tempdir().expect("a folder");
    let records = folder.path().join("records");
    let path = records.display().to_string();
    let fleet = ["--workload", "chat", "--preset", "llama-3.1-8b@h100", "--policy", "least_load,fleet_cost"];
    let report = figures(&[&fleet[..], &["--rate", "1x5,2x5", "--seeds", "2", "--records", &path]].concat());
    let mut names: Vec<String> = std::fs::read_dir(&records)
        .expect("made")
        .map(|entry| entry.expect("readable").file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    let expected = ["fleet_cost-rate-1", "fleet_cost-rate-2", "least_load-rate-1", "least_load-rate-2"];
    assert_eq!(names, expected.map(|name| format!("{name}.jsonl")));
    let file = std::fs::File::open(records.join("fleet_cost-rate-2.jsonl")).expect("a file");
    let found = kvlane_trace::record::read(std::io::BufReader::new(file)).expect("records");
    assert!(found.iter().all(|record| record.is_ok() && record.endpoint.is_some()));
    assert!(found.iter().any(|record| record.after.is_some()), "chats have turns");
    // Figures are means over both seeds, records are of the first.
    let first = figures(&[&fleet[..], &["--rate", "1x5,2x5"]].concat());
    let requests = |report: &Value| rows(report)[3]["simulated"]["requests"].as_f64();
    assert_eq!(requests(&first), Some(found.len() as f64));
    assert_ne!(requests(&first), requests(&report));
    let trace = kvlane_trace::format::open(
        &records.join("fleet_cost-rate-2.jsonl"),
        &kvlane_trace::format::Options::default(),
    );
    let trace = trace.expect("a trace");
    let turns = trace.requests.iter().filter(|request| request.after.is_some()).count();
    assert_eq!(turns, found.iter().filter(|record| record.after.is_some()).count(), "they wait there, too");
}

#[test]
fn closed_loop_clients_begin_apart_and_only_what_follows_their_warm_up_counts() {
    let fleet = ["--workload", "unshared", "--preset", "llama-3.1-8b@h100", "--engines", "1"];
    let closed = |flags: &[&str]| {
        let report =
            figures(&[&fleet[..], &["--policy", "round_robin", "--concurrency", "16"], flags].concat());
        let simulated = rows(&report)[0]["simulated"].clone();
        assert_eq!(simulated["requests"], 160.0, "those that count: {simulated}");
        let figure = |name: &str| simulated[name].as_f64().expect("a figure");
        (figure("ttft_mean_s"), figure("e2e_p90_s") - figure("e2e_p50_s"))
    };
    let (apart, even) = closed(&[]);
    let (together, _) = closed(&["--warm-up", "0", "--stagger-s", "0"]);
    assert!(apart < together / 2.0, "{apart} {together}");
    let (_, varied) = closed(&["--length-spread", "0.5"]);
    assert!(varied > even, "{varied} {even}");
    fails(&[&fleet[..], &["--stagger-s", "1"]].concat(), USAGE, &["--concurrency"]);
}

#[test]
fn the_type_of_keys_and_values_and_the_size_of_blocks_reach_the_engine() {
    // Prompts that fill the cache: twice as many tokens fit in half the bytes.
    let full = [
        "--workload",
        "shared-prefix",
        "--preset",
        "llama-3.3-70b@a100x2",
        "--engines",
        "1",
        "--policy",
        "round_robin",
        "--concurrency",
        "24",
        // All from the beginning: little of it is found again.
        "--warm-up",
        "0",
        "--stagger-s",
        "0",
    ];
    let cached = |args: &[&str]| {
        let report = figures(&[&full[..], args].concat());
        rows(&report)[0]["simulated"]["cached_share"].as_f64().expect("a share")
    };
    let (bf16, fp8) = (cached(&[]), cached(&["--kv-dtype", "fp8"]));
    assert!(fp8 > bf16, "{fp8} {bf16}");
    assert_eq!(bf16, cached(&["--kv-dtype", "bf16"]));
    let coarse = cached(&["--block-tokens", "512"]);
    assert!(coarse < bf16, "{coarse} {bf16}");
}

#[test]
fn tables_go_where_the_figures_do_not() {
    let plain = prints(&SMALL);
    for word in ["TTFT mean s", "round_robin", "cache_aware", "lmetric", "rate 1", "WARM"] {
        assert!(plain.contains(word), "'{word}' is not in: {plain}");
    }
    assert!(!plain.contains("Published"), "nothing was");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("figures.json");
    let beside = prints(&[&SMALL[..], &["--json", &path.to_string_lossy()]].concat());
    assert!(beside.contains("TTFT mean s"));
    let written = std::fs::read_to_string(&path).expect("written");
    assert_eq!(written, prints(&[&SMALL[..], &["--json"]].concat()));
}

#[test]
fn the_report_is_one_page_that_needs_nothing_else() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.html");
    prints(&[&SMALL[..], &["--html", &path.to_string_lossy()]].concat());
    let page = std::fs::read_to_string(&path).expect("written");
    for word in ["<!doctype html>", "<svg", "<style>", "kvlane simulate: chat", "round_robin"] {
        assert!(page.to_lowercase().contains(&word.to_lowercase()), "'{word}' is not in the page");
    }
    for word in ["src=", "stylesheet", "href=\"http", "@import", "url("] {
        assert!(!page.contains(word), "'{word}' is in the page");
    }
}

#[test]
fn the_list_has_every_scenario_with_what_it_is_about() {
    let list = prints(&["--list"]);
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios");
    for entry in std::fs::read_dir(folder).expect("scenarios") {
        let path = entry.expect("a file").path();
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let line = list.lines().find(|line| line.split_whitespace().next() == Some(&name));
        let about =
            line.unwrap_or_else(|| panic!("{name} is not in: {list}")).trim_start_matches(&name).trim();
        assert!(about.len() > 20, "{name}: '{about}'");
    }
}

#[test]
fn a_scenario_finds_the_trace_beside_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut trace = String::from("{\"kvlane_trace\":1,\"block_tokens\":16}\n");
    for n in 0..5 {
        trace.push_str(&format!("{{\"t\":{n},\"in\":100,\"out\":5}}\n"));
    }
    std::fs::write(folder.path().join("ours.jsonl"), trace).expect("written");
    let path = folder.path().join("ours.yaml");
    let workload = "  trace: ours.jsonl\n  load: [1, 2]\n";
    let (head, tail) =
        (SCENARIO.find("  generate").expect("it is"), SCENARIO.find("policies").expect("it is"));
    std::fs::write(&path, format!("{}{workload}{}", &SCENARIO[..head], &SCENARIO[tail..])).expect("written");
    let report = figures(&["--scenario", &path.to_string_lossy()]);
    assert_eq!(rows(&report).len(), 4);
    assert!(rows(&report).iter().all(|row| row["simulated"]["requests"] == 5.0));
}

#[test]
fn flags_that_say_something_wrong_are_named_with_what_to_take() {
    let chat = ["--workload", "chat"];
    let with = |more: &[&'static str]| [&chat[..], more].concat();
    fails(&[], FAILURE, &["--trace", "--workload", "--scenario", "--list"]);
    fails(&["--workload", "nope"], FAILURE, &["--workload nope", "did you mean", "trace generate --kinds"]);
    fails(&with(&["--policy", "nope"]), FAILURE, &["--policy", "'nope'", "did you mean"]);
    fails(&["--scenario", "nope"], FAILURE, &["--scenario nope", "did you mean", "--list"]);
    fails(&with(&["--preset", "gpt@h100"]), FAILURE, &["gpt@h100", "did you mean", "gpt-oss-20b"]);
    let said = text(&run(&[&["simulate"][..], &with(&["--preset", "gpt@h100"])].concat()).stderr);
    assert_eq!(said.matches("did you mean").count(), 1, "once is enough: {said}");
    fails(&with(&["--model", "llama-3.1-8b", "--gpu", "tpu"]), FAILURE, &["llama-3.1-8b@tpu", "h100"]);
    fails(&with(&["--preset", "llama-3.3-70b@a10g"]), FAILURE, &["llama-3.3-70b@a10g"]);
    fails(&with(&["--kv-dtype", "int3"]), FAILURE, &["int3", "bf16", "fp8"]);
    fails(&with(&["--block-tokens", "0"]), FAILURE, &["block_tokens", "between 1 and 65536"]);
    fails(&with(&["--engines", "0"]), FAILURE, &["engines", "between 1 and 65535"]);
    fails(&with(&["--rate", "5"]), USAGE, &["--rate", "5x60"]);
    for rate in ["0x5", "nanx5", "0.1x1", "5x-1"] {
        fails(&with(&["--rate", rate]), FAILURE, &["rate", "at least one conversation"]);
    }
    fails(&with(&["--load", "0"]), FAILURE, &["load", "factors must be"]);
    fails(&with(&["--concurrency", "0"]), FAILURE, &["concurrency", "at least 1"]);
    fails(&with(&["--seeds", "0"]), FAILURE, &["--seeds 0", "at least 1"]);
    fails(&with(&["--jobs", "0"]), FAILURE, &["--jobs 0", "at least 1"]);
    fails(&with(&["--seeds", "4000000000"]), FAILURE, &["16000000000 runs", "fewer"]);
    fails(&with(&["--rate", "1e9x1e9"]), FAILURE, &["arrivals"]);
    fails(&with(&["--cache-knowledge", "some"]), USAGE, &["approximate", "exact"]);
    fails(&with(&["--timing", "/nowhere.json"]), FAILURE, &["timing /nowhere.json", "No such file"]);
    fails(&with(&["--json", "/nowhere/figures.json"]), FAILURE, &["/nowhere/figures.json"]);
    fails(&with(&["--html", "/nowhere/report.html"]), FAILURE, &["/nowhere/report.html"]);
}

#[test]
fn flags_that_exclude_or_need_each_other_say_so() {
    let chat = ["--workload", "chat"];
    let with = |more: &[&'static str]| [&chat[..], more].concat();
    fails(&with(&["--trace", "t.jsonl"]), USAGE, &["--workload", "--trace", "cannot be used"]);
    fails(
        &["--scenario", "seed-001", "--engines", "3"],
        USAGE,
        &["--scenario", "--engines", "cannot be used"],
    );
    fails(&["--scenario", "seed-001", "--rate", "1x5"], USAGE, &["--scenario", "--rate", "cannot be used"]);
    fails(&with(&["--load", "1", "--rate", "5x6"]), USAGE, &["--load", "--rate", "cannot be used"]);
    fails(&with(&["--concurrency", "1", "--rate", "5x6"]), USAGE, &["--concurrency", "cannot be used"]);
    let preset = ["--preset", "llama-3.1-8b@h100"];
    fails(&with(&[&preset[..], &["--tp", "3"]].concat()), USAGE, &["--preset", "--tp", "cannot be used"]);
    fails(&with(&[&preset[..], &["--timing", "t.json"]].concat()), USAGE, &["--timing", "cannot be used"]);
    fails(&with(&["--model", "llama-3.1-8b"]), USAGE, &["--gpu"]);
    fails(&with(&["--tp", "3"]), USAGE, &["--model", "--gpu"]);
}

#[test]
fn a_trace_that_cannot_be_read_is_named_with_its_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("bad.jsonl");
    let path = path.to_string_lossy();
    fails(
        &["--trace", "/nowhere.jsonl"],
        FAILURE,
        &["/nowhere.jsonl", "neither a file", "`mooncake-conversation`"],
    );
    std::fs::write(&*path, "{\"kvlane_trace\":1,\"block_tokens\":16}\n{\"t\":0,\"in\":\"x\",\"out\":1}\n")
        .expect("written");
    fails(&["--trace", &path], FAILURE, &[&path, "line 2"]);
    std::fs::write(&*path, "hello\n").expect("written");
    fails(&["--trace", &path], FAILURE, &[&path, "no known trace format"]);
}

#[test]
fn a_scenario_that_makes_no_sense_is_refused_with_where_and_why() {
    let folder = tempfile::tempdir().expect("a folder");
    let bad = |from: &str, to: &str, words: &[&str]| {
        let scenario = SCENARIO.replace(from, to);
        assert_ne!(scenario, SCENARIO, "{from}");
        file_fails(folder.path(), &scenario, words);
    };
    bad("fleet: {engines: 2", "fleet: {engine: 2", &["bad.yaml", "engine", "line 2", "engines"]);
    bad("preset: llama-3.1-8b@h100", "model: llama-3.1-8b", &["fleet", "preset"]);
    bad("preset:", "memory_share: 0, preset:", &["memory_share"]);
    bad("preset:", "kv_capacity_tokens: 3, preset:", &["holds no block"]);
    bad("preset:", "link: {setup_s: 0, bytes_per_s: 0, slots: 1}, preset:", &["link", "bytes_per_s"]);
    bad("preset:", "cpu_tier: {blocks: 5, bytes_per_s: -1}, preset:", &["cpu_tier", "bytes_per_s"]);
    bad("preset:", "eviction: fifo, preset:", &["fifo", "lru", "line 2"]);
    bad("kind: chat", "kind: chatter", &["chatter", "chat", "line 4"]);
    bad("closed_loop", "load: [1]\n  closed_loop", &["load", "closed_loop"]);
    bad("  generate: {kind: chat}\n", "", &["exactly one of trace and generate"]);
    bad("[round_robin, cache_aware]", "[]", &["policies", "at least one"]);
    bad("[round_robin, cache_aware]", "[robin]", &["robin", "round_robin", "line 6"]);
    bad("[round_robin, cache_aware]", "[random, random]", &["`random`", "`arm`"]);
    bad("round_robin,", "{policy: lmetric, prefill_engines: 2},", &["`lmetric`", "prefill_engines"]);
    bad("round_robin,", "{policy: lmetric, kv_events_lost: 2},", &["`lmetric`", "between 0 and 1"]);
    bad("round_robin,", "{policy: lmetric, routing_delay_s: -1},", &["`lmetric`", "delays"]);
    let and = |more: &str, words: &[&str]| file_fails(folder.path(), &format!("{SCENARIO}{more}\n"), words);
    and("published: [{arm: lmetric, concurrency: 2, req_s: 1}]", &["`lmetric`", "no policy"]);
    and("published: [{arm: cache_aware, concurrency: 3, req_s: 1}]", &["`cache_aware`", "concurrency 3"]);
    and("published: [{arm: cache_aware, rate: 2, req_s: 1}]", &["`cache_aware`", "rate 2"]);
    and("faults: [{death: {at_s: 1, engine: 2}}]", &["faults", "no engine 2"]);
    and("faults: [{death: {at_s: 5, engine: 0, back_at_s: 5}}]", &["faults", "the end after the start"]);
    and("faults: [{slow: {at_s: 5, engine: 0, factor: 0}}]", &["faults", "above 0"]);
    and("faults: [{burn: {at_s: 5}}]", &["burn", "death", "slow"]);
    and("speed: 5", &["speed", "line 7"]);
}

#[test]
fn what_goes_wrong_in_a_scenario_shows_in_its_figures() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ours.yaml");
    let fault =
        "faults:\n  - slow: {at_s: 0, engine: 0, factor: 20}\n  - slow: {at_s: 0, engine: 1, factor: 20}\n";
    let mean_s = |faults: &str| {
        std::fs::write(&path, format!("{SCENARIO}{faults}")).expect("written");
        let report = figures(&["--scenario", &path.to_string_lossy()]);
        rows(&report)[0]["simulated"]["e2e_mean_s"].as_f64().expect("a mean")
    };
    let (sound, slow) = (mean_s(""), mean_s(fault));
    assert!(slow > 10.0 * sound, "{slow} {sound}");
}
