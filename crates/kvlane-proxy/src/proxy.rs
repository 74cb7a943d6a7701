//! What the relay threads share: settings, identities, limits, memory, traces.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::{ArcSwap, Guard};
use kvlane_core::poison_prompts::{PromptKey, Standing};
use kvlane_core::request::RequestId;
use kvlane_fleet::Fleet;
use kvlane_http::tls::Tls;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::attributes::AttributeReader;
use crate::auth::Auth;
use crate::failures::Failures;
use crate::limits::Limits;
use crate::memory::Memory;
use crate::mirror::Copies;
use crate::objectives::Objectives;
use crate::outcomes::Outcomes;
use crate::salt::SaltKey;
use crate::settings::Settings;
use crate::traces::Traces;

/// What the relay threads share.
pub struct Proxy {
    /// The fleet that requests are placed in.
    pub fleet: Arc<Fleet>,
    settings: ArcSwap<Settings>,
    auth: ArcSwap<Auth>,
    tls: ArcSwap<Tls>,
    /// Reads the attributes of requests.
    pub attribute_reader: ArcSwap<AttributeReader>,
    /// What each client may use.
    pub limits: Arc<Limits>,
    /// The latency objectives of requests.
    pub(crate) objectives: Objectives,
    /// The memory that the requests of all clients hold.
    pub memory: Arc<Memory>,
    /// Spans for a collector.
    pub traces: Traces,
    /// How requests have ended.
    pub outcomes: Outcomes,
    /// Copies of requests for other models.
    pub(crate) copies: Copies,
    /// The last requests that failed.
    pub failures: Failures,
    /// Held by the one request that is tried although its prompt may kill an engine.
    trial: Semaphore,
    next_request: AtomicU64,
}

// === impl Proxy ===

impl Proxy {
    /// A proxy that serves no request yet.
    pub fn new(fleet: Arc<Fleet>, settings: Settings, auth: Auth, tls: Tls) -> Self {
        let salts = SaltKey::read(&settings.auth).ok().flatten().unwrap_or_else(SaltKey::generate);
        let named = Arc::clone(&fleet.discovery.objectives);
        let reader = AttributeReader::new(&settings.attributes, salts).with_objectives(named);
        let limits = Arc::new(Limits::default());
        limits.configure(&settings.limits, &reader);
        let objectives = Objectives::default();
        objectives.configure(&settings.objectives, &settings.attributes.priorities, &reader);
        Self {
            fleet,
            objectives,
            auth: ArcSwap::from_pointee(auth),
            tls: ArcSwap::from_pointee(tls),
            attribute_reader: ArcSwap::from_pointee(reader),
            limits,
            memory: Memory::new(settings.server.body_memory),
            traces: Traces::new(&settings.tracing),
            outcomes: Outcomes::default(),
            copies: Copies::default(),
            failures: Failures::default(),
            trial: Semaphore::new(1),
            next_request: AtomicU64::new(1),
            settings: ArcSwap::from_pointee(settings),
        }
    }

    /// Makes the keys of tenants the same at all replicas of this cluster, before there are requests: they are hashed with
    /// `auth.tenant_salt_key` or, without one, with the cluster's name.
    pub fn share_tenants(&self, cluster: &str) {
        let settings = self.settings();
        let key = SaltKey::read(&settings.auth).ok().flatten().unwrap_or_else(|| SaltKey::of(cluster));
        let reader = self.attribute_reader.load().with_tenant_key(&key);
        self.limits.configure(&settings.limits, &reader);
        self.objectives.configure(&settings.objectives, &settings.attributes.priorities, &reader);
        self.attribute_reader.store(Arc::new(reader));
    }

    /// The settings. Hold the guard for a moment only.
    pub fn settings(&self) -> Guard<Arc<Settings>> {
        self.settings.load()
    }

    /// Replaces the settings.
    pub fn set_settings(&self, settings: Settings) {
        for gone in &self.settings().limits {
            if !settings.limits.iter().any(|spec| spec.subject() == gone.subject()) {
                self.fleet.metrics.limits.forget(&gone.key, &gone.model);
            }
        }
        // The key was read when the configuration was checked. If reading it fails now, the previous one stays.
        let salts = SaltKey::read(&settings.auth).ok().flatten();
        let reader = self.attribute_reader.load().reset(&settings.attributes, salts);
        self.limits.configure(&settings.limits, &reader);
        self.objectives.configure(&settings.objectives, &settings.attributes.priorities, &reader);
        self.attribute_reader.store(Arc::new(reader));
        self.memory.set_most(settings.server.body_memory);
        self.settings.store(Arc::new(settings));
    }

    /// API keys and roles.
    pub fn auth(&self) -> Guard<Arc<Auth>> {
        self.auth.load()
    }

    /// The TLS configurations of both ports.
    pub fn tls(&self) -> Guard<Arc<Tls>> {
        self.tls.load()
    }

    /// Replaces keys and certificates. Requests that were admitted go on, and open connections keep their certificates.
    pub fn set_security(&self, auth: Auth, tls: Tls) {
        auth.inherit(&self.auth.load());
        self.auth.store(Arc::new(auth));
        self.tls.store(Arc::new(tls));
    }

    /// Keeps the keys of signed tokens up to date, through all reloads.
    pub async fn refresh_keys(&self) {
        let mut reloads = self.fleet.reloads.watch();
        loop {
            let auth = Arc::clone(&self.auth());
            tokio::select! {
                () = auth.refresh_keys() => {}
                changed = reloads.changed() => if changed.is_err() { return },
            }
        }
    }

    /// How a request with this prompt may be placed, after the engine deaths that it may have caused.
    pub fn standing(&self, prompt: PromptKey) -> Standing {
        self.fleet.poison_prompts().standing(self.fleet.clock.now(), prompt)
    }

    /// Waits until no other request is tried that may kill its engine. The semaphore is never closed.
    pub async fn trial(&self) -> Option<SemaphorePermit<'_>> {
        self.trial.acquire().await.ok()
    }

    /// An id that no request has had.
    pub fn next_request_id(&self) -> RequestId {
        RequestId(self.next_request.fetch_add(1, Ordering::Relaxed))
    }
}
