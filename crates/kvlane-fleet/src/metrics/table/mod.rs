//! The table of all metrics: name, kind, unit, labels, meaning, and when to investigate.
//!
//! A row is also the metric's field and its registration, and `docs/metrics.md` is generated from the rows. To add a
//! metric, add a row and the line that records it.

mod discovery;
mod gateway;
mod knowledge;
mod replicas;
mod requests;
mod row;
mod tokens;
mod workers;

use std::fmt::Write as _;

use kvlane_core::policy::Reason;

pub use self::discovery::Discovery;
pub use self::gateway::Gateway;
pub use self::knowledge::Knowledge;
pub use self::replicas::Replicas;
pub use self::requests::Requests;
pub use self::row::{Group, Kind, PREFIX, Row};
pub use self::tokens::Tokens;
pub use self::workers::Workers;

/// All metrics.
pub const GROUPS: [Group; 7] = [
    Requests::GROUP,
    Tokens::GROUP,
    Workers::GROUP,
    Discovery::GROUP,
    Knowledge::GROUP,
    Replicas::GROUP,
    Gateway::GROUP,
];

/// Every metric.
pub fn rows() -> impl Iterator<Item = &'static Row> {
    GROUPS.iter().flat_map(|group| group.rows)
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
        let names: BTreeSet<_> = rows().map(Row::full_name).collect();
        assert_eq!(names.len(), rows().count(), "a name is listed twice");
        let metrics = Metrics::new();
        let mut page = String::new();
        let registry = metrics.registry.lock().expect("no test has panicked with it");
        prometheus_client::encoding::text::encode(&mut page, &registry).expect("it is written to a string");
        // Families are empty, and so not on the page.
        for row in rows().filter(|row| row.labels.is_empty()) {
            let name = row.full_name();
            let name = name.strip_suffix("_total").unwrap_or(&name);
            let kind = format!("# TYPE {name} {}\n", row.kind.name());
            assert_eq!(page.matches(&kind).count(), 1, "{kind}");
        }
    }
}
