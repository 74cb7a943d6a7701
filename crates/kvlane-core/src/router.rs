//! The decision path: prefix lookup, scheduler step, index update.
//!
//! A [`Router`] joins one pool's [`Scheduler`] with the prefix index and owns their locks. The caller hashes the prompt
//! before; the lookup takes only a shared lock on the index; selection and reservation hold the scheduler's lock for
//! arithmetic only. The gateway and the simulator call the same methods.

#[cfg(test)]
mod locks;
mod sharing;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use foldhash::fast::FixedState;
use hashbrown::HashMap;

use crate::abort_on_panic::AbortOnPanicGuard;
use crate::block::BlockHash;
use crate::cache_accuracy::{Feed, Prediction};
use crate::decision::{Placement, PrefillLeg};
use crate::endpoint::EndpointId;
use crate::event::{EngineHash, KvEvent};
use crate::index::Overlap;
use crate::index::approx::{self, ApproxIndex, Piece, Pieces};
use crate::index::exact::{self, Applied, ExactIndex};
use crate::index::speculation::Speculation;
use crate::recording::{Entry, Recorder, Recording};
use crate::request::{RequestId, SchedulingRequest};
use crate::scheduler::{self, Input, Output, Scheduler};
use crate::time::Nanos;
use sharing::Shared;

/// Configuration of one pool's router.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Queue, policy and in-flight ledger.
    pub scheduler: scheduler::Config,
    /// Limits of the approximate index, which is fed by dispatches.
    pub index: approx::Config,
    /// Limits of the exact index, which is fed by KV events ([`Router::apply`]); `None` where no events are read.
    pub exact: Option<exact::Config>,
    /// Prompt tokens per block, until [`Router::set_block_tokens`] changes it.
    pub block_tokens: u32,
}

/// One pool's router. Shared by all threads that serve the pool.
pub struct Router {
    block_tokens: AtomicU32,
    approximate: Mutex<approx::Config>,
    index: RwLock<ApproxIndex>,
    exact: Option<Exact>,
    may_wait: AtomicBool,
    may_split: AtomicBool,
    /// What routers of other replicas have sent; empty as long as nothing is shared.
    shared: RwLock<Shared>,
    shares: AtomicBool,
    state: Mutex<State>,
}

/// The index of KV events, and the dispatched blocks whose events have not arrived yet.
struct Exact {
    index: ExactIndex,
    speculation: RwLock<Speculation>,
}

struct State {
    scheduler: Scheduler,
    tape: Option<Recorder>,
    /// Prompts of queued requests, looked up again when their turn comes.
    prompts: HashMap<RequestId, Prompt, FixedState>,
    /// Prompts on their way from one endpoint to another, and the latter.
    moving: HashMap<RequestId, (Arc<[BlockHash]>, EndpointId), FixedState>,
}

/// The prompt of a queued request.
#[derive(Clone)]
struct Prompt {
    chain: Arc<[BlockHash]>,
    tokens: u32,
}

/// Reusable memory for lookups.
#[derive(Debug, Default)]
pub struct Scratch {
    approximate: Overlap,
    exact: Overlap,
    speculation: Overlap,
}

// === impl Router ===

impl Router {
    /// A router without endpoints.
    pub fn new(config: Config) -> Self {
        Self::with(config, None)
    }

    /// A router without endpoints that records all inputs of its scheduler. Unbounded: for tests and short captures.
    pub fn recorded(config: Config) -> Self {
        Self::with(config, Some(Recorder::in_memory()))
    }

    /// Replaces the recorder, or removes it. The previous recorder writes out what it holds.
    pub fn record(&self, tape: Option<Recorder>) {
        let before = std::mem::replace(&mut self.state().tape, tape);
        drop(before);
    }

    /// Makes the recorder write out what it holds.
    pub fn flush_tape(&self) {
        if let Some(tape) = &mut self.state().tape {
            tape.hand_over();
        }
    }

    /// Whether inputs are being recorded.
    pub fn is_recorded(&self) -> bool {
        self.state().tape.is_some()
    }

    fn with(config: Config, tape: Option<Recorder>) -> Self {
        Self {
            block_tokens: AtomicU32::new(config.block_tokens),
            approximate: Mutex::new(config.index),
            index: RwLock::new(ApproxIndex::new(config.index)),
            exact: config.exact.map(|config| Exact {
                index: ExactIndex::new(config),
                speculation: RwLock::new(Speculation::new()),
            }),
            may_wait: AtomicBool::new(config.scheduler.queue_size > 0),
            may_split: AtomicBool::new(false),
            shared: RwLock::new(Shared::new(&config.index)),
            shares: AtomicBool::new(false),
            state: Mutex::new(State {
                scheduler: Scheduler::new(config.scheduler),
                tape,
                prompts: HashMap::default(),
                moving: HashMap::default(),
            }),
        }
    }

