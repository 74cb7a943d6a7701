//! A worker: one engine as the gateway manages it, with its address, models and state.

pub mod config;
pub mod kv_sources;
pub mod provider;

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
use crate::worker::kv_sources::KvSources;
use crate::worker::provider::Provider;

/// Identifies a worker for as long as the gateway runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u64);

/// Who named a worker, and so who changes and removes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The configuration.
    Config,
    /// An operator, through the admin API.
    Admin,
    /// A source of discovery.
    Found {
        /// The source's name.
        source: &'static str,
        /// Identifies the engine behind the URL.
        key: String,
    },
}

/// One engine. A worker that serves several models is an endpoint of several pools.
pub struct Worker {
    /// Its id.
    pub id: WorkerId,
    /// Its URL as given, without a trailing `/` or `/v1`: its name everywhere.
    pub url: Arc<str>,
    /// Its address and connection settings.
    pub upstream: Arc<Upstream>,
    /// Its configured model; otherwise its model list is read.
    pub model: Option<String>,
    /// Its configured KV event feeds, by rank; otherwise the engine is queried.
    pub kv_events: Vec<FeedSpec>,
    /// Its whole configuration.
    pub spec: WorkerSpec,
    /// Who named it.
    pub origin: Origin,
    /// The service outside the fleet that it is, if it is one.
    pub provider: Option<Arc<Provider>>,
    /// Where decode engines find its KV blocks.
    pub kv_sources: KvSources,
    /// Whether its probes find that it is down.
    unfit: AtomicBool,
    found_unfit: Notify,
    state: Mutex<State>,
}

/// The changing state of a worker.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// Whether requests are placed there.
    pub healthy: bool,
    /// It takes no new requests.
    pub draining: bool,
    /// It leaves when its last request has ended.
    pub leaving: bool,
    /// The workers that will replace it and do not serve yet: it leaves when they do.
    pub successors: Vec<WorkerId>,
    /// It also leaves when all of them have answered or failed a probe and other workers serve its pools.
    pub may_be_spared: bool,
    /// Its probes since its health last changed.
    pub probes: Probes,
    /// Times it was unhealthy or its process has changed.
    pub absences: u32,
    /// When its process started, by its own metrics, and the ends of its process that were known then.
    pub started: Option<Started>,
    /// Start times of several processes were seen in turn.
    pub has_several_processes: bool,
    /// Its data-parallel ranks and their KV event feeds; empty before it was queried.
    pub ranks: Vec<Rank>,
    /// The names of its models.
    pub names: Arc<[ServedName]>,
    /// Who else names its URL, though the worker is not theirs: sources of discovery, or `config`.
    pub also_named_by: Vec<&'static str>,
    /// Its problem, if any.
    pub problem: Option<String>,
    /// The comparison of its token ids with the gateway's.
    pub parity: Parity,
    /// Its answers at the last comparison.
    pub compared: Option<Arc<Compared>>,
}

/// The start of an engine's process.
#[derive(Clone, Copy, Debug)]
pub struct Started {
    /// When, in seconds, by its own clock.
    pub at_s: f64,
    /// The ends of its process that were known when this was read.
    pub ends: u64,
}

/// One data-parallel rank of an engine: a scheduler and a cache of its own, at an address that it may share with
/// other ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rank {
    /// Its number.
    pub number: u32,
    /// The address of its KV event feed, if it has one.
    pub source: Option<Source>,
}

/// A name under which a worker serves a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ServedName {
    /// The name.
    pub name: String,
    /// The base model whose pool it belongs to.
    pub base: String,
    /// The engine's model card.
    pub card: serde_json::Value,
}

// === impl Origin ===

impl Origin {
    /// Its name in the admin API: `config`, `admin`, or that of the source.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Admin => "admin",
            Self::Found { source, .. } => source,
        }
    }
}

// === impl Worker ===

impl Worker {
    /// A worker that has not been probed yet. With `allowed`, its address must be in one of those networks.
    ///
    /// # Errors
    /// What is wrong with an address.
    pub fn new(
        id: WorkerId,
        spec: &WorkerSpec,
        origin: Origin,
        allowed: Option<Arc<ArcSwap<Allowed>>>,
    ) -> Result<Self, String> {
        for feed in &spec.kv_events {
            feed.validate("kv_events").map_err(|error| error.to_string())?;
        }
        spec.validate_provider("provider").map_err(|error| error.to_string())?;
        let upstream = Upstream::new(UpstreamId(id.0), &spec.url, spec.api_key.as_ref(), allowed)?;
        let upstream = upstream.with_tls_server_name(spec.tls_server_name.as_deref())?;
        Ok(Self {
            id,
            url: Arc::clone(&upstream.url),
            upstream: Arc::new(upstream),
            model: spec.model.clone(),
            kv_events: spec.kv_events.clone(),
            provider: spec.provider.as_ref().map(|provider| Arc::new(Provider::new(provider))),
            spec: spec.clone(),
            origin,
            kv_sources: KvSources::default(),
            unfit: AtomicBool::new(false),
            found_unfit: Notify::new(),
            state: Mutex::default(),
        })
    }

