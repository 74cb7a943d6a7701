//! Encoding: entries to bytes, and the state that encoder and decoder share within a segment.

use super::bytes::{Keys, folded, put};
use crate::cache_accuracy::Prediction;
use crate::decision::Rejection;
use crate::endpoint::EndpointId;
use crate::policy::Reason;
use crate::rates::OwnMeasures;
use crate::request::{AnswerEnd, IfMissed, RequestId, SchedulingRequest};
use crate::scheduler::Checkpoint;
use crate::scheduler::{Input, TOKENS_TOLD};
use crate::time::Nanos;

/// The kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Synopsis,
    Rare,
    Reported,
    Arrived,
    FirstToken,
    Begun,
    Lot,
    Tokens,
    Wrote,
    Answered,
    Counted,
    Failed,
    Succeeded,
    Refreshed,
    Finished,
    Tick,
    Placed,
    Refused,
    Split,
    Ended,
    Measured,
}

impl Kind {
    pub(super) const ALL: [Self; 21] = [
        Self::Synopsis,
        Self::Rare,
        Self::Reported,
        Self::Arrived,
        Self::FirstToken,
        Self::Begun,
        Self::Lot,
        Self::Tokens,
        Self::Wrote,
        Self::Answered,
        Self::Counted,
        Self::Failed,
        Self::Succeeded,
        Self::Refreshed,
        Self::Finished,
        Self::Tick,
        Self::Placed,
        Self::Refused,
        Self::Split,
        Self::Ended,
        Self::Measured,
    ];
}

/// Flag of a prediction, beyond its number of tokens: some of them are only below the GPU.
pub(super) const HAS_LOWER: u64 = 1 << 33;

/// Flag: the entry has the same request as the previous one.
pub(super) const SAME_REQUEST: u8 = 1 << 5;
/// Time encodings, in the two highest bits.
pub(super) const SAME_TIME: u8 = 0;
pub(super) const MICROS_ON: u8 = 1;
pub(super) const NANOS_ON: u8 = 2;
pub(super) const NANOS_BACK: u8 = 3;

/// Rejection reasons by number.
pub(super) const REJECTIONS: [Rejection; 5] = [
    Rejection::NoEndpoint,
    Rejection::QueueFull,
    Rejection::QueueTimeout,
    Rejection::BudgetSpent,
    Rejection::SloMissed,
];

/// Ends of answers by number.
pub(super) const ENDS: [AnswerEnd; 3] = [AnswerEnd::Unknown, AnswerEnd::ToolCalls, AnswerEnd::Complete];

/// Flags for optional fields of a request.
pub(super) mod has {
    pub(in super::super) const EXCLUDED: u64 = 1;
    pub(in super::super) const ATTEMPT: u64 = 1 << 1;
    pub(in super::super) const SESSION: u64 = 1 << 2;
    pub(in super::super) const TENANT: u64 = 1 << 3;
    pub(in super::super) const HEAD: u64 = 1 << 4;
    pub(in super::super) const OVERLAP: u64 = 1 << 5;
    pub(in super::super) const NAME: u64 = 1 << 6;
    pub(in super::super) const PRIORITY: u64 = 1 << 7;
    pub(in super::super) const OUTPUT_MAX: u64 = 1 << 8;
    pub(in super::super) const WHOLE_ANSWER: u64 = 1 << 9;
    pub(in super::super) const HEDGE: u64 = 1 << 10;
    pub(in super::super) const BLOCK_TOKENS: u64 = 1 << 11;
    pub(in super::super) const TTFT_SLO: u64 = 1 << 12;
    pub(in super::super) const TPOT_SLO: u64 = 1 << 13;
    pub(in super::super) const LEG: u64 = 1 << 14;
    pub(in super::super) const CLAIMED_OUTPUT: u64 = 1 << 15;
    pub(in super::super) const IS_LAST: u64 = 1 << 16;
    pub(in super::super) const ADAPTER: u64 = 1 << 17;
    pub(in super::super) const BEST_EFFORT: u64 = 1 << 18;
    pub(in super::super) const REFUSE: u64 = 1 << 19;
}

