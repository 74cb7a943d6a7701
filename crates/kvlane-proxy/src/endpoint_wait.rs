//! Waits for an endpoint while the pool of a request has none (`routing.empty_pool_timeout`), or none has loaded its adapter
//! (`adapters.load_timeout`).

use std::sync::Arc;
use std::time::Duration;

use http::request::Parts;
use kvlane_core::decision::Rejection;
use kvlane_fleet::empty_pools::NoRoom;
use kvlane_fleet::metrics::ModelLabel;
use kvlane_wire::server_timing::Stage;
use tokio::time::{Instant, sleep_until};

use crate::account::Account;
use crate::admission::hold;
use crate::auth::identity;
use crate::error::{ApiError, Told};
use crate::proxy::Proxy;

/// A request that waits each time it finds no endpoint, until its time is up.
pub(crate) struct EndpointWait<'a> {
    proxy: &'a Arc<Proxy>,
    parts: &'a Parts,
    account: &'a Account,
    deadline: Instant,
    /// When it first found no endpoint.
    since: Option<Instant>,
    /// It found no endpoint although one takes requests, and is tried again at once.
    again: bool,
}

// === impl EndpointWait ===

impl<'a> EndpointWait<'a> {
    /// For a request with this head, which must be answered by `deadline`.
    pub(crate) fn new(
        proxy: &'a Arc<Proxy>,
        parts: &'a Parts,
        account: &'a Account,
        deadline: Instant,
    ) -> Self {
        Self { proxy, parts, account, deadline, since: None, again: false }
    }

    /// Returns when the request should be tried again after this error.
    ///
    /// # Errors
    /// The error, if waiting does not help; otherwise why the wait has ended.
    pub(crate) async fn after(&mut self, error: ApiError) -> Result<(), ApiError> {
        let waited = self.wait(error).await;
        if waited.is_err() {
            // Before its client learns of the error, and may ask again.
            drop(self.account.let_go());
        }
        waited
    }

    async fn wait(&mut self, error: ApiError) -> Result<(), ApiError> {
        let ApiError::NoEndpoint { model, retry_after_s, .. } = error else { return Err(error) };
        let fleet = &self.proxy.fleet;
        let label = fleet.label_of(&model);
        if self.since.is_none() {
            let label = ModelLabel { model: label.to_string() };
            fleet.metrics.requests.requests_without_endpoint.get_or_create(&label).inc();
        }
        let since = *self.since.get_or_insert_with(Instant::now);
        let (timeout, most) = (fleet.endpoint_timeout(&model), fleet.settings().routing.queue_size);
        let failed = |model: String| {
            let waited = if timeout.is_zero() { Duration::ZERO } else { since.elapsed() };
            ApiError::NoEndpoint { model, waited, retry_after_s, told: Told::Where }
        };
        if timeout.is_zero() {
            return Err(failed(model));
        }
        let tenant = {
            let reader = self.proxy.attribute_reader.load();
            reader.read(&self.parts.headers, None, identity(self.parts)).tenant()
        };
        hold(self.proxy, &model, tenant, self.account)?;
        let mut waits = match fleet.empty_pools.wait(&model, Arc::clone(&label), most) {
            Ok(waits) => waits,
            Err(NoRoom::Full) => {
                fleet.metrics.faults.note_no_room(&label);
                return Err(ApiError::Rejected { why: Rejection::QueueFull, retry_after_s });
            }
            Err(NoRoom::Closed) => return Err(failed(model)),
        };
        // An endpoint may have come since. If one is there and does not serve this request, none that comes will.
        if fleet.snapshot().serves(&model) {
            return if std::mem::replace(&mut self.again, true) { Err(failed(model)) } else { Ok(()) };
        }
        self.again = false;
        self.account.timeline.enter(Stage::Queue);
        tokio::select! {
            () = waits.served() => Ok(()),
            () = sleep_until((since + timeout).min(self.deadline)) => Err(failed(model)),
        }
    }
}