    /// Whether it is from the configuration.
    pub fn is_configured(&self) -> bool {
        self.origin == Origin::Config
    }

    /// Whether a source of discovery named it.
    pub fn is_found(&self) -> bool {
        matches!(self.origin, Origin::Found { .. })
    }

    /// The name of an endpoint of this worker: its URL, with `#rank` if the worker has several ranks.
    pub fn endpoint_name(&self, rank: Option<u32>) -> Arc<str> {
        rank.map_or_else(|| Arc::clone(&self.url), |rank| format!("{}#{rank}", self.url).into())
    }

    /// Identifies its engine process for counting deaths.
    pub fn engine_key(&self) -> EngineKey {
        EngineKey(self.id.0)
    }

    /// The changing state, under its lock: hold it only briefly.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the result of its probes. Wakes requests that wait for its responses, if it is down.
    pub fn set_unfit(&self, unfit: bool) {
        self.unfit.store(unfit, Ordering::Release);
        if unfit {
            self.found_unfit.notify_waiters();
        }
    }

    /// Whether it is down: its probes fail, or it has refused a connection since it was last up.
    pub fn is_down(&self) -> bool {
        self.unfit.load(Ordering::Acquire) || self.upstream.is_gone()
    }

    /// Its problem, if it is down and may serve `model`: it has listed that model, or none so far. With an empty name, any
    /// model.
    pub fn problem_with(&self, model: &str) -> Option<String> {
        let state = self.state();
        let known = self.model.as_deref().into_iter().chain(state.names.iter().map(|served| &*served.name));
        let may_serve =
            model.is_empty() || known.clone().next().is_none() || known.into_iter().any(|name| name == model);
        state.problem.clone().filter(|_| !state.healthy && may_serve)
    }

    /// Waits until its probes find that it is down.
    pub async fn unfit(&self) {
        let mut told = std::pin::pin!(self.found_unfit.notified());
        // From here on no change is missed.
        told.as_mut().enable();
        if !self.unfit.load(Ordering::Acquire) {
            told.await;
        }
    }

    /// Compares the start time in its metrics with the one before: a later one is another process. If a connection was refused
    /// in between, that end has been counted. Where an earlier one comes back, several processes answer, and none has ended.
    /// `before` gives the start time that was known before this gateway started.
    pub fn note_start_time(&self, started_s: Option<f64>, before: impl FnOnce() -> Option<f64>) {
        let Some(at_s) = started_s else { return };
        let mut state = self.state();
        let known = state.started.replace(Started { at_s, ends: self.upstream.ends() });
        let Some(before) = known.or_else(|| Some(Started { at_s: before()?, ends: 0 })) else { return };
        state.has_several_processes |= at_s < before.at_s;
        if at_s > before.at_s && before.ends == self.upstream.ends() && !state.has_several_processes {
            self.upstream.note_end();
            state.started = Some(Started { at_s, ends: self.upstream.ends() });
        }
    }

    /// The comparison of its token ids with the gateway's.
    pub fn parity(&self) -> Parity {
        self.state().parity.clone()
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("id", &self.id).field("url", &self.url).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_start_time_is_another_process() {
        let spec = WorkerSpec::new("http://10.0.0.1:8000");
        let worker = Worker::new(WorkerId(1), &spec, Origin::Config, None).expect("a worker");
        let ends = |started_s| {
            worker.note_start_time(started_s, || None);
            worker.upstream.ends()
        };
        assert_eq!([Some(100.0), None, Some(100.0), Some(200.0), Some(200.0)].map(ends), [0, 0, 0, 1, 1]);
        worker.upstream.note_end();
        assert_eq!(ends(Some(300.0)), 2, "its connections were refused in between");
        assert_eq!([200.0, 300.0, 200.0, 400.0].map(|at_s| ends(Some(at_s))), [2; 4], "several processes");
    }

    #[test]
    fn a_process_that_started_while_no_gateway_ran_is_another_one() {
        for (before_s, ends) in [(100.0, 1), (200.0, 0)] {
            let spec = WorkerSpec::new("http://10.0.0.1:8000");
            let worker = Worker::new(WorkerId(1), &spec, Origin::Config, None).expect("a worker");
            worker.note_start_time(Some(200.0), || Some(before_s));
            assert_eq!(worker.upstream.ends(), ends);
        }
    }
}
