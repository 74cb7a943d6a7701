//! What proxy, control and admin share.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::{ArcSwap, Guard};
use kvlane_core::config::ConfigError;
use kvlane_core::poison_prompts::PoisonPrompts;
use kvlane_core::router::{self, Router};
use kvlane_http::connections::Connections;
use kvlane_http::tls::ToWorkers;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::catalogue::{Entries, ModelSpec};
use crate::clock::Clock;
use crate::discovery::Discovery;
use crate::empty_pools::EmptyPools;
use crate::metrics::Metrics;
use crate::objects::Objects;
use crate::pool::ModelPool;
use crate::readiness::Start;
use crate::recording_writer::RecordingWriter;
use crate::recording_writer::config::Recorder;
use crate::reloads::Reloads;
use crate::replicas::Replicas;
use crate::settings::Settings;
use crate::snapshot::Snapshot;
use crate::tokenize::{Places, Tokenizers};
use crate::worker::{Worker, WorkerId};

/// The fleet and what all threads of a gateway share.
pub struct Fleet {
    /// The gateway's time.
    pub clock: Clock,
    /// Its metrics.
    pub metrics: Metrics,
    /// Tokenizers by model.
    pub tokenizers: Tokenizers,
    /// Writes the inputs of schedulers to files.
    pub recordings: RecordingWriter,
    /// Workers that others name while the gateway runs.
    pub discovery: Discovery,
    /// Models without an endpoint, and the requests that wait for one.
    pub empty_pools: EmptyPools,
    /// The result of the last configuration reload.
    pub reloads: Reloads,
    /// The other replicas of the gateway.
    pub replicas: Replicas,
    /// The origins of stored responses, files and batches.
    pub objects: Objects,
    /// The gateway ends soon; its clients should leave.
    pub stopping: AtomicBool,
    /// Its start, which readiness waits for.
    pub start: Start,
    settings: ArcSwap<Settings>,
    /// The entries of `models` in the settings, by origin.
    entries: Mutex<Entries>,
    /// The TLS configuration for connections to workers.
    tls: ArcSwap<ToWorkers>,
    snapshot: ArcSwap<Snapshot>,
    workers: Mutex<BTreeMap<WorkerId, Arc<Worker>>>,
    next_worker: AtomicU64,
    /// The connections of each relay thread, and of control.
    upstreams: Mutex<Vec<Arc<Connections>>>,
    poison_prompts: Mutex<PoisonPrompts>,
    /// The runtimes of all threads, to count their tasks.
    runtimes: Mutex<Vec<Handle>>,
    /// Receives the worker of a draining endpoint whose last request has ended.
    drained: mpsc::UnboundedSender<Arc<Worker>>,
}

// === impl Fleet ===

impl Fleet {
    /// A fleet without workers. The worker of a draining endpoint is sent to `drained` when its last request ends.
    pub fn new(
        settings: Settings,
        tls: Arc<ToWorkers>,
        clock: Clock,
        tokenizers: Tokenizers,
        drained: mpsc::UnboundedSender<Arc<Worker>>,
    ) -> Self {
        Self {
            clock,
            metrics: Metrics::new(),
            tokenizers,
            recordings: RecordingWriter::default(),
            discovery: Discovery::default(),
            empty_pools: EmptyPools::default(),
            reloads: Reloads::default(),
            replicas: Replicas::default(),
            objects: Objects::default(),
            stopping: AtomicBool::new(false),
            start: Start::default(),
            entries: Mutex::new(Entries::new(settings.models.clone())),
            settings: ArcSwap::from_pointee(settings),
            tls: ArcSwap::new(tls),
            snapshot: ArcSwap::default(),
            workers: Mutex::default(),
            next_worker: AtomicU64::new(1),
            upstreams: Mutex::default(),
            poison_prompts: Mutex::default(),
            runtimes: Mutex::default(),
            drained,
        }
    }

    /// The settings. Hold the guard for a moment only.
    pub fn settings(&self) -> Guard<Arc<Settings>> {
        self.settings.load()
    }

    /// Replaces the settings. Pools keep theirs until they are configured, and entries of the catalogue that were set stay.
    pub fn set_settings(&self, mut settings: Settings) {
        for upstreams in self.upstreams().iter() {
            upstreams.configure(settings.upstream.clone());
        }
        let mut entries = self.entries();
        settings.models = entries.configure(settings.models);
        self.settings.store(Arc::new(settings));
    }

