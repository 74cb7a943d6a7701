//! Session admission: limits the active conversations to the working set that the fleet's KV caches can hold.
//!
//! A conversation whose next turn finds its context in a cache costs a few hundred prefill tokens. A conversation that
//! does not find it costs the whole context, and its prefill evicts the context of another. Beyond some number of
//! conversations each evicts the next, and no placement helps: the fleet is busy recomputing what it had cached.
//! Operating systems call this thrashing, and the remedy is the same (Denning, *The working set model for program
//! behavior*, CACM 1968): a conversation continues only while the contexts of all active conversations fit.
//!
//! - A conversation is **active** from its first request until it has been idle for longer than the 90th percentile of
//!   observed pauses. Requests of an active conversation never wait here. A request of an inactive conversation waits
//!   until there is room; returning conversations are admitted before new ones. A conversation whose client says that this was its last request is inactive at once; if that is
//!   wrong, its next request waits for room.
//! - **Room** is unlimited until the fleet thrashes. From then on there is room while the expected need of the active
//!   conversations is below a limit. A conversation with a request needs its context, and at least the usual context;
//!   an idle one needs that times the share of pauses that end in another turn, among those after answers that ended like
//!   its last one: an agent whose tool was called almost always returns in time, a person who reads often does not. If all conversations have one turn,
//!   only those with a request count.
//! - The **limit** follows from evidence. Each round, of as many turns as there are active conversations, measures
//!   which share of the computed tokens had been sent to the same endpoint before, and which share of the turns found
//!   their endpoint busy with other prompts. The product approximates the share of the endpoints' prefill time that is
//!   wasted. Above three eighths the fleet thrashes: the limit is set, an eighth below the current need. Above a
//!   quarter it is lowered by another eighth. Below three sixteenths it rises by a sixteenth a round while a request
//!   waits, and is removed once twice the current need is within it. It is never below three quarters of the cache
//!   capacity that the endpoints report, since right after thrashing every context is lost; and one conversation per
//!   endpoint may always be active.
//!
//! A fleet that keeps up has no limit, however much its caches evict: a limit would delay conversations to avoid a
//! small cost. Requests without a session are not subject to this admission.

use std::collections::BTreeSet;

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use crate::queue::Lane;
use crate::request::{AnswerEnd, SessionKey};
use crate::time::Nanos;

/// Remembered conversations, active or not.
const SESSIONS_MAX: usize = 65_536;
/// How long a conversation stays active until pauses have been observed. Agents' tools take seconds (half of them up to
/// nine, nine in ten up to 77, in Weka's traces), people minutes.
const IDLE_SPAN: Nanos = Nanos::from_secs(60);
/// Number of observed pauses at which all counts are halved.
const PAUSES_MAX: u32 = 4096;
/// Fewest turns in a round.
const ROUND_TURNS_MIN: u64 = 32;
/// The factor one, in fixed point.
const ONE: u64 = 1024;
/// Wasted shares of the endpoints' prefill time, in units of `1 / ONE`: the one at which the limit is set, and those
/// above and below which it is lowered and raised.
const THRASHING: u64 = ONE * 3 / 8;
const MUCH: u64 = ONE / 4;
const LITTLE: u64 = ONE * 3 / 16;

/// Session admission of one pool.
#[derive(Debug)]
pub(crate) struct SessionAdmission {
    sessions: HashMap<SessionKey, Session, FixedState>,
    /// Active conversations without a request, by how their last answer ended.
    idle: [Idle; ENDS],
    /// 90th percentile of all pauses that ended, rounded up to the end of its bin.
    idle_span: Nanos,
    /// Remembered inactive conversations, by the time at which they became idle.
    past: BTreeSet<(Nanos, SessionKey)>,
    /// Number of conversations with a request.
    busy: usize,
    /// Needed tokens of the conversations with a request.
    busy_tokens: u64,
    /// KV cache capacity of the fleet, and its number of endpoints.
    capacity_tokens: u64,
    endpoints: usize,
    /// Moving average of a conversation's context.
    usual_tokens: u64,
    /// Limit of the needed tokens; `None` admits every conversation.
    limit_tokens: Option<u64>,
    round: Round,
}

