//! Decoding: bytes to entries. For any input, decoding ends and takes no more memory than an entry may have.

use std::sync::Arc;

use super::bytes::{Cursor, unfolded};
use super::encode::{
    ENDS, HAS_LOWER, Kind, MICROS_ON, Memory, NANOS_BACK, NANOS_ON, REJECTIONS, SAME_REQUEST, SAME_TIME, has,
};
use super::{Entry, Segment};
use crate::block::BlockHash;
use crate::cache_accuracy::{Prediction, ReportedReuse};
use crate::endpoint::EndpointId;
use crate::load;
use crate::policy::Reason;
use crate::rates::OwnMeasures;
use crate::request::{AdapterKey, IfMissed, RequestId, RequestKey, SchedulingRequest, SessionKey, TenantKey};
use crate::scheduler::{Input, TOKENS_TOLD};
use crate::time::Nanos;

/// Most endpoints that one entry may name: the size of a pool.
const ENDPOINTS_MAX: usize = 1 << 16;

/// A segment contains bytes that no recorder writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("recording segment is damaged {left} bytes before its end")]
pub struct Damaged {
    /// Bytes from the damage to the segment's end.
    pub left: usize,
}

/// The entries of a segment, in order. Ends after an error.
#[derive(Clone, Debug)]
pub struct Entries<'a> {
    rest: Cursor<'a>,
    memory: Memory,
}

// === impl Entries ===

impl<'a> Entries<'a> {
    /// Decodes [`Segment::bytes`].
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { rest: Cursor(bytes), memory: Memory::default() }
    }

    fn entry(&mut self) -> Option<(Nanos, Entry)> {
        let Self { rest, memory } = self;
        let first = rest.byte()?;
        let kind = *Kind::ALL.get(usize::from(first & 0x1F))?;
        memory.at = match first >> 6 {
            SAME_TIME => memory.at,
            MICROS_ON => Nanos(memory.at.0.checked_add(rest.number()?.checked_mul(1000)?)?),
            NANOS_ON => Nanos(memory.at.0.checked_add(rest.number()?)?),
            NANOS_BACK => Nanos(memory.at.0.checked_sub(rest.number()?)?),
            _ => return None,
        };
        let at = memory.at;
        let mut request = |rest: &mut Cursor<'_>| {
            if first & SAME_REQUEST == 0 {
                memory.same = memory.newest.wrapping_sub(unfolded(rest.number()?) as u64);
            }
            Some(RequestId(memory.same))
        };
        let input = match kind {
            Kind::Synopsis => {
                return Some((at, Entry::Synopsis(serde_json::from_slice(rest.sized()?).ok()?)));
            }
            Kind::Placed | Kind::Split => {
                let request = request(rest)?;
                let said = rest.number()?;
                let endpoint = EndpointId::numbered(u32::try_from(said >> 4).ok()?);
                let reason = *Reason::ALL.get((said & 0xF) as usize)?;
                let prefill = match kind {
                    Kind::Split => Some(EndpointId::numbered(rest.u32()?)),
                    _ => None,
                };
                return Some((at, Entry::Placed { request, endpoint, reason, prefill }));
            }
            Kind::Refused => {
                let request = request(rest)?;
                let why = *REJECTIONS.get(usize::from(rest.byte()?))?;
                return Some((at, Entry::Refused { request, why }));
            }
            Kind::Rare => serde_json::from_slice(rest.sized()?).ok()?,
            Kind::Arrived => {
                let id = request(rest)?;
                memory.newest = id.0;
                arrived(memory, rest, id)?
            }
            Kind::FirstToken => Input::FirstToken { request: request(rest)? },
            Kind::Begun => Input::Begun { request: request(rest)? },
            Kind::Lot => Input::Tokens { request: request(rest)?, count: TOKENS_TOLD },
            Kind::Tokens => Input::Tokens { request: request(rest)?, count: rest.u32()? },
            Kind::Wrote => Input::Wrote { request: request(rest)?, output_tokens: rest.u32()? },
            Kind::Answered => {
                let request = request(rest)?;
                let reported = ReportedReuse { prompt_tokens: rest.u32()?, cached_tokens: rest.u32()? };
                Input::Answered { request, reported }
            }
            Kind::Ended => {
                Input::Ended { request: request(rest)?, end: *ENDS.get(usize::from(rest.byte()?))? }
            }
            Kind::Failed => Input::Failed { request: request(rest)? },
            Kind::Succeeded => Input::Succeeded { request: request(rest)? },
            Kind::Refreshed => Input::Refreshed { request: request(rest)?, overlap: overlap(rest)? },
            Kind::Finished => Input::Finished { request: request(rest)? },
            Kind::Tick => Input::Tick,
            Kind::Reported => {
                let endpoint = EndpointId::numbered(rest.u32()?);
                let (running, waiting) = (rest.u32()?, rest.u32()?);
                let kv_usage_ratio = f32::from_bits(u32::from_le_bytes(rest.take(4)?.try_into().ok()?));
                let kv_capacity_tokens = match rest.byte()? {
                    0 => None,
                    _ => Some(rest.number()?),
                };
                let reported = load::LoadReport { running, waiting, kv_usage_ratio, kv_capacity_tokens };
                Input::Reported { endpoint, reported }
            }
            Kind::Measured => {
                let endpoint = EndpointId::numbered(rest.u32()?);
                let (intervals, seconds) = (rest.f64()?, rest.f64()?);
                let computed_tokens = rest.number()?.checked_sub(1);
                let fetched_tokens = rest.number()?;
                let own = OwnMeasures { intervals, seconds, computed_tokens, fetched_tokens };
                Input::Measured { endpoint, own }
            }
            Kind::Counted => Input::Counted {
                endpoint: EndpointId::numbered(rest.u32()?),
                queries: rest.f64()?,
                hits: rest.f64()?,
                block_tokens: rest.u32()?,
            },
        };
        Some((at, Entry::Input(input)))
    }
}

