//! Sequence of one feed's numbered messages: detects gaps, duplicates and engine restarts, and requests replays.
//!
//! Pure: the driver passes in what its sockets receive and carries out the resulting steps. A stream is either trusted,
//! with everything up to its last message applied, or catching up. It catches up by a replay if the engine offers one.
//! Without a replay, or if the replay has lost the messages too, everything learned from the stream is cleared.
//!
//! Engines number their messages from 0 and start again at 0 when they restart, without notice. So a replay starts at
//! the last message applied, not at the one after it: if that message comes back unchanged, the engine has not
//! restarted. Clearing only costs reuse, while stale state would misplace requests; so without a replay, state is
//! cleared in case of doubt.
//!
//! The driver makes each replay on its own connection and passes its [`Round`] with every answer, so that a late answer
//! to one replay is not mistaken for an answer to the next.

use std::collections::BTreeMap;

use kvlane_core::time::Nanos;
use xxhash_rust::xxh3::xxh3_64;

/// Limits of a stream, and whether it has a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Whether there is a replay socket.
    pub replay: bool,
    /// Most messages held while earlier ones are missing; the latest are dropped, as a later replay returns them.
    pub held_max: usize,
    /// Most bytes of held messages.
    pub held_bytes_max: usize,
    /// How long a replay may go without returning a missing message before it is requested again.
    pub replay_timeout: Nanos,
    /// Consecutive replays without a missing message after which the missing messages are given up.
    pub attempts_max: u32,
    /// Shortest interval between the starts of two replays.
    pub replay_interval: Nanos,
}

/// Number of a replay, counted from one per stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Round(pub u64);

/// A step for the driver to carry out, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<'a> {
    /// Apply this message.
    Apply {
        /// Its number.
        seq: u64,
        /// Its content.
        payload: &'a [u8],
    },
    /// Request everything from this number on from the replay socket; a replay in progress may be dropped.
    Replay {
        /// Tag of its answers.
        round: Round,
        /// The first number to request.
        from: u64,
    },
    /// Clear everything learned from this stream.
    Clear(Cause),
}

/// Why the state learned from a stream is no longer reliable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The engine has restarted: its numbers started again, or a number has different content.
    Restarted,
    /// Messages are lost permanently.
    Lost,
    /// The connection was lost, and there is no replay to find missed messages.
    Reconnected,
}

/// Counters of a stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages applied.
    pub applied: u64,
    /// Times that a message arrived before its predecessor.
    pub gaps: u64,
    /// Messages given up. Numbers from the peer may jump arbitrarily, so this is capped at what the engine can have
    /// published: [`LOST_BEFORE_MAX`], plus [`MESSAGES_PER_S_MAX`] per second since the stream began.
    pub lost: u64,
    /// Messages that had already been applied.
    pub duplicates: u64,
    /// Messages that arrived after they had been given up.
    pub late: u64,
    /// Messages dropped because too many were held, and times that the driver dropped messages.
    pub overflows: u64,
    /// Detected engine restarts.
    pub restarts: u64,
    /// Replays requested.
    pub replays: u64,
    /// Times that replays made no progress for too long, and the stream continued without the missing messages.
    pub given_up: u64,
    /// Times that the state was cleared.
    pub cleared: u64,
}

/// Position in a stream, from which another process can continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// The number of the last message applied.
    pub seq: u64,
    /// The XXH3-64 hash of its content.
    pub payload_hash: u64,
}

/// The state of one stream.
#[derive(Debug)]
pub struct Sequence {
    config: Config,
    counters: Counters,
    connected: bool,
    /// The next expected number; `None` if any is accepted.
    next: Option<u64>,
    /// The first message applied since the last clear, if any.
    first: Option<u64>,
    /// Number and hash of recently applied messages, indexed by number modulo [`RECENT`].
    recent: Vec<(u64, u64)>,
    /// Messages held until earlier ones arrive.
    held: BTreeMap<u64, Vec<u8>>,
    held_bytes: usize,
    /// Messages were dropped that the next replay has to return.
    dropped: bool,
    catching_up: Option<CatchingUp>,
    round: Round,
    /// When the last replay was requested.
    asked_at: Option<Nanos>,
    /// When it was first connected.
    began_at: Option<Nanos>,
}