#[derive(Clone, Copy, Debug)]
struct Session {
    /// Requests that are in flight or queued after admission.
    requests: u32,
    /// Whether any of its requests was ever answered.
    answered: bool,
    active: bool,
    /// When it became idle, and how its last answer ended; `None` if its client said that no other request follows.
    since: Nanos,
    end: Option<AnswerEnd>,
    context_tokens: u64,
    /// Its contribution to the sum of needed tokens.
    needed_tokens: u64,
}

/// Ends of answers.
const ENDS: usize = 3;
/// Bins of a histogram of pauses.
const BINS: usize = 64 * 4;

/// Active conversations without a request whose last answers ended in the same way.
#[derive(Debug, Default)]
struct Idle {
    /// By the time at which they became idle.
    sessions: BTreeSet<(Nanos, SessionKey)>,
    /// Their needed tokens.
    tokens: u64,
    /// Pauses that began like theirs.
    pauses: Pauses,
}

/// Measurements of one round.
#[derive(Debug, Default)]
struct Round {
    turns: u64,
    /// Turns that found their endpoint busy with other prompts.
    busy_turns: u64,
    /// Tokens that had been sent to their endpoint before but were no longer cached there.
    lost_tokens: u64,
    /// Computed prompt tokens, lost ones included.
    computed_tokens: u64,
    /// Whether a request was held back.
    held_back: bool,
}

/// Histogram of pauses between turns, four bins to the octave; older pauses weigh less.
#[derive(Debug)]
struct Pauses {
    bins: Vec<u32>,
    ended: u32,
    /// Pauses that exceeded the idle limit without ending.
    given_up: u32,
}

// === impl SessionAdmission ===

impl Default for SessionAdmission {
    fn default() -> Self {
        Self {
            sessions: HashMap::default(),
            idle: Default::default(),
            idle_span: IDLE_SPAN,
            past: BTreeSet::new(),
            busy: 0,
            busy_tokens: 0,
            capacity_tokens: 0,
            endpoints: 0,
            usual_tokens: 0,
            limit_tokens: None,
            round: Round::default(),
        }
    }
}

impl SessionAdmission {
    /// Sets the number of endpoints and their cache capacity; 0 if the capacity is not known.
    pub(crate) fn set_fleet(&mut self, endpoints: usize, capacity_tokens: u64) {
        (self.endpoints, self.capacity_tokens) = (endpoints, capacity_tokens);
    }

    /// The queue lane of a conversation's next request.
    pub(crate) fn lane(&self, key: SessionKey) -> Lane {
        match self.sessions.get(&key) {
            Some(session) if session.active => Lane::Active,
            Some(_) => Lane::Returning,
            None => Lane::New,
        }
    }

    /// Whether one more conversation fits, whose prompt has `prompt_tokens`.
    pub(crate) fn has_room(&self, prompt_tokens: u32) -> bool {
        let active = self.active();
        let wanted = self.needed_tokens() + self.usual_tokens.max(prompt_tokens.into());
        active < self.endpoints || self.limit_tokens.is_none_or(|limit| wanted <= limit)
    }

    /// Number of active conversations.
    fn active(&self) -> usize {
        self.busy + self.idle.iter().map(|idle| idle.sessions.len()).sum::<usize>()
    }

    /// Expected need of the active conversations.
    fn needed_tokens(&self) -> u64 {
        self.busy_tokens + self.idle.iter().map(Idle::needed_tokens).sum::<u64>()
    }

    /// A request is admitted: it is dispatched, or queued without further admission.
    pub(crate) fn enter(&mut self, now: Nanos, key: SessionKey) {
        let fresh = Session {
            requests: 0,
            answered: false,
            active: false,
            since: now,
            end: None,
            context_tokens: 0,
            needed_tokens: self.usual_tokens,
        };
        let session = self.sessions.entry(key).or_insert(fresh);
        session.requests += 1;
        if session.requests > 1 {
            return;
        }
        let end = session.end.filter(|_| session.answered);
        if let Some(end) = end {
            self.idle[end as usize].pauses.ended(now - session.since);
            self.idle_span = percentile(&self.idle).unwrap_or(self.idle_span);
        }
        if let Some(end) = end.filter(|_| session.active) {
            let idle = &mut self.idle[end as usize];
            idle.sessions.remove(&(session.since, key));
            idle.tokens -= session.needed_tokens;
        } else {
            self.past.remove(&(session.since, key));
        }
        session.active = true;
        self.busy += 1;
        self.busy_tokens += session.needed_tokens;
    }