impl Iterator for Entries<'_> {
    type Item = Result<(Nanos, Entry), Damaged>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.0.is_empty() {
            return None;
        }
        let left = self.rest.0.len();
        Some(self.entry().ok_or_else(|| {
            self.rest = Cursor(&[]);
            Damaged { left }
        }))
    }
}

// === impl Segment ===

impl Segment {
    /// Its entries.
    pub fn entries(&self) -> Entries<'_> {
        Entries::new(&self.bytes)
    }
}

fn arrived(memory: &mut Memory, rest: &mut Cursor<'_>, id: RequestId) -> Option<Input> {
    let mut request = SchedulingRequest::new(id, rest.u32()?);
    let flags = rest.number()?;
    let is = |flag: u64| flags & flag != 0;
    if is(has::EXCLUDED) {
        let count = usize::try_from(rest.number()?).ok().filter(|count| *count <= ENDPOINTS_MAX)?;
        let excluded: Option<Vec<_>> = (0..count).map(|_| Some(EndpointId::numbered(rest.u32()?))).collect();
        request.excluded = Arc::from(excluded?);
    }
    if is(has::ATTEMPT) {
        request.attempt = rest.u32()?;
    }
    if is(has::SESSION) {
        request.session = Some(SessionKey(memory.sessions.read(rest)?));
    }
    if is(has::TENANT) {
        request.tenant = Some(TenantKey(memory.tenants.read(rest)?));
    }
    if is(has::HEAD) {
        request.head = Some(BlockHash(memory.heads.read(rest)?));
    }
    if is(has::NAME) {
        request.name = Some(RequestKey(memory.names.read(rest)?));
    }
    if is(has::PRIORITY) {
        request.priority = rest.byte()? as i8;
    }
    if is(has::OUTPUT_MAX) {
        request.output_tokens_max = Some(rest.u32()?);
    }
    if is(has::HEDGE) {
        request.hedge = Some(Nanos(rest.number()?));
    }
    if is(has::TTFT_SLO) {
        request.slo.ttft_ms = Some(rest.u32()?);
    }
    if is(has::TPOT_SLO) {
        request.slo.tpot_ms = Some(rest.u32()?);
    }
    request.slo.if_missed = match (is(has::BEST_EFFORT), is(has::REFUSE)) {
        (true, _) => IfMissed::BestEffort,
        (_, true) => IfMissed::Refuse,
        _ => IfMissed::ByPriority,
    };
    if is(has::CLAIMED_OUTPUT) {
        request.claims.output_tokens = Some(rest.u32()?);
    }
    request.claims.is_last = is(has::IS_LAST);
    if is(has::LEG) {
        request.leg = Some(RequestId(id.0.wrapping_add(unfolded(rest.number()?) as u64)));
    }
    if is(has::ADAPTER) {
        request.adapter = Some(AdapterKey::numbered(memory.adapters.read(rest)?)?);
    }
    request.whole_answer = is(has::WHOLE_ANSWER);
    if is(has::BLOCK_TOKENS) {
        memory.block_tokens = rest.u32()?;
    }
    let overlap = if is(has::OVERLAP) { overlap(rest)? } else { Vec::new() };
    Some(Input::Arrived { request, overlap, block_tokens: memory.block_tokens })
}

fn overlap(rest: &mut Cursor<'_>) -> Option<Vec<(EndpointId, Prediction)>> {
    let mut overlap = Vec::new();
    for _ in 0..rest.number()? {
        let told = rest.number()?;
        let (same, has_lower) = (told & 1 == 1, told & HAS_LOWER != 0);
        let exact = u32::try_from((told & !HAS_LOWER) >> 1).ok()?;
        let approximate = if same { exact } else { rest.u32()? };
        let lower = if has_lower { rest.u32()? } else { 0 };
        let mut from = 0u32;
        for _ in 0..rest.number()? {
            let first = from.checked_add(rest.u32()?)?;
            let more = rest.u32()?;
            let last = first.checked_add(more)?;
            if overlap.len() + more as usize >= ENDPOINTS_MAX {
                return None;
            }
            let prediction = Prediction { exact, approximate, lower };
            overlap.extend((first..=last).map(|number| (EndpointId::numbered(number), prediction)));
            from = last.checked_add(1).unwrap_or(last);
        }
    }
    Some(overlap)
}
