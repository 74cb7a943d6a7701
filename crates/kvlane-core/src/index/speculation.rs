//! Speculative index: prompts dispatched to endpoints whose KV events have not arrived yet.
//!
//! A prompt counts as held from its dispatch on, since the next request with the same prefix will find it computed or
//! will wait behind it. It stops counting when the engine reports its last block as stored: from then on KV events are
//! used, evictions included. An engine sends no event for a prompt that it had cached completely; the first token shows
//! that the prompt was computed, so its events must arrive within a bounded time.

use std::collections::VecDeque;
use std::sync::Arc;

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use super::Overlap;
use super::approx::{self, ApproxIndex};
use crate::block::BlockHash;
use crate::endpoint::EndpointId;
use crate::request::RequestId;
use crate::time::Nanos;

/// Longest time from a request's first token to its KV events. 0.2 to 0.7 s were seen with vLLM on a busy machine,
/// milliseconds otherwise.
const EVENT_LAG_MAX: Nanos = Nanos::from_secs(1);
/// Limits of the speculative index; beyond them the least recently used prompts are evicted, as in the approximate
/// index.
const LIMITS: approx::Config = approx::Config { memory_bytes_max: 128 << 20, ttl: Nanos::MAX };

/// Prompts that were dispatched and not reported by events yet.
pub(crate) struct Speculation {
    index: ApproxIndex,
    sent: HashMap<RequestId, Sent, FixedState>,
    /// Requests by endpoint and last block of their prompt, until that block is reported.
    by_last: HashMap<(EndpointId, BlockHash), Vec<RequestId>, FixedState>,
    /// Requests after their first token, in the order in which they stop counting.
    due: VecDeque<(Nanos, RequestId)>,
}

struct Sent {
    endpoint: EndpointId,
    chain: Arc<[BlockHash]>,
    /// Its first token arrived, and the request is in `due`.
    computed: bool,
}

// === impl Speculation ===

impl Speculation {
    pub(crate) fn new() -> Self {
        Self {
            index: ApproxIndex::new(LIMITS),
            sent: HashMap::with_hasher(FixedState::with_seed(0)),
            by_last: HashMap::with_hasher(FixedState::with_seed(0)),
            due: VecDeque::new(),
        }
    }

    /// Whether this request's prompt awaits its events and is not known to be computed.
    pub(crate) fn awaits(&self, request: RequestId) -> bool {
        self.sent.get(&request).is_some_and(|sent| !sent.computed)
    }

    /// Whether [`Speculation::computed`] would change anything.
    pub(crate) fn is_due(&self, now: Nanos, request: RequestId) -> bool {
        self.awaits(request) || self.due.front().is_some_and(|(until, _)| *until <= now)
    }

    /// Whether no prompt awaits its events.
    pub(crate) fn is_empty(&self) -> bool {
        self.sent.is_empty()
    }

    /// Records a dispatch of these blocks to `endpoint`, which is not known to hold all of them.
    pub(crate) fn sent(&mut self, now: Nanos, request: RequestId, chain: &[BlockHash], endpoint: EndpointId) {
        self.expire(now);
        let Some(&last) = chain.last() else { return };
        self.index.insert(now, chain, endpoint);
        self.by_last.entry((endpoint, last)).or_default().push(request);
        self.sent.insert(request, Sent { endpoint, chain: chain.into(), computed: false });
    }

    /// `endpoint` reported `block` as stored: prompts that end with it stop counting.
    pub(crate) fn stored(&mut self, endpoint: EndpointId, block: BlockHash) {
        for request in self.by_last.remove(&(endpoint, block)).unwrap_or_default() {
            self.forget_one(request);
        }
    }

    /// The request's first token arrived.
    pub(crate) fn computed(&mut self, now: Nanos, request: RequestId) {
        self.expire(now);
        if let Some(sent) = self.sent.get_mut(&request) {
            sent.computed = true;
            self.due.push_back((now + EVENT_LAG_MAX, request));
        }
    }

    /// The request is over. Without a first token, it is unknown how much of its prompt was computed.
    pub(crate) fn ended(&mut self, request: RequestId) {
        if self.awaits(request) {
            self.forget_one(request);
        }
    }

    /// Sets the overlap with dispatched prompts.
    pub(crate) fn lookup(&self, now: Nanos, chain: &[BlockHash], overlap: &mut Overlap) {
        self.index.lookup(now, chain, overlap);
    }

    /// Removes the prompts dispatched to `endpoint`: its cache is lost.
    pub(crate) fn forget(&mut self, endpoint: EndpointId) {
        let mut from = Some(0);
        while let Some(at) = from {
            from = self.index.remove_endpoint(endpoint, at);
        }
        self.sent.retain(|_, sent| sent.endpoint != endpoint);
        self.by_last.retain(|(holder, _), _| *holder != endpoint);
    }

