//! Which conversations may begin: working-set admission, for fleets whose caches hold fewer conversations than want to
//! go on at a time.
//!
//! A conversation whose next turn finds its context in a cache costs a few hundred tokens; one that does not costs all
//! of it, and computing it drives out the context of another. Beyond some number of conversations each drives out the
//! next, and no placement helps: the fleet is busy with computing again what it had. Operating systems know this as
//! thrashing, and the cure is theirs too (Denning, *The working set model for program behavior*, CACM 1968): a
//! conversation goes on only while the contexts of all that go on fit.
//!
//! - A conversation is **active** from its first request until it has been idle for longer than nine in ten of the
//!   pauses that were seen to end. Its requests never wait here. A request of one that is not active waits until there
//!   is room; those that come back before those that begin.
//! - **Room** is there for all until the fleet thrashes. From then on it is there while what the active ones are
//!   expected to need is below a limit. One that is being answered needs its context, and no less than is usual; one
//!   that rests, that times the share of pauses that end at all. Where conversations have one turn each, only what is
//!   being answered counts.
//! - The **limit** follows from evidence. Each round, of as many turns as there are active conversations, tells which
//!   share of the tokens that were computed had been sent to the same endpoint before, and which share of the turns found
//!   their endpoint busy with other prompts. The product is about the share of the endpoints' time for prompts that is
//!   wasted. Above three eighths the fleet thrashes: the limit is set, an eighth below what is needed at that moment. Above a
//!   quarter it is lowered by another eighth; below three sixteenths it rises by a sixteenth a round while somebody
//!   waits, and is given up when twice of what is needed would be within it. It is never below three quarters of what
//!   the endpoints say their caches hold, since for a while after the fleet has thrashed everybody's context is gone, and one conversation for each endpoint may always go on.
//!
//! A fleet that keeps up is left alone, whatever its caches lose: a limit would have conversations wait for what costs
//! next to nothing. Whoever has no session is none of this room's business.

use std::collections::BTreeSet;

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use crate::queue::Lane;
use crate::request::SessionKey;
use crate::time::Nanos;

/// Conversations that are remembered, active or not.
const SESSIONS_MAX: usize = 65_536;
/// How long a conversation stays active until pauses have been seen. Agents' tools take seconds (half of them up to nine,
/// nine in ten up to 77, in Weka's traces), people minutes.
const IDLE_SPAN: Nanos = Nanos::from_secs(60);
/// Pauses after which each counts half.
const PAUSES_MAX: u32 = 4096;
/// Least turns of a round.
const ROUND_TURNS_MIN: u64 = 32;
/// One, as a factor.
const ONE: u64 = 1024;
/// Shares of the endpoints' time for prompts that goes into computing again what they had, in units of `1 / ONE`: the
/// one from which on conversations are held back, and those above and below which fewer and more of them may go on.
const THRASHING: u64 = ONE * 3 / 8;
const MUCH: u64 = ONE / 4;
const LITTLE: u64 = ONE * 3 / 16;

/// Of one pool.
#[derive(Debug)]
pub(crate) struct SessionAdmission {
    sessions: HashMap<SessionKey, Session, FixedState>,
    /// Active ones without a request, by since when.
    resting: BTreeSet<(Nanos, SessionKey)>,
    /// Those that are remembered and not active, by since when they rest.
    past: BTreeSet<(Nanos, SessionKey)>,
    /// How many have a request.
    busy: usize,
    /// What those need, and what those need that rest.
    busy_tokens: u64,
    resting_tokens: u64,
    /// What the fleet's caches hold, and how many endpoints it has.
    capacity_tokens: u64,
    endpoints: usize,
    /// Usual context of a conversation.
    usual_tokens: u64,
    pauses: Pauses,
    /// What they may need; without, all may go on.
    limit_tokens: Option<u64>,
    round: Round,
}

