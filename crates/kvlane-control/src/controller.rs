//! The fleet: workers join, are probed, drain and leave.
//!
//! A worker is registered as an endpoint of a pool when it has first answered a probe and its models are known. From
//! then on probes decide whether it gets requests, and its `/metrics` report its load; the outcome of requests is the
//! concern of the scheduler's circuit breakers. All changes of registrations are serialized here; relay threads only
//! read the result.
//!
//! Whether a worker is healthy and whether it drains is stored twice: in its [`State`], and in the scheduler of each
//! pool with one of its endpoints. The state's lock is held until the schedulers are updated, so that two concurrent
//! changes leave both with the same value.

mod adapters;
mod discovered;
mod grpc;
mod metrics_page;
mod names;
mod problem_log;
mod queries;
mod reconcile;
mod registration;
mod succession;
pub mod worker_access;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::{ArcSwap, Guard};
use bytes::Bytes;
use kvlane_core::health::Probe;
use kvlane_core::scheduler::Input;
use kvlane_fleet::Fleet;
use kvlane_fleet::metrics::{Reached, WorkerLabel};
use kvlane_fleet::panics::persist;
use kvlane_fleet::pool::{ModelPool, PoolEndpoint};
use kvlane_fleet::worker::config::WorkerSpec;
use kvlane_fleet::worker::{Rank, State, Worker, WorkerId};
use kvlane_http::address::{Protocol, worker_name};
use kvlane_http::connections::Connections;
use kvlane_http::network::Allowed;
use kvlane_wire::engine::load_reports;
use kvlane_wire::prometheus;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::discovered::Discovered;
use self::problem_log::ProblemLog;
use crate::empty_pools;
use crate::health::Health;
use crate::index_snapshot::IndexSnapshot;
use crate::ingest::Ingest;
use crate::parity_check;

/// Largest response to a probe.
const PROBE_BYTES_MAX: usize = 8 << 20;
/// Probes between two reads of a healthy worker's model list: adapters come and go.
const PROBES_PER_MODEL_LIST: u32 = 15;
/// Shortest time between two probes of a service outside the fleet.
const PROVIDER_INTERVAL: Duration = Duration::from_secs(60);
/// Most workers that are probed for the first time at once: each such probe is up to a dozen requests.
const FIRST_PROBES_MAX: usize = 256;
/// How long a first probe counts against [`FIRST_PROBES_MAX`], so that workers that do not answer do not hold up others.
const FIRST_PROBE_TURN: Duration = Duration::from_millis(250);
/// Most workers of a gateway.
pub const WORKERS_MAX: usize = 4096;

/// The workers, and the tasks that probe them.
pub struct Controller {
    fleet: Arc<Fleet>,
    health: ArcSwap<Health>,
    /// The networks in which workers that are added while running must be.
    allowed: Arc<ArcSwap<Allowed>>,
    upstreams: Arc<Connections>,
    /// Held while endpoints or the snapshot change.
    changes: Mutex<()>,
    /// A worker has been registered whose names are not listed yet. Changed under the lock of `changes`.
    unlisted: AtomicBool,
    /// The workers that each source of discovery has named.
    discovered: Mutex<Discovered>,
    /// A worker has left, or the networks in which workers may be have changed.
    departures: watch::Sender<()>,
    /// Limits how many workers are probed for the first time at once.
    first_probes: Semaphore,
    /// That workers without requests of their own are there has been logged.
    helpers_noted: AtomicBool,
    ingest: Ingest,
    /// The index of the previous process, until each worker has joined.
    index_snapshot: Arc<IndexSnapshot>,
    tasks: Tasks,
}

/// Where the tasks of a controller run, and until when.
pub struct Tasks {
    runtime: Handle,
    stop: CancellationToken,
    running: TaskTracker,
}

/// Why a worker was not added.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddError {
    /// The URL is invalid.
    #[error("{0}")]
    BadUrl(String),
    /// The address is not allowed.
    #[error("{0}")]
    Refused(String),
    /// A worker with this URL exists.
    #[error("worker {0} already exists")]
    Duplicate(String),
    /// The fleet is full.
    #[error("there are already {WORKERS_MAX} workers, which is the maximum")]
    TooMany,
}

// === impl Tasks ===

impl Tasks {
    /// On `runtime`, until `stop`.
    pub fn new(runtime: Handle, stop: CancellationToken) -> Self {
        Self { runtime, stop, running: TaskTracker::new() }
    }
}

