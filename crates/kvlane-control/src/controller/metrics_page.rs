//! What a worker's `/metrics` says, for the routers of its endpoints.

use std::sync::atomic::Ordering;

use kvlane_core::load::LoadReport;
use kvlane_core::rates::OwnMeasures;
use kvlane_core::scheduler::Input;
use kvlane_fleet::worker::Worker;
use kvlane_wire::engine::{PrefixCache, TokenIntervals, adapter_report, prefix_caches, token_intervals};

use super::Controller;

// === impl Controller ===

impl Controller {
    /// Tells the routers of a worker's endpoints its load by rank, its hits in the prefix cache, the times
    /// between its tokens and its adapters.
    pub(super) fn tell_page(&self, worker: &Worker, page: &str, reports: &[(u32, LoadReport)]) {
        let (caches, intervals) = (prefix_caches(page), token_intervals(page));
        // The page tells of all ranks together.
        let adapters = adapter_report(page).filter(|_| reports.len() == 1);
        for (pool, of) in self.endpoints_of(worker.id) {
            let (endpoint, number) = (of.id, of.number);
            let cache = caches.iter().find(|(rank, _)| *rank == number.unwrap_or(0)).map(|(_, cache)| cache);
            if let Some(cache) = cache {
                pool.metrics.engine_reuse.note(endpoint, *cache);
                let (queries, hits) = (cache.queried_tokens as f64, cache.hit_tokens as f64);
                let block_tokens = pool.router.block_tokens();
                pool.step(Input::Counted { endpoint, queries, hits, block_tokens });
            }
            // A page without ranks says nothing about a single rank.
            let of_it = reports.iter().find(|(rank, _)| number.is_none_or(|number| number == *rank));
            let of_it = of_it.filter(|_| number.is_none() || reports.len() > 1);
            of.load_unknown.store(of_it.is_none(), Ordering::Relaxed);
            if let Some(&(_, reported)) = of_it {
                pool.step(Input::Reported { endpoint, reported });
            }
            let told = intervals.iter().find(|(rank, _)| *rank == number.unwrap_or(0)).map(|(_, told)| told);
            if cache.is_some() || told.is_some() {
                let TokenIntervals { count: intervals, seconds } = told.copied().unwrap_or_default();
                let computed_tokens = cache.map(PrefixCache::computed_tokens);
                let fetched_tokens = cache.map_or(0, |cache| cache.external_hit_tokens);
                let own = OwnMeasures { intervals, seconds, computed_tokens, fetched_tokens };
                pool.step(Input::Measured { endpoint, own });
            }
            if let Some(reported) = adapters.clone() {
                pool.step(Input::Adapters { endpoint, reported });
            }
        }
    }
}