#[derive(Clone, Copy, Debug)]
struct Session {
    /// Requests that are in flight or wait for nothing but their turn.
    requests: u32,
    /// Whether any of them was ever answered.
    answered: bool,
    active: bool,
    /// Since when it rests.
    since: Nanos,
    context_tokens: u64,
    /// What it counts.
    needed_tokens: u64,
}

/// Evidence of one round.
#[derive(Debug, Default)]
struct Round {
    turns: u64,
    /// Turns that found their endpoint busy with other prompts.
    busy_turns: u64,
    /// Tokens that had been sent to their endpoint before, and those of them that it did not hold.
    lost_tokens: u64,
    /// Prompt tokens that were computed, those included.
    computed_tokens: u64,
    /// Somebody was kept waiting.
    held_back: bool,
}

/// How long conversations pause, as a histogram of four bins to the octave; older pauses weigh less.
#[derive(Debug)]
struct Pauses {
    bins: Vec<u32>,
    ended: u32,
    /// Those that had not ended when they were too long.
    given_up: u32,
    /// The pause that nine in ten of those that ended did not exceed, rounded up to the end of its bin.
    idle_span: Nanos,
}

// === impl SessionAdmission ===

impl Default for SessionAdmission {
    fn default() -> Self {
        Self {
            sessions: HashMap::default(),
            resting: BTreeSet::new(),
            past: BTreeSet::new(),
            busy: 0,
            busy_tokens: 0,
            resting_tokens: 0,
            capacity_tokens: 0,
            endpoints: 0,
            usual_tokens: 0,
            pauses: Pauses { bins: vec![0; 64 * 4], ended: 0, given_up: 0, idle_span: IDLE_SPAN },
            limit_tokens: None,
            round: Round::default(),
        }
    }
}

impl SessionAdmission {
    /// How many endpoints there are, and what their caches hold; 0 if that is not known.
    pub(crate) fn set_fleet(&mut self, endpoints: usize, capacity_tokens: u64) {
        (self.endpoints, self.capacity_tokens) = (endpoints, capacity_tokens);
    }

    /// Where a request of a conversation stands.
    pub(crate) fn lane(&self, key: SessionKey) -> Lane {
        match self.sessions.get(&key) {
            Some(session) if session.active => Lane::GoesOn,
            Some(_) => Lane::Returns,
            None => Lane::Begins,
        }
    }

    /// Whether one more conversation fits, which comes with a prompt of so many tokens.
    pub(crate) fn has_room(&self, prompt_tokens: u32) -> bool {
        let active = self.busy + self.resting.len();
        let wanted = self.needed_tokens() + self.usual_tokens.max(prompt_tokens.into());
        active < self.endpoints || self.limit_tokens.is_none_or(|limit| wanted <= limit)
    }

    /// What the active ones are expected to need.
    fn needed_tokens(&self) -> u64 {
        let resting = u128::from(self.resting_tokens) * u128::from(self.pauses.end_share()) / u128::from(ONE);
        self.busy_tokens + resting as u64
    }

    /// A request comes and may go on: it is in flight from here, or waits for nothing but its turn.
    pub(crate) fn enter(&mut self, now: Nanos, key: SessionKey) {
        let fresh = Session {
            requests: 0,
            answered: false,
            active: false,
            since: now,
            context_tokens: 0,
            needed_tokens: self.usual_tokens,
        };
        let session = self.sessions.entry(key).or_insert(fresh);
        session.requests += 1;
        if session.requests > 1 {
            return;
        }
        if session.answered {
            self.pauses.ended(now - session.since);
        }
        if session.active {
            self.resting.remove(&(session.since, key));
            self.resting_tokens -= session.needed_tokens;
        } else {
            self.past.remove(&(session.since, key));
        }
        session.active = true;
        self.busy += 1;
        self.busy_tokens += session.needed_tokens;
    }

    /// A request has a place. `busy` is whether its endpoint was computing other prompts.
    pub(crate) fn placed(&mut self, key: SessionKey, prompt_tokens: u32, busy: bool) {
        self.round.turns += 1;
        self.round.busy_turns += u64::from(busy);
        self.set_context(key, prompt_tokens.into());
    }

