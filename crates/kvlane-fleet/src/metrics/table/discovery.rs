//! Metrics of discovery.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;

use super::row::rows;
use crate::metrics::labels::SourceLabel;

rows! {
    Discovery, "Discovery", "Sources of workers; `source` is `kubernetes`, `dns` or `file`.";

    pub discovery_age: Family<SourceLabel, Gauge<f64, AtomicU64>> {
        seconds: true,
        labels: &["source"],
        help: "Time since the source was last known to be up to date",
        meaning: "Time since the source was last known to be up to date; absent until it has reported",
        worry: "it grows beyond a minute: the API server, the DNS server or the file cannot be read, and the fleet stays as it was",
    },

    pub discovery_workers: Family<SourceLabel, Gauge> {
        seconds: false,
        labels: &["source"],
        help: "Workers that the source names",
        meaning: "Workers that the source names",
        worry: "it is 0, or differs from the number of engines",
    },

    pub discovery_synced: Family<SourceLabel, Gauge> {
        seconds: false,
        labels: &["source"],
        help: "1 once the source has reported",
        meaning: "1 once the source has reported and its workers have been added",
        worry: "it is 0 for longer than a start takes: `GET /readiness` has the reason",
    },

    pub discovery_problems: Family<SourceLabel, Gauge> {
        seconds: false,
        labels: &["source"],
        help: "Problems of the source",
        meaning: "Problems of the source: 1 while it cannot be reached or understood, and 1 for each thing that was left out",
        worry: "it is not 0: `GET /readiness` lists the problems",
    },

    pub discovery_joins: Family<SourceLabel, Counter> {
        seconds: false,
        labels: &["source"],
        help: "Workers added because the source named them",
        meaning: "Workers added because the source named them",
        worry: "it grows as fast as `kvlane_discovery_leaves_total`: workers come and go",
    },

    pub discovery_leaves: Family<SourceLabel, Counter> {
        seconds: false,
        labels: &["source"],
        help: "Workers removed because the source named them no longer",
        meaning: "Workers removed because the source named them no longer, or named another engine at their URL",
        worry: "it grows while nothing is deployed",
    },
}
