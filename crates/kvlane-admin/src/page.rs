//! The dashboard: three files embedded in the binary. The page reads its data from the admin API with the viewer's
//! key.

use http::{HeaderName, HeaderValue, Response, StatusCode, header};

use kvlane_proxy::body::{Body, text_response};

const PAGE: &str = include_str!("../assets/dashboard.html");
const SCRIPT: &str = include_str!("../assets/dashboard.js");
const STYLE: &str = include_str!("../assets/dashboard.css");

/// Content security policy of the page: own script and style, requests to this port only, no framing, and no text is
/// parsed as markup.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

/// The answer to `/`: the page is at `/dashboard`.
pub(super) fn leads_to_dashboard() -> Response<Body> {
    let mut response = text_response(StatusCode::TEMPORARY_REDIRECT, "text/plain", "/dashboard\n".into());
    response.headers_mut().insert(header::LOCATION, HeaderValue::from_static("/dashboard"));
    response
}

/// One of the page's files. They contain no data of the fleet.
pub(super) fn file(path: &str) -> Option<Response<Body>> {
    let (kind, text) = match path {
        "/dashboard" => ("text/html; charset=utf-8", PAGE),
        "/dashboard.js" => ("text/javascript; charset=utf-8", SCRIPT),
        "/dashboard.css" => ("text/css; charset=utf-8", STYLE),
        _ => return None,
    };
    let mut response = text_response(StatusCode::OK, kind, text.into());
    let headers: [(HeaderName, &'static str); 5] = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (HeaderName::from_static("cross-origin-opener-policy"), "same-origin"),
        // Not cached: another version of the gateway has another page.
        (header::CACHE_CONTROL, "no-cache"),
    ];
    for (name, value) in headers {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    Some(response)
}
