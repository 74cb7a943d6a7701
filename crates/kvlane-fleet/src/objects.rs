//! Origins of objects that a client can refer to later: stored responses, conversations, files, batches.
//!
//! Engines keep such objects themselves, most of them in memory, so a request that names one must reach the engine that made
//! it. An object is lost when its worker has left the fleet, or when its engine's process was found to have ended since the
//! object was last named: the port refused a connection, or the start time in its metrics is another one. An end that was not
//! noticed loses nothing here: then the engine itself answers that it does not know the object. Under `auth.isolate_tenants`
//! an object is found by the tenant that made it and by no other.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvlane_core::recent::Recent;
use kvlane_core::request::TenantKey;
use xxhash_rust::xxh3::xxh3_128;

use crate::worker::{Worker, WorkerId};

/// Most objects; beyond that the least recently used ones are dropped.
pub const OBJECTS_MAX: usize = 1 << 17;

/// The hash of an object's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ObjectKey(pub u128);

/// Whose object it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Maker {
    /// A tenant's, or that of clients without one.
    Client(Option<TenantKey>),
    /// Found at its worker, made by a client that is not known.
    Unknown,
}

/// Where an object is, and whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    /// The URL of its worker.
    pub url: Arc<str>,
    /// The worker when the object was last named; none of this process's if it was read from a snapshot.
    worker: Option<WorkerId>,
    /// The ends of that worker's process until then.
    ends: u64,
    /// Who made it.
    pub maker: Maker,
}

/// What has become of an object's engine.
#[derive(Debug)]
pub enum Keeper {
    /// It is there, and has been since, as far as is known.
    There(Arc<Worker>),
    /// Its worker is there, and its process has ended since.
    Restarted(Arc<Worker>),
    /// Its worker has left the fleet.
    Left,
}

/// The origins of recently used objects.
pub struct Objects {
    by_key: Mutex<Recent<ObjectKey, Origin>>,
    /// When processes had started, in seconds by the metrics of each URL, that were known before this gateway started.
    started_before: Mutex<BTreeMap<Arc<str>, f64>>,
}

// === impl ObjectKey ===

impl ObjectKey {
    /// The key of an id.
    pub fn of(id: &str) -> Self {
        Self(xxh3_128(id.as_bytes()))
    }
}

// === impl Origin ===

impl Origin {
    /// An object that this worker's engine has just named.
    pub fn new(worker: &Worker, maker: Maker) -> Self {
        Self { url: Arc::clone(&worker.url), worker: Some(worker.id), ends: worker.upstream.ends(), maker }
    }

    /// An object of which another process knew, and that is not known to be lost.
    pub fn told(url: Arc<str>, maker: Maker) -> Self {
        Self { url, worker: None, ends: 0, maker }
    }

    /// What has become of its engine, of these workers.
    pub fn keeper(&self, workers: &BTreeMap<WorkerId, Arc<Worker>>) -> Keeper {
        let same = self.worker.and_then(|id| workers.get(&id));
        // A worker that was registered anew is another one, of the same engine. Of several at one URL, the others are leaving.
        let worker = same.or_else(|| workers.values().rev().find(|worker| worker.url == self.url)).cloned();
        let Some(worker) = worker else { return Keeper::Left };
        let ends = if self.worker == Some(worker.id) { self.ends } else { 0 };
        if worker.upstream.ends() == ends { Keeper::There(worker) } else { Keeper::Restarted(worker) }
    }
}

// === impl Objects ===

impl Default for Objects {
    fn default() -> Self {
        Self { by_key: Mutex::new(Recent::new(OBJECTS_MAX)), started_before: Mutex::default() }
    }
}

impl Objects {
    /// Stores the origin of an object that an engine has named. While it is the same process's, its maker stays.
    pub fn note(&self, key: ObjectKey, mut origin: Origin) {
        let mut by_key = self.lock();
        if let Some(known) = by_key.get(&key)
            && (known.worker, known.ends) == (origin.worker, origin.ends)
        {
            origin.maker = known.maker;
        }
        by_key.insert(key, origin);
    }

