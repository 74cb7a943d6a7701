//! One metric of the table, and groups of them.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Metric, Registry, Unit};

use crate::metrics::histogram::Histogram;

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

/// A metric of one kind.
pub(super) trait Kinded {
    const KIND: Kind;
}

impl<N, A> Kinded for Counter<N, A> {
    const KIND: Kind = Kind::Counter;
}

impl<N, A> Kinded for Gauge<N, A> {
    const KIND: Kind = Kind::Gauge;
}

impl Kinded for Histogram {
    const KIND: Kind = Kind::Histogram;
}

impl<L, M: Kinded, C> Kinded for Family<L, M, C> {
    const KIND: Kind = M::KIND;
}

/// A group: a struct with a field for each row, its row in the document, and its registration. The field's name is the
/// metric's.
macro_rules! rows {
    (
        $Group:ident, $title:literal, $intro:literal;
        $( $visible:vis $name:ident: $Type:ty { $($row:tt)* } $(= $new:expr)?, )+
    ) => {
        #[doc = $intro]
        #[derive(Clone, Debug)]
        #[expect(missing_docs, reason = "each field is a row, which says what it counts")]
        pub struct $Group {
            $( $visible $name: $Type, )+
        }

        impl $Group {
            pub(super) const GROUP: $crate::metrics::table::row::Group =
                $crate::metrics::table::row::Group { title: $title, intro: $intro, rows: &Self::ROWS };

            const ROWS: [$crate::metrics::table::row::Row; [$(stringify!($name)),+].len()] = [$( $crate::metrics::table::row::Row {
                name: stringify!($name),
                kind: <$Type as $crate::metrics::table::row::Kinded>::KIND,
                $($row)*
            } ),+];

            pub(crate) fn register(&self, registry: &mut prometheus_client::registry::Registry) {
                let [$($name),+] = &Self::ROWS;
                $( $name.register(registry, self.$name.clone()); )+
            }
        }

        impl Default for $Group {
            fn default() -> Self {
                Self { $( $name: $crate::metrics::table::row::rows!(@new $($new)?), )+ }
            }
        }
    };
    (@new) => { Default::default() };
    (@new $new:expr) => { $new };
}

pub(super) use rows;

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
}

// === impl Row ===

impl Row {
    /// Its full name in Prometheus.
    pub fn full_name(&self) -> String {
        let unit = if self.seconds { "_seconds" } else { "" };
        let total = if self.kind == Kind::Counter { "_total" } else { "" };
        format!("{PREFIX}_{}{unit}{total}", self.name)
    }

    pub(super) fn register(&self, registry: &mut Registry, metric: impl Metric) {
        match self.seconds {
            true => registry.register_with_unit(self.name, self.help, Unit::Seconds, metric),
            false => registry.register(self.name, self.help, metric),
        }
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
