//! Models without an endpoint: which of them are expected to get one, and the requests that wait for it.
//!
//! A request that waits is woken by the change of the fleet that makes an endpoint of its model take requests, and by
//! no other.

use std::collections::{BTreeMap, HashMap};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;

use crate::Fleet;
use crate::metrics::OTHER_NAMES;
use crate::snapshot::Snapshot;

/// Most names of models that are remembered after their last endpoint has left.
const SERVED_NAMES_MAX: usize = 4096;

/// The names that have been served, and the requests that wait for an endpoint.
#[derive(Default)]
pub struct EmptyPools {
    state: Mutex<State>,
    /// Woken by the first request that waits for a model.
    begun: Notify,
    /// Woken by the first request that waits for a name, and by each change of the fleet.
    moved: Notify,
}

#[derive(Default)]
struct State {
    /// The pool's model of each name that has been served.
    served: BTreeMap<Arc<str>, Arc<str>>,
    /// Requests that wait, by the name that they ask for.
    rooms: HashMap<Arc<str>, Room>,
    /// Requests that wait, by their label in metrics.
    waiting: BTreeMap<Arc<str>, u32>,
    /// The gateway ends: no request waits any longer.
    closed: bool,
}

/// The requests that wait for one name.
struct Room {
    requests: u32,
    served: Arc<Notify>,
}

/// Why a request may not wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRoom {
    /// As many requests wait for this model as may.
    Full,
    /// The gateway ends.
    Closed,
}

/// A request that waits for an endpoint. Dropping it ends that.
pub struct Waits<'a> {
    pools: &'a EmptyPools,
    name: Arc<str>,
    label: Arc<str>,
    served: Pin<Box<OwnedNotified>>,
}

// === impl EmptyPools ===

impl EmptyPools {
    /// Whether this name has been served.
    pub fn has_served(&self, name: &str) -> bool {
        self.state().served.contains_key(name)
    }

    /// Lets a request wait for an endpoint that serves `name`, unless `most` requests with its label wait already.
    ///
    /// # Errors
    /// Why it may not wait.
    pub fn wait(&self, name: &str, label: Arc<str>, most: u32) -> Result<Waits<'_>, NoRoom> {
        let mut state = self.state();
        if state.closed {
            return Err(NoRoom::Closed);
        }
        let waiting = state.waiting.entry(Arc::clone(&label)).or_default();
        if *waiting >= most {
            return Err(NoRoom::Full);
        }
        *waiting += 1;
        if *waiting == 1 {
            self.begun.notify_one();
        }
        let name: Arc<str> = name.into();
        let room = state.rooms.entry(Arc::clone(&name));
        let room = room.or_insert_with(|| Room { requests: 0, served: Arc::default() });
        room.requests += 1;
        if room.requests == 1 {
            self.moved.notify_one();
        }
        // Made under the lock, so that no change after this is missed.
        let served = Box::pin(Arc::clone(&room.served).notified_owned());
        drop(state);
        Ok(Waits { pools: self, name, label, served })
    }

    /// Waits until a request is the first that waits for a model.
    pub async fn begun(&self) {
        self.begun.notified().await;
    }

    /// Waits until a request is the first that waits for a name, or the fleet has changed: one task may ask.
    pub async fn moved(&self) {
        self.moved.notified().await;
    }

    /// Whether a request waits for an endpoint that serves this name.
    pub fn is_awaited(&self, name: &str) -> bool {
        self.state().rooms.contains_key(name)
    }

    /// Wakes all requests, and lets none wait any more: the gateway ends. Returns whether there were any.
    pub fn close(&self) -> bool {
        let mut state = self.state();
        state.closed = true;
        state.rooms.values().for_each(|room| room.served.notify_waiters());
        !state.rooms.is_empty()
    }

    /// Remembers the names of a new snapshot, and wakes the requests that it serves.
    pub(crate) fn changed(&self, snapshot: &Snapshot) {
        let mut state = self.state();
        for (name, served) in &snapshot.by_name {
            if state.served.len() < SERVED_NAMES_MAX && !state.served.contains_key(name.as_str()) {
                state.served.insert(name.as_str().into(), served.pool.model.as_str().into());
            }
        }
        for (name, room) in &state.rooms {
            if snapshot.serves(name) {
                room.served.notify_waiters();
            }
        }
        drop(state);
        self.moved.notify_one();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Waits ===

impl Waits<'_> {
    /// Waits until an endpoint may serve it, or the gateway ends.
    pub async fn served(&mut self) {
        self.served.as_mut().await;
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        let mut state = self.pools.state();
        if let Some(room) = state.rooms.get_mut(&self.name) {
            room.requests -= 1;
            if room.requests == 0 {
                state.rooms.remove(&self.name);
            }
        }
        if let Some(waiting) = state.waiting.get_mut(&self.label) {
            *waiting -= 1;
            if *waiting == 0 {
                state.waiting.remove(&self.label);
            }
        }
    }
}