// === impl Controller ===

impl Controller {
    /// A controller without workers. The worker of a draining endpoint comes through `drained` when its last request ends.
    pub fn new(
        fleet: Arc<Fleet>,
        health: Health,
        allowed: Arc<Allowed>,
        ingest: Ingest,
        index_snapshot: Arc<IndexSnapshot>,
        drained: mpsc::UnboundedReceiver<Arc<Worker>>,
        tasks: Tasks,
    ) -> Arc<Self> {
        let upstreams = fleet.new_upstreams();
        let controller = Arc::new(Self {
            fleet,
            health: ArcSwap::from_pointee(health),
            allowed: Arc::new(ArcSwap::new(allowed)),
            upstreams,
            changes: Mutex::default(),
            unlisted: AtomicBool::new(false),
            discovered: Mutex::default(),
            departures: watch::Sender::default(),
            first_probes: Semaphore::new(FIRST_PROBES_MAX),
            helpers_noted: AtomicBool::new(false),
            ingest,
            index_snapshot,
            tasks,
        });
        let (drained, letting_go) = (Arc::new(tokio::sync::Mutex::new(drained)), Arc::clone(&controller));
        controller
            .spawn("drained workers".into(), move || Arc::clone(&letting_go).let_go(Arc::clone(&drained)));
        let (fleet, stop) = (Arc::clone(&controller.fleet), controller.tasks.stop.clone());
        controller.spawn("empty pools".into(), move || {
            let (fleet, stop) = (Arc::clone(&fleet), stop.clone());
            async move { stop.run_until_cancelled(empty_pools::call(fleet)).await.unwrap_or_default() }
        });
        let adapters = Arc::clone(&controller);
        controller.spawn("adapters".into(), move || Arc::clone(&adapters).keep_adapters());
        controller
    }

    /// How workers are probed. Hold the guard for a moment only.
    pub fn health(&self) -> Guard<Arc<Health>> {
        self.health.load()
    }

    /// Replaces how workers are probed, and the networks in which workers that are added must be.
    pub fn configure(&self, health: Health, allowed: Arc<Allowed>) {
        self.health.store(Arc::new(health));
        self.allowed.store(allowed);
        self.departures.send_replace(());
    }

    /// Adds a worker. It gets requests once it has answered a probe. Another worker of the same URL may still be
    /// leaving.
    ///
    /// # Errors
    /// Why it cannot be added.
    pub fn add(self: &Arc<Self>, spec: &WorkerSpec) -> Result<Arc<Worker>, AddError> {
        self.take_in(self.configured(spec)?, false)
    }

    fn take_in(self: &Arc<Self>, worker: Worker, replaces: bool) -> Result<Arc<Worker>, AddError> {
        let (id, worker) = (worker.id, Arc::new(worker));
        let mut workers = self.fleet.workers();
        let stays = |other: &Arc<Worker>| other.url == worker.url && !other.state().leaving;
        if !replaces && workers.values().any(stays) {
            return Err(AddError::Duplicate(worker.url.to_string()));
        }
        if workers.len() >= WORKERS_MAX {
            self.fleet.metrics.limits.reached(Reached::Workers);
            return Err(AddError::TooMany);
        }
        workers.insert(id, Arc::clone(&worker));
        drop(workers);
        if !replaces {
            self.fleet
                .metrics
                .workers
                .worker_health
                .get_or_create(&WorkerLabel { worker: worker.url.to_string() })
                .set(0);
        }
        self.note_role(&worker);
        let (controller, probed) = (Arc::clone(self), Arc::clone(&worker));
        self.spawn(format!("probes of {}", worker.url), move || {
            Arc::clone(&controller).watch(Arc::clone(&probed))
        });
        if worker.spec.url.trim_end_matches('/') != &*worker.url {
            let url = &worker.spec.url;
            tracing::warn!(url, "worker URL must not end in /v1: using {}", worker.url);
        }
        tracing::info!(worker = %worker.url, "worker added");
        Ok(worker)
    }

