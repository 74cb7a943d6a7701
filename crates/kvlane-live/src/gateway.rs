//! From a request to a lease: which pool, which endpoint, and who waits.
//!
//! The [`Gateway`] is what all relay threads share. It holds the pools by model name, and each [`ModelPool`] joins the
//! core's [`Router`] with the workers behind its endpoint ids and with the requests that wait for a place.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use kvlane_core::block::BlockHash;
use kvlane_core::config::ConfigError;
use kvlane_core::decision::{Placement, Refused, Rejection};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::poison_prompts::{PoisonPrompts, PromptKey, Standing};
use kvlane_core::request::{RequestId, RequestKey, SchedulingRequest};
use kvlane_core::router::{self, Router};
use kvlane_core::scheduler::{Input, Output};
use kvlane_core::time::Nanos;
use kvlane_http::connections::Connections;
use kvlane_http::network::Allowed;
use kvlane_http::tls::Tls;
use kvlane_wire::server_timing::Stage;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, SemaphorePermit, mpsc};
use tokio::time::Instant;

use crate::auth::Auth;
use crate::clock::Clock;
use crate::config::Config;
use crate::hints::{Facts, Hints};
use crate::history::History;
use crate::lease::Lease;
use crate::limits::{Charge, Limits};
use crate::memory::Memory;
use crate::metrics::Metrics;
use crate::objects::Objects;
use crate::pool::{ModelPool, Waiting};
use crate::recording_writer::RecordingWriter;
use crate::reload::Reloads;
use crate::salt::SaltKey;
use crate::snapshot::{Served, Snapshot};
use crate::timeline::Timeline;
use crate::timings::Timings;
use crate::tokenize::Tokenizers;
use crate::traces::Traces;
use crate::warm::Warm;
use crate::worker::{Worker, WorkerId};

/// What all threads of a gateway share.
pub struct Gateway {
    /// How it is set up. Replaced whole.
    config: ArcSwap<Config>,
    /// How long engines take, where the operator says so.
    pub(crate) timings: ArcSwap<Timings>,
    /// What it reads of who a request is from.
    pub(crate) hints: ArcSwap<Hints>,
    /// What each client may use.
    pub(crate) limits: Limits,
    /// What the requests of all clients hold.
    pub(crate) memory: Arc<Memory>,
    /// Which worker made which stored response, file or batch.
    pub(crate) objects: Objects,
    /// Prompts under which engines died.
    culprits: Mutex<PoisonPrompts>,
    /// Who of them is tried, where it may be the cause.
    turn: Semaphore,
    /// What workers were given before it was there.
    pub(crate) warm: Warm,
    /// What is told to a collector of traces.
    pub(crate) traces: Traces,
    /// How often its configuration was replaced, and what came of the last time.
    pub(crate) reloads: Reloads,
    /// Who may do what. Replaced whole.
    auth: ArcSwap<Auth>,
    /// Under which certificates everybody is spoken to. Replaced whole.
    tls: ArcSwap<Tls>,
    /// Where workers may be that somebody names from outside.
    pub(crate) allowed: Arc<ArcSwap<Allowed>>,
    /// What writes down what schedulers are told.
    pub(crate) recordings: RecordingWriter,
    /// Its time.
    pub clock: Clock,
    /// Its metrics.
    pub metrics: Metrics,
    /// What the last minutes were like.
    pub(crate) history: History,
    /// What it counts tokens with.
    pub(crate) tokenizers: Tokenizers,
    table: ArcSwap<Snapshot>,
    pub(crate) workers: Mutex<BTreeMap<WorkerId, Arc<Worker>>>,
    pub(crate) upstreams: Mutex<Vec<Arc<Connections>>>,
    /// Those of its threads, for a count of what they run.
    pub(crate) runtimes: Mutex<Vec<Handle>>,
    /// It takes no new connections and ends soon.
    pub(crate) stopping: AtomicBool,
    next_request: AtomicU64,
    next_worker: AtomicU64,
    /// Tells the fleet that a draining endpoint has no request left.
    pub(crate) drained: mpsc::UnboundedSender<Arc<Worker>>,
}

