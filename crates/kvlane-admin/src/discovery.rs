//! The sources of discovery in `GET /readiness` and `GET /metrics`.

use kvlane_core::time::Nanos;
use kvlane_fleet::Fleet;
use kvlane_fleet::discovery::{Seen, Status};
use kvlane_fleet::metrics::SourceLabel;
use serde_json::{Value, json};

/// Each source: how old its knowledge is, and what is wrong.
pub(crate) fn describe(fleet: &Fleet) -> Vec<Value> {
    let now = fleet.clock.now();
    let source = |seen: Seen| {
        let status = seen.status();
        json!({
            "source": seen.name(), "synced": status.applied, "age_s": age(now, &status),
            "workers": status.workers, "problem": status.problem,
            "left_out": status.left_out.iter().chain(&status.not_added).collect::<Vec<_>>(),
        })
    };
    fleet.discovery.sources().into_iter().map(source).collect()
}

/// Reads the gauges of all sources.
pub(crate) fn read(fleet: &Fleet) {
    let (now, metrics) = (fleet.clock.now(), &fleet.metrics.discovery);
    metrics.discovery_age.clear();
    for gauge in [&metrics.discovery_workers, &metrics.discovery_synced, &metrics.discovery_problems] {
        gauge.clear();
    }
    for seen in fleet.discovery.sources() {
        let (label, status) = (SourceLabel { source: seen.name() }, seen.status());
        if let Some(age) = age(now, &status) {
            metrics.discovery_age.get_or_create(&label).set(age);
        }
        let problems = usize::from(status.problem.is_some()) + status.left_out.len() + status.not_added.len();
        metrics.discovery_workers.get_or_create(&label).set(status.workers as i64);
        metrics.discovery_synced.get_or_create(&label).set(status.applied.into());
        metrics.discovery_problems.get_or_create(&label).set(problems as i64);
    }
}

/// Seconds since a source was last known to be up to date.
fn age(now: Nanos, status: &Status) -> Option<f64> {
    Some((now - status.confirmed?).as_secs_f64())
}