    /// Says once that there are workers that get no requests of their own.
    fn note_role(&self, worker: &Worker) {
        let role = worker.spec.role;
        let is_used = self.fleet.settings().disaggregation.uses(role);
        if !is_used && !self.helpers_noted.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                worker = %worker.url,
                role = role.name(),
                "workers with this role are probed and shown, but get no requests: a prefill worker needs \
                 disaggregation.connector (--kv-connector), an encode worker the connector llm-d"
            );
        }
    }

    /// The worker with this id or URL: of several with one URL, the last one added.
    pub fn find(&self, name: &str) -> Option<Arc<Worker>> {
        let workers = self.fleet.workers();
        let by_id = name.parse().ok().and_then(|id| workers.get(&WorkerId(id)));
        let named = |worker: &&Arc<Worker>| *worker.url == *worker_name(name);
        by_id.or_else(|| workers.values().rev().find(named)).cloned()
    }

    /// All workers.
    pub fn workers(&self) -> Vec<Arc<Worker>> {
        self.fleet.workers().values().cloned().collect()
    }

    /// Stops or resumes placing requests at a worker.
    pub fn set_draining(&self, worker: &Worker, draining: bool) {
        let mut state = worker.state();
        if !state.leaving {
            self.drain(worker.id, &mut state, draining);
            tracing::info!(worker = %worker.url, draining, "worker drain state changed");
        }
    }

    /// Removes a worker once its last request has ended.
    pub fn remove(self: &Arc<Self>, worker: &Arc<Worker>) {
        self.remove_all(std::slice::from_ref(worker));
    }

    /// Removes workers once their last requests have ended. None of them gets another request from the moment on at
    /// which all are marked, before any of them is taken out of its pools.
    pub fn remove_all(self: &Arc<Self>, workers: &[Arc<Worker>]) {
        for worker in workers {
            let mut state = worker.state();
            state.leaving = true;
            self.drain(worker.id, &mut state, true);
        }
        // Workers that were waiting for them to replace them need not wait any longer.
        let ids: Vec<WorkerId> = workers.iter().map(|worker| worker.id).collect();
        self.settle_predecessors(&ids, true);
        for worker in workers {
            tracing::info!(worker = %worker.url, "removing worker after its requests in flight");
        }
        self.leave_if_empty(workers);
    }

    fn drain(&self, id: WorkerId, state: &mut State, draining: bool) {
        state.draining = draining;
        for (pool, endpoint) in self.endpoints_of(id) {
            pool.step(Input::Draining { endpoint: endpoint.id, draining });
        }
        self.fleet.endpoints_changed();
    }

    async fn let_go(self: Arc<Self>, drained: Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<Arc<Worker>>>>) {
        let mut drained = drained.lock().await;
        while let Some(worker) = tokio::select! {
            worker = drained.recv() => worker,
            () = self.tasks.stop.cancelled() => None,
        } {
            let mut workers = vec![worker];
            while let Ok(worker) = drained.try_recv() {
                workers.push(worker);
            }
            self.leave_if_empty(&workers);
        }
    }

    /// Lets those of the workers leave that are to leave and have no request in flight.
    fn leave_if_empty(&self, workers: &[Arc<Worker>]) {
        let turn = self.turn();
        let mut any = false;
        for worker in workers {
            {
                let mut state = worker.state();
                let busy = self.endpoints_of(worker.id).iter().any(|(pool, endpoint)| {
                    let in_flight = |scheduler: &kvlane_core::scheduler::Scheduler| {
                        scheduler
                            .pool()
                            .get(endpoint.id)
                            .map_or(0, |endpoint| endpoint.load.in_flight.requests)
                    };
                    pool.router.read(in_flight) > 0
                });
                if !state.leaving || busy {
                    continue;
                }
                state.healthy = false;
            }
            if self.fleet.workers().remove(&worker.id).is_none() {
                continue;
            }
            any = true;
            self.unregister(worker, &turn);
            if !self.is_there(&worker.url) {
                self.fleet.metrics.forget_worker(&worker.url);
            }
            for upstreams in self.fleet.upstreams().iter() {
                upstreams.forget(worker.upstream.id);
            }
            tracing::info!(worker = %worker.url, "worker removed");
        }
        if any {
            self.publish_names(&turn);
            parity_check::compare_members(&self.fleet, None);
            self.departures.send_replace(());
        }
    }

    /// Whether a worker with this URL exists.
    fn is_there(&self, url: &str) -> bool {
        self.fleet.workers().values().any(|worker| *worker.url == *url)
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The endpoints of a worker, each with its pool.
    pub fn endpoints_of(&self, worker: WorkerId) -> Vec<(Arc<ModelPool>, Arc<PoolEndpoint>)> {
        self.fleet.snapshot().endpoints_of(worker)
    }

    /// Probes one worker until it leaves or the gateway stops.
    async fn watch(self: Arc<Self>, worker: Arc<Worker>) {
        let mut reloads = self.fleet.reloads.watch();
        let (mut probed_at, mut due) = (None, Instant::now());
        let mut problem_log = ProblemLog::default();
        let mut probes = 0u32;
        // One check after each probe: some engines close idle connections and keep running.
        let mut asked = false;
        loop {
            tokio::select! {
                () = sleep_until(due) => {}
                () = self.upstreams.closed(worker.upstream.id), if !asked => {
                    asked = true;
                    if self.upstreams.is_there(&worker.upstream).await {
                        continue;
                    }
                }
                Ok(()) = reloads.changed() => {
                    // `models` may lead to others of a provider's models now.
                    if worker.provider.is_none() {
                        due = probed_at.map_or(due, |last| last + self.health().interval);
                        continue;
                    }
                }
                () = self.tasks.stop.cancelled() => return,
            }
            let now = Instant::now();
            let at_least = worker.provider.as_ref().map_or(Duration::ZERO, |_| PROVIDER_INTERVAL);
            (probed_at, due) = (Some(now), now + self.health().interval.max(at_least));
            asked = false;
            if !self.fleet.workers().contains_key(&worker.id) {
                // The last probe may have returned its connection to the pool after the worker had left.
                return self.upstreams.forget(worker.upstream.id);
            }
            let probed = match self.is_judged(worker.id) {
                true => self.probe(&worker, probes).await,
                false => self.in_turn(self.probe(&worker, probes)).await,
            };
            // A refused connection needs no second probe; a process that answers there later has been started since.
            let refuses = probed.is_err() && self.upstreams.refuses(&worker.upstream).await;
            probes = match &probed {
                Ok(()) => probes.wrapping_add(1),
                Err(_) => 0,
            };
            let failed = probed.is_err();
            self.judge(&worker, probed, refuses);
            problem_log.look(&worker, Instant::now());
            for upstreams in self.fleet.upstreams().iter() {
                upstreams.sweep(worker.upstream.id);
                if failed {
                    upstreams.renew(worker.upstream.id);
                }
            }
        }
    }

    /// Runs a first probe when it is its turn.
    async fn in_turn<T>(&self, probe: impl Future<Output = T>) -> T {
        let turn = self.first_probes.acquire().await;
        let mut probe = Box::pin(probe);
        match timeout(FIRST_PROBE_TURN, &mut probe).await {
            Ok(probed) => probed,
            Err(_) => {
                drop(turn);
                probe.await
            }
        }
    }

    /// Health, then models if they are not known or due, then load.
    async fn probe(&self, worker: &Arc<Worker>, probes: u32) -> Result<(), String> {
        if let Some(provider) = &worker.provider {
            let names = self.models_of_provider(worker, provider).await?;
            self.register(worker, names, vec![Rank { number: 0, source: None }], &self.turn());
            self.list_names().await;
            return Ok(());
        }
        let (page, reports) = match worker.upstream.address.protocol {
            Protocol::Http => (self.page(worker).await?, None),
            Protocol::Grpc => (Bytes::new(), Some(self.grpc_loads(worker).await?)),
        };
        let page = std::str::from_utf8(&page).unwrap_or_default();
        let started_s = prometheus::sum(page, "process_start_time_seconds");
        worker.note_start_time(started_s, || self.fleet.objects.take_started_before(&worker.url));
        let of_page = || load_reports(page).map(|(_, by_rank)| by_rank).unwrap_or_default();
        let reports = reports.unwrap_or_else(of_page);
        let is_missing = self.fleet.settings().disaggregation.uses(worker.spec.role)
            && self.endpoints_of(worker.id).is_empty();
        if is_missing || probes.is_multiple_of(PROBES_PER_MODEL_LIST) {
            let names = self.names(worker).await?;
            let ranks = self.ranks(worker, &reports).await;
            let compared = {
                let limit = self.health().timeout;
                parity_check::check(&self.fleet, &self.upstreams, worker, &names, page, limit).await
            };
            {
                let turn = self.turn();
                self.check_protocol(worker, &names, &turn)?;
                if !worker.state().leaving {
                    if compared {
                        parity_check::compare_members(&self.fleet, Some(worker.id));
                    }
                    self.register(worker, names, ranks, &turn);
                }
            }
            // Before it gets requests: they come under its names.
            self.list_names().await;
            self.restore_index(worker).await;
        }
        self.tell_page(worker, page, &reports);
        Ok(())
    }

    /// Restores the index of dispatches for the endpoints of this worker from the snapshot, before they get their
    /// first request.
    async fn restore_index(&self, worker: &Arc<Worker>) {
        if self.index_snapshot.is_empty() {
            return;
        }
        let (fleet, worker) = (Arc::clone(&self.fleet), Arc::clone(worker));
        let index_snapshot = Arc::clone(&self.index_snapshot);
        let told = tokio::task::spawn_blocking(move || {
            for (pool, endpoint) in fleet.snapshot().endpoints_of(worker.id) {
                let gone = worker.upstream.is_gone();
                index_snapshot.restore(&fleet, &pool, endpoint.id, &endpoint.name, gone);
            }
        });
        if told.await.is_err() {
            tracing::error!("index snapshot restore failed; starting with an empty index");
        }
    }

    /// Applies the result of a probe to the worker's health.
    fn judge(self: &Arc<Self>, worker: &Worker, probed: Result<(), String>, refuses: bool) {
        let thresholds = self.health().thresholds();
        match probed {
            Ok(()) => {
                let restarted = worker.upstream.take_gone();
                self.fleet.poison_prompts().settle(worker.engine_key(), restarted);
                let (healthy_now, first) = {
                    let mut state = worker.state();
                    if restarted {
                        state.absences = state.absences.wrapping_add(1);
                        for (pool, endpoint) in self.endpoints_of(worker.id) {
                            match &endpoint.feed {
                                Some(feed) => feed.start_over(),
                                None => pool.forget(endpoint.id),
                            }
                        }
                    }
                    let (healthy, first) = (state.healthy, state.problem.is_none());
                    (state.probes.note(&thresholds, healthy, Probe::Success) && !healthy, first)
                };
                if healthy_now {
                    set_health(&self.fleet, worker, None);
                    self.settle_predecessors(&[worker.id], true);
                }
                if healthy_now && !first {
                    // The events will show whether it restarted in the meantime.
                    for (_, endpoint) in self.endpoints_of(worker.id) {
                        if let Some(feed) = &endpoint.feed {
                            feed.look_again();
                        }
                    }
                }
            }
            Err(problem) => {
                if refuses {
                    self.fleet.poison_prompts().settle(worker.engine_key(), true);
                }
                let (unhealthy_now, first) = {
                    let mut state = worker.state();
                    let healthy = state.healthy;
                    let first = !healthy && state.problem.is_none();
                    if !healthy {
                        state.problem = Some(problem.clone());
                    }
                    let probe = if refuses { Probe::Refused } else { Probe::Failure };
                    let stays_healthy = state.probes.note(&thresholds, healthy, probe);
                    (healthy && !stays_healthy, first)
                };
                if unhealthy_now {
                    set_health(&self.fleet, worker, Some(problem));
                }
                if first {
                    self.settle_predecessors(&[worker.id], false);
                }
            }
        }
    }

    /// Spawns a task with a name. A task that panics is started again: a worker is probed until it has left.
    fn spawn<F>(&self, name: String, task: impl FnMut() -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.tasks.running.spawn_on(async move { persist(&name, task).await }, &self.tasks.runtime);
    }
}

/// Marks a worker healthy (`None`) or unhealthy, in every pool.
fn set_health(fleet: &Fleet, worker: &Worker, problem: Option<String>) {
    let healthy = problem.is_none();
    worker.set_unfit(!healthy);
    let mut state = worker.state();
    if state.healthy == healthy || state.leaving {
        return;
    }
    state.healthy = healthy;
    state.absences = state.absences.wrapping_add(u32::from(!healthy));
    for (pool, endpoint) in fleet.snapshot().endpoints_of(worker.id) {
        pool.step(Input::Health { endpoint: endpoint.id, healthy });
    }
    fleet.endpoints_changed();
    fleet
        .metrics
        .workers
        .worker_health
        .get_or_create(&WorkerLabel { worker: worker.url.to_string() })
        .set(healthy.into());
    if healthy {
        tracing::info!(worker = %worker.url, "worker healthy");
    }
    state.problem = problem;
}
