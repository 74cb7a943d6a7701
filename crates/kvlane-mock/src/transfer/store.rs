//! First legs of a prefill engine whose blocks wait for a second leg, and the endpoints that second legs ask.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::Instant;

/// Entries kept; beyond it a first leg's blocks are freed at its end.
const ENTRIES_MAX: usize = 1 << 16;

/// Paths of the endpoints.
pub(crate) const CLAIM: &str = "/kv_transfer/claim";
pub(crate) const RELEASE: &str = "/kv_transfer/release";

/// The store of one API: of all its data-parallel ranks.
pub(crate) struct Store {
    entries: Mutex<HashMap<String, Held>>,
    /// Grows with each change of the entries.
    changes: watch::Sender<u64>,
    engine_ids: Vec<String>,
    lease: Duration,
    counts: Mutex<StoreCounts>,
}

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StoreCounts {
    /// First legs whose lease ended.
    pub(crate) expired: u64,
    /// Second legs that came after it.
    pub(crate) late: u64,
}

/// A first leg that has ended.
pub(crate) struct Entry {
    /// Identifies its prompt.
    pub(crate) prompt: u64,
    /// Frees the blocks.
    pub(crate) release: Box<dyn FnOnce() + Send>,
}

/// Held entries, with the end of their lease.
struct Held {
    entry: Entry,
    /// `None` once a second leg has asked.
    until: Option<Instant>,
}

/// A second leg's question.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Claiming {
    pub(crate) engine_id: Option<String>,
    pub(crate) key: String,
    /// Identifies the prompt of the second leg.
    pub(crate) prompt: u64,
    pub(crate) waits: bool,
}

/// Whether the blocks are those of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Claimed {
    pub(crate) right: bool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// === impl Store ===

impl Store {
    /// For engines with these ids, with a lease in real time.
    pub(crate) fn new(engine_ids: Vec<String>, lease: Duration) -> Arc<Self> {
        let (entries, counts, changes) = Default::default();
        Arc::new(Self { entries, changes, engine_ids, lease, counts })
    }

    /// The id of a rank's engine.
    pub(crate) fn engine_id(&self, rank: usize) -> &str {
        &self.engine_ids[rank]
    }

    pub(crate) fn counts(&self) -> StoreCounts {
        *lock(&self.counts)
    }

    /// Enters a first leg. An earlier one of the same key is released.
    pub(crate) fn enter(&self, key: String, entry: Entry) {
        let held = Held { entry, until: Some(Instant::now() + self.lease) };
        let before = {
            let mut entries = lock(&self.entries);
            if entries.len() >= ENTRIES_MAX { Some(held) } else { entries.insert(key, held) }
        };
        if let Some(before) = before {
            (before.entry.release)();
        }
        self.changes.send_modify(|changes| *changes += 1);
    }

    /// Frees the blocks of a first leg.
    pub(crate) fn release(&self, key: &str) {
        let held = lock(&self.entries).remove(key);
        if let Some(held) = held {
            (held.entry.release)();
        }
    }

    /// Releases first legs whose lease has ended, as long as it is polled.
    pub(crate) async fn expire(&self) {
        let mut changes = self.changes.subscribe();
        loop {
            changes.borrow_and_update();
            let next = self.sweep(Instant::now());
            tokio::select! {
                _ = changes.changed() => {}
                () = async {
                    match next {
                        Some(at) => tokio::time::sleep_until(at).await,
                        None => std::future::pending().await,
                    }
                } => {}
            }
        }
    }

    /// Releases what has expired; returns the end of the next lease.
    fn sweep(&self, now: Instant) -> Option<Instant> {
        let (gone, next) = {
            let mut entries = lock(&self.entries);
            let gone: Vec<Held> = entries
                .extract_if(|_, held| held.until.is_some_and(|until| until <= now))
                .map(|(_, held)| held)
                .collect();
            (gone, entries.values().filter_map(|held| held.until).min())
        };
        lock(&self.counts).expired += gone.len() as u64;
        for held in gone {
            (held.entry.release)();
        }
        next
    }

    /// Whether a second leg asks an engine of this store.
    fn is_meant(&self, claiming: &Claiming) -> bool {
        claiming.engine_id.as_ref().is_none_or(|id| self.engine_ids.contains(id))
    }

    /// A second leg asks. `None` if no engine here has this id.
    async fn claim(&self, claiming: &Claiming) -> Option<Claimed> {
        if !self.is_meant(claiming) {
            return None;
        }
        let mut changes = self.changes.subscribe();
        loop {
            changes.borrow_and_update();
            self.sweep(Instant::now());
            if let Some(held) = lock(&self.entries).get_mut(&claiming.key) {
                held.until = None;
                return Some(Claimed { right: held.entry.prompt == claiming.prompt });
            }
            if !claiming.waits {
                lock(&self.counts).late += 1;
                return Some(Claimed { right: false });
            }
            if changes.changed().await.is_err() {
                return None;
            }
        }
    }
}

/// The endpoints, and Mooncake's `/query`.
pub(crate) fn router(store: Arc<Store>) -> Router {
    let claim = async |State(store): State<Arc<Store>>, Json(claiming): Json<Claiming>| {
        store.claim(&claiming).await.map(Json).ok_or(StatusCode::NOT_FOUND)
    };
    let release = async |State(store): State<Arc<Store>>, Json(claiming): Json<Claiming>| {
        if store.is_meant(&claiming) {
            store.release(&claiming.key);
        }
        StatusCode::NO_CONTENT
    };
    let query = async |State(store): State<Arc<Store>>| {
        let ranks = store.engine_ids.iter().enumerate();
        let ranks = ranks.map(|(rank, id)| (rank.to_string(), json!({"engine_id": id, "worker_addr": {}})));
        Json(Value::Object(ranks.collect()))
    };
    Router::new()
        .route(CLAIM, post(claim))
        .route(RELEASE, post(release))
        .route(kvlane_wire::disaggregation::ENGINES_PATH, get(query))
        .with_state(store)
}
