//! What operators see of a feed.

use kvlane_core::cache_accuracy;
use kvlane_core::time::Nanos;
use kvlane_wire::sequence::Counters;

/// What was seen of a feed so far.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// What it is worth.
    pub state: cache_accuracy::Feed,
    /// Why it is not worth more.
    pub problem: Option<String>,
    /// Whether the subscription stands.
    pub connected: bool,
    /// The number of the last message applied.
    pub seq: Option<u64>,
    /// When that was.
    pub applied_at: Option<Nanos>,
    /// Seconds from the engine's clock when it made that message to ours when it was applied.
    pub lag_s: f64,
    /// The engine's block size, once it has told.
    pub block_tokens: Option<u32>,
    /// What the stream went through.
    pub stream: Counters,
    /// Messages that could not be read.
    pub undecodable: u64,
    /// Subscriptions that ended.
    pub disconnects: u64,
    /// Times it owed an event for too long.
    pub silences: u64,
    /// Times it was refused.
    pub refusals: u64,
    /// What its messages said.
    pub events: Events,
}

/// What messages said, in blocks where they were of blocks and in events otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Events {
    /// Blocks stored.
    pub stored: u64,
    /// Blocks removed.
    pub removed: u64,
    /// Times that all was cleared.
    pub cleared: u64,
    /// Removals and copies of blocks that were not known here.
    pub unknown: u64,
    /// Blocks whose parent was not known here.
    pub orphaned: u64,
    /// Blocks for which the index had no room.
    pub refused: u64,
    /// Events passed over: of other groups of layers, of unknown kinds, of blocks whose tokens do not determine them.
    pub ignored: u64,
}

// === impl Events ===

impl Events {
    /// Each with the name it has in metrics.
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
    /// Messages by what became of them, with the names those have in metrics. `dropped` is what its queue has dropped.
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

    /// What happened to the feed, with the names those things have in metrics.
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
