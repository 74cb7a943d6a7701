//! What goes wrong in a world, and when.

use kvlane_core::time::Nanos;

/// Something that goes wrong, from a time on. Each is in force until its own end, whatever else happens to the endpoint:
/// faults that overlap add up. An endpoint is dead, still, out of reach or draining as long as one of them says so, and
/// factors multiply.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fault {
    /// An endpoint dies: what it was doing breaks off and its cache is lost.
    Death {
        /// When, from the start of the world.
        at: Nanos,
        /// Its place in the fleet.
        endpoint: usize,
        /// When it is back, empty; never if there is no such time.
        back_at: Option<Nanos>,
    },
    /// An endpoint's steps take longer.
    Slow {
        /// When, from the start of the world.
        at: Nanos,
        /// Its place in the fleet.
        endpoint: usize,
        /// By which factor; 1 is its normal speed.
        factor: f64,
        /// Until when.
        until: Option<Nanos>,
    },
    /// An endpoint stands still: it takes requests and answers nothing until it goes on, and then all of them.
    Pause {
        /// When, from the start of the world.
        at: Nanos,
        /// Its place in the fleet.
        endpoint: usize,
        /// Until when.
        until: Option<Nanos>,
    },
    /// An endpoint breaks off all its connections, and takes new ones at once.
    Reset {
        /// When, from the start of the world.
        at: Nanos,
        /// Its place in the fleet.
        endpoint: usize,
    },
    /// An endpoint is out of reach, and nobody is told: what it had and what it is given meanwhile is never answered.
    BlackHole {
        /// When, from the start of the world.
        at: Nanos,
        /// Its place in the fleet.
        endpoint: usize,
        /// Until when.
        until: Option<Nanos>,
    },
    /// An endpoint says of each new request that it is too busy.
    Busy {
        /// When, from the start of the world.
        at: Nanos,
        /// Its place in the fleet.
        endpoint: usize,
        /// When to come again, if it says.
        retry_after: Option<Nanos>,
        /// Until when.
        until: Option<Nanos>,
    },
    /// Nothing that an endpoint says of its cache arrives. Then its feed begins anew: what it said before does not count.
    CutFeed {
        /// When, from the start of the world.
        at: Nanos,
        /// Whose.
        endpoint: usize,
        /// Until when.
        until: Option<Nanos>,
    },
    /// An endpoint says of far more blocks than it has that it has them. Then its feed begins anew.
    FloodFeed {
        /// When, from the start of the world.
        at: Nanos,
        /// Whose.
        endpoint: usize,
        /// Until when.
        until: Option<Nanos>,
    },
    /// An endpoint is given no new requests.
    Drain {
        /// When, from the start of the world.
        at: Nanos,
        /// Its place in the fleet.
        endpoint: usize,
        /// Until when.
        until: Option<Nanos>,
    },
    /// An endpoint drains, leaves when its last request is over, and another one takes its place, empty. It stays if it has
    /// not left by then.
    Replace {
        /// When, from the start of the world.
        at: Nanos,
        /// Its place in the fleet.
        endpoint: usize,
        /// When the other one comes; never if there is no such time.
        back_at: Option<Nanos>,
    },
    /// The router reads its configuration again: [`reloaded`](crate::WorldConfig::reloaded), and the next time the first one.
    Reload {
        /// When, from the start of the world.
        at: Nanos,
    },
}

// === impl Fault ===

impl Fault {
    /// When it begins.
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
            | Self::Drain { at, .. }
            | Self::Replace { at, .. }
            | Self::Reload { at } => at,
        }
    }

    /// Whom it strikes, if it is one.
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
            | Self::Drain { endpoint, .. }
            | Self::Replace { endpoint, .. } => Some(endpoint),
            Self::Reload { .. } => None,
        }
    }

    /// When it ends, if it lasts and ends.
    pub fn until(&self) -> Option<Nanos> {
        match *self {
            Self::Death { back_at: until, .. }
            | Self::Slow { until, .. }
            | Self::Pause { until, .. }
            | Self::BlackHole { until, .. }
            | Self::Busy { until, .. }
            | Self::CutFeed { until, .. }
            | Self::FloodFeed { until, .. }
            | Self::Drain { until, .. }
            | Self::Replace { back_at: until, .. } => until,
            Self::Reset { .. } | Self::Reload { .. } => None,
        }
    }

    /// Whether it can be lived through without a gateway's [rules](crate::rules::Rules).
    pub fn is_plain(&self) -> bool {
        matches!(self, Self::Death { .. } | Self::Slow { .. })
    }
}

/// How faithfully KV events reach the router. Shares are of events, each between 0 and 1.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EventFeed {
    /// Time from the end of a step to when its events are known.
    pub delay: Nanos,
    /// Further time, drawn evenly from zero to this for each batch; batches then overtake each other.
    pub jitter: Nanos,
    /// Share of batches that never arrive.
    pub lost: f64,
    /// Share of batches that arrive twice.
    pub duplicated: f64,
}