    /// What a turn found of its prompt, and what it would have found if its endpoint had lost nothing that was sent there.
    pub(crate) fn observe(&mut self, prompt_tokens: u32, sent_tokens: u32, held_tokens: u32) {
        self.round.computed_tokens += u64::from(prompt_tokens.saturating_sub(held_tokens));
        self.round.lost_tokens += u64::from(sent_tokens.saturating_sub(held_tokens));
    }

    /// A request is over. `context_tokens` are its prompt and answer if it had one.
    pub(crate) fn leave(&mut self, now: Nanos, key: SessionKey, context_tokens: Option<u64>) {
        if let Some(tokens) = context_tokens {
            self.usual_tokens = match self.usual_tokens {
                0 => tokens,
                usual => (usual * 31 + tokens) / 32,
            };
            self.set_context(key, tokens);
        }
        let Some(session) = self.sessions.get_mut(&key) else { return };
        session.answered |= context_tokens.is_some();
        session.requests -= 1;
        if session.requests > 0 {
            return;
        }
        self.busy -= 1;
        self.busy_tokens -= session.needed_tokens;
        if session.answered {
            session.since = now;
            self.resting_tokens += session.needed_tokens;
            self.resting.insert((now, key));
        } else {
            self.sessions.remove(&key);
        }
        self.forget();
    }

    /// Time has passed: who has been idle for too long is not active any more.
    pub(crate) fn expire(&mut self, now: Nanos) {
        while let Some(&(since, key)) = self.resting.first()
            && (since + self.pauses.idle_span <= now || self.sessions.len() > SESSIONS_MAX)
        {
            self.resting.pop_first();
            self.past.insert((since, key));
            self.pauses.given_up();
            if let Some(session) = self.sessions.get_mut(&key) {
                session.active = false;
                self.resting_tokens -= session.needed_tokens;
            }
            self.forget();
        }
    }

    /// Keeps the table small. Who has a request stays, of those there are no more than fit into queue and fleet.
    fn forget(&mut self) {
        while self.sessions.len() > SESSIONS_MAX
            && let Some((_, key)) = self.past.pop_first()
        {
            self.sessions.remove(&key);
        }
    }

    /// Somebody is kept waiting.
    pub(crate) fn hold_back(&mut self) {
        self.round.held_back = true;
    }

    /// Draws the conclusion of a round that is over.
    pub(crate) fn conclude(&mut self) {
        let active = (self.busy + self.resting.len()) as u64;
        if self.round.turns < active.max(ROUND_TURNS_MIN) {
            return;
        }
        let Round { turns, busy_turns, lost_tokens, computed_tokens, held_back } =
            std::mem::take(&mut self.round);
        let lost_share = ONE * lost_tokens / computed_tokens.max(1);
        // About the share of the endpoints' time for prompts that goes into computing again what they had.
        let wasted_share = lost_share * busy_turns / turns;
        let needed = self.needed_tokens();
        let least = self.capacity_tokens / 4 * 3;
        self.limit_tokens = match self.limit_tokens {
            None if wasted_share > THRASHING => Some((needed / 8 * 7).max(least)),
            None => None,
            Some(limit) if wasted_share > MUCH => Some((limit.min(needed) / 8 * 7).max(least)),
            Some(limit) if wasted_share < LITTLE && held_back => Some(limit / 16 * 17),
            Some(limit) if wasted_share < LITTLE && needed < limit / 2 => None,
            limit => limit,
        };
    }

    /// When the next conversation will have been idle for too long, if nothing happens before.
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        self.resting.first().map(|&(since, _)| since + self.pauses.idle_span)
    }

    fn set_context(&mut self, key: SessionKey, tokens: u64) {
        let Some(session) = self.sessions.get_mut(&key) else { return };
        let needed = tokens.max(self.usual_tokens);
        let sum = if session.requests > 0 { &mut self.busy_tokens } else { &mut self.resting_tokens };
        *sum = *sum + needed - session.needed_tokens;
        (session.context_tokens, session.needed_tokens) = (tokens, needed);
    }
}

