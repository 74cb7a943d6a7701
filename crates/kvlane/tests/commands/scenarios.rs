//! What was published of real fleets, held as a regression test: each scenario that comes with kvlane is run as a user runs
//! it, and its figures stay as near to the published ones as docs/simulator.md says.
//!
//! Tolerances are what the model reaches, not what a change may cost: a figure that leaves its range is a finding.

use serde_json::Value;

use crate::program::succeeds;

/// One row of the figures.
#[derive(Clone, Debug)]
struct Row {
    arm: String,
    load: Option<f64>,
    published: Value,
    simulated: Value,
}

// === impl Row ===

impl Row {
    #[track_caller]
    fn published(&self, figure: &str) -> f64 {
        number(&self.published, figure, self)
    }

    #[track_caller]
    fn simulated(&self, figure: &str) -> f64 {
        number(&self.simulated, figure, self)
    }

    /// Simulated over published, less one.
    #[track_caller]
    fn error(&self, figure: &str) -> f64 {
        self.simulated(figure) / self.published(figure) - 1.0
    }

    fn is(&self, arm: &str, load: f64) -> bool {
        self.arm == arm && self.load == Some(load)
    }
}

#[track_caller]
fn number(figures: &Value, figure: &str, row: &Row) -> f64 {
    figures[figure].as_f64().unwrap_or_else(|| panic!("no {figure} in {row:?}"))
}

/// The rows of a scenario; `load` is what its loads are called.
fn simulate(scenario: &str, load: &str) -> Vec<Row> {
    simulate_file(scenario, scenario, load)
}

/// The same of a file with a scenario of that name.
fn simulate_file(file: &str, scenario: &str, load: &str) -> Vec<Row> {
    let (printed, _) = succeeds(&["simulate", "--scenario", file, "--json", "--jobs", "2"]);
    let report: Value = serde_json::from_str(&printed).expect("JSON");
    assert_eq!((&report["schema"], &report["scenario"]), (&"kvlane.simulate/1".into(), &scenario.into()));
    let row = |row: &Value| Row {
        arm: row["arm"].as_str().expect("a name").to_owned(),
        load: row[load].as_f64(),
        published: row["published"].clone(),
        simulated: row["simulated"].clone(),
    };
    let rows: Vec<Row> = report["rows"].as_array().expect("rows").iter().map(row).collect();
    assert!(!rows.is_empty());
    rows
}

/// A scenario that comes with kvlane, with only these arms and with parts of its text replaced: shorter.
#[track_caller]
fn simulate_some(scenario: &str, arms: &[&str], replaced: &[(&str, &str)]) -> Vec<Row> {
    let file = format!("{}/../../scenarios/{scenario}.yaml", env!("CARGO_MANIFEST_DIR"));
    let mut text = std::fs::read_to_string(&file).expect("it comes with kvlane");
    for (from, to) in replaced {
        assert!(text.contains(from), "{scenario} has no {from}");
        text = text.replace(from, to);
    }
    let is_kept = |line: &&str| {
        let is_arm = line.trim_start().starts_with("- {arm:");
        !is_arm
            || arms.iter().any(|arm| {
                [format!("arm: {arm},"), format!("arm: \"{arm}\",")].iter().any(|named| line.contains(named))
            })
    };
    let text: Vec<&str> = text.lines().filter(is_kept).collect();
    let dir = tempfile::tempdir().expect("a directory");
    let short = dir.path().join("short.yaml");
    std::fs::write(&short, text.join("\n")).expect("a file");
    let rows = simulate_file(short.to_str().expect("UTF-8"), scenario, "load");
    assert_eq!(rows.len(), arms.len(), "{rows:?}");
    rows
}

/// The row of an arm at a load.
#[track_caller]
fn at<'a>(rows: &'a [Row], arm: &str, load: f64) -> &'a Row {
    rows.iter().find(|row| row.is(arm, load)).unwrap_or_else(|| panic!("{arm} at {load} was not simulated"))
}

/// All that is out of its range at once, so that one run shows how a change moves the whole table.
#[derive(Default)]
struct Findings(Vec<String>);

// === impl Findings ===

