//! `kvlane bench` from the outside: real engines, real gateways, a router that does not start.

use std::process::Output;

use serde_json::Value;

use crate::program::kvlane;

fn bench(dir: &std::path::Path, args: &[&str]) -> Output {
    kvlane(&[&["bench"], args].concat()).current_dir(dir).output().expect("it starts")
}

const MATRIX: &str = r#"
about: A small one.
fleet:
  engines: 2
  command: "{kvlane} mock-engine --port {port} --seed {index} --speed {speed} --log-level warn"
workload:
  generate: {kind: shared-prefix, groups: 3, prompts_per_group: 4, system_prompt_tokens: 1024, question_tokens: 32, output_tokens: 4}
  window_s: 20
  speed: 20
loads: {rate: [1]}
seeds: [1, 2]
routers:
  - kvlane
  - {router: turns, like: kvlane, policies: [round_robin]}
  - {router: broken, command: "{kvlane} no-such-command --port {port}"}
warm_up: {requests: 4}
# How busy this machine is does not matter here.
client: {lag_p99_max_s: 1000, cpu_share_max: 1000}
"#;

#[test]
fn policies_are_compared_and_a_router_that_does_not_start_costs_the_others_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("bench.yaml"), MATRIX).expect("written");
    let args = ["bench.yaml", "--records", "runs", "--json", "-", "--html", "report.html"];
    let output = bench(dir.path(), &args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "one router is broken: {said}");
    let report: Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"));
    assert_eq!(report["schema"], "kvlane.bench/1");
    let runs = report["runs"].as_array().expect("runs");
    assert_eq!(runs.len(), 6);
    for run in runs {
        let broken = run["router"] == "broken";
        assert_eq!(run["failure"].is_string(), broken, "{run}");
        assert!(!broken || run["failure"].as_str().unwrap().contains("no-such-command"), "{run}");
    }
    let cell = |router: &str| {
        let cells = report["cells"].as_array().expect("cells");
        cells.iter().find(|cell| cell["router"] == router).expect("a cell")
    };
    for router in ["kvlane", "turns"] {
        let figures = &cell(router)["figures"];
        assert_eq!((&cell(router)["runs"], &figures["failed_share"]["value"]), (&2.into(), &0.0.into()));
        assert!(figures["ttft_mean_s"]["interval"]["high"].is_number(), "{figures}");
    }
    let cached = |router: &str| cell(router)["figures"]["cached_share"]["value"].as_f64().expect("a share");
    assert!(cached("kvlane") > 0.3 && cached("turns") > 0.1, "{} {}", cached("kvlane"), cached("turns"));
    let verdict = report["verdict"].as_str().expect("a verdict");
    assert!(verdict.contains("turns") && verdict.contains(" the same load"), "{verdict}");
    assert!(said.contains(verdict), "{said}");
    let page = std::fs::read_to_string(dir.path().join("report.html")).expect("a report");
    assert!(page.contains(verdict) && page.contains("kvlane bench bench.yaml --records runs"), "{page}");
    assert!(page.contains("generated, of the kind shared-prefix") && page.contains("At one load"), "{page}");
    assert!(page.contains("A small one") && page.contains("was discarded"), "{page}");
    assert!(dir.path().join("runs/turns-load1-seed2.jsonl").exists());
    // What is kept is not run again: only the broken one is tried.
    let again = bench(dir.path(), &["bench.yaml", "--records", "runs", "--json", "again.json"]);
    let told = String::from_utf8_lossy(&again.stderr);
    assert!(told.contains("broken") && !told.contains("kvlane load"), "{told}");
    let table = String::from_utf8_lossy(&again.stdout);
    assert!(table.contains("kvlane against each of the others"), "{table}");
}

#[test]
fn parts_of_a_bench_are_the_whole_bench() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("bench.yaml"), MATRIX).expect("written");
    let args = ["bench.yaml", "--routers", "kvlane,turns", "--records", "runs", "--json", "-"];
    let runs = |more: &[&str]| {
        let output = bench(dir.path(), &[&args[..], more].concat());
        assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let whole = runs(&[]);
    // The runs are kept: their parts are those of the whole. Both routers of a seed are in one part.
    for (part, seed) in [("1/2", "\"seed\":1"), ("2/2", "\"seed\":2")] {
        let file = format!("{}.jsonl", &part[..1]);
        assert_eq!(runs(&["--part", part, "--part-file", &file]), "");
        let text = std::fs::read_to_string(dir.path().join(&file)).expect("written");
        assert_eq!(
            (text.lines().count(), text.matches("\"router\":\"kvlane\",\"load\"").count()),
            (2, 1),
            "{seed}"
        );
    }
    assert_eq!(runs(&["--merge", "2.jsonl", "1.jsonl"]), whole);
}

#[test]
fn a_plan_runs_nothing_and_what_makes_no_sense_is_told_before_anything_runs() {
    let dir = tempfile::tempdir().expect("a directory");
    let write = |text: &str| std::fs::write(dir.path().join("bench.yaml"), text).expect("written");
    write(MATRIX);
    let plan = bench(dir.path(), &["bench.yaml", "--plan", "--routers", "kvlane,turns"]);
    let told = String::from_utf8_lossy(&plan.stdout);
    assert_eq!((plan.status.code(), told.lines().count()), (Some(0), 4), "{told}");
    for (from, to, expect) in [
        ("rate: [1]", "rate: [0]", "bench.yaml: loads.rate: 0"),
        ("seeds:", "sedes:", "sedes"),
        (
            "generate: {kind: shared-prefix, groups: 3, prompts_per_group: 4, system_prompt_tokens: 1024, question_tokens: 32, output_tokens: 4}",
            "trace: mooncake",
            "bench.yaml: workload.trace mooncake: neither a file nor the name of a trace that comes with kvlane: use `mooncake-conversation`",
        ),
        ("round_robin", "{policies", "bench.yaml"),
    ] {
        write(&MATRIX.replace(from, to));
        let output = bench(dir.path(), &["bench.yaml"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(1) && said.contains(expect), "{expect}: {said}");
    }
    let output = bench(dir.path(), &["bench.yaml", "--routers", "nobody"]);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn the_example_and_the_list_are_printed() {
    let dir = tempfile::tempdir().expect("a directory");
    let example = bench(dir.path(), &["--example"]);
    std::fs::write(dir.path().join("bench.yaml"), &example.stdout).expect("written");
    let plan = bench(dir.path(), &["bench.yaml", "--plan"]);
    assert_eq!(plan.status.code(), Some(0), "{}", String::from_utf8_lossy(&plan.stderr));
    let list = String::from_utf8(bench(dir.path(), &["--list"]).stdout).expect("UTF-8");
    assert!(
        ["sglang-router\n", "vllm-router\n", "nginx\n", "haproxy\n"].iter().all(|name| list.contains(name)),
        "{list}"
    );
}
