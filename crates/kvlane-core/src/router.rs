//! The one decision path: look up, step, learn.
//!
//! A [`Router`] joins one pool's [`Scheduler`] with the prefix index and owns their locks. Hashing happens before it
//! is called; the lookup takes a shared lock on the index only; selection and reservation hold the scheduler's lock
//! for arithmetic, never longer. The gateway and the simulator call the same methods.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use serde::{Deserialize, Serialize};

use crate::block::BlockHash;
use crate::endpoint::EndpointId;
use crate::event::{EngineHash, KvEvent};
use crate::index::Overlap;
use crate::index::approx::{self, ApproxIndex};
use crate::index::exact::{self, Applied, ExactIndex};
use crate::request::{RequestId, SchedulingRequest};
use crate::scheduler::{self, Input, Output, Scheduler};
use crate::time::Nanos;

/// How one pool is routed.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Queue, policy and ledger.
    pub scheduler: scheduler::Config,
    /// Limits of the index of our own dispatches.
    pub index: approx::Config,
    /// Whether the endpoints tell what they hold ([`Router::apply`]). Then that is what counts, and our own dispatches
    /// fill in for as long as `index.ttl` says: until the engine's events about them have come.
    pub exact: bool,
    /// Prompt tokens that one block stands for.
    pub block_tokens: u32,
}

/// One pool's router. Shared by all threads that serve the pool.
pub struct Router {
    block_tokens: u32,
    index: RwLock<ApproxIndex>,
    exact: Option<ExactIndex>,
    state: Mutex<State>,
}

struct State {
    scheduler: Scheduler,
    recording: Option<Vec<(Nanos, Input)>>,
}

/// What a scheduler was told, in the order in which it was told: enough to live through it again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Recording {
    /// How the scheduler was set up.
    pub config: scheduler::Config,
    /// Its inputs with their times, in lock order.
    pub inputs: Vec<(Nanos, Input)>,
}

// === impl Router ===

impl Router {
    /// A router without endpoints.
    pub fn new(config: Config) -> Self {
        Self::with(config, None)
    }

    /// A router without endpoints that writes down all that its scheduler is told. Unbounded: for tests and short
    /// captures.
    pub fn recorded(config: Config) -> Self {
        Self::with(config, Some(Vec::new()))
    }

    fn with(config: Config, recording: Option<Vec<(Nanos, Input)>>) -> Self {
        Self {
            block_tokens: config.block_tokens,
            index: RwLock::new(ApproxIndex::new(config.index)),
            exact: config.exact.then(|| ExactIndex::new(exact::Config { memory_bytes_max: usize::MAX })),
            state: Mutex::new(State { scheduler: Scheduler::new(config.scheduler), recording }),
        }
    }

    /// What a [`Router::recorded`] one was told; nothing from any other.
    pub fn recording(&self) -> Recording {
        let state = self.state();
        let inputs = state.recording.clone().unwrap_or_default();
        Recording { config: state.scheduler.config().clone(), inputs }
    }

    /// Adds an endpoint and returns its id; none when the pool is full.
    pub fn join(
        &self,
        now: Nanos,
        name: Arc<str>,
        healthy: bool,
        draining: bool,
        out: &mut Vec<Output>,
    ) -> Option<EndpointId> {
        let mut state = self.state();
        let endpoint = state.scheduler.pool().next_id()?;
        state.step(now, Input::Joined { endpoint, name, healthy, draining }, out);
        Some(endpoint)
    }

    /// Forgets all that an endpoint was expected to hold: it has started again, with empty caches.
    pub fn forget(&self, endpoint: EndpointId) {
        // In slices, so that requests come in between.
        let mut from = 0;
        while let Some(next) = self.index_mut().remove_endpoint(endpoint, from) {
            from = next;
        }
        if let Some(exact) = &self.exact {
            exact.remove_endpoint(endpoint);
        }
    }

    /// Notes what `endpoint` says of its cache, in the order in which it says so. Without effect unless the router is
    /// [`Config::exact`].
    pub fn apply(&self, endpoint: EndpointId, event: &KvEvent) -> Applied {
        self.exact.as_ref().map(|exact| exact.apply(endpoint, event)).unwrap_or_default()
    }