impl Findings {
    fn check(&mut self, holds: bool, finding: String) {
        if !holds {
            self.0.push(finding);
        }
    }

    /// The figure is within `share` of what was published.
    #[track_caller]
    fn within(&mut self, row: &Row, figure: &str, share: f64) {
        let error = row.error(figure);
        self.check(
            error.abs() <= share,
            format!("{} {:?} {figure} {:+.1} %", row.arm, row.load, error * 100.0),
        );
    }

    /// The share is within `points` of what was published.
    #[track_caller]
    fn within_points(&mut self, row: &Row, figure: &str, points: f64) {
        let off = (row.simulated(figure) - row.published(figure)) * 100.0;
        self.check(off.abs() <= points, format!("{} {:?} {figure} {off:+.1} points", row.arm, row.load));
    }

    #[track_caller]
    fn none(self) {
        assert!(self.0.is_empty(), "out of range:\n{}", self.0.join("\n"));
    }
}

/// Invariant: Every scenario stays as close to its published figures as the documents state.
///
/// Also held by `a_router_that_knows_prefixes_slows_least_with_sessions_and_random_placement_most`,
/// `sglangs_balancer_finds_three_quarters_of_the_prompts_and_round_robin_a_fifth`,
/// `engines_that_do_both_beat_engines_that_prefill_for_others`,
/// `mooncakes_four_ways_to_place_a_prompt_are_as_far_apart_as_published`, `cold_prompts_take_as_long_as_measured`,
/// `every_scenario_that_comes_with_kvlane_is_held_here`.
#[test]
fn llm_ds_ladder_of_rates_is_climbed_as_it_was() {
    let rows = simulate("seed-001", "rate");
    let mut findings = Findings::default();
    let rates: Vec<f64> = rows.iter().filter(|row| row.arm == "precise").filter_map(|row| row.load).collect();
    assert_eq!(rates.len(), 16);
    for &rate in &rates {
        let (precise, service) = (at(&rows, "precise", rate), at(&rows, "k8s_service", rate));
        findings.within(precise, "out_tok_s", 0.08);
        findings.within(service, "out_tok_s", 0.20);
        let off_s = precise.simulated("ttft_mean_s") - precise.published("ttft_mean_s");
        let near = precise.error("ttft_mean_s").abs() <= 0.40 || off_s.abs() <= 0.1;
        findings.check(near, format!("precise {rate} ttft_mean_s {off_s:+.3} s"));
        let ratio = precise.simulated("out_tok_s") / service.simulated("out_tok_s");
        findings.check(rate < 30.0 || ratio >= 2.0, format!("at {rate} precise is {ratio:.2} times as fast"));
    }
    let whole =
        |arm: &str| rows.iter().find(|row| row.arm == arm && row.load.is_none()).expect("it was published");
    findings.within(whole("precise"), "out_tok_s", 0.08);
    findings.within(whole("k8s_service"), "out_tok_s", 0.08);
    // Published times of an arm are means over its requests: those to the first token are, by the published rows. Read so
    // the precise arm's 47.0 ms are missed by 8.8 %; as a mean over the rates they are met.
    findings.within(whole("precise"), "itl_mean_ms", 0.10);
    let itl_ms: Vec<f64> =
        rates.iter().map(|&rate| at(&rows, "precise", rate).simulated("itl_mean_ms")).collect();
    let over_rates = itl_ms.iter().sum::<f64>() / 16.0 / 47.0 - 1.0;
    findings.check(over_rates.abs() <= 0.08, format!("precise itl_mean_ms over the rates {over_rates:+.3}"));
    findings.within(whole("k8s_service"), "itl_mean_ms", 0.08);
    let knee = |figures: fn(&Row, &str) -> f64| {
        rates.iter().copied().find(|&rate| figures(at(&rows, "k8s_service", rate), "ttft_mean_s") > 5.0)
    };
    let knees = (knee(Row::published), knee(Row::simulated));
    findings.check(knees == (Some(20.0), Some(20.0)), format!("knees, published and simulated: {knees:?}"));
    findings.none();
}

