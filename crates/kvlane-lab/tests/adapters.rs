//! The scenario `adapters`: loads, and times to first token, of policies that know adapters.

use std::path::Path;

use kvlane_lab::catalogue;
use kvlane_lab::scenario::{Aside, Cell, Row, Scenario, Stage, run};
use kvlane_trace::TraceError;

/// The built-in scenario with these policies, rates and seconds a load.
fn rows(policies: &[&str], rates: &[f64], load_s: f64) -> Vec<Row> {
    let (mut scenario, directory): (Scenario, _) = catalogue::scenario("adapters").expect("built in");
    scenario.policies.retain(|arm| policies.contains(&&*arm.arm));
    scenario.fleet.groups.iter_mut().for_each(|group| group.adapter_load_s = load_s);
    let open = scenario.workload.open_loop.as_mut().expect("rates");
    open.stages = rates.iter().map(|&rate| Stage { rate, seconds: 100.0 }).collect();
    let no_trace = |_: &Path| Err(TraceError::Empty);
    run(&scenario, &directory, &no_trace, 2, Aside::default(), &|_, _| {}).expect("a scenario")
}

/// A figure of a policy at a rate.
fn figure(rows: &[Row], arm: &str, rate: f64, name: &str) -> f64 {
    let is_wanted = |row: &&Row| row.arm == arm && row.cell == Cell::Rate(rate);
    rows.iter().find(is_wanted).and_then(|row| row.simulated.get(name)).copied().expect("a figure")
}

/// Invariant: With as many adapters as the fleet has slots, `fleet_cost` loads at most a fifth as many as round robin, and first tokens
/// come sooner than where each adapter stays at the endpoint that has it loaded, or at most a hundredth later.
#[test]
fn fleet_cost_seldom_loads_adapters_and_answers_sooner_than_prefer_loaded() {
    let cases =
        [(0.1, &[40.0, 80.0][..]), (0.5, &[10.0, 20.0, 40.0, 80.0, 120.0]), (2.0, &[10.0, 20.0, 40.0, 80.0])];
    for (load_s, rates) in cases {
        let rows = rows(&["round_robin", "prefer_loaded", "fleet_cost"], rates, load_s);
        for &rate in rates {
            let of = |arm, name| figure(&rows, arm, rate, name);
            let (loads, most) = (of("fleet_cost", "adapter_loads"), of("round_robin", "adapter_loads") / 5.0);
            assert!(loads <= most, "{rate} requests/s, {load_s} s: {loads} loads, of at most {most}");
            let (ttft_s, other_s) = (of("fleet_cost", "ttft_mean_s"), of("prefer_loaded", "ttft_mean_s"));
            assert!(
                ttft_s < 1.01 * other_s,
                "{rate} requests/s, {load_s} s a load: {ttft_s} s, prefer_loaded {other_s} s"
            );
        }
    }
}
