//! The fleet as requests see it: pools, and the model names they are reached under.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kvlane_core::endpoint::EndpointId;

use crate::pool::{ModelPool, PoolEndpoint};
use crate::worker::WorkerId;

/// The fleet at one moment. Replaced as a whole when the fleet changes; requests read it without a lock.
#[derive(Clone, Default)]
pub(crate) struct Snapshot {
    pub(crate) pools: Vec<Arc<ModelPool>>,
    pub(crate) by_name: HashMap<String, Arc<Served>>,
    /// The model card of each name in `GET /v1/models`, as the engine returned it.
    pub(crate) cards: BTreeMap<String, serde_json::Value>,
}

/// The pool that serves one model name.
pub(crate) struct Served {
    pub(crate) pool: Arc<ModelPool>,
    /// Endpoints of the pool that do not serve this name: an adapter need not be loaded on all of them.
    pub(crate) lacking: Arc<[EndpointId]>,
    /// The name, if it is an adapter's: its prompts share no blocks with those of the base model.
    pub(crate) adapter: Option<Arc<str>>,
}

// === impl Snapshot ===

impl Snapshot {
    /// The endpoints of a worker, each with its pool: one for each of its ranks in each pool.
    pub(crate) fn endpoints_of(&self, worker: WorkerId) -> Vec<(Arc<ModelPool>, Arc<PoolEndpoint>)> {
        let own = self.endpoints().filter(|(_, endpoint)| endpoint.worker.id == worker);
        own.map(|(pool, endpoint)| (Arc::clone(pool), endpoint)).collect()
    }

    /// All endpoints, each with its pool.
    pub(crate) fn endpoints(&self) -> impl Iterator<Item = (&Arc<ModelPool>, Arc<PoolEndpoint>)> {
        self.pools.iter().flat_map(|pool| pool.endpoints().into_iter().map(move |endpoint| (pool, endpoint)))
    }
}
