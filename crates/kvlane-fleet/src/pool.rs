//! A pool: the endpoints that serve one model, their router, and the queued requests.
//!
//! A pool joins the core's [`Router`] with the clock, with the workers behind its endpoint ids, and with the tasks of
//! queued requests: it delivers the router's outputs to the tasks they concern.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;
use kvlane_core::block::BlockHash;
use kvlane_core::cache_accuracy::{Feed, KnowledgeChange};
use kvlane_core::disaggregation::Part;
use kvlane_core::endpoint::EndpointId;
use kvlane_core::policy::Reason;
use kvlane_core::replica::{News, ReplicaId, SentPrompt};
use kvlane_core::request::{RequestId, SchedulingRequest};
use kvlane_core::router::{self, Router, Scratch};
use kvlane_core::scheduler::{Input, Output, Scheduler};
use kvlane_core::time::Nanos;
use kvlane_http::address::Protocol;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::Instant;

use crate::clock::Clock;
use crate::decoders::{Decoders, LoggedSide};
use crate::feed::EventFeed;
use crate::first_tokens::FirstTokens;
use crate::metrics::{PoolMetrics, SelectionMetrics};
use crate::tokenize::Counting;
use crate::traffic::Traffic;
use crate::vitals::Vitals;
use crate::worker::provider::Provider;
use crate::worker::{Rank, Worker, WorkerId};

/// The endpoints that serve one model and its adapters.
pub struct ModelPool {
    /// The base model.
    pub model: String,
    /// Places its requests.
    pub router: Router,
    /// How its prompts are counted.
    pub counting: Counting,
    /// The service outside the fleet whose model it is: only the catalogue of models sends it requests.
    pub provider: Option<Arc<Provider>>,
    /// What its workers speak, and so what its requests are sent in.
    pub protocol: Protocol,
    /// Its metrics.
    pub metrics: PoolMetrics,
    /// Times to first token at its endpoints, recorded while hedging is on.
    pub first_tokens: FirstTokens,
    /// What was logged last of its decode side.
    pub logged_side: LoggedSide,
    clock: Clock,
    /// By slot.
    endpoints: ArcSwap<Vec<Option<Arc<PoolEndpoint>>>>,
    /// The endpoints of each worker, so that a change of one worker does not search all.
    by_worker: Mutex<HashMap<WorkerId, Vec<EndpointId>>>,
    waiters: Mutex<HashMap<RequestId, oneshot::Sender<Output>>>,
    ticker: Ticker,
    /// The block size of each endpoint that has reported it.
    block_sizes: Mutex<BTreeMap<EndpointId, u32>>,
    /// Receives the worker of a draining endpoint when its last request has ended.
    drained: mpsc::UnboundedSender<Arc<Worker>>,
    /// Notified of each placement, if others are to hear of it.
    placed: Option<Arc<Notify>>,
}

/// One rank of a worker in one pool.
pub struct PoolEndpoint {
    /// Its id in the pool.
    pub id: EndpointId,
    /// The worker it belongs to.
    pub worker: Arc<Worker>,
    /// The data-parallel rank, and where that publishes KV events.
    pub rank: Rank,
    /// The rank's number, if the worker has several ranks.
    pub number: Option<u32>,
    /// Its name in logs, metrics and headers: the worker's URL, with `#rank` if the worker has several ranks.
    pub name: Arc<str>,
    /// Its KV events, if it publishes them.
    pub feed: Option<Arc<EventFeed>>,
    /// Whether its engine makes progress.
    pub vitals: Vitals,
    /// Its requests since it joined.
    pub traffic: Traffic,
    /// Its engine's last page of metrics did not report its load.
    pub load_unknown: AtomicBool,
    /// Placements by reason, under the pool's policy.
    selections: ArcSwap<SelectionMetrics>,
}

// === impl ModelPool ===

impl ModelPool {
    /// A pool without endpoints.
    pub fn new(
        model: &str,
        router: Router,
        counting: Counting,
        metrics: PoolMetrics,
        clock: Clock,
        drained: mpsc::UnboundedSender<Arc<Worker>>,
    ) -> Self {
        Self {
            model: model.into(),
            router,
            counting,
            provider: None,
            protocol: Protocol::Http,
            metrics,
            first_tokens: FirstTokens::default(),
            logged_side: LoggedSide::default(),
            clock,
            endpoints: ArcSwap::default(),
            by_worker: Mutex::default(),
            waiters: Mutex::default(),
            ticker: Ticker::default(),
            block_sizes: Mutex::default(),
            drained,
            placed: None,
        }
    }