    /// A request was placed. `busy` is whether its endpoint was computing other prompts.
    pub(crate) fn placed(&mut self, key: SessionKey, prompt_tokens: u32, busy: bool) {
        self.round.turns += 1;
        self.round.busy_turns += u64::from(busy);
        self.set_context(key, prompt_tokens.into());
    }

    /// Records a turn's cache reuse: `sent_tokens` is the reuse without any eviction, `held_tokens` the actual reuse.
    pub(crate) fn observe(&mut self, prompt_tokens: u32, sent_tokens: u32, held_tokens: u32) {
        self.round.computed_tokens += u64::from(prompt_tokens.saturating_sub(held_tokens));
        self.round.lost_tokens += u64::from(sent_tokens.saturating_sub(held_tokens));
    }

    /// A request is over. `context_tokens` counts its prompt and answer, if it was answered; `end` is how the answer ended,
    /// and `None` if the client said that no other request follows.
    pub(crate) fn leave(
        &mut self,
        now: Nanos,
        key: SessionKey,
        context_tokens: Option<u64>,
        end: Option<AnswerEnd>,
    ) {
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
        match (session.answered, end) {
            (true, Some(end)) => {
                (session.since, session.end) = (now, Some(end));
                let idle = &mut self.idle[end as usize];
                idle.tokens += session.needed_tokens;
                idle.sessions.insert((now, key));
            }
            (true, None) => {
                (session.since, session.end, session.active) = (now, None, false);
                self.past.insert((now, key));
            }
            (false, _) => _ = self.sessions.remove(&key),
        }
        self.forget();
    }

    /// Another router has placed a turn of a conversation, which counts as over: when it will be is not known here.
    pub(crate) fn heard(&mut self, now: Nanos, key: SessionKey, prompt_tokens: u64) {
        self.enter(now, key);
        self.leave(now, key, Some(prompt_tokens), Some(AnswerEnd::Unknown));
    }

    /// Makes conversations inactive that have been idle for too long.
    pub(crate) fn expire(&mut self, now: Nanos) {
        for end in 0..ENDS {
            while let Some(&(since, key)) = self.idle[end].sessions.first()
                && (since + self.idle_span <= now || self.sessions.len() > SESSIONS_MAX)
            {
                let idle = &mut self.idle[end];
                idle.sessions.pop_first();
                idle.pauses.given_up();
                self.past.insert((since, key));
                if let Some(session) = self.sessions.get_mut(&key) {
                    session.active = false;
                    idle.tokens -= session.needed_tokens;
                }
                self.forget();
            }
        }
    }

    /// Bounds the table. Conversations with a request stay; their number is bounded by the queue and the in-flight
    /// limit.
    fn forget(&mut self) {
        while self.sessions.len() > SESSIONS_MAX
            && let Some((_, key)) = self.past.pop_first()
        {
            self.sessions.remove(&key);
        }
    }

    /// Records that a request was held back.
    pub(crate) fn hold_back(&mut self) {
        self.round.held_back = true;
    }

    /// Ends a round that has enough turns and adjusts the limit.
    pub(crate) fn end_round(&mut self) {
        let active = self.active() as u64;
        if self.round.turns < active.max(ROUND_TURNS_MIN) {
            return;
        }
        let Round { turns, busy_turns, lost_tokens, computed_tokens, held_back } =
            std::mem::take(&mut self.round);
        let lost_share = ONE * lost_tokens / computed_tokens.max(1);
        // Approximates the share of the endpoints' prefill time spent on recomputing evicted tokens.
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

    /// When the next conversation will have been idle for too long, without further input.
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        let first = self.idle.iter().filter_map(|idle| idle.sessions.first()).min();
        first.map(|&(since, _)| since + self.idle_span)
    }

    fn set_context(&mut self, key: SessionKey, tokens: u64) {
        let in_request = |session: &&mut Session| session.requests > 0;
        let Some(session) = self.sessions.get_mut(&key).filter(in_request) else { return };
        let needed = tokens.max(self.usual_tokens);
        self.busy_tokens = self.busy_tokens + needed - session.needed_tokens;
        (session.context_tokens, session.needed_tokens) = (tokens, needed);
    }
}

// === impl Idle ===

impl Idle {
    /// Their needed tokens, weighted with the share of pauses that end.
    fn needed_tokens(&self) -> u64 {
        (u128::from(self.tokens) * u128::from(self.pauses.end_share()) / u128::from(ONE)) as u64
    }
}

