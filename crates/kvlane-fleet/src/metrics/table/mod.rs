//! The table of all metrics: name, kind, unit, labels, meaning, and when to investigate.
//!
//! Registration takes help and unit from here; `docs/metrics.md` is generated from here.

mod gateway;
mod knowledge;
mod requests;
mod row;
mod tokens;
mod workers;

use std::fmt::Write as _;

use kvlane_core::policy::Reason;
use prometheus_client::registry::{Metric, Registry, Unit};

pub use self::row::{Group, Kind, PREFIX, Row};

/// All metrics.
pub const GROUPS: [Group; 5] =
    [requests::GROUP, tokens::GROUP, workers::GROUP, knowledge::GROUP, gateway::GROUP];

/// Every metric.
pub fn rows() -> impl Iterator<Item = &'static Row> {
    GROUPS.iter().flat_map(|group| group.rows)
}

/// Registers all metrics, each under a name in the table.
pub(super) struct Registration<'a> {
    registry: &'a mut Registry,
    done: Vec<&'static str>,
}

// === impl Registration ===

impl<'a> Registration<'a> {
    pub(super) fn new(registry: &'a mut Registry) -> Self {
        Self { registry, done: Vec::new() }
    }

    /// # Panics
    /// The table lacks it, has it with another kind, or it is registered already.
    pub(super) fn register(&mut self, name: &'static str, metric: impl Metric) {
        let row = rows().find(|row| row.name == name);
        let row = row.unwrap_or_else(|| panic!("{name} is not in the table of metrics"));
        assert!(row.kind.is(metric.metric_type()), "{name} is not a {}", row.kind.name());
        assert!(!self.done.contains(&name), "{name} is registered twice");
        self.done.push(name);
        match row.seconds {
            true => self.registry.register_with_unit(name, row.help, Unit::Seconds, metric),
            false => self.registry.register(name, row.help, metric),
        }
    }

    /// # Panics
    /// The table has further metrics.
    pub(super) fn finish(self) {
        let missing: Vec<_> = rows().map(|row| row.name).filter(|name| !self.done.contains(name)).collect();
        assert!(missing.is_empty(), "metrics in the table are not registered: {missing:?}");
    }
}

/// `docs/metrics.md`.
pub fn markdown() -> String {
    let mut page = String::from(HEAD);
    for group in &GROUPS {
        let _ = write!(page, "\n## {}\n\n{}\n", group.title, group.intro);
        page += "\n| Name | Type | Unit | Labels | Meaning | When to worry |\n|---|---|---|---|---|---|\n";
        for row in group.rows {
            let labels: Vec<_> = row.labels.iter().map(|label| format!("`{label}`")).collect();
            let cells = [
                format!("`{}`", row.full_name()),
                row.kind.name().into(),
                row.unit().into(),
                labels.join(", "),
                row.meaning.into(),
                row.worry.into(),
            ];
            let cells: Vec<_> = cells
                .iter()
                .map(|cell| if cell.is_empty() { " ".into() } else { format!(" {cell} ") })
                .collect();
            let _ = writeln!(page, "|{}|", cells.join("|"));
        }
    }
    let reasons: Vec<_> =
        Reason::ALL.iter().map(|reason| format!("`{}` ({})", reason.name(), reason.text())).collect();
    let _ = write!(
        page,
        "\nValues of `reason` in `kvlane_worker_selection_total`: {}; see [policies](guide.md#policies).\n",
        reasons.join(", ")
    );
    page += TAIL;
    page
}

const HEAD: &str = "\
# Metrics

*Written by `cargo run -p kvlane-fleet --example metrics > docs/metrics.md` from the table in
`crates/kvlane-fleet/src/metrics/table`; a test fails when the two differ.*

`GET /metrics` on the metrics port, in OpenMetrics text. Names have the prefix `kvlane_`; times are in seconds. A histogram
also has `_bucket`, `_sum` and `_count`. Labels are bounded: models and workers are those of the fleet, everything else is a
closed set or has a limit, and a worker's series are dropped when it leaves.

Rules for alerts and a dashboard are in [deploy](observability.md#prometheus-and-grafana).
";

const TAIL: &str = "
To see whether the prefix guess holds: `rate(kvlane_cached_tokens_total[5m]) / rate(kvlane_predicted_cached_tokens_total[5m])`.
The counts are not exact twins where tokens are estimated: ours takes 4 bytes for a token.
";

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::metrics::Metrics;

    /// Invariant: Every metric has a row, every row a metric, and the document is generated from them.
    ///
    /// Also held by `the_document_of_metrics_is_what_the_table_says`.
    #[test]
    fn every_row_is_registered_once() {
        let names: BTreeSet<_> = rows().map(|row| row.name).collect();
        assert_eq!(names.len(), rows().count(), "a name is listed twice");
        // It panics for a metric without a row, or a row without a metric.
        let _ = Metrics::new();
    }

    #[test]
    #[should_panic(expected = "are not registered")]
    fn a_row_without_a_metric_is_an_error() {
        Registration::new(&mut Registry::default()).finish();
    }

    #[test]
    #[should_panic(expected = "is not a gauge")]
    fn a_metric_of_another_kind_than_its_row_is_an_error() {
        let counter = prometheus_client::metrics::counter::Counter::<u64>::default();
        Registration::new(&mut Registry::default()).register("tasks", counter);
    }
}