/// A request that knows its pool and is to be placed, perhaps several times.
#[derive(Clone)]
pub(crate) struct Routed {
    pub(crate) served: Arc<Served>,
    pub(crate) chain: Vec<BlockHash>,
    pub(crate) prompt_tokens: u32,
    pub(crate) facts: Facts,
    pub(crate) received: Nanos,
    /// Where its time goes.
    pub(crate) timeline: Arc<Timeline>,
    /// What its client or the gateway calls it.
    pub(crate) name: RequestKey,
    pub(crate) deadline: Instant,
    /// What it was let in with.
    pub(crate) charge: Option<Arc<Charge>>,
    /// What its prompt is called when engines die under it.
    pub(crate) prompt: PromptKey,
    /// The worker that keeps what it refers to.
    pub(crate) pinned: Option<WorkerId>,
}

/// Who is let in, and under which certificates.
pub struct Security {
    /// Who may do what.
    pub auth: Auth,
    /// Under which certificates everybody is spoken to.
    pub tls: Tls,
}

// === impl Security ===

impl Security {
    /// Reads what a configuration says, and the files it names.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn read(config: &Config) -> Result<Self, ConfigError> {
        Ok(Self { auth: Auth::read(&config.auth)?, tls: Tls::read(&config.tls)? })
    }
}

/// Which attempt of a request is placed.
enum AttemptKind {
    /// For the first time, or after so many others.
    Again(u32),
    /// Beside another that has waited for so long.
    Hedge(Nanos),
}

// === impl Gateway ===

impl Gateway {
    /// A gateway without workers. Endpoints whose last request ends while they drain are told to `drained`.
    pub(crate) fn new(
        config: Config,
        Security { auth, tls }: Security,
        clock: Clock,
        timings: Timings,
        tokenizers: Tokenizers,
        drained: mpsc::UnboundedSender<Arc<Worker>>,
    ) -> Self {
        let salts = SaltKey::read(&config.auth).ok().flatten().unwrap_or_else(SaltKey::generate);
        let (hints, limits) = (Hints::new(&config.hints, salts), Limits::default());
        limits.configure(&config.limits, &hints);
        let warm = Warm::read(&config, &clock);
        Self {
            timings: ArcSwap::from_pointee(timings),
            hints: ArcSwap::from_pointee(hints),
            limits,
            warm,
            memory: Memory::new(config.server.body_memory),
            objects: Objects::default(),
            culprits: Mutex::default(),
            turn: Semaphore::new(1),
            traces: Traces::new(&config.tracing),
            reloads: Reloads::default(),
            allowed: Arc::new(ArcSwap::new(auth.allowed())),
            auth: ArcSwap::from_pointee(auth),
            tls: ArcSwap::from_pointee(tls),
            config: ArcSwap::from_pointee(config),
            recordings: RecordingWriter::default(),
            clock,
            metrics: Metrics::new(),
            history: History::default(),
            tokenizers,
            table: ArcSwap::default(),
            workers: Mutex::default(),
            upstreams: Mutex::default(),
            runtimes: Mutex::default(),
            stopping: AtomicBool::new(false),
            next_request: AtomicU64::new(1),
            next_worker: AtomicU64::new(1),
            drained,
        }
    }

    /// How it is set up. For a look; whoever keeps it for longer clones the `Arc`.
    pub fn config(&self) -> arc_swap::Guard<Arc<Config>> {
        self.config.load()
    }

    /// Is set up in another way from here on.
    pub(crate) fn set_config(&self, config: Config, timings: Timings) {
        for gone in self.config().limits.iter() {
            if !config.limits.iter().any(|spec| spec.subject() == gone.subject()) {
                self.metrics.limits.forget(&gone.key, &gone.model);
            }
        }
        // It was read a moment ago, when the configuration was checked: failing now, the one before stays.
        let salts = SaltKey::read(&config.auth).ok().flatten();
        let hints = self.hints.load().reset(&config.hints, salts);
        self.limits.configure(&config.limits, &hints);
        self.hints.store(Arc::new(hints));
        for upstreams in self.upstreams().iter() {
            upstreams.configure(config.upstream.clone());
        }
        self.timings.store(Arc::new(timings));
        self.memory.set_most(config.server.body_memory);
        self.config.store(Arc::new(config));
    }