/// State of encoder and decoder within a segment.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    pub(super) at: Nanos,
    /// The most recent request.
    pub(super) newest: u64,
    /// The request of the previous entry.
    pub(super) same: u64,
    pub(super) block_tokens: u32,
    pub(super) sessions: Keys,
    pub(super) tenants: Keys,
    pub(super) heads: Keys,
    pub(super) names: Keys,
    pub(super) adapters: Keys,
}

// === impl Memory ===

impl Memory {
    /// Resets the state at the start of a segment.
    pub(super) fn clear(&mut self) {
        let Self { sessions, tenants, heads, names, adapters, .. } = self;
        [sessions, tenants, heads, names, adapters].into_iter().for_each(Keys::clear);
        (self.at, self.newest, self.same, self.block_tokens) = (Nanos::ZERO, 0, 0, 0);
    }

    /// Writes the first byte and the time, and the request if the entry has one.
    fn begin(&mut self, out: &mut Vec<u8>, kind: Kind, now: Nanos, request: Option<RequestId>) {
        let mut first = kind as u8;
        let on = now.0.wrapping_sub(self.at.0);
        let (told, how) = match () {
            () if now == self.at => (None, SAME_TIME),
            () if now < self.at => (Some(self.at.0 - now.0), NANOS_BACK),
            () if on.is_multiple_of(1000) => (Some(on / 1000), MICROS_ON),
            () => (Some(on), NANOS_ON),
        };
        self.at = now;
        first |= how << 6;
        let request = request.map(|request| request.0);
        if request == Some(self.same) {
            first |= SAME_REQUEST;
        }
        out.push(first);
        if let Some(told) = told {
            put(out, told);
        }
        if let Some(request) = request.filter(|request| *request != self.same) {
            put(out, folded(self.newest.wrapping_sub(request) as i64));
            self.same = request;
        }
    }

    pub(super) fn synopsis(&mut self, out: &mut Vec<u8>, now: Nanos, synopsis: &Checkpoint) {
        self.begin(out, Kind::Synopsis, now, None);
        put_json(out, synopsis);
    }

    pub(super) fn placed(
        &mut self,
        out: &mut Vec<u8>,
        now: Nanos,
        request: RequestId,
        endpoint: EndpointId,
        reason: Reason,
        prefill: Option<EndpointId>,
    ) {
        let kind = if prefill.is_some() { Kind::Split } else { Kind::Placed };
        self.begin(out, kind, now, Some(request));
        let reason = Reason::ALL.iter().position(|other| *other == reason).unwrap_or(0);
        put(out, u64::from(endpoint.number()) << 4 | reason as u64);
        prefill.iter().for_each(|prefill| put(out, u64::from(prefill.number())));
    }

    pub(super) fn refused(&mut self, out: &mut Vec<u8>, now: Nanos, request: RequestId, why: Rejection) {
        self.begin(out, Kind::Refused, now, Some(request));
        out.push(REJECTIONS.iter().position(|other| *other == why).unwrap_or(0) as u8);
    }