#[test]
fn a_router_that_knows_prefixes_slows_least_with_sessions_and_random_placement_most() {
    for (scenario, median_share) in [("seed-000-7b", 0.25), ("seed-000-14b", 0.16)] {
        let rows = simulate(scenario, "concurrency");
        let mut findings = Findings::default();
        let published: Vec<&Row> =
            rows.iter().filter(|row| row.published["cached_share"].is_number()).collect();
        assert!(published.len() >= 16, "{scenario}");
        for row in published {
            findings.within_points(row, "cached_share", 2.5);
            findings.within(row, "e2e_p50_s", median_share);
        }
        let arms = ["prefix_aware", "round_robin", "least_load", "random"];
        let slopes = |figure: fn(&Row, &str) -> f64| {
            arms.map(|arm| {
                figure(at(&rows, arm, 24.0), "e2e_p50_s") - figure(at(&rows, arm, 4.0), "e2e_p50_s")
            })
        };
        let (published, simulated) = (slopes(Row::published), slopes(Row::simulated));
        assert!(published.is_sorted(), "{published:?}");
        findings.check(simulated.is_sorted(), format!("{scenario}: slopes {simulated:?} s"));
        for arm in arms {
            findings.within(at(&rows, arm, 24.0), "req_s", 0.10);
        }
        findings.none();
    }
}

/// Requests/s and hit rates are not met: docs/simulator.md.
#[test]
fn on_one_laptop_the_least_loaded_server_answers_soonest_and_the_longest_prefix_is_found_most() {
    let rows = simulate("seed-000-m1", "concurrency");
    let mut findings = Findings::default();
    for row in rows.iter().filter(|row| row.load.is_some()) {
        findings.within(row, "e2e_p50_s", 0.30);
    }
    for figures in [Row::published as fn(&Row, &str) -> f64, Row::simulated] {
        let extreme = |figure: &str, sign: f64| {
            let of = |arm: &&str| sign * figures(at(&rows, arm, 6.0), figure);
            ["random", "round_robin", "least_load", "prefix_aware"]
                .into_iter()
                .max_by(|a, b| of(a).total_cmp(&of(b)))
        };
        let found = [
            extreme("e2e_p50_s", -1.0),
            extreme("e2e_p50_s", 1.0),
            extreme("cached_share", 1.0),
            extreme("cached_share", -1.0),
        ];
        let expected = ["least_load", "prefix_aware", "prefix_aware", "round_robin"].map(Some);
        findings.check(found == expected, format!("soonest, last, most and least found: {found:?}"));
    }
    findings.none();
}

#[test]
fn sglangs_balancer_finds_three_quarters_of_the_prompts_and_round_robin_a_fifth() {
    let rows = simulate("seed-002", "concurrency");
    let mut findings = Findings::default();
    rows.iter().for_each(|row| findings.within_points(row, "cached_share", 6.0));
    let out = |arm: &str| at(&rows, arm, 64.0).simulated("out_tok_s");
    let (cache_aware, round_robin) = (out("cache_aware"), out("round_robin"));
    findings.check(cache_aware > round_robin, format!("{cache_aware:.0} and {round_robin:.0} tokens/s"));
    findings.none();
}

/// What the study of coding agents measured is held by kvlane-lab's `tests/seed_004.rs`.
#[test]
fn the_study_of_coding_agents_is_simulated_by_name() {
    for (scenario, rows) in
        [("seed-004", 4), ("seed-004-tp2", 1), ("seed-004-elastic", 15), ("seed-004-cache", 4)]
    {
        assert_eq!(simulate(scenario, "rate").len(), rows, "{scenario}");
    }
}

#[test]
fn mooncakes_four_ways_to_place_a_prompt_are_as_far_apart_as_published() {
    let rows = simulate("mooncake-fig5", "load");
    let of = |arm: &str, figures: fn(&Row, &str) -> f64| figures(at(&rows, arm, 1.0), "ttft_mean_s");
    let arms = ["random", "load_balance", "local_cache_aware", "global_cache_aware"];
    let simulated = arms.map(|arm| of(arm, Row::simulated));
    assert!(simulated.is_sorted_by(|a, b| a > b), "{simulated:?}");
    let mut findings = Findings::default();
    for arm in &arms[..3] {
        let ratio = |figures| of(arm, figures) / of("global_cache_aware", figures);
        let (published, simulated) = (ratio(Row::published), ratio(Row::simulated));
        let told = format!("{arm}: {simulated:.2} times the global arm's, published {published:.2}");
        findings.check((simulated / published - 1.0).abs() <= 0.20, told);
    }
    findings.none();
}

