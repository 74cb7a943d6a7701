//! Invalid scenarios are rejected or end, and traces of any length are simulated correctly.

use kvlane_lab::scenario::{Aside, Row, RunError, Scenario, run};
use kvlane_trace::format::{self, Options};
use serde_json::{Value, json};

/// Runs a scenario of one engine whose keys are replaced by those of `changed`; its trace is `trace`.
fn simulate(changed: Value, trace: &str) -> Result<Vec<Row>, RunError> {
    let mut scenario = json!({
        "scenario": "absurd",
        "fleet": {"preset": "llama-3.1-8b@h100"},
        "workload": {"trace": "trace"},
        "policies": ["round_robin"],
    });
    for (key, value) in changed.as_object().expect("keys") {
        scenario[key] = value.clone();
    }
    let scenario: Scenario = serde_json::from_value(scenario).expect("a scenario");
    let open = |_: &std::path::Path| format::read(trace.as_bytes(), &Options::default());
    run(&scenario, std::path::Path::new(""), &open, 1, Aside::default(), &|_, _| {})
}

fn trace(first_s: f64) -> String {
    let header = r#"{"kvlane_trace":1,"block_tokens":512}"#;
    let request = |at_s: f64| format!(r#"{{"t":{at_s},"in":1000,"out":5}}"#);
    let again = |at_s: f64| format!(r#"{{"t":{at_s},"in":1000,"out":5,"base":0,"shared":2}}"#);
    [header.to_owned(), request(first_s), again(first_s + 1.0), again(first_s + 2.0)].join("\n")
}

#[test]
fn what_would_never_end_or_fit_is_refused() {
    let engine = "llama-3.1-8b@h100";
    for (changed, expect) in [
        (json!({"fleet": {"preset": engine, "link": {"setup_s": 0, "bytes_per_s": 0, "slots": 1}}}), "link"),
        (
            json!({"fleet": {"preset": engine, "link": {"setup_s": -1, "bytes_per_s": 1e9, "slots": 1}}}),
            "link",
        ),
        (json!({"fleet": {"preset": engine, "cpu_tier": {"blocks": 9, "bytes_per_s": 0}}}), "cpu_tier"),
        (json!({"fleet": {"preset": engine, "cpu_tier": {"blocks": u32::MAX}}}), "blocks"),
        (json!({"fleet": {"preset": engine, "block_tokens": 1, "kv_capacity_tokens": u64::MAX}}), "blocks"),
        (json!({"fleet": {"preset": engine, "engines": 65_535}}), "blocks"),
        (json!({"fleet": {"preset": engine, "max_num_seqs": 0}}), "max_num_seqs"),
        (json!({"faults": [{"slow": {"at_s": 0, "engine": 0, "factor": 1e300}}]}), "factor"),
        (json!({"policies": [{"policy": "random", "report_interval_s": 1e-9}]}), "report_interval_s"),
        (json!({"policies": [{"policy": "random", "exchange_interval_s": 0}]}), "exchange_interval_s"),
        (json!({"policies": [{"policy": "random", "exchange_lost": 2}]}), "exchange_lost"),
        (json!({"policies": [{"policy": "random", "gateways": 0}]}), "gateways"),
        (json!({"policies": [{"policy": "random", "cells": 0}]}), "`cells` must be at least 1"),
        (json!({"policies": [{"policy": "random", "cells": 60_000}]}), "at most the number of engines"),
        (json!({"policies": [{"policy": "random", "sketch_bits": 65}]}), "sketch_bits"),
        (json!({"policies": [{"policy": "random", "sketch_interval_s": 0}]}), "sketch_interval_s"),
        (json!({"policies": [{"policy": "random", "cell_load_interval_s": 0}]}), "cell_load_interval_s"),
        (json!({"judgement": {"slo_ttft_s": -1}}), "judgement"),
        (json!({"judgement": {"medium_from_tokens": 10, "heavy_from_tokens": 1}}), "judgement"),
    ] {
        let why = simulate(changed.clone(), &trace(0.0)).expect_err("refused").to_string();
        assert!(why.contains(expect), "{changed}: {why}");
    }
}

#[test]
fn times_that_the_clock_cannot_count_are_refused() {
    let why = simulate(json!({}), &trace(9e14)).expect_err("refused").to_string();
    assert!(why.contains("cannot be simulated"), "{why}");
}

/// No load reports are sent while the fleet is idle: otherwise this would take a report for each second of three
/// weeks.
#[test]
fn a_world_with_nothing_to_do_for_weeks_is_over_at_once() {
    let rows = simulate(json!({"workload": {"trace": "trace", "load": [1e-6]}}), &trace(0.0)).expect("rows");
    assert_eq!(rows[0].simulated["answered"], 3.0);
    assert!(rows[0].simulated["req_s"] < 1e-5);
}

#[test]
fn a_trace_that_begins_late_has_the_rates_of_one_that_begins_at_once() {
    let rates = |first_s| {
        let rows = simulate(json!({}), &trace(first_s)).expect("rows");
        ["out_tok_s", "req_s", "goodput_req_s", "busy_share"].map(|name| rows[0].simulated[name])
    };
    let (early, late) = (rates(0.0), rates(100_000.0));
    for (early, late) in early.into_iter().zip(late) {
        assert!((late / early - 1.0).abs() < 1e-6, "{early} {late}");
    }
}

/// 1,000 tokens are two started blocks of the trace, of which one is full, and 62 blocks of 16.
#[test]
fn the_bound_on_hits_counts_the_engines_blocks() {
    let rows = simulate(json!({}), &trace(0.0)).expect("rows");
    let share = |name: &str| rows[0].simulated[name];
    assert!(share("cached_share") > 0.66 && share("cached_share") <= share("reusable_share"));
    assert!((share("reusable_share") - 2.0 * 992.0 / 3000.0).abs() < 1e-9);
}
