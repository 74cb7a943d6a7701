//! Requests in flight and what each of them has reserved.

use std::hash::BuildHasher;

use foldhash::fast::FixedState;
use hashbrown::HashTable;

use super::learning::Timed;
use crate::cache_accuracy::Prediction;
use crate::endpoint::EndpointId;
use crate::queue::Account;
use crate::request::{RequestId, SessionKey};

/// A request in flight: what it has reserved, to be given back.
#[derive(Clone, Copy, Debug)]
pub(super) struct InFlightRequest {
    pub(super) request: RequestId,
    pub(super) endpoint: EndpointId,
    /// How often its endpoint's breaker had opened before.
    pub(super) era: u32,
    pub(super) prefill_tokens: u32,
    /// Query-key pairs of the tokens it has yet to compute.
    pub(super) prefill_pairs: u64,
    pub(super) context_tokens: u64,
    pub(super) prompt_tokens: u32,
    pub(super) block_tokens: u32,
    /// What was predicted of it, to be compared with what its answer says, until it does.
    pub(super) prediction: Option<Prediction>,
    /// Its prompt is work to come.
    pub(super) prefilling: bool,
    /// Its first token came, so it counts among those that the engine's counters have to account for.
    pub(super) computed: bool,
    /// Its answer comes token by token.
    pub(super) is_stream: bool,
    /// What its endpoint's speed is learned from.
    pub(super) timed: Timed,
    /// Whose counter it is charged to.
    pub(super) account: Account,
    /// Output tokens that have been charged and have not come.
    pub(super) output_tokens_due: u32,
    /// The conversation it is a turn of, where conversations are admitted.
    pub(super) turn: Option<Turn>,
}

/// A turn of a conversation that was admitted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turn {
    pub(super) session: SessionKey,
    /// Tokens of its prompt that its endpoint would hold if it never lost any.
    pub(super) sent_tokens: u32,
    /// Those it held: as its answer says or, without that, its events.
    pub(super) held_tokens: Option<u32>,
}

/// Flights by request.
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

    /// In no order.
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

    /// What is in flight is no turn of a conversation that anybody counts.
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