    /// The inputs of a router made by [`Router::recorded`]; empty for any other.
    pub fn recording(&self) -> Recording {
        let state = self.state();
        let mut recording = Recording { config: state.scheduler.config().clone(), inputs: Vec::new() };
        let segments = state.tape.as_ref().map(Recorder::segments).unwrap_or_default();
        let mut begun = false;
        for (at, entry) in segments.iter().flat_map(|segment| segment.entries().flatten()) {
            match entry {
                Entry::Synopsis(synopsis) if !std::mem::replace(&mut begun, true) => {
                    recording.config = synopsis.config;
                }
                Entry::Input(input) => recording.inputs.push((at, input)),
                _ => {}
            }
        }
        recording
    }

    /// Adds an endpoint and returns its id; `None` if the pool is full.
    pub fn join(
        &self,
        now: Nanos,
        name: Arc<str>,
        healthy: bool,
        draining: bool,
        out: &mut Vec<Output>,
    ) -> Option<EndpointId> {
        self.with_state(now, out, |state, out| {
            let endpoint = state.scheduler.pool().next_id()?;
            state.step(now, Input::Joined { endpoint, name, healthy, draining }, out);
            Some(endpoint)
        })
    }

    /// Changes the configuration. The index contents stay, within the new limits. Whether events are accepted, and the
    /// block size, which the engines determine, do not change.
    pub fn configure(&self, now: Nanos, config: Config, out: &mut Vec<Output>) {
        let Config { scheduler, index, exact, block_tokens: _ } = config;
        *self.approximate.lock().unwrap_or_else(PoisonError::into_inner) = index;
        self.index_mut().configure(index);
        if let (Some(Exact { index, .. }), Some(config)) = (&self.exact, exact) {
            index.configure(config);
        }
        self.step(now, Input::Configured { config: Box::new(scheduler) }, out);
    }

    /// Prompt tokens per block.
    pub fn block_tokens(&self) -> u32 {
        self.block_tokens.load(Ordering::Relaxed)
    }

    /// Sets the engines' block size. Chains of a different block size match nothing in the index, so a change empties
    /// it. Returns whether the size changed.
    pub fn set_block_tokens(&self, block_tokens: u32) -> bool {
        if self.block_tokens.swap(block_tokens, Ordering::Relaxed) == block_tokens {
            return false;
        }
        let limits = *self.approximate.lock().unwrap_or_else(PoisonError::into_inner);
        *self.index_mut() = ApproxIndex::new(limits);
        if let Some(Exact { index, speculation }) = &self.exact {
            let endpoints: Vec<_> =
                self.read(|scheduler| scheduler.pool().endpoints().map(|endpoint| endpoint.id).collect());
            endpoints.into_iter().for_each(|id| _ = index.apply(id, &KvEvent::Cleared));
            *write(speculation) = Speculation::new();
        }
        *write(&self.shared) = Shared::new(&limits);
        true
    }

    /// Forgets an endpoint's predicted cache contents: it has restarted with empty caches.
    pub fn forget(&self, now: Nanos, endpoint: EndpointId, out: &mut Vec<Output>) {
        self.step(now, Input::Forgot { endpoint }, out);
        self.apply(endpoint, &KvEvent::Cleared);
    }

    /// Forgets the blocks dispatched to an endpoint. Works in slices, so that requests can run in between.
    fn forget_dispatches(&self, endpoint: EndpointId) {
        let mut from = 0;
        while let Some(next) = self.index_mut().remove_endpoint(endpoint, from) {
            from = next;
        }
        if let Some(exact) = &self.exact {
            write(&exact.speculation).forget(endpoint);
        }
        self.forget_shared(endpoint);
    }

    /// Sets the state of an endpoint's KV event feed, which decides whether its events are used.
    pub fn set_feed(&self, now: Nanos, endpoint: EndpointId, feed: Feed, out: &mut Vec<Output>) {
        self.step(now, Input::Fed { endpoint, feed }, out);
    }