    /// A pool that notifies `placed` of each placement.
    pub(crate) fn announcing(self, placed: Arc<Notify>) -> Self {
        Self { placed: Some(placed), ..self }
    }

    /// A pool of a model of a service outside the fleet.
    pub fn of_provider(self, provider: Arc<Provider>) -> Self {
        Self { provider: Some(provider), counting: Counting::Estimate, ..self }
    }

    /// A pool whose workers speak this protocol.
    #[must_use]
    pub fn speaking(self, protocol: Protocol) -> Self {
        Self { protocol, ..self }
    }

    /// Its policy's name.
    pub fn policy(&self) -> &'static str {
        self.router.read(|scheduler| scheduler.config().policy.name())
    }

    /// Replaces the configuration of its router. The caller holds the fleet's lock.
    pub fn configure(&self, config: router::Config) {
        let before = self.policy();
        self.tell(|router, now, out| router.configure(now, config, out));
        let policy = self.policy();
        if policy != before {
            // Placements are counted by policy.
            for endpoint in self.endpoints() {
                endpoint.selections.store(Arc::new(self.metrics.selection(&endpoint.name, policy)));
            }
            tracing::info!(model = self.model, from = before, to = policy, "routing policy changed");
        }
    }

    /// Tokens of a block of its engines' caches, once one of them has reported it.
    pub fn known_block_tokens(&self) -> Option<u32> {
        (!self.block_sizes().is_empty()).then(|| self.router.block_tokens())
    }

    /// The block size of each endpoint that has reported it. They are all equal.
    pub fn block_sizes(&self) -> MutexGuard<'_, BTreeMap<EndpointId, u32>> {
        self.block_sizes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an endpoint: `rank` of `worker`, which has `several` ranks or one. Nothing if the pool is full. The caller holds
    /// the fleet's lock.
    pub fn join(
        &self,
        worker: &Arc<Worker>,
        rank: Rank,
        several: bool,
        feed: Option<Arc<EventFeed>>,
        part: Part,
    ) -> Option<Arc<PoolEndpoint>> {
        let id = self.router.read(|scheduler| scheduler.pool().next_id())?;
        let number = several.then_some(rank.number);
        let name = worker.endpoint_name(number);
        let selections = ArcSwap::from_pointee(self.metrics.selection(&name, self.policy()));
        let (worker, vitals, traffic) = (Arc::clone(worker), Vitals::default(), Traffic::default());
        let (healthy, draining) = {
            let state = worker.state();
            (state.healthy, state.draining)
        };
        let endpoint = Arc::new(PoolEndpoint {
            id,
            worker,
            rank,
            number,
            name,
            feed,
            vitals,
            traffic,
            load_unknown: AtomicBool::new(false),
            selections,
        });
        // It is listed before the router knows it, because a request placed there looks it up.
        self.list(id, Some(Arc::clone(&endpoint)));
        let name = Arc::clone(&endpoint.name);
        let joined = self.tell(|router, now, out| {
            let joined = router.join(now, name, healthy, draining, out);
            if part != Part::default() {
                router.step(now, Input::Assigned { endpoint: id, part }, out);
            }
            joined
        });
        assert_eq!(joined, Some(id), "the caller holds the fleet's lock");
        Some(endpoint)
    }

    /// Removes an endpoint. The caller holds the fleet's lock.
    pub fn leave(&self, endpoint: EndpointId) {
        self.tell(|router, now, out| {
            router.leave(now, endpoint, out);
            self.list(endpoint, None);
        });
        self.block_sizes().remove(&endpoint);
    }

    fn list(&self, id: EndpointId, endpoint: Option<Arc<PoolEndpoint>>) {
        let mut endpoints = Vec::clone(&self.endpoints.load());
        if endpoints.len() <= id.slot() {
            endpoints.resize(id.slot() + 1, None);
        }
        let worker =
            |endpoint: &Option<Arc<PoolEndpoint>>| endpoint.as_ref().map(|endpoint| endpoint.worker.id);
        let (comes, goes) = (worker(&endpoint), worker(&endpoints[id.slot()]));
        {
            let mut by_worker = self.by_worker();
            if let Some(worker) = goes {
                let own = by_worker.entry(worker).or_default();
                own.retain(|other| other.slot() != id.slot());
                if own.is_empty() {
                    by_worker.remove(&worker);
                }
            }
            if let Some(worker) = comes {
                by_worker.entry(worker).or_default().push(id);
            }
        }
        endpoints[id.slot()] = endpoint;
        self.endpoints.store(Arc::new(endpoints));
    }

    /// The endpoints of other ranks than this one, if any endpoint has it: a request for a rank is placed on a rank of that
    /// number.
    pub fn of_other_ranks(&self, rank: u32) -> Vec<EndpointId> {
        let endpoints = self.endpoints();
        if !endpoints.iter().any(|endpoint| endpoint.number == Some(rank)) {
            return Vec::new();
        }
        endpoints.iter().filter(|other| other.number != Some(rank)).map(|other| other.id).collect()
    }

    /// All endpoints that are not this worker's; none if it has no endpoint here.
    pub fn endpoints_but(&self, worker: WorkerId) -> Vec<EndpointId> {
        self.endpoints().iter().filter(|other| other.worker.id != worker).map(|other| other.id).collect()
    }

    /// All endpoints that are this worker's, in the order in which they joined.
    pub fn endpoints_of(&self, worker: WorkerId) -> Vec<EndpointId> {
        self.by_worker().get(&worker).cloned().unwrap_or_default()
    }

    fn by_worker(&self) -> MutexGuard<'_, HashMap<WorkerId, Vec<EndpointId>>> {
        self.by_worker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All endpoints.
    pub fn endpoints(&self) -> Vec<Arc<PoolEndpoint>> {
        self.endpoints.load().iter().flatten().cloned().collect()
    }

    /// Whether an endpoint takes requests, alone or with another.
    pub fn takes_requests(&self) -> bool {
        self.router.read(Scheduler::takes_requests)
    }

    /// Its endpoints that take requests, by their part in disaggregated serving; `None` if requests are not split.
    pub fn decoders(&self) -> Option<Decoders> {
        let parts: Vec<(EndpointId, Part)> = self.router.read(|scheduler| {
            let takes = scheduler.pool().eligible();
            takes.map(|endpoint| (endpoint.id, endpoint.part)).collect()
        });
        parts.iter().any(|(_, part)| part.network.is_some()).then(|| {
            let mut decoders = Decoders::default();
            for (id, part) in parts {
                if let Some(endpoint) = self.endpoint(id) {
                    decoders.add(&endpoint.name, &part, endpoint.load_unknown.load(Ordering::Relaxed));
                }
            }
            decoders
        })
    }

    /// The endpoint of this id, if it has not left.
    pub fn endpoint(&self, id: EndpointId) -> Option<Arc<PoolEndpoint>> {
        self.endpoints.load().get(id.slot())?.as_ref().filter(|endpoint| endpoint.id == id).cloned()
    }

    /// A request arrives: returns its output, if it need not wait. Outputs for other requests are delivered.
    pub fn arrive(&self, request: SchedulingRequest, chain: &[BlockHash]) -> Option<Output> {
        let now = self.clock.now();
        SCRATCH.with_borrow_mut(|(scratch, outputs)| {
            outputs.clear();
            let id = request.id;
            self.router.arrive(now, request, chain, scratch, outputs);
            let own = outputs.iter().position(|output| output.request() == Some(id));
            let own = own.map(|at| outputs.swap_remove(at));
            if let Some(output) = &own {
                self.announce(output);
            }
            self.deliver(outputs);
            own
        })
    }

    /// Passes `input` to the scheduler, and delivers its outputs.
    pub fn step(&self, input: Input) {
        self.tell(|router, now, out| router.step(now, input, out));
    }

    /// Passes all `inputs` to the scheduler under one lock, and delivers its outputs.
    pub fn step_all(&self, inputs: impl IntoIterator<Item = Input>) {
        self.tell(|router, now, out| router.step_all(now, inputs, out));
    }

    /// Takes over the news of the router of another replica.
    pub fn hear(&self, replica: ReplicaId, news: News) {
        self.tell(|router, now, out| router.hear(now, replica, news, out));
    }

    /// Takes over which prompts were sent where, of a snapshot of another replica.
    pub fn hear_marks(&self, prompts: &[SentPrompt]) {
        self.tell(|router, now, _| router.hear_marks(now, prompts));
    }

    /// Tokens of an answer have arrived.
    pub fn progress(&self, request: RequestId, first: bool, tokens: u32) {
        self.tell(|router, now, out| router.progress(now, request, first, tokens, out));
    }

    /// An answer has begun that does not come token by token.
    pub fn begin(&self, request: RequestId) {
        self.tell(|router, now, out| router.begin(now, request, out));
    }

    /// An engine has restarted, with an empty cache.
    pub fn forget(&self, endpoint: EndpointId) {
        self.tell(|router, now, out| router.forget(now, endpoint, out));
    }

    /// The state of an endpoint's KV event feed has changed.
    pub fn set_feed(&self, endpoint: EndpointId, feed: Feed) {
        self.tell(|router, now, out| router.set_feed(now, endpoint, feed, out));
    }

    fn tell<T>(&self, what: impl FnOnce(&Router, Nanos, &mut Vec<Output>) -> T) -> T {
        let now = self.clock.now();
        SCRATCH.with_borrow_mut(|(_, outputs)| {
            outputs.clear();
            let told = what(&self.router, now, outputs);
            self.deliver(outputs);
            told
        })
    }

    /// Delivers outputs: to the tasks of waiting requests, the log, and the task that lets drained workers leave.
    fn deliver(&self, outputs: &mut Vec<Output>) {
        let name = |endpoint: EndpointId| self.endpoint(endpoint).map(|endpoint| Arc::clone(&endpoint.name));
        for output in outputs.drain(..) {
            match output {
                Output::Dispatch { request, .. } | Output::Reject { request, .. } => {
                    self.announce(&output);
                    // A task that no longer waits has finished the request itself.
                    if let Some(waiter) = self.waiters().remove(&request) {
                        let _ = waiter.send(output);
                    }
                }
                Output::Knowledge { endpoint, change } => {
                    self.metrics.note_knowledge(&self.model, change);
                    let KnowledgeChange { from, to, cause } = change;
                    let (from, to, cause) = (from.name(), to.name(), cause.name());
                    let (worker, model) = (name(endpoint), &*self.model);
                    let worker = worker.as_deref();
                    tracing::info!(worker, model, from, to, cause, "cache knowledge of an endpoint changed");
                }
                // The router handles it itself.
                Output::Refresh { .. } => {}
                Output::Breaker { endpoint, state } => {
                    let (worker, model, state) = (name(endpoint), &*self.model, state.name());
                    let worker = worker.as_deref();
                    tracing::info!(worker, model, state, "circuit breaker changed state");
                }
                Output::Drained { endpoint } => {
                    if let Some(endpoint) = self.endpoint(endpoint) {
                        // The receiver's task ends with the gateway; then there is nothing to do.
                        let _ = self.drained.send(Arc::clone(&endpoint.worker));
                    }
                }
            }
        }
    }

    fn announce(&self, output: &Output) {
        if let (Some(placed), Output::Dispatch { .. }) = (&self.placed, output) {
            placed.notify_one();
        }
    }

    fn waiters(&self) -> MutexGuard<'_, HashMap<RequestId, oneshot::Sender<Output>>> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl PoolEndpoint ===