    /// Stores the origin of an object of which another process knew, unless it is known here.
    pub fn hear(&self, key: ObjectKey, origin: Origin) {
        self.lock().get_or_insert(key, || origin);
    }

    /// The origin of the object with this id.
    pub fn origin(&self, id: &str) -> Option<Origin> {
        self.lock().get(&ObjectKey::of(id)).cloned()
    }

    /// All objects, in no particular order.
    pub fn all(&self) -> Vec<(ObjectKey, Origin)> {
        self.lock().iter().map(|(key, origin)| (*key, origin.clone())).collect()
    }

    /// Stores when the process at `url` had started before this gateway did.
    pub fn set_started_before(&self, url: Arc<str>, at_s: f64) {
        self.started_before.lock().unwrap_or_else(PoisonError::into_inner).insert(url, at_s);
    }

    /// Takes out when the process at `url` had started before this gateway did.
    pub fn take_started_before(&self, url: &str) -> Option<f64> {
        self.started_before.lock().unwrap_or_else(PoisonError::into_inner).remove(url)
    }

    fn lock(&self) -> MutexGuard<'_, Recent<ObjectKey, Origin>> {
        self.by_key.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::worker::Origin as NamedBy;
    use crate::worker::config::WorkerSpec;

    fn worker(workers: &mut BTreeMap<WorkerId, Arc<Worker>>, id: u64) -> Arc<Worker> {
        let spec = WorkerSpec::new("http://10.0.0.1:8000");
        let worker = Arc::new(Worker::new(WorkerId(id), &spec, NamedBy::Config, None).expect("a worker"));
        workers.insert(worker.id, Arc::clone(&worker));
        worker
    }

    const ANN: Maker = Maker::Client(Some(TenantKey(7)));

    #[test]
    fn an_object_is_lost_when_the_process_that_made_it_has_ended() {
        let mut workers = BTreeMap::new();
        let first = worker(&mut workers, 1);
        first.upstream.note_end();
        let origin = Origin::new(&first, ANN);
        assert!(matches!(origin.keeper(&workers), Keeper::There(_)), "it was made after that end");
        first.upstream.note_end();
        assert!(matches!(origin.keeper(&workers), Keeper::Restarted(_)));
        assert!(matches!(Origin::new(&first, ANN).keeper(&workers), Keeper::There(_)));
        let read = Origin::told(Arc::clone(&first.url), ANN);
        assert!(
            matches!(read.keeper(&workers), Keeper::Restarted(_)),
            "the process ended while this gateway ran"
        );
        workers.remove(&first.id);
        assert!(matches!(origin.keeper(&workers), Keeper::Left));
        let again = worker(&mut workers, 2);
        for known in [&origin, &read] {
            assert!(matches!(known.keeper(&workers), Keeper::There(_)), "the same engine, registered anew");
        }
        again.upstream.note_end();
        assert!(matches!(origin.keeper(&workers), Keeper::Restarted(_)));
    }

    #[test]
    fn an_object_keeps_its_maker_while_its_process_lives() {
        let mut workers = BTreeMap::new();
        let worker = worker(&mut workers, 1);
        let (objects, key) = (Objects::default(), ObjectKey::of("file-1"));
        let maker = || objects.origin("file-1").map(|origin| origin.maker);
        objects.note(key, Origin::new(&worker, ANN));
        let bob = Maker::Client(Some(TenantKey(8)));
        objects.note(key, Origin::new(&worker, bob));
        objects.hear(key, Origin::told("http://10.0.0.2".into(), bob));
        assert_eq!(maker(), Some(ANN), "he has read her file");
        worker.upstream.note_end();
        objects.note(key, Origin::new(&worker, bob));
        assert_eq!(maker(), Some(bob), "another process has made another file of the same name");
        assert_eq!((objects.origin("file-2"), objects.all().len()), (None, 1));
    }
}
