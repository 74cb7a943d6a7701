//! Cross-origin requests of web pages (the CORS protocol of <https://fetch.spec.whatwg.org/>), and `OPTIONS`.

use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, ALLOW, ORIGIN, VARY,
};
use http::request::Parts;
use http::{HeaderValue, Method, Response, StatusCode};

use crate::body::Body;
use crate::settings::Settings;

/// How long a browser may rely on an answer, in seconds.
const MAX_AGE_S: &str = "600";

/// A request from a page of an allowed origin.
pub(super) struct Asked {
    /// The origin as the answer names it.
    origin: HeaderValue,
    /// The headers that a request will have, if this is the question before it.
    preflight: Option<Option<HeaderValue>>,
}

/// The answer to `OPTIONS` for a path with these methods.
pub(super) fn methods(methods: &'static str) -> Response<Body> {
    let mut response = Response::new(Body::Whole(None));
    *response.status_mut() = StatusCode::NO_CONTENT;
    let head = if methods.split(", ").any(|method| method == "HEAD") || !methods.contains("GET") {
        ""
    } else {
        ", HEAD"
    };
    if let Ok(allow) = HeaderValue::try_from(format!("{methods}{head}, OPTIONS")) {
        response.headers_mut().insert(ALLOW, allow);
    }
    response
}

// === impl Asked ===

impl Asked {
    /// Whether a request is from a page of an allowed origin.
    pub(super) fn of(settings: &Settings, parts: &Parts) -> Option<Self> {
        let allowed = &settings.server.cors_allowed_origins;
        let origin = parts.headers.get(ORIGIN).filter(|_| !allowed.is_empty())?;
        let any = allowed.iter().any(|one| one == "*");
        if !any && !allowed.iter().any(|one| one.as_bytes() == origin.as_bytes()) {
            return None;
        }
        let asks =
            parts.method == Method::OPTIONS && parts.headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD);
        Some(Self {
            origin: if any { HeaderValue::from_static("*") } else { origin.clone() },
            preflight: asks.then(|| parts.headers.get(ACCESS_CONTROL_REQUEST_HEADERS).cloned()),
        })
    }

    /// Tells the browser that the page may read the answer, or send its request. An engine's own permission is replaced.
    pub(super) fn permit(self, response: &mut Response<Body>) {
        let allow = response.headers().get(ALLOW).cloned();
        let headers = response.headers_mut();
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, self.origin);
        headers.append(VARY, HeaderValue::from_static("origin"));
        match self.preflight {
            Some(wanted) => {
                headers.extend(allow.map(|allow| (ACCESS_CONTROL_ALLOW_METHODS, allow)));
                headers.extend(wanted.map(|wanted| (ACCESS_CONTROL_ALLOW_HEADERS, wanted)));
                headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(MAX_AGE_S));
            }
            None => _ = headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("*")),
        }
    }
}