    /// Who may do what.
    pub fn auth(&self) -> arc_swap::Guard<Arc<Auth>> {
        self.auth.load()
    }

    /// Under which certificates everybody is spoken to.
    pub(crate) fn tls(&self) -> arc_swap::Guard<Arc<Tls>> {
        self.tls.load()
    }

    /// From now on this holds. Requests that were let in go on, and connections that stand keep their certificates.
    pub fn set_security(&self, Security { auth, tls }: Security) {
        self.allowed.store(auth.allowed());
        auth.inherit(&self.auth.load());
        self.auth.store(Arc::new(auth));
        for upstreams in self.upstreams().iter() {
            upstreams.set_tls(Arc::clone(&tls.workers));
        }
        self.tls.store(Arc::new(tls));
    }

    /// Has everything recorded from here on, or nothing, as the configuration says.
    ///
    /// # Errors
    /// When there is nowhere to write.
    pub(crate) fn record(&self) -> std::io::Result<()> {
        let config = self.config();
        self.recordings.configure(&config.recorder, &self.metrics.recorder, self.clock.now(), &self.pools())
    }

    /// A pool for `model` without endpoints, as the configuration says.
    pub(crate) fn new_pool(&self, model: &str) -> ModelPool {
        let router = Router::new(self.router_config(model));
        self.recordings.attach(&router, model);
        let (counting, metrics) = (self.tokenizers.counting(model), self.metrics.pool(model));
        ModelPool::new(model, router, counting, metrics, self.clock, self.drained.clone())
    }

    /// The configuration of the router of `model`'s pool.
    pub(crate) fn router_config(&self, model: &str) -> router::Config {
        let timings = self.timings.load();
        self.config().router(model, timings.of(model).map(|file| &file.timing))
    }

    /// All pools.
    pub fn pools(&self) -> Vec<Arc<ModelPool>> {
        self.table.load().pools.clone()
    }

    pub(crate) fn table(&self) -> arc_swap::Guard<Arc<Snapshot>> {
        self.table.load()
    }

    /// Replaces the table by what `change` makes of it. Callers take turns: the fleet's lock.
    pub(crate) fn change_table(&self, change: impl FnOnce(&mut Snapshot)) {
        let mut table = Snapshot::clone(&self.table.load());
        change(&mut table);
        self.table.store(Arc::new(table));
    }

    pub(crate) fn workers(&self) -> MutexGuard<'_, BTreeMap<WorkerId, Arc<Worker>>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn culprits(&self) -> MutexGuard<'_, PoisonPrompts> {
        self.culprits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How a request with this prompt may be placed, by the engines that died under it.
    pub(crate) fn standing(&self, prompt: PromptKey) -> Standing {
        self.culprits().standing(self.clock.now(), prompt)
    }

    /// Waits until no other request is tried that may kill its engine. Nobody closes the semaphore.
    pub(crate) async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        self.turn.acquire().await.ok()
    }

    pub(crate) fn next_worker_id(&self) -> WorkerId {
        WorkerId(self.next_worker.fetch_add(1, Ordering::Relaxed))
    }

    /// Settles how the pool of `model` counts tokens. A tokenizer is read on a thread where that takes nobody's time.
    pub(crate) async fn settle_counting(self: &Arc<Self>, model: &str, root: Option<String>) {
        if self.tokenizers.is_settled(model) {
            return;
        }
        let (gateway, model) = (Arc::clone(self), model.to_owned());
        let settled = tokio::task::spawn_blocking(move || {
            let config = gateway.config();
            let pools = &config.routing.pools;
            gateway.tokenizers.settle(&config.tokens, pools, &model, root.as_deref());
        });
        if settled.await.is_err() {
            tracing::error!("loading a tokenizer panicked; tokens are estimated");
        }
    }

    /// What a worker's count of tokens is worth has changed. What the one that counts differently says of its cache is
    /// not believed.
    pub(crate) fn parity_changed(&self, worker: &Worker) {
        let parity = worker.parity();
        for (_, endpoint) in self.table().endpoints_of(worker.id) {
            if let Some(feed) = &endpoint.feed {
                feed.set_parity(parity.clone());
            }
        }
    }