    fn expire(&mut self, now: Nanos) {
        while self.due.front().is_some_and(|(until, _)| *until <= now)
            && let Some((_, request)) = self.due.pop_front()
        {
            self.forget_one(request);
        }
    }

    fn forget_one(&mut self, request: RequestId) {
        let Some(Sent { endpoint, chain, .. }) = self.sent.remove(&request) else { return };
        self.index.withdraw(&chain, endpoint);
        let last = chain.last().map(|&last| (endpoint, last));
        if let Some(waiting) = last.and_then(|last| self.by_last.get_mut(&last)) {
            waiting.retain(|other| *other != request);
            if let (true, Some(last)) = (waiting.is_empty(), last) {
                self.by_last.remove(&last);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::ChainSeed;

    const SECOND: Nanos = Nanos::from_secs(1);

    fn chain(text: &[u8]) -> Vec<BlockHash> {
        let mut out = Vec::new();
        ChainSeed::new("m", None, None).chain(text, 1, &mut out);
        out
    }

    fn held(speculation: &Speculation, now: Nanos, text: &[u8]) -> Vec<(EndpointId, u32)> {
        let mut overlap = Overlap::default();
        speculation.lookup(now, &chain(text), &mut overlap);
        overlap.iter().collect()
    }

    /// Invariant: A prompt counts as cached from its dispatch until its events are due, and no longer once its
    /// endpoint lost its cache.
    ///
    /// Also held by `one_that_was_cancelled_leaves_what_others_with_its_beginning_have_sent`,
    /// `an_endpoint_that_lost_all_holds_nothing`.
    #[test]
    fn a_prompt_counts_until_its_events_are_due() {
        let (mut speculation, endpoint) = (Speculation::new(), EndpointId::new(1, 0));
        speculation.sent(Nanos(0), RequestId(1), &chain(b"abcd"), endpoint);
        let late = Nanos::from_secs(60);
        assert_eq!(held(&speculation, late, b"abcx"), [(endpoint, 3)], "still queued in its engine");
        speculation.computed(late, RequestId(1));
        assert_eq!(held(&speculation, late, b"abcx"), [(endpoint, 3)]);
        speculation.computed(late + SECOND + SECOND, RequestId(9));
        assert_eq!(held(&speculation, late, b"abcx"), []);
    }

    #[test]
    fn once_its_last_block_was_told_of_only_events_count() {
        let (mut speculation, [a, b]) = (Speculation::new(), [1, 2].map(|slot| EndpointId::new(slot, 0)));
        speculation.sent(Nanos(0), RequestId(1), &chain(b"abcd"), a);
        speculation.sent(Nanos(0), RequestId(2), &chain(b"abcd"), b);
        let stored = chain(b"abcd");
        speculation.stored(a, stored[1]);
        assert_eq!(
            held(&speculation, Nanos(0), b"abcd"),
            [(a, 4), (b, 4)],
            "half of the blocks do not complete it"
        );
        speculation.stored(a, stored[3]);
        assert_eq!(held(&speculation, Nanos(0), b"abcd"), [(b, 4)]);
        speculation.stored(b, stored[3]);
        assert!(speculation.is_empty() && speculation.by_last.is_empty());
    }

    #[test]
    fn one_that_was_cancelled_leaves_what_others_with_its_beginning_have_sent() {
        let (mut speculation, endpoint) = (Speculation::new(), EndpointId::new(1, 0));
        speculation.sent(Nanos(0), RequestId(1), &chain(b"ab"), endpoint);
        speculation.sent(Nanos(0), RequestId(2), &chain(b"abcd"), endpoint);
        speculation.ended(RequestId(1));
        assert_eq!(held(&speculation, Nanos(0), b"abcd"), [(endpoint, 4)]);
        speculation.ended(RequestId(2));
        assert_eq!(held(&speculation, Nanos(0), b"abcd"), []);
    }

    #[test]
    fn an_endpoint_that_lost_all_holds_nothing() {
        let (mut speculation, [a, b]) = (Speculation::new(), [1, 2].map(|slot| EndpointId::new(slot, 0)));
        speculation.sent(Nanos(0), RequestId(1), &chain(b"ab"), a);
        speculation.sent(Nanos(0), RequestId(2), &chain(b"ab"), b);
        speculation.forget(a);
        assert_eq!(held(&speculation, Nanos(0), b"ab"), [(b, 2)]);
        speculation.ended(RequestId(1));
        assert_eq!(held(&speculation, Nanos(0), b"ab"), [(b, 2)]);
    }
}
