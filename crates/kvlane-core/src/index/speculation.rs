//! What endpoints will hold soon: prompts that were sent there, until their engines have told of them.
//!
//! A prompt counts as held from its dispatch on, since the next one with the same beginning will find it computed or
//! waits behind it. It stops counting when the engine tells that it has stored its last block: from then on events are
//! what counts, evictions among them. Not every prompt is told of, as the engine may have had all of it; its first token
//! means that it was computed, and so that events about it would be on their way.

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

/// Time that events take at most to follow the first token of the request they are about. 0.2 to 0.7 s were seen of
/// vLLM on a busy machine, milliseconds otherwise.
const EVENT_LAG_MAX: Nanos = Nanos::from_secs(1);
/// What sent prompts may use; beyond it the longest unused go, as they do in the index of dispatches.
const LIMITS: approx::Config = approx::Config { memory_bytes_max: 128 << 20, ttl: Nanos::MAX };

/// Prompts that were sent and not told of yet.
pub(crate) struct Speculation {
    index: ApproxIndex,
    sent: HashMap<RequestId, Sent, FixedState>,
    /// Who waits to be told of by the last block of its prompt.
    by_last: HashMap<(EndpointId, BlockHash), Vec<RequestId>, FixedState>,
    /// Those whose events are on their way, in the order in which they stop counting.
    due: VecDeque<(Nanos, RequestId)>,
}

struct Sent {
    endpoint: EndpointId,
    chain: Arc<[BlockHash]>,
    /// Its first token came, and it is among those that are due.
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

    /// Whether nothing is waited for.
    pub(crate) fn is_empty(&self) -> bool {
        self.sent.is_empty()
    }

    /// A request with these blocks was sent to `endpoint`, which is not known to hold them all.
    pub(crate) fn sent(&mut self, now: Nanos, request: RequestId, chain: &[BlockHash], endpoint: EndpointId) {
        self.expire(now);
        let Some(&last) = chain.last() else { return };
        self.index.insert(now, chain, endpoint);
        self.by_last.entry((endpoint, last)).or_default().push(request);
        self.sent.insert(request, Sent { endpoint, chain: chain.into(), computed: false });
    }

    /// `endpoint` says that it has stored `block`: whoever's prompt ends with it has been told of.
    pub(crate) fn stored(&mut self, endpoint: EndpointId, block: BlockHash) {
        for request in self.by_last.remove(&(endpoint, block)).unwrap_or_default() {
            self.forget_one(request);
        }
    }

    /// Its first token came.
    pub(crate) fn computed(&mut self, now: Nanos, request: RequestId) {
        self.expire(now);
        if let Some(sent) = self.sent.get_mut(&request) {
            sent.computed = true;
            self.due.push_back((now + EVENT_LAG_MAX, request));
        }
    }

    /// It is over. Without a first token nobody knows how much of it was computed, but its engine.
    pub(crate) fn ended(&mut self, request: RequestId) {
        if self.sent.get(&request).is_some_and(|sent| !sent.computed) {
            self.forget_one(request);
        }
    }

    /// What of a prompt is on its way.
    pub(crate) fn lookup(&self, now: Nanos, chain: &[BlockHash], overlap: &mut Overlap) {
        self.index.lookup(now, chain, overlap);
    }

    /// What was sent to `endpoint` does not count any more: it has lost all.
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

    #[test]
    fn a_prompt_counts_until_its_events_are_due() {
        let (mut speculation, endpoint) = (Speculation::new(), EndpointId::new(1, 0));
        speculation.sent(Nanos(0), RequestId(1), &chain(b"abcd"), endpoint);
        let late = Nanos::from_secs(60);
        assert_eq!(held(&speculation, late, b"abcx"), [(endpoint, 3)], "it waits in its engine's queue");
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
        assert_eq!(held(&speculation, Nanos(0), b"abcd"), [(a, 4), (b, 4)], "half of it is not all of it");
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
