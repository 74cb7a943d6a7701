//! The naive index: every endpoint's set of block hashes. Slow, obviously right, for tests only.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::BlockHash;
use crate::endpoint::EndpointId;

#[derive(Default)]
pub(crate) struct OracleIndex {
    held: BTreeMap<EndpointId, BTreeSet<BlockHash>>,
}

impl OracleIndex {
    pub(crate) fn insert(&mut self, chain: &[BlockHash], endpoint: EndpointId) {
        self.held.entry(endpoint).or_default().extend(chain);
    }

    pub(crate) fn remove_endpoint(&mut self, endpoint: EndpointId) {
        self.held.remove(&endpoint);
    }

    pub(crate) fn lookup(&self, chain: &[BlockHash]) -> BTreeMap<EndpointId, u32> {
        let leading =
            |held: &BTreeSet<BlockHash>| chain.iter().take_while(|hash| held.contains(hash)).count() as u32;
        self.held.iter().map(|(&id, held)| (id, leading(held))).filter(|&(_, blocks)| blocks > 0).collect()
    }
}
