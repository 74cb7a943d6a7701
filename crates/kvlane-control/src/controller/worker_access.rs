//! API keys and allowed addresses of workers, by who added them.
//!
//! Workers in the configuration are trusted by the operator. A caller that adds a worker through the admin API
//! chooses the address that the gateway connects to: there the gateway sends no key except the one the caller gave.

use std::net::SocketAddr;
use std::sync::Arc;

use kvlane_fleet::discovery;
use kvlane_fleet::worker::config::WorkerSpec;
use kvlane_fleet::worker::{Origin, Worker, WorkerId};
use kvlane_http::network::Unreachable;
use kvlane_http::secret::Secret;
use kvlane_wire::engine::resolve;
use tokio::time::timeout;

use super::{AddError, Controller, WORKERS_MAX};

// === impl Controller ===

impl Controller {
    /// A worker of the configuration, with the configuration's key if it has none of its own.
    pub(super) fn configured(&self, spec: &WorkerSpec) -> Result<Worker, AddError> {
        let worker =
            Worker::new(self.fleet.next_worker_id(), spec, Origin::Config, None).map_err(AddError::BadUrl)?;
        let settings = self.fleet.settings();
        worker
            .upstream
            .set_key(key_of(spec, settings.upstream.api_key.as_ref()))
            .map_err(AddError::BadUrl)?;
        Ok(worker)
    }

    /// Adds a worker through the admin API. Its address must be allowed, now and at every connection. The gateway
    /// sends it no key but its own, and reads no file or variable for it.
    ///
    /// # Errors
    /// Why it cannot be added.
    pub async fn add_where_allowed(self: &Arc<Self>, spec: &WorkerSpec) -> Result<Arc<Worker>, AddError> {
        if matches!(spec.api_key, Some(Secret::Env(_) | Secret::File(_))) {
            let why = "api_key: write the key itself: files and variables are not read for workers added through the admin API";
            return Err(AddError::BadUrl(why.into()));
        }
        let networks = Some(Arc::clone(&self.allowed));
        let worker = Worker::new(self.fleet.next_worker_id(), spec, Origin::Admin, networks)
            .map_err(AddError::BadUrl)?;
        let allowed = self.allowed.load_full();
        let limit = self.fleet.settings().upstream.connect_timeout;
        for place in places_of(spec, &worker) {
            match timeout(limit, allowed.addresses(&place)).await {
                Ok(Err(Unreachable::Refused(why))) => return Err(AddError::Refused(why)),
                // The name may resolve later; the address is checked again at every connection.
                Ok(Ok(_) | Err(Unreachable::Unknown(_))) | Err(_) => {}
            }
        }
        self.take_in(worker, false)
    }

    /// A worker that a source of discovery names. It gets the configuration's key if it has none of its own: the
    /// configuration says which pods or names are workers. What is in the workers file is trusted as the configuration
    /// is; addresses from elsewhere must be allowed, now and at every connection.
    pub(crate) fn found(
        &self,
        spec: &WorkerSpec,
        source: &'static str,
        key: &str,
    ) -> Result<Worker, AddError> {
        let (origin, is_file) = (Origin::Found { source, key: key.into() }, source == discovery::FILE);
        let networks = (!is_file).then(|| Arc::clone(&self.allowed));
        let worker =
            Worker::new(self.fleet.next_worker_id(), spec, origin, networks).map_err(AddError::BadUrl)?;
        let allowed = self.allowed.load();
        // Names are resolved, and their addresses checked, when a connection is made.
        let addresses = places_of(spec, &worker).into_iter().filter_map(|place| place.parse().ok());
        for address in addresses.filter(|_| !is_file).map(|place: SocketAddr| place.ip()) {
            allowed.check(address).map_err(AddError::Refused)?;
        }
        let settings = self.fleet.settings();
        worker
            .upstream
            .set_key(key_of(spec, settings.upstream.api_key.as_ref()))
            .map_err(AddError::BadUrl)?;
        Ok(worker)
    }

    /// Updates the API keys of workers. Workers added through the admin API keep theirs.
    pub fn show_keys(&self) {
        let settings = self.fleet.settings();
        for worker in self.workers().iter().filter(|worker| worker.origin != Origin::Admin) {
            if let Err(problem) =
                worker.upstream.set_key(key_of(&worker.spec, settings.upstream.api_key.as_ref()))
            {
                tracing::error!(worker = %worker.url, problem, "worker API key reload failed; keeping the previous key");
            }
        }
    }
}

/// Checks that all workers of a configuration could be added, and that their keys can be read.
///
/// # Errors
/// Why the first invalid worker cannot be added.
pub fn check_workers(workers: &[WorkerSpec], api_key: Option<&Secret>) -> Result<(), AddError> {
    if workers.len() > WORKERS_MAX {
        return Err(AddError::TooMany);
    }
    for (n, spec) in workers.iter().enumerate() {
        let named = |why: String| AddError::BadUrl(format!("workers[{n}] {}: {why}", spec.url));
        let worker = Worker::new(WorkerId(0), spec, Origin::Config, None).map_err(named)?;
        worker.upstream.set_key(key_of(spec, api_key)).map_err(named)?;
    }
    Ok(())
}

/// The API key of a worker of the configuration.
fn key_of<'a>(spec: &'a WorkerSpec, api_key: Option<&'a Secret>) -> Option<&'a Secret> {
    // The key of the fleet is not told to others.
    spec.api_key.as_ref().or(api_key.filter(|_| spec.provider.is_none()))
}

/// Every address that the gateway would connect to for this worker.
fn places_of(spec: &WorkerSpec, worker: &Worker) -> Vec<String> {
    let feeds = spec.kv_events.iter().flat_map(|feed| [Some(&feed.endpoint), feed.replay.as_ref()]);
    let feeds = feeds.flatten().filter_map(|feed| resolve(feed, &worker.upstream.address.host));
    std::iter::once(worker.upstream.address.place()).chain(feeds).collect()
}
