//! One metric of the table, and groups of them.

use prometheus_client::metrics::MetricType;

/// What every metric's name begins with.
pub const PREFIX: &str = "kvlane";

/// Metrics that belong together.
pub struct Group {
    /// A heading.
    pub title: &'static str,
    /// What they tell, in a sentence.
    pub intro: &'static str,
    /// The metrics.
    pub rows: &'static [Row],
}

/// One metric.
pub struct Row {
    /// Its name without prefix, unit and `_total`.
    pub name: &'static str,
    /// What kind of metric it is.
    pub kind: Kind,
    /// Whether it is in seconds. Otherwise the name says what is counted.
    pub seconds: bool,
    /// Its labels, in order.
    pub labels: &'static [&'static str],
    /// What the exposition says of it.
    pub help: &'static str,
    /// What the document says of it, in Markdown.
    pub meaning: &'static str,
    /// When somebody should look, in Markdown; empty if it is only there to be set against others.
    pub worry: &'static str,
}

/// Kinds of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Observations by size.
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
    /// The name that Prometheus shows.
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