    /// Our hash of the block that `endpoint` calls `name`, if it is known to hold it.
    pub fn hash_of(&self, endpoint: EndpointId, name: EngineHash) -> Option<BlockHash> {
        self.exact.as_ref()?.hash_of(endpoint, name)
    }

    /// Removes an endpoint and all that it was expected to hold.
    pub fn leave(&self, now: Nanos, endpoint: EndpointId, out: &mut Vec<Output>) {
        self.step(now, Input::Left { endpoint }, out);
        self.forget(endpoint);
    }

    /// Places a request whose prompt has these blocks, or queues or refuses it: what happened is in `out`, and
    /// nothing is in `out` for it while it waits. `overlap` is scratch memory.
    pub fn arrive(
        &self,
        now: Nanos,
        request: SchedulingRequest,
        chain: &[BlockHash],
        overlap: &mut Overlap,
        out: &mut Vec<Output>,
    ) {
        self.look_up(now, chain, overlap);
        let overlap =
            overlap.iter().map(|(id, blocks)| (id, blocks.saturating_mul(self.block_tokens))).collect();
        let id = request.id;
        let first = out.len();
        self.step(now, Input::Arrived { request, overlap }, out);
        let placed = out[first..].iter().find_map(|output| match output {
            Output::Dispatch { request, placement } if *request == id => Some(placement.endpoint),
            _ => None,
        });
        if let Some(endpoint) = placed {
            self.learn(now, chain, endpoint);
        }
    }

    /// What each endpoint is expected to hold of a prompt.
    fn look_up(&self, now: Nanos, chain: &[BlockHash], overlap: &mut Overlap) {
        self.index().lookup(now, chain, overlap);
        if let Some(exact) = &self.exact {
            let dispatched: Vec<_> = overlap.iter().collect();
            exact.lookup(chain, overlap);
            dispatched.into_iter().for_each(|(id, blocks)| overlap.raise(id, blocks));
        }
    }

    /// Notes that `endpoint` has been given a prompt with these blocks. [`Router::arrive`] does so by itself, except
    /// for a request that waited.
    pub fn learn(&self, now: Nanos, chain: &[BlockHash], endpoint: EndpointId) {
        self.index_mut().insert(now, chain, endpoint);
    }

    /// The first token of a request came, and `tokens` more after it.
    pub fn progress(&self, now: Nanos, request: RequestId, first: bool, tokens: u32, out: &mut Vec<Output>) {
        let mut state = self.state();
        if first {
            state.step(now, Input::FirstToken { request }, out);
        }
        if tokens > 0 {
            state.step(now, Input::Tokens { request, count: tokens }, out);
        }
    }

    /// Any other input.
    pub fn step(&self, now: Nanos, input: Input, out: &mut Vec<Output>) {
        self.state().step(now, input, out);
    }

    /// Reads the scheduler's state under its lock: keep it short.
    pub fn read<T>(&self, read: impl FnOnce(&Scheduler) -> T) -> T {
        read(&self.state().scheduler)
    }

    /// Bytes and held blocks of the index.
    pub fn index_size(&self) -> (usize, u64) {
        let index = self.index();
        (index.bytes(), index.blocks_held())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn index(&self) -> RwLockReadGuard<'_, ApproxIndex> {
        self.index.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn index_mut(&self) -> RwLockWriteGuard<'_, ApproxIndex> {
        self.index.write().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl State ===

impl State {
    fn step(&mut self, now: Nanos, input: Input, out: &mut Vec<Output>) {
        if let Some(recording) = &mut self.recording {
            recording.push((now, input.clone()));
        }
        self.scheduler.step(now, input, out);
    }
}

// === impl Recording ===

impl Recording {
    /// Lives through it again: the outputs, input by input.
    pub fn replay(&self) -> Vec<Vec<Output>> {
        let mut scheduler = Scheduler::new(self.config.clone());
        let step = |(now, input): &(Nanos, Input)| {
            let mut out = Vec::new();
            scheduler.step(*now, input.clone(), &mut out);
            out
        };
        self.inputs.iter().map(step).collect()
    }
}