/// The published gain of the mean, 12 %, is not met: docs/simulator.md says why it may be chance.
#[test]
fn balancing_tokens_shortens_the_wait_of_light_requests_among_heavy_ones() {
    let rows = simulate("seed-003", "concurrency");
    let change = |figure: &str| {
        let of = |arm: &str| at(&rows, arm, 30.0).simulated(figure);
        of("token_aware") / of("round_robin") - 1.0
    };
    let (mean, p90) = (change("e2e_mean_s"), change("e2e_p90_s"));
    assert!(mean < -0.02 && p90 < -0.10, "{mean:+.3} {p90:+.3}");
}

/// NVIDIA's tables of a closed loop, to which one efficiency of five values is fitted: the bounds are the errors that
/// docs/simulator.md states.
#[test]
fn a_closed_loop_of_clients_is_served_about_as_fast_as_published() {
    let mut findings = Findings::default();
    for (scenario, rate, gap, first) in
        [("nim-70b", 0.19, 0.16, 1.05), ("nim-70b-long-answers", 0.16, 0.14, 0.6)]
    {
        let rows = simulate(scenario, "concurrency");
        for row in rows.iter().filter(|row| row.load.is_some()) {
            findings.within(row, "out_tok_s", rate);
            findings.within(row, "itl_mean_ms", gap);
            findings.within(row, "ttft_mean_s", first);
        }
    }
    findings.none();
}

#[test]
fn cold_prompts_take_as_long_as_measured() {
    let mut findings = Findings::default();
    for scenario in ["prefill-qwen3-32b", "prefill-gpt-oss-120b"] {
        simulate(scenario, "concurrency").iter().for_each(|row| findings.within(row, "ttft_p50_s", 0.12));
    }
    findings.none();
}

/// Mean time to first token and cached share of an arm over those of the arm `one`.
fn beside_one(rows: &[Row], arm: &str, one: &str) -> (f64, f64) {
    let of =
        |arm: &str| rows.iter().find(|row| row.arm == arm).unwrap_or_else(|| panic!("no {arm} in {rows:?}"));
    let ratio = |figure| of(arm).simulated(figure) / of(one).simulated(figure);
    (ratio("ttft_mean_s"), ratio("cached_share"))
}

#[test]
fn gateways_that_tell_each_other_place_more_like_one_than_those_that_do_not() {
    let shorter: [(&str, &[(&str, &str)]); 3] = [
        (
            "replicas-240",
            &[
                ("seconds: 5}", "seconds: 1}"),
                ("seconds: 3}", "seconds: 1}"),
                ("think_s: {min: 0.5, max: 2}", "think_s: {min: 0.3, max: 0.5}"),
            ],
        ),
        ("replicas-1000", &[("engines: 1000", "engines: 250"), ("rate: 2546", "rate: 636")]),
        (
            "replicas-mooncake",
            &[(
                "trace: mooncake-conversation, load: [0.5]",
                "generate: {kind: chat}, open_loop: {stages: [{rate: 4, seconds: 20}]}",
            )],
        ),
    ];
    for (scenario, replaced) in shorter {
        let many = if scenario == "replicas-1000" { "16" } else { "8" };
        let (together, apart) = (format!("{many} together"), format!("{many} apart"));
        let rows = simulate_some(scenario, &["one", &together, &apart], replaced);
        let (together, apart) = (beside_one(&rows, &together, "one"), beside_one(&rows, &apart, "one"));
        assert!(together.1 > apart.1 + 0.2, "{scenario}: cached {together:?} and {apart:?} of one");
        // 16 gateways hear each other too late to be sooner: docs/scale.md.
        let is_sooner = together.0 < apart.0;
        assert!(is_sooner || many == "16", "{scenario}: TTFT {together:?} and {apart:?} of one");
    }
}

