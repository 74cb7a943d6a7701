//! The configuration of routers: sections `routing` and `breaker`, and budgets.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use kvlane_core::bounded::Share;
use kvlane_core::budget::PerSecond;
use kvlane_core::policy::{PolicyConfig, name_or_config};
use serde::{Deserialize, Deserializer, Serialize};

use kvlane_core::config::{ConfigError, within};

/// How requests are placed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Routing {
    /// The policy of every pool that `pools` does not name.
    #[serde(deserialize_with = "name_or_config")]
    pub policy: PolicyConfig,
    /// A shadow policy that is evaluated for every decision, for `GET /whatif`.
    #[serde(deserialize_with = "policy_or_none")]
    pub shadow_policy: Option<PolicyConfig>,
    /// Exceptions for the pool of one model.
    pub pools: BTreeMap<String, PoolOverride>,
    /// The timing of the engines: a file written by `kvlane calibrate`, or `model@gpu`. Timing is learned in any
    /// case; this is its initial value.
    pub timing: Option<String>,
    /// Whether new sessions wait while running ones fill the fleet's caches.
    pub session_admission: bool,
    /// Requests in flight per pool beyond which requests are queued; 0 is no limit.
    pub max_concurrent_requests: u32,
    /// Requests in flight per endpoint beyond which it takes none; 0 is no limit. While no endpoint takes any,
    /// requests are queued.
    pub max_requests_per_endpoint: u32,
    /// Queued requests per pool; beyond it requests are rejected with 429.
    pub queue_size: u32,
    /// Longest time of a request in the queue.
    #[serde(with = "humantime_serde")]
    pub queue_timeout: Duration,
    /// Prompt bytes per block of the prefix index.
    pub block_bytes: u32,
    /// Most memory of the prefix index of one pool, in bytes.
    pub index_memory: usize,
    /// Time after which an unused prefix counts as evicted.
    #[serde(with = "humantime_serde")]
    pub index_ttl: Duration,
    /// File in which the index of dispatches is kept over a restart of the gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index_snapshot: Option<PathBuf>,
    /// Time between two snapshots.
    #[serde(with = "humantime_serde")]
    pub index_snapshot_interval: Duration,
    /// Decisions kept per pool for `GET /decisions`.
    pub receipts: u32,
    /// Seed of random choices.
    pub seed: u64,
}

impl Default for Routing {
    fn default() -> Self {
        Self {
            policy: PolicyConfig::FleetCost(Default::default()),
            shadow_policy: None,
            pools: BTreeMap::new(),
            timing: None,
            session_admission: false,
            max_concurrent_requests: 0,
            max_requests_per_endpoint: 0,
            queue_size: 100,
            queue_timeout: Duration::from_secs(60),
            block_bytes: 256,
            index_memory: 256 << 20,
            index_ttl: Duration::from_secs(1800),
            index_snapshot: None,
            index_snapshot_interval: Duration::from_secs(30),
            receipts: 1024,
            seed: 0,
        }
    }
}

/// Settings of one pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PoolOverride {
    /// Its policy.
    #[serde(deserialize_with = "some_policy", skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyConfig>,
    /// The timing of its engines: a timing file, or `model@gpu`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timing: Option<String>,
    /// How its tokens are counted: the path of a tokenizer, `auto`, `engine` or `estimate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// A file with its chat template.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<PathBuf>,
}

/// When an endpoint that fails requests gets no more of them, and for how long.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Breaker {
    /// Failed requests in a row after which it gets none for a while; 0 is never.
    pub failure_threshold: u32,
    /// The first pause. It doubles with each further failure.
    #[serde(with = "humantime_serde")]
    pub cooldown: Duration,
    /// The longest pause.
    #[serde(with = "humantime_serde")]
    pub cooldown_max: Duration,
    /// How long an endpoint that comes back gets less than its share.
    #[serde(with = "humantime_serde")]
    pub slow_start: Duration,
}

impl Default for Breaker {
    fn default() -> Self {
        Self {
            failure_threshold: 3,
            cooldown: Duration::from_secs(1),
            cooldown_max: Duration::from_secs(60),
            slow_start: Duration::from_secs(10),
        }
    }
}

/// A share of the requests, and a minimum rate.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Budget {
    /// Share of the requests that arrive, 0 to 1.
    pub share: Share,
    /// Minimum number per second.
    pub per_second: PerSecond,
}

impl Default for Budget {
    fn default() -> Self {
        Self { share: Share::of(0.2), per_second: PerSecond::of(10.0) }
    }
}

fn some_policy<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PolicyConfig>, D::Error> {
    name_or_config(deserializer).map(Some)
}

fn policy_or_none<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PolicyConfig>, D::Error> {
    #[derive(Deserialize)]
    struct Said(#[serde(deserialize_with = "name_or_config")] PolicyConfig);

    Ok(Option::<Said>::deserialize(deserializer)?.map(|Said(policy)| policy))
}

/// Checks the whole numbers among a policy's parameters; the others have bounded types.
pub fn validate_policy(field: &str, policy: &PolicyConfig) -> Result<(), ConfigError> {
    let count = |name: &str, value: u32, most: u32| within(&format!("{field}.{name}"), value, 1, most);
    match policy {
        PolicyConfig::PrefixAware(config) => {
            count("saturation_inflight", config.saturation_inflight, u32::MAX)
        }
        PolicyConfig::Dynamo(config) => count("block_tokens", config.block_tokens, u32::MAX),
        PolicyConfig::ConsistentHash(config) => count("virtual_nodes", config.virtual_nodes, 4096),
        PolicyConfig::PrefixHash(config) => count("virtual_nodes", config.virtual_nodes, 4096),
        PolicyConfig::Dlpm(config) => count("quantum_tokens", config.quantum_tokens, u32::MAX),
        _ => Ok(()),
    }
}
