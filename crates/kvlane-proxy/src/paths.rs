//! The paths of the gateway's own API: what is open, and what is for operators.

use http::Method;
use http::request::Parts;

/// Whether a path needs no key: health probes and the dashboard's files.
pub fn is_open(path: &str) -> bool {
    matches!(
        path,
        "/liveness"
            | "/health"
            | "/readiness"
            | "/openapi.yaml"
            | "/dashboard"
            | "/dashboard.js"
            | "/dashboard.css"
    )
}

/// Whether a path is for operators.
pub fn is_for_operators(path: &str) -> bool {
    path.starts_with("/workers/")
        || matches!(
            path,
            "/workers"
                | "/add_worker"
                | "/remove_worker"
                | "/list_workers"
                | "/decisions"
                | "/whatif"
                | "/fleet"
                | "/history"
                | "/metrics"
        )
}

/// Whether the rest of a path is the name of a model or a worker, which may be percent-encoded.
pub fn ends_in_a_name(path: &str) -> bool {
    path.starts_with("/workers/") || path.starts_with("/v1/models/")
}

/// Whether the body of a request to the gateway's own API is read.
pub fn takes_body(parts: &Parts) -> bool {
    is_for_operators(parts.uri.path()) && matches!(parts.method, Method::POST | Method::PUT | Method::PATCH)
}