#[test]
fn a_partition_of_gateways_loses_only_what_the_dead_one_had_begun() {
    let rows = simulate("replicas-partition", "rate");
    let failed = |arm: &str| at(&rows, arm, 30.0).simulated("failed_share");
    assert_eq!(failed("one"), 0.0);
    assert!(failed("four") > 0.0 && failed("four") < 0.01, "{}", failed("four"));
    let ratio = |figure| {
        let of = |arm: &str| at(&rows, arm, 30.0).simulated(figure);
        of("four") / of("four that tell nothing")
    };
    assert!(ratio("ttft_mean_s") < 0.95 && ratio("cached_share") > 1.05, "{rows:?}");
}

#[test]
fn cells_with_a_sketch_find_what_cells_in_turns_do_not() {
    let shorter = [("seconds: 20}", "seconds: 2}")];
    let rows = simulate_some("cells", &["one fleet", "cells, sketch", "cells, in turns"], &shorter);
    let (sketch, turns) =
        (beside_one(&rows, "cells, sketch", "one fleet"), beside_one(&rows, "cells, in turns", "one fleet"));
    assert!(sketch.1 > turns.1 + 0.1, "cached {sketch:?} and {turns:?} of one fleet");
}

/// Nothing is published of cells: docs/scale.md has their figures.
#[test]
fn a_sketch_of_each_cell_is_as_good_as_one_fleet_where_conversations_do_not_tell_what_is_shared() {
    let rows = simulate("cells-documents", "rate");
    let of = |arm: &str, figure: &str| at(&rows, arm, 100.0).simulated(figure);
    let mut findings = Findings::default();
    let (one, sketch) = (of("one fleet", "cached_share"), of("cells, sketch", "cached_share"));
    findings.check(sketch >= 0.98 * one, format!("a sketch: {sketch:.3} cached, one fleet {one:.3}"));
    let (one, sketch) = (of("one fleet", "ttft_mean_s"), of("cells, sketch", "ttft_mean_s"));
    findings.check(sketch <= one / 0.95, format!("a sketch: {sketch:.4} s, one fleet {one:.4} s"));
    for arm in ["cells, no sketch", "cells, by conversation", "cells, in turns"] {
        let cached = of(arm, "cached_share");
        findings.check(cached < 0.7, format!("{arm}: {cached:.3} cached"));
    }
    let false_share = of("cells, sketch", "false_hit_share");
    findings.check(false_share < 0.06, format!("{false_share:.3} of lookups find too much"));
    findings.none();
}

/// Nothing is published of adapters: docs/placement.md has their figures.
#[test]
fn adapters_are_loaded_seldom_and_where_first_tokens_come_soonest() {
    let stages = "{rate: 20, seconds: 100}, {rate: 40, seconds: 100}, {rate: 80, seconds: 100}, {rate: 120, seconds: 100}";
    let shorter = [(stages, "{rate: 40, seconds: 100}"), ("seeds: 3", "seeds: 1")];
    let arms = ["round_robin", "llm_d_lora", "prefer_loaded", "fleet_cost"];
    let rows = simulate_some("adapters", &arms, &shorter);
    let of = |arm: &str, figure: &str| {
        rows.iter().find(|row| row.arm == arm).expect("it was simulated").simulated(figure)
    };
    let mut findings = Findings::default();
    let [loads, in_turns] = ["fleet_cost", "round_robin"].map(|arm| of(arm, "adapter_loads"));
    findings.check(loads <= in_turns / 5.0, format!("{loads} loads, in turns {in_turns}"));
    let [first_s, preferring_s] = ["fleet_cost", "prefer_loaded"].map(|arm| of(arm, "ttft_mean_s"));
    findings.check(
        first_s <= preferring_s,
        format!("{first_s} s, where loaded ones are preferred {preferring_s}"),
    );
    findings.none();
}

/// A scenario that is not named above would not be tested.
#[test]
fn every_scenario_that_comes_with_kvlane_is_held_here() {
    let (listed, _) = succeeds(&["simulate", "--list"]);
    let names: Vec<&str> = listed.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert!(names.len() >= 8, "{listed}");
    for name in names {
        assert!(include_str!("scenarios.rs").contains(&format!("\"{name}\"")), "no test runs {name}");
    }
}