impl PoolEndpoint {
    /// Counts a placement.
    pub fn note_selection(&self, reason: Reason) {
        self.selections.load().inc(reason);
    }
}

thread_local! {
    static SCRATCH: RefCell<(Scratch, Vec<Output>)> = RefCell::default();
}

/// Gives one waiting request, the one that has waited longest, the turn to step the scheduler when something is due: ten
/// thousand waiting requests cost what one costs.
#[derive(Default)]
struct Ticker {
    turn: tokio::sync::Mutex<()>,
    /// A request has begun to wait: something may be due sooner.
    look: Notify,
}

/// A request that may be queued. Dropped before its output, it leaves the queue.
pub struct Waiting<'a> {
    pool: &'a ModelPool,
    id: RequestId,
    answer: oneshot::Receiver<Output>,
    /// Whether the answer has been taken.
    pub answered: bool,
}

// === impl Waiting ===

impl<'a> Waiting<'a> {
    /// Registers a request that may have to wait.
    pub fn new(pool: &'a ModelPool, id: RequestId) -> Self {
        let (tell, answer) = oneshot::channel();
        pool.waiters().insert(id, tell);
        Self { pool, id, answer, answered: false }
    }

    /// Waits for the output, or for `deadline`. The scheduler notices the passing of time only when it is stepped, so
    /// one of the queued requests steps it.
    pub async fn wait(&mut self, deadline: Instant) -> Option<Output> {
        let ticker = &self.pool.ticker;
        ticker.look.notify_one();
        let _turn = tokio::select! {
            answer = &mut self.answer => return answer.ok(),
            turn = ticker.turn.lock() => turn,
            () = tokio::time::sleep_until(deadline) => return None,
        };
        loop {
            let due = self.pool.router.read(Scheduler::next_deadline).unwrap_or(Nanos::MAX);
            let now = self.pool.clock.now();
            // An overdue item was not handled: the clock has a coarser resolution than the scheduler.
            let span = if due <= now { OVERDUE_TICK } else { Duration::from_nanos((due - now).0) };
            let tick = Instant::now() + span.min(WAIT_TICK);
            tokio::select! {
                answer = &mut self.answer => return answer.ok(),
                () = ticker.look.notified() => {}
                () = tokio::time::sleep_until(tick.min(deadline)) => {
                    if Instant::now() >= deadline {
                        return None;
                    }
                    self.pool.step(Input::Tick);
                }
            }
        }
    }
}