    pub(super) fn input(&mut self, out: &mut Vec<u8>, now: Nanos, input: &Input) {
        match input {
            Input::Arrived { request, overlap, block_tokens } => {
                self.arrived(out, now, request, overlap, *block_tokens);
            }
            Input::FirstToken { request } => self.begin(out, Kind::FirstToken, now, Some(*request)),
            Input::Begun { request } => self.begin(out, Kind::Begun, now, Some(*request)),
            Input::Tokens { request, count: TOKENS_TOLD } => self.begin(out, Kind::Lot, now, Some(*request)),
            Input::Tokens { request, count } => {
                self.begin(out, Kind::Tokens, now, Some(*request));
                put(out, u64::from(*count));
            }
            Input::Wrote { request, output_tokens } => {
                self.begin(out, Kind::Wrote, now, Some(*request));
                put(out, u64::from(*output_tokens));
            }
            Input::Ended { request, end } => {
                self.begin(out, Kind::Ended, now, Some(*request));
                out.push(ENDS.iter().position(|other| other == end).unwrap_or(0) as u8);
            }
            Input::Answered { request, reported } => {
                self.begin(out, Kind::Answered, now, Some(*request));
                put(out, u64::from(reported.prompt_tokens));
                put(out, u64::from(reported.cached_tokens));
            }
            Input::Failed { request } => self.begin(out, Kind::Failed, now, Some(*request)),
            Input::Succeeded { request } => self.begin(out, Kind::Succeeded, now, Some(*request)),
            Input::Refreshed { request, overlap } => {
                self.begin(out, Kind::Refreshed, now, Some(*request));
                put_overlap(out, overlap);
            }
            Input::Finished { request } => self.begin(out, Kind::Finished, now, Some(*request)),
            Input::Tick => self.begin(out, Kind::Tick, now, None),
            Input::Reported { endpoint, reported } => {
                self.begin(out, Kind::Reported, now, None);
                put(out, u64::from(endpoint.number()));
                put(out, u64::from(reported.running));
                put(out, u64::from(reported.waiting));
                out.extend_from_slice(&reported.kv_usage_ratio.to_bits().to_le_bytes());
                out.push(u8::from(reported.kv_capacity_tokens.is_some()));
                reported.kv_capacity_tokens.into_iter().for_each(|tokens| put(out, tokens));
            }
            Input::Counted { endpoint, queries, hits, block_tokens } => {
                self.begin(out, Kind::Counted, now, None);
                put(out, u64::from(endpoint.number()));
                out.extend_from_slice(&queries.to_bits().to_le_bytes());
                out.extend_from_slice(&hits.to_bits().to_le_bytes());
                put(out, u64::from(*block_tokens));
            }
            Input::Measured { endpoint, own } => {
                let OwnMeasures { intervals, seconds, computed_tokens, fetched_tokens } = *own;
                self.begin(out, Kind::Measured, now, None);
                put(out, u64::from(endpoint.number()));
                out.extend_from_slice(&intervals.to_bits().to_le_bytes());
                out.extend_from_slice(&seconds.to_bits().to_le_bytes());
                put(out, computed_tokens.map_or(0, |tokens| tokens.saturating_add(1)));
                put(out, fetched_tokens);
            }
            Input::Joined { .. }
            | Input::Assigned { .. }
            | Input::TransferFailed { .. }
            | Input::WarmUp { .. }
            | Input::Heard { .. }
            | Input::Draining { .. }
            | Input::Left { .. }
            | Input::Health { .. }
            | Input::Stalled { .. }
            | Input::Blamed { .. }
            | Input::Fed { .. }
            | Input::Forgot { .. }
            | Input::Adapters { .. }
            | Input::Busy { .. }
            | Input::Configured { .. } => {
                self.begin(out, Kind::Rare, now, None);
                put_json(out, input);
            }
        }
    }

