//! Metrics of authentication and TLS handshakes.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::labels::{AuthLabels, HandshakeLabel};
use super::table::Gateway;

/// Names that have a row of their own; further ones share the row [`OTHER_NAMES`].
const NAMES_MAX: usize = 1000;
/// The label of names without a row of their own. A key cannot have this name.
pub const OTHER_NAMES: &str = "other";

/// Counters of [`kvlane_proxy::auth`] and [`kvlane_http::tls`].
#[derive(Debug, Default)]
pub struct AuthMetrics {
    pub(super) rows: Gateway,
    pub(super) names: AtomicUsize,
}

// === impl AuthMetrics ===

impl AuthMetrics {
    /// Counts a TLS handshake with a client, completed or failed.
    pub fn note_handshake(&self, done: bool) {
        let outcome = if done { "done" } else { "failed" };
        self.rows.tls_handshakes.get_or_create(&HandshakeLabel { outcome }).inc();
    }

    /// Counts a request by the `outcome` of its authentication and the name of its key.
    pub fn note(&self, outcome: &'static str, name: &str) {
        let labels = AuthLabels { outcome, name: name.to_owned() };
        if let Some(row) = self.rows.auth_requests.get(&labels) {
            row.inc();
            return;
        }
        let known = name.is_empty() || self.names.fetch_add(1, Ordering::Relaxed) < NAMES_MAX;
        let labels = if known { labels } else { AuthLabels { name: OTHER_NAMES.to_owned(), ..labels } };
        self.rows.auth_requests.get_or_create(&labels).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_counted_one_by_one_up_to_a_limit() {
        let metrics = AuthMetrics::default();
        for n in 0..2 * NAMES_MAX {
            metrics.note("accepted", &format!("n{n}"));
        }
        metrics.note("invalid", "");
        let count = |outcome, name: &str| {
            metrics.rows.auth_requests.get(&AuthLabels { outcome, name: name.into() }).map(|row| row.get())
        };
        assert_eq!((count("accepted", "n0"), count("accepted", "other")), (Some(1), Some(NAMES_MAX as u64)));
        assert_eq!((count("accepted", &format!("n{NAMES_MAX}")), count("invalid", "")), (None, Some(1)));
    }
}
