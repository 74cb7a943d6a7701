//! Faults in a world, and their times.

use kvlane_core::time::Nanos;

/// A fault that begins at a time. Each lasts until its own end, whatever else happens to the endpoint. Overlapping
/// faults combine: an endpoint is dead, paused, unreachable or draining as long as one of its faults lasts, and
/// factors multiply.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// An endpoint dies: its requests break and its cache is lost.
    Death {
        /// Time, from the start of the world.
        at: Nanos,
        /// Its index in the fleet.
        endpoint: usize,
        /// Time of its return, empty; `None` if it does not return.
        back_at: Option<Nanos>,
    },
    /// An endpoint's steps take longer.
    Slow {
        /// Time, from the start of the world.
        at: Nanos,
        /// Its index in the fleet.
        endpoint: usize,
        /// Factor; 1 is its normal speed.
        factor: f64,
        /// End.
        until: Option<Nanos>,
    },
    /// An endpoint pauses: it accepts requests and answers none until it resumes, and then all of them.
    Pause {
        /// Time, from the start of the world.
        at: Nanos,
        /// Its index in the fleet.
        endpoint: usize,
        /// End.
        until: Option<Nanos>,
    },
    /// An endpoint resets all its connections, and accepts new ones at once.
    Reset {
        /// Time, from the start of the world.
        at: Nanos,
        /// Its index in the fleet.
        endpoint: usize,
    },
    /// An endpoint is unreachable without an error: requests in flight and new ones are never answered.
    BlackHole {
        /// Time, from the start of the world.
        at: Nanos,
        /// Its index in the fleet.
        endpoint: usize,
        /// End.
        until: Option<Nanos>,
    },
    /// An endpoint answers each new request that it is busy.
    Busy {
        /// Time, from the start of the world.
        at: Nanos,
        /// Its index in the fleet.
        endpoint: usize,
        /// Its `Retry-After`, if it sends one.
        retry_after: Option<Nanos>,
        /// End.
        until: Option<Nanos>,
    },
    /// An endpoint's KV events are lost. Then its feed restarts: earlier events no longer count.
    CutFeed {
        /// Time, from the start of the world.
        at: Nanos,
        /// Its index in the fleet.
        endpoint: usize,
        /// End.
        until: Option<Nanos>,
    },
    /// An endpoint reports far more blocks than it holds. Then its feed restarts.
    FloodFeed {
        /// Time, from the start of the world.
        at: Nanos,
        /// Its index in the fleet.
        endpoint: usize,
        /// End.
        until: Option<Nanos>,
    },
    /// Transfers of KV blocks that an endpoint sends fail, or take long.
    Transfers {
        /// Time, from the start of the world.
        at: Nanos,
        /// Its index in the fleet.
        endpoint: usize,
        /// Share of the transfers that fail when they should have ended.
        failed: f64,
        /// Share of the transfers that take longer.
        slow: f64,
        /// By how much.
        slow_by: Nanos,
        /// End.
        until: Option<Nanos>,
    },
    /// An endpoint gets no new requests.
    Drain {
        /// Time, from the start of the world.
        at: Nanos,
        /// Its index in the fleet.
        endpoint: usize,
        /// End.
        until: Option<Nanos>,
    },
    /// An endpoint drains, leaves when its last request ends, and an empty one replaces it. It stays if it has not
    /// left by then.
    Replace {
        /// Time, from the start of the world.
        at: Nanos,
        /// Its index in the fleet.
        endpoint: usize,
        /// Time at which the replacement joins; `None` if there is none.
        back_at: Option<Nanos>,
    },
    /// A gateway dies: engines see its requests end, their clients send those without a token again to another gateway, and
    /// the others break. A new one starts in its place.
    GatewayDeath {
        /// Time, from the start of the world.
        at: Nanos,
        /// Its index among the gateways; nothing happens if there is none.
        gateway: usize,
        /// Start of the new one; `None` if there is none.
        back_at: Option<Nanos>,
    },
    /// Gateways on two sides hear nothing from each other. Engines and clients reach all of them.
    Partition {
        /// Time, from the start of the world.
        at: Nanos,
        /// One side.
        one: Side,
        /// The other side.
        other: Side,
        /// End.
        until: Option<Nanos>,
    },
    /// The router reloads its configuration: [`reloaded`](crate::WorldConfig::reloaded), and the next time the first
    /// one again.
    Reload {
        /// Time, from the start of the world.
        at: Nanos,
    },
}

/// Some of the gateways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// Index of the first.
    pub first: usize,
    /// How many.
    pub count: usize,
}

// === impl Side ===

impl Side {
    /// Whether a gateway is one of them.
    pub fn has(self, gateway: usize) -> bool {
        gateway.checked_sub(self.first).is_some_and(|place| place < self.count)
    }
}

// === impl Fault ===

impl Fault {
    /// Its start.
    pub fn at(&self) -> Nanos {
        match *self {
            Self::Death { at, .. }
            | Self::Slow { at, .. }
            | Self::Pause { at, .. }
            | Self::Reset { at, .. }
            | Self::BlackHole { at, .. }
            | Self::Busy { at, .. }
            | Self::CutFeed { at, .. }
            | Self::FloodFeed { at, .. }
            | Self::Transfers { at, .. }
            | Self::Drain { at, .. }
            | Self::Replace { at, .. }
            | Self::GatewayDeath { at, .. }
            | Self::Partition { at, .. }
            | Self::Reload { at } => at,
        }
    }

    /// The endpoint it affects, if any.
    pub fn endpoint(&self) -> Option<usize> {
        match *self {
            Self::Death { endpoint, .. }
            | Self::Slow { endpoint, .. }
            | Self::Pause { endpoint, .. }
            | Self::Reset { endpoint, .. }
            | Self::BlackHole { endpoint, .. }
            | Self::Busy { endpoint, .. }
            | Self::CutFeed { endpoint, .. }
            | Self::FloodFeed { endpoint, .. }
            | Self::Transfers { endpoint, .. }
            | Self::Drain { endpoint, .. }
            | Self::Replace { endpoint, .. } => Some(endpoint),
            Self::GatewayDeath { .. } | Self::Partition { .. } | Self::Reload { .. } => None,
        }
    }

    /// Its end, if it has one.
    pub fn until(&self) -> Option<Nanos> {
        match *self {
            Self::Death { back_at: until, .. }
            | Self::Slow { until, .. }
            | Self::Pause { until, .. }
            | Self::BlackHole { until, .. }
            | Self::Busy { until, .. }
            | Self::CutFeed { until, .. }
            | Self::FloodFeed { until, .. }
            | Self::Transfers { until, .. }
            | Self::Drain { until, .. }
            | Self::Replace { back_at: until, .. }
            | Self::GatewayDeath { back_at: until, .. }
            | Self::Partition { until, .. } => until,
            Self::Reset { .. } | Self::Reload { .. } => None,
        }
    }

    /// Whether it can be simulated without a gateway's [rules](crate::rules::Rules).
    pub fn is_plain(&self) -> bool {
        matches!(
            self,
            Self::Death { .. } | Self::Slow { .. } | Self::GatewayDeath { .. } | Self::Partition { .. }
        )
    }
}

/// Delay and loss of KV events on the way to the router. Shares are of events, each between 0 and 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EventFeed {
    /// Time from the end of a step until its events arrive.
    pub delay: Nanos,
    /// Maximum additional delay of each batch, drawn uniformly from zero to this; batches may overtake each other.
    pub jitter: Nanos,
    /// Share of batches that never arrive.
    pub lost: f64,
    /// Share of batches that arrive twice.
    pub duplicated: f64,
}