/// How soon the scheduler is stepped again when an overdue item was not handled.
const OVERDUE_TICK: Duration = Duration::from_millis(10);
/// The longest pause between two checks of what is due: an endpoint may have become busy until an earlier time.
const WAIT_TICK: Duration = Duration::from_millis(250);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.pool.waiters().remove(&self.id);
        if !self.answered {
            self.pool.step(Input::Finished { request: self.id });
        }
    }
}

#[cfg(test)]
mod tests {
    use kvlane_core::decision::{Refused, Rejection};
    use kvlane_core::recording::Recorder;

    use super::*;
    use crate::metrics::Metrics;

    fn empty() -> ModelPool {
        let config = crate::settings::Settings::default().router("m");
        let (metrics, clock) = (Metrics::new().pool("m"), Clock::start(1.0));
        let (drained, _) = mpsc::unbounded_channel();
        ModelPool::new("m", Router::new(config), Counting::Estimate, metrics, clock, drained)
    }

    #[tokio::test(start_paused = true)]
    async fn placements_are_announced_at_once_and_from_the_queue_and_rejections_are_not() {
        let placed = Arc::new(Notify::new());
        let announced =
            async || tokio::time::timeout(Duration::from_millis(1), placed.notified()).await.is_ok();
        let pool = empty().announcing(Arc::clone(&placed));
        pool.router.join(pool.clock.now(), "e".into(), true, false, &mut Vec::new()).expect("room");
        assert!(!announced().await);
        let own = pool.arrive(SchedulingRequest::new(RequestId(1), 100), &[]).expect("it need not wait");
        assert!(announced().await && matches!(own, Output::Dispatch { .. }), "{own:?}");
        pool.deliver(&mut vec![own]);
        assert!(announced().await);
        let refused = Refused::at_once(Rejection::QueueTimeout);
        pool.deliver(&mut vec![Output::Reject { request: RequestId(0), refused }]);
        assert!(!announced().await);
    }