    /// The entries of the catalogue by their origin.
    pub fn entries(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets an entry of the catalogue, which then precedes that of the configuration.
    ///
    /// # Errors
    /// The entry is wrong, or does not go with another one.
    pub fn set_model(&self, name: &str, spec: ModelSpec) -> Result<(), ConfigError> {
        let mut entries = self.entries();
        let models = entries.set(name, spec)?;
        self.replace_models(models);
        Ok(())
    }

    /// Removes an entry of the catalogue that was set; returns whether there was one.
    pub fn unset_model(&self, name: &str) -> bool {
        let mut entries = self.entries();
        let models = entries.unset(name);
        models.map(|models| self.replace_models(models)).is_some()
    }

    /// Replaces the entries of the catalogue that discovery finds; returns what is wrong with those that were left out.
    pub fn find_models(&self, found: BTreeMap<String, ModelSpec>) -> Vec<String> {
        let mut entries = self.entries();
        let (models, problems) = entries.find(found);
        self.replace_models(models);
        problems
    }

    fn replace_models(&self, models: BTreeMap<String, ModelSpec>) {
        let settings = Settings { models, ..Settings::clone(&self.settings()) };
        self.settings.store(Arc::new(settings));
    }

    /// Replaces the TLS configuration for new connections to workers.
    pub fn set_tls(&self, tls: Arc<ToWorkers>) {
        for upstreams in self.upstreams().iter() {
            upstreams.set_tls(Arc::clone(&tls));
        }
        self.tls.store(tls);
    }

    /// Starts, changes or stops recording.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn record(&self, recorder: &Recorder) -> std::io::Result<()> {
        self.recordings.configure(recorder, &self.metrics.recorder, self.clock.now(), &self.pools())
    }

    /// A pool for `model` without endpoints.
    pub fn new_pool(&self, model: &str) -> ModelPool {
        let router = Router::new(self.router_config(model));
        self.recordings.attach(&router, model);
        let own = self.replicas.own();
        own.into_iter().for_each(|own| router.share(own));
        let (counting, metrics) = (self.tokenizers.counting(model), self.metrics.pool(model));
        let pool = ModelPool::new(model, router, counting, metrics, self.clock, self.drained.clone());
        if own.is_some() { pool.announcing(Arc::clone(&self.replicas.placed)) } else { pool }
    }

    /// The configuration of the router of `model`'s pool.
    pub fn router_config(&self, model: &str) -> router::Config {
        self.settings().router(model)
    }

    /// All pools.
    pub fn pools(&self) -> Vec<Arc<ModelPool>> {
        self.snapshot.load().pools.clone()
    }

    /// Pools, names and endpoints now. Hold the guard for a moment only.
    pub fn snapshot(&self) -> Guard<Arc<Snapshot>> {
        self.snapshot.load()
    }

    /// Publishes a changed copy of the snapshot. Only control calls this, under its lock.
    pub fn change_snapshot(&self, change: impl FnOnce(&mut Snapshot)) {
        let mut snapshot = Snapshot::clone(&self.snapshot.load());
        change(&mut snapshot);
        self.snapshot.store(Arc::new(snapshot));
        self.endpoints_changed();
    }

    /// All workers, by id.
    pub fn workers(&self) -> MutexGuard<'_, BTreeMap<WorkerId, Arc<Worker>>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An id that no worker has had.
    pub fn next_worker_id(&self) -> WorkerId {
        WorkerId(self.next_worker.fetch_add(1, Ordering::Relaxed))
    }

    /// The prompts under which engines have died.
    pub fn poison_prompts(&self) -> MutexGuard<'_, PoisonPrompts> {
        self.poison_prompts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connections to workers for one more thread.
    pub fn new_upstreams(&self) -> Arc<Connections> {
        let upstreams = Connections::new(self.settings().upstream.clone(), self.tls.load_full());
        self.upstreams().push(Arc::clone(&upstreams));
        upstreams
    }

    /// The connections of all threads.
    pub fn upstreams(&self) -> MutexGuard<'_, Vec<Arc<Connections>>> {
        self.upstreams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The runtimes of all threads.
    pub fn runtimes(&self) -> MutexGuard<'_, Vec<Handle>> {
        self.runtimes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides how the pool of `model` counts tokens, which may load a tokenizer: on a thread of its own.
    pub async fn settle_counting(self: &Arc<Self>, model: &str, places: Places) {
        if self.tokenizers.is_settled(model) {
            return;
        }
        let (fleet, model) = (Arc::clone(self), model.to_owned());
        let settled = tokio::task::spawn_blocking(move || {
            let settings = fleet.settings();
            let pools = &settings.routing.pools;
            fleet.tokenizers.settle(&settings.tokens, pools, &model, &places);
        });
        if settled.await.is_err() {
            tracing::error!("loading a tokenizer panicked; tokens are estimated");
        }
    }
}