/// State of a stream that is not trusted because messages may be missing.
#[derive(Clone, Copy, Debug)]
struct CatchingUp {
    why: Distrust,
    /// The replay in progress; `None` if the next one must not be requested yet.
    replay: Option<Replay>,
    /// Consecutive replays without progress.
    attempts: u32,
    /// Messages were dropped before the current replay was requested, which has to return them.
    dropped: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Distrust {
    /// Messages before the held ones are missing. If they arrive late, the stream is trusted again.
    Gap,
    /// Messages may have been missed, which only a replay can show.
    Missed,
    /// Like [`Distrust::Missed`]; in addition, the engine may have restarted.
    Engine,
}

#[derive(Clone, Copy, Debug)]
struct Replay {
    /// When it last returned a missing message, or started.
    progress_at: Nanos,
    /// Whether it has returned a missing message.
    progress: bool,
    /// Whether it has returned any message.
    answered: bool,
}

/// Most messages that an engine can publish per second: one per step.
pub const MESSAGES_PER_S_MAX: u64 = 10_000;
/// Most messages counted as lost from before the stream was connected.
pub const LOST_BEFORE_MAX: u64 = 1_000_000;

/// Number of message hashes kept. Duplicates and changed messages are recognised within this range.
const RECENT: u64 = 1024;

/// What is known about a message whose number is below the next expected one.
enum Past {
    /// It was applied, with this content.
    Applied,
    /// A message with other content was applied under its number.
    Other,
    /// It was given up recently.
    GivenUp,
    /// It is older than the stored hashes.
    Forgotten,
}

// === impl Config ===

impl Default for Config {
    fn default() -> Self {
        Self {
            replay: true,
            held_max: 20_000,
            held_bytes_max: 16 << 20,
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
        Self {
            config,
            counters: Counters::default(),
            connected: false,
            next: None,
            first: None,
            recent: vec![(u64::MAX, 0); RECENT as usize],
            held: BTreeMap::new(),
            held_bytes: 0,
            dropped: false,
            catching_up: None,
            round: Round(0),
            asked_at: None,
            began_at: None,
        }
    }

    /// A stream whose messages up to `position` were applied by another process. They are not applied again if a replay
    /// shows that the engine has not restarted.
    pub fn resumed(config: Config, position: Position) -> Self {
        let mut sequence = Self::new(config);
        if position.seq < u64::MAX {
            sequence.first = Some(position.seq);
            sequence.next = Some(position.seq + 1);
            sequence.recent[(position.seq % RECENT) as usize] = (position.seq, position.payload_hash);
        }
        sequence
    }

    /// The subscription is connected, for the first time or again.
    pub fn connected(&mut self, now: Nanos, out: &mut dyn FnMut(Step<'_>)) {
        self.disconnected();
        self.connected = true;
        self.began_at.get_or_insert(now);
        if self.config.replay {
            let why = if self.first.is_some() { Distrust::Engine } else { Distrust::Missed };
            self.catch_up(why, now, out);
        } else {
            self.begin_again(out, Cause::Reconnected);
        }
    }

    /// The subscription is disconnected. The stream is not trusted until it is connected and nothing is missing.
    pub fn disconnected(&mut self) {
        self.connected = false;
        self.catching_up = None;
        self.drop_held();
    }

    /// A message of the subscription.
    pub fn live(&mut self, now: Nanos, seq: u64, payload: &[u8], out: &mut dyn FnMut(Step<'_>)) {
        // The highest number marks the end of a replay.
        if !self.connected || seq == u64::MAX {
            return;
        }
        let Some(next) = self.next else {
            // The replay in progress, if any, determines the start of the stream.
            match self.catching_up {
                Some(_) => self.hold(seq, payload),
                None => self.apply(seq, payload, out),
            }
            return;
        };
        if self.catching_up.is_some_and(|state| state.why == Distrust::Engine) {
            self.hold(seq, payload);
        } else if seq == next {
            self.apply(seq, payload, out);
            self.release(out);
            if self.held.is_empty() && self.catching_up.is_some_and(|state| state.why == Distrust::Gap) {
                self.catching_up = None;
            }
        } else if seq < next {
            self.past(now, seq, payload, out);
        } else if self.config.replay {
            self.counters.gaps += u64::from(self.held.is_empty());
            self.hold(seq, payload);
            if self.catching_up.is_none() {
                self.catch_up(Distrust::Gap, now, out);
            }
        } else {
            self.counters.gaps += 1;
            self.lose(now, seq - next);
            self.clear(Cause::Lost, out);
            self.next = Some(seq);
            self.apply(seq, payload, out);
        }
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
        let Some(state) = &mut self.catching_up else { return };
        let Some(replay) = &mut state.replay else { return };
        if round != self.round || seq == u64::MAX {
            return;
        }
        replay.answered = true;
        let why = state.why;
        match self.next {
            Some(next) if seq < next => match self.known(seq, payload) {
                Past::Applied if why == Distrust::Engine => {
                    self.progress(now, Distrust::Missed);
                    self.release(out);
                }
                Past::Applied => {}
                Past::Other => self.restart(now, out),
                Past::GivenUp | Past::Forgotten => self.counters.late += 1,
            },
            // The replay has lost messages itself, or starts after the requested number.
            Some(next) if seq > next || why == Distrust::Engine => self.hold(seq, payload),
            _ => {
                self.progress(now, why);
                self.apply(seq, payload, out);
                self.release(out);
            }
        }
    }

    /// A replay's end marker.
    pub fn replay_ended(&mut self, now: Nanos, round: Round, out: &mut dyn FnMut(Step<'_>)) {
        if round == self.round {
            self.replay_over(now, true, out);
        }
    }

    /// A replay could not be made, or broke off.
    pub fn replay_failed(&mut self, now: Nanos, round: Round, out: &mut dyn FnMut(Step<'_>)) {
        if round == self.round {
            self.replay_over(now, false, out);
        }
    }

    /// The driver dropped messages of the subscription.
    pub fn overflowed(&mut self, now: Nanos, out: &mut dyn FnMut(Step<'_>)) {
        self.counters.overflows += 1;
        if !self.connected {
            return;
        }
        if self.config.replay {
            self.dropped = true;
            match &mut self.catching_up {
                Some(state) if state.why == Distrust::Gap => state.why = Distrust::Missed,
                Some(_) => {}
                None => self.catch_up(Distrust::Missed, now, out),
            }
        } else {
            // The number is kept, so that the gap is detected and older messages are recognised.
            self.clear(Cause::Lost, out);
        }
    }

    /// Time has passed. To be called at [`Sequence::next_deadline`] or more often.
    pub fn tick(&mut self, now: Nanos, out: &mut dyn FnMut(Step<'_>)) {
        if self.next_deadline().is_none_or(|deadline| now < deadline) {
            return;
        }
        match self.catching_up.and_then(|state| state.replay) {
            // A replay that returned the last message applied, nothing after it and no end marker has only lost the
            // marker.
            Some(replay) => self.replay_over(now, replay.answered && !replay.progress, out),
            None => self.ask(now, out),
        }
    }

    /// When [`Sequence::tick`] must be called.
    pub fn next_deadline(&self) -> Option<Nanos> {
        match self.catching_up?.replay {
            Some(replay) => Some(replay.progress_at + self.config.replay_timeout),
            None => Some(self.asked_at.map_or(Nanos::ZERO, |asked| asked + self.config.replay_interval)),
        }
    }

    /// Whether everything up to the last message received has been applied.
    pub fn trusted(&self) -> bool {
        self.connected && self.catching_up.is_none()
    }

    /// The last message applied since the last clear.
    pub fn position(&self) -> Option<Position> {
        self.first?;
        let seq = self.next?.checked_sub(1)?;
        let (_, payload_hash) = self.recent[(seq % RECENT) as usize];
        Some(Position { seq, payload_hash })
    }

    /// The counters so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// A live message whose number is below the next expected one.
    fn past(&mut self, now: Nanos, seq: u64, payload: &[u8], out: &mut dyn FnMut(Step<'_>)) {
        match self.known(seq, payload) {
            Past::Applied => self.counters.duplicates += 1,
            // Later messages have been applied and may have reverted its changes.
            Past::GivenUp if !self.config.replay => self.counters.late += 1,
            // If the engine has not restarted, an unnecessary replay costs little.
            Past::Other | Past::GivenUp | Past::Forgotten => {
                self.restart(now, out);
                if !self.config.replay {
                    self.apply(seq, payload, out);
                }
            }
        }
    }

    fn known(&self, seq: u64, payload: &[u8]) -> Past {
        match self.recent[(seq % RECENT) as usize] {
            (number, hash) if number == seq && hash == xxh3_64(payload) => Past::Applied,
            (number, _) if number == seq => Past::Other,
            _ if self.next.is_some_and(|next| next - seq <= RECENT) => Past::GivenUp,
            _ => Past::Forgotten,
        }
    }

    fn apply(&mut self, seq: u64, payload: &[u8], out: &mut dyn FnMut(Step<'_>)) {
        debug_assert!(self.next.is_none_or(|next| next == seq), "messages are applied in order");
        self.recent[(seq % RECENT) as usize] = (seq, xxh3_64(payload));
        self.first.get_or_insert(seq);
        self.next = Some(seq + 1);
        self.counters.applied += 1;
        out(Step::Apply { seq, payload });
    }

    /// Applies held messages that have no missing predecessor.
    fn release(&mut self, out: &mut dyn FnMut(Step<'_>)) {
        while let Some(entry) = self.held.first_entry() {
            let seq = *entry.key();
            let next = self.next.unwrap_or(seq);
            if seq > next {
                break;
            }
            let payload = entry.remove();
            self.held_bytes -= payload.len();
            if seq == next {
                self.apply(seq, &payload, out);
            } else {
                self.counters.duplicates += 1;
            }
        }
    }

    fn hold(&mut self, seq: u64, payload: &[u8]) {
        if let Some(same) = self.held.insert(seq, payload.to_vec()) {
            self.held_bytes -= same.len();
            self.counters.duplicates += 1;
        }
        self.held_bytes += payload.len();
        while self.held.len() > self.config.held_max || self.held_bytes > self.config.held_bytes_max {
            let Some((_, last)) = self.held.pop_last() else { break };
            self.held_bytes -= last.len();
            self.counters.overflows += 1;
            self.dropped = true;
        }
    }

    fn drop_held(&mut self) {
        self.held.clear();
        self.held_bytes = 0;
        self.dropped = false;
    }

    fn catch_up(&mut self, why: Distrust, now: Nanos, out: &mut dyn FnMut(Step<'_>)) {
        self.catching_up = Some(CatchingUp { why, replay: None, attempts: 0, dropped: false });
        self.ask(now, out);
    }

    /// Requests a replay, or leaves it to a later tick.
    fn ask(&mut self, now: Nanos, out: &mut dyn FnMut(Step<'_>)) {
        let Some(state) = &mut self.catching_up else { return };
        state.replay = None;
        if self.asked_at.is_some_and(|asked| now < asked + self.config.replay_interval) {
            return;
        }
        state.replay = Some(Replay { progress_at: now, progress: false, answered: false });
        self.asked_at = Some(now);
        self.round.0 += 1;
        self.counters.replays += 1;
        state.dropped |= std::mem::take(&mut self.dropped);
        // Includes the last message applied, to check that it is unchanged.
        let from = self.next.map_or(0, |next| next.saturating_sub(u64::from(self.first.is_some())));
        out(Step::Replay { round: self.round, from });
    }

    fn progress(&mut self, now: Nanos, why: Distrust) {
        if let Some(state) = &mut self.catching_up {
            state.why = why;
            state.attempts = 0;
            if let Some(replay) = &mut state.replay {
                (replay.progress, replay.progress_at) = (true, now);
            }
        }
    }

    /// The replay is over; `complete` if it returned everything available.
    fn replay_over(&mut self, now: Nanos, complete: bool, out: &mut dyn FnMut(Step<'_>)) {
        let Some(state) = &mut self.catching_up else { return };
        let Some(replay) = state.replay.take() else { return };
        let first_held = self.held.first_key_value().map(|(first, _)| *first);
        if complete && state.why == Distrust::Engine && !replay.answered {
            // The engine does not have the last message applied: it has restarted and published fewer messages.
            self.restart(now, out);
            return;
        }
        if complete && self.next.is_none() && first_held.is_none_or(|first| first == 0) {
            // Nothing had been published before.
            self.next = Some(0);
            self.release(out);
        }
        let Some(state) = &mut self.catching_up else { return };
        state.dropped &= !(complete && replay.answered);
        let dropped = state.dropped || self.dropped;
        if complete && self.held.is_empty() && !dropped && state.why != Distrust::Engine {
            self.catching_up = None;
            return;
        }
        if !replay.progress {
            state.attempts += 1;
            if state.attempts >= self.config.attempts_max {
                if dropped {
                    // Held messages must not be applied, since messages after them may be missing.
                    self.drop_held();
                }
                self.give_up(now, out);
                return;
            }
        }
        self.ask(now, out);
    }

    /// Clears the state and continues with the next available message.
    fn give_up(&mut self, now: Nanos, out: &mut dyn FnMut(Step<'_>)) {
        let before = self.next;
        self.counters.given_up += 1;
        self.catching_up = None;
        self.dropped = false;
        self.begin_again(out, Cause::Lost);
        let mut expected = before;
        while let Some((&first, _)) = self.held.first_key_value() {
            // Held messages may have further gaps, each of which costs as much again.
            self.lose(now, expected.map_or(0, |next| first.saturating_sub(next)));
            self.clear(Cause::Lost, out);
            self.next = Some(first);
            self.release(out);
            expected = self.next;
        }
    }

    /// The engine has restarted. Its replay returns all that it holds.
    fn restart(&mut self, now: Nanos, out: &mut dyn FnMut(Step<'_>)) {
        self.counters.restarts += 1;
        self.drop_held();
        self.begin_again(out, Cause::Restarted);
        if self.config.replay {
            self.catch_up(Distrust::Missed, now, out);
        }
    }

    /// Clears the state; the next message of any number is the first.
    fn begin_again(&mut self, out: &mut dyn FnMut(Step<'_>), cause: Cause) {
        self.next = None;
        self.recent.fill((u64::MAX, 0));
        self.clear(cause, out);
    }

    /// Counts messages given up. Numbers come from the peer; a jump further than the engine can have published is not
    /// counted in full.
    fn lose(&mut self, now: Nanos, messages: u64) {
        let seconds = self.began_at.map_or(0, |began| (now - began).0 / 1_000_000_000);
        let most = LOST_BEFORE_MAX.saturating_add(seconds.saturating_mul(MESSAGES_PER_S_MAX));
        let lost = self.counters.lost.saturating_add(messages).min(most);
        // If a driver's time goes back, the counter does not decrease.
        self.counters.lost = self.counters.lost.max(lost);
    }

    fn clear(&mut self, cause: Cause, out: &mut dyn FnMut(Step<'_>)) {
        if self.first.take().is_some() {
            self.counters.cleared += 1;
            out(Step::Clear(cause));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    const REPLAY: Config = Config {
        replay: true,
        held_max: 8,
        held_bytes_max: 1 << 10,
        replay_timeout: Nanos::from_secs(2),
        attempts_max: 3,
        replay_interval: Nanos::from_millis(200),
    };
    const ALONE: Config = Config { replay: false, ..REPLAY };

    /// A step, in short form.
    #[derive(Debug, PartialEq)]
    enum Did {
        Apply(u64),
        Replay(u64),
        Clear(Cause),
    }
    use Did::{Apply, Clear, Replay};

    fn steps(run: impl FnOnce(&mut dyn FnMut(Step<'_>))) -> Vec<Did> {
        let mut did = Vec::new();
        run(&mut |step| {
            did.push(match step {
                Step::Apply { seq, .. } => Apply(seq),
                Step::Replay { from, .. } => Replay(from),
                Step::Clear(cause) => Clear(cause),
            });
        });
        did
    }

    /// A stream with a passive driver.
    struct Stream {
        sequence: Sequence,
        now: Nanos,
    }

    impl Stream {
        fn new(config: Config) -> Self {
            Self { sequence: Sequence::new(config), now: Nanos::ZERO }
        }

        /// A trusted stream that has received messages up to `last`.
        fn live_until(config: Config, last: u64) -> Self {
            let mut stream = Self::new(config);
            stream.connect();
            stream.ended();
            for seq in 0..=last {
                assert_eq!(stream.live(seq, b"a"), [Apply(seq)]);
            }
            assert!(stream.sequence.trusted());
            stream.now += Nanos::from_secs(1);
            stream
        }

        fn connect(&mut self) -> Vec<Did> {
            steps(|out| self.sequence.connected(self.now, out))
        }

        fn live(&mut self, seq: u64, text: &[u8]) -> Vec<Did> {
            steps(|out| self.sequence.live(self.now, seq, text, out))
        }

        fn replayed(&mut self, seq: u64, text: &[u8]) -> Vec<Did> {
            let round = self.sequence.round;
            steps(|out| self.sequence.replayed(self.now, round, seq, text, out))
        }

        fn ended(&mut self) -> Vec<Did> {
            let round = self.sequence.round;
            self.now += Nanos::from_secs(1);
            steps(|out| self.sequence.replay_ended(self.now, round, out))
        }

        fn wait(&mut self, secs: u64) -> Vec<Did> {
            self.now += Nanos::from_secs(secs);
            steps(|out| self.sequence.tick(self.now, out))
        }
    }

    #[test]
    fn a_first_connection_asks_for_everything_and_holds_what_comes_meanwhile() {
        let mut stream = Stream::new(REPLAY);
        assert_eq!(stream.connect(), [Replay(0)]);
        assert_eq!(stream.live(2, b"a"), []);
        assert!(!stream.sequence.trusted());
        assert_eq!(stream.replayed(0, b"a"), [Apply(0)]);
        assert_eq!(stream.replayed(1, b"a"), [Apply(1), Apply(2)]);
        assert_eq!(stream.ended(), []);
        assert!(stream.sequence.trusted());
        assert_eq!(stream.sequence.next_deadline(), None);
    }

    #[test]
    fn an_engine_whose_buffer_has_rolled_over_is_followed_from_what_it_still_has() {
        let mut stream = Stream::new(REPLAY);
        stream.connect();
        assert_eq!(stream.replayed(7, b"a"), [Apply(7)]);
        stream.ended();
        assert!(stream.sequence.trusted());
    }

    #[test]
    fn a_gap_is_filled_by_a_replay_that_begins_with_the_last_message_applied() {
        let mut stream = Stream::live_until(REPLAY, 4);
        assert_eq!(stream.live(7, b"a"), [Replay(4)]);
        assert_eq!(stream.live(8, b"a"), []);
        assert_eq!(stream.replayed(4, b"a"), []);
        assert_eq!(stream.replayed(5, b"a"), [Apply(5)]);
        assert_eq!(stream.replayed(6, b"a"), [Apply(6), Apply(7), Apply(8)]);
        stream.ended();
        assert!(stream.sequence.trusted());
        assert_eq!((stream.sequence.counters().gaps, stream.sequence.counters().lost), (1, 0));
    }

    #[test]
    fn a_late_message_that_fills_the_gap_makes_the_replay_needless() {
        let mut stream = Stream::live_until(REPLAY, 4);
        assert_eq!(stream.live(6, b"a"), [Replay(4)]);
        assert_eq!(stream.live(5, b"a"), [Apply(5), Apply(6)]);
        assert!(stream.sequence.trusted());
        assert_eq!(stream.replayed(5, b"a"), [], "an answer that is no longer needed");
    }

    #[test]
    fn a_replay_with_gaps_of_its_own_is_asked_for_again_and_given_up_without_progress() {
        let mut stream = Stream::live_until(REPLAY, 4);
        stream.live(9, b"a");
        assert_eq!(stream.replayed(5, b"a"), [Apply(5)]);
        assert_eq!(stream.replayed(7, b"a"), []);
        assert_eq!(stream.ended(), [Replay(5)], "from the last message applied");
        assert_eq!(stream.ended(), [Replay(5)], "no answer: first retry");
        assert_eq!(stream.ended(), [Replay(5)], "twice");
        assert_eq!(
            stream.ended(),
            [Clear(Cause::Lost), Apply(7), Clear(Cause::Lost), Apply(9)],
            "given up after three attempts"
        );
        assert!(stream.sequence.trusted());
        assert_eq!((stream.sequence.counters().lost, stream.sequence.counters().cleared), (2, 2));
    }

    #[test]
    fn without_a_replay_a_gap_costs_what_was_known() {
        let mut stream = Stream::live_until(ALONE, 4);
        assert_eq!(stream.live(6, b"a"), [Clear(Cause::Lost), Apply(6)]);
        assert_eq!(stream.live(5, b"a"), [], "a later message has been applied");
        assert_eq!(stream.live(7, b"a"), [Apply(7)]);
        assert!(stream.sequence.trusted());
        assert_eq!((stream.sequence.counters().lost, stream.sequence.counters().late), (1, 1));
    }

    #[test]
    fn a_message_that_comes_twice_counts_once() {
        for config in [REPLAY, ALONE] {
            let mut stream = Stream::live_until(config, 4);
            assert_eq!(stream.live(2, b"a"), []);
            assert_eq!(stream.sequence.counters().duplicates, 1);
            assert!(stream.sequence.trusted());
        }
    }

    #[test]
    fn numbers_that_begin_again_are_a_restart() {
        let mut stream = Stream::live_until(ALONE, 4);
        assert_eq!(stream.live(0, b"b"), [Clear(Cause::Restarted), Apply(0)]);
        assert_eq!(stream.live(1, b"b"), [Apply(1)]);
        let mut stream = Stream::live_until(REPLAY, 4);
        assert_eq!(stream.live(1, b"b"), [Clear(Cause::Restarted), Replay(0)]);
        assert_eq!(stream.replayed(0, b"b"), [Apply(0)]);
        assert_eq!(stream.replayed(1, b"b"), [Apply(1)]);
        stream.ended();
        assert!(stream.sequence.trusted());
        assert_eq!(stream.sequence.counters().restarts, 1);
    }

    #[test]
    fn after_a_reconnection_the_same_last_message_proves_the_same_engine() {
        let mut stream = Stream::live_until(REPLAY, 4);
        stream.sequence.disconnected();
        assert!(!stream.sequence.trusted());
        assert_eq!(stream.connect(), [Replay(4)]);
        assert_eq!(stream.live(6, b"a"), [], "from any engine");
        assert_eq!(stream.live(5, b"a"), []);
        assert_eq!(stream.replayed(4, b"a"), [Apply(5), Apply(6)]);
        stream.ended();
        assert!(stream.sequence.trusted());
        assert_eq!(stream.sequence.counters().cleared, 0);
    }

    #[test]
    fn after_a_reconnection_another_last_message_or_none_is_a_restart() {
        let mut stream = Stream::live_until(REPLAY, 4);
        stream.connect();
        assert_eq!(stream.replayed(4, b"b"), [Clear(Cause::Restarted)]);
        assert_eq!(stream.wait(1), [Replay(0)]);
        let mut stream = Stream::live_until(REPLAY, 4);
        stream.connect();
        assert_eq!(stream.ended(), [Clear(Cause::Restarted), Replay(0)]);
        assert_eq!(stream.ended(), []);
        assert!(stream.sequence.trusted(), "nothing is missing from an engine that holds nothing");
        assert_eq!(stream.live(0, b"b"), [Apply(0)]);
    }

    #[test]
    fn without_a_replay_a_reconnection_costs_what_was_known() {
        let mut stream = Stream::live_until(ALONE, 4);
        stream.sequence.disconnected();
        assert_eq!(stream.connect(), [Clear(Cause::Reconnected)]);
        assert_eq!(stream.live(2, b"b"), [Apply(2)]);
    }

    #[test]
    fn a_replay_that_never_ends_is_asked_for_again() {
        let mut stream = Stream::live_until(REPLAY, 4);
        stream.live(6, b"a");
        assert_eq!(stream.wait(1), []);
        assert_eq!(stream.wait(1), [Replay(4)]);
        assert_eq!(stream.wait(2), [Replay(4)]);
        assert_eq!(stream.wait(2), [Clear(Cause::Lost), Apply(6)]);
    }

    #[test]
    fn a_replay_that_lacks_only_its_end_marker_is_enough() {
        let mut stream = Stream::live_until(REPLAY, 4);
        stream.connect();
        assert_eq!(stream.replayed(4, b"a"), []);
        assert_eq!(stream.wait(2), [Replay(4)], "more than the marker may have been lost");
        assert_eq!(stream.replayed(4, b"a"), []);
        assert_eq!(stream.wait(2), []);
        assert!(stream.sequence.trusted());
        assert_eq!(stream.sequence.counters().cleared, 0);
    }

    #[test]
    fn a_late_answer_to_an_earlier_question_is_passed_over() {
        let mut stream = Stream::live_until(REPLAY, 4);
        stream.live(6, b"a");
        let earlier = stream.sequence.round;
        assert_eq!(stream.wait(2), [Replay(4)]);
        let now = stream.now;
        assert_eq!(steps(|out| stream.sequence.replayed(now, earlier, 5, b"b", out)), []);
        assert_eq!(steps(|out| stream.sequence.replay_ended(now, earlier, out)), []);
        assert_eq!(stream.replayed(5, b"a"), [Apply(5), Apply(6)]);
    }

    #[test]
    fn what_is_held_is_bounded_and_asked_for_again() {
        let mut stream = Stream::live_until(REPLAY, 0);
        for seq in 2..100 {
            stream.live(seq, b"a");
        }
        assert_eq!(stream.sequence.held.len(), REPLAY.held_max);
        stream.sequence.drop_held();
        for seq in 2..100 {
            stream.live(seq, &[b'a'; 300]);
        }
        assert_eq!((stream.sequence.held.len(), stream.sequence.held_bytes), (3, 900));
        let did = stream.replayed(1, b"a");
        assert_eq!(did, [Apply(1), Apply(2), Apply(3), Apply(4)]);
        assert_eq!(stream.ended(), [Replay(4)], "for the dropped messages");
    }

    #[test]
    fn messages_the_driver_dropped_are_asked_for_or_cost_what_was_known() {
        let mut stream = Stream::live_until(REPLAY, 4);
        let now = stream.now;
        assert_eq!(steps(|out| stream.sequence.overflowed(now, out)), [Replay(4)]);
        assert_eq!(stream.live(5, b"a"), [Apply(5)]);
        assert!(!stream.sequence.trusted(), "more may have been dropped after it");
        let mut stream = Stream::live_until(ALONE, 4);
        assert_eq!(steps(|out| stream.sequence.overflowed(now, out)), [Clear(Cause::Lost)]);
        assert_eq!(stream.live(3, b"a"), []);
        assert_eq!(stream.live(8, b"a"), [Apply(8)]);
    }

    #[test]
    fn a_stream_is_taken_up_again_where_another_process_left_it() {
        let position = Stream::live_until(REPLAY, 4).sequence.position().expect("messages were applied");
        let mut stream = Stream { sequence: Sequence::resumed(REPLAY, position), now: Nanos::ZERO };
        assert_eq!(stream.connect(), [Replay(4)]);
        assert_eq!(stream.replayed(4, b"a"), []);
        assert_eq!(stream.replayed(5, b"a"), [Apply(5)]);
        let mut alone = Stream { sequence: Sequence::resumed(ALONE, position), now: Nanos::ZERO };
        assert_eq!(alone.connect(), [Clear(Cause::Reconnected)]);
    }

    #[test]
    fn numbers_that_jump_count_as_far_as_an_engine_can_have_come() {
        for config in [REPLAY, ALONE] {
            let mut stream = Stream::live_until(config, 0);
            for _ in 0..3 {
                stream.live(u64::MAX - 1, b"b");
                stream.wait(1);
                stream.live(u64::MAX, b"b");
                stream.live(1, b"b");
            }
            stream.connect();
            while stream.sequence.next_deadline().is_some() {
                stream.wait(2);
            }
            assert!(stream.sequence.trusted());
            let lost = stream.sequence.counters().lost;
            let most = LOST_BEFORE_MAX + MESSAGES_PER_S_MAX * (stream.now.0 / 1_000_000_000);
            assert!(lost <= most && (config.replay || lost >= LOST_BEFORE_MAX), "{lost} of {most}");
        }
    }

    proptest! {
        /// For any numbers that a peer sends, no more messages count as lost than it can have sent.
        #[test]
        fn no_more_is_lost_than_can_have_been_sent(
            jumps in prop::collection::vec((any::<u64>(), 0u64..3_000, any::<bool>()), 1..60),
            replay in any::<bool>(),
        ) {
            let mut stream = Stream::live_until(if replay { REPLAY } else { ALONE }, 0);
            let mut before = 0;
            for (seq, millis, ends) in jumps {
                stream.now += Nanos::from_millis(millis);
                stream.live(seq, b"b");
                if ends {
                    stream.ended();
                }
                let lost = stream.sequence.counters().lost;
                let most = LOST_BEFORE_MAX as f64 + MESSAGES_PER_S_MAX as f64 * stream.now.as_secs_f64();
                prop_assert!(lost >= before && lost as f64 <= most, "{} of {}", lost, most);
                before = lost;
            }
        }
    }

    #[test]
    fn replays_are_asked_for_no_faster_than_their_interval() {
        let mut stream = Stream::live_until(REPLAY, 4);
        let before = stream.sequence.counters().replays;
        for turn in 0..100 {
            stream.live(turn % 2, if turn % 3 == 0 { b"b" } else { b"c" });
        }
        assert_eq!(stream.sequence.counters().replays, before + 1);
    }

    /// An engine: the messages it has published since it started, and its number of copies of each block.
    #[derive(Default)]
    struct Engine {
        epoch: u8,
        log: Vec<Vec<u8>>,
        copies: BTreeMap<u8, u32>,
    }

    impl Engine {
        /// Stores or removes a block; every message differs, as those of engines do by their timestamp.
        fn publish(&mut self, block: u8, store: bool) -> u64 {
            let store = store || !self.copies.contains_key(&block);
            let seq = self.log.len() as u64;
            let payload = vec![self.epoch, seq as u8, (seq >> 8) as u8, block, u8::from(store)];
            change(&mut self.copies, &payload);
            self.log.push(payload);
            seq
        }
    }

    fn change(copies: &mut BTreeMap<u8, u32>, payload: &[u8]) {
        let (block, store) = (payload[3], payload[4] == 1);
        if store {
            *copies.entry(block).or_default() += 1;
        } else if let Some(count) = copies.get_mut(&block) {
            *count -= 1;
            if *count == 0 {
                copies.remove(&block);
            }
        }
    }

    /// Events of the test, failures included.
    #[derive(Clone, Debug)]
    enum Act {
        Publish {
            block: u8,
            store: bool,
        },
        /// Delivers the message this far back, duplicates it, or drops it.
        Live {
            back: usize,
            twice: bool,
            drop: bool,
        },
        Replay {
            twice: bool,
            drop: bool,
        },
        Wait {
            millis: u64,
        },
        Restart,
        Disconnect,
        Connect,
        Overflow {
            count: usize,
        },
    }

    fn acts() -> impl Strategy<Value = Act> {
        let often = |weight, chance: f64| (weight, prop::bool::weighted(chance));
        let (_, twice) = often(1, 0.1);
        let (_, drop) = often(1, 0.1);
        prop_oneof![
            8 => (0..12_u8, prop::bool::weighted(0.6))
                .prop_map(|(block, store)| Act::Publish { block, store }),
            10 => (prop_oneof![5 => Just(0), 1 => 0..5_usize], twice, drop)
                .prop_map(|(back, twice, drop)| Act::Live { back, twice, drop }),
            10 => (twice, drop).prop_map(|(twice, drop)| Act::Replay { twice, drop }),
            2 => (0..3000_u64).prop_map(|millis| Act::Wait { millis }),
            1 => Just(Act::Restart),
            1 => Just(Act::Disconnect),
            2 => Just(Act::Connect),
            1 => (0..4_usize).prop_map(|count| Act::Overflow { count }),
        ]
    }

    /// A message of a replay; `None` ends it.
    type Answer = Option<(u64, Vec<u8>)>;

    /// An engine, a channel and a driver.
    struct World {
        engine: Engine,
        sequence: Sequence,
        copies: BTreeMap<u8, u32>,
        now: Nanos,
        /// Messages in transit on the current connection.
        flying: VecDeque<u64>,
        /// Answers in transit.
        answers: VecDeque<(Round, Answer)>,
        /// The last replay that has returned a message.
        begun: Round,
        buffer: usize,
        connected: bool,
    }

    impl World {
        fn with(&mut self, run: impl FnOnce(&mut Sequence, Nanos, &mut dyn FnMut(Step<'_>))) {
            let (engine, copies, answers) = (&self.engine, &mut self.copies, &mut self.answers);
            let buffer = self.buffer;
            run(&mut self.sequence, self.now, &mut |step| match step {
                Step::Apply { payload, .. } => change(copies, payload),
                Step::Clear(_) => copies.clear(),
                Step::Replay { round, from } => {
                    let kept = engine.log.len().saturating_sub(buffer);
                    let first = kept.max(from as usize).min(engine.log.len());
                    let rest = engine.log[first..].iter().zip(first..);
                    answers.extend(rest.map(|(text, seq)| (round, Some((seq as u64, text.clone())))));
                    answers.push_back((round, None));
                }
            });
        }

        fn act(&mut self, act: Act) {
            match act {
                Act::Publish { block, store } => {
                    let seq = self.engine.publish(block, store);
                    if self.connected {
                        self.flying.push_back(seq);
                    }
                }
                Act::Live { back, twice, drop } => {
                    let back = back.min(self.flying.len().saturating_sub(1));
                    let Some(&seq) = self.flying.get(back) else { return };
                    if !twice {
                        self.flying.remove(back);
                    }
                    if !drop {
                        let payload = self.engine.log[seq as usize].clone();
                        self.with(|sequence, now, out| sequence.live(now, seq, &payload, out));
                    }
                }
                Act::Replay { twice, drop } => {
                    let Some(answer) = self.answers.pop_front() else { return };
                    // An engine drops messages that exceed its socket's queue, which never affects the first of a
                    // replay.
                    let drop = drop && self.begun == answer.0;
                    self.begun = answer.0;
                    if twice {
                        self.answers.push_front(answer.clone());
                    }
                    match answer {
                        _ if drop => {}
                        (round, Some((seq, payload))) => {
                            self.with(|sequence, now, out| {
                                sequence.replayed(now, round, seq, &payload, out);
                            });
                        }
                        (round, None) => {
                            self.with(|sequence, now, out| sequence.replay_ended(now, round, out));
                        }
                    }
                }
                Act::Wait { millis } => {
                    self.now += Nanos::from_millis(millis);
                    self.with(|sequence, now, out| sequence.tick(now, out));
                }
                Act::Restart => {
                    self.act(Act::Disconnect);
                    let epoch = self.engine.epoch.wrapping_add(1);
                    self.engine = Engine { epoch, ..Engine::default() };
                }
                Act::Disconnect => {
                    self.connected = false;
                    self.flying.clear();
                    self.sequence.disconnected();
                }
                Act::Connect => {
                    if !self.connected {
                        self.connected = true;
                        self.with(|sequence, now, out| sequence.connected(now, out));
                    }
                }
                Act::Overflow { count } => {
                    let keep = self.flying.len().saturating_sub(count);
                    self.flying.truncate(keep);
                    self.with(|sequence, now, out| sequence.overflowed(now, out));
                }
            }
        }

        fn claims_nothing_else(&self) -> Result<(), TestCaseError> {
            for (block, copies) in &self.copies {
                prop_assert!(self.engine.copies.get(block) >= Some(copies), "{block}");
            }
            Ok(())
        }

        /// Delivers everything, in order and once, plus one more message.
        fn quiet(&mut self) {
            self.act(Act::Connect);
            self.act(Act::Publish { block: 0, store: true });
            for _ in 0..10_000 {
                if !self.flying.is_empty() {
                    self.act(Act::Live { back: 0, twice: false, drop: false });
                } else if !self.answers.is_empty() {
                    self.act(Act::Replay { twice: false, drop: false });
                } else if self.sequence.next_deadline().is_some() {
                    self.act(Act::Wait { millis: 250 });
                } else {
                    return;
                }
            }
            panic!("the stream does not settle: {:?}", self.sequence.catching_up);
        }
    }

    fn world(config: Config, buffer: usize, acts: Vec<Act>) -> World {
        let mut world = World {
            engine: Engine::default(),
            sequence: Sequence::new(config),
            copies: BTreeMap::new(),
            now: Nanos::ZERO,
            flying: VecDeque::new(),
            answers: VecDeque::new(),
            begun: Round(0),
            buffer,
            connected: false,
        };
        for act in acts {
            world.act(act);
            assert!(world.sequence.held.len() <= config.held_max);
            let bytes: usize = world.sequence.held.values().map(Vec::len).sum();
            assert_eq!(bytes, world.sequence.held_bytes);
        }
        world.quiet();
        assert!(world.sequence.trusted());
        world
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        /// Invariant: With a replay, a KV event stream ends in the engine's state; without, no block is credited that
        /// the engine does not hold.
        ///
        /// Also held by `with_a_short_replay_nothing_is_claimed_that_the_engine_does_not_hold`,
        /// `without_a_replay_nothing_is_claimed_that_the_engine_does_not_hold`.
        #[test]
        fn with_a_replay_of_everything_the_receiver_ends_with_the_engines_state(
            acts in prop::collection::vec(acts(), 0..120),
        ) {
            let world = world(REPLAY, usize::MAX, acts);
            if world.sequence.counters().given_up == 0 {
                prop_assert_eq!(world.copies, world.engine.copies);
            } else {
                world.claims_nothing_else()?;
            }
        }

        #[test]
        fn with_a_short_replay_nothing_is_claimed_that_the_engine_does_not_hold(
            acts in prop::collection::vec(acts(), 0..120),
            buffer in 0..6_usize,
        ) {
            world(REPLAY, buffer, acts).claims_nothing_else()?;
        }

        #[test]
        fn without_a_replay_nothing_is_claimed_that_the_engine_does_not_hold(
            acts in prop::collection::vec(acts(), 0..120),
        ) {
            world(ALONE, 0, acts).claims_nothing_else()?;
        }
    }
}
