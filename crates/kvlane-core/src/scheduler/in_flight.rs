//! In-flight table: what each dispatched request has reserved.

use std::hash::BuildHasher;

use foldhash::fast::FixedState;
use hashbrown::HashTable;

use super::learning::Timed;
use crate::cache_accuracy::Prediction;
use crate::endpoint::EndpointId;
use crate::queue::Account;
use crate::request::{AnswerEnd, RequestId, SessionKey};
use crate::time::Nanos;

/// A request in flight and its reservations, released when it ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlightRequest {
    pub(super) request: RequestId,
    pub(super) endpoint: EndpointId,
    /// How often its endpoint's breaker had opened before the placement.
    pub(super) era: u32,
    pub(super) prefill_tokens: u32,
    /// Query-key pairs of the tokens still to prefill.
    pub(super) prefill_pairs: u64,
    /// Tokens to load from below the GPU before that.
    pub(super) lower_tokens: u32,
    pub(super) context_tokens: u64,
    pub(super) prompt_tokens: u32,
    pub(super) block_tokens: u32,
    /// Predicted reuse, until the answer's report has been compared with it.
    pub(super) prediction: Option<Prediction>,
    /// Its prompt counts as pending prefill.
    pub(super) prefilling: bool,
    /// Its prompt was prefilled, so the engine's cache counters should include it.
    pub(super) computed: bool,
    /// Its answer is streamed.
    pub(super) is_stream: bool,
    /// Measurements that the endpoint's speed is learned from.
    pub(super) timed: Timed,
    /// The tenant account it is charged to.
    pub(super) account: Account,
    /// Output tokens charged in advance that have not arrived.
    pub(super) output_tokens_due: u32,
    /// The KV blocks that it waits for, if another endpoint computes its prompt.
    pub(super) receiving: Option<Receiving>,
    /// For a prefill leg: the request whose prompt it computes.
    pub(super) leg_of: Option<RequestId>,
    /// Whether its prompt is computed elsewhere, so that its engine's report of reuse says nothing.
    pub(super) is_split: bool,
    /// Its TPOT objective, if it should meet it.
    pub(super) tpot_ms: Option<u32>,
    /// Its conversation turn, where session admission is on.
    pub(super) turn: Option<Turn>,
}

/// KV blocks on their way from another endpoint.
#[derive(Clone, Copy, Debug)]
pub(super) struct Receiving {
    /// The prefill leg, and its endpoint.
    pub(super) leg: RequestId,
    pub(super) from: EndpointId,
    /// Tokens to transfer.
    pub(super) tokens: u32,
    /// When the prompt was computed, once it is.
    pub(super) since: Option<Nanos>,
}

// === impl InFlightRequest ===

impl InFlightRequest {
    /// Whether its blocks are on their way: to its endpoint, or from there.
    pub(super) fn moving(&self) -> bool {
        self.receiving.is_some() || self.leg_of.is_some() && self.computed
    }
}

/// A turn of an admitted conversation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    pub(super) session: SessionKey,
    /// Tokens of its prompt that its endpoint would hold without any eviction.
    pub(super) sent_tokens: u32,
    /// Tokens its endpoint held: as its answer reports or, without that, as KV events say.
    pub(super) held_tokens: Option<u32>,
    /// How its answer ended, as far as known; `None` if its client says that it is the last one.
    pub(super) end: Option<AnswerEnd>,
}

/// Requests in flight, by id.
#[derive(Default)]
pub(super) struct InFlightTable {
    table: HashTable<InFlightRequest>,
    hasher: FixedState,
}

// === impl InFlightTable ===

impl InFlightTable {
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    fn hash(&self, id: RequestId) -> u64 {
        self.hasher.hash_one(id.0)
    }

    /// In no particular order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &InFlightRequest> {
        self.table.iter()
    }

    pub(super) fn contains(&self, id: RequestId) -> bool {
        self.table.find(self.hash(id), |flight| flight.request == id).is_some()
    }

    pub(super) fn get(&self, id: RequestId) -> Option<&InFlightRequest> {
        self.table.find(self.hash(id), |flight| flight.request == id)
    }

    pub(super) fn get_mut(&mut self, id: RequestId) -> Option<&mut InFlightRequest> {
        self.table.find_mut(self.hasher.hash_one(id.0), |flight| flight.request == id)
    }

    /// Detaches all requests in flight from session admission.
    pub(super) fn forget_turns(&mut self) {
        self.table.iter_mut().for_each(|flight| flight.turn = None);
    }

    pub(super) fn insert(&mut self, flight: InFlightRequest) {
        let hasher = &self.hasher;
        let hash = self.hash(flight.request);
        self.table.insert_unique(hash, flight, |flight| hasher.hash_one(flight.request.0));
    }

    pub(super) fn remove(&mut self, id: RequestId) -> Option<InFlightRequest> {
        let entry = self.table.find_entry(self.hash(id), |flight| flight.request == id).ok()?;
        Some(entry.remove().0)
    }
}