    /// Applies a KV event of `endpoint`; events must come in the endpoint's order. Without effect if the router does
    /// not accept events, except for [`KvEvent::Cleared`].
    pub fn apply(&self, endpoint: EndpointId, event: &KvEvent) -> Applied {
        if matches!(event, KvEvent::Cleared) {
            self.forget_dispatches(endpoint);
        }
        let Some(Exact { index, speculation }) = &self.exact else { return Applied::default() };
        let applied = index.apply(endpoint, event);
        // This order ensures that a concurrent lookup finds the block in at least one of the two.
        if let KvEvent::Stored { blocks, .. } = event
            && let Some(last) = blocks.last()
            && !read(speculation).is_empty()
        {
            write(speculation).stored(endpoint, last.hash);
        }
        applied
    }

    /// Our hash of the block that `endpoint` names `name`, if the endpoint is known to hold it.
    pub fn hash_of(&self, endpoint: EndpointId, name: EngineHash) -> Option<BlockHash> {
        self.exact.as_ref()?.index.hash_of(endpoint, name)
    }

    /// The index of KV events, if events are accepted.
    pub fn exact(&self) -> Option<&ExactIndex> {
        self.exact.as_ref().map(|exact| &exact.index)
    }

    /// Removes an endpoint and its predicted cache contents.
    pub fn leave(&self, now: Nanos, endpoint: EndpointId, out: &mut Vec<Output>) {
        self.step(now, Input::Left { endpoint }, out);
        self.forget_dispatches(endpoint);
        if let Some(exact) = &self.exact {
            exact.index.remove_endpoint(endpoint);
        }
    }

    /// Places, queues or rejects a request whose prompt has these blocks. The result is in `out`; a queued request has
    /// no entry there.
    pub fn arrive(
        &self,
        now: Nanos,
        mut request: SchedulingRequest,
        chain: &[BlockHash],
        scratch: &mut Scratch,
        out: &mut Vec<Output>,
    ) {
        let block_tokens = self.block_tokens();
        let reusable = reusable(chain, request.prompt_tokens, block_tokens);
        let overlap = self.look_up(now, reusable, block_tokens, scratch);
        request.head = chain.first().copied();
        let (id, tokens) = (request.id, request.prompt_tokens);
        let placed = self.with_state(now, out, |state, out| {
            let first = out.len();
            if let Some(tape) = &mut state.tape
                && request.attempt == 0
                && request.hedge.is_none()
            {
                tape.prompt(id, chain, block_tokens);
            }
            state.step(now, Input::Arrived { request, overlap, block_tokens }, out);
            if state.scheduler.waits(id) {
                state.prompts.insert(id, Prompt { chain: chain.into(), tokens });
            }
            state.dispatched(&out[first..], id, chain)
        });
        if let Some(placement) = placed {
            self.note_placement(now, id, chain, reusable, placement, scratch);
        }
    }

    /// Steps the scheduler under its lock and answers its requests for prefix lookups.
    fn with_state<T>(
        &self,
        now: Nanos,
        out: &mut Vec<Output>,
        step: impl FnOnce(&mut State, &mut Vec<Output>) -> T,
    ) -> T {
        let first = out.len();
        let mut state = AbortOnPanicGuard::of(self.state());
        let done = step(&mut state, out);
        let may_wait = state.scheduler.may_wait();
        if self.may_wait.load(Ordering::Relaxed) != may_wait {
            self.may_wait.store(may_wait, Ordering::Relaxed);
        }
        let may_split = state.scheduler.has_pairs();
        if self.may_split.load(Ordering::Relaxed) != may_split {
            self.may_split.store(may_split, Ordering::Relaxed);
        }
        drop(state);
        if out.len() > first {
            self.refresh(now, first, out);
        }
        done
    }

    /// Looks up the prompts of dequeued requests, one after the other, and passes the results to the scheduler.
    fn refresh(&self, now: Nanos, first: usize, out: &mut Vec<Output>) {
        let mut scratch = None;
        while let Some(at) = out[first..].iter().position(|output| matches!(output, Output::Refresh { .. })) {
            let Output::Refresh { request: id } = out.remove(first + at) else { return };
            let scratch = scratch.get_or_insert_with(Scratch::default);
            let prompt = self.state().prompts.get(&id).cloned();
            let Prompt { chain, tokens } =
                prompt.unwrap_or_else(|| Prompt { chain: Arc::new([]), tokens: 0 });
            let block_tokens = self.block_tokens();
            let reusable = reusable(&chain, tokens, block_tokens);
            let overlap = self.look_up(now, reusable, block_tokens, scratch);
            let mut state = AbortOnPanicGuard::of(self.state());
            let before = out.len();
            state.step(now, Input::Refreshed { request: id, overlap }, out);
            let placed = state.dispatched(&out[before..], id, &chain);
            drop(state);
            if let Some(placement) = placed {
                self.note_placement(now, id, &chain, reusable, placement, scratch);
            }
        }
    }