    fn arrived(
        &mut self,
        out: &mut Vec<u8>,
        now: Nanos,
        request: &SchedulingRequest,
        overlap: &[(EndpointId, Prediction)],
        block_tokens: u32,
    ) {
        let SchedulingRequest {
            id,
            prompt_tokens,
            excluded,
            attempt,
            session,
            tenant,
            priority,
            output_tokens_max,
            whole_answer,
            hedge,
            leg,
            head,
            adapter,
            slo,
            name,
            claims,
        } = request;
        self.begin(out, Kind::Arrived, now, Some(*id));
        self.newest = id.0;
        put(out, u64::from(*prompt_tokens));
        let flag = |there: bool, flag: u64| if there { flag } else { 0 };
        let flags = flag(!excluded.is_empty(), has::EXCLUDED)
            | flag(*attempt > 0, has::ATTEMPT)
            | flag(session.is_some(), has::SESSION)
            | flag(tenant.is_some(), has::TENANT)
            | flag(head.is_some(), has::HEAD)
            | flag(!overlap.is_empty(), has::OVERLAP)
            | flag(name.is_some(), has::NAME)
            | flag(*priority != 0, has::PRIORITY)
            | flag(output_tokens_max.is_some(), has::OUTPUT_MAX)
            | flag(*whole_answer, has::WHOLE_ANSWER)
            | flag(hedge.is_some(), has::HEDGE)
            | flag(slo.ttft_ms.is_some(), has::TTFT_SLO)
            | flag(slo.tpot_ms.is_some(), has::TPOT_SLO)
            | flag(slo.if_missed == IfMissed::BestEffort, has::BEST_EFFORT)
            | flag(slo.if_missed == IfMissed::Refuse, has::REFUSE)
            | flag(leg.is_some(), has::LEG)
            | flag(claims.output_tokens.is_some(), has::CLAIMED_OUTPUT)
            | flag(claims.is_last, has::IS_LAST)
            | flag(adapter.is_some(), has::ADAPTER)
            | flag(block_tokens != self.block_tokens, has::BLOCK_TOKENS);
        put(out, flags);
        if !excluded.is_empty() {
            put(out, excluded.len() as u64);
            excluded.iter().for_each(|id| put(out, u64::from(id.number())));
        }
        if *attempt > 0 {
            put(out, u64::from(*attempt));
        }
        session.iter().for_each(|key| self.sessions.put(out, key.0));
        tenant.iter().for_each(|key| self.tenants.put(out, key.0));
        head.iter().for_each(|key| self.heads.put(out, key.0));
        name.iter().for_each(|key| self.names.put(out, key.0));
        if *priority != 0 {
            out.push(*priority as u8);
        }
        output_tokens_max.iter().for_each(|max| put(out, u64::from(*max)));
        hedge.iter().for_each(|waited| put(out, waited.0));
        slo.ttft_ms.iter().for_each(|most| put(out, u64::from(*most)));
        slo.tpot_ms.iter().for_each(|most| put(out, u64::from(*most)));
        claims.output_tokens.iter().for_each(|tokens| put(out, u64::from(*tokens)));
        leg.iter().for_each(|leg| put(out, folded(leg.0.wrapping_sub(id.0) as i64)));
        adapter.iter().for_each(|key| self.adapters.put(out, key.number()));
        if block_tokens != self.block_tokens {
            put(out, u64::from(block_tokens));
            self.block_tokens = block_tokens;
        }
        if !overlap.is_empty() {
            put_overlap(out, overlap);
        }
    }
}

fn put_json(out: &mut Vec<u8>, value: &impl serde::Serialize) {
    // No value has keys that JSON cannot represent; if one had, the decoder would report damage.
    let json = serde_json::to_vec(value).unwrap_or_default();
    put(out, json.len() as u64);
    out.extend_from_slice(&json);
}

/// Groups endpoints with equal predictions, as runs of slots.
fn put_overlap(out: &mut Vec<u8>, overlap: &[(EndpointId, Prediction)]) {
    if let [(endpoint, prediction)] = overlap {
        put(out, 1);
        put_prediction(out, *prediction);
        put(out, 1);
        put(out, u64::from(endpoint.number()));
        return put(out, 0);
    }
    let key = |(id, prediction): &(EndpointId, Prediction)| {
        (prediction.exact, prediction.approximate, prediction.lower, *id)
    };
    let mut sorted = overlap.to_vec();
    if !sorted.is_sorted_by_key(key) {
        sorted.sort_unstable_by_key(key);
    }
    let groups = || sorted.chunk_by(|a, b| a.1 == b.1);
    let next = |a: &(EndpointId, Prediction), b: &(EndpointId, Prediction)| {
        a.0.number().checked_add(1) == Some(b.0.number())
    };
    put(out, groups().count() as u64);
    for group in groups() {
        put_prediction(out, group[0].1);
        let runs = || group.chunk_by(next);
        put(out, runs().count() as u64);
        let mut from = 0;
        for run in runs() {
            let first = u64::from(run[0].0.number());
            put(out, first - from);
            put(out, run.len() as u64 - 1);
            from = first + run.len() as u64;
        }
    }
}

fn put_prediction(out: &mut Vec<u8>, Prediction { exact, approximate, lower }: Prediction) {
    let has_lower = if lower > 0 { HAS_LOWER } else { 0 };
    put(out, u64::from(exact) << 1 | u64::from(exact == approximate) | has_lower);
    if exact != approximate {
        put(out, u64::from(approximate));
    }
    if lower > 0 {
        put(out, u64::from(lower));
    }
}
