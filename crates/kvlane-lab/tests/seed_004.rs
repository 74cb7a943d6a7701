//! A study of disaggregation for coding agents, as scenarios: its comparisons come out in its order, and as near to its
//! figures as docs/simulator.md says.

use std::path::Path;

use kvlane_lab::scenario::{Aside, Cell, Row, Scenario, run};
use kvlane_trace::TraceError;

/// The rows of a scenario that comes with kvlane.
fn simulate(text: &str) -> Vec<Row> {
    let scenario: Scenario = serde_saphyr::from_str(text).expect("a scenario");
    let no_trace = |_: &Path| Err(TraceError::Empty);
    run(&scenario, Path::new(""), &no_trace, 2, Aside::default(), &|_, _| {}).expect("it runs")
}

#[track_caller]
fn at<'a>(rows: &'a [Row], arm: &str, rate: f64) -> &'a Row {
    let is = |row: &&Row| row.arm == arm && row.cell == Cell::Rate(rate);
    rows.iter().find(is).unwrap_or_else(|| panic!("{arm} at {rate} was not simulated"))
}

/// Simulated over published, less one.
fn error(row: &Row, figure: &str) -> f64 {
    row.simulated[figure] / row.published[figure] - 1.0
}

#[track_caller]
fn within(row: &Row, figure: &str, share: f64) {
    let error = error(row, figure);
    assert!(error.abs() <= share, "{} {figure} {:+.1} %", row.arm, error * 100.0);
}

#[test]
fn a_full_cache_loses_least_with_lru() {
    let rows = simulate(include_str!("../../../scenarios/seed-004-cache.yaml"));
    let arms = ["infinite", "lru", "session_lru", "lfu"];
    let share = |arm: &str| at(&rows, arm, 0.5).simulated["cached_share"];
    // Which of the last two is lower depends on the seed: docs/simulator.md.
    let [infinite, lru, session_lru, lfu] = arms.map(share);
    assert!(infinite > lru && lru > session_lru.max(lfu) + 0.01, "{:?}", arms.map(share));
    for (arm, points) in arms.into_iter().zip([1.0, 1.0, 3.0, 5.0]) {
        let off = 100.0 * (share(arm) - at(&rows, arm, 0.5).published["cached_share"]);
        assert!(off.abs() <= points, "{arm}: {off:+.1} points");
    }
}

#[test]
fn engines_that_do_both_beat_engines_that_prefill_for_others() {
    let rows = simulate(include_str!("../../../scenarios/seed-004.yaml"));
    let combined = at(&rows, "combined", 0.3);
    let ttft_s = ["combined", "6P2D", "4P4D"].map(|arm| at(&rows, arm, 0.3).simulated["ttft_p50_s"]);
    assert!(ttft_s.is_sorted_by(|a, b| a < b), "{ttft_s:?}");
    for (arm, share) in [("6P2D", 0.15), ("4P4D", 0.30)] {
        let row = at(&rows, arm, 0.3);
        let times = |of: fn(&Row) -> f64| of(row) / of(combined);
        let simulated = times(|row| row.simulated["ttft_p50_s"]);
        let published = times(|row| row.published["ttft_p50_s"]);
        assert!((simulated / published - 1.0).abs() <= share, "{arm}: {simulated:.2} for {published:.2}");
    }
    within(combined, "ttft_p50_s", 0.80);
    within(combined, "ttft_p90_s", 0.15);
    within(combined, "e2e_p50_s", 0.40);
    within(combined, "cached_share", 0.05);
    // Decoding apart makes it no faster.
    let apart = at(&rows, "4P4D", 0.3).simulated["tpot_p90_ms"] / combined.simulated["tpot_p90_ms"];
    assert!(apart > 0.9, "{apart:.2}");

    let halved = simulate(include_str!("../../../scenarios/seed-004-tp2.yaml"));
    for (figure, published) in [("ttft_p50_s", 0.57), ("tpot_p90_ms", 1.51)] {
        let times = at(&halved, "combined", 0.3).simulated[figure] / combined.simulated[figure];
        assert!((times - published).abs() <= 0.15, "{figure}: {times:.2} for {published}");
    }
}

const FIGURES: [&str; 4] = ["ttft_p50_s", "ttft_p90_s", "tpot_p90_ms", "e2e_p50_s"];

#[test]
fn what_the_offload_of_heavy_prompts_gained_is_gained_without_it() {
    let rows = simulate(include_str!("../../../scenarios/seed-004-elastic.yaml"));
    // Changes of the four figures in percent.
    let change = |arm: &str, from: &str, rate: f64| {
        let figure = |arm: &str, figure: &str| at(&rows, arm, rate).simulated[figure];
        FIGURES.map(|name| 100.0 * (figure(arm, name) / figure(from, name) - 1.0))
    };
    for (figure, share) in FIGURES.into_iter().zip([0.15, 0.30, 0.15, 0.25]) {
        within(at(&rows, "sticky", 0.6), figure, share);
    }
    // The study's first measurement: the median gains, the tail pays for the transfers.
    let [p50, p90, ..] = change("heavy_offload", "linear", 0.3);
    assert!(p50 < 0.0 && p90 > 25.0, "{p50:+.1} {p90:+.1}");
    for rate in [0.3, 0.6, 0.7] {
        for from in ["sticky", "linear"] {
            let changes = change("fleet_cost", from, rate);
            // Where there is room, time between tokens is as usual.
            let most = [0.0, 0.0, if rate < 0.6 { 3.0 } else { 0.0 }, 0.0];
            assert!(changes.iter().zip(most).all(|(is, most)| *is < most), "{from} at {rate}: {changes:?}");
        }
    }
    for rate in [0.6, 0.7] {
        let changes = change("elastic", "sticky", rate);
        assert!(changes.iter().all(|change| *change < 0.0), "elastic at {rate}: {changes:?}");
    }
    // The gain that the study measured, to two points, at the load where the first token can be sooner by so much.
    let changes = change("fleet_cost", "sticky", 0.7);
    let published = [-45.0, -52.0, -36.0, -44.0];
    assert!(changes.iter().zip(published).all(|(is, most)| *is <= most + 2.0), "{changes:?}");
}