    /// Predicted overlap of these blocks with each endpoint's cache.
    fn look_up(
        &self,
        now: Nanos,
        chain: &[BlockHash],
        block_tokens: u32,
        scratch: &mut Scratch,
    ) -> Vec<(EndpointId, Prediction)> {
        let Scratch { approximate, exact, speculation } = scratch;
        let tokens = |blocks: u32| blocks.saturating_mul(block_tokens);
        self.index().lookup(now, chain, approximate);
        let Some(Exact { index, speculation: sent }) = &self.exact else {
            self.raise_shared(chain, block_tokens, approximate, None);
            let only_ours =
                |(id, blocks)| (id, Prediction { approximate: tokens(blocks), ..Prediction::default() });
            return approximate.iter().map(only_ours).collect();
        };
        index.lookup(chain, exact);
        read(sent).lookup(now, chain, speculation);
        self.raise_shared(chain, block_tokens, approximate, Some(speculation));
        let predicted = |id| {
            let sent = speculation.blocks(id);
            let told = exact.blocks(id).max(sent);
            // What a prompt before it needs is loaded for both. Engines evict a prompt's last blocks first, so what is below
            // the GPU comes after what was sent.
            let lower = exact.lower_blocks(id).min(told - sent);
            let approximate = tokens(approximate.blocks(id));
            (id, Prediction { exact: tokens(told), approximate, lower: tokens(lower) })
        };
        let (approximate, exact, speculation) = (&*approximate, &*exact, &*speculation);
        let ours = approximate.iter();
        let theirs = exact.iter().filter(|(id, _)| approximate.blocks(*id) == 0);
        let sent =
            speculation.iter().filter(|(id, _)| approximate.blocks(*id) == 0 && exact.blocks(*id) == 0);
        ours.chain(theirs).chain(sent).map(|(id, _)| predicted(id)).collect()
    }

    /// Records that another router has sent a prompt with these blocks to `endpoint`. The router's own placements are
    /// recorded automatically.
    pub fn learn(&self, now: Nanos, request: RequestId, chain: &[BlockHash], endpoint: EndpointId) {
        self.note_dispatch(now, request, chain, endpoint, false);
    }

    /// Records a placement whose prompt was looked up with this `scratch`.
    fn note_placement(
        &self,
        now: Nanos,
        request: RequestId,
        chain: &[BlockHash],
        reusable: &[BlockHash],
        placement: Placement,
        scratch: &Scratch,
    ) {
        // The blocks are where the prompt is computed; elsewhere they are when they have arrived.
        let (request, endpoint, feed) = match placement.prefill {
            Some(PrefillLeg { id, endpoint, feed, .. }) => (id, endpoint, feed),
            None => (request, placement.endpoint, placement.feed),
        };
        // An endpoint without a feed reports nothing; only dispatches count there. What is loaded is reported.
        let told = feed == Feed::Absent
            || !reusable.is_empty()
                && scratch.exact.blocks(endpoint) as usize >= reusable.len()
                && scratch.exact.lower_blocks(endpoint) == 0;
        self.note_dispatch(now, request, chain, endpoint, told);
    }

    /// `told` is whether no KV event is expected for this dispatch: the endpoint has already reported all reusable
    /// blocks, and its removal events will be accurate too; or it has no feed.
    fn note_dispatch(
        &self,
        now: Nanos,
        request: RequestId,
        chain: &[BlockHash],
        endpoint: EndpointId,
        told: bool,
    ) {
        self.index_mut().insert(now, chain, endpoint);
        self.note_sent(now, chain, endpoint);
        if let Some(exact) = &self.exact
            && !told
        {
            write(&exact.speculation).sent(now, request, chain, endpoint);
        }
    }

    /// The first token of a request arrived, and `tokens` more after it.
    pub fn progress(&self, now: Nanos, request: RequestId, first: bool, tokens: u32, out: &mut Vec<Output>) {
        if first {
            self.note_computed(now, request);
        }
        let arrived = self.with_state(now, out, |state, out| {
            let arrived = first.then(|| state.moving.remove(&request)).flatten();
            if first {
                state.step(now, Input::FirstToken { request }, out);
            }
            if tokens > 0 {
                state.step(now, Input::Tokens { request, count: tokens }, out);
            }
            arrived
        });
        self.note_arrived(now, request, arrived);
    }

