//! The status of a feed, for operators.

use kvlane_core::cache_accuracy;
use kvlane_core::time::Nanos;
use kvlane_wire::sequence::Counters;

/// The status of a feed.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// Its state.
    pub state: cache_accuracy::Feed,
    /// Why the state is not better.
    pub problem: Option<String>,
    /// Whether the subscription is connected.
    pub connected: bool,
    /// The sequence number of the last applied message.
    pub seq: Option<u64>,
    /// When it was applied.
    pub applied_at: Option<Nanos>,
    /// Seconds between the engine's timestamp of that message and the time it was applied, by two clocks.
    pub lag_s: f64,
    /// The engine's block size, once known.
    pub block_tokens: Option<u32>,
    /// Counters of the message stream.
    pub stream: Counters,
    /// Messages that could not be decoded.
    pub undecodable: u64,
    /// Subscriptions that ended.
    pub disconnects: u64,
    /// Times that a due event did not arrive in time.
    pub silences: u64,
    /// Times that the feed was rejected.
    pub refusals: u64,
    /// Counters of events.
    pub events: Events,
}

/// Events counted: in blocks where an event is about blocks, else in events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Blocks stored.
    pub stored: u64,
    /// Blocks removed.
    pub removed: u64,
    /// Times that the whole cache was cleared.
    pub cleared: u64,
    /// Removals and copies of blocks that the index did not hold.
    pub unknown: u64,
    /// Blocks whose parent the index did not hold.
    pub orphaned: u64,
    /// Blocks for which the index had no room.
    pub refused: u64,
    /// Events ignored: of other groups of layers, of unknown kinds, of blocks that their tokens do not determine.
    pub ignored: u64,
}

// === impl Events ===

impl Events {
    /// Each with its name in metrics.
    pub fn by_kind(&self) -> [(&'static str, u64); 7] {
        let &Self { stored, removed, cleared, unknown, orphaned, refused, ignored } = self;
        [
            ("stored", stored),
            ("removed", removed),
            ("cleared", cleared),
            ("unknown", unknown),
            ("orphaned", orphaned),
            ("refused", refused),
            ("ignored", ignored),
        ]
    }
}

// === impl Seen ===

impl Seen {
    /// Messages by outcome, with the names of the outcomes in metrics. `dropped` is the number that the queue
    /// dropped.
    pub fn messages(&self, dropped: u64) -> [(&'static str, u64); 6] {
        let Counters { applied, duplicates, late, lost, .. } = self.stream;
        [
            ("applied", applied),
            ("duplicate", duplicates),
            ("late", late),
            ("lost", lost),
            ("dropped", dropped),
            ("undecodable", self.undecodable),
        ]
    }

    /// Incidents of the feed, with their names in metrics.
    pub fn incidents(&self) -> [(&'static str, u64); 9] {
        let Counters { gaps, restarts, replays, given_up, cleared, overflows, .. } = self.stream;
        [
            ("gap", gaps),
            ("restart", restarts),
            ("replay", replays),
            ("replay_given_up", given_up),
            ("resync", cleared),
            ("overflow", overflows),
            ("disconnect", self.disconnects),
            ("silence", self.silences),
            ("refusal", self.refusals),
        ]
    }
}
