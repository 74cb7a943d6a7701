//! One stream of numbered messages: what is missing, what came twice, whether the engine behind it is another one.
//!
//! Pure: the driver feeds it what its sockets see and does what comes out. A stream is either trusted, as everything
//! up to its last message has been applied, or catching up; it catches up by a replay where the engine offers one, and
//! by forgetting what it knew of the engine where it does not.
//!
//! The driver makes each replay on a connection of its own and passes its [`Round`] with every answer, so that a late
//! answer to an earlier question is not taken for one to a later question.

use kvlane_core::time::Nanos;

/// Limits of a stream, and whether it can be replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Whether there is a replay socket.
    pub replay: bool,
    /// Messages kept while earlier ones are missing.
    pub held_max: usize,
    /// Bytes of them.
    pub held_bytes_max: usize,
    /// How long a replay may go without bringing anything that was missing, before it is asked for again.
    pub replay_timeout: Nanos,
    /// Replays in a row that bring nothing, before what is missing is given up.
    pub attempts_max: u32,
    /// Time between the starts of two replays, the second of which is not due to progress of the first.
    pub replay_interval: Nanos,
}

/// Which replay: counted from one for each stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Round(pub u64);

/// What the driver has to do, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// Apply this message.
    Apply {
        /// Its number.
        seq: u64,
        /// Its content.
        payload: &'a [u8],
    },
    /// Ask the replay socket for everything from this number on; a replay under way may be dropped.
    Replay {
        /// What answers are tagged with.
        round: Round,
        /// The first number to ask for.
        from: u64,
    },
    /// Forget everything this stream has told.
    Clear(Cause),
}

/// Why what a stream has told is no longer known to be so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The engine has restarted: its numbers began again, or one of them stands for something else.
    Restarted,
    /// Messages are lost for good.
    Lost,
    /// The connection was lost, and there is no replay that could tell what was missed.
    Reconnected,
}

/// What a stream has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages applied.
    pub applied: u64,
    /// Times that a message came before the one it follows.
    pub gaps: u64,
    /// Messages given up.
    pub lost: u64,
    /// Messages that had been applied before.
    pub duplicates: u64,
    /// Messages that came after they had been given up.
    pub late: u64,
    /// Messages dropped because too many were waiting.
    pub overflows: u64,
    /// Restarts of the engine seen.
    pub restarts: u64,
    /// Replays asked for.
    pub replays: u64,
    /// Times everything was forgotten.
    pub cleared: u64,
}

/// One stream.
#[derive(Debug)]
pub struct Sequence {
    config: Config,
    counters: Counters,
    trusted: bool,
}

// === impl Config ===

impl Default for Config {
    fn default() -> Self {
        Self {
            replay: true,
            held_max: 20_000,
            held_bytes_max: 64 << 20,
            replay_timeout: Nanos::from_secs(2),
            attempts_max: 3,
            replay_interval: Nanos::from_millis(200),
        }
    }
}

// === impl Sequence ===

impl Sequence {
    /// A stream that is not connected yet.
    pub fn new(config: Config) -> Self {
        Self { config, counters: Counters::default(), trusted: false }
    }

    /// The subscription stands, for the first time or again.
    pub fn connected(&mut self, now: Nanos, out: &mut dyn FnMut(Step<'_>)) {
        let _ = (now, out);
        self.trusted = !self.config.replay;
    }

    /// The subscription is gone. Nothing is trusted until it is back and nothing proves missing.
    pub fn disconnected(&mut self) {
        self.trusted = false;
    }

    /// A message of the subscription.
    pub fn live(&mut self, now: Nanos, seq: u64, payload: &[u8], out: &mut dyn FnMut(Step<'_>)) {
        let _ = now;
        self.counters.applied += 1;
        out(Step::Apply { seq, payload });
    }

    /// A message of a replay.
    pub fn replayed(
        &mut self,
        now: Nanos,
        round: Round,
        seq: u64,
        payload: &[u8],
        out: &mut dyn FnMut(Step<'_>),
    ) {
        let _ = (now, round, seq, payload, out);
    }

    /// A replay's end marker.
    pub fn replay_ended(&mut self, now: Nanos, round: Round, out: &mut dyn FnMut(Step<'_>)) {
        let _ = (now, round, out);
    }

    /// A replay that could not be made, or broke off.
    pub fn replay_failed(&mut self, now: Nanos, round: Round, out: &mut dyn FnMut(Step<'_>)) {
        let _ = (now, round, out);
    }

    /// The driver itself has dropped messages of the subscription.
    pub fn overflowed(&mut self, now: Nanos, out: &mut dyn FnMut(Step<'_>)) {
        let _ = (now, out);
    }

    /// Time has passed: to be called at [`Sequence::next_deadline`], or more often.
    pub fn tick(&mut self, now: Nanos, out: &mut dyn FnMut(Step<'_>)) {
        let _ = (now, out);
    }

    /// When [`Sequence::tick`] has something to do.
    pub fn next_deadline(&self) -> Option<Nanos> {
        None
    }

    /// Whether everything up to the last message seen has been applied: live, rather than catching up.
    pub fn trusted(&self) -> bool {
        self.trusted
    }

    /// The number of the last message applied.
    pub fn last_applied(&self) -> Option<u64> {
        None
    }

    /// What it has seen so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }
}
