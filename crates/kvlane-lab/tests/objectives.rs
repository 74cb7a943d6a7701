//! Latency objectives under overload: more requests meet them where the router knows them.

use std::collections::BTreeMap;
use std::path::Path;

use kvlane_lab::scenario::{Aside, Scenario, run};
use kvlane_trace::TraceError;

/// Half as many requests again as the fleet can serve.
const OVERLOAD: &str = r#"{
    "scenario": "objectives",
    "fleet": {"engines": 2, "preset": "llama-3.1-8b@h100"},
    "workload": {"generate": {"kind": "unshared", "input_tokens": 4000, "output_tokens": 50},
                 "open_loop": {"stages": [{"rate": 30, "seconds": 60}]}},
    "policies": [
        {"arm": "none", "policy": "fleet_cost"},
        {"arm": "refuse", "policy": "fleet_cost", "hints": {"slo": {"ttft_ms": 2000, "if_missed": "refuse"}}},
        {"arm": "queue, none", "policy": "fleet_cost", "max_requests_per_endpoint": 16},
        {"arm": "queue, best effort", "policy": "fleet_cost", "max_requests_per_endpoint": 16,
         "hints": {"slo": {"ttft_ms": 2000}}}
    ],
    "judgement": {"slo_ttft_s": 2, "slo_tpot_ms": 1000}
}"#;

/// Invariant: Under overload, more requests meet their targets where the router knows these than where it does not.
#[test]
fn under_overload_more_requests_meet_targets_that_are_known() {
    let scenario: Scenario = serde_json::from_str(OVERLOAD).expect("a scenario");
    let no_trace = |_: &Path| Err(TraceError::Empty);
    let rows = run(&scenario, Path::new(""), &no_trace, 2, Aside::default(), &|_, _| {}).expect("it runs");
    let share = |figure: &str| -> BTreeMap<&str, f64> {
        rows.iter().map(|row| (row.arm.as_str(), row.simulated[figure])).collect()
    };
    let (within, shed) = (share("slo_share"), share("shed_share"));
    assert!(within["refuse"] > within["none"] + 0.4, "0.64 and 0.06: {within:?}");
    assert!(within["queue, best effort"] > within["queue, none"] + 0.4, "0.50 and 0.04: {within:?}");
    assert_eq!(shed["queue, best effort"], 0.0, "best effort is answered late");
}
