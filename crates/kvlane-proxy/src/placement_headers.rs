//! The headers that say where a request was placed and why, and those that tell llm-d's sidecars where to send it. Only
//! the gateway sets them.

use http::{HeaderMap, HeaderName, HeaderValue};
use kvlane_core::cache_accuracy::{Feed, Knowledge};
use kvlane_core::decision::Placement;
use kvlane_wire::disaggregation::SIDECAR_HEADERS;

use crate::attributes::Attributes;
use crate::lease::Lease;

/// The endpoint that answers.
const BACKEND: HeaderName = HeaderName::from_static("x-router-backend");
/// The endpoint that computed its prompt, if that was another.
const PREFILL: HeaderName = HeaderName::from_static("x-router-prefill");
/// Prompt tokens that this one had cached, as its engine reports. The usage in the answer is the other engine's, which
/// may count fetched tokens as cached.
const PREFILL_CACHED: HeaderName = HeaderName::from_static("x-router-prefill-cached-tokens");
/// Why it was chosen.
const REASON: HeaderName = HeaderName::from_static("x-router-reason");

/// The hints of the request that were taken.
const HINTS: HeaderName = HeaderName::from_static("x-router-hints");

/// Whether a header may be set by the gateway only, not by a client or an engine.
pub(super) fn is_ours(name: &HeaderName) -> bool {
    let name = name.as_str();
    ["x-router-", "x-kvlane-"].into_iter().any(|start| name.starts_with(start))
        || SIDECAR_HEADERS.contains(&name)
}

/// Removes the headers that only the gateway may set.
pub(super) fn unmark(headers: &mut HeaderMap) {
    if headers.keys().any(is_ours) {
        let said: Vec<_> = headers.keys().filter(|name| is_ours(name)).cloned().collect();
        said.iter().for_each(|name| _ = headers.remove(name));
    }
}

/// Sets the endpoint that answers, why, and which hints of its request were taken.
pub(super) fn mark(headers: &mut HeaderMap, lease: &Lease, attributes: &Attributes) {
    unmark(headers);
    if let Some(taken) = attributes.taken() {
        headers.insert(HINTS, taken);
    }
    if let Ok(backend) = HeaderValue::from_str(&lease.endpoint.name) {
        headers.insert(BACKEND, backend);
    }
    if let Some(prefill) = lease.prefill_endpoint()
        && let Ok(prefill) = HeaderValue::from_str(&prefill)
    {
        headers.insert(PREFILL, prefill);
        if let Some(tokens) = lease.prefill_cached_tokens() {
            headers.insert(PREFILL_CACHED, tokens.into());
        }
    }
    let Placement { reason, knowledge, feed, .. } = lease.placement;
    let reason = match (knowledge, feed) {
        // An endpoint without a feed has no better knowledge, so the reason alone is enough.
        (Knowledge::Approximate, Feed::Absent) => Ok(HeaderValue::from_static(reason.name())),
        _ => HeaderValue::try_from(format!("{}; knowledge={}", reason.name(), knowledge.name())),
    };
    if let Ok(reason) = reason {
        headers.insert(REASON, reason);
    }
}