    /// The idle connections of a new relay thread.
    pub(crate) fn new_upstreams(&self) -> Arc<Connections> {
        let upstreams = Connections::new(self.config().upstream.clone(), Arc::clone(&self.tls().workers));
        self.upstreams().push(Arc::clone(&upstreams));
        upstreams
    }

    pub(crate) fn upstreams(&self) -> MutexGuard<'_, Vec<Arc<Connections>>> {
        self.upstreams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds an endpoint for the request and reserves its load there; waits for its turn if the pool is full.
    ///
    /// # Errors
    /// Why it goes nowhere.
    pub(crate) async fn place(
        self: &Arc<Self>,
        routed: &Routed,
        attempt: u32,
        excluded: &Arc<[EndpointId]>,
    ) -> Result<Lease, Refused> {
        loop {
            // An endpoint that left between the decision and here is not among the next one's candidates, and whoever
            // did not know that it waits knows it then.
            if let Some(lease) = self.place_once(routed, AttemptKind::Again(attempt), excluded).await? {
                routed.timeline.enter_at(Stage::Send, lease.placed);
                return Ok(lease);
            }
        }
    }

    /// Finds an endpoint for a second copy of a request of which the first has waited for so long. It waits for none.
    ///
    /// # Errors
    /// Why there is to be none, and if that is for now only, when to ask again.
    pub(crate) async fn place_hedge(
        self: &Arc<Self>,
        routed: &Routed,
        waited: Nanos,
        excluded: &Arc<[EndpointId]>,
    ) -> Result<Lease, Refused> {
        let placed = self.place_once(routed, AttemptKind::Hedge(waited), excluded).await?;
        placed.ok_or(Refused::at_once(Rejection::NoEndpoint))
    }

    async fn place_once(
        self: &Arc<Self>,
        routed: &Routed,
        kind: AttemptKind,
        excluded: &Arc<[EndpointId]>,
    ) -> Result<Option<Lease>, Refused> {
        let pool = &routed.served.pool;
        let id = RequestId(self.next_request.fetch_add(1, Ordering::Relaxed));
        let request = SchedulingRequest {
            excluded: Arc::clone(excluded),
            attempt: if let AttemptKind::Again(attempt) = kind { attempt } else { 0 },
            hedge: if let AttemptKind::Hedge(waited) = kind { Some(waited) } else { None },
            name: Some(routed.name),
            ..routed.facts.apply(SchedulingRequest::new(id, routed.prompt_tokens))
        };
        let mut waiting = pool.router.may_wait().then(|| Waiting::new(pool, id));
        let output = match (pool.arrive(request, &routed.chain), &mut waiting) {
            (Some(output), _) => output,
            (None, Some(waiting)) => {
                if let AttemptKind::Again(_) = kind {
                    routed.timeline.enter(Stage::Queue);
                }
                let output = waiting.wait(routed.deadline).await;
                output.ok_or(Refused::at_once(Rejection::QueueTimeout))?
            }
            (None, None) => {
                // Queueing was switched on after `may_wait` was read, and no task would receive its turn.
                pool.step(Input::Finished { request: id });
                return Ok(None);
            }
        };
        if let Some(mut waiting) = waiting {
            waiting.answered = true;
        }
        match output {
            Output::Dispatch { placement, .. } => Ok(self.lease(routed, id, placement)),
            Output::Reject { refused, .. } => Err(refused),
            Output::Refresh { .. }
            | Output::Drained { .. }
            | Output::Knowledge { .. }
            | Output::Breaker { .. } => Err(Refused::at_once(Rejection::NoEndpoint)),
        }
    }

    fn lease(self: &Arc<Self>, routed: &Routed, id: RequestId, placement: Placement) -> Option<Lease> {
        let pool = &routed.served.pool;
        let Some(endpoint) = pool.endpoint(placement.endpoint) else {
            pool.step(Input::Finished { request: id });
            return None;
        };
        endpoint.note_selection(placement.reason);
        Some(Lease::new(Arc::clone(self), routed, endpoint, id, placement))
    }
}
