//! The engines' own prefix cache counters, added up over restarts.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvlane_core::endpoint::EndpointId;
use kvlane_wire::engine::PrefixCache;
use prometheus_client::metrics::counter::Counter;

/// The counters of the engines of one pool.
pub struct EngineReuse {
    /// Prompt tokens that the engines looked up since this gateway first read their counters.
    pub queried_tokens: Counter,
    /// Prompt tokens that they found in their own caches.
    pub hit_tokens: Counter,
    /// Prompt tokens that they fetched from other engines or stores.
    pub external_hit_tokens: Counter,
    /// Each engine's counters at the last read.
    last: Mutex<BTreeMap<EndpointId, PrefixCache>>,
}

// === impl EngineReuse ===

impl EngineReuse {
    pub(super) fn new([queried_tokens, hit_tokens, external_hit_tokens]: [Counter; 3]) -> Self {
        Self { queried_tokens, hit_tokens, external_hit_tokens, last: Mutex::default() }
    }

    /// An engine's counters have been read. The first reading is only the baseline.
    pub fn note(&self, endpoint: EndpointId, now: PrefixCache) {
        let Some(before) = self.last().insert(endpoint, now) else { return };
        let restarted = now.queried_tokens < before.queried_tokens || now.hit_tokens < before.hit_tokens;
        let before = if restarted { PrefixCache::default() } else { before };
        self.queried_tokens.inc_by(now.queried_tokens - before.queried_tokens);
        self.hit_tokens.inc_by(now.hit_tokens - before.hit_tokens);
        self.external_hit_tokens.inc_by(now.external_hit_tokens.saturating_sub(before.external_hit_tokens));
    }

    /// An engine's counters at the last read, since the engine started.
    pub fn of(&self, endpoint: EndpointId) -> Option<PrefixCache> {
        self.last().get(&endpoint).copied()
    }

    /// Forgets an endpoint that has left.
    pub fn forget(&self, endpoint: EndpointId) {
        self.last().remove(&endpoint);
    }

    fn last(&self) -> MutexGuard<'_, BTreeMap<EndpointId, PrefixCache>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_add_up_over_restarts_from_the_first_reading() {
        let reuse = EngineReuse::new(Default::default());
        let (a, b) = (EndpointId::new(0, 0), EndpointId::new(1, 0));
        let read = |endpoint, queried_tokens, hit_tokens, external_hit_tokens| {
            reuse.note(endpoint, PrefixCache { queried_tokens, hit_tokens, external_hit_tokens });
            (reuse.queried_tokens.get(), reuse.hit_tokens.get(), reuse.external_hit_tokens.get())
        };
        assert_eq!(read(a, 1000, 400, 50), (0, 0, 0), "before this gateway's first reading");
        assert_eq!(read(a, 1100, 480, 65), (100, 80, 15));
        assert_eq!(read(b, 5, 5, 0), (100, 80, 15));
        assert_eq!(read(a, 30, 10, 4), (130, 90, 19), "the engine has restarted");
        let cache = PrefixCache { queried_tokens: 30, hit_tokens: 10, external_hit_tokens: 4 };
        assert_eq!(reuse.of(a), Some(cache));
        reuse.forget(a);
        assert_eq!((reuse.of(a), read(a, 2000, 2000, 9)), (None, (130, 90, 19)));
    }
}
