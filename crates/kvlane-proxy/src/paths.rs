//! The paths of the gateway's own API.

use http::Method;
use http::request::Parts;

/// A path that the gateway answers itself.
#[derive(Debug)]
pub struct OwnPath {
    /// As in the OpenAPI document: a last segment in braces stands for a name.
    pub path: &'static str,
    /// Its methods, as `Allow` lists them.
    pub methods: &'static str,
    /// Its clients.
    pub audience: Audience,
}

/// The clients of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Audience {
    /// Probes and browsers without a key.
    Open,
    /// Clients. They need a key if any is configured.
    Clients,
    /// Operators.
    Operators,
}

const READ: &str = "GET, HEAD";

/// All paths of the gateway's own API.
pub const OWN_PATHS: [OwnPath; 20] = [
    own("/liveness", READ, Audience::Open),
    own("/health", READ, Audience::Open),
    own("/readiness", READ, Audience::Open),
    own("/openapi.yaml", READ, Audience::Open),
    own("/", READ, Audience::Open),
    own("/dashboard", READ, Audience::Open),
    own("/dashboard.js", READ, Audience::Open),
    own("/dashboard.css", READ, Audience::Open),
    own("/v1/models", READ, Audience::Clients),
    own("/v1/models/{model}", READ, Audience::Clients),
    own("/workers", "GET, HEAD, POST", Audience::Operators),
    own("/workers/{worker}", "GET, HEAD, PUT, PATCH, DELETE", Audience::Operators),
    own("/add_worker", "POST", Audience::Operators),
    own("/remove_worker", "POST", Audience::Operators),
    own("/list_workers", READ, Audience::Operators),
    own("/decisions", READ, Audience::Operators),
    own("/whatif", READ, Audience::Operators),
    own("/fleet", READ, Audience::Operators),
    own("/history", READ, Audience::Operators),
    own("/metrics", READ, Audience::Operators),
];

const fn own(path: &'static str, methods: &'static str, audience: Audience) -> OwnPath {
    OwnPath { path, methods, audience }
}

// === impl OwnPath ===

impl OwnPath {
    /// The entry of a request's path.
    pub fn of(path: &str) -> Option<&'static Self> {
        OWN_PATHS.iter().find(|own| match own.prefix() {
            Some(prefix) => path.starts_with(prefix),
            None => own.path == path,
        })
    }

    /// The text before the name, if the path ends in one.
    pub fn prefix(&self) -> Option<&'static str> {
        self.path.split_once('{').map(|(prefix, _)| prefix)
    }

    /// Whether it is the path that Prometheus reads.
    pub fn is_metrics(&self) -> bool {
        self.path == "/metrics"
    }

    /// Whether it is for operators.
    pub fn is_for_operators(&self) -> bool {
        self.audience == Audience::Operators
    }
}

/// Whether the rest of a path is the name of a model or a worker, which may be percent-encoded.
pub fn ends_in_a_name(path: &str) -> bool {
    OwnPath::of(path).is_some_and(|own| own.prefix().is_some())
}

/// Whether the body of a request to the gateway's own API is read.
pub fn takes_body(parts: &Parts) -> bool {
    OwnPath::of(parts.uri.path()).is_some_and(OwnPath::is_for_operators)
        && matches!(parts.method, Method::POST | Method::PUT | Method::PATCH)
}
