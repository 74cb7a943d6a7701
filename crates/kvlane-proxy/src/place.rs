//! From a request to a lease: waits in the queue if need be, and reserves the load at the endpoint that was chosen.

use std::sync::Arc;

use kvlane_core::decision::{Placement, PrefillLeg, Refused, Rejection};
use kvlane_core::endpoint::EndpointId;
use kvlane_core::request::{AdapterKey, RequestId, SchedulingRequest};
use kvlane_core::scheduler::{Input, Output};
use kvlane_core::time::Nanos;
use kvlane_fleet::pool::Waiting;
use kvlane_wire::server_timing::Stage;

use crate::lease::Lease;
use crate::proxy::Proxy;
use crate::routed::Routed;

/// The kind of attempt to place.
enum AttemptKind {
    /// The first attempt, or a retry after this many others.
    Again(u32),
    /// A second copy beside another attempt that has waited for this long.
    Hedge(Nanos),
}

// === impl Proxy ===

impl Proxy {
    /// Selects an endpoint for the request and reserves its load there; queues the request if the pool is full.
    ///
    /// # Errors
    /// Why the request is rejected.
    pub async fn place(
        self: &Arc<Self>,
        routed: &Routed,
        attempt: u32,
        excluded: &Arc<[EndpointId]>,
    ) -> Result<Lease, Refused> {
        loop {
            // Tried again if the selected endpoint has left since (it is not among the next candidates), or if queueing
            // was switched on since (the request is queued then).
            if let Some(lease) = self.place_once(routed, AttemptKind::Again(attempt), excluded).await? {
                routed.timeline.enter_at(Stage::Send, lease.placed);
                return Ok(lease);
            }
        }
    }

    /// Selects an endpoint for a second copy of a request whose first copy has waited for this long. Does not queue.
    ///
    /// # Errors
    /// Why there is no second copy, and when to ask again if that may change.
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
        let may_split = matches!(kind, AttemptKind::Again(_)) && routed.may_split && pool.router.may_split();
        let mut request = SchedulingRequest {
            leg: may_split.then(|| self.next_request_id()),
            excluded: Arc::clone(excluded),
            attempt: if let AttemptKind::Again(attempt) = kind { attempt } else { 0 },
            hedge: if let AttemptKind::Hedge(waited) = kind { Some(waited) } else { None },
            name: Some(routed.name),
            adapter: routed.served.adapter.as_deref().map(|name| AdapterKey::named(name.as_bytes())),
            ..routed.attributes.apply(SchedulingRequest::new(id, routed.prompt_tokens))
        };
        // Its target counts from when it was received.
        let elapsed = self.fleet.clock.now() - routed.received;
        let elapsed_ms = u32::try_from(elapsed.0 / 1_000_000).unwrap_or(u32::MAX);
        request.slo.ttft_ms = request.slo.ttft_ms.map(|most| most.saturating_sub(elapsed_ms));
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
                // Queueing was switched on after `may_wait` was read, and no task would be notified when the request
                // is dispatched.
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
        let leg = match placement.prefill {
            None => None,
            Some(leg) => {
                let Some(endpoint) = pool.endpoint(leg.endpoint) else {
                    pool.step(Input::Finished { request: id });
                    return None;
                };
                let PrefillLeg { overlap_tokens, knowledge, feed, .. } = leg;
                let at = Placement {
                    endpoint: leg.endpoint,
                    overlap_tokens,
                    knowledge,
                    feed,
                    prefill: None,
                    ..placement
                };
                Some(Lease::new(Arc::clone(self), routed, endpoint, leg.id, at))
            }
        };
        endpoint.note_selection(placement.reason);
        Some(Lease::new(Arc::clone(self), routed, endpoint, id, placement).with_leg(leg))
    }
}
