//! Which keys workers are shown, and where they may be: that depends on who names them.
//!
//! What the configuration says of a worker is its operator's word. Whoever adds one through the admin API makes the gateway
//! connect to where they say: there they get nothing that they did not bring.

use std::sync::Arc;

use kvlane_fleet::worker::config::WorkerSpec;
use kvlane_fleet::worker::{Worker, WorkerId};
use kvlane_http::network::Unreachable;
use kvlane_http::secret::Secret;
use kvlane_wire::engine::resolve;
use tokio::time::timeout;

use super::{AddError, Controller, WORKERS_MAX};

// === impl Controller ===

impl Controller {
    /// A worker of the configuration, which is shown the configuration's key if it has none of its own.
    pub(super) fn configured(&self, spec: &WorkerSpec) -> Result<Worker, AddError> {
        let worker = Worker::new(self.fleet.next_worker_id(), spec, None).map_err(AddError::BadUrl)?;
        let settings = self.fleet.settings();
        worker
            .upstream
            .set_key(key_of(spec, settings.upstream.api_key.as_ref()))
            .map_err(AddError::BadUrl)?;
        Ok(worker)
    }

    /// Adds a worker that somebody names from outside. It must be, and stay, where workers may be. It is shown no key but
    /// its own, and none that would have to be read here.
    ///
    /// # Errors
    /// Why it cannot be added.
    pub async fn add_where_allowed(self: &Arc<Self>, spec: &WorkerSpec) -> Result<Arc<Worker>, AddError> {
        if matches!(spec.api_key, Some(Secret::Env(_) | Secret::File(_))) {
            let why = "api_key: write the key itself: neither files nor variables are read for who asks from outside";
            return Err(AddError::BadUrl(why.into()));
        }
        let networks = Some(Arc::clone(&self.allowed));
        let worker = Worker::new(self.fleet.next_worker_id(), spec, networks).map_err(AddError::BadUrl)?;
        let allowed = self.allowed.load_full();
        let limit = self.fleet.settings().upstream.connect_timeout;
        for place in places_of(spec, &worker) {
            match timeout(limit, allowed.addresses(&place)).await {
                Ok(Err(Unreachable::Refused(why))) => return Err(AddError::Refused(why)),
                // Its name may be known later; it is looked at again whenever a connection is made.
                Ok(Ok(_) | Err(Unreachable::Unknown(_))) | Err(_) => {}
            }
        }
        self.take_in(worker, false)
    }

    /// Has the workers of the configuration shown the keys that it says. Those that others have named keep theirs.
    pub fn show_keys(&self) {
        let settings = self.fleet.settings();
        for worker in self.workers().iter().filter(|worker| worker.is_configured()) {
            if let Err(problem) =
                worker.upstream.set_key(key_of(&worker.spec, settings.upstream.api_key.as_ref()))
            {
                tracing::error!(worker = %worker.url, problem, "worker API key reload failed; keeping the previous key");
            }
        }
    }
}

/// Checks that the workers of a configuration could all be added, their keys among it.
///
/// # Errors
/// Why the first one that could not be added could not.
pub fn check_workers(workers: &[WorkerSpec], api_key: Option<&Secret>) -> Result<(), AddError> {
    if workers.len() > WORKERS_MAX {
        return Err(AddError::TooMany);
    }
    for (n, spec) in workers.iter().enumerate() {
        let named = |why: String| AddError::BadUrl(format!("workers[{n}] {}: {why}", spec.url));
        let worker = Worker::new(WorkerId(0), spec, None).map_err(named)?;
        worker.upstream.set_key(key_of(spec, api_key)).map_err(named)?;
    }
    Ok(())
}

/// What a worker of the configuration is shown.
fn key_of<'a>(spec: &'a WorkerSpec, api_key: Option<&'a Secret>) -> Option<&'a Secret> {
    spec.api_key.as_ref().or(api_key)
}

/// Every place that somebody who names this worker makes us connect to.
fn places_of(spec: &WorkerSpec, worker: &Worker) -> Vec<String> {
    let feeds = spec.kv_events.iter().flat_map(|feed| [Some(&feed.endpoint), feed.replay.as_ref()]);
    let feeds = feeds.flatten().filter_map(|feed| resolve(feed, &worker.upstream.address.host));
    std::iter::once(worker.upstream.address.place()).chain(feeds).collect()
}