    /// A non-streamed answer arrived or began to arrive.
    pub fn begin(&self, now: Nanos, request: RequestId, out: &mut Vec<Output>) {
        self.note_computed(now, request);
        let arrived = self.with_state(now, out, |state, out| {
            state.step(now, Input::Begun { request }, out);
            state.moving.remove(&request)
        });
        self.note_arrived(now, request, arrived);
    }

    /// The blocks of a split request have arrived where it is decoded.
    fn note_arrived(&self, now: Nanos, request: RequestId, moved: Option<(Arc<[BlockHash]>, EndpointId)>) {
        if let Some((chain, endpoint)) = moved {
            // Its events, if it has a feed, come with the transfer.
            self.note_dispatch(now, request, &chain, endpoint, true);
        }
    }

    /// A request's prompt is computed. Most requests hit the cache and await no event: those write nothing.
    fn note_computed(&self, now: Nanos, request: RequestId) {
        if let Some(Exact { speculation, .. }) = &self.exact
            && read(speculation).is_due(now, request)
        {
            write(speculation).computed(now, request);
        }
    }

    /// Steps the scheduler with any other input.
    pub fn step(&self, now: Nanos, input: Input, out: &mut Vec<Output>) {
        self.step_all(now, [input], out);
    }

    /// Steps the scheduler with each of these inputs, under one lock.
    pub fn step_all(&self, now: Nanos, inputs: impl IntoIterator<Item = Input>, out: &mut Vec<Output>) {
        let mut finished = None;
        self.with_state(now, out, |state, out| {
            for input in inputs {
                if let Input::Finished { request } = input {
                    finished = Some(request);
                }
                state.step(now, input, out);
            }
        });
        if let (Some(request), Some(exact)) = (finished, &self.exact)
            && read(&exact.speculation).awaits(request)
        {
            write(&exact.speculation).ended(request);
        }
    }

    /// Whether an arriving request may have to wait, read without a lock: at the moment at which this changes, a
    /// request may wait although the result was false.
    pub fn may_wait(&self) -> bool {
        self.may_wait.load(Ordering::Relaxed)
    }

    /// Whether two of its endpoints can share a request, read without a lock.
    pub fn may_split(&self) -> bool {
        self.may_split.load(Ordering::Relaxed)
    }

    /// Reads the scheduler's state under its lock; `read` must be short.
    pub fn read<T>(&self, read: impl FnOnce(&Scheduler) -> T) -> T {
        read(&self.state().scheduler)
    }

    /// Exports one slice of the dispatch index, for [`Router::restore_dispatches`] of a later router. `from` is 0 at
    /// first. Returns the start of the next slice, if there is one.
    pub fn export_dispatches(
        &self,
        now: Nanos,
        from: usize,
        out: &mut Vec<(EndpointId, Piece)>,
    ) -> Option<usize> {
        self.index().export(now, from, out)
    }

    /// Restores exported dispatches of an endpoint that has just joined; `since` is the time since the export. Requests
    /// to other endpoints may run in between; requests to this endpoint should not.
    pub fn restore_dispatches(&self, now: Nanos, since: Nanos, endpoint: EndpointId, pieces: &Pieces) {
        let mut hint = 0;
        for n in 0..pieces.len() {
            if let Some((chain, age)) = pieces.prompt(n) {
                hint = self.index_mut().restore(now, age + since, &chain, endpoint, hint);
            }
        }
        // The endpoint may have left meanwhile; then its blocks would never be removed.
        if self.read(|scheduler| scheduler.pool().get(endpoint).is_none()) {
            self.forget_dispatches(endpoint);
        }
    }

    /// Bytes and blocks of the approximate index.
    pub fn index_size(&self) -> (usize, u64) {
        let index = self.index();
        (index.bytes(), index.blocks_held())
    }

    /// Blocks that each of these endpoints is predicted to hold, according to dispatches.
    pub fn blocks_given(&self, endpoints: &[EndpointId]) -> Vec<u64> {
        let index = self.index();
        endpoints.iter().map(|endpoint| index.blocks_of(*endpoint)).collect()
    }

    /// Memory limit of the approximate index, in bytes.
    pub fn index_bytes_max(&self) -> usize {
        self.approximate.lock().unwrap_or_else(PoisonError::into_inner).memory_bytes_max
    }

