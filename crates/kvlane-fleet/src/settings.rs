//! The configuration of pools and of connections to workers.

use std::collections::BTreeMap;

use kvlane_core::block::BYTES_PER_TOKEN;
use kvlane_core::index::{approx, exact};
use kvlane_core::{breaker, budget, router, scheduler};
use kvlane_http::connections::ConnectionsConfig;

use crate::adapters::Adapters;
use crate::catalogue::ModelSpec;
use crate::disaggregation::Disaggregation;
use crate::feed::config::KvEvents;
use crate::readiness::Bounds;
use crate::routing::{Breaker, Routing};
use crate::timings::Timings;
use crate::tokenize::Tokens;

/// The sections of the configuration that pools and connections are made from.
#[derive(Clone, Default)]
pub struct Settings {
    /// `models`.
    pub models: BTreeMap<String, ModelSpec>,
    /// `adapters`.
    pub adapters: Adapters,
    /// `routing`.
    pub routing: Routing,
    /// The timing models that `routing` names.
    pub timings: Timings,
    /// `disaggregation`.
    pub disaggregation: Disaggregation,
    /// `breaker`.
    pub breaker: Breaker,
    /// `retry.budget`.
    pub retries: budget::Config,
    /// `hedge.budget`.
    pub hedges: budget::Config,
    /// `kv_events`.
    pub kv_events: KvEvents,
    /// `tokens`.
    pub tokens: Tokens,
    /// `upstream`.
    pub upstream: ConnectionsConfig,
    /// `health.sync_timeout` and `discovery.sync_timeout`.
    pub start: Bounds,
}

// === impl Settings ===

impl Settings {
    /// The configuration of the router of `model`'s pool.
    pub fn router(&self, model: &str) -> router::Config {
        let Self { routing, disaggregation, breaker, kv_events, .. } = self;
        let own = routing.pools.get(model).and_then(|differs| differs.policy.as_ref());
        router::Config {
            scheduler: scheduler::Config {
                policy: own.unwrap_or(&routing.policy).clone(),
                prefill_policy: disaggregation.prefill_policy.clone(),
                split_tokens_min: disaggregation.split_tokens_min,
                max_concurrent_requests: routing.max_concurrent_requests,
                max_requests_per_endpoint: routing.max_requests_per_endpoint,
                queue_size: routing.queue_size,
                queue_timeout: routing.queue_timeout.into(),
                timing: self.timings.of(model).map(|file| Box::new(file.timing.clone())),
                session_admission: routing.session_admission,
                breaker: breaker::Config {
                    failure_threshold: breaker.failure_threshold,
                    cooldown: breaker.cooldown.into(),
                    cooldown_max: breaker.cooldown_max.into(),
                    slow_start: breaker.slow_start.into(),
                },
                retries: self.retries,
                hedges: self.hedges,
                shadow_policy: routing.shadow_policy.clone(),
                receipts: routing.receipts,
                seed: routing.seed,
            },
            index: approx::Config { memory_bytes_max: routing.index_memory, ttl: routing.index_ttl.into() },
            exact: kv_events.enabled.then_some(exact::Config { memory_bytes_max: kv_events.index_memory }),
            block_tokens: routing.block_bytes / BYTES_PER_TOKEN as u32,
        }
    }
}
