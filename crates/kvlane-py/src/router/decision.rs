//! What Python sees of decisions, endpoints and events.

use std::collections::HashMap;

use kvlane_core::decision::{Placement, Refused};
use kvlane_core::endpoint::{self, EndpointId};
use kvlane_core::index::exact;
use pyo3::prelude::*;
use pyo3::types::PyString;

/// What became of a request that arrived.
#[pyclass(frozen, get_all, module = "kvlane._core")]
pub(crate) struct Decision {
    /// The request's number, for `progress` and `settle`.
    pub(super) request: u64,
    /// `placed`, `queued` or `rejected`.
    outcome: &'static str,
    /// The endpoint that it was placed at.
    endpoint: Option<Py<PyString>>,
    /// Leading prompt tokens that the endpoint is expected to have cached.
    overlap_tokens: u32,
    /// Why this endpoint, or why it was rejected.
    reason: Option<String>,
    /// How the overlap is known: `exact`, `degraded`, `approximate` or `load_only`.
    knowledge: Option<&'static str>,
    /// For a rejected request: seconds after which the queue should have drained, if that is known.
    retry_after_s: Option<f64>,
}

/// An endpoint as the router sees it.
#[pyclass(frozen, get_all, module = "kvlane._core")]
pub(crate) struct Endpoint {
    /// Its name.
    name: String,
    /// Whether requests may be placed there.
    healthy: bool,
    /// Whether it accepts no new requests.
    draining: bool,
    /// Requests in flight.
    requests: u32,
    /// Uncached prompt tokens in flight, by prediction.
    prefill_tokens: u64,
    /// Prompt and output tokens in flight.
    context_tokens: u64,
    /// How its cache is known.
    knowledge: &'static str,
    /// The state of its circuit breaker.
    breaker: &'static str,
}

/// What KV events changed.
#[pyclass(frozen, get_all, module = "kvlane._core")]
#[derive(Default)]
pub(crate) struct Applied {
    /// Blocks added.
    pub(super) stored: u32,
    /// Blocks removed.
    pub(super) removed: u32,
    /// Blocks that the router does not know, or whose parent it does not know.
    pub(super) unknown: u32,
    /// Blocks refused for lack of memory.
    pub(super) refused: u32,
    /// Events that do not concern prefix reuse or cannot be interpreted.
    pub(super) ignored: u32,
}

/// Names of endpoints.
pub(super) type Names = HashMap<EndpointId, Py<PyString>>;

// === impl Decision ===

impl Decision {
    pub(super) fn placed(py: Python<'_>, request: u64, placement: Placement, names: &Names) -> Self {
        Self {
            request,
            outcome: "placed",
            endpoint: names.get(&placement.endpoint).map(|name| name.clone_ref(py)),
            overlap_tokens: placement.overlap_tokens,
            reason: Some(placement.reason.name().to_owned()),
            knowledge: Some(placement.knowledge.name()),
            retry_after_s: None,
        }
    }

    pub(super) fn rejected(request: u64, refused: Refused) -> Self {
        // The name is that of the variant in recordings.
        let why = serde_json::to_value(refused.why).ok().and_then(|why| Some(why.as_str()?.to_owned()));
        let retry_after_s = refused.retry_after.as_secs_f64();
        Self {
            request,
            outcome: "rejected",
            endpoint: None,
            overlap_tokens: 0,
            reason: why,
            knowledge: None,
            retry_after_s: (retry_after_s > 0.0).then_some(retry_after_s),
        }
    }

    pub(super) fn queued(request: u64) -> Self {
        Self {
            request,
            outcome: "queued",
            endpoint: None,
            overlap_tokens: 0,
            reason: None,
            knowledge: None,
            retry_after_s: None,
        }
    }
}

#[pymethods]
impl Decision {
    fn __repr__(&self, py: Python<'_>) -> String {
        let Self { request, outcome, overlap_tokens, .. } = self;
        let reason = self.reason.as_deref().unwrap_or("none");
        match &self.endpoint {
            Some(endpoint) => {
                let endpoint = endpoint.bind(py).to_string_lossy();
                format!(
                    "Decision(request={request}, {outcome} at {endpoint}, overlap_tokens={overlap_tokens}, reason={reason})"
                )
            }
            None => format!("Decision(request={request}, {outcome}, reason={reason})"),
        }
    }
}

// === impl Endpoint ===

impl Endpoint {
    pub(super) fn of(endpoint: &endpoint::Endpoint) -> Self {
        let load = endpoint.in_flight();
        Self {
            name: endpoint.name.to_string(),
            healthy: endpoint.healthy,
            draining: endpoint.draining,
            requests: load.requests,
            prefill_tokens: load.prefill_tokens,
            context_tokens: load.context_tokens,
            knowledge: endpoint.cache_accuracy.knowledge().name(),
            breaker: endpoint.breaker.state().name(),
        }
    }
}

#[pymethods]
impl Endpoint {
    fn __repr__(&self) -> String {
        let Self { name, healthy, draining, requests, prefill_tokens, context_tokens, .. } = self;
        let word = |is| if is { "True" } else { "False" };
        format!(
            "Endpoint({name}, healthy={}, draining={}, requests={requests}, prefill_tokens={prefill_tokens}, \
             context_tokens={context_tokens})",
            word(*healthy),
            word(*draining)
        )
    }
}

// === impl Applied ===

impl Applied {
    pub(super) fn add(&mut self, applied: exact::Applied) {
        let exact::Applied { stored, removed, unknown, refused } = applied;
        self.stored = self.stored.saturating_add(stored);
        self.removed = self.removed.saturating_add(removed);
        self.unknown = self.unknown.saturating_add(unknown);
        self.refused = self.refused.saturating_add(refused);
    }
}

#[pymethods]
impl Applied {
    fn __repr__(&self) -> String {
        let Self { stored, removed, unknown, refused, ignored } = self;
        format!(
            "Applied(stored={stored}, removed={removed}, unknown={unknown}, refused={refused}, ignored={ignored})"
        )
    }
}
