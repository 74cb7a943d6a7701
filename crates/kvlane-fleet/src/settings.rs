//! The configuration of pools and of connections to workers.

use std::time::Duration;

use kvlane_core::block::BYTES_PER_TOKEN;
use kvlane_core::index::{approx, exact};
use kvlane_core::time::Nanos;
use kvlane_core::{breaker, budget, router, scheduler};
use kvlane_http::connections::ConnectionsConfig;

use crate::feed::config::KvEvents;
use crate::routing::{Breaker, Budget, Routing};
use crate::timings::Timings;
use crate::tokenize::Tokens;

/// The sections of the configuration that pools and connections are made from.
#[derive(Clone, Default)]
pub struct Settings {
    /// `routing`.
    pub routing: Routing,
    /// The timing models that `routing` names.
    pub timings: Timings,
    /// `breaker`.
    pub breaker: Breaker,
    /// `retry.budget`.
    pub retries: Budget,
    /// `hedge.budget`.
    pub hedges: Budget,
    /// `kv_events`.
    pub kv_events: KvEvents,
    /// `tokens`.
    pub tokens: Tokens,
    /// `upstream`.
    pub upstream: ConnectionsConfig,
}

// === impl Settings ===

impl Settings {
    /// The configuration of the router of `model`'s pool.
    pub fn router(&self, model: &str) -> router::Config {
        let routing = &self.routing;
        let own = routing.pools.get(model).and_then(|differs| differs.policy.as_ref());
        let policy = own.unwrap_or(&routing.policy);
        let nanos = |span: Duration| Nanos(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX));
        let budget = |Budget { share, per_second }| budget::Config { share, per_second };
        let kv_events = &self.kv_events;
        router::Config {
            scheduler: scheduler::Config {
                in_flight_max: routing.max_concurrent_requests,
                endpoint_in_flight_max: routing.max_requests_per_endpoint,
                queue_len_max: routing.queue_size,
                queue_timeout: nanos(routing.queue_timeout),
                timing: self.timings.of(model).map(|file| Box::new(file.timing.clone())),
                session_admission: routing.session_admission,
                breaker: breaker::Config {
                    failure_threshold: self.breaker.failure_threshold,
                    cooldown: nanos(self.breaker.cooldown),
                    cooldown_max: nanos(self.breaker.cooldown_max),
                    slow_start: nanos(self.breaker.slow_start),
                },
                retries: budget(self.retries),
                hedges: budget(self.hedges),
                shadow: routing.shadow_policy.clone(),
                receipts_max: routing.receipts,
                seed: routing.seed,
                ..scheduler::Config::new(policy.clone())
            },
            index: approx::Config { memory_bytes_max: routing.index_memory, ttl: nanos(routing.index_ttl) },
            exact: kv_events.enabled.then_some(exact::Config { memory_bytes_max: kv_events.index_memory }),
            block_tokens: routing.block_bytes / BYTES_PER_TOKEN as u32,
        }
    }
}