// === impl Pauses ===

impl Pauses {
    fn bin(span: Nanos) -> usize {
        let value = span.0.max(4);
        let octave = value.ilog2() as usize;
        octave * 4 + (value >> (octave - 2) & 3) as usize
    }

    fn ended(&mut self, span: Nanos) {
        self.bins[Self::bin(span)] += 1;
        self.ended += 1;
        if self.ended >= PAUSES_MAX {
            self.bins.iter_mut().for_each(|bin| *bin /= 2);
            self.ended = self.bins.iter().sum();
            self.given_up /= 2;
        }
        let mut longer = self.ended / 10;
        for (bin, &count) in self.bins.iter().enumerate().rev() {
            if count > longer {
                let (octave, quarter) = (bin / 4, bin as u64 % 4);
                self.idle_span = Nanos((5 + quarter).checked_shl(octave as u32 - 2).unwrap_or(u64::MAX));
                return;
            }
            longer -= count;
        }
    }

    fn given_up(&mut self) {
        self.given_up += 1;
        if self.given_up >= PAUSES_MAX {
            (self.given_up, self.ended) = (self.given_up / 2, self.ended / 2);
            self.bins.iter_mut().for_each(|bin| *bin /= 2);
        }
    }

    /// Share of the pauses that end, in units of `1 / ONE`.
    fn end_share(&self) -> u64 {
        let (ended, given_up) = (u64::from(self.ended), u64::from(self.given_up));
        (ended + 1) * ONE / (ended + given_up + 2)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secs(secs: u64) -> Nanos {
        Nanos::from_secs(secs)
    }

    fn turn(admission: &mut SessionAdmission, from: u64, to: u64, key: u64, tokens: u64) {
        admission.expire(secs(from));
        admission.enter(secs(from), SessionKey(key));
        admission.placed(SessionKey(key), tokens as u32, false);
        admission.leave(secs(to), SessionKey(key), Some(tokens));
        admission.check();
    }

    fn admission(endpoints: usize, capacity_tokens: u64) -> SessionAdmission {
        let mut admission = SessionAdmission::default();
        admission.set_fleet(endpoints, capacity_tokens);
        admission
    }

    #[test]
    fn there_is_room_within_the_limit_and_for_one_conversation_each_endpoint() {
        let mut admission = admission(2, 0);
        assert!(admission.has_room(u32::MAX), "there is no limit");
        admission.limit_tokens = Some(1000);
        for key in 0..2 {
            assert!(admission.has_room(900));
            admission.enter(secs(0), SessionKey(key));
            admission.placed(SessionKey(key), 900, false);
        }
        assert!(!admission.has_room(1));
        admission.limit_tokens = Some(2000);
        assert!(admission.has_room(200) && !admission.has_room(201));
    }

    #[test]
    fn whoever_pauses_for_longer_than_is_usual_is_not_active() {
        let mut admission = admission(1, 1000);
        (0..20).for_each(|n| turn(&mut admission, n * 9, n * 9 + 1, 1, 100));
        let idle_at = admission.next_deadline().expect("it rests");
        assert!((secs(172 + 8)..secs(172 + 12)).contains(&idle_at), "{idle_at:?}");
        assert_eq!(admission.lane(SessionKey(1)), Lane::GoesOn);
        admission.expire(idle_at);
        assert_eq!(admission.lane(SessionKey(1)), Lane::Returns);
        assert_eq!(admission.lane(SessionKey(2)), Lane::Begins);
        assert_eq!(admission.next_deadline(), None);
        admission.check();
    }

    #[test]
    fn of_conversations_that_never_return_nothing_is_kept() {
        let mut admission = admission(1, 1000);
        (0..200).for_each(|n| turn(&mut admission, n, n + 1, n, 600));
        let needed = admission.needed_tokens();
        assert!(needed < 600, "60 rest, and hardly one of them is expected back: {needed}");
    }

    #[test]
    fn a_request_that_was_never_answered_leaves_no_conversation() {
        let mut admission = admission(1, 1000);
        admission.enter(secs(1), SessionKey(1));
        admission.enter(secs(1), SessionKey(1));
        admission.leave(secs(2), SessionKey(1), None);
        assert_eq!(admission.lane(SessionKey(1)), Lane::GoesOn);
        admission.leave(secs(2), SessionKey(1), None);
        assert_eq!((admission.lane(SessionKey(1)), admission.busy_tokens), (Lane::Begins, 0));
    }

    /// A round in which, of 32 turns and of 100 tokens each computed, so many were busy and so many lost.
    fn round(admission: &mut SessionAdmission, busy: u64, lost: u32, held_back: bool) -> Option<u64> {
        admission.round = Round::default();
        for n in 0..ROUND_TURNS_MIN {
            admission.placed(SessionKey(0), 1, n < busy);
            admission.observe(500, 400 + lost, 400);
            if held_back {
                admission.hold_back();
            }
            admission.conclude();
        }
        admission.limit_tokens
    }

    #[test]
    fn the_limit_is_set_when_the_fleet_thrashes_and_follows_what_is_wasted() {
        let mut admission = admission(1, 1000);
        admission.enter(secs(0), SessionKey(7));
        admission.placed(SessionKey(7), 8000, false);
        assert_eq!(round(&mut admission, 32, 35, false), None, "most of what is computed is new");
        assert_eq!(round(&mut admission, 12, 100, false), None, "all is lost, and there is time for that");
        assert_eq!(round(&mut admission, 24, 80, false), Some(7000));
        assert_eq!(round(&mut admission, 12, 80, true), Some(6125), "more than a quarter");
        assert_eq!(round(&mut admission, 8, 80, true), Some(6125), "a fifth");
        assert_eq!(round(&mut admission, 4, 80, true), Some(6125 / 16 * 17));
        assert_eq!(round(&mut admission, 4, 80, false), Some(6125 / 16 * 17), "nobody would use it");
        admission.placed(SessionKey(7), 3000, false);
        assert_eq!(round(&mut admission, 4, 80, false), None, "there is twice the room");
    }

    #[test]
    fn the_limit_has_a_floor() {
        let mut admission = admission(1, 1000);
        admission.enter(secs(0), SessionKey(7));
        admission.placed(SessionKey(7), 300, false);
        for _ in 0..9 {
            assert!(round(&mut admission, 32, 100, true) >= Some(750));
        }
        assert_eq!(admission.limit_tokens, Some(750));
    }

    #[test]
    fn tables_are_bounded() {
        let mut admission = admission(1, 1000);
        for key in 0..SESSIONS_MAX as u64 + 100 {
            admission.enter(secs(1), SessionKey(key));
            admission.leave(secs(1), SessionKey(key), Some(1));
            admission.expire(secs(1));
        }
        assert!(admission.sessions.len() <= SESSIONS_MAX);
        admission.check();
    }

    impl SessionAdmission {
        /// Sums are what they sum up.
        pub(crate) fn check(&self) {
            let sum = |busy: bool| -> u64 {
                let of = |session: &&Session| session.active && (session.requests > 0) == busy;
                self.sessions.values().filter(of).map(|session| session.needed_tokens).sum()
            };
            assert_eq!((self.busy_tokens, self.resting_tokens), (sum(true), sum(false)));
            let active = self.sessions.values().filter(|session| session.active).count();
            assert_eq!(active, self.busy + self.resting.len());
            assert_eq!(self.sessions.len(), active + self.past.len());
        }

        /// As if the fleet had thrashed.
        pub(crate) fn set_limit(&mut self, tokens: u64) {
            self.limit_tokens = Some(tokens);
        }

        /// Whether nothing holds anything.
        pub(crate) fn is_idle(&self) -> bool {
            self.busy == 0 && self.busy_tokens == 0
        }
    }
}