/// 90th percentile of all pauses that ended, rounded up to the end of its bin.
fn percentile(idle: &[Idle]) -> Option<Nanos> {
    let mut longer = idle.iter().map(|idle| idle.pauses.ended).sum::<u32>() / 10;
    for bin in (0..BINS).rev() {
        let count = idle.iter().map(|idle| idle.pauses.bins[bin]).sum::<u32>();
        if count > longer {
            let (octave, quarter) = (bin / 4, bin as u64 % 4);
            return Some(Nanos((5 + quarter).checked_shl(octave as u32 - 2).unwrap_or(u64::MAX)));
        }
        longer -= count;
    }
    None
}

// === impl Pauses ===

impl Default for Pauses {
    fn default() -> Self {
        Self { bins: vec![0; BINS], ended: 0, given_up: 0 }
    }
}

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
    }

    fn given_up(&mut self) {
        self.given_up += 1;
        if self.given_up >= PAUSES_MAX {
            (self.given_up, self.ended) = (self.given_up / 2, self.ended / 2);
            self.bins.iter_mut().for_each(|bin| *bin /= 2);
        }
    }

    /// Share of the pauses that end in another turn, in units of `1 / ONE`.
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
        admission.leave(secs(to), SessionKey(key), Some(tokens), Some(AnswerEnd::Unknown));
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
    fn a_conversation_that_pauses_longer_than_usual_is_not_active() {
        let mut admission = admission(1, 1000);
        (0..20).for_each(|n| turn(&mut admission, n * 9, n * 9 + 1, 1, 100));
        let idle_at = admission.next_deadline().expect("the conversation is idle");
        assert!((secs(172 + 8)..secs(172 + 12)).contains(&idle_at), "{idle_at:?}");
        assert_eq!(admission.lane(SessionKey(1)), Lane::Active);
        admission.expire(idle_at);
        assert_eq!(admission.lane(SessionKey(1)), Lane::Returning);
        assert_eq!(admission.lane(SessionKey(2)), Lane::New);
        assert_eq!(admission.next_deadline(), None);
        admission.check();
    }

    #[test]
    fn a_conversation_with_turns_at_another_router_is_active_and_takes_room() {
        let mut admission = admission(1, 1000);
        admission.heard(secs(1), SessionKey(1), 600);
        admission.check();
        assert_eq!((admission.lane(SessionKey(1)), admission.idle_tokens()), (Lane::Active, 600));
        admission.enter(secs(2), SessionKey(1));
        admission.heard(secs(3), SessionKey(1), 700);
        admission.check();
        assert_eq!((admission.busy_tokens, admission.idle_tokens()), (700, 0), "it also has a request here");
    }

    #[test]
    fn of_conversations_that_never_return_nothing_is_kept() {
        let mut admission = admission(1, 1000);
        (0..200).for_each(|n| turn(&mut admission, n, n + 1, n, 600));
        let needed = admission.needed_tokens();
        assert!(needed < 600, "60 are idle and few are expected to return: {needed}");
    }

    /// Four in five pauses after tool calls end, one in five after complete answers.
    #[test]
    fn a_conversation_that_waits_for_a_tool_needs_its_room_and_one_that_waits_for_a_person_hardly() {
        let idle = |end| {
            let mut admission = admission(1, 1000);
            for n in 0..200 {
                for (key, end, returns) in [
                    (SessionKey(2 * n), AnswerEnd::ToolCalls, n % 5 != 0),
                    (SessionKey(2 * n + 1), AnswerEnd::Complete, n % 5 == 0),
                ] {
                    let at = n * 200;
                    for from in [at, at + 9].into_iter().take(1 + usize::from(returns)) {
                        admission.enter(secs(from), key);
                        admission.leave(secs(from + 1), key, Some(600), Some(end));
                    }
                    admission.check();
                }
                admission.expire(secs(n * 200 + 199));
            }
            assert_eq!(admission.needed_tokens(), 0);
            admission.enter(secs(50_000), SessionKey(9999));
            admission.leave(secs(50_000), SessionKey(9999), Some(600), Some(end));
            admission.check();
            admission.needed_tokens()
        };
        let [tool, person] = [AnswerEnd::ToolCalls, AnswerEnd::Complete].map(idle);
        assert!(tool > 250 && person < 150, "{tool} {person}");
    }

    #[test]
    fn the_last_request_of_a_conversation_leaves_its_room_at_once() {
        let mut admission = admission(1, 1000);
        admission.enter(secs(1), SessionKey(1));
        admission.leave(secs(2), SessionKey(1), Some(600), None);
        admission.check();
        assert_eq!((admission.needed_tokens(), admission.next_deadline()), (0, None));
        assert_eq!(
            admission.lane(SessionKey(1)),
            Lane::Returning,
            "a wrong claim costs its own conversation"
        );
        admission.enter(secs(3), SessionKey(1));
        admission.check();
        assert_eq!(admission.needed_tokens(), 600);
    }

    #[test]
    fn a_request_that_was_never_answered_leaves_no_conversation() {
        let mut admission = admission(1, 1000);
        admission.enter(secs(1), SessionKey(1));
        admission.enter(secs(1), SessionKey(1));
        admission.leave(secs(2), SessionKey(1), None, Some(AnswerEnd::Unknown));
        assert_eq!(admission.lane(SessionKey(1)), Lane::Active);
        admission.leave(secs(2), SessionKey(1), None, Some(AnswerEnd::Unknown));
        assert_eq!((admission.lane(SessionKey(1)), admission.busy_tokens), (Lane::New, 0));
    }

    /// Ends a round of 32 turns with 100 computed tokens each, of which `busy` turns were busy and `lost` tokens per
    /// turn were lost.
    fn round(admission: &mut SessionAdmission, busy: u64, lost: u32, held_back: bool) -> Option<u64> {
        admission.round = Round::default();
        for n in 0..ROUND_TURNS_MIN {
            admission.placed(SessionKey(0), 1, n < busy);
            admission.observe(500, 400 + lost, 400);
            if held_back {
                admission.hold_back();
            }
            admission.end_round();
        }
        admission.limit_tokens
    }

    #[test]
    fn the_limit_is_set_when_the_fleet_thrashes_and_follows_what_is_wasted() {
        let mut admission = admission(1, 1000);
        admission.enter(secs(0), SessionKey(7));
        admission.placed(SessionKey(7), 8000, false);
        assert_eq!(round(&mut admission, 32, 35, false), None, "most computed tokens are new");
        assert_eq!(
            round(&mut admission, 12, 100, false),
            None,
            "everything is lost, but few turns find a busy endpoint"
        );
        assert_eq!(round(&mut admission, 24, 80, false), Some(7000));
        assert_eq!(round(&mut admission, 12, 80, true), Some(6125), "above a quarter");
        assert_eq!(round(&mut admission, 8, 80, true), Some(6125), "a fifth: unchanged");
        assert_eq!(round(&mut admission, 4, 80, true), Some(6125 / 16 * 17));
        assert_eq!(round(&mut admission, 4, 80, false), Some(6125 / 16 * 17), "not raised: no request waits");
        admission.placed(SessionKey(7), 3000, false);
        assert_eq!(round(&mut admission, 4, 80, false), None, "removed: the need is below half of it");
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
            admission.leave(secs(1), SessionKey(key), Some(1), Some(AnswerEnd::Unknown));
            admission.expire(secs(1));
        }
        assert!(admission.sessions.len() <= SESSIONS_MAX);
        admission.check();
    }

    impl SessionAdmission {
        /// Asserts that the sums match the conversations.
        pub(crate) fn check(&self) {
            let sum = |busy: bool| -> u64 {
                let of = |session: &&Session| session.active && (session.requests > 0) == busy;
                self.sessions.values().filter(of).map(|session| session.needed_tokens).sum()
            };
            assert_eq!((self.busy_tokens, self.idle_tokens()), (sum(true), sum(false)));
            let active = self.sessions.values().filter(|session| session.active).count();
            assert_eq!(active, self.active());
            assert_eq!(self.sessions.len(), active + self.past.len());
        }

        fn idle_tokens(&self) -> u64 {
            self.idle.iter().map(|idle| idle.tokens).sum()
        }

        /// Sets a limit, as if the fleet had thrashed.
        pub(crate) fn set_limit(&mut self, tokens: u64) {
            self.limit_tokens = Some(tokens);
        }

        /// Whether no conversation has a request.
        pub(crate) fn is_idle(&self) -> bool {
            self.busy == 0 && self.busy_tokens == 0
        }
    }
}
