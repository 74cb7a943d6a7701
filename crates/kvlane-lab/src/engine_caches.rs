//! What engines say of their prefix caches before and after a run: automatic prefix caching (APC) of each, and what
//! it fetched from others.

use std::time::Duration;

use http::{Method, StatusCode};
use kvlane_wire::engine::{PrefixCache, prefix_caches};
use serde::Serialize;

use crate::client::Target;

/// Longest wait for a page of metrics.
const PATIENCE: Duration = Duration::from_secs(10);
/// Most bytes of a page of metrics that are read.
const PAGE_BYTES_MAX: usize = 16 << 20;

/// The prefix cache of one rank of an engine during a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EngineCache {
    /// The engine, as given.
    pub engine: String,
    /// Its rank, 0 without ranks.
    pub rank: u32,
    /// Prompt tokens that it looked up.
    pub queried_tokens: u64,
    /// Share of them that it found in its own cache.
    pub hit_share: f64,
    /// Share of them that it fetched from another engine or a store.
    pub external_hit_share: f64,
}

/// The counters of each rank of an engine.
///
/// # Errors
/// Why they cannot be read, and what to do.
pub async fn read(engine: &str, target: &Target) -> Result<Vec<(u32, PrefixCache)>, String> {
    let asked = target.ask(Method::GET, "/metrics", PATIENCE, PAGE_BYTES_MAX).await;
    let (status, page) = asked.map_err(|why| format!("engine {engine}: GET /metrics: {why}"))?;
    if status != StatusCode::OK {
        return Err(format!("engine {engine}: GET /metrics answered {status}"));
    }
    let caches = prefix_caches(&String::from_utf8_lossy(&page));
    if caches.is_empty() {
        return Err(format!(
            "engine {engine}: its /metrics have no prefix cache counters; enable its metrics and its prefix cache"
        ));
    }
    Ok(caches)
}

/// What the counters of an engine grew by. A rank that is new, or whose counters fell because its engine restarted,
/// counts from zero.
pub fn between(
    engine: &str,
    before: &[(u32, PrefixCache)],
    after: &[(u32, PrefixCache)],
) -> Vec<EngineCache> {
    let rank = |&(rank, now): &(u32, PrefixCache)| {
        let known = before.iter().find(|(other, _)| *other == rank).map(|(_, cache)| *cache);
        let was = known.filter(|was| was.queried_tokens <= now.queried_tokens).unwrap_or_default();
        let queried_tokens = now.queried_tokens - was.queried_tokens;
        let share = |now: u64, was: u64| now.saturating_sub(was) as f64 / queried_tokens.max(1) as f64;
        EngineCache {
            engine: engine.to_owned(),
            rank,
            queried_tokens,
            hit_share: share(now.hit_tokens, was.hit_tokens),
            external_hit_share: share(now.external_hit_tokens, was.external_hit_tokens),
        }
    };
    after.iter().map(rank).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(queried_tokens: u64, hit_tokens: u64, external_hit_tokens: u64) -> PrefixCache {
        PrefixCache { queried_tokens, hit_tokens, external_hit_tokens }
    }

    #[test]
    fn a_run_counts_what_the_counters_grew_by() {
        let before = [(0, cache(100, 50, 10)), (1, cache(5000, 9, 9))];
        let after = [(0, cache(300, 100, 60)), (1, cache(10, 5, 0)), (2, cache(0, 0, 0))];
        let shares: Vec<_> = between("e", &before, &after)
            .into_iter()
            .map(|found| (found.rank, found.queried_tokens, found.hit_share, found.external_hit_share))
            .collect();
        assert_eq!(shares, [(0, 200, 0.25, 0.25), (1, 10, 0.5, 0.0), (2, 0, 0.0, 0.0)], "1 has restarted");
    }
}
