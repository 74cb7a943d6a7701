//! The paths of the gateway's own API, and other names of paths.

use http::request::Parts;
use http::uri::PathAndQuery;
use http::{Method, Uri};
use kvlane_wire::api::EnginePath;

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
pub const OWN_PATHS: [OwnPath; 26] = [
    own("/liveness", READ, Audience::Open),
    own("/health", READ, Audience::Open),
    own("/v1/health", READ, Audience::Open),
    own("/ping", "GET, HEAD, POST", Audience::Open),
    own("/health_generate", READ, Audience::Open),
    own("/readiness", READ, Audience::Open),
    own("/openapi.yaml", READ, Audience::Open),
    own("/", READ, Audience::Open),
    own("/dashboard", READ, Audience::Open),
    own("/dashboard.js", READ, Audience::Open),
    own("/dashboard.css", READ, Audience::Open),
    own("/load", READ, Audience::Clients),
    own("/v1/models", READ, Audience::Clients),
    own("/v1/models/{model}", READ, Audience::Clients),
    own("/workers", "GET, HEAD, POST", Audience::Operators),
    own("/workers/{worker}", "GET, HEAD, PUT, PATCH, DELETE", Audience::Operators),
    own("/catalogue", READ, Audience::Operators),
    own("/catalogue/{model}", "GET, HEAD, PUT, DELETE", Audience::Operators),
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

/// The row of an engine's path, and whether the path lacks the row's `/v1`. The gateway's own paths precede short names.
pub(super) fn engine_path(path: &str) -> Option<(&'static EnginePath, bool)> {
    EnginePath::of(path).filter(|(_, lacks_version)| !lacks_version || OwnPath::of(path).is_none())
}

/// The URI of a request by its path's first name: engines know a path of OpenAI's and Anthropic's APIs with `/v1`, and
/// without a slash at its end. `None` if it is that already.
pub(super) fn by_first_name(uri: &Uri) -> Option<Uri> {
    let path = uri.path();
    let short = path.strip_suffix('/').filter(|short| !short.is_empty()).unwrap_or(path);
    let is_models = |path: &str| path == "/models" || path.starts_with("/models/");
    let lacks_version = match engine_path(path) {
        Some((_, lacks_version)) => lacks_version,
        None if is_models(short) => true,
        None if short != path && OwnPath::of(short).is_some() => false,
        None => return None,
    };
    if !lacks_version && short == path {
        return None;
    }
    let version = if lacks_version { "/v1" } else { "" };
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = PathAndQuery::try_from(format!("{version}{short}{query}")).ok();
    Uri::from_parts(parts).ok()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_has_one_first_name() {
        for (uri, first) in [
            ("/chat/completions?a=b/", Some("/v1/chat/completions?a=b/")),
            ("/v1/chat/completions/", Some("/v1/chat/completions")),
            ("http://h:1/responses/r_1/cancel/", Some("http://h:1/v1/responses/r_1/cancel")),
            ("/models", Some("/v1/models")),
            ("/models/org/m", Some("/v1/models/org/m")),
            ("/v1/models/", Some("/v1/models")),
            ("/health/", Some("/health")),
            ("/v1/chat/completions", None),
            ("/rerank", None),
            ("/models/load", None),
            ("/decisions", None),
            ("/", None),
            ("/unknown/", None),
        ] {
            let named = by_first_name(&Uri::from_static(uri)).map(|named| named.to_string());
            assert_eq!(named.as_deref(), first, "{uri}");
        }
    }
}
