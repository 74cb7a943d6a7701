//! What goes wrong in a world, and when.

use kvlane_core::time::Nanos;

/// Something that goes wrong.
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
