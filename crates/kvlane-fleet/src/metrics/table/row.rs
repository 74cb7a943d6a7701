//! One metric of the table, and groups of them.

use prometheus_client::metrics::MetricType;

/// The prefix of all metric names.
pub const PREFIX: &str = "kvlane";

/// Related metrics.
pub struct Group {
    /// A heading.
    pub title: &'static str,
    /// A sentence about them.
    pub intro: &'static str,
    /// The metrics.
    pub rows: &'static [Row],
}

/// One metric.
pub struct Row {
    /// Its name without prefix, unit and `_total`.
    pub name: &'static str,
    /// Its kind.
    pub kind: Kind,
    /// Whether it is in seconds. Otherwise the name states the unit.
    pub seconds: bool,
    /// Its labels, in order.
    pub labels: &'static [&'static str],
    /// The help text in the exposition.
    pub help: &'static str,
    /// Its meaning in the document, in Markdown.
    pub meaning: &'static str,
    /// When to investigate, in Markdown; empty for a metric that only serves for comparison.
    pub worry: &'static str,
}

/// Kinds of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// A distribution.
    Histogram,
}

// === impl Kind ===

impl Kind {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }

    pub(super) fn is(self, metric: MetricType) -> bool {
        matches!(
            (self, metric),
            (Self::Counter, MetricType::Counter)
                | (Self::Gauge, MetricType::Gauge)
                | (Self::Histogram, MetricType::Histogram)
        )
    }
}

// === impl Row ===

impl Row {
    /// Its full name in Prometheus.
    pub fn full_name(&self) -> String {
        let unit = if self.seconds { "_seconds" } else { "" };
        let total = if self.kind == Kind::Counter { "_total" } else { "" };
        format!("{PREFIX}_{}{unit}{total}", self.name)
    }

    pub(super) fn unit(&self) -> &'static str {
        const UNITS: [&str; 5] = ["ratio", "bytes", "tokens", "blocks", "requests"];
        if self.name.ends_with("_per_second") {
            return "tokens/s";
        }
        let named = |unit: &&str| self.name.split('_').any(|word| word == *unit);
        match self.seconds {
            true => "seconds",
            false => UNITS.into_iter().find(named).unwrap_or_default(),
        }
    }
}