    fn state(&self) -> MutexGuard<'_, State> {
        #[cfg(test)]
        locks::note(locks::Kind::Scheduler);
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn index(&self) -> RwLockReadGuard<'_, ApproxIndex> {
        read(&self.index)
    }

    fn index_mut(&self) -> AbortOnPanicGuard<RwLockWriteGuard<'_, ApproxIndex>> {
        write(&self.index)
    }
}

/// The reusable blocks of a prompt: an engine computes at least the last token, to produce the next one, and it reuses
/// whole blocks.
fn reusable(chain: &[BlockHash], prompt_tokens: u32, block_tokens: u32) -> &[BlockHash] {
    let blocks_max = prompt_tokens.saturating_sub(1) / block_tokens.max(1);
    &chain[..chain.len().min(blocks_max as usize)]
}

fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    #[cfg(test)]
    locks::note(locks::Kind::Shared);
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

fn write<T>(lock: &RwLock<T>) -> AbortOnPanicGuard<RwLockWriteGuard<'_, T>> {
    #[cfg(test)]
    locks::note(locks::Kind::Exclusive);
    AbortOnPanicGuard::of(lock.write().unwrap_or_else(PoisonError::into_inner))
}

// === impl State ===

impl State {
    /// The placement of a request, if it is among the outputs. The prompt of a split one is kept until its blocks have
    /// arrived.
    fn dispatched(&mut self, outputs: &[Output], id: RequestId, chain: &[BlockHash]) -> Option<Placement> {
        let placement = outputs.iter().find_map(|output| match output {
            Output::Dispatch { request, placement } if *request == id => Some(*placement),
            _ => None,
        })?;
        if placement.prefill.is_some() {
            self.moving.insert(id, (chain.into(), placement.endpoint));
        }
        Some(placement)
    }

