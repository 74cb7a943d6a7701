//! What endpoints will hold soon: prompts that were sent there, until their engines have told of them.
//!
//! A prompt counts as held from its dispatch on, since the next one with the same beginning will find it computed or
//! waits behind it. Its first token means that it was computed, and so that the events about it are on their way: a
//! moment later those are what counts, and the engine may have evicted the prompt again since.

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
    waiting: HashMap<RequestId, Sent, FixedState>,
    /// Those whose events are on their way, in the order in which they stop counting.
    told: VecDeque<(Nanos, Sent)>,
}

struct Sent {
    endpoint: EndpointId,
    chain: Arc<[BlockHash]>,
}

// === impl Speculation ===

impl Speculation {
    pub(crate) fn new() -> Self {
        let waiting = HashMap::with_hasher(FixedState::with_seed(0));
        Self { index: ApproxIndex::new(LIMITS), waiting, told: VecDeque::new() }
    }

    /// A request with these blocks was sent to `endpoint`.
    pub(crate) fn sent(&mut self, now: Nanos, request: RequestId, chain: &[BlockHash], endpoint: EndpointId) {
        self.expire(now);
        if !chain.is_empty() {
            self.index.insert(now, chain, endpoint);
            self.waiting.insert(request, Sent { endpoint, chain: chain.into() });
        }
    }

    /// Its first token came.
    pub(crate) fn computed(&mut self, now: Nanos, request: RequestId) {
        self.expire(now);
        if let Some(sent) = self.waiting.remove(&request) {
            self.told.push_back((now + EVENT_LAG_MAX, sent));
        }
    }

    /// It is over. Without a first token nobody knows how much of it was computed, but its engine.
    pub(crate) fn ended(&mut self, request: RequestId) {
        if let Some(Sent { endpoint, chain }) = self.waiting.remove(&request) {
            self.index.withdraw(&chain, endpoint);
        }
    }

    /// Raises `overlap` to what is on its way.
    pub(crate) fn raise(&self, now: Nanos, chain: &[BlockHash], found: &mut Overlap, overlap: &mut Overlap) {
        self.index.lookup(now, chain, found);
        found.iter().for_each(|(endpoint, blocks)| overlap.raise(endpoint, blocks));
    }

    /// What was sent to `endpoint` does not count any more: it has lost all.
    pub(crate) fn forget(&mut self, endpoint: EndpointId) {
        let mut from = Some(0);
        while let Some(at) = from {
            from = self.index.remove_endpoint(endpoint, at);
        }
    }

    fn expire(&mut self, now: Nanos) {
        while self.told.front().is_some_and(|(until, _)| *until <= now)
            && let Some((_, Sent { endpoint, chain })) = self.told.pop_front()
        {
            self.index.withdraw(&chain, endpoint);
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
        let (mut found, mut overlap) = (Overlap::default(), Overlap::default());
        speculation.raise(now, &chain(text), &mut found, &mut overlap);
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
