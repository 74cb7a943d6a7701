//! One engine as the gateway knows it: its address, what it serves, how it fares.

pub mod config;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;
use kvlane_core::health::Probes;
use kvlane_core::poison_prompts::EngineKey;
use kvlane_http::network::Allowed;
use kvlane_http::upstream::{Upstream, UpstreamId};
use tokio::sync::Notify;

use crate::feed::Source;
use crate::parity::{Compared, Parity};
use crate::worker::config::{FeedSpec, WorkerSpec};

/// Names a worker for as long as the gateway runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u64);

/// One engine. A worker that serves several models is an endpoint of several pools.
pub struct Worker {
    /// Its id.
    pub id: WorkerId,
    /// Its URL as given, without a trailing `/` or `/v1`: its name everywhere.
    pub url: Arc<str>,
    /// How it is reached.
    pub upstream: Arc<Upstream>,
    /// The model it was said to serve; otherwise it is asked.
    pub model: Option<String>,
    /// Where it was said to publish KV events, by rank; otherwise it is asked.
    pub kv_events: Vec<FeedSpec>,
    /// All that was said of it.
    pub spec: WorkerSpec,
    /// Its probes say that it is down.
    unfit: AtomicBool,
    found_unfit: Notify,
    state: Mutex<State>,
}

/// What changes about a worker.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// Whether requests are placed there.
    pub healthy: bool,
    /// It takes no new requests.
    pub draining: bool,
    /// It leaves when its last request is over.
    pub leaving: bool,
    /// Who is to serve in its place and does not yet: it leaves when they do.
    pub successors: Vec<WorkerId>,
    /// It also leaves when all of them have answered or failed a probe and others serve its pools.
    pub may_be_spared: bool,
    /// Its probes since its health last changed.
    pub probes: Probes,
    /// Its data-parallel ranks and where each publishes what its cache holds; empty before it was asked.
    pub ranks: Vec<Rank>,
    /// The names under which it serves them.
    pub names: Vec<ServedName>,
    /// What is wrong with it, if anything is.
    pub problem: Option<String>,
    /// How its count of tokens compares with ours.
    pub parity: Parity,
    /// What it said when that was last found out.
    pub compared: Option<Arc<Compared>>,
}

/// One data-parallel rank of an engine: a scheduler and a cache of its own, behind an address that it may share with
/// others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rank {
    /// Its number.
    pub number: u32,
    /// Where it publishes what its cache holds, if it does.
    pub source: Option<Source>,
}

/// One name that a worker serves a model under.
#[derive(Clone, Debug, PartialEq)]
pub struct ServedName {
    /// The name.
    pub name: String,
    /// The base model whose pool it belongs to.
    pub base: String,
    /// What the engine tells of it.
    pub card: serde_json::Value,
}

// === impl Worker ===

impl Worker {
    /// A worker that has not been probed yet. With `allowed`, it was added from outside the configuration, and its address
    /// must be in one of those networks.
    ///
    /// # Errors
    /// What is wrong with an address, for people.
    pub fn new(
        id: WorkerId,
        spec: &WorkerSpec,
        allowed: Option<Arc<ArcSwap<Allowed>>>,
    ) -> Result<Self, String> {
        for feed in &spec.kv_events {
            feed.validate("kv_events").map_err(|error| error.to_string())?;
        }
        let upstream = Upstream::new(UpstreamId(id.0), &spec.url, spec.api_key.as_ref(), allowed)?;
        Ok(Self {
            id,
            url: Arc::clone(&upstream.url),
            upstream: Arc::new(upstream),
            model: spec.model.clone(),
            kv_events: spec.kv_events.clone(),
            spec: spec.clone(),
            unfit: AtomicBool::new(false),
            found_unfit: Notify::new(),
            state: Mutex::default(),
        })
    }

    /// Whether the configuration named it.
    pub fn is_configured(&self) -> bool {
        self.upstream.allowed().is_none()
    }

    /// The name of an endpoint of this worker: its URL, with `#rank` if the worker has several ranks.
    pub fn endpoint_name(&self, rank: Option<u32>) -> Arc<str> {
        rank.map_or_else(|| Arc::clone(&self.url), |rank| format!("{}#{rank}", self.url).into())
    }

    /// What its engine is called when it dies.
    pub fn engine_key(&self) -> EngineKey {
        EngineKey(self.id.0)
    }

    /// What changes, under its lock: keep it short.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What its probes find. Wakes those who wait for its answers, if it is down.
    pub fn set_unfit(&self, unfit: bool) {
        self.unfit.store(unfit, Ordering::Release);
        if unfit {
            self.found_unfit.notify_waiters();
        }
    }

    /// Whether it is down: its probes say so, or it has refused a connection since it was last up.
    pub fn is_down(&self) -> bool {
        self.unfit.load(Ordering::Acquire) || self.upstream.is_gone()
    }

    /// Waits until its probes find that it is down.
    pub async fn unfit(&self) {
        let mut told = std::pin::pin!(self.found_unfit.notified());
        // From here on nothing is missed.
        told.as_mut().enable();
        if !self.unfit.load(Ordering::Acquire) {
            told.await;
        }
    }

    /// How its count of tokens compares with ours.
    pub fn parity(&self) -> Parity {
        self.state().parity.clone()
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("id", &self.id).field("url", &self.url).finish_non_exhaustive()
    }
}
