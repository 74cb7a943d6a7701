//! From a request to a lease: waits in the queue if need be, and reserves the load at the endpoint that was chosen.

use std::sync::Arc;

use kvlane_core::decision::{Placement, Refused, Rejection};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::request::{RequestId, SchedulingRequest};
use kvlane_core::scheduler::{Input, Output};
use kvlane_core::time::Nanos;
use kvlane_fleet::pool::Waiting;
use kvlane_wire::server_timing::Stage;

use crate::lease::Lease;
use crate::proxy::Proxy;
use crate::routed::Routed;

/// Which attempt of a request is placed.
enum AttemptKind {
    /// For the first time, or after so many others.
    Again(u32),
    /// Beside another that has waited for so long.
    Hedge(Nanos),
}

// === impl Proxy ===

impl Proxy {
    /// Finds an endpoint for the request and reserves its load there; waits for its turn if the pool is full.
    ///
    /// # Errors
    /// Why it goes nowhere.
    pub async fn place(
        self: &Arc<Self>,
        routed: &Routed,
        attempt: u32,
        excluded: &Arc<[EndpointId]>,
    ) -> Result<Lease, Refused> {
        loop {
            // An endpoint that left between the decision and here is not among the next one's candidates, and whoever
            // did not know that it waits knows it then.
            if let Some(lease) = self.place_once(routed, AttemptKind::Again(attempt), excluded).await? {
                routed.timeline.enter_at(Stage::Send, lease.placed);
                return Ok(lease);
            }
        }
    }

    /// Finds an endpoint for a second copy of a request of which the first has waited for so long. It waits for none.
    ///
    /// # Errors
    /// Why there is to be none, and if that is for now only, when to ask again.
    pub async fn place_hedge(
        self: &Arc<Self>,
        routed: &Routed,
        waited: Nanos,
        excluded: &Arc<[EndpointId]>,
    ) -> Result<Lease, Refused> {
        let placed = self.place_once(routed, AttemptKind::Hedge(waited), excluded).await?;
        placed.ok_or(Refused::at_once(Rejection::NoEndpoint))
    }

    async fn place_once(
        self: &Arc<Self>,
        routed: &Routed,
        kind: AttemptKind,
        excluded: &Arc<[EndpointId]>,
    ) -> Result<Option<Lease>, Refused> {
        let pool = &routed.served.pool;
        let id = self.next_request_id();
        let request = SchedulingRequest {
            excluded: Arc::clone(excluded),
            attempt: if let AttemptKind::Again(attempt) = kind { attempt } else { 0 },
            hedge: if let AttemptKind::Hedge(waited) = kind { Some(waited) } else { None },
            name: Some(routed.name),
            ..routed.facts.apply(SchedulingRequest::new(id, routed.prompt_tokens))
        };
        let mut waiting = pool.router.may_wait().then(|| Waiting::new(pool, id));
        let output = match (pool.arrive(request, &routed.chain), &mut waiting) {
            (Some(output), _) => output,
            (None, Some(waiting)) => {
                if let AttemptKind::Again(_) = kind {
                    routed.timeline.enter(Stage::Queue);
                }
                let output = waiting.wait(routed.deadline).await;
                output.ok_or(Refused::at_once(Rejection::QueueTimeout))?
            }
            (None, None) => {
                // Queueing was switched on after `may_wait` was read, and no task would receive its turn.
                pool.step(Input::Finished { request: id });
                return Ok(None);
            }
        };
        if let Some(mut waiting) = waiting {
            waiting.answered = true;
        }
        match output {
            Output::Dispatch { placement, .. } => Ok(self.lease(routed, id, placement)),
            Output::Reject { refused, .. } => Err(refused),
            Output::Refresh { .. }
            | Output::Drained { .. }
            | Output::Knowledge { .. }
            | Output::Breaker { .. } => Err(Refused::at_once(Rejection::NoEndpoint)),
        }
    }

    fn lease(self: &Arc<Self>, routed: &Routed, id: RequestId, placement: Placement) -> Option<Lease> {
        let pool = &routed.served.pool;
        let Some(endpoint) = pool.endpoint(placement.endpoint) else {
            pool.step(Input::Finished { request: id });
            return None;
        };
        endpoint.note_selection(placement.reason);
        Some(Lease::new(Arc::clone(self), routed, endpoint, id, placement))
    }
}
