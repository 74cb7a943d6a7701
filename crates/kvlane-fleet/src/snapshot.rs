//! The fleet as requests see it: pools, and the model names they are reached under.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kvlane_core::endpoint::EndpointId;

use crate::pool::{ModelPool, PoolEndpoint};
use crate::worker::WorkerId;

/// The fleet at one moment. Replaced as a whole when the fleet changes; requests read it without a lock.
#[derive(Clone, Default)]
pub struct Snapshot {
    /// All pools.
    pub pools: Vec<Arc<ModelPool>>,
    /// The pool of each model name.
    pub by_name: HashMap<String, Arc<Served>>,
    /// The model card of each name in `GET /v1/models`, as the engine returned it.
    pub cards: BTreeMap<String, serde_json::Value>,
}

/// The pool that serves one model name.
pub struct Served {
    /// The pool.
    pub pool: Arc<ModelPool>,
    /// Endpoints of the pool that do not serve this name: an adapter need not be loaded on all of them.
    pub lacking: Arc<[EndpointId]>,
    /// The name, if it is an adapter's: its prompts share no blocks with those of the base model.
    pub adapter: Option<Arc<str>>,
}

// === impl Served ===

impl Served {
    /// The name: the adapter's, or that of the pool's model.
    pub fn name(&self) -> &str {
        self.adapter.as_deref().unwrap_or(&self.pool.model)
    }
}

// === impl Snapshot ===

impl Snapshot {
    /// Whether an endpoint that serves this name takes requests; any endpoint for a request that names no model.
    pub fn serves(&self, name: &str) -> bool {
        let Some(Served { pool, lacking, .. }) = self.by_name.get(name).map(Arc::as_ref) else {
            return name.is_empty() && self.pools.iter().any(|pool| pool.takes_requests());
        };
        pool.router
            .read(|scheduler| scheduler.pool().eligible().any(|endpoint| !lacking.contains(&endpoint.id)))
    }

    /// The endpoints of a worker, each with its pool: one for each of its ranks in each pool.
    pub fn endpoints_of(&self, worker: WorkerId) -> Vec<(Arc<ModelPool>, Arc<PoolEndpoint>)> {
        let of_pool = |pool: &Arc<ModelPool>| {
            let own = pool.endpoints_of(worker).into_iter().filter_map(|id| pool.endpoint(id));
            own.map(|endpoint| (Arc::clone(pool), endpoint)).collect::<Vec<_>>()
        };
        self.pools.iter().flat_map(of_pool).collect()
    }

    /// All endpoints, each with its pool.
    pub fn endpoints(&self) -> impl Iterator<Item = (&Arc<ModelPool>, Arc<PoolEndpoint>)> {
        self.pools.iter().flat_map(|pool| pool.endpoints().into_iter().map(move |endpoint| (pool, endpoint)))
    }
}