    fn step(&mut self, now: Nanos, input: Input, out: &mut Vec<Output>) {
        if let Some(tape) = &mut self.tape {
            tape.record_input(now, &input, &self.scheduler);
        }
        let first = out.len();
        if let Input::Finished { request } = &input {
            self.prompts.remove(request);
            self.moving.remove(request);
        }
        self.scheduler.step(now, input, out);
        if let Some(tape) = &mut self.tape {
            tape.record_outputs(now, &out[first..]);
        }
        if !self.prompts.is_empty() {
            for request in out[first..].iter().filter_map(Output::request) {
                self.prompts.remove(&request);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::ChainSeed;
    use crate::cache_accuracy::ReportedReuse;
    use crate::disaggregation::{Part, Role};
    use crate::event::{StoredBlock, Tier};
    use crate::policy::PolicyConfig;

    /// A request of 65 output tokens takes the scheduler's lock for its arrival, first token, every sixteen tokens and
    /// its end. It writes to the index of dispatches once, and to the prompts that await events twice, unless events have
    /// reported its whole prompt.
    #[test]
    fn a_request_takes_a_lock_for_each_report_and_no_more() {
        let (router, endpoint, chain) = one_endpoint(Feed::Live);
        let mut scratch = Scratch::default();
        let mut request = |n| {
            let (request, mut out) = (RequestId(n), Vec::new());
            let now = Nanos(10 + n);
            locks::during(|| {
                router.arrive(now, SchedulingRequest::new(request, 17), &chain, &mut scratch, &mut out);
                router.progress(now, request, true, 0, &mut out);
                (0..4).for_each(|_| router.progress(now, request, false, 16, &mut out));
                let reported = ReportedReuse { prompt_tokens: 17, cached_tokens: 16 };
                let whole = [
                    Input::Wrote { request, output_tokens: 65 },
                    Input::Answered { request, reported },
                    Input::Succeeded { request },
                    Input::Finished { request },
                ];
                router.step_all(now, whole, &mut out);
            })
        };
        assert_eq!(request(1), [7, 4, 3], "the index of dispatches; events are due: sent, computed");
        let blocks = chain.iter().map(|&hash| StoredBlock { name: EngineHash(hash.0), hash });
        let stored = KvEvent::Stored { parent: None, blocks: blocks.collect(), tier: Tier::Gpu };
        router.apply(endpoint, &stored);
        assert_eq!(request(2), [7, 4, 1], "the index of dispatches");
    }

    /// The exact prediction for a prompt that was just sent to an endpoint with this feed.
    fn predicted_after_dispatch(feed: Feed) -> Vec<u32> {
        let (router, _, chain) = one_endpoint(feed);
        let (mut scratch, mut out) = (Scratch::default(), Vec::new());
        for n in 0..2 {
            let request = SchedulingRequest::new(RequestId(n), 17);
            router.arrive(Nanos(2 + n), request, &chain, &mut scratch, &mut out);
        }
        let overlaps = router.recording().inputs.into_iter().filter_map(|(_, input)| match input {
            Input::Arrived { overlap, .. } => {
                Some(overlap.iter().map(|(_, prediction)| prediction.exact).sum())
            }
            _ => None,
        });
        overlaps.collect()
    }

    /// A router with one endpoint, and a prompt of four blocks.
    fn one_endpoint(feed: Feed) -> (Router, EndpointId, Vec<BlockHash>) {
        let router = Router::recorded(Config {
            scheduler: scheduler::Config {
                seed: 1,
                ..scheduler::Config::new(PolicyConfig::by_name("prefix_aware").expect("a policy"))
            },
            index: approx::Config { memory_bytes_max: 1 << 20, ttl: Nanos::MAX },
            exact: Some(exact::Config { memory_bytes_max: 1 << 20 }),
            block_tokens: 4,
        });
        let (mut out, mut chain) = (Vec::new(), Vec::new());
        let endpoint = router.join(Nanos(1), "e".into(), true, false, &mut out).expect("room");
        router.set_feed(Nanos(1), endpoint, feed, &mut out);
        ChainSeed::new("m", None, None).chain(&[7; 16], 4, &mut chain);
        (router, endpoint, chain)
    }

    #[test]
    fn a_dispatch_counts_as_reported_only_if_the_feed_will_report_it() {
        assert_eq!(predicted_after_dispatch(Feed::Live), [0, 16]);
        assert_eq!(predicted_after_dispatch(Feed::Absent), [0, 0]);
    }

    /// Invariant: The blocks of a split request count at the endpoint that computes them from its placement on, and at the
    /// one that decodes from when they have arrived.
    ///
    /// The proxy of the study "elastic P/D" never counted them at the latter (its bug 6): later turns were placed as if
    /// their conversation were cached nowhere.
    #[test]
    fn the_blocks_of_a_split_request_count_where_they_have_arrived() {
        let (router, prefill, chain) = one_endpoint(Feed::Absent);
        let (mut scratch, mut out) = (Scratch::default(), Vec::new());
        let decode = router.join(Nanos(1), "d".into(), true, false, &mut out).expect("room");
        for (endpoint, role) in [(prefill, Role::Prefill), (decode, Role::Decode)] {
            let part = Part { role, network: Some(1), serves_alone: false };
            router.step(Nanos(1), Input::Assigned { endpoint, part }, &mut out);
        }
        let mut arrive = |n: u64, out: &mut Vec<Output>| {
            let leg = Some(RequestId(100 + n));
            let request = SchedulingRequest { leg, ..SchedulingRequest::new(RequestId(n), 17) };
            router.arrive(Nanos(2 + n), request, &chain, &mut scratch, out);
            match out.last() {
                Some(Output::Dispatch { placement, .. }) => {
                    (placement.prefill.expect("split").overlap_tokens, placement.overlap_tokens)
                }
                _ => panic!("not placed"),
            }
        };
        assert_eq!(arrive(0, &mut out), (0, 0));
        assert_eq!(arrive(1, &mut out), (16, 0), "computed at one");
        router.begin(Nanos(9), RequestId(100), &mut out);
        assert_eq!(arrive(2, &mut out), (16, 0), "on their way");
        router.progress(Nanos(10), RequestId(0), true, 0, &mut out);
        assert_eq!(arrive(3, &mut out), (16, 16), "arrived");
        (0..4).for_each(|n| router.step(Nanos(20), Input::Finished { request: RequestId(n) }, &mut out));
        assert!(router.state().moving.is_empty());
    }

    /// A router of three endpoints with an in-flight limit of one, and a prompt's blocks.
    fn narrow() -> (Router, Vec<BlockHash>) {
        let scheduler = scheduler::Config {
            max_concurrent_requests: 1,
            queue_size: 9,
            queue_timeout: Nanos::from_secs(9),
            ..scheduler::Config::new(PolicyConfig::by_name("prefix_aware").expect("a policy"))
        };
        let index = approx::Config { memory_bytes_max: 1 << 20, ttl: Nanos::MAX };
        let router = Router::recorded(Config { scheduler, index, exact: None, block_tokens: 4 });
        for n in 0..3 {
            router.join(Nanos(1), format!("e{n}").into(), true, false, &mut Vec::new()).expect("room");
        }
        let mut chain = Vec::new();
        ChainSeed::new("m", None, None).chain(&[7; 64], 4, &mut chain);
        (router, chain)
    }

    /// Invariant: A queued request is placed by the state at its turn, and keeps its turn if no endpoint is
    /// available.
    ///
    /// Also held by `a_dequeued_request_that_loses_its_slot_is_the_next_again`.
    #[test]
    fn a_prompt_that_waited_is_looked_up_again_and_where_it_went_is_known() {
        let (router, chain) = narrow();
        let (mut scratch, mut out) = (Scratch::default(), Vec::new());
        for n in 0..3 {
            let request = SchedulingRequest::new(RequestId(n), 65);
            router.arrive(Nanos(2 + n), request, if n == 0 { &[] } else { &chain }, &mut scratch, &mut out);
        }
        assert_eq!((out.len(), router.read(Scheduler::queued)), (1, 2));
        let elsewhere = EndpointId::new(2, 0);
        router.learn(Nanos(9), RequestId(99), &chain, elsewhere);
        for n in 0..2 {
            router.step(Nanos(10 + n), Input::Finished { request: RequestId(n) }, &mut out);
        }
        let placed = |n| {
            out.iter().find_map(|output| match output {
                Output::Dispatch { request: RequestId(id), placement } if *id == n => {
                    Some((placement.endpoint, placement.overlap_tokens))
                }
                _ => None,
            })
        };
        assert_eq!((placed(1), placed(2)), (Some((elsewhere, 64)), Some((elsewhere, 64))));
        assert!(
            out.iter().all(|output| !matches!(output, Output::Refresh { .. })),
            "`Refresh` is internal to the router"
        );
        assert!(router.state().prompts.is_empty(), "no request is queued");
        let replayed: Vec<_> = router.recording().replay().into_iter().flatten().collect();
        let told = |outputs: &[Output]| {
            outputs.iter().filter(|o| o.request().is_some()).copied().collect::<Vec<_>>()
        };
        assert_eq!(told(&replayed), told(&out));
    }

    #[test]
    fn a_recording_begins_with_the_configuration_that_the_router_began_with() {
        let (router, chain) = narrow();
        let before = router.recording().config;
        let later = scheduler::Config { max_concurrent_requests: 7, ..before.clone() };
        router.step(Nanos(2), Input::Configured { config: Box::new(later) }, &mut Vec::new());
        let request = SchedulingRequest::new(RequestId(0), 65);
        router.arrive(Nanos(3), request, &chain, &mut Scratch::default(), &mut Vec::new());
        assert_eq!(router.recording().config, before);
    }

    #[test]
    fn a_cancelled_queued_request_leaves_no_state() {
        let (router, chain) = narrow();
        let (mut scratch, mut out) = (Scratch::default(), Vec::new());
        for n in 0..3 {
            router.arrive(Nanos(2), SchedulingRequest::new(RequestId(n), 65), &chain, &mut scratch, &mut out);
        }
        assert_eq!(router.state().prompts.len(), 2);
        router.step(Nanos(3), Input::Finished { request: RequestId(1) }, &mut out);
        router.step(Nanos::from_secs(20), Input::Tick, &mut out);
        assert_eq!(router.state().prompts.len(), 0);
        assert_eq!(router.read(Scheduler::queued), 0);
    }

    #[test]
    fn a_reload_changes_the_queue_and_the_index_limits() {
        let (router, chain) = narrow();
        let (mut scratch, mut out) = (Scratch::default(), Vec::new());
        assert!(router.may_wait());
        router.arrive(Nanos(2), SchedulingRequest::new(RequestId(0), 65), &chain, &mut scratch, &mut out);
        let scheduler = router.read(|scheduler| scheduler.config().clone());
        let scheduler = scheduler::Config { max_concurrent_requests: 0, ..scheduler };
        let index = approx::Config { memory_bytes_max: 0, ttl: Nanos::MAX };
        router.configure(Nanos(3), Config { scheduler, index, exact: None, block_tokens: 999 }, &mut out);
        assert!(!router.may_wait(), "no request waits without limits");
        assert_eq!(router.block_tokens(), 4, "the engines determine the block size");
        assert!(router.index_size().1 > 0, "existing entries stay until the next insertion");
        router.arrive(Nanos(4), SchedulingRequest::new(RequestId(1), 65), &chain, &mut scratch, &mut out);
        assert_eq!(router.index_size().1, 0);
    }
}