    /// Invariant: One waiting request drives the scheduler's timers, however many wait.
    #[tokio::test(start_paused = true)]
    async fn a_thousand_queued_requests_step_the_scheduler_as_often_as_one() {
        let pool = Arc::new(empty());
        pool.router.record(Some(Recorder::in_memory()));
        let deadline = Instant::now() + Duration::from_secs(10);
        let waits: Vec<_> = (0..1000)
            .map(|n| {
                let pool = Arc::clone(&pool);
                tokio::spawn(async move {
                    let mut waiting = Waiting::new(&pool, RequestId(n));
                    let answer = waiting.wait(deadline).await;
                    waiting.answered = true;
                    answer.is_some()
                })
            })
            .collect();
        tokio::task::yield_now().await;
        // Request 0 has the turn to step the scheduler. Once it is rejected, another request takes over.
        let refused = Refused::at_once(Rejection::QueueTimeout);
        pool.deliver(&mut vec![Output::Reject { request: RequestId(0), refused }]);
        let mut answered = 0;
        for wait in waits {
            answered += usize::from(wait.await.expect("no panic"));
        }
        assert_eq!((answered, Instant::now()), (1, deadline));
        let recording = pool.router.recording();
        let ticks = recording.inputs.iter().filter(|(_, input)| matches!(input, Input::Tick)).count();
        let usual = 10_000 / WAIT_TICK.as_millis() as usize;
        assert!((usual - 1..=usual + 1).contains(&ticks), "{ticks} instead of {usual}");
    }
}
