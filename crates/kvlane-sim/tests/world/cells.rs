//! Cells of a fleet behind a front tier.

use kvlane_core::index::sketch;
use kvlane_core::policy::PolicyConfig;
use kvlane_core::time::Nanos;
use kvlane_sim::fault::Fault;
use kvlane_sim::{CellsConfig, GatewaysConfig, Outcome, Run, Sketches, World, WorldConfig};
use kvlane_trace::trace::Trace;

use super::{EVENTS, OPEN, check, config, conversations, play};

const SKETCHES: Sketches = Sketches {
    every: Nanos::from_millis(500),
    size: sketch::Config { bits_per_mark: 6, bytes_max: 1 << 20 },
};

/// Three cells of two engines, with two gateways each that tell each other nothing.
fn cells(front: &str, sketches: Option<Sketches>) -> WorldConfig {
    let cells = CellsConfig {
        count: 3,
        policy: PolicyConfig::by_name(front).expect("a policy"),
        loads_every: Nanos::from_millis(50),
        sketches,
        delay: Nanos::from_millis(20),
    };
    let gateways = GatewaysConfig { count: 2, cells: Some(cells), ..GatewaysConfig::default() };
    WorldConfig { gateways, ..config("fleet_cost", 6, 1) }
}

fn run(config: WorldConfig, trace: &Trace) -> (Run, World) {
    let (run, world) = play(config, trace, OPEN);
    check(trace, &run, &world);
    (run, world)
}

fn cell_of(outcome: &Outcome) -> Option<u16> {
    outcome.endpoint.map(|endpoint| endpoint % 3)
}

/// Share of the requests with a predecessor that are in its cell.
fn stayed(trace: &Trace, run: &Run) -> f64 {
    let follows = trace.requests.iter().zip(&run.outcomes).filter_map(|(request, outcome)| {
        Some(cell_of(outcome) == cell_of(&run.outcomes[request.after? as usize]))
    });
    let stayed: Vec<bool> = follows.collect();
    stayed.iter().filter(|stayed| **stayed).count() as f64 / stayed.len() as f64
}

#[test]
fn a_sketch_brings_follow_ups_to_the_cell_that_has_their_prefix() {
    let trace = conversations(300, 5);
    let (by_sketch, world) = run(cells("fleet_cost", Some(SKETCHES)), &trace);
    let (by_load, _) = run(cells("fleet_cost", None), &trace);
    let (sketch, load) = (stayed(&trace, &by_sketch), stayed(&trace, &by_load));
    assert!(sketch > 0.6 && load < 0.45, "{sketch} {load}: a third by chance");
    let lookups = world.lookups();
    assert_eq!(lookups.lookups, 3 * trace.requests.len() as u64);
    assert!(lookups.sketches > 30 && lookups.bytes > 0 && lookups.marks > 0, "{lookups:?}");
    assert!(lookups.false_hits * 5 < lookups.lookups, "{lookups:?}");
}

/// Invariant: A world of cells is the same in every run, and each request is placed in the cell that the front tier chose.
#[test]
fn cells_are_the_same_in_every_run() {
    let trace = conversations(100, 3);
    let of = |front, sketches| run(cells(front, sketches), &trace).0.outcomes;
    assert_eq!(of("fleet_cost", Some(SKETCHES)), of("fleet_cost", Some(SKETCHES)));
    let outcomes = of("round_robin", None);
    // In turns, in the order in which they are sent.
    let mut sent: Vec<(Nanos, u16)> =
        outcomes.iter().map(|outcome| (outcome.due, cell_of(outcome).expect("placed"))).collect();
    sent.sort_by_key(|(due, _)| *due);
    assert!(sent.windows(3).all(|next| next[0].1 != next[1].1 && next[0].1 != next[2].1), "{sent:?}");
}

#[test]
fn an_engine_that_returns_is_in_its_cell_again_and_a_cell_without_gateways_is_replaced_by_another() {
    let trace = conversations(100, 3);
    let second = Nanos::from_secs(1);
    let mut config = cells("fleet_cost", Some(SKETCHES));
    config.router.exact = EVENTS;
    config.faults = vec![
        Fault::Death { at: second, endpoint: 0, back_at: Some(Nanos::from_secs(3)) },
        Fault::GatewayDeath { at: Nanos::from_secs(5), gateway: 1, back_at: None },
        Fault::GatewayDeath { at: Nanos::from_secs(5), gateway: 4, back_at: Some(Nanos::from_secs(9)) },
    ];
    let (run, _) = run(config, &trace);
    let later = |outcome: &&Outcome| outcome.due > Nanos::from_secs(10);
    let cells: std::collections::BTreeSet<_> =
        run.outcomes.iter().filter(later).filter_map(cell_of).collect();
    assert_eq!(cells.len(), 3, "{cells:?}");
    assert!(run.outcomes.iter().filter(later).all(Outcome::is_ok));
    assert!(
        run.outcomes.iter().any(|outcome| outcome.due > Nanos::from_secs(3) && outcome.endpoint == Some(0))
    );
}
