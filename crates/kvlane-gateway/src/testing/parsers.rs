//! Entry points for fuzzing private parsers of untrusted bytes.

use http::{HeaderMap, Method};
use kvlane_http::connections::pieces;

use kvlane_control::index_snapshot;
use kvlane_control::ingest::snapshot;
use kvlane_proxy::attributes::{self, AttributeReader};
use kvlane_proxy::auth::jwt;

/// The status and the body that would be relayed of an engine's response that arrives in these pieces before the
/// connection closes, if they are complete. `head` says that the request was a HEAD.
pub fn answer(head: bool, parts: &[&[u8]]) -> Option<(u16, Vec<u8>)> {
    let method = if head { Method::HEAD } else { Method::POST };
    pieces::relayed(&method, parts).map(|(status, body)| (status.as_u16(), body))
}

/// The number of endpoints in a KV cache snapshot that is valid except for `content`.
pub fn snapshot(content: &[u8]) -> Option<usize> {
    snapshot::entries_in(content)
}

/// The same for a dispatch index snapshot.
pub fn dispatches(content: &[u8]) -> Option<usize> {
    index_snapshot::endpoints_in(content)
}

/// Whether a token is accepted with the JWK set `keys`. The claims are read too, even if no key has signed them.
pub fn token(keys: &[u8], token: &str, claims: &serde_json::Value) -> bool {
    jwt::is_believed(keys, token, claims)
}

/// Whether the hints in these headers are the same when the same gateway reads them again.
pub fn hints(headers: &HeaderMap) -> bool {
    let reader =
        AttributeReader::new(&attributes::Config::default(), kvlane_proxy::salt::SaltKey::generate());
    reader.read(headers, None, None) == reader.read(headers, None, None)
}
