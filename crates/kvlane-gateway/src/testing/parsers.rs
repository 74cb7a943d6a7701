//! Doors to what reads bytes of others and is nobody's business otherwise. They are for fuzzing.

use http::{HeaderMap, Method};
use kvlane_http::connections::pieces;

use kvlane_control::index_snapshot;
use kvlane_control::ingest::snapshot;
use kvlane_proxy::attributes::{self, Hints};
use kvlane_proxy::auth::jwt;

/// What would be relayed of a worker's answer that comes in these pieces, and then the connection closes: its status
/// and its body, if they are whole. `head` says that the request was by HEAD.
pub fn answer(head: bool, parts: &[&[u8]]) -> Option<(u16, Vec<u8>)> {
    let method = if head { Method::HEAD } else { Method::POST };
    pieces::relayed(&method, parts).map(|(status, body)| (status.as_u16(), body))
}

/// How many endpoints a file of what engines hold tells of, which is right but for `content`.
pub fn snapshot(content: &[u8]) -> Option<usize> {
    snapshot::entries_in(content)
}

/// Likewise a file of what engines were given.
pub fn dispatches(content: &[u8]) -> Option<usize> {
    index_snapshot::endpoints_in(content)
}

/// Whether a token is believed of which `keys`, a JWK set, are the keys. Claims are read too, whoever has signed them.
pub fn token(keys: &[u8], token: &str, claims: &serde_json::Value) -> bool {
    jwt::is_believed(keys, token, claims)
}

/// Whether what these headers say of a request is the same when it is read again by the same gateway.
pub fn hints(headers: &HeaderMap) -> bool {
    let hints = Hints::new(&attributes::Config::default(), kvlane_proxy::salt::SaltKey::generate());
    hints.read(headers, None, None) == hints.read(headers, None, None)
}