// === impl Fleet ===

impl Fleet {
    /// An endpoint may take requests now that did not before: wakes the requests that wait for it.
    pub fn endpoints_changed(&self) {
        self.empty_pools.changed(&self.snapshot());
    }

    /// Whether an endpoint is expected for a name that no pool serves: a worker of the configuration has it, or it is an
    /// adapter that is loaded for requests; or pools may be empty for a while, and the configuration names the model, or
    /// it has been served.
    pub fn expects(&self, name: &str) -> bool {
        let comes_and_goes =
            !self.settings().routing.empty_pool_timeout.is_zero() || !self.discovery.sources().is_empty();
        self.has_configured(name)
            || self.settings().adapters.names.contains_key(name)
            || comes_and_goes
                && (self.settings().routing.pools.contains_key(name) || self.empty_pools.has_served(name))
    }

    /// How long a request for this name waits for an endpoint: that of an adapter for its load, too.
    pub fn endpoint_timeout(&self, name: &str) -> Duration {
        let settings = self.settings();
        let adapters = &settings.adapters;
        let load = if adapters.names.contains_key(name) { adapters.load_timeout } else { Duration::ZERO };
        settings.routing.empty_pool_timeout.max(load)
    }

    /// The label in metrics of requests for a name: its pool's model, or `other` for names that clients made up.
    pub fn label_of(&self, name: &str) -> Arc<str> {
        if let Some(model) = self.empty_pools.state().served.get(name) {
            return Arc::clone(model);
        }
        let settings = self.settings();
        if let Some(adapter) = settings.adapters.names.get(name) {
            return adapter.model.as_deref().unwrap_or(name).into();
        }
        let known = self.has_configured(name) || settings.routing.pools.contains_key(name);
        if known { name.into() } else { OTHER_NAMES.into() }
    }

    /// Whether a worker of the configuration serves this name.
    fn has_configured(&self, name: &str) -> bool {
        self.workers().values().any(|worker| worker.model.as_deref() == Some(name))
    }

    /// The number of requests that wait for an endpoint, by label; 0 for models that are expected.
    pub fn waiting_for_endpoints(&self) -> BTreeMap<Arc<str>, u32> {
        let workers: Vec<Arc<str>> =
            self.workers().values().filter_map(|worker| worker.model.as_deref().map(Arc::from)).collect();
        let configured =
            self.settings().routing.pools.keys().map(|model| model.as_str().into()).collect::<Vec<_>>();
        let state = self.empty_pools.state();
        let known = workers.into_iter().chain(configured).chain(state.served.values().cloned());
        let mut waiting: BTreeMap<Arc<str>, u32> = known.map(|label| (label, 0)).collect();
        waiting.extend(state.waiting.iter().map(|(label, requests)| (Arc::clone(label), *requests)));
        waiting
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn is_woken(waits: &mut Waits<'_>) -> bool {
        let future = std::pin::pin!(waits.served());
        future.poll(&mut Context::from_waker(Waker::noop())) == Poll::Ready(())
    }

    #[test]
    fn as_many_requests_wait_as_may_and_leave_nothing_behind() {
        let pools = EmptyPools::default();
        let label: Arc<str> = "m".into();
        let wait = |name: &str| pools.wait(name, Arc::clone(&label), 2);
        let (one, two) = (wait("m"), wait("adapter of m"));
        assert_eq!(wait("m").err(), Some(NoRoom::Full));
        assert!(
            pools.wait("other", OTHER_NAMES.into(), 1).is_ok(),
            "a model does not take the room of others"
        );
        drop(one);
        let three = wait("m");
        assert!(three.is_ok());
        drop((two, three));
        assert!(pools.state().rooms.is_empty() && pools.state().waiting.is_empty());
    }

    #[test]
    fn a_gateway_that_ends_wakes_all_and_lets_none_wait() {
        let pools = EmptyPools::default();
        assert!(!pools.close());
        let pools = EmptyPools::default();
        let mut waits = pools.wait("m", "m".into(), 9).expect("room");
        assert!(!is_woken(&mut waits));
        pools.changed(&Snapshot::default());
        assert!(!is_woken(&mut waits), "no endpoint serves it");
        assert!(pools.close());
        assert!(is_woken(&mut waits));
        assert_eq!(pools.wait("m", "m".into(), 9).err(), Some(NoRoom::Closed));
    }
}
