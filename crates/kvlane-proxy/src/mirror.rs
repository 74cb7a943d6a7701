//! Copies of requests for another model (`models.*.mirror`). Their answers are discarded, and no client is charged for them.

use std::pin::Pin;
use std::sync::Arc;

use kvlane_fleet::metrics::{Metrics, MirrorLabels};
use tokio::sync::Semaphore;

/// Most copies in flight; further ones are not sent.
const COPIES_MAX: usize = 64;

/// A copy of a request, until its answer has ended.
pub(super) type Copy = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The copies in flight.
pub(super) struct Copies {
    permits: Arc<Semaphore>,
}

// === impl Copies ===

impl Default for Copies {
    fn default() -> Self {
        Self { permits: Arc::new(Semaphore::new(COPIES_MAX)) }
    }
}

impl Copies {
    /// Sends a copy to `model`, apart from the request itself, unless too many are in flight.
    pub(super) fn send(&self, metrics: &Metrics, model: &str, copy: impl FnOnce() -> Copy) {
        let permit = Arc::clone(&self.permits).try_acquire_owned().ok();
        let outcome = if permit.is_some() { "sent" } else { "dropped" };
        metrics.requests.mirrored.get_or_create(&MirrorLabels { model: model.to_owned(), outcome }).inc();
        let Some(permit) = permit else { return };
        let copy = copy();
        #[expect(
            clippy::disallowed_methods,
            reason = "no one waits for a copy: it may be cut when the process ends"
        )]
        tokio::spawn(async move {
            copy.await;
            drop(permit);
        });
    }
}
